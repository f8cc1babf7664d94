"""Rules for torch's elementwise functions on values of pairs (trace.py): they return nodes that blocks.py can bound.

A rule returns None where it does not apply; the function then becomes a `Call`, which only evaluation can judge.
Comparisons take the form "query's value against key's value". Example: ``q - k < w`` becomes ``q - w < k``, and
``|q - k| <= w`` two such comparisons. Rules compute with integers that cannot overflow; floats are only compared.

Arguments of rules: values of pairs (nodes.py), leaves, tensors of one element, Python numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_mm5d.context_parallel.masks.nodes import (
    Call,
    Compare,
    Condition,
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

LARGE = 1 << 60  # integers up to here can be added without a check


def combine(name: str, dtype: torch.dtype, values: tuple[Any, ...]) -> Value | None:
    """Return the node that the rule of this name makes of `values`, or None without a rule that applies.

    Args:
        name: of a rule: a key of `RULES`.
        dtype: of the result in torch.
        values: arguments of the function, in its order.
    """
    rule = RULES.get(name)
    return None if rule is None else rule(dtype, *values)


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
    if dtype_of(value) != torch.bool:
        if isinstance(value, Leaf):
            return Guard(value.side, value.values != 0)
        if isinstance(value, Value):
            equal = _compare("eq", value, 0)
            return truth(Call(torch.ne, (value, 0), {}, torch.bool)) if equal is None else negate(equal)
    if isinstance(value, Condition):
        return value
    if isinstance(value, Leaf):
        return Guard(value.side, value.values)
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
    fits = _largest(q) + _largest(k) <= torch.iinfo(dtype).max and _is_signed(dtype)
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
    one, other = _compare(how, x.sum, y), _compare(how, inverse, y)
    return None if one is None or other is None else every(one, other)


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


def _is_signed(dtype: torch.dtype) -> bool:
    return torch.iinfo(dtype).min < 0


def _are_bool(*values: Any) -> bool:
    return all(dtype_of(value) == torch.bool for value in values)
