"""Layout and partition put together: the stages, which ranks run them and who owns which parameter."""

from lightning_mm5d.plan.plan import Plan

__all__ = ["Plan"]
