"""``nn.MultiheadAttention`` on some of its heads.

torch's forward hands all weights to one function, which takes them for those of all heads. So a rank computes the same
in steps: its heads' queries, keys and values, its heads' attention, and its part of the output, which ranks add up.
Masks and results are those of torch; nested tensors, which torch's fused kernel alone takes, are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_mm5d.sharded.collectives import copy, reduce, scatter
from lightning_mm5d.sharded.tensor import from_local
from lightning_mm5d.tensor_parallel.region import Region

# B samples, L queries, S keys, h heads of this rank, H heads of all, D width of a head


def attention(region: Region, lengths: tuple[int, ...]) -> Callable[..., Any]:
    """Return the forward of a sharded ``nn.MultiheadAttention``, with the arguments and results of torch's.

    Args:
        region: of its ranks.
        lengths: heads on each rank.
    """

    def forward(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_nested or key.is_nested or value.is_nested:
            raise TypeError("nn.MultiheadAttention that tensor parallel ranks share takes no nested tensors; pad them")
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint, as without tensor parallelism.")
        group = region.group
        with region.closing():
            is_batched = query.dim() == 3
            is_tokens_first = is_batched and not module.batch_first
            q, k, v = (_rows(x, is_batched, is_tokens_first) for x in _projected(region, module, query, key, value))
            is_causal = is_causal and key_padding_mask is None and not need_weights
            mask = None if is_causal else _mask(attn_mask, key_padding_mask, q, lengths, region)
            k, v, mask = _extended(module, k, v, mask)
            q, k, v = (x.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for x in (q, k, v))  # [B, h, L or S, D]
            if module.add_zero_attn:
                k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
                mask = None if mask is None else F.pad(mask, (0, 1))
            rate, weights = module.dropout if module.training else 0.0, None
            if need_weights:
                scores = q * math.sqrt(1.0 / module.head_dim) @ k.transpose(-2, -1)
                weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), rate)  # [B, h, L, S]
                y = weights @ v
            else:
                y = F.scaled_dot_product_attention(q, k, v, mask, rate, is_causal)
            y = y.transpose(1, 2).flatten(2)
            y = module.out_proj(y.transpose(0, 1) if is_tokens_first else y if is_batched else y.squeeze(0))
        if weights is None:
            return y, None
        weights = weights if is_batched else weights.squeeze(0)
        if average_attn_weights:
            return y, reduce(weights.sum(-3) / sum(lengths), group)
        return y, from_local(weights, -3, lengths, group)

    return forward


def _projected(region: Region, module: Any, *inputs: Tensor) -> list[Tensor]:
    """Queries, keys and values of this rank's heads, ``[..., h * D]``; of one input by one product."""
    entered = [region.enter(x, module.training).entered for x in inputs]
    bias, width = module.in_proj_bias, module.num_heads * module.head_dim
    if module.in_proj_weight is not None and entered[0] is entered[1] is entered[2]:
        return [*F.linear(entered[0], module.in_proj_weight, bias).split(width, -1)]
    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.split(width)
    biases = (None,) * 3 if bias is None else bias.split(width)
    return [F.linear(*one) for one in zip(entered, weights, biases, strict=True)]


def _rows(x: Tensor, is_batched: bool, is_tokens_first: bool) -> Tensor:
    """Samples first: ``[B, L, width]``."""
    return x.transpose(0, 1) if is_tokens_first else x if is_batched else x.unsqueeze(0)


def _mask(
    attention: Tensor | None, padding: Tensor | None, q: Tensor, lengths: tuple[int, ...], region: Region
) -> Tensor | None:
    """What is added to scores, ``[B or 1, h or 1, L or 1, S]``; None where nothing is."""
    group, found = region.group, None
    if attention is not None:
        if attention.dim() == 3:  # of all samples' heads
            every = scatter(attention.unflatten(0, (-1, sum(lengths))), 1, lengths, group)
            found = _added(every, q.dtype)
        else:
            found = _added(copy(attention, group) if attention.requires_grad else attention, q.dtype)[None, None]
    if padding is not None:
        padding = padding if padding.dim() == 2 else padding.unsqueeze(0)
        of_keys = _added(copy(padding, group) if padding.requires_grad else padding, q.dtype)[:, None, None]
        found = of_keys if found is None else found + of_keys
    return found


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers that are added to scores: minus infinity where a mask of booleans is true."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def _extended(module: Any, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values with the module's own ones after them."""
    if module.bias_k is None:
        return k, v, mask
    more = (bias.expand(k.shape[0], -1, -1) for bias in (module.bias_k, module.bias_v))
    k, v = (torch.cat(pair, 1) for pair in zip((k, v), more, strict=True))
    return k, v, None if mask is None else F.pad(mask, (0, 1))
