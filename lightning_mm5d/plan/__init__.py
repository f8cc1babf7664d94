"""The plan: layout and partition combined into stages, their ranks, their graph and the owners of parameters."""

from lightning_mm5d.plan.plan import Plan
