"""Layers that mix tokens in ways of their own, on ranks that share sequences, train as on one process.

Such modules run on whole sequences, or the whole layer does. Ranks 0 and 1 share each sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from features.toys import Layout, Run, outcomes
from lightning_mm5d.context_parallel.hooks.whole_modules import Reader
from tensor_parallel.layouts import batches_of, build
from zoo.case import Batch, TinyModule
from zoo.handwritten import WIDTH, Layer, OwnLayers

from .runs import same_steps, steps
from .test_refusals import LANGUAGE, SHARED, tokens

pytestmark = pytest.mark.usefixtures("float64")


# --- by their code ---


class Convolving(Layer):
    """A convolution over tokens behind the attention."""

    def __init__(self) -> None:
        super().__init__(causal=True)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = super().forward(hidden)
        return hidden + self.conv(hidden.mT).mT


class Mixer(nn.Module):
    """A cumulative mean, in a module of its own."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.cumsum(1) / 10


class Summing(Layer):
    def __init__(self) -> None:
        super().__init__(causal=True)
        self.mixer = Mixer()

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + self.mixer(hidden)


class Recurrent(Layer):
    def __init__(self) -> None:
        super().__init__(causal=True)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + self.rnn(hidden)[0]


class ByHand(nn.Module):
    """Attention without torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(hidden).chunk(3, -1)
        scores = (q @ k.mT).masked_fill(torch.ones(len(q[0]), len(q[0])).triu(1).bool(), -torch.inf)
        return hidden + scores.softmax(-1) @ v


class Multihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]


class OfTorch(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(WIDTH, 4, 64, dropout=0.0, batch_first=True, norm_first=True)


class CountingInAttention(nn.Module):
    """Rotary positions made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(hidden).unflatten(-1, (3, 4, -1)).unbind(dim=-3)
        turn = torch.arange(hidden.shape[1]).view(1, -1, 1, 1) * 0.3
        q, k = (torch.cat([x[..., ::2] * turn.cos(), x[..., 1::2] * turn.sin()], -1) for x in (q, k))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return hidden + out.transpose(1, 2).flatten(-2)


class SequenceFirst(Layer):
    """Its hidden states are ``[S, B, W]``."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.transpose(0, 1)).transpose(0, 1)


OWN: dict[type[nn.Module], dict[str, str]] = {
    Convolving: {"conv": "mixes tokens"},
    Summing: {"mixer": "works on whole sequences (cumsum)"},
    Recurrent: {"rnn": "mixes tokens"},
    ByHand: {"": "has no attention that is known"},
    Multihead: {"attention": "mixes tokens"},
    OfTorch: {"": "mixes tokens"},
    CountingInAttention: {"": "counts positions in what it is given"},
}


@pytest.mark.parametrize("layer", OWN, ids=lambda layer: layer.__name__)
def test_modules_that_mix_tokens_are_found_by_their_code(layer: type[nn.Module]) -> None:
    assert Reader().mixers(layer()).whole == OWN[layer]


# --- what only running shows ---


class Sized(Layer):
    """Attention with a bias of its own, by torch's function."""

    def __init__(self) -> None:
        super().__init__(causal=False)
        self.slope = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(hidden).unflatten(-1, (3, 4, -1)).transpose(1, 3).unbind(dim=2)
        size = hidden.shape[1]
        bias = self.slope * torch.ones(size, size)
        return hidden + F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(-2)


