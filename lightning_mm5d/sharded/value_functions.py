"""Torch functions by what they do with the values of tensors, for `lightning_mm5d.sharded.remote_value`.

A set of functions holds the objects that torch passes to ``__torch_function__``. A set of names covers methods of
tensors and functions of torch at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _methods(*names: str) -> set[Any]:
    """The functions of these names, of tensors and of torch; attributes by the function that reads them."""
    found = (getattr(owner, name) for owner in (Tensor, torch) for name in names if hasattr(owner, name))
    return {one.__get__ if hasattr(one, "__set__") else one for one in found}


# They tell nothing of values. The functions that set `requires_grad` and views in place are among them.
TELLING = _methods(
    *("shape", "dtype", "device", "layout", "ndim", "names", "name", "requires_grad", "is_leaf", "grad_fn", "grad"),
    *("output_nr", "_version", "retains_grad", "itemsize", "nbytes", "_backward_hooks", "_post_accumulate_grad_hooks"),
    *("is_cuda", "is_cpu", "is_xpu", "is_mps", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn"),
    *("is_nested", "is_xla", "is_ipu", "is_hpu", "is_vulkan", "is_maia", "is_mtia"),
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "dim_order"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "is_pinned", "is_shared"),
    *("is_conj", "is_neg", "is_same_size", "get_device", "dense_dim", "sparse_dim", "has_names", "is_distributed"),
    *("_is_view", "can_cast", "result_type", "promote_types", "_has_compatible_shallow_copy_type", "is_coalesced"),
    *("__len__", "__hash__", "__dir__", "requires_grad_", "register_hook", "retain_grad", "share_memory_"),
    *("register_post_accumulate_grad_hook", "rename_", "detach_", "unsqueeze_", "squeeze_", "t_", "transpose_"),
    *("swapaxes_", "swapdims_", "as_subclass"),
) | {Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
# They take the shape, dtype and device of all their tensors alone.
LIKE = _methods(
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"),
)
# They take these from their second tensor.
AS = _methods("expand_as", "view_as", "reshape_as", "type_as", "to", "resize_as_")
CASTING = ("to", "cpu", "cuda", "double", "float", "half", "bfloat16", "type")
LEAVING = {
    *("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__complex__"),
    *("__contains__", "equal", "allclose", "is_nonzero", "__reduce_ex__", "__reduce__", "__setstate__", "data_ptr"),
    *("storage", "_typed_storage", "untyped_storage", "__dlpack__", "backward", "save"),
}
# They move values without changing them, so that NaN stays where it stands for a remote value.
MOVING = {
    *("view", "reshape", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "flatten", "unflatten"),
    *("contiguous", "clone", "detach", "to", "movedim", "double", "float", "half", "bfloat16", "cpu", "cuda", "repeat"),
    *("type", "flip", "roll", "expand_as", "view_as", "reshape_as", "type_as"),
}
CUTTING = {
    *("__getitem__", "select", "narrow", "split", "split_with_sizes", "tensor_split", "chunk", "unbind", "diagonal"),
    *("index_select", "gather", "masked_select", "take_along_dim"),
}
JOINING = {
    *("cat", "concat", "concatenate", "stack", "hstack", "vstack", "where", "masked_fill", "masked_fill_"),
    *("masked_scatter", "masked_scatter_", "__setitem__", "index_put", "index_put_", "index_copy", "index_copy_"),
    *("scatter", "scatter_", "copy_"),
}
