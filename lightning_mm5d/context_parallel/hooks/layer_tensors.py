"""Tensors on their way into a sharded layer, as local ones, and out of it, as sharded ones; and which rank takes which.

**Assignment.** The split is decided when a full hidden state enters a layer, by the masks that were made for it. A
hidden state that is sharded already keeps its split, so a layer that is computed again for its backward works on the
same tokens.

An encoder in mode ``items`` gives each rank whole items of its batch, or whole segments of a packed sequence, and no
token leaves its rank. Where there are fewer items than ranks, sequences are split.

**Arguments.** Beside its hidden state ``[B, S, W]`` a layer takes rotary tables and positions, with an entry for each
token, and others without, such as masks or the states of an encoder. All families of transformers use the same names.
The dim of tokens is the last but one in tables and the last in indices. Names decide first, then shapes; running the
layer on some of its tokens checks it (layer_ways.py).

**Results.** It refuses (`ConfigError`) results beside the hidden state that have a gradient and do not count tokens.

**Records.** What transformers records inside of sharded layers, such as router logits, becomes sharded tensors of all
tokens. A model that is asked for them (``output_router_logits``) records by hooks what such modules return. Inside of a
sharded layer they return values of this rank's tokens, but the loss over routers must see all tokens. It refuses
(`ConfigError`) records whose shape does not tell how they count tokens.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.context_parallel.balance import by_items, distribute
from lightning_mm5d.context_parallel.exchange.attention import ContextGroups
from lightning_mm5d.context_parallel.hooks.layer_attention import Call, collector
from lightning_mm5d.context_parallel.masks.mask import Cache, Caches
from lightning_mm5d.partition.parts import Place
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.sharded.sequence import Holders, ShardedSequence, TokenSplit, is_tokens
from lightning_mm5d.sharded.tensor import Sharded

_OF_ANOTHER = ("encoder_hidden_states", "cross_attention_states", "key_value_states", "kv_states", "cu_seqlens")
_MASK_BY_TOKEN = "full_text_row_masked_out_mask"


class Arguments(NamedTuple):
    """The arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def names_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the positional arguments of a bound forward."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(arg.name for arg in parameters if arg.kind in (arg.POSITIONAL_ONLY, arg.POSITIONAL_OR_KEYWORD))


def token_dim(name: str, x: Tensor, size: int) -> int | None:
    """Return the dim of `x` that counts the `size` tokens of a sequence, from the last; None where none does."""
    if name in _OF_ANOTHER or ("mask" in name and name != _MASK_BY_TOKEN):
        return None
    if "bias" in name:  # of scores
        return None
    if x.is_floating_point() or x.is_complex():
        return -2 if x.dim() >= 2 and x.shape[-2] == size else None
    return -1 if x.dim() and x.shape[-1] == size else None


def item_dim(name: str, x: Tensor, size: int, ndim: int) -> int | None:
    """Return the first dim of `x`, from the last, where it counts the `size` items of a batch; None where it does not.

    Args:
        name: of the argument.
        x: its value.
        size: items in the batch.
        ndim: dims of the hidden state.
    """
    batched = x.dim() >= ndim or (x.dim() >= 2 and not x.is_floating_point())
    return -x.dim() if batched and x.shape[0] == size and "cu_seqlens" not in name else None


