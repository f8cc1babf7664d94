"""Copies of submodules that hooks make during a run, and that compute with weights of their own."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from features.toys import WIDTH
from ordinary.uses import Ordinary, row

SECTION = "Copies of submodules"


@row(SECTION, "`AveragedModel` of the decoder, made in `on_fit_start` and called in a hook")
class SwaCalled(Ordinary):
    def on_fit_start(self) -> None:
        self.averaged = [torch.optim.swa_utils.AveragedModel(self.decoder)]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.averaged[0].update_parameters(self.decoder)

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        tokens, features = torch.arange(8).view(2, 4), torch.ones(2, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            self.seen.append(float(self.averaged[0](tokens, features).sum()))


@row(SECTION, "a teacher that is copied in `on_fit_start`: `copy.deepcopy(self.encoder)`")
class CopiedTeacher(Ordinary):
    def on_fit_start(self) -> None:
        self.teacher = [copy.deepcopy(self.encoder)]
        with torch.no_grad():
            for weight in self.teacher[0].parameters():
                weight.mul_(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self.teacher[0](batch["images"])
        features = self.encoder(batch["images"])
        return F.cross_entropy(self.decoder(batch["tokens"], features), batch["label"]) + F.mse_loss(features, target)
