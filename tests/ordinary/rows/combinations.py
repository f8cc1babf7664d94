"""Two or three things at once that users write side by side: each has a row of its own, the combination had none."""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import callbacks as built_in
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from features.toys import CLASSES, WIDTH, Samples
from ordinary.uses import Ordinary, Run, fitted, row

SECTION = "Things side by side"
MEANS = {
    "replicas": "replicas are averaged, as under DDP",
    "split": "microbatches are averaged",
    "pp": "microbatches are averaged",
}


def collected() -> MetricCollection:
    return MetricCollection(
        {
            "acc": MulticlassAccuracy(CLASSES, average="micro"),
            "f1": MulticlassF1Score(CLASSES, average="macro"),
        }
    )


@row(
    SECTION,
    "a `MetricCollection` cloned with prefixes, under accumulation, with a last batch that is smaller",
    differs={"replicas": "values of a metric's call are those of a replica's own batch, as under DDP"},
)
def cloned_collections(run: Run) -> dict[str, Any]:
    class Measured(Ordinary):
        def __init__(self) -> None:
            super().__init__()
            self.train_metrics = collected().clone(prefix="train/")
            self.val_metrics = collected().clone(prefix="val/")

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits = self(batch)
            loss = F.cross_entropy(logits, batch["label"])
            self.log_dict(self.train_metrics(logits, batch["label"]))
            self.log("train_loss", loss, prog_bar=True, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.val_metrics.update(self(batch), batch["label"])

        def on_validation_epoch_end(self) -> None:
            self.log_dict(self.val_metrics.compute())
            self.val_metrics.reset()

    loaders = {"train_dataloaders": run.training(28), "val_dataloaders": run.loader(12)}
    return fitted(run, Measured(), data=loaders, max_epochs=2, accumulate_grad_batches=3)


@row(SECTION, "three validation loaders of unlike sizes, one metric for each, `add_dataloader_idx=False`")
def three_loaders(run: Run) -> dict[str, Any]:
    class Measured(Ordinary):
        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.ModuleList(MulticlassAccuracy(CLASSES, average="micro") for _ in range(3))

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            logits = self(batch)
            self.scores[dataloader_idx](logits, batch["label"])
            self.log(f"acc_{dataloader_idx}", self.scores[dataloader_idx], add_dataloader_idx=False)
            loss = F.cross_entropy(logits, batch["label"])
            self.log("loss", loss, sync_dist=True)
            if dataloader_idx == 2:
                self.log("last_only", loss, add_dataloader_idx=False, sync_dist=True)

    loaders = [run.loader(Samples(count, seed=count)) for count in (8, 16, 24)]
    return fitted(run, Measured(), data={"val_dataloaders": loaders}, max_epochs=2)


@row(SECTION, "a callback keeps the losses of `validation_step` and logs their median", tolerance=1e-6)
def median(run: Run) -> dict[str, Any]:
    class Returns(Ordinary):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self.loss(batch), "count": len(batch["label"])}

    class Median(Callback):
        def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            self.losses: list[float] = []
            self.samples = 0

        def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
            self.losses.append(float(outputs["loss"]))
            self.samples += outputs["count"]

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.log("median", statistics.median(self.losses), sync_dist=True)
            pl_module.log("samples", float(self.samples), sync_dist=True, reduce_fx="sum")

    return fitted(run, Returns(), callbacks=[Median()], max_epochs=2)


@row(SECTION, "a loss by epoch: a warm-up of a second term, `self.current_epoch` and `self.global_step` in the step")
class WarmsUp(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch)
        weight = min(1.0, (self.global_step + 1) / 3) * (1 + self.current_epoch)
        main, extra = F.cross_entropy(logits, batch["label"]), logits.square().mean()
        self.log_dict({"main": main, "extra": extra, "weight": weight}, sync_dist=True)
        return main + 0.1 * weight * extra


