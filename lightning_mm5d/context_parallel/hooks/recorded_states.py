"""What transformers records of modules inside of shared layers, such as the logits of routers, as values of all tokens.

A model that is asked for them (``output_router_logits``) notes what such modules return, by hooks. In a shared layer
that is of this rank's tokens; the loss over routers must see all. transformers has no public way to look at its notes,
so this is the one place that reaches for them.

It refuses (`ConfigError`) records of which it cannot tell how they count tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.context_parallel.hooks.private_names import collector
from lightning_mm5d.sharded.sequence import ShardedSequence
from lightning_mm5d.sharded.tensor import Sharded

_OF_LAYERS = "hidden_states"  # noted when a layer has returned, and the whole then


@contextmanager
def as_wholes(name: str, sequence: ShardedSequence, batch: int) -> Iterator[None]:
    """Let what is recorded meanwhile, of this rank's tokens, act as the whole.

    Args:
        name: of the modality, for errors.
        sequence: the tokens of all ranks.
        batch: rows of the hidden state, B.

    Raises:
        ConfigError: a record is neither ``[B, S_rank, ...]`` nor ``[B * S_rank, ...]``.
    """
    notes = collector().get()
    if not notes:
        yield
        return
    before = {key: len(values) for key, values in notes.items() if isinstance(values, list)}
    yield
    for key, start in before.items():
        values: list[Any] = notes[key]
        for index in range(start, len(values) if key != _OF_LAYERS else start):
            if isinstance(values[index], Tensor) and not isinstance(values[index], Sharded):
                values[index] = _whole(name, key, values[index], sequence, batch)


@contextmanager
def nothing() -> Iterator[None]:
    """Let nothing be recorded meanwhile."""
    records = collector()
    token = records.set(None)
    try:
        yield
    finally:
        records.reset(token)


def full_of(x: Tensor, sequence: ShardedSequence, batch: int) -> Tensor | None:
    """The whole of which `x` is of this rank's tokens; None where it does not count them.

    Args:
        x: ``[B, S_rank, ...]``, ``[B * S_rank, ...]`` or ``[..., S_rank, W]``.
        sequence: the tokens of all ranks.
        batch: rows, B.
    """
    length = sequence.lengths[sequence.index]
    if x.dim() > 1 and x.shape[:2] == (batch, length):
        return sequence.wrapped(x, 1 - x.dim())
    if x.dim() > 0 and x.shape[0] == batch * length:
        return sequence.merged(batch).wrapped(x, -x.dim())
    return sequence.wrapped(x, -2) if x.dim() > 2 and x.shape[-2] == length else None


def _whole(name: str, key: str, x: Tensor, sequence: ShardedSequence, batch: int) -> Tensor:
    whole, length = full_of(x, sequence, batch), sequence.lengths[sequence.index]
    if whole is not None:
        return whole
    raise ConfigError(
        f"modalities.{name}.cp_size",
        f"{key} of shape {list(x.shape)}",
        f"It is recorded inside of a layer that has {length} tokens of each of {batch} sequences here",
        f"Do not ask for {key}, or use cp_size=1",
    )
