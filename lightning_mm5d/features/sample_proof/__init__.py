"""Ranks of a replica prove that they have read the same samples."""
