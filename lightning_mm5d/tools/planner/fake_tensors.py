"""Tensors that have shapes and no memory, so that a model of any size takes a step within seconds.

What is computed from parameters has no values. What is computed from a batch alone has them: the code of models reads
token ids, masks and grids of images to decide what it computes. Code that reads a number which depends on parameters
gets 1.0, or False for a comparison, such as whether a loss is infinite. A whole number, by which a router would say how
many tokens go where, raises an exception of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_mm5d.config.errors import private

GROUPED = private(torch.ops.aten, "_grouped_mm").default
"""the grouped matrix product"""
_FEW = 64
"""elements of a new floating-point tensor that has values"""

Watch = Callable[[Any, Sequence[Tensor], Sequence[Tensor], Sequence[Any]], None]


class FakeTensors(TorchDispatchMode):
    """A context in which whatever is computed from tensors without memory has no memory either.

    Args:
        watch: called after each operation with the operation, the tensors that it took and those that it made, and its
            positional arguments.
    """

    def __init__(self, watch: Watch | None = None) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._watch = watch

    def of(self, tensor: Tensor) -> Tensor:
        """Return a tensor without memory in place of `tensor`, which may be on the meta device."""
        with self._fake:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        return made.requires_grad_(tensor.requires_grad)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        faked = any(isinstance(one, FakeTensor) for one in given)
        if faked and func is torch.ops.aten._local_scalar_dense.default:
            if given[0].is_floating_point():
                return 1.0
            if given[0].dtype == torch.bool:
                return False
        if faked and func is torch.ops.aten.index.Tensor:  # by masks, which have values
            args = (args[0], _places(args[1]))
        if given and not faked:
            result = func(*args, **kwargs)
        else:
            with self._fake:
                result = _grouped(*args, **kwargs) if func is GROUPED else func(*args, **kwargs)
            if not given and not any(one.is_floating_point() and one.numel() > _FEW for one in _tensors(result)):
                result = func(*args, **kwargs)
        if self._watch is not None:
            self._watch(func, given, _tensors(result), args)
        return result


def _grouped(a: Tensor, b: Tensor, ends: Tensor | None = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
    """The result of grouped matrix products, which torch knows without memory in bfloat16 alone."""
    groups = (len(ends),) if ends is not None and a.dim() == b.dim() == 2 else ()
    if a.dim() == b.dim() == 3:
        groups = (a.shape[0],)
    return a.new_empty(*groups, a.shape[-2], b.shape[-1], dtype=out_dtype or a.dtype)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _places(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices with the places of what masks choose instead of the masks."""
    found: list[Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype == torch.bool and not isinstance(index, FakeTensor)
        found += index.nonzero().unbind(1) if index is not None and is_mask else [index]
    return found