@row(SECTION, "one term for even batches and another for odd ones, with two schedulers and clipping")
def turns(run: Run) -> dict[str, Any]:
    class Turns(Ordinary):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits = self(batch)
            if batch_idx % 2 == 0:
                loss = F.cross_entropy(logits, batch["label"], label_smoothing=0.1)
                self.log("even", loss, sync_dist=True)
            else:
                loss = F.nll_loss(logits.log_softmax(-1), batch["label"])
                self.log("odd", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 0.05, total_steps=int(self.trainer.estimated_stepping_batches)
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    rates = built_in.LearningRateMonitor(logging_interval="step", log_momentum=True)
    return fitted(run, Turns(), callbacks=[rates], max_epochs=2, gradient_clip_val=0.5, accumulate_grad_batches=2)


@row(SECTION, "a projection, a temperature and class prototypes: parameters of the module itself in the loss")
class Prototypes(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.prototypes = nn.Parameter(torch.randn(CLASSES, WIDTH, generator=generator, dtype=torch.float64))
        self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = self.encoder(batch["images"])
        logits = self.decoder(batch["tokens"], features)
        near = F.normalize(features, dim=-1) @ F.normalize(self.prototypes, dim=-1).T / self.temperature.exp()
        loss = F.cross_entropy(logits, batch["label"]) + 0.5 * F.cross_entropy(near, batch["label"])
        self.log("temperature", self.temperature.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


@row(SECTION, "an auxiliary head on the encoder, a submodule of the module itself, with a metric of its own")
class Auxiliary(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.auxiliary = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)).double()
        self.aux_accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = self.encoder(batch["images"])
        guess = self.auxiliary(features)
        logits = self.decoder(batch["tokens"], features)
        self.aux_accuracy(guess, batch["label"])
        self.log("aux_accuracy", self.aux_accuracy, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, batch["label"]) + 0.3 * F.cross_entropy(guess, batch["label"])


@row(SECTION, "only the auxiliary head of the encoder and the language model's last layer train")
class PartlyTrained(Auxiliary):
    def configure_optimizers(self) -> Any:
        self.requires_grad_(False)
        self.auxiliary.requires_grad_(True)
        self.decoder.layers[-1].requires_grad_(True)
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.Adam(trained, lr=0.01)


@row(SECTION, "cross entropy with weights of classes", warns=True, differs=MEANS)
class Weighted(Ordinary):
    def loss(self, batch: Any) -> Tensor:
        weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
        return F.cross_entropy(self(batch), batch["label"], weight=weight)


@row(SECTION, "cross entropy with weights of classes and a `loss_weight` method that sums them")
def weighted_right(run: Run) -> dict[str, Any]:
    class WeightedRight(Weighted):
        def loss_weight(self, batch: Any) -> float:
            return float(torch.tensor([1.0, 2.0, 3.0])[batch["label"]].sum())

    kept = fitted(run, WeightedRight())
    del kept["losses"]  # of each replica its own
    return kept


@row(SECTION, "the hardest sample of a batch alone (OHEM): `topk` of losses", warns=True, differs=MEANS)
class Hardest(Ordinary):
    def loss(self, batch: Any) -> Tensor:
        losses = F.cross_entropy(self(batch), batch["label"], reduction="none")
        return losses.topk(1).values.mean()


@row(SECTION, "training loaders in a dict, `CombinedLoader('min_size')`, one of labelled and one of unlabelled samples")
def semi_supervised(run: Run) -> dict[str, Any]:
    class Semi(Ordinary):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            labelled, free = batch["labelled"], batch["free"]
            loss = F.cross_entropy(self(labelled), labelled["label"])
            entropy = -(self(free).softmax(-1) * self(free).log_softmax(-1)).sum(-1).mean()
            self.log_dict({"loss": loss, "entropy": entropy}, sync_dist=True)
            return loss + 0.1 * entropy

    loaders = {"labelled": run.training(24), "free": run.training(Samples(40, seed=3))}
    return fitted(run, Semi(), data={"train_dataloaders": CombinedLoader(loaders, "min_size")}, max_epochs=2)


class Stream(IterableDataset):
    def __init__(self, count: int) -> None:
        self.samples = Samples(count)

    def __iter__(self) -> Any:
        return (self.samples[index] for index in range(len(self.samples)))


@row(
    SECTION,
    "an `IterableDataset` without a length, `max_steps` and `val_check_interval` in steps",
    differs={"replicas": "each replica reads the whole stream, as under DDP"},
)
def endless(run: Run) -> dict[str, Any]:
    loaders = {"train_dataloaders": run.loader(Stream(64)), "val_dataloaders": run.loader(8)}
    flags = {"max_steps": 6, "max_epochs": -1, "val_check_interval": 2, "check_val_every_n_epoch": None}
    return fitted(run, Ordinary(), data=loaders, **flags)


@row(SECTION, "best checkpoint by a metric, then `trainer.test(ckpt_path='best')` and `best_model_score`")
def best_then_test(run: Run) -> dict[str, Any]:
    class Tested(Ordinary):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.accuracy(self(batch), batch["label"])
            self.log("val_acc", self.accuracy, on_step=False, on_epoch=True)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.loss(batch), sync_dist=True)

    module = Tested()
    best = built_in.ModelCheckpoint(monitor="val_acc", mode="max", save_top_k=2, filename="{epoch}-{val_acc:.3f}")
    stopping = built_in.EarlyStopping("val_acc", mode="max", patience=2)
    trainer = run.trainer(max_epochs=4, callbacks=[best, stopping], enable_checkpointing=True)
    trainer.fit(module, run.training(), run.loader(16))
    kept: dict[str, Any] = {"tested": trainer.test(module, run.loader(16), ckpt_path="best", verbose=False)}
    kept |= {"score": float(best.best_model_score), "best": best.best_model_path.rpartition("/")[2]}
    return kept | {"k": sorted(path.rpartition("/")[2] for path in best.best_k_models)}


@row(SECTION, "`fit`, more epochs by `trainer.fit_loop.max_epochs`, and `fit` again")
def longer(run: Run) -> dict[str, Any]:
    module, trainer = Ordinary(), run.trainer(max_epochs=1)
    trainer.fit(module, run.training(), run.loader(16))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, run.training(), run.loader(16))
    seen = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"metrics": seen, "progress": [trainer.global_step, trainer.current_epoch]}


