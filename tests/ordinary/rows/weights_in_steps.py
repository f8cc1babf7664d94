"""Steps that write to weights, or look at their values beside what modules compute with them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
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


@row(SECTION, "a weight decays in `validation_step`, after the loss", slots=["validation"])
class DecaysInValidation(Ordinary):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        with torch.no_grad():
            self.decoder.layers[0].up.weight.mul_(0.9)


@row(SECTION, "a copy of a weight is kept by the step, and compared in `on_train_batch_end`", slots=["step"])
class KeepsCopy(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.before = self.decoder.layers[3].up.weight.detach().clone()
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float((self.decoder.layers[3].up.weight - self.before).norm()))


@row(SECTION, "`weight.data` is kept in `on_train_start`, and scaled in the step", slots=["step"])
class KeepsData(Ordinary):
    def on_train_start(self) -> None:
        self.kept = [self.decoder.layers[0].up.weight.data]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kept[0].mul_(0.9)
        return super().training_step(batch, batch_idx)


@row(SECTION, "a weight is scaled through its array of numpy in the step", slots=["step"])
class ScalesArray(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        array = self.encoder.patch.weight.detach().numpy()
        array *= 0.9
        return super().training_step(batch, batch_idx)


@row(SECTION, "weights are scaled through arrays of numpy in `on_train_batch_end`")
class ScalesArraysInHook(Ordinary):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for weight in self.decoder.parameters():
            array = weight.detach().numpy()
            array *= 0.99


@row(SECTION, "`validation_step` averages outputs of weights with noise, and puts them back", slots=["validation"])
class NoisyValidation(Ordinary):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        weight, losses = self.decoder.head.weight, []
        before = weight.detach().clone()
        for size in (0.01, 0.02):
            with torch.no_grad():
                weight.add_(size)
            losses.append(self.loss(batch))
            with torch.no_grad():
                weight.copy_(before)
        self.log("val_loss", torch.stack(losses).mean(), sync_dist=True)


@row(SECTION, "a weight is clamped by `.data` before and after the forward", slots=["step"])
class ClampsTwice(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.decoder.head.weight.data.clamp_(-0.2, 0.2)
        loss = super().training_step(batch, batch_idx)
        self.decoder.head.weight.data.clamp_(-0.2, 0.2)
        return loss


def _scale(weight: Tensor) -> None:
    array = weight.detach().numpy()
    array *= 0.9


@row(SECTION, "a function beside the class scales a weight through its array of numpy", slots=["step"])
class ScalesByFunction(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        _scale(self.encoder.patch.weight)
        return super().training_step(batch, batch_idx)


@row(SECTION, "a submodule keeps `weight.data` from `on_train_start` on, and a step scales it", slots=["step"])
class SubmoduleKeepsData(Ordinary):
    def on_train_start(self) -> None:
        self.decoder.kept = [self.decoder.layers[0].up.weight.data]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.decoder.kept[0].mul_(0.9)
        return super().training_step(batch, batch_idx)


@row(SECTION, "a submodule keeps an array of a weight, and `on_train_batch_end` scales it")
class SubmoduleKeepsArray(Ordinary):
    def on_train_start(self) -> None:
        self.decoder.kept = [self.decoder.layers[0].up.weight.detach().numpy()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.decoder.kept[0][...] *= 0.9


@row(SECTION, "an embedding with `max_norm` trains", slots=["build"])
class Renormed(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.decoder.embedding.max_norm = 1.0


@row(SECTION, "a penalty on the gradient of features, with `create_graph=True`", slots=["step"])
class PenalizesGradient(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = self.encoder(batch["images"])
        logits = self.decoder(batch["tokens"], features)
        losses = F.cross_entropy(logits, batch["label"], reduction="none")
        (gradient,) = torch.autograd.grad(losses.sum(), features, create_graph=True)
        return losses.mean() + 0.1 * gradient.square().sum(1).mean()
