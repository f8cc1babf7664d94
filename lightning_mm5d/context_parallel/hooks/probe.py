"""Runs a layer on some tokens and again on single ones: where the results differ, more than its attention mixes tokens.

Meanwhile the attention works on each token by itself. Where ranks have whole items of a batch, the layer runs on some
items, with its own attention.

It raises `MixingError` for layers that mix tokens beside their attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.context_parallel.hooks.arguments import Arguments, item_dim, replaced, token_dim
from lightning_mm5d.context_parallel.hooks.layer_attention import Attention, Call
from lightning_mm5d.context_parallel.hooks.whole_modules import Surveying
from lightning_mm5d.data.random_state import kept_random_state
from lightning_mm5d.partition.hidden_state import at, hidden_place
from lightning_mm5d.sharded.tensor import Sharded

_TOKENS = 8  # that a probe looks at
_OFF = {torch.float64: 1e-4, torch.float32: 1e-3}  # rounding differs by how many tokens there are, mixing by much more
_OFF_16 = 3e-2


class MixingError(Exception):
    """Says what a layer does that depends on other tokens."""


class LayerInput(NamedTuple):
    """What a layer is about to work on.

    Attributes:
        forward: of the layer.
        local: the arguments, of this rank's tokens.
        names: of its positional arguments.
        dim: the sharded dim of the hidden state, from the last: -2 for tokens, less for items.
    """

    forward: Callable[..., Any]
    local: Arguments
    names: tuple[str, ...]
    dim: int

    @property
    def argument_names(self) -> tuple[str, ...]:
        """The names of all arguments that are given."""
        args, kwargs = self.local
        return (*self.names[: len(args)], *(name for name, value in kwargs.items() if value is not None))


class _Result(NamedTuple):
    """What a layer computed of some tokens.

    Attributes:
        hidden: the hidden state ``[..., S, W]``.
        is_own: for each attention in turn, whether it had as many keys as queries.
    """

    hidden: Tensor
    is_own: list[bool]


def probe(
    layer: nn.Module, given: LayerInput, attention: Attention, size: int, whole: Surveying | None = None
) -> tuple[bool, ...]:
    """Return, for each attention of a layer in turn, whether its keys are the tokens of another sequence.

    A token that is alone is the first and the last, so special treatment of an end shows as well.

    Args:
        layer: runs in eval mode meanwhile.
        given: its input.
        attention: of the modality.
        size: tokens of this rank, at least 2, or its items.
        whole: the modules that work on whole sequences, if any.

    Raises:
        MixingError: tokens mix, or what is given with them does not follow them.
    """

    def run(tokens: Tensor) -> _Result:
        return _run(given, attention, tokens, size, whole)

    try:
        with _in_eval_mode(layer), torch.no_grad(), kept_random_state(_device_of(given)):
            for count in range(min(size, _TOKENS), 1, -1) if size > 1 else (1,):
                few = torch.arange(count)
                if whole is not None:
                    whole.learn(lambda tokens, few=few: run(few[:tokens]), count)  # type: ignore[misc]
                places = [*range(count)] if count <= 3 else [1, count // 2, count - 2]
                together = run(few)
                alone = [run(few[place : place + 1]) for place in places]
                if all(one.is_own == together.is_own for one in alone):
                    break  # else another sequence happens to be of this length
    except Exception as error:
        said = f"{error.got}: {error.rule}" if isinstance(error, ConfigError) else error
        raise MixingError(f"fails on some of its tokens ({said})") from error
    _compare(layer, together.hidden, [one.hidden for one in alone], places, count, given.dim)
    return tuple(not is_own for is_own in together.is_own)


def _device_of(given: LayerInput) -> torch.device:
    where = hidden_place(*given.local)
    assert where is not None
    device: torch.device = at(where, *given.local).device
    return device


def _run(given: LayerInput, attention: Attention, tokens: Tensor, size: int, whole: Surveying | None = None) -> _Result:
    """Run the layer on some of its `size` tokens or items."""
    where = hidden_place(*given.local)
    assert where is not None
    state = at(where, *given.local)
    state = state.full() if isinstance(state, Sharded) else state
    tokens = tokens.to(state.device)

    def only(argument: str, value: Any) -> Any:
        if isinstance(value, MutableMapping):  # states that layers share, of this rank's tokens
            return {key: _entry_of(entry, tokens, size) for key, entry in value.items()}
        if hasattr(value, "get_seq_length"):  # a cache, which would keep these
            return None
        if not isinstance(value, Tensor):
            return value
        along = token_dim(argument, value, size) if given.dim == -2 else item_dim(argument, value, size, -given.dim)
        return value if along is None else value.index_select(along, tokens)

    args, kwargs = replaced(given.local, given.names, only, where, state.index_select(given.dim, tokens))
    surveyed = nullcontext() if whole is None else whole.during()
    with surveyed, attention.during(Call(None, is_probe=given.dim == -2)) as call:
        result = given.forward(*args, **kwargs)
    if any(queries != len(tokens) for queries, _ in call.seen):
        raise ValueError(f"its attention has {call.seen[0][0]} queries for {len(tokens)} tokens")
    found: Tensor = result[0] if isinstance(result, (tuple, list)) else result
    is_own = [queries == keys for queries, keys in call.seen]
    return _Result(found.full() if isinstance(found, Sharded) else found, is_own)


def _entry_of(entry: Any, tokens: Tensor, size: int) -> Any:
    """Some tokens of an entry of a dict that layers share."""
    if isinstance(entry, (list, tuple)):
        return type(entry)(_entry_of(one, tokens, size) for one in entry)
    fits = isinstance(entry, Tensor) and entry.dim() > 2 and entry.shape[-2] == size
    return entry.index_select(-2, tokens) if fits else entry


def _compare(
    layer: nn.Module, together: Tensor, alone: Sequence[Tensor], places: Sequence[int], count: int, dim: int
) -> None:
    """Raise `MixingError` where results of single tokens differ from those of `count` tokens."""
    single = torch.cat([*alone], dim)
    if together.shape[dim] != count or single.shape[dim] != len(places):
        raise MixingError(f"returns {together.shape[dim]} tokens for {count}")
    same = together.index_select(dim, torch.tensor(places, device=together.device))
    is_rounded = torch.is_autocast_enabled(single.device.type)
    is_rounded = is_rounded or any(p.dtype.itemsize < 4 for p in layer.parameters())
    allowed = _OFF_16 if is_rounded else _OFF.get(single.dtype, _OFF_16)
    off = (same - single).abs().amax(-1) > allowed * single.abs().amax(-1).clamp_min(1e-6)
    # a router may send a token elsewhere for a rounding; where tokens mix, all of them differ
    if off.float().mean() >= 0.5:
        raise MixingError("computes something else of a token when other tokens are elsewhere")


@contextmanager
def _in_eval_mode(layer: nn.Module) -> Iterator[None]:
    training = {part: part.training for part in layer.modules()}
    layer.eval()
    try:
        yield
    finally:
        for part, value in training.items():
            part.training = value
