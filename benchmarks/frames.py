"""Memory and time of a training step over 512 frames whose encoder computes 16 of them at a time.

Memory is what a step adds at most to the bytes of tensors that are alive before it, on one rank with everything. It is
compared with a step over 16 frames, plus what the result of the encoder for the other frames takes, and its gradient;
and with a step over 512 frames at once. Times are of steps over 512 frames, in turns.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from offload import Device
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import SiglipVisionConfig, SiglipVisionModel
from turns import WARMUP, Side, Turns, fit, median_ratio, milliseconds, race, row, run

from lightning_mm5d import Modality, MultimodalStrategy

STEPS, FRAMES, CHUNK, CLIP = 6 + WARMUP, 512, 16, 16
WIDTH, PIXELS, PATCH, CLASSES = 64, 32, 4, 4


class Clips(L.LightningModule):
    """Classifies clips of 16 frames by the mean of their features.

    Args:
        device: counts the bytes that are alive; None where nothing counts.
    """

    def __init__(self, device: Device | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower = SiglipVisionModel(
            SiglipVisionConfig(
                hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=12, num_attention_heads=4,
                image_size=PIXELS, patch_size=PATCH, vision_use_head=False,
            )
        )  # fmt: skip
        self.head = nn.Linear(WIDTH, CLASSES)
        self.device_memory, self.before = device, 0
        self.added: list[int] = []
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        frames = batch["clips"].flatten(0, 1)  # [clips * CLIP, 3, PIXELS, PIXELS]
        features = self.tower(pixel_values=frames).last_hidden_state
        clips = features.unflatten(0, (-1, CLIP)).mean(dim=(1, 2))
        return nn.functional.cross_entropy(self.head(clips), batch["labels"])

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


def train(turns: Turns, frames: int, checkpointing: Any, *, counts: bool) -> tuple[list[float], int]:
    """Return the losses, and the bytes that the third step added at most."""
    device = Device() if counts else None
    module = Clips(device)
    batches = [
        {
            "clips": torch.randn(frames // CLIP, CLIP, 3, PIXELS, PIXELS),
            "labels": torch.arange(frames // CLIP) % CLASSES,
        }
        for _ in range(3 if counts else STEPS)
    ]
    loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]  # a list is a dataset
    vision = Modality(
        module="tower", boundary="tower", colocate_with="language", memory={"activation_checkpointing": checkpointing}
    )
    strategy = MultimodalStrategy({"vision": vision, "language": Modality(module="head")})
    if device is None:
        fit(module, loader, strategy, 1, turns)
        return module.losses, 0
    device.count([*module.parameters()])
    with device:
        fit(module, loader, strategy, 1)
    return module.losses, module.added[-1]


def side(frames: int, checkpointing: Any, *, counts: bool) -> Side:
    """The rank that trains."""
    return Side(1, lambda turns, rank: train(turns, frames, checkpointing, counts=counts))


def memory() -> None:
    """Print what a step adds."""
    chunked, few, whole = (
        run(side(frames, checkpointing, counts=True))[0][1]
        for frames, checkpointing in ((FRAMES, {"items": CHUNK}), (CHUNK, "none"), (FRAMES, "none"))
    )
    tokens = (PIXELS // PATCH) ** 2
    results = 2 * (FRAMES - CHUNK) * tokens * WIDTH * 4
    values = f"{chunked / 1e6:.1f} / ({few / 1e6:.1f} + {results / 1e6:.1f}) MB"
    row(f"{FRAMES} frames, {CHUNK} at a time: memory of a step / {CHUNK} frames", chunked / (few + results), "", values)
    values = f"{chunked / 1e6:.1f} / {whole / 1e6:.1f} MB"
    row(f"{FRAMES} frames, {CHUNK} at a time: memory of a step / all at once", chunked / whole, "", values)


def time() -> None:
    """Print how long a step takes."""
    chunked, whole = race(side(FRAMES, {"items": CHUNK}, counts=False), side(FRAMES, "none", counts=False), STEPS)
    values = f"{milliseconds(chunked)} / {milliseconds(whole)}"
    row(f"{FRAMES} frames, {CHUNK} at a time: time of a step / all at once", median_ratio(chunked, whole), "", values)


def main() -> None:
    memory()
    time()


if __name__ == "__main__":
    main()
