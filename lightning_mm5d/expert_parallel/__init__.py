"""Experts shared over ranks: which modules hold them, and how tokens come to the ranks that hold theirs."""
