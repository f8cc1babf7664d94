"""Refuses batches with positions of samples in them, which would be wrong once the batch is split.

A field such as ``hate_indices`` may name rows of the batch. Split into microbatches, it looks like any other field with
a value for each sample, but its values count from the first sample of the batch. Neither its length nor its values tell
it from labels; its use does. So the first step of each structure of batches watches which integer fields index dim 0
of something that is made of the batch. The index of a class, or of a sample of the data set, in a table is none: the
module keeps the table, whatever earlier batches have written to it.

Labels are also written by, into a tensor with a place for each class. So a tensor of as many places as samples,
which is not made of the batch, is refused where an index lies outside of it; otherwise a warning names the field.

It does not see indices that code computes from such a field otherwise than by moving, casting or shaping it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.microbatch import Microbatch, leaves
from lightning_mm5d.sharded.remote_value import is_remote
from lightning_mm5d.source.passed import KEEP_VALUES
from lightning_mm5d.stage.payload import tensors_in
from lightning_mm5d.trainer.feature import Attached, Feature, Running
from lightning_mm5d.trainer.kept_values import memory_kept
from lightning_mm5d.trainer.steps import Parts

_MADE_OF_BATCH, _FIELD = "_mm5d_rows", "_mm5d_field"
_SAME = (*KEEP_VALUES, "unsqueeze", "expand")
_SUBSCRIPTS = ("__getitem__", "__setitem__")
_BY_DIM = ("index_select", "gather", "index_copy", "index_fill", "scatter", "take_along_dim")
_ADDING = ("index_add", "scatter_add", "scatter_reduce", "index_reduce")
_WRITING = ("__setitem__", "index_fill", "index_copy", "scatter")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


class RefusedRowIndices(Feature):
    """Watches the first step of each structure of split batches for positions of samples."""

    def attach(self, running: Running) -> Attached | None:
        """Watch steps, unless the user splits batches or modules are compiled."""
        batch_parts = running.steps.batch_parts
        return _Watched(running) if batch_parts.splits and not batch_parts.is_compiled else None


class _Watched(Attached):
    def __init__(self, running: Running) -> None:
        self._module = running.module
        self._seen: set[Any] = set()
        self.put_attribute(running.steps, "watch", self._watch)

    def _watch(self, name: str, parts: Parts) -> Callable[[Microbatch], RowIndices] | None:
        """Return what watches a step, the first of each structure; None for others."""
        split = [part.batch for microbatches in parts.values() if len(microbatches) > 1 for part in microbatches]
        structure = {(name, *((path, type(value)) for path, value in leaves(batch))) for batch in split}
        is_new = not structure <= self._seen
        self._seen |= structure
        return (lambda microbatch: RowIndices(self._module, microbatch)) if is_new else None


class RowIndices(TorchFunctionMode):
    """Watches one run of a step on a microbatch.

    Args:
        module: whose buffers, and tensors in attributes, are tables, also where an earlier batch has written to them.
        microbatch: that the step gets.
    """

    def __init__(self, module: nn.Module, microbatch: Microbatch) -> None:
        super().__init__()
        self._samples, self._lists = microbatch.samples, dict[int, str]()
        self._buffers = {id(buffer) for buffer in module.buffers()}
        self._tables = [tensor for _, tensor in memory_kept(module)]  # held, or an id would be taken again
        self._lasting = self._buffers | {*map(id, self._tables)}
        for path, value in leaves(microbatch.batch):
            name = "batch" + "".join(f"[{step!r}]" for step in path)
            if isinstance(value, Tensor):
                setattr(value, _MADE_OF_BATCH, True)
                if value.dtype in _INTEGERS and 0 < value.dim() < 3:
                    setattr(value, _FIELD, name)
            elif isinstance(value, (list, tuple)) and value and all(type(index) is int for index in value):
                self._lists[id(value)] = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        name = name if name.startswith("__") else name.removesuffix("_")
        self._check(name, args, kwargs)
        result = func(*args, **kwargs)
        is_of_batch = any(self._is_made_of_batch(tensor) for _, tensor in tensors_in((args, kwargs)))
        written = args[0] if result is None and args else result
        for _, tensor in tensors_in(written):
            if not isinstance(tensor, Parameter) and not is_remote(tensor):
                setattr(tensor, _MADE_OF_BATCH, is_of_batch or (result is None and self._is_made_of_batch(tensor)))
        keeps = name in (*_SAME, "tensor", "as_tensor") or (name == "__getitem__" and _adds_dims(args[1]))
        field = self._field(args[0]) if args and keeps else None
        if field is not None and isinstance(result, Tensor) and result.dtype in _INTEGERS:
            setattr(result, _FIELD, field)
        return result

    def _field(self, value: Any) -> str | None:
        """The name of the field of the batch that `value` is."""
        if isinstance(value, Tensor):
            return None if is_remote(value) else getattr(value, _FIELD, None)
        return self._lists.get(id(value)) if isinstance(value, (list, tuple)) else None

    def _check(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in _SUBSCRIPTS:
            source, index = args[0], args[1]
            index = index[0] if isinstance(index, tuple) and index and self._field(index) is None else index
        elif name in (*_BY_DIM, *_ADDING):
            source = args[0] if args else kwargs.get("input")
            given = [*args[1:3], None, None]
            first, second = ("indices", "dim") if name == "take_along_dim" else ("dim", "index")
            pair = {first: given[0], second: given[1], **{k: v for k, v in kwargs.items() if k in (first, second)}}
            index = pair.get("index", pair.get("indices"))
            if not isinstance(source, Tensor) or pair["dim"] not in (0, -source.dim()):
                return
        else:
            return
        field = self._field(index)
        if field is None or not isinstance(source, Tensor) or isinstance(source, Parameter):
            return
        if id(source) in self._buffers:
            return
        is_rows = self._is_made_of_batch(source)
        if not is_rows and name in _WRITING and source.dim() > 0 and len(source) == self._samples:
            is_rows = _exceeds(index, self._samples)
            if not is_rows:
                warnings.warn(
                    f"{field} chooses where the step writes into a tensor of {self._samples} rows, and the microbatch "
                    "has as many samples. This is right for labels. Positions of samples in the batch are wrong in a "
                    "microbatch: give a function that splits such a batch, microbatching=function",
                    stacklevel=4,
                )
        if is_rows:
            rule = "The step picks rows by it of what it makes of the batch, and in a microbatch these rows are others"
            fix = (
                "Give a function that splits a batch and counts such positions anew: microbatching=function of (batch, "
                "num_microbatches), in YAML its import path; or use num_microbatches=1"
            )
            raise ConfigError(field, "an index of rows", rule, fix)

    def _is_made_of_batch(self, tensor: Tensor) -> bool:
        if isinstance(tensor, Parameter) or is_remote(tensor) or id(tensor) in self._lasting:
            return False
        known = getattr(tensor, _MADE_OF_BATCH, None)
        # what other stages sent has a mark of its own; an autograd function of one's own hides its arguments
        return bool(known) if known is not None else hasattr(tensor, "_mm5d_mark") or tensor.grad_fn is not None


def _exceeds(index: Any, size: int) -> bool:
    """Whether an index of integers lies outside of `size` places."""
    if not isinstance(index, Tensor):
        return any(not -size <= place < size for place in index)
    if index.is_meta or not index.numel():
        return False
    return bool(((index < -size) | (index >= size)).any())


def _adds_dims(index: Any) -> bool:
    """Whether a subscript takes all values, like ``[:, None]``."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or (isinstance(part, slice) and part == slice(None)) for part in parts)


FEATURE = RefusedRowIndices
