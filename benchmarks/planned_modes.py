"""Which `tp_mode` the planner chooses for a Llama on 4 to 64 ranks, with what it estimates for each mode.

Nothing runs: the model has no memory, and the planner counts. Sizes are those of one of 32 layers of Llama 7B, two of
them; 144 samples of a microbatch are shared evenly by all grids.
"""

from __future__ import annotations

import sys
from typing import Any

import lightning as L
import torch
import transformers as hf

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.config.tables import memory_text
from lightning_mm5d.features.refusals.optimizer_probe import remade
from lightning_mm5d.layout.layout import Layout
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.tools.planner.activation_trace import Trace, trace
from lightning_mm5d.tools.planner.optimizer_states import OptimizerStates
from lightning_mm5d.tools.planner.proposal import Proposal, propose
from lightning_mm5d.tools.planner.rank_memory import Step

LAYERS, SAMPLES, MICROBATCHES = 2, 144, 4
LENGTHS, RANKS = (16, 256), (4, 8, 16, 27, 64)


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = hf.LlamaConfig(num_hidden_layers=LAYERS, vocab_size=32000)
        self.model = hf.LlamaForCausalLM(config)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch, use_cache=False).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def proposal(module: Model, ranks: int, length: int, limit: int | None) -> Proposal:
    """What is proposed for so many ranks and tokens of a sample."""
    modalities = {"language": Modality(tp_size=ranks)}
    layout = Layout.build(modalities, world_size=ranks, loss_modality="language")
    tokens = torch.arange(SAMPLES * length).view(SAMPLES, length) % 1000

    def traced(plan: Plan) -> Trace:
        return trace(module, {"input_ids": tokens, "labels": tokens}, plan.partition, plan.modalities, plan.division)

    plan = Plan.of(module, layout, modalities)
    step = Step(module, "1f1b", MICROBATCHES, OptimizerStates(module, remade), traced(plan))
    return propose(
        plan, module, schedule="1f1b", num_microbatches=MICROBATCHES, step=step, memory_limit=limit, traced=traced
    )


def said(found: Proposal) -> str:
    one = found.found.modalities["language"]
    again = "" if one.activation_checkpointing == "none" else ", recomputes"
    return one.tp_mode + (f", depth {one.tp_depth}" if one.tp_depth > 1 else "") + again


def most(found: Proposal) -> int:
    """Bytes of the rank that needs most."""
    return max(one.peak for one in found.memory)


def main(show: Any = print) -> None:
    with torch.device("meta"):
        module = Model().bfloat16()
    show("| tokens | ranks | sent by a rank in a step | `mm5d plan` | peak | limit | `mm5d plan` with it |")
    show("| --- | --- | --- | --- | --- | --- | --- |")
    for length in LENGTHS:
        for ranks in RANKS:
            free = proposal(module, ranks, length, None)
            assert free.modes is not None
            sizes = "; ".join(f"{mode}: {size}" for _, mode, size, _ in free.modes.rows)
            limit = most(free) * 8 // 10
            try:
                limited = said(proposal(module, ranks, length, limit))
            except ConfigError:
                limited = "nothing fits"
            cells = f"{said(free)} | {memory_text(most(free))} | {memory_text(limit)} | {limited}"
            show(f"| {SAMPLES * length:,} | {ranks} | {sizes} | {cells} |")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
