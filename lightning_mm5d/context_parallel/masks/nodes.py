"""A mask function as a tree: conditions on pairs of a query and a key, and numbers of pairs within them.

Example: ``(k <= q) & (document[q] == document[k])`` is ``Every(Opposite(Compare("lt", q, k)), Compare("eq", document,
document))``. Leaves hold a number for each token of one side, so a tree holds O(S) elements. trace.py makes trees,
blocks.py judges them block by block. Numbers that are only compared become int32, so that equal trees have equal bytes
(`write`) for all types of numbers.

Shapes: R rows (1 where all rows of the batch are equal), Sq queries, Sk keys; all tensors on CPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Write = Callable[[Any], None]  # of bytes or a buffer
FEW = 63  # distinct values of a side for which a table of all combinations is kept; as many bits as an int64 has


class Value(ABC):
    """A value for each pair of a query and a key."""

    @abstractmethod
    def parts(self) -> Iterator[Any]:
        """Yield everything that determines the value: names, numbers, tensors and other values."""

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

    def parts(self) -> Iterator[Any]:
        yield self.side
        yield self.values

    def rows(self) -> int:
        return len(self.values)


class Constant(Value):
    """A tensor that depends on neither side: of one element, or a table that is indexed by both."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def parts(self) -> Iterator[Any]:
        yield self.tensor


class Sum(Value):
    """A number of each pair: that of the query plus that of the key. Integers that do not overflow.

    Args:
        q, k: [R, Sq] and [R, Sk], int64.
        dtype: of the sum in the mask function.
    """

    def __init__(self, q: Tensor, k: Tensor, dtype: torch.dtype) -> None:
        self.q, self.k, self.dtype = Leaf("q", q), Leaf("k", k), dtype

    def parts(self) -> Iterator[Any]:
        yield from (self.q, self.k, self.dtype)


class Distance(Value):
    """The absolute value of a sum."""

    def __init__(self, sum: Sum) -> None:
        self.sum = sum

    def parts(self) -> Iterator[Any]:
        yield self.sum


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

    def parts(self) -> Iterator[Any]:
        yield self.call


class Guard(Condition):
    """A condition on one side alone.

    Args:
        side: ``"q"`` or ``"k"``.
        values: bool [R, Sq] or [R, Sk].
    """

    def __init__(self, side: str, values: Tensor) -> None:
        self.leaf = Leaf(side, values)

    @property
    def side(self) -> str:
        return self.leaf.side

    def parts(self) -> Iterator[Any]:
        yield self.leaf


class Compare(Condition):
    """How a query's value compares to a key's.

    Args:
        how: ``"le"``, ``"lt"`` or ``"eq"``: the query's value is at most, below, or equal to the key's.
        q, k: [R, Sq] and [R, Sk], without NaN; of any type that keeps their order.
    """

    def __init__(self, how: str, q: Tensor, k: Tensor) -> None:
        q, k = _ranks(q, k)
        self.how, self.q, self.k = how, Leaf("q", q), Leaf("k", k)

    def parts(self) -> Iterator[Any]:
        yield from (self.how, self.q, self.k)


class Table(Condition):
    """A condition that only depends on which of a few kinds query and key are of.

    Args:
        q, k: kinds, int64 [R, Sq] and [R, Sk].
        table: bool [kinds of queries, kinds of keys], at most `FEW` each.
    """

    def __init__(self, q: Tensor, k: Tensor, table: Tensor) -> None:
        self.q, self.k, self.table = Leaf("q", q), Leaf("k", k), table

    def parts(self) -> Iterator[Any]:
        yield from (self.q, self.k, self.table)


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

    def parts(self) -> Iterator[Any]:
        yield self.condition


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
        return Guard(condition.side, ~condition.leaf.values)
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