def replaced(
    call: Arguments, names: tuple[str, ...], change: Callable[[str, Any], Any], hidden: Place, state: Any
) -> Arguments:
    """Return the arguments with `state` for the hidden state, and the others changed.

    Args:
        call: what the layer was given.
        names: of its positional arguments.
        change: takes a name and a value that is no list or tuple; it gets their entries, and dicts as they are.
        hidden: place of the hidden state.
        state: the new hidden state.
    """

    def walk(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(entry, (Tensor, list, tuple)) for entry in value):
            parts = [walk(name, entry) for entry in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return change(name, value)

    args = tuple(
        state if hidden == (0, index) else walk(names[index] if index < len(names) else "", value)
        for index, value in enumerate(call.args)
    )
    kwargs = {name: state if hidden == (1, name) else walk(name, value) for name, value in call.kwargs.items()}
    return Arguments(args, kwargs)


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a modality's layers with this one.

    Attributes:
        context: its context parallel ranks.
        sharing: these and their tensor parallel ranks, which run fastest.
        tensor: its tensor parallel ranks; None where it has none.
    """

    context: ContextGroups
    sharing: TensorGroup
    tensor: TensorGroup | None = None

    @property
    def groups(self) -> list[TensorGroup]:
        """All groups in which sharded layers communicate."""
        groups = (self.context.whole, self.context.inner, self.context.outer, self.sharing, self.tensor)
        return [group for group in groups if group is not None]


@dataclass(frozen=True, eq=False)
class Assigned:
    """The sharded input of one call of a layer.

    Attributes:
        sequence: its tokens or items, held as the hidden state's are.
        dim: the sharded dim of the hidden state, from the last: -2 for tokens, less for items.
        call: what the attention needs to know.
    """

    sequence: ShardedSequence
    dim: int
    call: Call


class Assignment:
    """Assigns the tokens of one modality's layers to its ranks.

    Args:
        modality: its configuration.
        ranks: that share its layers.
        averages: whether the gradient of a leaf belongs to a parameter whose mean over ranks is taken in the end.
        work: what the queries of each block cost, of the number of tokens and the size of a block.
        caches: of the session, which keep its splits.
    """

    def __init__(
        self,
        modality: Modality,
        ranks: Ranks,
        averages: Callable[[Tensor], bool],
        work: Callable[[int, int], Tensor],
        caches: Caches,
    ) -> None:
        self._by_items, self._distribution = modality.context.cp_mode == "items", modality.context.cp_distribution
        self._work, self._splits, self._host = work, caches.tokens, caches.host
        self._degree = ranks.context.whole.size
        self._holders = Holders(ranks.context.whole, self._degree, averages)
        if ranks.tensor is not None:
            self._holders.finer = Holders(ranks.sharing, self._degree, averages, ranks.tensor, coarser=self._holders)
        self._shards_tokens = modality.tensor.sequence_parallel and ranks.tensor is not None
        self._least = ranks.sharing.size // self._degree  # tokens of a rank that its tensor parallel ranks can share
        self._sequences: weakref.WeakValueDictionary[Any, ShardedSequence] = weakref.WeakValueDictionary()
        self._recent = Cache(4)

    def clear(self) -> None:
        """Drop what is known of packed sequences."""
        self._recent.clear()

    def of(self, state: Tensor, kwargs: Mapping[str, Any]) -> Assigned | None:
        """Return how a layer's hidden state is sharded; None where every rank works on all of it.

        Args:
            state: ``[..., S, W]``, full or sharded.
            kwargs: of the layer; ``cu_seqlens`` are the boundaries of a packed sequence ``[n + 1]``.
        """
        if self.holds(state):
            return _assigned(state.group, state.sharded_dim)  # type: ignore[attr-defined]
        if self._by_items and state.dim() > 2 and state.shape[0] >= self._degree:
            work = partial(self._work, state.shape[0])
            items = distribute("uniform", state.shape[0], self._degree, work, self._splits)
            return _assigned(self._sequence(items, self._holders), -state.dim())
        split = self._split(state, kwargs.get("cu_seqlens")) if state.dim() > 1 else None
        if split is None:
            return None
        sequence = self._sequence(split, self._holders)
        shards_tokens = self._shards_tokens and min(split.lengths) >= self._least
        return _assigned(sequence.finer if shards_tokens else sequence, -2)

    def holds(self, x: Tensor) -> bool:
        """Whether `x` is sharded over this modality's ranks; another modality's sequences lie on other ranks."""
        return isinstance(x, Sharded) and is_tokens(x.group) and x.group.coarser.holders is self._holders

    def described(self, description: Any) -> ShardedSequence:
        """Return the sequence that a peer described by `ShardedSequence.description`."""
        size, ranges = description
        split = TokenSplit.of(ranges, size)
        holders = self._holders if split.ranks == self._degree else self._holders.finer
        assert holders is not None
        return self._sequence(split, holders)

    def _split(self, state: Tensor, bounds: Tensor | None) -> TokenSplit | None:
        """Each rank's tokens; None for sequences that are too short for all ranks to take part."""
        size, degree = state.shape[-2], self._degree
        if size < degree:
            return None
        work = partial(self._work, size)
        if bounds is not None:
            lengths: list[int] = self._recent.get("lengths", lambda: self._host.of(bounds).diff().tolist(), (bounds,))
            work = partial(_work_of_segments, lengths)
            if self._by_items and len(lengths) >= degree:
                items = by_items(lengths, [length * (length + state.shape[-1]) for length in lengths], degree)
                if min(items.lengths):
                    return items
        split = distribute(self._distribution, size, degree, work, self._splits)
        return split if min(split.lengths) else distribute("uniform", size, degree, work, self._splits)

    def _sequence(self, split: TokenSplit, holders: Holders) -> ShardedSequence:
        sequence = self._sequences.get(split)
        if sequence is None:
            equal = self._splits.get(split, lambda: split)  # one object for equal splits, with what was made of it
            sequence = self._sequences[split] = ShardedSequence(equal, holders)
        return sequence


def _assigned(sequence: ShardedSequence, dim: int) -> Assigned:
    return Assigned(sequence, dim, Call(sequence.coarse if dim == -2 else None))


def _work_of_segments(lengths: list[int], block: int) -> Tensor:
    """What the queries of each block of a packed sequence cost, int64 ``[ceil(S / block)]``."""
    per_token = torch.repeat_interleave(torch.tensor(lengths), torch.tensor(lengths))
    padded = torch.nn.functional.pad(per_token, (0, -len(per_token) % block))
    return padded.view(-1, block).sum(1)


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
    sharded, length = sharded_by_tokens(x, sequence, batch), sequence.lengths[sequence.index]
    if sharded is not None:
        return sharded
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
            extra if isinstance(extra, Tensor) and is_whole(extra) else _sharded_beside(extra, assigned, batch, name)
            for extra in result[1:]
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
        sharded = sharded_by_tokens(x, sequence, batch)
    else:
        sharded = sequence.wrapped(x, -x.dim()) if x.dim() and x.shape[0] == sequence.own_size else None
    if sharded is None and x.requires_grad:
        rule = (
            "A layer returns, beside its hidden state, something made of this rank's tokens, of which all ranks "
            "would need to be asked"
        )
        fix = "Return it for each token, use another cp_mode than 'items', or cp_size=1"
        raise ConfigError(f"modalities.{name}.cp_size", f"a result of shape {list(x.shape)}", rule, fix)
    return x if sharded is None else sharded


def _is_of(x: Any, sequence: Any) -> bool:
    return isinstance(x, Sharded) and is_tokens(x.group) and x.group.coarser is sequence


def _each_entry(states: MutableMapping[Any, Any], change: Callable[[Any], Any]) -> None:
    """Change the entries of a dict in place, also those in lists and tuples."""

    def walk(entry: Any) -> Any:
        return type(entry)(map(walk, entry)) if isinstance(entry, (list, tuple)) else change(entry)

    for key, entry in states.items():
        states[key] = walk(entry)
