"""Plans for families of models whose experts have another form than those of transformers' interface.

Shapes: T tokens, H width, K chosen experts, P rows of one expert each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_mm5d.expert_parallel.expert_plan import Exchange, ExpertParallelPlan


def family_plan(module: nn.Module) -> ExpertParallelPlan | None:
    """Return the plan for a class of modules that is known by its name."""
    return _FAMILIES.get(type(module).__name__)


def _llama4(layer: Any, exchange: Exchange, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Scores multiply what experts get, so each chosen expert has a row of its own, of weight one.

    The model passes all tokens through all experts: those that are not chosen get zeros, and compute zeros of them.
    """
    rows = hidden.reshape(-1, layer.hidden_dim)  # [T, H]
    scores, logits = layer.router(rows)  # [T, experts]
    index = torch.topk(logits, layer.top_k, dim=1).indices  # [T, K], as the router chooses
    scaled = rows.unsqueeze(1) * scores.gather(1, index).unsqueeze(2)  # [T, K, H]
    index = index.reshape(-1, 1)
    routed = exchange(scaled.flatten(0, 1), index, torch.ones_like(index, dtype=rows.dtype))
    return layer.shared_expert(rows) + routed.view_as(scaled).sum(1), logits


def _llama4_compute(experts: Any, rows: Tensor, index: Tensor) -> Tensor:
    order = torch.argsort(index, stable=True)
    parts = rows[order].split(torch.bincount(index, minlength=len(experts.gate_up_proj)).tolist())
    found = []
    for part, gate_up, down in zip(parts, experts.gate_up_proj, experts.down_proj, strict=True):
        gate, up = (part @ gate_up).chunk(2, dim=-1)
        found.append((up * experts.act_fn(gate)) @ down)
    return torch.cat(found)[torch.argsort(order)]


_FAMILIES = {
    "DbrxExperts": ExpertParallelPlan(),  # tensors [experts * inner, H]
    "Llama4TextMoe": ExpertParallelPlan(experts="experts", forward=_llama4, compute=_llama4_compute),
}
