"""Sequences shared by several ranks: who holds which tokens, and how their attention sees all of them."""
