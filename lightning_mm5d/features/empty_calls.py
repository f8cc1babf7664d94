"""Lets encoders compute calls without rows: those of a microbatch none of whose samples has an image.

A batch with an image in one of its samples is one that a module can compute. Cut into microbatches, some of them have
none, and calls have tensors of zero rows. What most layers compute of these has zero rows, too, and brings zeros to the
gradients, as it should. But attentions ask for a view such as ``[0, S, -1, head_dim]``, in which any size would do in
place of -1, and torch refuses to choose. What such a view would be with one row is what it is here.

Seen are calls of encoders, by which they hand over their results, and of modules outside of all layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_mm5d.partition.compiled import is_compiled
from lightning_mm5d.partition.parts import holds_metrics
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.removable import Removable
from lightning_mm5d.stage import Runtime
from lightning_mm5d.stage.payload import tensors_in
from lightning_mm5d.trainer.feature import Feature

_VIEWS = (Tensor.view, Tensor.reshape, torch.reshape)


class EmptyCalls(Feature):
    """Has no field: what torch computes without it stays as it is."""

    def cut(self, runtime: Runtime, plan: Plan, device: torch.device) -> Callable[[], None] | None:
        """Stand before the calls of this rank."""
        changes = Removable()
        for module, method in _callables(runtime):
            if not is_compiled(module):
                changes.put_attribute(module, method, _with_views(getattr(module, method)))
        return changes.remove


class ViewsOfOneRow(TorchFunctionMode):
    """Lets -1 in a view of a tensor of zero rows stand for what it would with one row, where torch cannot tell."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError:
            sizes = _sizes(*args, **(kwargs or {})) if func in _VIEWS else None
            if sizes is None:
                raise
            return func(args[0], sizes)


def _callables(runtime: Runtime) -> Iterator[tuple[nn.Module, str]]:
    """The boundaries of encoders, and the largest modules in which no modality has layers, with their methods."""
    root, layers = runtime.root, {layer for modules in runtime.lists.values() for layer in modules}
    boundaries = [boundary for encoder in runtime.partition.encoders.values() for boundary in encoder.boundaries]
    of_encoders = {(root.get_submodule(boundary.path), boundary.method) for boundary in boundaries}
    yield from of_encoders
    waiting, seen = [*root.children()], {module for module, _ in of_encoders} | layers
    while waiting:
        module = waiting.pop()
        if module in seen or holds_metrics(module):
            continue
        seen.add(module)
        if layers.isdisjoint(module.modules()) and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            yield module, "forward"
        else:
            waiting += module.children()


def _with_views(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if all(tensor.numel() for _, tensor in tensors_in((args, kwargs))):
            return original(*args, **kwargs)
        with ViewsOfOneRow():
            return original(*args, **kwargs)

    return call


def _sizes(tensor: Tensor, *shape: Any, **given: Any) -> tuple[int, ...] | None:
    """Return the sizes that a view would have; None where one row does not tell."""
    (target,) = given.values() if given else shape if len(shape) == 1 else (shape,)
    if isinstance(target, (torch.dtype, int)):
        return None
    sizes = [int(size) for size in target]
    if tensor.numel() or sizes.count(-1) != 1 or sizes.count(0) != [*tensor.shape].count(0):
        return None
    known = math.prod(size or 1 for size in sizes if size != -1)
    whole, remainder = divmod(math.prod(size or 1 for size in tensor.shape), known)
    return None if remainder else tuple(whole if size == -1 else size for size in sizes)


FEATURE = EmptyCalls
