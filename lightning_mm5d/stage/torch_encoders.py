"""Encoders of torch (``nn.TransformerEncoder``) that ranks share, in evaluation.

There torch packs padded samples into nested tensors and runs fused layers, which read weights and numbers of heads past
the modules that hold them. Here samples stay padded, and layers with sharded parts compute in steps. The result is
equal: padding is zero after the last layer.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mm5d.sharded.removable import Removable


class TorchEncoders(Removable):
    """The encoders of torch in a module, until `remove`.

    Args:
        root: the LightningModule.
        sharded: paths of modules of which tensor parallel ranks hold parts.
    """

    def __init__(self, root: nn.Module, sharded: Collection[str] = ()) -> None:
        for path, module in root.named_modules():
            if isinstance(module, nn.TransformerEncoder) and type(module).forward is nn.TransformerEncoder.forward:
                if module.use_nested_tensor:
                    self.put_forward(module, _padded)
            elif isinstance(module, nn.TransformerEncoderLayer) and any(one.startswith(f"{path}.") for one in sharded):
                self.put_attribute(module, "activation_relu_or_gelu", 0)  # the fused kernel knows no other activations


def _padded(module: Any, src: Tensor, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None) -> Any:
    """The forward of ``nn.TransformerEncoder`` without nested tensors."""
    call = partial(type(module).forward, module, src, mask, src_key_padding_mask, is_causal)
    if not _would_nest(module, src, mask, src_key_padding_mask):
        return call()

    def clear(_: nn.Module, __: Any, hidden: Tensor) -> Tensor:
        return hidden.masked_fill(padding.unsqueeze(-1), 0.0)

    padding = src_key_padding_mask if src_key_padding_mask.dtype is torch.bool else src_key_padding_mask != 0
    hook = module.layers[-1].register_forward_hook(clear)
    module.use_nested_tensor = False
    try:
        return call()
    finally:
        module.use_nested_tensor = True
        hook.remove()


def _would_nest(module: Any, src: Tensor, mask: Tensor | None, padding: Tensor | None) -> bool:
    """Whether torch would pack the samples, as its forward decides it."""
    first = module.layers[0]
    if not torch.backends.mha.get_fastpath_enabled() or not module.use_nested_tensor or first.training:
        return False
    if src.dim() != 3 or padding is None or mask is not None or src.is_nested or torch.is_autocast_enabled():
        return False
    if torch.is_grad_enabled() and (src.requires_grad or any(p.requires_grad for p in first.parameters())):
        return False
    kept = padding.logical_not() if padding.dtype is torch.bool else padding == 0
    is_aligned = not bool((kept[:, 1:] & ~kept[:, :-1]).any())
    return is_aligned or not getattr(module, "mask_check", True)
