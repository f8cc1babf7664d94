"""Turns what transformers records inside of sharded layers, such as router logits, into sharded tensors of all tokens.

A model that is asked for them (``output_router_logits``) records by hooks what such modules return. Inside of a sharded
layer they return values of this rank's tokens, but the loss over routers must see all tokens.

It refuses (`ConfigError`) records whose shape does not tell how they count tokens.
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

_OF_LAYERS = "hidden_states"  # recorded after a layer has returned, sharded by then


@contextmanager
def sharded_records(name: str, sequence: ShardedSequence, batch: int) -> Iterator[None]:
    """Turn what transformers records meanwhile into sharded tensors.

    Args:
        name: the modality, for errors.
        sequence: the tokens of all ranks.
        batch: rows of the hidden state, B.

    Raises:
        ConfigError: a record is neither ``[B, S_rank, ...]`` nor ``[B * S_rank, ...]``.
    """
    records = collector().get()
    if not records:
        yield
        return
    before = {key: len(values) for key, values in records.items() if isinstance(values, list)}
    yield
    for key, start in before.items():
        values: list[Any] = records[key]
        for index in range(start, len(values) if key != _OF_LAYERS else start):
            if isinstance(values[index], Tensor) and not isinstance(values[index], Sharded):
                values[index] = _sharded(name, key, values[index], sequence, batch)


@contextmanager
def nothing() -> Iterator[None]:
    """Let nothing be recorded meanwhile."""
    records = collector()
    token = records.set(None)
    try:
        yield
    finally:
        records.reset(token)


def sharded_by_tokens(x: Tensor, sequence: ShardedSequence, batch: int) -> Tensor | None:
    """Return the sharded tensor of which `x` is this rank's local one; None where `x` does not count tokens.

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


def _sharded(name: str, key: str, x: Tensor, sequence: ShardedSequence, batch: int) -> Tensor:
    found, length = sharded_by_tokens(x, sequence, batch), sequence.lengths[sequence.index]
    if found is not None:
        return found
    raise ConfigError(
        f"modalities.{name}.cp_size",
        f"{key} of shape {list(x.shape)}",
        f"It is recorded inside of a layer that has {length} tokens of each of {batch} sequences here",
        f"Do not ask for {key}, or use cp_size=1",
    )
