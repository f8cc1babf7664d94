"""Tensors sharded over ranks that act as full ones, and their collectives."""

from lightning_mm5d.sharded import operations  # registers the rules of sharded tensors
