"""Attention of local queries to the keys of all ranks: all-gather, ring, Ulysses and hybrid."""
