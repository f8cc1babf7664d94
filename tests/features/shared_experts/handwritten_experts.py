"""A decoder with mixtures of experts that no library knows, in four forms, in plain PyTorch.

`Stacked` keeps its experts in tensors of a module that gets the chosen experts and their weights. `Listed` keeps a list
of modules, of which its own forward picks rows, and each takes a number of tokens of a sample at most. `Gated` chooses
by a sigmoid, a correction bias and groups, and adds an expert that is shared. `EveryExpert` passes each token through
all experts. Everything is float64 where parameters are.

Shapes: B samples, S tokens, T tokens of all samples, H width, F width inside of an expert, E experts, K chosen of them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import VOCABULARY
from zoo.handwritten import WIDTH, Layer, OneEncoder, next_token_loss

INNER, CHOSEN = 20, 2


class StackedExperts(nn.Module):
    """Rows [T, H], their experts [T, K] and weights [T, K] -> weighted sums [T, H]."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.up = nn.Parameter(torch.randn(count, WIDTH, INNER) / 6)
        self.up_bias = nn.Parameter(torch.zeros(count, INNER))
        self.down = nn.Parameter(torch.randn(count, INNER, WIDTH) / 6)

    def forward(self, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(rows)
        for expert in range(self.count):
            tokens, places = torch.where(index == expert)
            inner = F.gelu(rows[tokens] @ self.up[expert] + self.up_bias[expert])
            result = result.index_add(0, tokens, inner @ self.down[expert] * weights[tokens, places, None])
        return result


class Stacked(nn.Module):
    """A softmax over all experts, of which the largest two are scaled to a sum of one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.experts = StackedExperts(count)

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2)
        weights, index = self.router(rows).softmax(-1).topk(CHOSEN)
        return self.experts(rows, index, weights / weights.sum(-1, keepdim=True)).view_as(hidden)


class Perceptron(nn.Sequential):
    """One expert, or the shared one."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH, bias=False))


class Listed(nn.Module):
    """A list of experts; each takes the first `capacity` tokens of a sample that choose it, and no others."""

    capacity = 6

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count, bias=False)
        self.experts = nn.ModuleList(Perceptron() for _ in range(count))

    def forward(self, hidden: Tensor) -> Tensor:
        weights, index = self.gate(hidden).softmax(-1).topk(CHOSEN)  # [B, S, K]
        chosen = F.one_hot(index, len(self.experts)).sum(-2)  # [B, S, E]
        kept = (chosen.cumsum(1) <= self.capacity).gather(-1, index)
        rows, result = hidden.flatten(0, -2), torch.zeros_like(hidden).flatten(0, -2)
        weights, index, kept = (value.flatten(0, -2) for value in (weights, index, kept))
        for number, expert in enumerate(self.experts):
            tokens, places = torch.where((index == number) & kept)
            result = result.index_add(0, tokens, expert(rows[tokens]) * weights[tokens, places, None])
        return result.view_as(hidden)


class Gated(nn.Module):
    """Scores by a sigmoid; a bias without gradient and groups decide which are chosen; one expert is shared."""

    groups = 2

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count, bias=False)
        self.register_buffer("correction", torch.linspace(-0.1, 0.1, count))
        self.experts = StackedExperts(count)
        self.shared = Perceptron()

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2)
        scores = self.gate(rows).sigmoid()
        corrected = (scores + self.correction).unflatten(-1, (self.groups, -1))  # [T, groups, E / groups]
        best = corrected.topk(CHOSEN).values.sum(-1).argmax(-1)
        group = F.one_hot(best, self.groups).bool().unsqueeze(-1)
        index = corrected.masked_fill(~group, -torch.inf).flatten(1).topk(CHOSEN).indices
        routed = self.experts(rows, index, scores.gather(-1, index))
        return (routed + self.shared(rows)).view_as(hidden)


class EveryExpert(nn.Module):
    """Each token passes all experts, weighted by a softmax."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.gate = nn.Linear(WIDTH, count, bias=False)
        self.experts = StackedExperts(count)

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2)
        index = torch.arange(self.count, device=rows.device).expand(len(rows), -1)
        return self.experts(rows, index, self.gate(rows).softmax(-1)).view_as(hidden)


class MixtureLayer(nn.Module):
    """An ordinary layer, and a mixture of experts after it."""

    def __init__(self, mixture: nn.Module, *, causal: bool = True) -> None:
        super().__init__()
        self.dense = Layer(causal=causal)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = mixture

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.dense(hidden)
        return hidden + self.mlp(self.norm(hidden))


class HandwrittenMixture(nn.Module):
    """Tokens [B, S] and labels -> the loss of the next token. `mixture` makes the experts of each of two layers."""

    def __init__(self, mixture: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(MixtureLayer(mixture()) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> SimpleNamespace:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return SimpleNamespace(loss=next_token_loss(self.head(self.norm(hidden)), labels))


class TwoMixtures(OneEncoder):
    """The zoo's model with one encoder, with experts in the encoder and others in the language model."""

    def __init__(self, encoder: Callable[[], nn.Module], decoder: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.encoder.layers = nn.ModuleList(MixtureLayer(encoder(), causal=False) for _ in range(2))
        self.decoder.layers = nn.ModuleList(MixtureLayer(decoder()) for _ in range(2))
