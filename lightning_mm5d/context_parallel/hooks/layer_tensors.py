"""Tensors on their way into a sharded layer, as local ones, and out of it, as sharded ones.

It refuses (`ConfigError`) results beside the hidden state that have a gradient and do not count tokens.

Turns what transformers records inside of sharded layers, such as router logits, into sharded tensors of all tokens.

A model that is asked for them (``output_router_logits``) records by hooks what such modules return. Inside of a sharded
layer they return values of this rank's tokens, but the loss over routers must see all tokens.

It refuses (`ConfigError`) records whose shape does not tell how they count tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.context_parallel.hooks.arguments import Arguments, item_dim, token_dim
from lightning_mm5d.context_parallel.hooks.assignment import Assigned
from lightning_mm5d.context_parallel.hooks.private_names import collector
from lightning_mm5d.context_parallel.masks.caches import Cache
from lightning_mm5d.sharded.sequence import ShardedSequence
from lightning_mm5d.sharded.sequence_operations import is_tokens
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
    rule = f"It is recorded inside of a layer that has {length} tokens of each of {batch} sequences here"
    fix = f"Do not ask for {key}, or use cp_size=1"
    raise ConfigError(f"modalities.{name}.cp_size", f"{key} of shape {list(x.shape)}", rule, fix)


# --- into a layer ---


def local_state(state: Tensor, assigned: Assigned, *, is_assigned: bool) -> Tensor:
    """Return this context parallel rank's tokens of the hidden state.

    Args:
        state: ``[..., S, W]``, full or sharded.
        assigned: its split.
        is_assigned: whether `state` is sharded by this split already.
    """
    sequence, dim = assigned.sequence, assigned.dim
    if not is_assigned:
        state = state.full() if isinstance(state, Sharded) else state
        state = sequence.wrapped(sequence.scattered(state, dim, sequence.lengths), dim)
    return sequence.own_tokens(state)  # type: ignore[arg-type]


def local_argument(assigned: Assigned, recent: Cache, name: str, value: Any) -> Any:
    """Return this rank's tokens of an argument beside the hidden state.

    Args:
        assigned: the split of the hidden state.
        recent: local arguments without a gradient, which the next layers get as well.
        name: of the argument.
        value: a tensor; a dict, whose entries become local in place; or anything else, which stays as it is.
    """
    sequence = assigned.sequence.coarser
    if isinstance(value, MutableMapping):
        _each_entry(value, lambda x: x.group.own_tokens(x) if _is_of(x, sequence) else x)
        return value
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, Sharded):
        if not is_tokens(value.group):
            return value
        if value.group.coarser is sequence:
            return value.group.own_tokens(value)
        value = value.full()  # of another sequence
    size = sequence.split.size
    dim = token_dim(name, value, size) if assigned.dim == -2 else item_dim(name, value, size, -assigned.dim)
    has_gradient = value.requires_grad and torch.is_grad_enabled()
    if dim is None:
        return sequence.copied(value) if has_gradient else value
    if has_gradient:  # not kept: it belongs to the graph of one layer
        return sequence.scattered(value, dim, sequence.lengths)
    return recent.get((sequence, dim), lambda: sequence.local_of(value, dim, sequence.lengths), (value,))


# --- out of a layer ---


def shard_entries(given: Arguments, assigned: Assigned) -> None:
    """Turn local tensors ``[..., S_rank, W]`` in dicts that layers share into sharded ones, for later stages."""
    if assigned.dim != -2:
        return
    sequence = assigned.sequence.coarser
    length = sequence.lengths[sequence.index]

    def sharded(x: Any) -> Any:
        fits = isinstance(x, Tensor) and not isinstance(x, Sharded) and x.dim() > 2 and x.shape[-2] == length
        return sequence.wrapped(x, -2) if fits else x

    for value in (*given.args, *given.kwargs.values()):
        if isinstance(value, MutableMapping):
            _each_entry(value, sharded)


def sharded_result(result: Any, assigned: Assigned, name: str, is_whole: Callable[[Tensor], bool]) -> Any:
    """Return what a layer computed of local tensors, as sharded tensors.

    Args:
        result: the hidden state, or a tuple or list of it and more.
        assigned: the split of the hidden state.
        name: the modality, for errors.
        is_whole: whether a tensor is the same on all ranks, as a module of whole sequences returned it.

    Raises:
        ConfigError: something else in `result` has a gradient and no entry for each token.
    """
    if isinstance(result, Tensor):
        sequence = assigned.sequence
        if not isinstance(result, Sharded) and result.shape[assigned.dim] == sequence.own_size:
            sequence = sequence.coarser  # the layer has gathered the tokens of its tensor parallel ranks
        return sequence.wrapped(result, assigned.dim)
    if isinstance(result, (tuple, list)) and result and isinstance(result[0], Tensor):
        batch = result[0].shape[0] if result[0].dim() > 2 else 1
        rest = (
            one if isinstance(one, Tensor) and is_whole(one) else _sharded_beside(one, assigned, batch, name)
            for one in result[1:]
        )
        parts = (sharded_result(result[0], assigned, name, is_whole), *rest)
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    return result


def _sharded_beside(x: Any, assigned: Assigned, batch: int, name: str) -> Any:
    """What a layer returns beside its hidden state, sharded where it counts tokens or items."""
    if not isinstance(x, Tensor) or isinstance(x, Sharded):
        return x
    sequence = assigned.sequence.coarser
    if assigned.dim == -2:
        found = sharded_by_tokens(x, sequence, batch)
    else:
        found = sequence.wrapped(x, -x.dim()) if x.dim() and x.shape[0] == sequence.own_size else None
    if found is None and x.requires_grad:
        rule = (
            "A layer returns, beside its hidden state, something made of this rank's tokens, of which all ranks "
            "would need to be asked"
        )
        fix = "Return it for each token, use another cp_mode than 'items', or cp_size=1"
        raise ConfigError(f"modalities.{name}.cp_size", f"a result of shape {list(x.shape)}", rule, fix)
    return x if found is None else found


def _is_of(x: Any, sequence: Any) -> bool:
    return isinstance(x, Sharded) and is_tokens(x.group) and x.group.coarser is sequence


def _each_entry(states: MutableMapping[Any, Any], change: Callable[[Any], Any]) -> None:
    """Change the entries of a dict in place, also those in lists and tuples."""

    def walk(entry: Any) -> Any:
        return type(entry)(map(walk, entry)) if isinstance(entry, (list, tuple)) else change(entry)

    for key, entry in states.items():
        states[key] = walk(entry)
