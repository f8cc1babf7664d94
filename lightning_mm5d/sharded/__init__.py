"""Tensors that stand for a full one held in parts by several ranks, and their collectives."""

from lightning_mm5d.sharded import operations  # noqa: F401  registers what a sharded tensor computes on its parts
