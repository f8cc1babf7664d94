"""Turns a mask function into a tree of conditions, by one call with marked index tensors.

A mask function is any callable of four index tensors that broadcast (batch, head, query, key), as transformers' are.
The marks follow every torch function. Values that depend on one side alone are computed at once for all tokens, O(S).
Where a query's and a key's values meet, a node of the tree (blocks.py) takes the place of S x S elements.
Example: in ``document[q] == document[k]`` both lookups are computed, ``==`` becomes a `Compare`.

It refuses (`Untraceable`) functions that are not in the tables below, results of another shape, operations in place,
looks at a value or a shape. The mask is then evaluated pair by pair: slow for long sequences, and never misread.

Rules for torch's elementwise functions on values of pairs: they return nodes that blocks.py can bound.

A rule returns None where it does not apply; the function then becomes a `Call`, which only evaluation can judge.
Comparisons take the form "query's value against key's value". Example: ``q - k < w`` becomes ``q - w < k``, and
``|q - k| <= w`` two such comparisons. Rules compute with integers that cannot overflow; floats are only compared.

Arguments of rules: the dtype of the result in torch, and values of pairs (blocks.py), leaves, tensors of one element,
Python numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from lightning_mm5d.context_parallel.masks.blocks import (
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
from lightning_mm5d.sharded.host_copies import HostCopies

LARGE = 1 << 60  # integers up to here can be added without a check


def dtype_of(value: Any) -> torch.dtype | None:
    """Return the type of a value's elements."""
    if isinstance(value, Condition):
        return torch.bool
    if isinstance(value, Distance):
        return value.sum.dtype
    if isinstance(value, Leaf):
        return value.values.dtype
    return torch.bool if isinstance(value, bool) else getattr(value, "dtype", None)


def condition_of(value: Any) -> Condition:
    """Return a value as a condition: numbers are true where they are not zero."""
    if isinstance(value, Leaf):
        return Guard(Leaf(value.side, value.values != 0))
    if isinstance(value, Condition):
        return value
    if isinstance(value, Value) and dtype_of(value) != torch.bool:
        equal = _compare("eq", value, 0)
        return truth(Call(torch.ne, (value, 0), {}, torch.bool)) if equal is None else negate(equal)
    return Every() if bool(value) else negate(Every())


def _and(dtype: torch.dtype, x: Any, y: Any) -> Value | None:
    return every(condition_of(x), condition_of(y)) if _are_bool(x, y) else None


def _or(dtype: torch.dtype, x: Any, y: Any) -> Value | None:
    return some(condition_of(x), condition_of(y)) if _are_bool(x, y) else None


def _xor(dtype: torch.dtype, x: Any, y: Any) -> Value | None:
    return negate(_same(x, y)) if _are_bool(x, y) else None


def _not(dtype: torch.dtype, x: Any) -> Value | None:
    return negate(condition_of(x)) if _are_bool(x) else None


def _where(dtype: torch.dtype, which: Any, x: Any, y: Any) -> Value | None:
    if not _are_bool(which, x, y):
        return None
    first = condition_of(which)
    return some(every(first, condition_of(x)), every(negate(first), condition_of(y)))


def _cast(dtype: torch.dtype, x: Any, *to: Any) -> Value | None:
    if dtype == dtype_of(x):
        return x
    return condition_of(x) if dtype == torch.bool else None


def _add(dtype: torch.dtype, x: Any, y: Any, sign: int = 1) -> Value | None:
    left, right = _shares(x), _shares(y)
    if left is None or right is None or dtype.is_floating_point or dtype == torch.bool:
        return None
    q, k = left[0] + sign * right[0], left[1] + sign * right[1]
    fits = _largest(q) + _largest(k) <= torch.iinfo(dtype).max and torch.iinfo(dtype).min < 0
    return Sum(q, k, dtype) if fits else None


def _neg(dtype: torch.dtype, x: Any) -> Value | None:
    return Sum(-x.q.values, -x.k.values, dtype) if isinstance(x, Sum) else None


def _abs(dtype: torch.dtype, x: Any) -> Value | None:
    return Distance(x) if isinstance(x, Sum) else None


def _eq(dtype: torch.dtype, x: Any, y: Any) -> Condition | None:
    return _same(x, y) if _are_bool(x, y) else _compare("eq", x, y)


def _ne(dtype: torch.dtype, x: Any, y: Any) -> Condition | None:
    equal = _eq(dtype, x, y)
    return None if equal is None else negate(equal)


