"""Code of layers that mixes columns or samples of a hidden state in blocks is refused by name; other code is not."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP

from lightning_mm5d.config.errors import ConfigError
from tensor_parallel.families import FAMILIES

from .test_grid_families import GRIDS, divided_on, layers_of


class Centered(LlamaDecoderLayer):
    """Does to the hidden state what a rank cannot do to its columns."""

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(hidden_states, *args, **kwargs)
        return result - result.mean(-1, keepdim=True)


class OnlySuper(Centered):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Normed(LlamaDecoderLayer):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result: Any = super().forward(*args, **kwargs)
        return result / result.norm(dim=-1, keepdim=True)


class Largest(LlamaDecoderLayer):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result: Any = super().forward(*args, **kwargs)
        return result / self.largest(result)

    def largest(self, result: Any) -> Any:
        return result.abs().max(-1, keepdim=True).values


class Beside(LlamaDecoderLayer):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return centered(super().forward(*args, **kwargs))


class Product(LlamaDecoderLayer):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result: Any = super().forward(*args, **kwargs)
        return result @ torch.eye(result.shape[-1])


class Aliased(LlamaDecoderLayer):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        smooth = partial(torch.softmax, dim=-1)
        return smooth(super().forward(*args, **kwargs))


class Nested(LlamaDecoderLayer):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result: Any = super().forward(*args, **kwargs)
        return self.softened(result)


class ByEntry(LlamaDecoderLayer):
    """Names what mixes, and calls none of it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result: Any = super().forward(*args, **kwargs)
        largest = torch.finfo(result.dtype).max
        return self.norm(result).clamp(-largest, max(largest, 0.0))

    def norm(self, result: Any) -> Any:
        return result * 2

    def unused(self, result: Any) -> Any:
        return result.mean(-1)


def centered(result: Any) -> Any:
    return result - around(result)


def around(result: Any) -> Any:
    return torch.mean(result, -1, keepdim=True)


def hidden() -> type[nn.Module]:
    scope: dict[str, Any] = {"Base": LlamaDecoderLayer}
    exec("class Hidden(Base):\n    def forward(self, *args, **kwargs):\n        return args[0]\n", scope)
    found: type[nn.Module] = scope["Hidden"]
    return found


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Centered, r"layers\.1 .*Centered mixes columns or samples, by mean"),
        (OnlySuper, "OnlySuper mixes columns or samples, by mean"),
        (Normed, "by norm"),
        (Largest, "by max"),
        (Beside, "by mean"),
        (Product, "by @"),
        (Aliased, "by softmax"),
        (Nested, r"layers\.1\.softened .*Softmax is a layer of torch that mixes"),
        (hidden(), "Hidden has code without source"),
        (ByEntry, None),
    ],
)
def test_code_that_mixes_columns_is_refused_by_name(kind: type[nn.Module], why: str | None) -> None:
    root: Any = FAMILIES["llama"].build()
    layer = root.get_submodule(layers_of(root)[1])
    layer.__class__ = kind
    if kind is Nested:
        layer.softened = nn.Softmax(-1)
    if why is None:
        divided_on(root, GRIDS["2d"])
        return
    with pytest.raises(ConfigError, match=why):
        divided_on(root, GRIDS["2d"])


class NormedInput(LlamaMLP):
    def forward(self, x: Any) -> Any:
        return super().forward(x / x.norm(dim=-1, keepdim=True))


class WithinItsArguments(LlamaMLP):
    def forward(self, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x.softmax(-1))) * self.up_proj(x))


class CenteredInput(LlamaAttention):
    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states - centered(hidden_states), *args, **kwargs)


class SortedResult(LlamaMLP):
    def forward(self, x: Any) -> Any:
        result = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return result.sort(-1).values


class NormedResult(LlamaMLP):
    def forward(self, x: Any) -> Any:
        return F.normalize(self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)), dim=-1)


class CumulativeResult(LlamaMLP):
    def forward(self, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)).cumsum(-1)


class ByKeyword(LlamaMLP):
    def forward(self, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(input=x.flip(-1))) * self.up_proj(x))


class InALoop(LlamaMLP):
    def forward(self, x: Any) -> Any:
        found = 0
        for part in x.chunk(2, -1):
            found = found + part.sigmoid()
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) + found


class Spectral(LlamaMLP):
    def forward(self, x: Any) -> Any:
        x = torch.fft.fft(x).real / torch.linalg.norm(x, dim=-1, keepdim=True)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Wrapping(LlamaMLP):
    def forward(self, x: Any) -> Any:
        return super().forward(x)


class Inheriting(Wrapping):
    forward = Wrapping.forward


class WithHelpers(LlamaAttention):
    """Computes with its layers in methods of its own; mixes sizes, words and heads alone."""

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        width = math.prod(hidden_states.shape[-1:])
        q, k, v = self.project(hidden_states[..., :width])
        found = F.scaled_dot_product_attention(q, k, v, is_causal=["a", "b"] == ["a", "b"])
        return self.o_proj(torch.cat([found], dim=-1).transpose(1, 2).flatten(-2)), None

    def project(self, x: Any) -> Any:
        states = [layer(x) for layer in (self.q_proj, self.k_proj, self.v_proj)]
        return [state.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for state in states]


class EntryByEntry(LlamaMLP):
    """Changes its input without mixing."""

    def forward(self, x: Any) -> Any:
        x = x + x.abs().clamp(max=1.0)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize(
    ("part", "kind", "why"),
    [
        ("mlp", NormedInput, r"0\.mlp .*NormedInput mixes columns or samples of its input or result, by norm"),
        ("mlp", WithinItsArguments, "by softmax"),
        ("self_attn", CenteredInput, "by mean"),
        ("mlp", SortedResult, "by sort"),
        ("mlp", NormedResult, "by normalize"),
        ("mlp", CumulativeResult, "by cumsum"),
        ("mlp", ByKeyword, "by flip"),
        ("mlp", InALoop, "by chunk"),
        ("mlp", Spectral, "by fft, norm"),
        ("mlp", EntryByEntry, None),
        ("mlp", Inheriting, None),
        ("self_attn", WithHelpers, None),
    ],
)
def test_code_around_attentions_and_units_is_read(part: str, kind: type[nn.Module], why: str | None) -> None:
    root: Any = FAMILIES["llama"].build()
    getattr(root.get_submodule(layers_of(root)[0]), part).__class__ = kind
    if why is None:
        divided_on(root, GRIDS["2d"])
        return
    with pytest.raises(ConfigError, match=why):
        divided_on(root, GRIDS["2d"])


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.survival = 0.9

    def forward(self, x: Any) -> Any:
        return x


def test_what_drops_samples_at_a_rate_without_a_known_name_is_refused() -> None:
    root: Any = FAMILIES["llama"].build()
    root.get_submodule(layers_of(root)[0]).kept = StochasticDepth()
    with pytest.raises(ConfigError, match="StochasticDepth drops whole samples"):
        divided_on(root, GRIDS["2d"])


def test_a_linear_layer_without_a_plan_is_refused_with_the_layer_that_would_say_one() -> None:
    root: Any = FAMILIES["llama"].build()
    root.get_submodule(layers_of(root)[0]).plain = nn.Linear(32, 32)
    with pytest.raises(ConfigError, match="Say sharding='column' or 'row'"):
        divided_on(root, GRIDS["2d"])
