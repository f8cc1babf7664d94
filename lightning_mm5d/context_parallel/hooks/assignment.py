"""Which tokens, or items of a batch, each context parallel rank takes of a layer's hidden state.

The split is decided when a full hidden state enters a layer, by the masks that were made for it. A hidden state that is
sharded already keeps its split, so a layer that is computed again for its backward works on the same tokens.

An encoder in mode ``items`` gives each rank whole items of its batch, or whole segments of a packed sequence, and no
token leaves its rank. Where there are fewer items than ranks, sequences are split.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_mm5d.config.modality import Modality
from lightning_mm5d.context_parallel.balance import by_items, distribute
from lightning_mm5d.context_parallel.exchange.attention import ContextGroups
from lightning_mm5d.context_parallel.hooks.layer_attention import Call
from lightning_mm5d.context_parallel.masks.caches import Cache, Caches
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.sharded.sequence import Holders, ShardedSequence, TokenSplit
from lightning_mm5d.sharded.sequence_operations import is_tokens
from lightning_mm5d.sharded.tensor import Sharded


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
        found = (self.context.whole, self.context.inner, self.context.outer, self.sharing, self.tensor)
        return [group for group in found if group is not None]


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
            items = distribute("uniform", state.shape[0], self._degree, _no_work, self._splits)
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
        found = self._sequences.get(split)
        if found is None:
            known = self._splits.get(split, lambda: split)  # one object for equal splits, with what was made of it
            found = self._sequences[split] = ShardedSequence(known, holders)
        return found


def _assigned(sequence: ShardedSequence, dim: int) -> Assigned:
    return Assigned(sequence, dim, Call(sequence.coarse if dim == -2 else None))


def _work_of_segments(lengths: list[int], block: int) -> Tensor:
    """What the queries of each block of a packed sequence cost, int64 ``[ceil(S / block)]``."""
    per_token = torch.repeat_interleave(torch.tensor(lengths), torch.tensor(lengths))
    padded = torch.nn.functional.pad(per_token, (0, -len(per_token) % block))
    return padded.view(-1, block).sum(1)


def _no_work(block: int) -> Tensor:
    raise AssertionError("a uniform split does not ask for it")
