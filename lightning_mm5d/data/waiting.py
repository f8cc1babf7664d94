"""Tensors of a batch that stay in host memory until something reads them.

A rank that runs no encoder hands its pixel values to a call that another rank computes, and never reads them. There
such a tensor is a `Waiting`. It tells shape, dtype and the device of the rank, and its slices wait, too. It moves to
the device when any other function takes it. So a wrong guess costs a copy, and no number is wrong. A slice or another
view moves the whole tensor and is a view of it, so that writes are seen as in any other tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

_TELLING = {
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device, Tensor.__hash__, Tensor.is_contiguous),
    *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference, Tensor.is_inference),
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "is_cpu", "is_meta", "layout")
    ),
    *(
        getattr(Tensor, name).__get__
        for name in ("is_leaf", "grad_fn", "is_sparse", "is_quantized", "itemsize", "_version")
    ),
}

_VIEWING = {
    *(Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten, torch.unflatten),
    *(Tensor.unsqueeze, torch.unsqueeze, Tensor.permute, torch.permute, Tensor.transpose, torch.transpose),
    *(Tensor.movedim, torch.movedim, Tensor.expand),
}
"""of a tensor that lies in one piece"""


class Waiting(Tensor):
    """Stands for a tensor that is still in host memory.

    Args:
        host: the tensor, or one of its form.
        device: where its values move when they are read.
        move: moves them, and returns the tensor on the device.
    """

    _host: Tensor
    _moved: Tensor | None = None
    _move: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, host: Tensor, device: torch.device, move: Callable[[], Tensor]) -> Waiting:
        made: Waiting = Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), dtype=host.dtype, device=device
        )
        made._host, made._moved, made._move = host, None, move
        return made

    def moved(self) -> Tensor:
        """Return the values on the device; the same tensor each time."""
        if self._moved is None:
            self._moved = self._move()
        return self._moved

    def chosen(self, index: Tensor, dim: int) -> Waiting:
        """Return the rows at the numbers `index` along `dim`, which wait, too; nobody may write to the tensor since."""
        form = self._host.to("meta").index_select(dim, index.to("meta"))
        return Waiting(form, self.device, lambda: self.moved().index_select(dim, index))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Waiting) and first._moved is None:
            if func in _TELLING:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func is Tensor.__getitem__ and _is_plain(args[1]):
                return Waiting(first._host[args[1]], first.device, lambda: first.moved()[args[1]])
            if func in _VIEWING and first._host.is_contiguous() and _are_sizes(args[1:], kwargs):
                form = func(first._host.to("meta"), *args[1:], **kwargs)
                return Waiting(form, first.device, lambda: func(first.moved(), *args[1:], **kwargs))
            if func is Tensor.to and _moves_to(first.device, *args[1:], **kwargs):
                return first
        args, kwargs = tree_map_only(Waiting, _values, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(Waiting, _values, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _values(tensor: Waiting) -> Tensor:
    return tensor.moved()


def _moves_to(place: torch.device, device: Any = None, *others: Any, **options: Any) -> bool:
    """Whether `to` with these arguments moves a tensor to a place, and does nothing else."""
    named = isinstance(device, (str, torch.device))
    return named and torch.device(device) == place and not others and not options.keys() - {"non_blocking"}


def _are_sizes(args: Any, kwargs: Any) -> bool:
    """Whether arguments are dims and sizes, and no tensors or dtypes."""
    leaves = tree_leaves((args, kwargs))
    return all(type(leaf) is int for leaf in leaves)


def _is_plain(index: Any) -> bool:
    """Whether an index makes a view, and needs no values."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or type(part) is int or isinstance(part, slice) for part in parts)
