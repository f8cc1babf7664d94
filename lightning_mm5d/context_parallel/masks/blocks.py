"""Bounds of the number of pairs that a mask allows in each block of queries and keys, without a look at each pair.

The bounds follow from minima and maxima of the tokens' values in each block (interval arithmetic, Moore 1966, on the
tree below). Example: queries 256 to 383 against keys 0 to 127 under ``k <= q``: the largest key is below the
smallest query, so all 16,384 pairs are allowed. Three things make the bounds tight:

- conditions on one side alone (an image token? padding?) narrow the tokens over which the rest of a conjunction is
  judged: a block of text and images is judged by its text for one part of a mask and by its images for another;
- values that are only compared for equality are numbered by their first appearance among those that both sides have:
  ids need no order, and an id of one side alone excludes nothing;
- where a side takes few values, counts of each value per block give the exact count.

Where the bounds differ, `exact` evaluates the pairs of the block; of a conjunction only the conditions that are open.

Shapes: i and j are indices of blocks of queries and keys that broadcast together; n block pairs, t tokens per block.
Within `exact` they are lists [n].

A mask function as a tree: conditions on pairs of a query and a key, and numbers of pairs within them.

Example: ``(k <= q) & (document[q] == document[k])`` is ``Every(Opposite(Compare("lt", q, k)), Compare("eq", document,
document))``. Leaves hold a number for each token of one side, so a tree holds O(S) elements. trace.py makes trees,
blocks.py judges them block by block. Numbers that are only compared become int32, so that equal trees have equal bytes
(`write`) for all types of numbers.

Shapes: R rows (1 where all rows of the batch are equal), Sq queries, Sk keys; all tensors on CPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Write = Callable[[Any], None]  # of bytes or a buffer
FEW = 63  # distinct values of a side for which a table of all combinations is kept; as many bits as an int64 has


class Value:
    """A value for each pair of a query and a key."""

    def parts(self) -> Iterator[Any]:
        """Yield everything that determines the value: names, numbers, tensors and other values."""
        yield from vars(self).values()

    def write(self, write: Write) -> None:
        """Hand the bytes of the content to `write`: equal bytes mean equal values."""
        write(f"<{type(self).__name__}".encode())
        for part in self.parts():
            if isinstance(part, Value):
                part.write(write)
            elif isinstance(part, Tensor):
                write(f"[{part.dtype} {tuple(part.shape)}]".encode())
                write(part.contiguous().view(torch.uint8).numpy().data if part.dim() else repr(part.item()).encode())
            else:
                write(f"{part!r};".encode())
        write(b">")

    def rows(self) -> int:
        """1 where the value is the same for all rows of the batch, else their number."""
        return max((part.rows() for part in self.parts() if isinstance(part, Value)), default=1)


class Leaf(Value):
    """Values of one side.

    Args:
        side: ``"q"`` or ``"k"``.
        values: [R, Sq] or [R, Sk].
    """

    def __init__(self, side: str, values: Tensor) -> None:
        self.side, self.values = side, values

    def rows(self) -> int:
        return len(self.values)


class Constant(Value):
    """A tensor that depends on neither side: of one element, or a table that is indexed by both."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Sum(Value):
    """A number of each pair: that of the query plus that of the key. Integers that do not overflow.

    Args:
        q, k: [R, Sq] and [R, Sk], int64.
        dtype: of the sum in the mask function.
    """

    def __init__(self, q: Tensor, k: Tensor, dtype: torch.dtype) -> None:
        self.q, self.k, self.dtype = Leaf("q", q), Leaf("k", k), dtype


class Distance(Value):
    """The absolute value of a sum."""

    def __init__(self, sum: Sum) -> None:
        self.sum = sum


class Call(Value):
    """Any other elementwise function of pairs, which only evaluation can judge.

    Args:
        function: of torch.
        arguments: values, or anything else that is passed on as it is.
        keywords: passed on as they are.
        dtype: of the result.
    """

    def __init__(
        self, function: Callable[..., Tensor], arguments: tuple[Any, ...], keywords: dict[str, Any], dtype: torch.dtype
    ) -> None:
        self.function, self.arguments, self.keywords, self.dtype = function, arguments, keywords, dtype

    def parts(self) -> Iterator[Any]:
        yield getattr(self.function, "__name__", repr(self.function))
        yield from _flat(self.arguments)
        yield sorted(self.keywords.items())


