"""Tensor parallelism: layers divided over the ranks of a group."""

from lightning_mm5d.tensor_parallel import divided_rules  # noqa: F401  makes them known
