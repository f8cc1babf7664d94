"""Memory and time of a training step with `fused_linear_cross_entropy`, against the full logits.

A Llama of 2 layers with a vocabulary 128 times as large as its width. Memory is what a step adds at most to the bytes
of tensors that are alive before it, on the worst rank; gradients are kept over steps, so that they do not count. Times
are of other runs, in turns; ranks have a core each. ``--memory`` leaves the times out.
"""

from __future__ import annotations

import sys
from typing import Any

import lightning as L
import torch
from offload import Device
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM
from turns import WARMUP, Side, Turns, fit, median_ratio, milliseconds, race, row, run

from lightning_mm5d import Modality, MultimodalStrategy

STEPS, BATCH, TOKENS, MICROBATCHES = 10 + WARMUP, 4, 512, 2
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
}
LAYOUTS: tuple[dict[str, Any], ...] = ({}, {"tp_size": 2}, {"cp_size": 2}, {"pp_size": 2})


class Llama(L.LightningModule):
    """The same weights in every process; `device` counts the bytes that are alive."""

    def __init__(self, device: Device | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(LlamaConfig(**CONFIG))
        self.memory, self.before = device, 0
        self.added: list[int] = []
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch, use_cache=False).loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.memory is not None:
            self.before = self.memory.most = self.memory.now

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        if self.memory is not None:
            self.added.append(self.memory.most - self.before)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def train(turns: Turns, layout: dict[str, Any], *, fused: bool, counts: bool) -> tuple[list[float], int]:
    """Return the losses, and the bytes that the third step added at most."""
    device = Device() if counts else None
    module = Llama(device)
    tokens = torch.randint(CONFIG["vocab_size"], (3 if counts else STEPS, BATCH, TOKENS))
    loader = DataLoader([{"input_ids": ids, "labels": ids} for ids in tokens], batch_size=None)
    modalities = {"language": Modality(compute={"fused_linear_cross_entropy": fused}, **layout)}
    strategy = MultimodalStrategy(modalities, batching={"num_microbatches": MICROBATCHES})
    ranks = max([1, *layout.values()])
    if device is None:
        fit(module, loader, strategy, ranks, turns)
        return module.losses, 0
    device.count([*module.parameters()])
    with device:
        fit(module, loader, strategy, ranks)
    return module.losses, module.added[-1]


def side(layout: dict[str, Any], *, fused: bool, counts: bool) -> Side:
    """The ranks that train with or without the fused head."""
    ranks = max([1, *layout.values()])
    return Side(ranks, lambda turns, rank: train(turns, layout, fused=fused, counts=counts))


def main() -> None:
    for layout in LAYOUTS:
        name = ", ".join(f"{key} {value}" for key, value in layout.items()) or "one process"
        sides = [run(side(layout, fused=fused, counts=True)) for fused in (True, False)]
        most = [max(size for _, size in ranks) for ranks in sides]
        torch.testing.assert_close(sides[0][0][0], sides[1][0][0])
        values = f"{most[0] / 1e6:.1f} / {most[1] / 1e6:.1f} MB"
        row(f"fused head, {name}: memory of a step / full logits", most[0] / most[1], "", values)
    for layout in LAYOUTS if "--memory" not in sys.argv else ():
        name = ", ".join(f"{key} {value}" for key, value in layout.items()) or "one process"
        first, second = race(*(side(layout, fused=fused, counts=False) for fused in (True, False)), STEPS)
        values = f"{milliseconds(first)} / {milliseconds(second)}"
        row(f"fused head, {name}: time of a step / full logits", median_ratio(first, second), "", values)


if __name__ == "__main__":
    main()