class Condition(Value):
    """True or false for each pair."""


class Truth(Condition):
    """A call with a bool result."""

    def __init__(self, call: Call) -> None:
        self.call = call


class Guard(Condition):
    """A condition on one side alone.

    Args:
        leaf: bools of that side.
    """

    def __init__(self, leaf: Leaf) -> None:
        self.leaf = leaf


class Compare(Condition):
    """How a query's value compares to a key's.

    Args:
        how: ``"le"``, ``"lt"`` or ``"eq"``: the query's value is at most, below, or equal to the key's.
        q, k: [R, Sq] and [R, Sk], without NaN; of any type that keeps their order.
    """

    def __init__(self, how: str, q: Tensor, k: Tensor) -> None:
        q, k = _ranks(q, k)
        self.how, self.q, self.k = how, Leaf("q", q), Leaf("k", k)


class Table(Condition):
    """A condition that only depends on which of a few kinds query and key are of.

    Args:
        q, k: kinds, int64 [R, Sq] and [R, Sk].
        table: bool [kinds of queries, kinds of keys], at most `FEW` each.
    """

    def __init__(self, q: Tensor, k: Tensor, table: Tensor) -> None:
        self.q, self.k, self.table = Leaf("q", q), Leaf("k", k), table


class Every(Condition):
    """All of some conditions; of none, true."""

    def __init__(self, conditions: tuple[Condition, ...] = ()) -> None:
        self.conditions = conditions

    def parts(self) -> Iterator[Any]:
        yield from self.conditions


class Opposite(Condition):
    """The negation of a condition; made by `negate`, which keeps guards simple."""

    def __init__(self, condition: Condition) -> None:
        self.condition = condition


class Function(Condition):
    """A mask function that could not be traced.

    Args:
        evaluate: gives its result for block pairs: row, indices of queries [n, t] and of keys [n, t] -> bool [n, t, t].
        rows: of the batch.
    """

    def __init__(self, evaluate: Callable[[int, Tensor, Tensor], Tensor], rows: int) -> None:
        self.evaluate, self._rows = evaluate, rows

    def parts(self) -> Iterator[Any]:
        raise AssertionError("an unknown function has no content")

    def rows(self) -> int:
        return self._rows


def negate(condition: Condition) -> Condition:
    """Return the negation of `condition`."""
    if isinstance(condition, Opposite):
        return condition.condition
    if isinstance(condition, Guard):
        return Guard(Leaf(condition.leaf.side, ~condition.leaf.values))
    return Opposite(condition)


def every(*conditions: Condition) -> Condition:
    """Return the conjunction of `conditions`."""
    flat: list[Condition] = []
    for condition in conditions:
        flat += condition.conditions if isinstance(condition, Every) else (condition,)
    return flat[0] if len(flat) == 1 else Every(tuple(flat))


def some(*conditions: Condition) -> Condition:
    """Return the disjunction of `conditions`."""
    return negate(every(*(negate(condition) for condition in conditions)))


def leaves(value: Value) -> Iterator[Leaf]:
    """Yield all values of single sides within `value`."""
    if isinstance(value, Leaf):
        yield value
    for part in value.parts():
        if isinstance(part, Value):
            yield from leaves(part)


def evaluate(value: Value, take: Callable[[Leaf], Tensor]) -> Tensor:
    """Return a number of each pair; not of a condition.

    Args:
        value: of pairs.
        take: gives the values of the pairs' tokens, in shapes that broadcast to those of the pairs.
    """
    if isinstance(value, Leaf):
        return take(value)
    if isinstance(value, Constant):
        return value.tensor
    if isinstance(value, Sum):
        return (take(value.q) + take(value.k)).to(value.dtype)
    if isinstance(value, Distance):
        return evaluate(value.sum, take).abs()
    assert isinstance(value, Call), value

    def fill(argument: Any) -> Any:
        if isinstance(argument, tuple):
            return tuple(fill(part) for part in argument)
        return evaluate(argument, take) if isinstance(argument, Value) else argument

    return value.function(*fill(value.arguments), **value.keywords)


