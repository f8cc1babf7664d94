"""Values that only other ranks compute, as tensors that cannot be mistaken for real ones.

Code between layers runs on every stage, also where its input is the result of a remote layer. Such a result is
`Absent`: NaN in the right shape, and whatever is computed from it is absent too, however it is computed. What a stage
sends, returns or decides must not be absent; the checks for that look at a type, not at values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_mm5d.sharded.tensor import Sharded
from lightning_mm5d.stage.payload import tensors_in
from lightning_mm5d.stage.taint import mark_stand_in
from lightning_mm5d.stage.view import StageError

# These take tensors other than the first for their shape or dtype only.
_LIKE_OTHER = {Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as}
# These take all tensors so.
_SHAPE_ONLY = {
    torch.zeros_like,
    torch.ones_like,
    torch.empty_like,
    torch.full_like,
    torch.rand_like,
    torch.randn_like,
    Tensor.new_zeros,
    Tensor.new_ones,
    Tensor.new_empty,
    Tensor.new_full,
    Tensor.new_tensor,
}
# These make values of Python, on which code may decide.
_READS = {
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.__index__,
    Tensor.__complex__,
    Tensor.__contains__,
    Tensor.__array__,
    Tensor.item,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.equal,
    Tensor.allclose,
    Tensor.is_nonzero,
    torch.equal,
    torch.allclose,
    torch.is_nonzero,
}


class Absent(Tensor):
    """The result of a remote layer, or of a computation with one.

    Attributes:
        origin: what computes the real value, in words.
    """

    origin: str

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, Sharded) for kind in types):
            return NotImplemented
        counted = args[:1] if func in _LIKE_OTHER else (args, kwargs)
        origin = next((t.origin for _, t in tensors_in(counted) if isinstance(t, Absent)), None)
        if origin is not None and func in _READS:
            raise StageError(
                f"the step reads a value of {origin} on a stage that does not compute it, with {func.__name__}: what "
                "the step does must not depend on it there. Read it inside of the layer, or set pp_size to 1"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if origin is None or func in _SHAPE_ONLY:
            return result
        written = args[0] if result is None and args and isinstance(args[0], Tensor) else result
        for _, tensor in tensors_in(written):
            if type(tensor) in (Tensor, Absent):
                tensor.__class__ = cls
                vars(tensor)["origin"] = origin
        return result


def absent(tensor: Tensor, origin: str) -> Tensor:
    """Return a stand-in for a tensor like `tensor` that `origin` computes.

    It carries a gradient, because hooks may be registered on it, and may be written to.
    """
    if not isinstance(tensor, Absent):
        real = tensor.is_floating_point() or tensor.is_complex()
        filler = torch.full((), float("nan") if real else 0, dtype=tensor.dtype, device=tensor.device)
        filler.requires_grad_(real and torch.is_grad_enabled())
        mark_stand_in(filler)
        tensor = filler.expand(tensor.shape).clone()
    found = tensor.as_subclass(Absent)
    found.origin = origin
    mark_stand_in(found)
    return found


def check_present(tree: Any, what: str) -> None:
    """Raise where a tensor of `tree` is absent; `what` says in the error which value it is."""
    for _, tensor in tensors_in(tree):
        if isinstance(tensor, Absent):
            raise StageError(
                f"{what} depends on a value of {tensor.origin}, which this stage does not have: only what the next "
                "layer takes crosses from one stage to the next. Keep the layers that use the value in the stage that "
                "computes it (pipeline_template), return it from each layer on to the next, or set pp_size to 1; for "
                "a value of another modality set its `boundary`, or `feeds` to the stages that use it"
            )
