"""A mask that knows its rule: a tensor without memory that tells, for any queries and keys, which of them meet.

Sharded layers compute from the rule. Any other code that reads the tensor gets the dense mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_mm5d.context_parallel.masks.bitfield import mask_function as bitfield_function
from lightning_mm5d.context_parallel.masks.bitfield import pack
from lightning_mm5d.context_parallel.masks.mask import Mask


class ContextMask(Tensor):
    """A mask as a zero-stride tensor ``[B, 1, Sq, Sk]``; operations on it get the dense mask.

    Its dtype is bool, or the dtype of the scores that the dense mask is added to.

    Attributes:
        mask: which keys each query may see.
    """

    mask: Mask

    @staticmethod
    def of(mask: Mask, dtype: torch.dtype = torch.bool) -> ContextMask:
        """Return `mask` as a tensor."""
        shape = (mask.batch, 1, mask.q_length, mask.k_length)
        result = torch.ones((), dtype=dtype, device=mask.device).expand(shape).as_subclass(ContextMask)
        result.mask = mask
        return result

    def dense(self) -> Tensor:
        """Return the mask with all its elements: True, or 0 in a mask to be added, where a query sees a key."""
        allowed = self.mask.dense()
        if self.dtype == torch.bool:
            return allowed
        lowest = torch.finfo(self.dtype).min
        return torch.zeros((), dtype=self.dtype, device=allowed.device).masked_fill(~allowed, lowest)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OF_SHAPE:
            return super().__torch_function__(func, types, args, kwargs)
        if func is Tensor.to and not kwargs and args[1:] in ((args[0].device,), (args[0].dtype,)):
            return args[0]

        def dense(value: Any) -> Any:
            return value.dense() if isinstance(value, ContextMask) else value

        return func(*map(dense, args), **{name: dense(value) for name, value in kwargs.items()})


def multimodal_mask(
    modality: Tensor,
    *,
    group: Tensor | None = None,
    document: Tensor | None = None,
    sees: Iterable[int] | Tensor | None = None,
) -> ContextMask:
    """Return a mask for text among images, sounds and the like, of one integer per token.

    Text sees the text before it and, of the tokens before it, those of the modalities in `sees`. A token of an encoder
    sees the tokens of its own modality and group, in both directions. Documents do not see each other. This is the
    bitfield of Cornstarch (Jang et al. 2025, arXiv 2503.11367). Pass it as ``attention_mask`` to a Hugging Face model,
    or as ``attn_mask`` to ``scaled_dot_product_attention``.

    Args:
        modality: 0 for text, 1 to 15 for encoders, integers ``[B, S]``.
        group: number of the image or sound of each token ``[B, S]``; all of a modality are one group where None.
        document: number of the document of each token ``[B, S]``; one document where None. Padding may be one, too.
        sees: modalities that text sees: numbers, or bits for each token ``[B, S]``; all where None.

    Returns:
        A bool tensor ``[B, 1, S, S]`` without memory, True where a query sees a key.

    Raises:
        ConfigError: a number does not fit its field.
    """
    bits = pack(modality, group=group, document=document, sees=sees)
    rows, size = bits.shape
    return ContextMask.of(Mask(bitfield_function(bits), batch=rows, q_length=size, k_length=size, device=bits.device))


_OF_SHAPE = {
    getattr(found, "__get__", found)
    for found in (
        Tensor.shape,
        Tensor.dtype,
        Tensor.device,
        Tensor.ndim,
        Tensor.requires_grad,
        Tensor.is_leaf,
        Tensor.layout,
        Tensor.grad_fn,
        Tensor.is_cuda,
        Tensor.is_meta,
    )
} | {Tensor.size, Tensor.dim, Tensor.is_floating_point, Tensor.numel, Tensor.stride, Tensor.is_contiguous}
