"""Weights and gradients that are read where they seldom are: between loops, around schedulers, in transfers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import Subset

from features.toys import Samples
from ordinary.uses import Memory, Ordinary, Run, fitted, row

SECTION = "Rarer hooks"


def norm(module: nn.Module) -> float:
    return float(torch.stack([p.detach().norm() for p in module.parameters()]).norm())


@row(SECTION, "`lr_scheduler_step` steps by the norm of the weights")
class StepsByNorm(Ordinary):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.seen.append(norm(self))
        scheduler.optimizer.param_groups[0]["lr"] = 1 / self.seen[-1]


@row(SECTION, "`optimizer_zero_grad` reads the gradients that it drops")
class ReadsWhatItDrops(Ordinary):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.seen.append([float(p.grad.norm()) for p in self.parameters() if p.grad is not None])
        optimizer.zero_grad()


@row(SECTION, "`on_validation_model_eval` and `on_validation_model_train` read the norm of the weights")
class ReadsBetweenLoops(Ordinary):
    def on_validation_model_eval(self) -> None:
        self.seen.append(norm(self))
        super().on_validation_model_eval()

    def on_validation_model_train(self) -> None:
        self.seen.append(norm(self))
        super().on_validation_model_train()


@row(SECTION, "`optimizer.register_step_post_hook` normalises matrices and keeps their norm")
class NormalisesAfterSteps(Ordinary):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(self.normalise)
        return optimizer

    @torch.no_grad()
    def normalise(self, optimizer: Any, *args: Any) -> None:
        self.seen.append(norm(self))
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter.dim() == 2:
                parameter.div_(parameter.norm())


@row(SECTION, "hooks around an optimizer's steps, registered in `on_train_start`, read gradients and scale matrices")
class RegistersLate(NormalisesAfterSteps):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_start(self) -> None:
        optimizer = self.trainer.optimizers[0]
        optimizer.register_step_pre_hook(self.before)
        optimizer.register_step_post_hook(self.normalise)

    def before(self, *_: Any) -> None:
        self.seen.append(sum(float(p.grad.square().sum()) for p in self.parameters() if p.grad is not None))


@row(SECTION, "learning rates by the width of a weight (muP), and a decay for large ones, in `configure_optimizers`")
class RatesByWidth(Ordinary):
    def configure_optimizers(self) -> Any:
        self.seen.append(sum(p.numel() for p in self.parameters()))
        groups = [
            {"params": [p], "lr": 1 / p.shape[-1], "weight_decay": 0.1 * (p.numel() > 100)} for p in self.parameters()
        ]
        return torch.optim.SGD(groups, lr=0.1)


@row(SECTION, "`state_dict` of a callback keeps the norm of the weights")
def kept(run: Run) -> dict[str, Any]:
    module = Ordinary()

    class KeepsNorm(Callback):
        def state_dict(self) -> dict[str, Any]:
            module.seen.append(norm(module))
            return {"norm": module.seen[-1]}

    saves = ModelCheckpoint(dirpath=run.folder, every_n_train_steps=2)
    return fitted(run, module, callbacks=[KeepsNorm(), saves], enable_checkpointing=True)


@row(SECTION, "`on_after_batch_transfer` scales images by the norm of the weights")
class ScalesByNorm(Ordinary):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "images": batch["images"] / norm(self)}


@row(SECTION, "`on_after_batch_transfer` scales images by the norm of the weights, within `strategy.full_parameters()`")
class ScalesByFullNorm(Ordinary):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        with getattr(self.trainer.strategy, "full_parameters", nullcontext)():
            return {**batch, "images": batch["images"] / norm(self)}


@row(SECTION, "`on_before_batch_transfer` scales images by the numbers of weights")
class ScalesByNumber(Ordinary):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "images": batch["images"] / sum(p.numel() for p in self.parameters())}


@row(SECTION, "a logger of one's own writes the norm of the weights beside each metric")
def logged(run: Run) -> dict[str, Any]:
    module = Ordinary()

    class LogsNorm(Memory):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            module.seen.append(norm(module))
            super().log_metrics(metrics, step)

    return fitted(run, module, logger=LogsNorm())


@row(SECTION, "`train_dataloader` takes the samples with the smallest features, anew each epoch")
def chosen(run: Run) -> dict[str, Any]:
    class Chooses(Ordinary):
        def train_dataloader(self) -> Any:
            samples = Samples(32)
            with getattr(self.trainer.strategy, "full_parameters", nullcontext)():
                weight: Tensor = self.encoder.patch.weight
                order = (samples.images @ weight.detach().T).norm(dim=1).argsort()[:16].tolist()
            self.seen.append(order)
            return run.training(Subset(samples, order))

    reloads = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}
    return fitted(run, Chooses(), **reloads, data={"train_dataloaders": None})
