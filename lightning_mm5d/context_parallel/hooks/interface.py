"""How transformers' models come to use this library's attention and masks: through its two interfaces.

Both are registered under a name of their own, and the configs of shared layers name it; no model is patched. A mask is
made as ever by the model's own code, and comes out as a `ContextMask`: a tensor without memory that knows which keys
each query may see, for any tokens. Where code does anything else with it, it becomes the dense mask.

A config may be read by several modalities (an encoder and a decoder) and by modules outside of shared layers (a pooling
head); an `Interface` finds whose attention it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    add_offsets_to_mask_function,
    and_masks,
    causal_mask_function,
    padding_mask_function,
    prepare_padding_mask,
)

from lightning_mm5d.context_parallel.masks.bitfield import mask_function as bitfield_function
from lightning_mm5d.context_parallel.masks.bitfield import pack
from lightning_mm5d.context_parallel.masks.caches import Caches
from lightning_mm5d.context_parallel.masks.mask import Mask, MaskFunction

if TYPE_CHECKING:
    from lightning_mm5d.context_parallel.hooks.attention import Attention

_NAME = "mm5d_context"
_PACKED = "mm5d_context_flash"  # "flash" makes vision towers hand over packed images at once, with their boundaries


class ContextMask(Tensor):
    """A mask as a tensor ``[B, 1, Sq, Sk]`` without memory; whatever reads it gets the dense mask.

    It is one of bool, or of another dtype where scores are to have it added.

    Attributes:
        mask: which keys each query may see.
    """

    mask: Mask

    @staticmethod
    def of(mask: Mask, dtype: torch.dtype = torch.bool) -> ContextMask:
        """The tensor of a mask."""
        shape = (mask.batch, 1, mask.q_length, mask.k_length)
        empty = torch.ones((), dtype=dtype, device=mask.device).expand(shape)
        result = empty.as_subclass(ContextMask)
        result.mask = mask
        return result

    def dense(self) -> Tensor:
        """The mask with all its elements."""
        with torch._C.DisableTorchFunctionSubclass():
            dtype = self.dtype
        allowed = self.mask.dense()
        if dtype == torch.bool:
            return allowed
        return torch.zeros((), dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OF_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is Tensor.to and not kwargs and args[1:] in ((args[0].device,), (torch.bool,)):
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

    Text sees the text before it and the modalities that it shares bits with, where they are before it; a token of an
    encoder sees those of its own modality and group, in both directions; documents do not see each other. It is the
    bitfield of Cornstarch (Jang et al. 2025, arXiv 2503.11367). Pass it as ``attention_mask`` to a Hugging Face model,
    or as ``attn_mask`` to ``scaled_dot_product_attention``: shared layers take it as it is, any others as dense mask.

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


class Interface:
    """The attention of all modalities of one rank, as transformers calls it.

    The registries cannot forget, so they get nothing that keeps it alive.

    Attributes:
        caches: of this session's context parallelism; `remove` clears them.
    """

    def __init__(self) -> None:
        self.caches = Caches()
        self._attention: list[tuple[Attention, set[int]]] = []
        self._adds: set[int] = set()  # configs whose own attention adds its masks
        self._undo: list[Callable[[], object]] = []
        own = weakref.ref(self)
        for name in (_NAME, _PACKED):
            AttentionInterface.register(name, partial(_attend, own))
            AttentionMaskInterface.register(name, partial(_make_mask, own))

    def add(self, attention: Attention, configs: Iterable[Any], packed: bool) -> None:
        """Let layers compute with an attention.

        Args:
            attention: knows its modules.
            configs: those that its modules and their masks read.
            packed: whether its layers take the boundaries of packed sequences.
        """
        found = list(configs)
        self._attention.append((attention, {id(config) for config in found}))
        for config in found:
            if config._attn_implementation == "eager":
                self._adds.add(id(config))
            before = [(one, one._attn_implementation) for one in _with_parts(config)]
            config._attn_implementation = _PACKED if packed else _NAME
            for other, value in before[1:]:  # it sets its parts too
                other._attn_implementation = value
            self._undo.append(partial(setattr, config, "_attn_implementation", before[0][1]))

    def remove(self) -> None:
        """Let the configs name what they named before."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._attention.clear()
        self._adds.clear()
        self.caches.clear()

    def attend(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """What transformers asks an attention interface for; see `Attention.attend`."""
        known = [attention for attention, _ in self._attention]
        of = next((one for one in known if one.knows(module)), None)
        of = of or next((one for one in known if one.claims(module)), known[0])
        return of.attend(module, *args, **kwargs)

    @torch.compiler.disable
    def make_mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        kv_offset: int = 0,
        mask_function: MaskFunction = causal_mask_function,  # type: ignore[assignment]
        attention_mask: Tensor | None = None,
        device: torch.device | str = "cpu",
        config: Any = None,
        dtype: torch.dtype = torch.float32,
        **kwargs: Any,
    ) -> ContextMask:
        """What transformers asks a mask interface for; the arguments are those of its ``sdpa_mask``."""
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        if padding is not None:
            mask_function = and_masks(mask_function, padding_mask_function(padding))
        if not (isinstance(q_offset, int) and isinstance(kv_offset, int) and q_offset == kv_offset == 0):
            mask_function = add_offsets_to_mask_function(mask_function, q_offset, kv_offset)
        shape = {"batch": batch_size, "q_length": q_length, "k_length": kv_length}
        mask = Mask(mask_function, **shape, device=device, caches=self.caches)
        for attention, configs in self._attention:
            if id(config) in configs:
                attention.note(mask)
        return ContextMask.of(mask, dtype if id(config) in self._adds else torch.bool)


def _attend(own: Callable[[], Interface | None], *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    interface = own()
    assert interface is not None, "the session of this attention is closed"
    return interface.attend(*args, **kwargs)


def _make_mask(own: Callable[[], Interface | None], *args: Any, **kwargs: Any) -> ContextMask:
    interface = own()
    assert interface is not None, "the session of this mask is closed"
    return interface.make_mask(*args, **kwargs)


def _with_parts(config: Any) -> list[Any]:
    """A config and those that it sets together with itself."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return [config, *(one for part in parts if part is not None for one in _with_parts(part))]
