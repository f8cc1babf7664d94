"""Projectors: from the width of an encoder's features to the width of a language model's embeddings.

Some also change how many rows an item has; `projected_length` tells how many, without running anything.

Shapes: N items of equal length, L rows of an item, D width of the encoder, E width of the language model, H x W the
grid of patches whose rows are the L rows.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from lightning_mm5d.config.errors import ConfigError, did_you_mean

_KINDS = ("linear", "mlp", "pixel_shuffle", "average_pool", "query_former")
Grid = tuple[int, int] | None


@dataclass(frozen=True, kw_only=True)
class ProjectorConfig:
    """What a projector is made of.

    Attributes:
        kind: ``linear``, ``mlp``, ``pixel_shuffle`` (squares of neighbouring patches become one wider row, then an
            MLP), ``average_pool`` (the mean of neighbouring rows, then an MLP) or ``query_former`` (learned queries
            attend to the features: every item has as many rows as there are queries).
        depth: linear layers of an MLP.
        activation: between them, and in a query former; a name that transformers knows.
        bias: whether linear layers have a bias.
        factor: side of the squares of ``pixel_shuffle``.
        kernel: side of the squares of ``average_pool``; its length where rows form no grid.
        queries: rows of an item after a ``query_former``.
        layers: of a query former.
        heads: of its attention; they divide the width of the language model.
    """

    kind: str = "mlp"
    depth: int = 2
    activation: str = "gelu"
    bias: bool = True
    factor: int = 2
    kernel: int = 2
    queries: int = 64
    layers: int = 2
    heads: int = 8

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            rule = "There is no such projector"
            raise ConfigError("projector.kind", self.kind, rule, did_you_mean(self.kind, _KINDS))
        for name in ("depth", "factor", "kernel", "queries", "layers", "heads"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise ConfigError(f"projector.{name}", value, "It counts something", "Use 1 or more")
        if self.activation not in ACT2FN:
            rule = "transformers has none of this name"
            raise ConfigError("projector.activation", self.activation, rule, 'Use "gelu"')

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON can hold them."""
        return asdict(self)


