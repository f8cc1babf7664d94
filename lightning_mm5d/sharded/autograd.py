"""How sharded tensors pass through what torch does with gradients: hooks, `autograd.grad`, `backward`, `retain_grad`.

A user sees gradients of the full tensor. Those of local tensors may be a multiple of it (`Group.factor`), which is
divided out here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_mm5d.sharded.tensor import Sharded, Sharding, as_sharded, on_full
from lightning_mm5d.sharded.torch_internals import as_plain_tensors, in_backward


def beside_local(x: Tensor, sharding: Sharding) -> Tensor | None:
    """Return what the full `x` is for an operation with local tensors, by the rules of broadcasting.

    Args:
        x: replicated.
        sharding: of the other operand.

    Returns:
        `x` itself where it broadcasts along the sharded dim, this rank's shard of it where it has the full length
        there, None where it has another.
    """
    dim, lengths, size, group = sharding
    needed = x.requires_grad and torch.is_grad_enabled()
    if x.dim() < -dim or x.shape[dim] == 1:
        return group.copied(x) if needed else x
    if x.shape[dim] == size:
        return group.scattered(x, dim, lengths) if needed else group.local_of(x, dim, lengths)
    return None


def on_local(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call `func` with local tensors: the rule of functions that tell the same of them as of the full tensor."""
    return func(*_locals(args), **{name: x.local if type(x) is Sharded else x for name, x in kwargs.items()})


def register_hook(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x, hook = args

    def of_local(gradient: Tensor) -> Tensor | None:
        changed = hook(_sharded_gradient(gradient, x.sharding))
        if changed is None:
            return None
        local = changed.local if type(changed) is Sharded else beside_local(changed, x.sharding)
        return local if x.group.factor == 1 or local is None else local * x.group.factor

    return func(x.local, of_local, **kwargs)


def gradients_of(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``torch.autograd.grad``: of inputs that are sharded, the gradients are."""
    outputs, inputs = args[:2]
    inputs = [inputs] if isinstance(inputs, Tensor) else inputs
    pairs = zip(inputs, on_full(func, (outputs, tuple(_locals(inputs))), kwargs), strict=True)
    return tuple(g if g is None or type(x) is not Sharded else _sharded_gradient(g, x.sharding) for x, g in pairs)


def backward(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``torch.autograd.backward`` from local tensors.

    A user gives gradients of the full tensors; a checkpoint passes on those of local tensors.
    """
    options = dict(zip(("tensors", "grad_tensors"), args, strict=False)) | dict(kwargs)
    tensors, gradients = options.pop("tensors"), options.pop("grad_tensors", None)
    tensors = [tensors] if isinstance(tensors, Tensor) else [*tensors]
    gradients = [gradients] if isinstance(gradients, Tensor) else gradients
    if gradients is not None:
        pairs = zip(tensors, gradients, strict=True)
        gradients = [_local_gradient(x, gradient) if type(x) is Sharded else gradient for x, gradient in pairs]
    inputs = options.pop("inputs", None)
    inputs = [inputs] if isinstance(inputs, Tensor) else inputs
    return func(_locals(tensors), gradients, inputs=inputs and _locals(inputs), **options)


def requires_grad(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Also of what an autograd function returned or saved, whose graph is its own and not that of its values."""
    x = args[0]
    if x._local is not None:
        return func(x._local)
    with as_plain_tensors():
        return func(x) or func(x._raw)


def kept_gradient(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``x.grad``, sharded as `x` is."""
    gradient = func(args[0].local)
    if gradient is None or in_backward():
        return gradient  # inside a backward: a checkpoint hands it to autograd, which knows the local tensor alone
    return _sharded_gradient(gradient, args[0].sharding)


def _sharded_gradient(local: Tensor, sharding: Sharding) -> Sharded:
    factor = sharding.group.factor
    return as_sharded(local if factor == 1 else local / factor, sharding)


def _local_gradient(x: Sharded, gradient: Tensor | None) -> Tensor | None:
    if type(gradient) is Sharded:
        return gradient.local
    if gradient is None or gradient.shape != x.shape:
        return gradient
    local = x.group.local_of(gradient, x.sharded_dim, x.lengths)
    return local if x.group.factor == 1 else local * x.group.factor


def _locals(values: Iterable[Any]) -> list[Any]:
    return [x.local if type(x) is Sharded else x for x in values]