class OfFunctions(Layer):
    """Mixes by functions that have many uses."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__(causal=True)
        self.mix = mix

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(hidden)).unflatten(-1, (3, 4, -1)).transpose(1, 3).unbind(dim=2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mix(hidden + self.out(out.transpose(1, 2).flatten(-2)))


def running_mean(hidden: Tensor) -> Tensor:
    return hidden + hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1).view(1, -1, 1)


def mean(hidden: Tensor) -> Tensor:
    return hidden + hidden.mean(1, keepdim=True)


def shift(hidden: Tensor) -> Tensor:
    """Token shift, as in RWKV."""
    return hidden + 0.5 * F.pad(hidden, (0, 0, 1, -1))


def positions(hidden: Tensor) -> Tensor:
    return hidden + 0.1 * torch.arange(hidden.shape[1]).view(1, -1, 1).to(hidden.dtype)


def first_to_all(hidden: Tensor) -> Tensor:
    return hidden + hidden[:, :1].tanh()


def to_the_first(hidden: Tensor) -> Tensor:
    return torch.cat([hidden[:, :1] * 2, hidden[:, 1:]], 1)


def last_to_all(hidden: Tensor) -> Tensor:
    return hidden + hidden[:, -1:].tanh()


def normalized(hidden: Tensor) -> Tensor:
    return F.normalize(hidden, dim=1) * 5


def flipped(hidden: Tensor) -> Tensor:
    return hidden + hidden.flip(1)


def of_fixed_length(hidden: Tensor) -> Tensor:
    return hidden * torch.linspace(0.5, 1, 16).view(1, 16, 1)


MIXES = (
    running_mean,
    mean,
    shift,
    positions,
    first_to_all,
    to_the_first,
    last_to_all,
    normalized,
    flipped,
    of_fixed_length,
)


class Transposing(OwnLayers):
    """Gives its layers ``[S, B, W]``."""

    def __init__(self) -> None:
        super().__init__(lambda: SequenceFirst(causal=True))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        hidden = self.embedding(batch["input_ids"]).transpose(0, 1)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden.transpose(0, 1))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


class Calling(TinyModule):
    """Calls its model as `call` says."""

    def __init__(self, call: Callable[[Any, Batch], Tensor]) -> None:
        super().__init__(build("llama").model)
        self.call = call

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.call(self.model, batch)


def with_a_bias_of_scores(model: Any, batch: Batch) -> Tensor:
    size = batch["input_ids"].shape[1]
    bias = torch.zeros(1, 1, size, size).masked_fill(torch.ones(size, size).triu(1).bool(), -torch.inf) - 0.5
    return model(batch["input_ids"], attention_mask=bias, use_cache=False).logits.square().mean()


def with_a_mask_for_each_head(model: Any, batch: Batch) -> Tensor:
    size = batch["input_ids"].shape[1]
    mask = torch.ones(len(batch["input_ids"]), 4, size, size).tril().bool()
    return model(batch["input_ids"], attention_mask=mask, use_cache=False).logits.square().mean()


def mixing() -> list[tuple[str, Callable[[], L.LightningModule], list[Any]]]:
    """What mixes tokens, with batches of 2 tokens for each rank, 8 and more, in turns."""
    found: list[tuple[str, Callable[[], L.LightningModule], list[Any]]] = []
    for layer in (*OWN, Sized):
        found.append((layer.__name__, lambda layer=layer: OwnLayers(layer), [tokens(13), tokens(33)]))
    for number, mix in enumerate(MIXES):
        lengths = (16,) if mix is of_fixed_length else ((4, 33), (5, 16))[number % 2]
        make = lambda mix=mix: OwnLayers(lambda: OfFunctions(mix))  # noqa: E731
        found.append((mix.__name__, make, [tokens(length) for length in lengths]))
    found.append(("few at first", lambda: OwnLayers(lambda: OfFunctions(mean)), [tokens(2), tokens(12)]))
    found.append(("sequence first", Transposing, [tokens(12)]))
    return found


def test_layers_that_mix_tokens_in_any_way_train_as_on_one_process() -> None:
    def scenario(run: Run) -> dict[str, Any]:
        return {name: steps(run, make(), batches) for name, make, batches in mixing()}

    outcome = outcomes(Layout(LANGUAGE, 2), scenario)["scenario"]
    for name in outcome.one:
        part = type(outcome)(outcome.one[name], [rank[name] for rank in outcome.ranks])
        same_steps(part, 1e-9)


def test_masks_that_add_to_scores_or_differ_by_head_train_as_on_one_process() -> None:
    def scenario(run: Run) -> list[Any]:
        calls = (with_a_bias_of_scores, with_a_mask_for_each_head)
        return [steps(run, Calling(call), batches_of("llama", 2)) for call in calls]

    outcome = outcomes(Layout(SHARED, 2), scenario)["scenario"]
    for one, *ranks in zip(outcome.one, *outcome.ranks, strict=True):
        same_steps(type(outcome)(one, ranks), 1e-6)
