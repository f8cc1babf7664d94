"""Answers calls of torch's attention inside of a sharded layer with the attention of its modality.

A function mode does not reach what autograd computes again in a backward. A layer that is computed again as a whole
enters its mode again. A checkpoint that begins inside of a layer would compute torch's own attention of local tokens,
without an error: `TorchAttention` refuses it (`ConfigError`) in the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.context_parallel.hooks.context_mask import ContextMask
from lightning_mm5d.context_parallel.hooks.private_names import saved_tensor_hooks


class TorchAttention(TorchFunctionMode):
    """Calls `attend` in place of ``scaled_dot_product_attention``.

    Args:
        name: the modality, for errors.
        attend: takes what transformers gives an attention: module, query, key, value, mask and options.
        is_differentiated: whether a backward passes through the layer.
        is_off: whether the attention that runs now is torch's.
    """

    def __init__(
        self,
        name: str,
        attend: Callable[..., tuple[Tensor, None]],
        is_differentiated: bool,
        is_off: Callable[[], bool],
    ) -> None:
        super().__init__()
        self._name, self._attend, self._is_off = name, attend, is_off
        self._records = is_differentiated and torch.is_grad_enabled()
        self._hooks = saved_tensor_hooks() if self._records else None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention or self._is_off():
            return func(*args, **(kwargs or {}))
        if self._is_checkpointed():
            raise ConfigError(
                f"modalities.{self._name}.cp_size",
                "activation checkpointing inside of a layer",
                "A layer that calls torch's attention by itself can be computed again as a whole only",
                "Put the checkpoint around the layer, leave it out, or use cp_size=1",
            )
        return self._product(*args, **(kwargs or {}))

    def _is_checkpointed(self) -> bool:
        """Whether a checkpoint began after the layer did: reentrant ones record no graph, others hook what is saved."""
        if not self._records:
            return False
        if not torch.is_grad_enabled():
            return True
        hooks = saved_tensor_hooks()
        return hooks is not None and hooks != self._hooks and _module_of(hooks[0]) == _module_of(checkpoint)

    @torch.compiler.disable
    def _product(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """``[..., H, S, D]`` -> ``[..., H, S, Dv]``; the arguments are torch's."""
        lead = query.shape[:-3]
        q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
        mask = attn_mask
        if mask is not None and not isinstance(mask, ContextMask):
            mask = mask.reshape(-1, *mask.shape[-3:]) if mask.dim() > 2 else mask.unsqueeze(0)
            mask = mask.unsqueeze(1) if mask.dim() == 3 else mask
        out, _ = self._attend(None, q, k, v, mask, scaling=scale, dropout=dropout_p, is_causal=is_causal)
        return out.transpose(1, 2).reshape(*lead, *out.shape[2:3], *out.shape[1:2], out.shape[3])


def _module_of(function: Callable[..., Any]) -> str | None:
    return getattr(function, "__module__", None)
