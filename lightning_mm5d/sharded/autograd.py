"""How divided tensors pass through what torch does with gradients: hooks, `autograd.grad`, `backward`, what is kept.

A user sees gradients of the whole. Those of parts may be a multiple of it (`Group.factor`), which is taken out here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_mm5d.sharded.tensor import Parts, Sharded, as_sharded, on_full


def beside(x: Tensor, division: Parts) -> Tensor | None:
    """What `x` is beside parts, by the rules of broadcasting; None where it does not fit them."""
    dim, lengths, size, group = division
    needed = x.requires_grad and torch.is_grad_enabled()
    if x.dim() < -dim or x.shape[dim] == 1:
        return group.copied(x) if needed else x
    if x.shape[dim] == size:
        return group.scattered(x, dim, lengths) if needed else group.part(x, dim, lengths)
    return None


def of_part(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What is the same of a part as of the whole."""
    local = [x.part if type(x) is Sharded else x for x in args]
    return func(*local, **{name: x.part if type(x) is Sharded else x for name, x in kwargs.items()})


def register_hook(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x, hook = args

    def local(gradient: Tensor) -> Tensor | None:
        factor = x.group.factor
        changed = hook(as_sharded(gradient if factor == 1 else gradient / factor, x.division))
        if changed is None:
            return None
        part = changed.part if type(changed) is Sharded else beside(changed, x.division)
        return part if factor == 1 or part is None else part * factor

    return func(x.part, local, **kwargs)


def gradients_of(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    outputs, inputs = args[:2]
    found = on_full(func, (outputs, of_part(lambda *parts: parts, inputs, {})), kwargs)
    divisions = [x.division if type(x) is Sharded else None for x in inputs]
    pairs = zip(found, divisions, strict=True)
    return tuple(
        as_sharded(g if division.group.factor == 1 else g / division.group.factor, division)
        if division and g is not None
        else g
        for g, division in pairs
    )


def backward(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """From parts, whose gradients may be given whole (by the user) or as parts (a checkpoint passes on what it got)."""
    options = dict(zip(("tensors", "grad_tensors"), args, strict=False)) | dict(kwargs)
    tensors, gradients = options.pop("tensors"), options.pop("grad_tensors", None)
    tensors = [tensors] if isinstance(tensors, Tensor) else [*tensors]
    gradients = [gradients] if isinstance(gradients, Tensor) else gradients
    if gradients is not None:
        pairs = zip(tensors, gradients, strict=True)
        gradients = [_part_of_gradient(x, gradient) if type(x) is Sharded else gradient for x, gradient in pairs]
    inputs = options.pop("inputs", None)
    inputs = [inputs] if isinstance(inputs, Tensor) else inputs
    return func(_parts(tensors), gradients, inputs=inputs and _parts(inputs), **options)


def _part_of_gradient(x: Sharded, gradient: Tensor | None) -> Tensor | None:
    if type(gradient) is Sharded:
        return gradient.part
    if gradient is None or gradient.shape != x.shape:
        return gradient
    part = x.group.part(gradient, x.sharded_dim, x.lengths)
    return part if x.group.factor == 1 else part * x.group.factor


def _parts(tensors: Sequence[Any]) -> list[Any]:
    return [x.part if type(x) is Sharded else x for x in tensors]


def requires_grad(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Also of what an autograd function returned or saved, whose graph is its own and not that of its values."""
    x = args[0]
    if x._part is not None:
        return func(x._part)
    with torch._C.DisableTorchFunctionSubclass():
        return func(x) or func(x._held)


def kept_gradient(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    gradient = func(args[0].part)
    if gradient is None or torch._C._current_graph_task_id() >= 0:
        return gradient  # inside a backward: a checkpoint hands it to autograd, which knows the part alone
    factor = args[0].group.factor
    return as_sharded(gradient if factor == 1 else gradient / factor, args[0].division)