def projected_length(config: ProjectorConfig, length: int, grid: Grid) -> int:
    """Return how many rows an item of `length` rows has after the projector.

    Args:
        config: of the projector.
        length: L.
        grid: of its patches, if any.

    Raises:
        ConfigError: the kind needs a grid that it can cut into squares, and there is none.
    """
    if config.kind == "pixel_shuffle":
        height, width = _grid(config, length, grid, config.factor)
        return (height // config.factor) * (width // config.factor)
    if config.kind == "average_pool":
        if grid is None:
            return -(-length // config.kernel)
        return -(-grid[0] // config.kernel) * -(-grid[1] // config.kernel)
    return config.queries if config.kind == "query_former" else length


def build_projector(config: ProjectorConfig, input_width: int, output_width: int) -> nn.Module:
    """Return a new projector.

    Args:
        config: what it is made of.
        input_width: D.
        output_width: E.
    """
    classes: dict[str, type[nn.Module]] = {
        "pixel_shuffle": PixelShuffleProjector,
        "average_pool": AveragePoolProjector,
        "query_former": QueryFormer,
    }
    return classes.get(config.kind, Projector)(config, input_width, output_width)


class Projector(nn.Module):
    """Linear layers with activations between them, each row by itself; ``linear`` is one layer."""

    def __init__(self, config: ProjectorConfig, input_width: int, output_width: int) -> None:
        super().__init__()
        self.config = config
        depth = 1 if config.kind == "linear" else config.depth
        widths = [input_width] + [output_width] * depth
        self.steps = [f"fc{step}" for step in range(1, depth + 1)]
        for name, one, other in zip(self.steps, widths, widths[1:], strict=False):
            self.add_module(name, nn.Linear(one, other, bias=config.bias))
        self.activation = ACT2FN[config.activation]

    def forward(self, features: Tensor, grid: Grid = None) -> Tensor:
        """(N, L, D) -> (N, L, E)."""
        hidden = self.get_submodule(self.steps[0])(features)
        for name in self.steps[1:]:
            hidden = self.get_submodule(name)(self.activation(hidden))
        return hidden


class PixelShuffleProjector(Projector):
    """Each square of ``factor`` x ``factor`` patches becomes one row, which linear layers project."""

    def __init__(self, config: ProjectorConfig, input_width: int, output_width: int) -> None:
        super().__init__(config, input_width * config.factor**2, output_width)

    def forward(self, features: Tensor, grid: Grid = None) -> Tensor:
        """(N, H * W, D) -> (N, H / factor * W / factor, E)."""
        items, length, width = features.shape
        factor = self.config.factor
        rows, columns = _grid(self.config, length, grid, factor)
        squares = features.view(items, rows // factor, factor, columns // factor, factor, width)
        return super().forward(squares.transpose(2, 3).reshape(items, length // factor**2, factor**2 * width))


class AveragePoolProjector(Projector):
    """The mean of ``kernel`` x ``kernel`` patches, or of ``kernel`` rows, which linear layers project."""

    def forward(self, features: Tensor, grid: Grid = None) -> Tensor:
        """(N, L, D) -> (N, ceil(L / kernel), E), or ceil of both sides of a grid; means at the end have fewer rows."""
        kernel, channels = self.config.kernel, features.transpose(1, 2)
        if grid is None:
            pooled = F.avg_pool1d(channels, kernel, ceil_mode=True)
        else:
            pooled = F.avg_pool2d(channels.unflatten(2, grid), kernel, ceil_mode=True).flatten(2)
        return super().forward(pooled.transpose(1, 2))


class QueryFormer(nn.Module):
    """Learned queries that attend to the features of an item, layer after layer."""

    def __init__(self, config: ProjectorConfig, input_width: int, output_width: int) -> None:
        super().__init__()
        self.config = config
        if output_width % config.heads:
            fits = [n for n in range(1, output_width + 1) if output_width % n == 0]
            rule = f"They must divide the language model's width of {output_width}"
            raise ConfigError("projector.heads", config.heads, rule, f"Use one of {', '.join(map(str, fits))}")
        self.queries = nn.Parameter(torch.empty(config.queries, output_width))
        self.input_norm = nn.LayerNorm(input_width)
        self.layers = nn.ModuleList(QueryFormerLayer(config, input_width, output_width) for _ in range(config.layers))
        self.norm = nn.LayerNorm(output_width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new queries; layers have their own method."""
        nn.init.normal_(self.queries, std=0.02)

    def forward(self, features: Tensor, grid: Grid = None) -> Tensor:
        """(N, L, D) -> (N, queries, E)."""
        features = self.input_norm(features)
        hidden = self.queries.expand(len(features), -1, -1)
        for layer in self.layers:
            hidden = layer(hidden, features)
        return self.norm(hidden)


class QueryFormerLayer(nn.Module):
    """Cross-attention of queries to features, then two linear layers; norms come first, sums after."""

    def __init__(self, config: ProjectorConfig, input_width: int, output_width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(output_width)
        self.attention = QueryFormerAttention(config, input_width, output_width)
        self.mlp_norm = nn.LayerNorm(output_width)
        self.mlp = QueryFormerMLP(config, output_width)

    def forward(self, hidden: Tensor, features: Tensor) -> Tensor:
        """(N, queries, E) and (N, L, D) -> (N, queries, E)."""
        hidden = hidden + self.attention(self.attention_norm(hidden), features)
        return hidden + self.mlp(self.mlp_norm(hidden))


class QueryFormerAttention(nn.Module):
    """Attention of queries to the features of their item."""

    def __init__(self, config: ProjectorConfig, input_width: int, output_width: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.heads, output_width // config.heads
        self.q_proj = nn.Linear(output_width, output_width, bias=config.bias)
        self.k_proj = nn.Linear(input_width, output_width, bias=config.bias)
        self.v_proj = nn.Linear(input_width, output_width, bias=config.bias)
        self.o_proj = nn.Linear(output_width, output_width, bias=config.bias)

    def forward(self, hidden: Tensor, features: Tensor) -> Tensor:
        """(N, queries, E) and (N, L, D) -> (N, queries, E)."""
        query = self.q_proj(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        key = self.k_proj(features).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        value = self.v_proj(features).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(query, key, value)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class QueryFormerMLP(nn.Module):
    """Two linear layers, the first of which is four times as wide."""

    def __init__(self, config: ProjectorConfig, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width, bias=config.bias)
        self.activation = ACT2FN[config.activation]
        self.fc2 = nn.Linear(4 * width, width, bias=config.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """(N, queries, E) -> (N, queries, E)."""
        return self.fc2(self.activation(self.fc1(hidden)))


def _grid(config: ProjectorConfig, length: int, grid: Grid, factor: int) -> tuple[int, int]:
    """The grid of an item's patches, a square where none is given."""
    side = math.isqrt(length)
    height, width = grid or (side, side)
    if height * width != length or height % factor or width % factor:
        got = f"{length} rows" if height * width != length else f"a grid of {height} x {width}"
        rule = f"Its features must be a grid of patches whose sides {factor} divides"
        fix = "Drop class tokens by ModalityEncoder(after=...), choose another factor, or use projector='mlp'"
        raise ConfigError(f"projector.{'factor' if height * width == length else 'kind'}", got, rule, fix)
    return height, width
