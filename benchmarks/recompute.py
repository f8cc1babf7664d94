"""Memory and time of a training step of a small Llama with each kind of recomputation, against none.

Memory is what a step adds at most to the bytes of tensors that are alive before it: what its forward saves, and what
computes at that moment. Gradients are kept over steps, so that they do not count. The worst rank is compared; where
stages wait for each other runs differ by a percent. Times are of other runs, in turns; ranks have a core each.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from offload import Device
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM
from turns import WARMUP, Side, Turns, fit, median_ratio, milliseconds, race, row, run

from lightning_mm5d import Modality, MultimodalStrategy

STEPS, BATCH, TOKENS, LAYERS, MICROBATCHES = 20 + WARMUP, 4, 512, 8, 4
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
KINDS: tuple[tuple[int, Any], ...] = (
    (1, "selective"),
    (1, {"every": 2}),
    (1, {"fraction": 0.5}),
    (1, "full"),
    (2, {"per_stage": ["full", "none"]}),
    (2, {"per_stage": ["full", "selective"]}),
)
"""Stages of the model, and which of its layers run again."""


class Llama(L.LightningModule):
    """The same weights in every process.

    Args:
        device: counts the bytes that are alive; None where nothing counts.
    """

    def __init__(self, device: Device | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(LlamaConfig(**CONFIG))
        self.device_memory, self.before = device, 0
        self.added: list[int] = []
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch, use_cache=False).loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.device_memory is not None:
            self.before = self.device_memory.most = self.device_memory.now

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        if self.device_memory is not None:
            self.added.append(self.device_memory.most - self.before)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def train(turns: Turns, stages: int, kind: Any, *, counts: bool) -> tuple[list[float], int]:
    """Return the losses, and the bytes that the third step added at most."""
    device = Device() if counts else None
    module = Llama(device)
    tokens = torch.randint(CONFIG["vocab_size"], (3 if counts else STEPS, BATCH, TOKENS))
    loader = DataLoader([{"input_ids": ids, "labels": ids} for ids in tokens], batch_size=None)
    modalities = {"language": Modality(pp_size=stages, memory={"activation_checkpointing": kind})}
    strategy = MultimodalStrategy(modalities, batching={"num_microbatches": MICROBATCHES})
    if device is None:
        fit(module, loader, strategy, stages, turns)
        return module.losses, 0
    device.count([*module.parameters()])
    with device:
        fit(module, loader, strategy, stages)
    return module.losses, module.added[-1]


def side(stages: int, kind: Any, *, counts: bool) -> Side:
    """The ranks that train with one kind."""
    return Side(stages, lambda turns, rank: train(turns, stages, kind, counts=counts))


def megabytes(sizes: list[int]) -> str:
    """Of each rank, as text."""
    return ", ".join(f"{size / 1e6:.1f}" for size in sizes)


def memory(stages: int, kind: Any) -> None:
    """Print what a step adds."""
    again, plain = ([size for _, size in run(side(stages, way, counts=True))] for way in (kind, "none"))
    values = f"{megabytes(again)} / {megabytes(plain)} MB"
    row(f"recomputation {kind}, pp_size {stages}: memory of a step / none", max(again) / max(plain), "", values)


def time(stages: int, kind: Any) -> None:
    """Print how long a step takes, and what the largest rank's process held."""
    again, plain = race(side(stages, kind, counts=False), side(stages, "none", counts=False), STEPS)
    assert [losses for losses, _ in again.results] == [losses for losses, _ in plain.results], "the same bits"
    resident = f"resident {max(again.peak_bytes) / 1e6:.0f} / {max(plain.peak_bytes) / 1e6:.0f} MB"
    values = f"{milliseconds(again)} / {milliseconds(plain)}, {resident}"
    row(f"recomputation {kind}, pp_size {stages}: time of a step / none", median_ratio(again, plain), "", values)


def main() -> None:
    for show in (memory, time):
        for stages, kind in KINDS:
            show(stages, kind)


if __name__ == "__main__":
    main()
