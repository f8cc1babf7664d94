"""Computes torch's attention for the queries of a rank's own tokens, where a module has the tokens of all ranks.

Rows of other ranks' queries are zero: the module's result of these tokens is thrown away. Scores take the memory of the
own rows alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_mm5d.sharded.sequence import ShardedSequence


class OwnRows(TorchFunctionMode):
    """Computes ``scaled_dot_product_attention`` for the queries of this rank's tokens; other rows are zero.

    Args:
        sequence: the tokens of all ranks.
    """

    def __init__(self, sequence: ShardedSequence) -> None:
        super().__init__()
        self._sequence = sequence

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        of_rows = func is F.scaled_dot_product_attention
        return (self._of_rows if of_rows else func)(*args, **(kwargs or {}))

    def _of_rows(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        split = self._sequence.split
        has_rows = attn_mask is None or attn_mask.dim() < 2 or attn_mask.shape[-2] in (1, query.shape[-2])
        # ranks draw equally many numbers for equal dropout, which rows of their own would not
        if query.shape[-2] != split.size or not has_rows or dropout_p:
            return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
        own = split.indices(self._sequence.index, query.device)
        if is_causal:
            attn_mask = own[:, None] >= torch.arange(key.shape[-2], device=query.device)
        elif attn_mask is not None and attn_mask.dim() > 1 and attn_mask.shape[-2] > 1:
            attn_mask = attn_mask.index_select(-2, own)
        rows = F.scaled_dot_product_attention(query.index_select(-2, own), key, value, attn_mask, **options)
        return rows.new_zeros(*rows.shape[:-2], split.size, rows.shape[-1]).index_copy(-2, own, rows)