RULES: dict[str, Callable[..., Value | None]] = {
    "and": _and,
    "mul": _and,  # of bools
    "or": _or,
    "xor": _xor,
    "not": _not,
    "where": _where,
    "cast": _cast,
    "add": _add,
    "sub": lambda dtype, x, y: _add(dtype, x, y, -1),
    "rsub": lambda dtype, x, y: _add(dtype, y, x, -1),
    "neg": _neg,
    "abs": _abs,
    "eq": _eq,
    "ne": _ne,
    "le": lambda dtype, x, y: _compare("le", x, y),
    "lt": lambda dtype, x, y: _compare("lt", x, y),
    "ge": lambda dtype, x, y: _compare("le", y, x),
    "gt": lambda dtype, x, y: _compare("lt", y, x),
}


def _same(x: Any, y: Any) -> Condition:
    a, b = condition_of(x), condition_of(y)
    return some(every(a, b), every(negate(a), negate(b)))


def _compare(how: str, x: Any, y: Any) -> Condition | None:
    if isinstance(x, Distance) or isinstance(y, Distance):
        return _compare_distance(how, x, y)
    if isinstance(x, Leaf) and isinstance(y, Leaf) and x.side != y.side:
        dtype = torch.result_type(x.values, y.values)
        if dtype.is_complex:
            return None
        q, k = (leaf.values.to(dtype) for leaf in ((x, y) if x.side == "q" else (y, x)))
        if q.isnan().any() or k.isnan().any():
            return None
        if x.side == "q" or how == "eq":
            return Compare(how, q, k)
        return negate(Compare("lt" if how == "le" else "le", q, k))
    left, right = _shares(x), _shares(y)
    if left is None or right is None:
        return None
    return Compare(how, left[0] - right[0], right[1] - left[1])


def _compare_distance(how: str, x: Any, y: Any) -> Condition | None:
    if how == "eq":
        x, y = (x, y) if isinstance(x, Distance) else (y, x)
        below, above = _compare_distance("le", x, y), _compare_distance("le", y, x)
        return None if below is None or above is None else every(below, above)
    if not isinstance(x, Distance):  # y < |x| where not |x| <= y
        within = _compare_distance("lt" if how == "le" else "le", y, x)
        return None if within is None else negate(within)
    if isinstance(y, Distance):
        return None
    inverse = Sum(-x.sum.q.values, -x.sum.k.values, x.sum.dtype)
    upper, lower = _compare(how, x.sum, y), _compare(how, inverse, y)
    return None if upper is None or lower is None else every(upper, lower)


def _shares(x: Any) -> tuple[Tensor, Tensor] | None:
    """Return the query's and the key's share of an integer, int64 [R, Sq or 1] and [R, Sk or 1]; None for others."""
    if isinstance(x, Sum):
        return x.q.values, x.k.values
    if isinstance(x, bool) or not isinstance(x, (Leaf, Tensor, int)):
        return None
    zero = torch.zeros((1, 1), dtype=torch.int64)
    if isinstance(x, int):
        return (zero + x, zero) if abs(x) <= LARGE else None
    tensor = x.values if isinstance(x, Leaf) else x.detach().cpu().reshape(1, 1)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        return None
    share = tensor.to(torch.int64)
    if _largest(share) > LARGE:
        return None
    return (zero, share) if isinstance(x, Leaf) and x.side == "k" else (share, zero)


def _largest(values: Tensor) -> int:
    return max(abs(int(values.min())), abs(int(values.max())))


def _are_bool(*values: Any) -> bool:
    return all(dtype_of(value) == torch.bool for value in values)


MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
TABLE = 1 << 20  # elements of the largest table that is indexed by queries and keys at once and still kept in the tree


class Untraceable(Exception):  # noqa: N818  a signal to the caller, not a fault
    """A mask function does something that the trace cannot follow."""


def trace(
    function: MaskFunction,
    batch: int,
    q_length: int,
    k_length: int,
    device: torch.device,
    host: HostCopies | None = None,
) -> Condition:
    """Return the condition on all pairs that `function` computes.

    It is traced on the host, with what is known there of the function's tables; on `device` where that fails.

    Args:
        function: takes indices [B, 1, 1, 1], [1, 1, 1, 1], [1, 1, Sq, 1], [1, 1, 1, Sk].
        batch, q_length, k_length: B, Sq, Sk.
        device: where the function's own tables are.
        host: what is known of them on the host; None knows nothing.

    Raises:
        Untraceable: the trace cannot follow the function, or the function raises.
    """
    if device.type != "cpu" and host is not None:
        with suppress(Untraceable):
            return _traced(function, _Tracer(batch, q_length, k_length, torch.device("cpu"), host))
    return _traced(function, _Tracer(batch, q_length, k_length, device))


