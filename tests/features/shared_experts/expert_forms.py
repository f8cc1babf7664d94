"""Layers of experts in forms that people write by hand, beside those of `handwritten_experts`.

Shapes: B samples, S tokens, T tokens of all samples, H width, E experts, K chosen of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_mm5d import ExpertParallelPlan
from zoo.handwritten import WIDTH

from .handwritten_experts import CHOSEN, Listed, Perceptron


class Soft(nn.Module):
    """Every expert gets all samples ``[B, S, H]``, and looks over the tokens of each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count)
        self.branches = nn.ModuleList(OverTokens() for _ in range(count))

    def forward(self, hidden: Tensor) -> Tensor:
        weights = self.gate(hidden).softmax(-1)
        return sum(weights[..., n, None] * one(hidden) for n, one in enumerate(self.branches))  # type: ignore[return-value]


class OverTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Perceptron()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden - hidden.mean(1, keepdim=True))


class Skipping(nn.Module):
    """A dictionary of experts, called in the order of their numbers of tokens, without those that nobody chose."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleDict({f"expert_{n}": Perceptron() for n in range(count)})

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2)
        weights, index = self.gate(rows).softmax(-1).max(-1)
        result = torch.zeros_like(rows)
        counts = torch.bincount(index, minlength=len(self.experts)).tolist()
        for number in sorted(range(len(counts)), key=counts.__getitem__, reverse=True):
            if counts[number] > 1:
                (tokens,) = torch.where(index == number)
                result[tokens] += self.experts[f"expert_{number}"](rows[tokens]) * weights[tokens, None]
        return result.view_as(hidden)


class Own(nn.Module):
    """Tensors of experts in the layer itself."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.up = nn.Parameter(torch.randn(count, WIDTH, WIDTH) / 6)
        self.amount = count

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2)
        weights, index = self.router(rows).softmax(-1).topk(CHOSEN)
        result = torch.zeros_like(rows)
        for number in range(self.amount):
            tokens, places = torch.where(index == number)
            result = result.index_add(
                0, tokens, (rows[tokens] @ self.up[number]).tanh() * weights[tokens, places, None]
            )
        return result.view_as(hidden)


class Stack(nn.Module):
    """The tensors of `Planned`."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, WIDTH, WIDTH) / 6)
        self.size = count

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [E, T, H]."""
        return (rows @ self.up).tanh()


class Planned(nn.Module):
    """All experts get all tokens; those that were not chosen count nothing."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.pool = Stack(count)
        self.shared = Perceptron()

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        weights, index = self.router(rows).softmax(-1).topk(CHOSEN)
        return weights, index

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2)
        weights, index = self.route(rows)
        dense = torch.zeros(len(rows), self.pool.size).scatter(1, index, weights)  # [T, E]
        every = self.pool(rows.expand(self.pool.size, -1, -1))
        return (torch.einsum("te,eth->th", dense, every) + self.shared(rows)).view_as(hidden)


def planned(layer: Any, exchange: Any, hidden: Tensor) -> Tensor:
    rows = hidden.flatten(0, -2)
    weights, index = layer.route(rows)
    return (exchange(rows, index, weights) + layer.shared(rows)).view_as(hidden)


def computed(pool: Any, rows: Tensor, index: Tensor) -> Tensor:
    return torch.einsum("ph,phk->pk", rows, pool.up[index]).tanh()


class ListedByPlan(Listed):
    """As `Listed`, with a plan."""


def listed(layer: Any, exchange: Any, hidden: Tensor) -> Tensor:
    weights, index = layer.gate(hidden).softmax(-1).topk(CHOSEN)
    chosen = nn.functional.one_hot(index, len(layer.experts)).sum(-2)
    kept = (chosen.cumsum(1) <= layer.capacity).gather(-1, index)
    rows, weights, index = (one.flatten(0, -2) for one in (hidden, weights * kept, index))
    return exchange(rows, index, weights).view_as(hidden)


PLANS = {
    "Planned": ExpertParallelPlan(experts="pool", number="size", forward=planned, compute=computed),
    "ListedByPlan": ExpertParallelPlan(experts="experts", forward=listed),
}
FORMS = {"soft": Soft, "skipping": Skipping, "planned": Planned, "listed_by_plan": ListedByPlan}