def truth(call: Call) -> Condition:
    """Return the condition that a call with a bool result is: a table where both sides take few values."""
    sides: dict[str, list[Tensor]] = {"q": [], "k": []}
    for leaf in leaves(call):
        sides[leaf.side].append(leaf.values)
    kinds = {side: _kinds(values) for side, values in sides.items()}
    if kinds["q"] is None or kinds["k"] is None:
        return Truth(call)
    (q, q_first), (k, k_first) = kinds["q"], kinds["k"]
    first = {"q": q_first, "k": k_first}

    def take(leaf: Leaf) -> Tensor:
        values = leaf.values.expand(len(q if leaf.side == "q" else k), -1).reshape(-1)[first[leaf.side]]
        return values[:, None] if leaf.side == "q" else values[None, :]

    return Table(q, k, evaluate(call, take).to(torch.bool).expand(len(q_first), len(k_first)).clone())


def _flat(arguments: tuple[Any, ...]) -> Iterator[Any]:
    for argument in arguments:
        if isinstance(argument, tuple):
            yield "("
            yield from _flat(argument)
            yield ")"
        else:
            yield argument


def _kinds(values: list[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Which of a few kinds each token is of, int64 [R, S], and one token (flat) of each kind; None for many kinds."""
    # most sides are refused here, without sorting all of them
    if not values or any(len(value.reshape(-1)[:4096].unique()) > FEW for value in values):
        return None
    kinds = torch.zeros((max(len(value) for value in values), values[0].shape[1]), dtype=torch.int64)
    number = 1
    for value in values:
        known, codes = value.unique(return_inverse=True)
        together, kinds = (kinds * len(known) + codes).unique(return_inverse=True)
        number = len(together)
        if number > FEW:
            return None
    flat = kinds.reshape(-1)
    first = torch.full((number,), len(flat)).scatter_reduce_(0, flat, torch.arange(len(flat)), "amin")
    return kinds, first


def _ranks(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The values as int32: themselves where they fit, else their ranks among all values."""
    limit = torch.iinfo(torch.int32)
    whole = not q.is_floating_point() and not k.is_floating_point()
    if whole and all(limit.min < int(v.min()) and int(v.max()) < limit.max for v in (q, k) if v.numel()):
        return q.to(torch.int32), k.to(torch.int32)
    codes = torch.cat([q.reshape(-1), k.reshape(-1)]).unique(return_inverse=True)[1].to(torch.int32)
    return codes[: q.numel()].view(q.shape), codes[q.numel() :].view(k.shape)


Bounds = tuple[Tensor, Tensor]


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
    def of(index: Tensor, size: int) -> Side:
        """Return blocks of `size` tokens of `index` [S], at least one."""
        blocks = max(1, -(-len(index) // size))
        whole = index.new_zeros(blocks * size)
        whole[: len(index)] = index
        seen = torch.arange(blocks * size).view(blocks, size) < len(index)
        return Side(whole.view(blocks, size), seen, _count(seen))

    def take(self, values: Tensor, row: int) -> Tensor:
        """Return the values [blocks, t] of these tokens out of `values` [R, S], in a row of the batch."""
        return values[row if len(values) > 1 else 0][self.index]

    def only(self, seen: Tensor) -> Side:
        """Return the side with those tokens only that are also in `seen` [blocks, t]."""
        seen = self.seen & seen
        return replace(self, seen=seen, count=_count(seen))


@dataclass(frozen=True, eq=False)
class Where:
    """The pairs over which a condition is judged: of one row of the batch, the tokens that count of either side."""

    q: Side
    k: Side
    row: int

    @staticmethod
    def of(q: Tensor, k: Tensor, size: int, row: int) -> Where:
        """Return all pairs of tokens `q` [Sq] and `k` [Sk] in a row of the batch, in blocks of `size` tokens."""
        return Where(Side.of(q, size), Side.of(k, size), row)

    def total(self, i: Tensor, j: Tensor) -> Tensor:
        """Number of pairs."""
        return self.q.count[i] * self.k.count[j]


def judge(condition: Condition, where: Where) -> Judge:
    """Return the judge of a whole mask; its `exact` is False for tokens that do not count."""
    return _Every(condition if isinstance(condition, Every) else Every((condition,)), where)


class Judge(ABC):
    """Judges one condition in blocks, over the pairs of `where` only."""

    def __init__(self, where: Where) -> None:
        self.where = where

    @abstractmethod
    def bounds(self, i: Tensor, j: Tensor) -> Bounds:
        """Return the least and the largest possible number of pairs for which the condition holds."""

    @abstractmethod
    def exact(self, i: Tensor, j: Tensor) -> Tensor:
        """Return where the condition holds, bool [n, t, t]; anything for tokens that do not count."""


def _judge(condition: Condition, where: Where) -> Judge:
    if isinstance(condition, Compare):
        return _equality(condition, where) if condition.how == "eq" else _Order(condition, where)
    if isinstance(condition, Table):
        q, k = where.q.take(condition.q.values, where.row), where.k.take(condition.k.values, where.row)
        return _Counts(q, k, condition.table, condition.table.shape[1], where)
    if isinstance(condition, Opposite):
        return _Opposite(condition, where)
    if isinstance(condition, (Truth, Function)):
        return _Unknown(condition, where)
    return judge(condition, where)


class _Every(Judge):
    def __init__(self, condition: Every, where: Where) -> None:
        rest = []
        for part in condition.conditions:
            if isinstance(part, Guard):
                side = where.q if part.leaf.side == "q" else where.k
                side = side.only(side.take(part.leaf.values, where.row))
                where = replace(where, q=side) if part.leaf.side == "q" else replace(where, k=side)
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
        where = self.where
        size = (len(i), where.q.seen.shape[1], where.k.seen.shape[1])
        total = where.total(i, j)
        pairs = torch.ones(size, dtype=torch.bool)
        for part in self._parts:
            least, most = part.bounds(i, j)
            open_ = ((least < total) & (most > 0)).nonzero()[:, 0]
            if len(open_) == len(i):
                pairs &= part.exact(i, j)
            else:
                pairs.index_fill_(0, (most == 0).nonzero()[:, 0], False)
                if len(open_):
                    pairs[open_] &= part.exact(i[open_], j[open_])
        ragged = (total < size[1] * size[2]).nonzero()[:, 0]
        if len(ragged):
            pairs[ragged] &= where.q.seen[i[ragged]][:, :, None] & where.k.seen[j[ragged]][:, None, :]
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


class _Labels(Judge):
    """Equality of labels that grow with the position where a value first appears.

    Args:
        q, k: labels, int32 [blocks, t]; -1 and -2 where the other side has no such value.
    """

    def __init__(self, q: Tensor, k: Tensor, where: Where) -> None:
        super().__init__(where)
        self._q, self._k = q, k
        self._q_ends, self._k_ends = _ends(q, where.q.seen & (q >= 0)), _ends(k, where.k.seen & (k >= 0))
        # whether all tokens of a block have a label
        self._q_whole, self._k_whole = ((q >= 0) | ~where.q.seen).all(1), ((k >= 0) | ~where.k.seen).all(1)

    def bounds(self, i: Tensor, j: Tensor) -> Bounds:
        (q_min, q_max), (k_min, k_max) = self._q_ends, self._k_ends
        total = self.where.total(i, j)
        q_one = torch.where(self._q_whole & (q_min == q_max), q_min, -1)
        k_one = torch.where(self._k_whole & (k_min == k_max), k_min, -2)
        all_ = q_one[i] == k_one[j]
        meet = (q_min[i] <= k_max[j]) & (k_min[j] <= q_max[i])
        return total * all_, torch.where(all_, total, ((total - 1) * meet).clamp_(min=0))

    def exact(self, i: Tensor, j: Tensor) -> Tensor:
        return self._q[i][:, :, None] == self._k[j][:, None, :]


class _Counts(Judge):
    """A table of few kinds: counts of each kind per block give exact counts of pairs.

    Args:
        q, k: kinds, int32 [blocks, t]; of none where below 0.
        table: which kinds go together, bool [kinds of queries, kinds of keys]; None where equal ones do.
        size: number of kinds of keys.
    """

    def __init__(self, q: Tensor, k: Tensor, table: Tensor | None, size: int, where: Where) -> None:
        super().__init__(where)
        self._is_equality = table is None
        self._q, self._k = q, k
        self._q_counts = _histogram(q, where.q.seen, size if table is None else len(table))
        self._k_counts = _histogram(k, where.k.seen, size)
        if table is not None:
            self._q_counts = self._q_counts @ table.to(torch.float64)
            bits = torch.arange(size)
            self._q = (table.to(torch.int64) << bits).sum(1)[q]  # a bit for each kind of keys that it goes with
            self._k = (1 << bits)[k]

    def bounds(self, i: Tensor, j: Tensor) -> Bounds:
        total = self.where.total(i, j)
        q, k = self._q_counts[i], self._k_counts[j]
        # lists, or i [..., n, 1] and j [..., 1, m]
        count = (q * k).sum(-1) if i.dim() == 1 else q.squeeze(-2) @ k.squeeze(-3).transpose(-1, -2)
        count = count.to(total.dtype)
        return count, count

    def exact(self, i: Tensor, j: Tensor) -> Tensor:
        q, k = self._q[i][:, :, None], self._k[j][:, None, :]
        return q == k if self._is_equality else (q & k) != 0


class _Unknown(Judge):
    """A call without a rule, or a whole function that could not be traced."""

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


def _equality(condition: Compare, where: Where) -> Judge:
    """Equality of values that both sides have; labels are numbered by the first query that has the value."""
    q, k = where.q.take(condition.q.values, where.row), where.k.take(condition.k.values, where.row)
    (q_min, q_max), (k_min, k_max) = _ends(q, where.q.seen), _ends(k, where.k.seen)
    # values outside what both sides have in common are of no interest
    low, high = max(int(q_min.min()), int(k_min.min())), min(int(q_max.max()), int(k_max.max()))
    q_seen, k_seen = (where.q.seen & (q >= low) & (q <= high)), (where.k.seen & (k >= low) & (k <= high))
    span = max(0, high - low + 1)
    if span > 2 * (q.numel() + k.numel()):
        q, k = torch.cat([q.flatten(), k.flatten()]).unique(return_inverse=True)[1].split([q.numel(), k.numel()])
        q, k, low, span = q.view(q_seen.shape), k.view(k_seen.shape), 0, q.numel() + k.numel()
    q, k = (q - low).masked_fill(~q_seen, span).flatten().long(), (k - low).masked_fill(~k_seen, span).flatten().long()
    first = torch.full((span + 1,), len(q)).scatter_reduce_(0, q, torch.arange(len(q)), "amin")
    in_both = torch.zeros(span + 1, dtype=torch.bool).index_fill_(0, k, True) & (first < len(q))
    shared = in_both[:span].nonzero()[:, 0]
    shared = shared[first[shared].argsort()]
    label = torch.full((span + 1,), -1, dtype=torch.int32)
    label[shared] = torch.arange(len(shared), dtype=torch.int32)
    q, k = label[q].view(q_seen.shape), label[k].view(k_seen.shape)
    k = k.masked_fill(k < 0, -2)
    return _Counts(q, k, None, max(1, len(shared)), where) if len(shared) <= FEW else _Labels(q, k, where)


def _count(seen: Tensor) -> Tensor:
    # counts of pairs, and differences of two of them, fit
    size = seen.shape[1]
    return seen.sum(1, dtype=torch.int16 if size <= 128 else torch.int32 if size <= 1 << 15 else torch.int64)


def _ends(values: Tensor, seen: Tensor) -> Bounds:
    """Least and largest of the values that count, of each block; of none, the limits of the type, turned around."""
    limit = torch.iinfo(values.dtype)
    return values.masked_fill(~seen, limit.max).amin(1), values.masked_fill(~seen, limit.min).amax(1)


def _histogram(kinds: Tensor, seen: Tensor, size: int) -> Tensor:
    """How many tokens of each kind count, of each block [blocks, size]; kinds below 0 are none.

    Float64: exact, matrices of it can be multiplied, and no setting of matrix products for speed touches it.
    """
    kinds = kinds.masked_fill(~seen | (kinds < 0), size) + torch.arange(len(kinds))[:, None] * (size + 1)
    counts = torch.bincount(kinds.flatten(), minlength=len(kinds) * (size + 1)).view(len(kinds), size + 1)
    return counts[:, :size].to(torch.float64)
