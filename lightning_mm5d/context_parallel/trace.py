"""Reads what a mask function computes, by calling it with marked index tensors.

A mask function is any callable of four index tensors that broadcast (batch, head, query, key), as transformers' are. The
marks follow every torch function: what depends on one side alone is computed at once for all tokens, which is O(S);
where a query's and a key's values meet, a node of a tree (nodes.py) is made instead of S x S elements.

The world is closed: a function that is not in the tables below, a result of another shape, an operation in place, a
look at a value or a shape ends the trace, and the mask counts as unknown (`Untraceable`), which is right everywhere and
slow for long sequences. So a function may be refused, but never misread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from lightning_mm5d.context_parallel.nodes import (
    Call,
    Compare,
    Condition,
    Constant,
    Distance,
    Every,
    Guard,
    Leaf,
    Sum,
    Value,
    every,
    negate,
    some,
    truth,
)

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
TABLE = 1 << 20  # elements of the largest table that is indexed by queries and keys at once and still kept in the tree


LARGE = 1 << 60  # integers up to here can be added without a check


class Untraceable(Exception):  # noqa: N818  a signal to the caller, not a fault
    """A mask function does what cannot be followed."""


def trace(function: MaskFunction, batch: int, q_length: int, k_length: int, device: torch.device) -> Condition:
    """Return what `function` computes of all pairs.

    Args:
        function: takes indices [B, 1, 1, 1], [1, 1, 1, 1], [1, 1, Sq, 1], [1, 1, 1, Sk].
        batch, q_length, k_length: B, Sq, Sk.
        device: where the function's own tables are.

    Raises:
        Untraceable: where that cannot be told, or the function raises.
    """
    tracer = _Tracer(batch, q_length, k_length, device)
    try:
        with torch.no_grad():
            return tracer.condition(function(*tracer.indices()))
    except Exception as error:  # anything that a function does with what looks like no ordinary tensor
        raise Untraceable(str(error)) from error


class _Side:
    """Values that depend on one side (``"q"``, ``"k"``), or on the row of the batch alone (``""``)."""

    def __init__(self, side: str, tensor: Tensor) -> None:
        self.side, self.tensor = side, tensor
        self.flat: Tensor | None = None


class _Marked(Tensor):
    """A tensor whose dependence on queries and keys is known; pairs hold no elements."""

    value: _Side | Value
    tracer: _Tracer

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for argument in (*args, *kwargs.values()):
            for one in argument if isinstance(argument, (tuple, list)) else (argument,):
                if isinstance(one, _Marked):
                    with torch._C.DisableTorchFunctionSubclass():
                        return one.tracer.call(func, args, kwargs)
        raise Untraceable(f"{func}")


class _Tracer:
    """The rules: what each function of torch makes of marked tensors."""

    def __init__(self, batch: int, q_length: int, k_length: int, device: torch.device) -> None:
        self._lengths = {"": 1, "q": q_length, "k": k_length}
        self._batch, self._device = batch, device

    def indices(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The arguments of the mask function."""

        def count(length: int) -> Tensor:
            return torch.arange(length, device=self._device)

        return (
            self._mark(_Side("", count(self._batch)[:, None, None, None])),
            torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=self._device),
            self._mark(_Side("q", count(self._lengths["q"])[None, None, :, None])),
            self._mark(_Side("k", count(self._lengths["k"])[None, None, None, :])),
        )

    def condition(self, result: Any) -> Condition:
        """Return the condition that a result of the mask function is."""
        value = self._read(result)
        if self._dtype(value) != torch.bool:
            value = self._read(self.call(torch.ne, (result, 0), {}))
        return self._condition(value)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what `func` makes of its arguments, of which at least one is marked."""
        if func in _ATTRIBUTES:
            value = self._read(args[0])
            return self._device if _ATTRIBUTES[func] == "device" else self._dtype(value)
        name = _NAMES.get(func)
        if name is None or "out" in kwargs:
            raise Untraceable(f"{func} is unknown")
        if name == "new":
            return self._new(func, args, kwargs)
        values, keywords = self._read(args), self._read(kwargs)
        self._check_tables(name, values, keywords)
        sides = {side for one in (*_flat(values), *_flat(keywords)) for side in _sides(one)}
        if not {"q", "k"} <= sides:
            tensor = func(*_plain(values), **_plain(keywords))
            return self._mark(self._checked(_Side("".join(sides), tensor)))
        if any(isinstance(one, (_Side, Value)) for one in _flat(keywords)):
            raise Untraceable(f"{func} with a tensor as keyword")
        dtype = self._sample(func, values, keywords)
        if name.startswith("r") and name[1:] in ("sub", "add", "mul", "and", "or", "xor"):
            name, values = name[1:], (values[1], values[0])
        rule = getattr(self, f"_{name}", None)
        result = rule(dtype, *values) if rule is not None and (not keywords or name == "cast") else None
        return self._mark(self._any(func, values, keywords, dtype) if result is None else result)

    def _check_tables(self, name: str, values: Any, keywords: dict[str, Any]) -> None:
        """Tensors that are not marked have one element, but for tables; a table is indexed along all its dims."""
        if name == "index":
            table, at = values[0], values[1] if isinstance(values[1], tuple) else (values[1],)
            if isinstance(table, (_Side, Value)) or table.dim() != len(at):
                raise Untraceable("tokens are picked, or a table is not indexed along all its dims")
            for one in at:
                if isinstance(one, bool) or not isinstance(one, (_Side, Value, Tensor, int)):
                    raise Untraceable("an index that is not an integer")
                if not isinstance(one, int) and (one_type := self._dtype(one)) in (torch.bool, torch.uint8, None):
                    raise Untraceable(f"an index of {one_type}")
        plain = _flat(values[1:] if name == "index" else values) + _flat(keywords)
        if any(isinstance(one, Tensor) and one.numel() != 1 for one in plain):
            raise Untraceable("a tensor whose elements are not indexed")

    # what a rule below returns None for becomes a call of which nothing is known

    def _and(self, dtype: torch.dtype, x: Any, y: Any) -> Value | None:
        return every(self._condition(x), self._condition(y)) if self._are_bool(x, y) else None

    def _or(self, dtype: torch.dtype, x: Any, y: Any) -> Value | None:
        return some(self._condition(x), self._condition(y)) if self._are_bool(x, y) else None

    def _xor(self, dtype: torch.dtype, x: Any, y: Any) -> Value | None:
        return negate(cast(Condition, self._eq(dtype, x, y))) if self._are_bool(x, y) else None

    def _not(self, dtype: torch.dtype, x: Any) -> Value | None:
        return negate(self._condition(x)) if self._are_bool(x) else None

    def _where(self, dtype: torch.dtype, which: Any, x: Any, y: Any) -> Value | None:
        if not self._are_bool(which, x, y):
            return None
        first = self._condition(which)
        return some(every(first, self._condition(x)), every(negate(first), self._condition(y)))

    def _cast(self, dtype: torch.dtype, x: Any, *to: Any) -> Value | None:
        if dtype == self._dtype(x):
            return cast(Value, x)
        return self._read(self.call(torch.ne, (self._mark(x), 0), {})) if dtype == torch.bool else None

    def _sub(self, dtype: torch.dtype, x: Any, y: Any) -> Value | None:
        return self._add(dtype, x, y, -1)

    def _add(self, dtype: torch.dtype, x: Any, y: Any, sign: int = 1) -> Value | None:
        left, right = self._sum(x), self._sum(y)
        if left is None or right is None or dtype.is_floating_point or dtype == torch.bool:
            return None
        total = [a + sign * b for a, b in zip(left, right, strict=True)]
        bound = sum(max(abs(int(part.min())), abs(int(part.max()))) for part in total)
        return Sum(total[0], total[1], dtype) if bound <= torch.iinfo(dtype).max else None

    def _neg(self, dtype: torch.dtype, x: Any) -> Value | None:
        return Sum(-x.q.values, -x.k.values, dtype) if isinstance(x, Sum) and _signed(dtype) else None

    def _abs(self, dtype: torch.dtype, x: Any) -> Value | None:
        return Distance(x) if isinstance(x, Sum) and _signed(dtype) else None

    def _mul(self, dtype: torch.dtype, x: Any, y: Any) -> Value | None:
        return self._and(dtype, x, y)

    def _le(self, dtype: torch.dtype, x: Any, y: Any) -> Value | None:
        return self._compare("le", x, y)

    def _lt(self, dtype: torch.dtype, x: Any, y: Any) -> Value | None:
        return self._compare("lt", x, y)

    def _ge(self, dtype: torch.dtype, x: Any, y: Any) -> Value | None:
        return self._compare("le", y, x)

    def _gt(self, dtype: torch.dtype, x: Any, y: Any) -> Value | None:
        return self._compare("lt", y, x)

    def _eq(self, dtype: torch.dtype, x: Any, y: Any) -> Value | None:
        if self._are_bool(x, y):
            a, b = self._condition(x), self._condition(y)
            return some(every(a, b), every(negate(a), negate(b)))
        return self._compare("eq", x, y)

    def _ne(self, dtype: torch.dtype, x: Any, y: Any) -> Value | None:
        equal = self._eq(dtype, x, y)
        return None if equal is None else negate(cast(Condition, equal))

    def _compare(self, how: str, x: Any, y: Any) -> Condition | None:
        if isinstance(x, Distance) or isinstance(y, Distance):
            return self._compare_distance(how, x, y)
        if isinstance(x, _Side) and isinstance(y, _Side) and {x.side, y.side} == {"q", "k"}:
            dtype = torch.result_type(x.tensor, y.tensor)
            q, k = (self._flat(side).to(dtype) for side in ((x, y) if x.side == "q" else (y, x)))
            if q.isnan().any() or k.isnan().any():
                return None
            return _oriented(how, q, k, turned=x.side == "k")
        left, right = self._sum(x), self._sum(y)
        if left is None or right is None:
            return None
        return _oriented(how, left[0] - right[0], right[1] - left[1], turned=False)

    def _compare_distance(self, how: str, x: Any, y: Any) -> Condition | None:
        if how == "eq":
            x, y = (x, y) if isinstance(x, Distance) else (y, x)
            below, above = self._compare_distance("le", x, y), self._compare_distance("le", y, x)
            return None if below is None or above is None else every(below, above)
        if not isinstance(x, Distance):  # y < |x| where not |x| <= y
            within = self._compare_distance("lt" if how == "le" else "le", y, x)
            return None if within is None else negate(within)
        if isinstance(y, Distance):
            return None
        inverse = Sum(-x.sum.q.values, -x.sum.k.values, x.sum.dtype)
        one, other = self._compare(how, x.sum, y), self._compare(how, inverse, y)
        return None if one is None or other is None else every(one, other)

    def _any(self, func: Any, values: Any, keywords: dict[str, Any], dtype: torch.dtype) -> Value:
        call = Call(func, self._arguments(values, _NAMES[func] == "index"), keywords, dtype)
        return truth(call) if dtype == torch.bool else call

    def _arguments(self, values: Any, is_indexing: bool) -> tuple[Any, ...]:
        def keep(value: Any) -> Any:
            if isinstance(value, (tuple, list)):
                return self._arguments(value, False)
            if isinstance(value, _Side):
                return Leaf(value.side or "q", self._flat(value, value.side or "q"))
            if isinstance(value, Condition):
                raise Untraceable("a number that depends on a condition on pairs")
            if isinstance(value, Tensor):
                if value.numel() > (TABLE if is_indexing else 1):
                    raise Untraceable("a table that is not indexed, or too large")
                return Constant(value.detach().cpu())
            return value

        return tuple(keep(value) for value in values)

    def _new(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = self._read(args[0])
        if any(isinstance(one, _Marked) for one in (*args[1:], *kwargs.values())):
            raise Untraceable("a new tensor of traced values")
        if isinstance(value, _Side):
            tensor = func(value.tensor, *args[1:], **kwargs)
        else:
            tensor = func(torch.empty((), dtype=self._dtype(value), device=self._device), *args[1:], **kwargs)
        if tensor.numel() > 1 and not (isinstance(value, _Side) and tensor.shape == value.tensor.shape):
            raise Untraceable("a new tensor of a shape of its own")
        return self._mark(_Side(value.side, tensor)) if isinstance(value, _Side) and tensor.numel() > 1 else tensor

    def _read(self, marked: Any) -> Any:
        """The values behind marked tensors, anywhere in arguments."""
        if isinstance(marked, _Marked):
            return marked.value
        if isinstance(marked, (tuple, list)):
            return tuple(self._read(one) for one in marked)
        return {key: self._read(one) for key, one in marked.items()} if isinstance(marked, dict) else marked

    def _mark(self, value: _Side | Value) -> Tensor:
        if isinstance(value, _Side):
            marked = value.tensor.as_subclass(_Marked)
        else:  # without elements: whatever slips past the rules cannot pass for a result
            marked = torch.empty((), dtype=self._dtype(value), device="meta").as_subclass(_Marked)
        marked.value, marked.tracer = value, self
        return marked

    def _checked(self, side: _Side) -> _Side:
        shape = {"": (1, 1, 1), "q": (1, self._lengths["q"], 1), "k": (1, 1, self._lengths["k"])}[side.side]
        if not isinstance(side.tensor, Tensor) or side.tensor.shape not in ((1, *shape), (self._batch, *shape)):
            raise Untraceable("a result of another shape than the indices'")
        return side

    def _flat(self, side: _Side, on: str | None = None) -> Tensor:
        """Values of a side [R, S] on CPU, one row where all rows are alike; ones of rows alone as those of side `on`."""
        if side.flat is None:
            flat = side.tensor.reshape(len(side.tensor), -1)
            if len(flat) > 1 and bool((flat == flat[:1]).all()):
                flat = flat[:1]
            side.flat = flat.detach().cpu().contiguous()
        return side.flat if side.side or on is None else side.flat.expand(-1, self._lengths[on])

    def _sum(self, x: Any) -> tuple[Tensor, Tensor] | None:
        """Integers as a sum of a query's and a key's share, int64 [R, Sq or 1] and [R, Sk or 1]."""
        if isinstance(x, Sum):
            return x.q.values, x.k.values
        if isinstance(x, bool) or isinstance(x, (_Side, Tensor, int)) is False:
            return None
        zero = torch.zeros((1, 1), dtype=torch.int64)
        if isinstance(x, int):
            return (zero + x, zero) if abs(x) <= LARGE else None
        tensor = x if isinstance(x, Tensor) else self._flat(x)
        if tensor.is_floating_point() or tensor.dtype == torch.bool or (isinstance(x, Tensor) and x.numel() != 1):
            return None
        share = tensor.detach().cpu().to(torch.int64).reshape(-1, tensor.shape[-1] if isinstance(x, _Side) else 1)
        if int(share.max()) > LARGE or int(share.min()) < -LARGE:
            return None
        return (zero, share) if isinstance(x, _Side) and x.side == "k" else (share, zero)

    def _condition(self, value: Any) -> Condition:
        """A bool as a condition."""
        if isinstance(value, Condition):
            return value
        if isinstance(value, _Side):
            return Guard(value.side or "q", self._flat(value, value.side or "q"))
        if isinstance(value, Tensor) and value.numel() != 1:
            raise Untraceable("a tensor that is not indexed")
        return Every() if bool(value) else negate(Every())

    def _are_bool(self, *values: Any) -> bool:
        return all(self._dtype(value) == torch.bool for value in values)

    def _dtype(self, value: Any) -> torch.dtype | None:
        if isinstance(value, Condition):
            return torch.bool
        if isinstance(value, Distance):
            return value.sum.dtype
        if isinstance(value, _Side):
            return value.tensor.dtype
        return torch.bool if isinstance(value, bool) else getattr(value, "dtype", None)

    def _sample(self, func: Any, values: Any, keywords: dict[str, Any]) -> torch.dtype:
        """The dtype of a result, from one element."""

        def one(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(one(part) for part in value)
            if isinstance(value, (_Side, Value)):
                size = (1, 1, 1, 1)
                return torch.ones(size, dtype=self._dtype(value), device=self._device)
            return value

        if _NAMES[func] == "index":
            return cast(torch.dtype, values[0].dtype)
        return cast(torch.dtype, func(*one(values), **keywords).dtype)


def _oriented(how: str, q: Tensor, k: Tensor, turned: bool) -> Condition:
    """The comparison of `q` to `k`, or of `k` to `q` where it is turned."""
    if not turned or how == "eq":
        return Compare(how, q, k)
    return negate(Compare("lt" if how == "le" else "le", q, k))


def _signed(dtype: torch.dtype) -> bool:
    return dtype != torch.bool and not dtype.is_floating_point and torch.iinfo(dtype).min < 0


def _flat(values: Any) -> list[Any]:
    """All values within tuples and dicts."""
    if isinstance(values, dict):
        values = tuple(values.values())
    return [one for value in values for one in _flat(value)] if isinstance(values, tuple) else [values]


def _sides(value: Any) -> str:
    if isinstance(value, _Side):
        return value.side
    return "qk" if isinstance(value, Value) else ""


def _plain(values: Any) -> Any:
    """The same arguments with tensors for sides."""
    if isinstance(values, tuple):
        return tuple(_plain(value) for value in values)
    if isinstance(values, dict):
        return {key: _plain(value) for key, value in values.items()}
    return values.tensor if isinstance(values, _Side) else values


# names of functions of torch and of methods of tensors, by the rule that follows them; "any": elementwise, without a rule
_RULES = {
    "and": "bitwise_and logical_and __and__",
    "or": "bitwise_or logical_or __or__",
    "xor": "bitwise_xor logical_xor __xor__",
    "not": "bitwise_not logical_not __invert__",
    "rand": "__rand__",
    "ror": "__ror__",
    "rxor": "__rxor__",
    "where": "where",
    "add": "add __add__",
    "radd": "__radd__",
    "sub": "sub subtract __sub__",
    "rsub": "rsub __rsub__",
    "mul": "mul multiply __mul__",
    "rmul": "__rmul__",
    "neg": "neg negative __neg__",
    "abs": "abs absolute __abs__",
    "le": "le less_equal __le__",
    "lt": "lt less __lt__",
    "ge": "ge greater_equal __ge__",
    "gt": "gt greater __gt__",
    "eq": "eq __eq__",
    "ne": "ne not_equal __ne__",
    "cast": "to type type_as bool byte short int long half bfloat16 float double cpu cuda clone detach contiguous",
    "new": "new_ones new_zeros new_full ones_like zeros_like full_like",
    "index": "__getitem__",
    "any": "div divide true_divide floor_divide remainder fmod pow square sign clamp clip clamp_min clamp_max minimum"
    " maximum floor ceil trunc round bitwise_left_shift bitwise_right_shift isin __floordiv__ __rfloordiv__ __truediv__"
    " __rtruediv__ __mod__ __rmod__ __pow__ __rpow__ __lshift__ __rlshift__ __rshift__ __rrshift__ __div__ __rdiv__",
}
_NAMES: dict[Any, str] = {
    getattr(owner, name): rule
    for rule, names in _RULES.items()
    for name in names.split()
    for owner in (torch, Tensor)
    if hasattr(owner, name) and isinstance(getattr(owner, name), Callable)  # type: ignore[arg-type]
}
_ATTRIBUTES = {Tensor.device.__get__: "device", Tensor.dtype.__get__: "dtype"}  # type: ignore[attr-defined]
