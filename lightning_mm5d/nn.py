"""Layers for models of your own that say how tensor parallel ranks share them, in `1d` and on grids.

On one process they are torch's: `Linear` and `Embedding` derive from torch's and add attributes alone, so weights,
initialization and checkpoints are torch's too. Norms are torch's own, which are recognised. A plan is made of what the
layers of one module say (`tensor_parallel/plan_rules.py`). It refuses a module whose code is not known to be right on a
part of the heads or of the width, since such a layer asks to be sharded.

Legend: B batch, L queries, S keys, h heads of this rank, g its key and value heads, D width of a head.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import LayerNorm, RMSNorm
from torch.nn import functional as F

from lightning_mm5d.config.errors import ConfigError, did_you_mean

__all__ = ["Embedding", "LayerNorm", "Linear", "RMSNorm", "attention"]

Sharding = Literal["column", "row", "vocabulary"]


class Linear(torch.nn.Linear):
    """A linear layer that says how tensor parallel ranks share it.

    A module has its column layers and its row layer as direct children: what the first ones give is taken by the row
    layer, after an attention or element by element.

    Args:
        in_features: as in torch.
        out_features: as in torch.
        bias: as in torch.
        device: as in torch.
        dtype: as in torch.
        sharding: ``"column"`` shares outputs, ``"row"`` inputs, whose products are summed. ``"vocabulary"`` is for a
            head, whose outputs are classes: its logits are as in `VocabularyShard`. None: every rank has all of it.
        heads: heads in the outputs of a column layer or the inputs of a row layer, which are not cut. A projection of
            all queries, then all keys, then all values has three numbers. None: any width may be cut anywhere.

    Raises:
        ConfigError: `sharding` or `heads` cannot be.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        sharding: Sharding | None = None,
        heads: int | tuple[int, ...] | None = None,
    ) -> None:
        if sharding is not None and sharding not in get_args(Sharding):
            rule = "A linear layer is shared by columns, by rows or as a vocabulary"
            raise ConfigError("Linear.sharding", sharding, rule, did_you_mean(sharding, get_args(Sharding)))
        counts = () if heads is None else heads if isinstance(heads, tuple) else (heads,)
        lengths = {"column": (0, 1, 3), "row": (0, 1)}.get(sharding or "", (0,))
        if len(counts) not in lengths or any(type(count) is not int or count < 1 for count in counts):
            rule = "A row layer has one number of heads; a column layer has one, or those of queries, keys and values"
            raise ConfigError("Linear.heads", heads, rule, "Use for instance sharding='column', heads=8")
        size = in_features if sharding == "row" else out_features
        if counts and size % sum(counts):
            rule = f"Heads share {size} features evenly"
            raise ConfigError("Linear.heads", heads, rule, "Give the number of heads of this layer")
        super().__init__(in_features, out_features, bias, device, dtype)
        self.sharding, self.heads = sharding, counts


class Embedding(torch.nn.Embedding):
    """A table whose rows tensor parallel ranks share, tied to a head or not; the arguments are torch's."""

    sharding: Sharding = "vocabulary"


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_dim: int,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """Return the attention of projections side by side, with as many heads as their widths have.

    It asks for no number of heads, so it is right on the heads of one rank. Fewer key and value heads than query heads
    are each attended by as many of these.

    Args:
        query: ``[B, L, h * D]``.
        key: ``[B, S, g * D]``.
        value: ``[B, S, g * D]``.
        head_dim: D.
        mask: as in ``F.scaled_dot_product_attention``, equal for all heads: ``[L, S]`` or ``[B, 1, L, S]``.
        is_causal: whether a query sees the keys up to its own place.
        dropout: rate for the weights; 0 in evaluation.

    Returns:
        ``[B, L, h * D]``.
    """
    q, k, v = (x.unflatten(-1, (-1, head_dim)).transpose(1, 2) for x in (query, key, value))
    heads = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, enable_gqa=q.shape[1] != k.shape[1])
    return heads.transpose(1, 2).flatten(2)
