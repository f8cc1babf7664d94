"""Attention over tiles on one rank, forward and backward."""
