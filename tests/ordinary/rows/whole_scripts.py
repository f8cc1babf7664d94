"""Whole scripts: what somebody writes who has read Lightning's pages and puts several of their parts together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch import callbacks as built_in
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassCalibrationError,
    MulticlassPrecision,
    MulticlassRecall,
)

from features.toys import CLASSES, WIDTH, Samples
from ordinary.uses import Ordinary, Run, fitted, observed, row

SECTION = "Whole scripts"
MEANS = {
    "replicas": "replicas are averaged, as under DDP",
    "split": "microbatches are averaged",
    "pp": "microbatches are averaged",
}
DDP_ORDER = {"replicas": "Lightning's distributed sampler takes the place of the order of one process, as under DDP"}


class Tested(Ordinary):
    """Logs losses and accuracies of all stages."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch)
        self.accuracy(logits, batch["label"])
        self.log("val_acc", self.accuracy, on_step=False, on_epoch=True)
        self.log("val_loss", F.cross_entropy(logits, batch["label"]), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)


class Ema(Callback):
    """A moving average of the weights that validation uses, and that a checkpoint holds."""

    def __init__(self, decay: float = 0.8) -> None:
        self.decay = decay
        self.average: dict[str, Tensor] = {}
        self.backup: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not self.average:
            self.average = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            for name, p in pl_module.named_parameters():
                self.average[name].mul_(self.decay).add_(p.detach(), alpha=1 - self.decay)

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self.average:
            self.backup = {name: p.detach().clone() for name, p in pl_module.named_parameters()}
            for name, p in pl_module.named_parameters():
                p.data.copy_(self.average[name])

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        for name, p in pl_module.named_parameters() if self.backup else ():
            p.data.copy_(self.backup[name])
        self.backup = {}

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = {name: value.clone() for name, value in state["average"].items()}