@row(SECTION, "`validate` before `fit`, `fit` with a second trainer, and `validate` after it")
def before_and_after(run: Run) -> dict[str, Any]:
    module = Ordinary()
    before = run.trainer().validate(module, run.loader(16), verbose=False)
    run.trainer(max_epochs=2).fit(module, run.training())
    after = run.trainer().validate(module, run.loader(16), verbose=False)
    return {"before": before, "after": after}


@row(SECTION, "running figures: `MeanMetric` of the loss reset every second batch, logged as a value", tolerance=1e-6)
class Running(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric().double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.mean.update(loss.detach(), weight=len(batch["label"]))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            self.log("mean", self.mean.compute())
            self.mean.reset()


@row(SECTION, "an optimizer with decay by name, its groups counted in a hook, an unfreeze in the second epoch")
def groups(run: Run) -> dict[str, Any]:
    class Grouped(Ordinary):
        def __init__(self) -> None:
            super().__init__()
            self.encoder.requires_grad_(False)

        def configure_optimizers(self) -> Any:
            named = [(name, parameter) for name, parameter in self.named_parameters()]
            plain = [parameter for name, parameter in named if "norm" in name or name.endswith("bias")]
            other = [parameter for name, parameter in named if not ("norm" in name or name.endswith("bias"))]
            return torch.optim.AdamW([{"params": other, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}])

        def on_train_start(self) -> None:
            self.seen += [len(group["params"]) for group in self.optimizers().param_groups]

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.encoder.requires_grad_(True)

    return fitted(run, Grouped(), max_epochs=3)


@row(SECTION, "labels of two tasks, a loss for each, weights that are buffers and change by `on_train_epoch_end`")
class TwoTasks(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("balance", torch.tensor([1.0, 0.5], dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch)
        kinds = batch["tokens"].float().mean(-1) > 7.5
        losses = torch.stack(
            [F.cross_entropy(logits, batch["label"]), F.binary_cross_entropy_with_logits(logits[:, 0], kinds.double())]
        )
        self.log_dict({"classes": losses[0], "kinds": losses[1]}, sync_dist=True)
        return (self.balance * losses).sum()

    def on_train_epoch_end(self) -> None:
        self.balance.mul_(0.9)


@row(SECTION, "`self.log` in `on_train_batch_end`, `on_before_optimizer_step` and `on_train_epoch_end`")
class LogsInHooks(Ordinary):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("ended", outputs["loss"], on_step=True, on_epoch=True, sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("rate", optimizer.param_groups[0]["lr"])

    def on_train_epoch_end(self) -> None:
        self.log("epoch_end", self.trainer.callback_metrics["train_loss"] * 2)
        self.seen.append(sorted(self.trainer.callback_metrics))


@row(SECTION, "noise by a generator of the module's own, equal in each run")
class OwnGenerator(Ordinary):
    def on_train_start(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.scale = 1 + 0.1 * torch.rand((), generator=self.generator, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss({**batch, "images": batch["images"] * self.scale})
        self.log("train_loss", loss, sync_dist=True)
        return loss


@row(
    SECTION,
    "a `WeightedRandomSampler` with a generator, and workers",
    differs={"replicas": "Lightning's distributed sampler takes the place of the order of one process, as under DDP"},
)
def weighted_sampler(run: Run) -> dict[str, Any]:
    sampler = WeightedRandomSampler([1.0, 2.0] * 16, 32, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(Samples(32), 8 if run.plain else 8 // run.replicas, sampler=sampler, num_workers=1)
    return fitted(run, Ordinary(), data={"train_dataloaders": loader})