def _traced(function: MaskFunction, tracer: _Tracer) -> Condition:
    try:
        with torch.no_grad():
            return tracer.condition(function(*tracer.indices()))
    except Exception as error:  # anything that a function does with what looks like no ordinary tensor
        raise Untraceable(str(error)) from error


class _Side:
    """Values that depend on one side (``"q"``, ``"k"``), or on the row of the batch alone (``""``)."""

    def __init__(self, side: str, tensor: Tensor) -> None:
        self.side, self.tensor = side, tensor
        self.leaf: Leaf | None = None


class _Marked(Tensor):
    """A tensor whose dependence on queries and keys is known; pairs hold no elements."""

    value: _Side | Value
    tracer: _Tracer

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for argument in (*args, *kwargs.values()):
            for part in argument if isinstance(argument, (tuple, list)) else (argument,):
                if isinstance(part, _Marked):
                    with torch._C.DisableTorchFunctionSubclass():
                        return part.tracer.call(func, args, kwargs)
        raise Untraceable(f"{func}")


class _Tracer:
    """Follows one call of a mask function."""

    def __init__(
        self, batch: int, q_length: int, k_length: int, device: torch.device, host: HostCopies | None = None
    ) -> None:
        self._lengths = {"": 1, "q": q_length, "k": k_length}
        self._batch, self._device, self._host = batch, device, host

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
        """Return a result of the mask function as a condition."""
        value = self._read(result)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise Untraceable("a result that does not depend on the indices")
        return condition_of(self._leaf(value))

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the marked result of `func`; at least one argument is marked."""
        if func in _WATCHED:
            return func(*args)
        if func in _ATTRIBUTES:
            return self._device if _ATTRIBUTES[func] == "device" else self._dtype(self._read(args[0]))
        name = _NAMES.get(func)
        if name is None or "out" in kwargs:
            raise Untraceable(f"{func} is unknown")
        if name == "new":
            return self._new(func, args, kwargs)
        values, keywords = self._read(args), self._read(kwargs)
        self._check_tables(name, values, keywords)
        sides = {side for leaf in tree_leaves((values, keywords)) for side in _sides(leaf)}
        if not {"q", "k"} <= sides:
            args, kwargs = tree_map_only(_Side, lambda side: side.tensor, (values, keywords))
            return self._mark(self._checked(_Side("".join(sides), func(*args, **kwargs))))
        if any(isinstance(leaf, (_Side, Value)) for leaf in tree_leaves(keywords)):
            raise Untraceable(f"{func} with a tensor as keyword")
        dtype = self._sample(name, func, values, keywords)
        rule = RULES.get(name) if not keywords or name == "cast" else None
        result = None if rule is None else rule(dtype, *tree_map(self._leaf, values))
        if result is None:
            call = Call(func, self._as_parts(values, name == "index"), keywords, dtype)
            result = truth(call) if dtype == torch.bool else call
        return self._mark(result)

    def _check_tables(self, name: str, values: Any, keywords: dict[str, Any]) -> None:
        """Tensors that are not marked have one element, but for tables; a table is indexed along all its dims."""
        if name == "index":
            table, at = values[0], values[1] if isinstance(values[1], tuple) else (values[1],)
            if isinstance(table, (_Side, Value)) or table.dim() != len(at):
                raise Untraceable("tokens are picked, or a table is not indexed along all its dims")
            for index in at:
                if isinstance(index, bool) or not isinstance(index, (_Side, Value, Tensor, int)):
                    raise Untraceable("an index that is not an integer")
                if not isinstance(index, int) and self._dtype(index) in (torch.bool, torch.uint8, None):
                    raise Untraceable(f"an index of {self._dtype(index)}")
        plain = tree_leaves((values[1:] if name == "index" else values, keywords))
        if any(isinstance(leaf, Tensor) and leaf.numel() != 1 for leaf in plain):
            raise Untraceable("a tensor whose elements are not indexed")

    def _new(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """New tensors of one element, or of the shape of values of one side."""
        value = self._read(args[0])
        if any(isinstance(argument, _Marked) for argument in (*args[1:], *kwargs.values())):
            raise Untraceable("a new tensor of traced values")
        if isinstance(value, _Side):
            tensor = func(value.tensor, *args[1:], **kwargs)
            if tensor.numel() > 1 and tensor.shape == value.tensor.shape:
                return self._mark(_Side(value.side, tensor))
        else:
            tensor = func(torch.empty((), dtype=self._dtype(value), device=self._device), *args[1:], **kwargs)
        if tensor.numel() != 1:
            raise Untraceable("a new tensor of a shape of its own")
        return tensor

    def _sample(self, name: str, func: Any, values: Any, keywords: dict[str, Any]) -> torch.dtype:
        """The dtype of a result, from one element."""

        def sample(value: _Side | Value) -> Tensor:
            return torch.ones((1, 1, 1, 1), dtype=self._dtype(value), device=self._device)

        if name == "index":
            return cast(torch.dtype, values[0].dtype)
        return cast(torch.dtype, func(*tree_map_only((_Side, Value), sample, values), **keywords).dtype)

    def _read(self, marked: Any) -> Any:
        """Return arguments with the values of marked tensors in their places."""
        if isinstance(marked, _Marked):
            return marked.value
        if isinstance(marked, (tuple, list)):
            return tuple(self._read(part) for part in marked)
        if isinstance(marked, dict):
            return {key: self._read(value) for key, value in marked.items()}
        if isinstance(marked, Tensor) and self._host is not None:
            return self._host.of(marked)
        return marked

    def _mark(self, value: _Side | Value) -> Tensor:
        if isinstance(value, _Side):
            marked = value.tensor.as_subclass(_Marked)
        else:  # without elements: a value that slips past the rules cannot pass for a result
            marked = torch.empty((), dtype=self._dtype(value), device="meta").as_subclass(_Marked)
        marked.value, marked.tracer = value, self
        return marked

    def _checked(self, side: _Side) -> _Side:
        shape = {"": (1, 1, 1), "q": (1, self._lengths["q"], 1), "k": (1, 1, self._lengths["k"])}[side.side]
        if not isinstance(side.tensor, Tensor) or side.tensor.shape not in ((1, *shape), (self._batch, *shape)):
            raise Untraceable("a result of another shape than the indices'")
        return side

    def _dtype(self, value: Any) -> torch.dtype | None:
        return value.tensor.dtype if isinstance(value, _Side) else dtype_of(value)

    def _leaf(self, value: Any) -> Any:
        """Return a side as a leaf: on CPU, one row where all are equal; values of the row alone count as a query's."""
        if not isinstance(value, _Side):
            return value
        if value.leaf is None:
            flat = value.tensor.detach().reshape(len(value.tensor), -1)
            if len(flat) > 1 and bool((flat == flat[:1]).all()):
                flat = flat[:1]
            side = value.side or "q"
            value.leaf = Leaf(side, flat.cpu().expand(-1, self._lengths[side]).contiguous())
        return value.leaf

    def _as_parts(self, values: tuple[Any, ...], is_indexing: bool) -> tuple[Any, ...]:
        """Arguments as parts of a tree."""

        def keep(value: Any) -> Any:
            if isinstance(value, Condition):
                raise Untraceable("a number that depends on a condition on pairs")
            if isinstance(value, Tensor):
                if value.numel() > (TABLE if is_indexing and value is values[0] else 1):
                    raise Untraceable("a table that is too large")
                return Constant(value.detach().cpu())
            return self._leaf(value)

        return tree_map(keep, values)