@row(SECTION, "a callback with averaged weights for validation, accumulation, clipping and early stopping")
def averaged(run: Run) -> dict[str, Any]:
    class Momentum(Tested):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)

    stopping = built_in.EarlyStopping("val_loss", patience=1, min_delta=0.005)
    flags = {"max_epochs": 6, "accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
    kept = fitted(run, Momentum(), callbacks=[Ema(), stopping], **flags)
    return kept | {"stopped": [stopping.stopped_epoch, float(stopping.best_score)]}


@row(
    SECTION,
    "averaged weights of a callback's `state_dict`, and training that goes on from an epoch's checkpoint",
)
def averaged_and_resumed(run: Run) -> dict[str, Any]:
    saving = built_in.ModelCheckpoint(run.folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    trainer = run.trainer(max_epochs=1, callbacks=[Ema(), saving], enable_checkpointing=True)
    trainer.fit(Tested(), run.training(), run.loader(16))
    return fitted(run, Tested(), callbacks=[Ema()], max_epochs=3, ckpt_path=str(run.folder / "step=4.ckpt"))


@row(SECTION, "manual optimization: two optimizers, a scheduler of each, clipping, accumulation by hand, toggles")
def manual(run: Run) -> dict[str, Any]:
    class Manual(Tested):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            seer, speaker = self.optimizers()
            loss = self.loss(batch)
            self.manual_backward(loss / 2)
            if (batch_idx + 1) % 2 == 0:
                for optimizer in (seer, speaker):
                    self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
                    optimizer.step()
                    optimizer.zero_grad()
                first, _ = self.lr_schedulers()
                first.step()
            self.log("train_loss", loss, sync_dist=True)

        def on_train_epoch_end(self) -> None:
            self.lr_schedulers()[1].step(self.trainer.callback_metrics["train_loss"])
            self.seen.append([o.param_groups[0]["lr"] for o in self.optimizers()])

        def configure_optimizers(self) -> Any:
            seer = torch.optim.Adam(self.encoder.parameters(), lr=0.02)
            speaker = torch.optim.SGD(self.decoder.parameters(), lr=0.3, momentum=0.9)
            steps = torch.optim.lr_scheduler.StepLR(seer, 2, 0.5)
            return [seer, speaker], [steps, torch.optim.lr_scheduler.ReduceLROnPlateau(speaker, patience=0)]

    return fitted(run, Manual(), max_epochs=3, callbacks=[built_in.LearningRateMonitor("epoch")])


@row(
    SECTION,
    "`ModelCheckpoint(monitor=..., save_top_k=2, save_last=True)`, resumed, then `trainer.test(ckpt_path='best')`",
)
def best_after_resuming(run: Run) -> dict[str, Any]:
    def saving() -> Any:
        return built_in.ModelCheckpoint(
            run.folder, monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}-{val_loss:.3f}"
        )

    first = run.trainer(max_epochs=2, callbacks=[saving()], enable_checkpointing=True)
    first.fit(Tested(), run.training(), run.loader(16))
    best, module = saving(), Tested(lr=0.5)
    trainer = run.trainer(max_epochs=4, callbacks=[best], enable_checkpointing=True)
    trainer.fit(module, run.training(), run.loader(16), ckpt_path="last")
    tested = trainer.test(module, run.loader(16), ckpt_path="best", verbose=False)
    files = sorted(path.name for path in run.folder.glob("*.ckpt"))
    best_of = [float(best.best_model_score), Path(best.best_model_path).name]
    return observed(trainer, module) | {"tested": tested, "files": files, "best": best_of}


class AllHooks(L.LightningDataModule):
    """Notes the calls of all its hooks, and draws other samples each epoch."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.calls = run, list[str]()

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")

    def train_dataloader(self) -> Any:
        self.calls.append(f"train {self.trainer.current_epoch}")
        return self.run.training(Samples(32, seed=self.trainer.current_epoch))

    def val_dataloader(self) -> Any:
        self.calls.append(f"val {self.trainer.current_epoch}")
        return [self.run.loader(16), self.run.loader(Samples(8, seed=5))]

    def test_dataloader(self) -> Any:
        return self.run.loader(16)

    def predict_dataloader(self) -> Any:
        return self.run.loader(8)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch | {"images": batch["images"] * (1 + dataloader_idx)}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        noise = 0.1 if self.trainer.training else 0.0
        return batch | {"images": batch["images"] + noise}

    def state_dict(self) -> dict[str, Any]:
        return {"calls": len(self.calls)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append(f"loaded {state['calls']}")

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")


@row(
    SECTION,
    "a `LightningDataModule` with all hooks, `reload_dataloaders_every_n_epochs=1`, two validation loaders",
    differs={"replicas": "each replica predicts its own samples, as under DDP"},
)
def all_hooks(run: Run) -> dict[str, Any]:
    class Both(Tested):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            loss = self.loss(batch)
            self.log("val_loss", loss, sync_dist=True)
            if dataloader_idx == 1:
                self.log("other", loss, add_dataloader_idx=False, sync_dist=True)

    module, samples = Both(), AllHooks(run)
    trainer = run.trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1)
    trainer.fit(module, datamodule=samples)
    kept = observed(trainer, module)
    kept["tested"] = trainer.test(module, datamodule=samples, verbose=False)
    kept["predicted"] = trainer.predict(module, datamodule=samples)
    return kept | {"seen": samples.calls}


@row(SECTION, "`reload_dataloaders_every_n_epochs=2` of the module's own loaders, whose batch size grows")
def growing(run: Run) -> dict[str, Any]:
    class Grows(Ordinary):
        def train_dataloader(self) -> Any:
            self.seen.append(self.current_epoch)
            return run.training(32, 8 if self.current_epoch < 2 else 16)

    module = Grows()
    trainer = run.trainer(max_epochs=4, reload_dataloaders_every_n_epochs=2)
    trainer.fit(module)
    return observed(trainer, module) | {"seen": module.seen}


@row(SECTION, "`BasePredictionWriter` with files of a rank, after `fit`: rows and indices put together again")
def writes(run: Run) -> dict[str, Any]:
    class Writer(built_in.BasePredictionWriter):
        def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, indices: Any) -> None:
            torch.save(predictions, run.folder / f"predictions_{trainer.global_rank}.pt")
            torch.save(indices, run.folder / f"indices_{trainer.global_rank}.pt")

    module = Ordinary()
    trainer = run.trainer(callbacks=[Writer(write_interval="epoch")])
    trainer.fit(module, run.training())
    trainer.predict(module, run.loader(20), return_predictions=False)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    rows: dict[int, Tensor] = {}
    for path in sorted(run.folder.glob("predictions_*.pt")):
        batches = torch.load(path)
        places = torch.load(run.folder / path.name.replace("predictions", "indices"))
        flat = [index for batch in places[0] for index in batch]
        rows |= dict(zip(flat, torch.cat(batches), strict=True))
    return {"rows": [rows[index] for index in sorted(rows)]}


@row(
    SECTION,
    "a `MetricCollection` with groups that share states, beside `MeanMetric(nan_strategy='ignore')`",
    tolerance=1e-6,
)
def groups_of_metrics(run: Run) -> dict[str, Any]:
    class Measured(Ordinary):
        def __init__(self) -> None:
            super().__init__()
            self.metrics = MetricCollection(
                {
                    "precision": MulticlassPrecision(CLASSES, average="macro"),
                    "recall": MulticlassRecall(CLASSES, average="macro"),
                    "acc": MulticlassAccuracy(CLASSES, average="micro"),
                },
                compute_groups=True,
                prefix="val_",
            )
            self.mean = MeanMetric(nan_strategy="ignore").double()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            logits = self(batch)
            self.metrics.update(logits, batch["label"])
            losses = F.cross_entropy(logits, batch["label"], reduction="none")
            self.mean.update(torch.where(batch["label"] == 0, torch.nan, losses))

        def on_validation_epoch_end(self) -> None:
            self.log_dict(self.metrics.compute())
            self.log("mean", self.mean.compute())
            self.metrics.reset()
            self.mean.reset()

    return fitted(run, Measured(), max_epochs=2)


@row(
    SECTION,
    "metrics in a list of collections by validation loader, `MulticlassCalibrationError` among them",
    tolerance=1e-6,
)
def metrics_by_loader(run: Run) -> dict[str, Any]:
    class Measured(Ordinary):
        def __init__(self) -> None:
            super().__init__()
            one = MetricCollection([MulticlassAccuracy(CLASSES), MulticlassCalibrationError(CLASSES, n_bins=4)])
            self.by_loader = nn.ModuleList([one.clone(prefix=f"{name}/") for name in ("near", "far")])

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            probabilities = self(batch).softmax(-1)
            metrics = self.by_loader[dataloader_idx]
            metrics.update(probabilities, batch["label"])
            self.log_dict(metrics, on_step=False, on_epoch=True, add_dataloader_idx=False)

    loaders = [run.loader(16), run.loader(Samples(24, seed=3))]
    return fitted(run, Measured(), data={"val_dataloaders": loaders}, max_epochs=2)


@row(SECTION, "`overfit_batches=2`, `val_check_interval=0.5` and a checkpoint each time that the validation is better")
def overfits(run: Run) -> dict[str, Any]:
    saving = built_in.ModelCheckpoint(run.folder, monitor="val_loss", filename="{epoch}-{step}-{val_loss:.4f}")
    flags = {"overfit_batches": 2, "val_check_interval": 0.5, "max_epochs": 3, "enable_checkpointing": True}
    kept = fitted(run, Tested(), callbacks=[saving], **flags)
    return kept | {"files": sorted(path.name for path in run.folder.glob("*.ckpt"))}


@row(
    SECTION,
    "`check_val_every_n_epoch=2`, `limit_val_batches=1`, `ReduceLROnPlateau` of `val_loss` with that `frequency`",
)
def plateau(run: Run) -> dict[str, Any]:
    class Plateau(Tested):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.3)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            line = {"scheduler": schedule, "monitor": "val_loss", "interval": "epoch", "frequency": 2}
            return {"optimizer": optimizer, "lr_scheduler": line}

    rates = built_in.LearningRateMonitor("epoch")
    flags = {"max_epochs": 6, "check_val_every_n_epoch": 2, "limit_val_batches": 1}
    return fitted(run, Plateau(), callbacks=[rates], **flags)


@row(
    SECTION,
    "`GradientAccumulationScheduler({0: 4, 2: 1})`, `OneCycleLR` by `estimated_stepping_batches`-like arithmetic",
)
def accumulation_falls(run: Run) -> dict[str, Any]:
    class Cycle(Tested):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)
            return [optimizer], [{"scheduler": schedule, "interval": "step", "name": "cycle"}]

        def on_train_batch_end(self, *args: Any) -> None:
            self.seen.append([self.global_step, self.trainer.accumulate_grad_batches])

    made = [built_in.GradientAccumulationScheduler({0: 4, 2: 1}), built_in.LearningRateMonitor("step")]
    return fitted(run, Cycle(), callbacks=made, max_epochs=4, data={"train_dataloaders": run.training(40)})


@row(
    SECTION,
    "three param groups with rates, decays and names of their own, `LearningRateMonitor(log_weight_decay=True)`",
)
def grouped(run: Run) -> dict[str, Any]:
    class Grouped(Tested):
        def configure_optimizers(self) -> Any:
            parts = [
                {"params": self.encoder.parameters(), "lr": 0.001, "name": "encoder", "weight_decay": 0.0},
                {"params": self.decoder.layers.parameters(), "lr": 0.01, "name": "layers"},
                {"params": [*self.decoder.norm.parameters(), *self.decoder.head.parameters()], "name": "top"},
                {"params": self.decoder.embedding.parameters(), "name": "words", "betas": (0.8, 0.99)},
            ]
            optimizer = torch.optim.AdamW(parts, lr=0.05, weight_decay=0.1)
            rates = [lambda step: 0.9**step, lambda step: 1.0, lambda step: min(1, (step + 1) / 4), lambda _: 0.5]
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    rates = built_in.LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)
    return fitted(run, Grouped(), callbacks=[rates], max_epochs=2, gradient_clip_val=0.5)


@row(SECTION, "a weight that the encoder and the language model share: `self.encoder.projector.weight = ...`")
class SharedWeight(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.bridge = nn.Linear(WIDTH, WIDTH).double()
        with torch.no_grad():
            self.bridge.weight.copy_(self.encoder.projector.weight)
        self.bridge.bias = self.encoder.projector.bias
        self.bridge.weight = self.encoder.projector.weight

    def forward(self, batch: Any) -> Tensor:
        features = self.encoder(batch["images"])
        return self.decoder(batch["tokens"], features + self.bridge(features).tanh())


@row(SECTION, "weights tied between the encoder and the language model: `decoder.layers[0].up.weight = encoder...`")
class TiedAcross(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.decoder.layers[0].up.weight = self.encoder.layers[1].up.weight


@row(
    SECTION, "the encoder freezes in `on_train_epoch_start` of the second epoch and thaws in the fourth, with momentum"
)
def thaws(run: Run) -> dict[str, Any]:
    class Thaws(Tested):
        def on_train_epoch_start(self) -> None:
            self.encoder.requires_grad_(self.current_epoch not in (1, 2))
            self.seen.append(sum(p.requires_grad for p in self.parameters()))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)

    return fitted(run, Thaws(), max_epochs=4, accumulate_grad_batches=2)


@row(SECTION, "`BaseFinetuning` in two waves: the projector after one epoch, the rest of the encoder after two")
def waves(run: Run) -> dict[str, Any]:
    class Waves(built_in.BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.encoder)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            parts = {1: pl_module.encoder.projector, 2: [pl_module.encoder.patch, pl_module.encoder.layers]}
            if epoch in parts:
                self.unfreeze_and_add_param_group(parts[epoch], optimizer, lr=0.05 / epoch)

    class Partly(Tested):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=0.02)

    return fitted(run, Partly(), callbacks=[Waves(), built_in.LearningRateMonitor("epoch")], max_epochs=4)


@row(SECTION, "the loops' progress in hooks: `fit_loop.epoch_progress`, `epoch_loop.batch_progress`, `is_last_batch`")
def progress(run: Run) -> dict[str, Any]:
    class Watches(Tested):
        def on_train_batch_end(self, *args: Any) -> None:
            loop = self.trainer.fit_loop
            counts = loop.epoch_loop.batch_progress.current
            self.seen.append([counts.ready, counts.completed, loop.epoch_loop.batch_progress.is_last_batch])
            self.seen.append([loop.epoch_progress.current.processed, loop.total_batch_idx, loop.epoch_loop.global_step])
            self.seen.append(
                [self.trainer.is_last_batch, loop.epoch_loop.automatic_optimization.optim_progress.optimizer_steps]
            )

        def on_train_epoch_end(self) -> None:
            self.seen.append([self.trainer.fit_loop.max_batches, self.trainer.num_val_batches])

    return fitted(run, Watches(), max_epochs=2, accumulate_grad_batches=3, limit_train_batches=3)


@row(
    SECTION, "`on_before_zero_grad` reads gradients that have been clipped, noise by a generator in `on_after_backward`"
)
def noisy(run: Run) -> dict[str, Any]:
    class Noisy(Ordinary):
        def on_train_start(self) -> None:
            self.draws = torch.Generator().manual_seed(11)

        def on_after_backward(self) -> None:
            for p in self.parameters():
                p.grad += 0.01 * torch.randn(p.shape, generator=self.draws, dtype=p.dtype)

        def on_before_zero_grad(self, optimizer: Any) -> None:
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            self.seen.append(float(torch.stack([g.norm() for g in grads]).norm()) if grads else None)

    return fitted(run, Noisy(), max_epochs=2, gradient_clip_val=0.4, accumulate_grad_batches=2)


@row(SECTION, "`optimizer_step` warms up, `lr_scheduler_step` of one's own, `configure_gradient_clipping` by epoch")
def overrides(run: Run) -> dict[str, Any]:
    class Overrides(Tested):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
            optimizer.step(closure=closure)
            if self.trainer.global_step < 4:
                for group in optimizer.param_groups:
                    group["lr"] = 0.2 * (self.trainer.global_step + 1) / 4

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step() if metric is None else scheduler.step(metric)
            self.seen.append(scheduler.get_last_lr())

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            value = gradient_clip_val if self.current_epoch else gradient_clip_val / 10
            self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm=gradient_clip_algorithm)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.5)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    return fitted(run, Overrides(), max_epochs=3, gradient_clip_val=0.5, accumulate_grad_batches=2)
