"""A result that is still under way: it is waited for when something needs it.

Experts return it where their block has a shared expert. So the block computes that one meanwhile, if its code calls it
before it uses the result. Changes of its shape wait for nothing. Any other function gets the plain tensor.

It refuses (`RuntimeError`) code that takes it without torch's functions, such as an autograd function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_mm5d.config.errors import private
from lightning_mm5d.sharded.torch_internals import as_plain_tensors

_make_wrapper = private(Tensor, "_make_wrapper_subclass")
_TOLD: set[Any] = {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__),
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda")),
}
_SHAPED: set[Any] = {Tensor.view, Tensor.reshape, torch.reshape}


class AwaitedResult(Tensor):
    """Stands for a tensor of known shape; see `awaited`."""

    _finish: Callable[[], Tensor]
    _found: Tensor | None

    def result(self) -> Tensor:
        """Return the tensor, the same at each call."""
        if self._found is None:
            self._found = self._finish()
        return self._found

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in _TOLD:
            with as_plain_tensors():
                return func(*args, **kwargs)
        if func in _SHAPED and isinstance(first, cls) and not any(isinstance(one, torch.dtype) for one in args):
            rest, options = args[1:], kwargs
            shape = func(torch.empty(first.shape, device="meta"), *rest, **options).shape
            return _awaited(shape, first, lambda: func(first.result(), *rest, **options))
        args, kwargs = tree_map_only(AwaitedResult, AwaitedResult.result, (tuple(args), kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} takes a result of experts that is still under way; clone it before")


def awaited(like: Tensor, finish: Callable[[], Tensor]) -> AwaitedResult:
    """Return what stands for the result of `finish`, which is called at most once.

    Args:
        like: of the result's shape, dtype and device.
        finish: waits for the result, and returns it.
    """
    return _awaited(like.shape, like, finish)


def _awaited(shape: torch.Size, like: Tensor, finish: Callable[[], Tensor]) -> AwaitedResult:
    made: AwaitedResult = _make_wrapper(AwaitedResult, shape, dtype=like.dtype, device=like.device)
    made._finish, made._found = finish, None
    return made
