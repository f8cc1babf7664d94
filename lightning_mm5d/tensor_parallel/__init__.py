"""Tensor parallelism: layers divided over the ranks of a group."""