def _sides(value: Any) -> str:
    if isinstance(value, _Side):
        return value.side
    return "qk" if isinstance(value, Value) else ""


# names of functions of torch and of methods of tensors, by their rule; "other": elementwise, without a rule
_FUNCTIONS = {
    "and": "bitwise_and logical_and __and__ __rand__",
    "or": "bitwise_or logical_or __or__ __ror__",
    "xor": "bitwise_xor logical_xor __xor__ __rxor__",
    "not": "bitwise_not logical_not __invert__",
    "where": "where",
    "add": "add __add__ __radd__",
    "sub": "sub subtract __sub__",
    "rsub": "rsub __rsub__",
    "mul": "mul multiply __mul__ __rmul__",
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
    "other": "div divide true_divide floor_divide remainder fmod pow square sign clamp clip clamp_min clamp_max minimum"
    " maximum floor ceil trunc round bitwise_left_shift bitwise_right_shift __floordiv__ __rfloordiv__ __truediv__"
    " __rtruediv__ __mod__ __rmod__ __pow__ __rpow__ __lshift__ __rlshift__ __rshift__ __rrshift__ __div__ __rdiv__",
}
_NAMES: dict[Any, str] = {
    getattr(owner, name): rule
    for rule, names in _FUNCTIONS.items()
    for name in names.split()
    for owner in (torch, Tensor)
    if callable(getattr(owner, name, None)) and not isinstance(getattr(owner, name), torch.dtype)
}
# what modes around the step ask of each result of an operation
_WATCHED = (Tensor.is_inference, Tensor._version.__get__, Tensor.grad_fn.__get__)  # type: ignore[attr-defined, union-attr]
_ATTRIBUTES = {Tensor.device.__get__: "device", Tensor.dtype.__get__: "dtype"}  # type: ignore[attr-defined]
