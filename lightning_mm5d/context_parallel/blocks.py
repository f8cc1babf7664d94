"""How many pairs of each block of queries and keys a mask allows, without looking at all pairs.

A block pair's count lies within bounds that follow from minima and maxima of the tokens' values in each block (interval
arithmetic, Moore 1966, on the tree of nodes.py). Three things make the bounds tight:

- conditions on one side alone (an image token? padding?) narrow the tokens over which the rest of a conjunction is
  judged, so a block in which text and images are mixed is judged by its text for one part and by its images for another;
- values that are compared for equality only are numbered anew by where they first appear among those that both sides
  have, so ids need no order, and an id that only one side has excludes nothing;
- where a side takes few values, counts of each value per block give the exact count.

Where the bounds do not agree, the pairs of that block are evaluated (`exact`), and of a conjunction only the conditions
that are open there.

It refuses nothing.

Shapes: i and j are indices of blocks of queries and keys that broadcast together; n block pairs, t tokens per block.
Within `exact` they are lists [n].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_mm5d.context_parallel.nodes import (
    FEW,
    Compare,
    Condition,
    Every,
    Guard,
    Leaf,
    Opposite,
    Table,
    Truth,
    evaluate,
)

Bounds = tuple[Tensor, Tensor]
Evaluate = Callable[[Tensor, Tensor], Tensor]  # indices [m], [n] -> bool [m, n]


@dataclass(frozen=True, eq=False)
class Side:
    """Tokens of one side in blocks, and those of them that matter.

    Args:
        index: global index of each token [blocks, t]; the last block is filled up.
        seen: which of them count, bool [blocks, t].
        count: how many count [blocks], of a type that holds counts of pairs.
    """

    index: Tensor
    seen: Tensor
    count: Tensor

    @staticmethod
    def of(index: Tensor, size: int, multiple: int = 1) -> Side:
        """Blocks of `size` tokens of `index` [S]; empty ones make the number of blocks a multiple."""
        blocks = -(-len(index) // (size * multiple)) * multiple
        whole = index.new_zeros(blocks * size)
        whole[: len(index)] = index
        seen = torch.arange(blocks * size).view(blocks, size) < len(index)
        return Side(whole.view(blocks, size), seen, _count(seen))

    def take(self, values: Tensor, row: int) -> Tensor:
        """Values [R, S] of the tokens [blocks, t] in a row of the batch."""
        return values[row if len(values) > 1 else 0][self.index]

    def only(self, seen: Tensor) -> Side:
        """The tokens that are also in `seen` [blocks, t]."""
        seen = self.seen & seen
        return replace(self, seen=seen, count=_count(seen))


@dataclass(frozen=True, eq=False)
class Where:
    """The pairs over which a condition is judged: of one row of the batch, the tokens that count of either side."""

    q: Side
    k: Side
    row: int

    def total(self, i: Tensor, j: Tensor) -> Tensor:
        """Number of pairs."""
        return self.q.count[i] * self.k.count[j]

    def pairs(self, i: Tensor, j: Tensor) -> Tensor:
        """Which pairs count, bool [n, t, t]."""
        return self.q.seen[i][:, :, None] & self.k.seen[j][:, None, :]


def judge(condition: Condition, where: Where) -> Judge:
    """Return the judge of a whole mask; its `exact` is False for tokens that do not count."""
    return _Every(condition if isinstance(condition, Every) else Every((condition,)), where)


class Judge(ABC):
    """What a condition says of block pairs, counting the tokens of `where` only."""

    def __init__(self, where: Where) -> None:
        self.where = where

    @abstractmethod
    def bounds(self, i: Tensor, j: Tensor) -> Bounds:
        """Least and largest possible number of pairs for which the condition holds."""

    @abstractmethod
    def exact(self, i: Tensor, j: Tensor) -> Tensor:
        """Where it holds, bool [n, t, t]; of tokens that do not count it may say anything."""


def _judge(condition: Condition, where: Where) -> Judge:
    if isinstance(condition, Compare):
        return _equality(condition, where) if condition.how == "eq" else _Order(condition, where)
    kinds = {Every: _Every, Opposite: _Opposite, Guard: _Guard, Table: _table, Truth: _Unknown, Function: _Unknown}
    return kinds[type(condition)](condition, where)  # type: ignore[arg-type, no-any-return]


class Function(Condition):
    """A mask function that could not be traced.

    Args:
        evaluate: gives its result for block pairs: row, indices of queries [n, t] and of keys [n, t] -> bool [n, t, t].
    """

    def __init__(self, evaluate: Callable[[int, Tensor, Tensor], Tensor], rows: int) -> None:
        self.evaluate, self._rows = evaluate, rows

    def parts(self) -> None:  # type: ignore[override]
        raise AssertionError("an unknown function has no content")

    def rows(self) -> int:
        return self._rows


class _Every(Judge):
    def __init__(self, condition: Every, where: Where) -> None:
        rest = []
        for part in condition.conditions:
            if isinstance(part, Guard):
                side = where.q if part.side == "q" else where.k
                side = side.only(side.take(part.leaf.values, where.row))
                where = replace(where, q=side) if part.side == "q" else replace(where, k=side)
            else:
                rest.append(part)
        super().__init__(where)
        self._parts = [_judge(part, where) for part in rest]

    def bounds(self, i: Tensor, j: Tensor) -> Bounds:
        total = self.where.total(i, j)
        low = high = total
        for part in self._parts:
            least, most = part.bounds(i, j)
            low = least if low is total else (low - total + least).clamp_(min=0)
            high = most if high is total else torch.minimum(high, most)
        return low, high

    def exact(self, i: Tensor, j: Tensor) -> Tensor:
        total = self.where.total(i, j)
        pairs = self.where.pairs(i, j)
        for part in self._parts:
            least, most = part.bounds(i, j)
            pairs[most == 0] = False
            open_ = ((least < total) & (most > 0)).nonzero()[:, 0]
            if len(open_) == len(i):
                pairs &= part.exact(i, j)
            elif len(open_):
                pairs[open_] &= part.exact(i[open_], j[open_])
        return pairs


class _Opposite(Judge):
    def __init__(self, condition: Opposite, where: Where) -> None:
        super().__init__(where)
        self._inner = _judge(condition.condition, where)

    def bounds(self, i: Tensor, j: Tensor) -> Bounds:
        total = self.where.total(i, j)
        least, most = self._inner.bounds(i, j)
        return total - most, total - least

    def exact(self, i: Tensor, j: Tensor) -> Tensor:
        return ~self._inner.exact(i, j)


class _Guard(Judge):
    def __init__(self, condition: Guard, where: Where) -> None:
        super().__init__(where)
        self._every = _Every(Every((condition,)), where)

    def bounds(self, i: Tensor, j: Tensor) -> Bounds:
        return self._every.bounds(i, j)

    def exact(self, i: Tensor, j: Tensor) -> Tensor:
        return self._every.exact(i, j)


class _Order(Judge):
    """The query's value is at most (below) the key's."""

    def __init__(self, condition: Compare, where: Where) -> None:
        super().__init__(where)
        self._is_strict = condition.how == "lt"
        self._q = where.q.take(condition.q.values, where.row)
        self._k = where.k.take(condition.k.values, where.row)
        self._q_ends, self._k_ends = _ends(self._q, where.q.seen), _ends(self._k, where.k.seen)

    def bounds(self, i: Tensor, j: Tensor) -> Bounds:
        (q_min, q_max), (k_min, k_max) = self._q_ends, self._k_ends
        if self._is_strict:
            all_, any_ = q_max[i] < k_min[j], q_min[i] < k_max[j]
        else:
            all_, any_ = q_max[i] <= k_min[j], q_min[i] <= k_max[j]
        total = self.where.total(i, j)
        # the ends are tokens of the blocks, so what is neither all nor none is at least one pair and not all
        low = torch.where(all_, total, any_.to(total.dtype))
        high = torch.where(all_, total, (total - 1) * any_)
        return torch.minimum(low, total), high.clamp_(min=0)

    def exact(self, i: Tensor, j: Tensor) -> Tensor:
        q, k = self._q[i][:, :, None], self._k[j][:, None, :]
        return q < k if self._is_strict else q <= k


class _Range(Judge):
    """Equality of labels that grow with the position where a value first appears."""

    def __init__(self, q: Tensor, k: Tensor, where: Where) -> None:
        super().__init__(where)
        self._q, self._k = q, k  # labels [blocks, t], -1 where the other side has no such value
        self._q_ends, self._k_ends = _ends(q, where.q.seen & (q >= 0)), _ends(k, where.k.seen & (k >= 0))
        self._q_one = self._only(self._q_ends, q, where.q, -1)
        self._k_one = self._only(self._k_ends, k, where.k, -2)

    @staticmethod
    def _only(ends: Bounds, labels: Tensor, side: Side, none: int) -> Tensor:
        """The label of blocks whose tokens all have it, else `none`."""
        is_one = (ends[0] == ends[1]) & ((labels >= 0) | ~side.seen).all(1)
        return torch.where(is_one, ends[0], none)

    def bounds(self, i: Tensor, j: Tensor) -> Bounds:
        (q_min, q_max), (k_min, k_max) = self._q_ends, self._k_ends
        total = self.where.total(i, j)
        all_ = self._q_one[i] == self._k_one[j]
        meet = (q_min[i] <= k_max[j]) & (k_min[j] <= q_max[i])
        high = torch.where(all_, total, ((total - 1) * meet).clamp_(min=0))
        return total * all_, high

    def exact(self, i: Tensor, j: Tensor) -> Tensor:
        return self._q[i][:, :, None] == self._k[j][:, None, :]


class _Kinds(Judge):
    """A table of few kinds: counts of each kind per block give exact counts of pairs."""

    def __init__(self, q: Tensor, k: Tensor, table: Tensor, where: Where) -> None:
        super().__init__(where)
        bits = torch.arange(table.shape[1])
        self._q = torch.cat([(table.to(torch.int64) << bits).sum(1), bits.new_zeros(1)])[q]  # may see keys of these kinds
        self._k = torch.cat([1 << bits, bits.new_zeros(1)])[k]
        # float32 is exact up to 2 ** 24 pairs
        dtype = torch.float32 if q.shape[1] * k.shape[1] <= 1 << 24 else torch.float64
        self._q_counts = _histogram(q, where.q.seen, len(table)).to(dtype) @ table.to(dtype)
        self._k_counts = _histogram(k, where.k.seen, table.shape[1]).to(dtype)

    def bounds(self, i: Tensor, j: Tensor) -> Bounds:
        q, k = self._q_counts[i], self._k_counts[j]
        if i.dim() == 1:
            count = (q * k).sum(-1)
        else:  # i [..., n, 1], j [..., 1, m]
            count = q.squeeze(-2) @ k.squeeze(-3).transpose(-1, -2)
        count = count.to(self.where.q.count.dtype)
        return count, count

    def exact(self, i: Tensor, j: Tensor) -> Tensor:
        return (self._q[i][:, :, None] & self._k[j][:, None, :]) != 0


class _Unknown(Judge):
    """A call of which nothing is known, and whole functions that could not be traced."""

    def __init__(self, condition: Truth | Function, where: Where) -> None:
        super().__init__(where)
        self._condition = condition

    def bounds(self, i: Tensor, j: Tensor) -> Bounds:
        total = self.where.total(i, j)
        return torch.zeros_like(total), total

    def exact(self, i: Tensor, j: Tensor) -> Tensor:
        where, size = self.where, (len(i), self.where.q.index.shape[1], self.where.k.index.shape[1])
        if isinstance(self._condition, Function):
            return self._condition.evaluate(where.row, where.q.index[i], where.k.index[j])

        def take(leaf: Leaf) -> Tensor:
            values = leaf.values[where.row if len(leaf.values) > 1 else 0]
            return values[where.q.index[i]][:, :, None] if leaf.side == "q" else values[where.k.index[j]][:, None, :]

        return evaluate(self._condition.call, take).to(torch.bool).expand(size)


def _table(condition: Table, where: Where) -> Judge:
    q, k = where.q.take(condition.q.values, where.row), where.k.take(condition.k.values, where.row)
    return _Kinds(q, k, condition.table, where)


def _equality(condition: Compare, where: Where) -> Judge:
    """Equality of values that both sides have; labels are numbered by the first query that has the value."""
    q, k = where.q.take(condition.q.values, where.row), where.k.take(condition.k.values, where.row)
    q_seen, k_seen = q[where.q.seen].to(torch.int64), k[where.k.seen].to(torch.int64)
    both = torch.cat([q_seen, k_seen])
    base = int(both.min()) if len(both) else 0
    span = int(both.max()) - base + 1 if len(both) else 0
    if span > 4 * len(both) + 1024:
        codes = both.unique(return_inverse=True)[1]
        span = int(codes.max()) + 1
    else:
        codes = both - base
    q_codes, k_codes = codes.split([len(q_seen), len(k_seen)])
    first = torch.full((span,), len(q_codes)).scatter_reduce_(0, q_codes, torch.arange(len(q_codes)), "amin")
    in_k = torch.zeros(span, dtype=torch.bool)
    in_k[k_codes] = True
    shared = (in_k & (first < len(q_codes))).nonzero()[:, 0]
    shared = shared[first[shared].argsort()]
    label = torch.full((span,), -1)
    label[shared] = torch.arange(len(shared))
    labels = [torch.full(side.shape, -1, dtype=torch.int32) for side in (q, k)]
    for side, seen, own in zip(labels, (where.q.seen, where.k.seen), (q_codes, k_codes), strict=True):
        side[seen] = label[own].to(torch.int32)
    if len(shared) <= FEW:
        return _Kinds(labels[0].long(), labels[1].long(), torch.eye(len(shared), dtype=torch.bool), where)
    return _Range(labels[0], labels[1], where)


def _count(seen: Tensor) -> Tensor:
    # counts of pairs, and differences of two of them, fit
    return seen.sum(1, dtype=torch.int16 if seen.shape[1] <= 128 else torch.int32)


def _ends(values: Tensor, seen: Tensor) -> Bounds:
    """Least and largest of the values that count, of each block; of none, the limits of the type, turned around."""
    limit = torch.iinfo(values.dtype)
    return values.masked_fill(~seen, limit.max).amin(1), values.masked_fill(~seen, limit.min).amax(1)


def _histogram(kinds: Tensor, seen: Tensor, size: int) -> Tensor:
    """How many tokens of each kind count, of each block [blocks, size]; kinds below 0 are none."""
    seen = seen & (kinds >= 0)
    at = torch.arange(len(kinds))[:, None] * size + kinds
    return torch.bincount(at[seen], minlength=len(kinds) * size).view(len(kinds), size)
