"""Steps that write to weights, or look at their values beside what modules compute with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ordinary.uses import Ordinary, row

SECTION = "Weights in steps"


@row(
    SECTION,
    "a weight decays in the step, before it computes: `self.decoder.layers[0].up.weight.mul_(0.99)`",
    slots=["step"],
)
class DecaysWeight(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.decoder.layers[0].up.weight.mul_(0.99)
        return super().training_step(batch, batch_idx)


@row(SECTION, "weights are clamped at the end of every second step: `p.clamp_()` of the encoder", slots=["step"])
class ClampsInStep(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 2:
            with torch.no_grad():
                self.encoder.patch.weight.clamp_(-0.2, 0.2)
        return loss


@row(SECTION, "the norm of a weight is kept in a buffer by the step", slots=["step"])
class KeepsNorm(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("norm", torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.norm.copy_(self.decoder.layers[3].up.weight.detach().norm())
        return loss


@row(SECTION, "the mean size of a weight is kept in a list by a forward hook of its layer", slots=["build"])
class HooksNorm(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        layer = self.decoder.layers[3]
        layer.register_forward_hook(lambda *_: self.sizes.append(layer.down.weight.detach().abs().mean()))
        self.sizes: list[Tensor] = []


COUNTED = {"replicas": "a replica counts its own samples, as under DDP"}


class Counting(Ordinary):
    """Has a counter in its first layer of language, which the first stage owns."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder.layers[0].register_buffer("count", torch.zeros((), dtype=torch.long))


@row(
    SECTION, "samples are counted in an early layer before the step computes", slots=["step", "build"], differs=COUNTED
)
class CountsBefore(Counting):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.decoder.layers[0].count += batch["label"].numel()
        return super().training_step(batch, batch_idx)


@row(SECTION, "samples are counted in an early layer at the end of the step", slots=["step", "build"], differs=COUNTED)
class CountsAfter(Counting):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.decoder.layers[0].count += batch["label"].numel()
        return loss
