"""Forms of `self.log`, metrics and loggers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor
from torchmetrics import MaxMetric, MeanMetric, MeanSquaredError, MetricCollection, SumMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)

from features.toys import CLASSES
from ordinary.uses import Ordinary, Run, fitted, observed, row

SECTION = "Logging"
OWN = {"replicas": "without `sync_dist` each replica logs the value of its own samples, as under DDP"}


def logging(title: str, differs: Any = None, over: str = "", **options: Any) -> None:
    """A row that logs the loss with these options in the training step."""

    class Logging(Ordinary):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("logged_loss", loss, **options)
            return loss

    row(SECTION, title, differs=differs or {}, over=over, slots=["step"])(Logging)


logging("`self.log(name, loss)`", OWN)
logging("`self.log(name, loss, sync_dist=True)`", sync_dist=True)
logging("`self.log(name, loss, on_step=False, on_epoch=True)`", OWN, on_step=False, on_epoch=True)
logging("`self.log(..., on_epoch=True, sync_dist=True)`", on_step=False, on_epoch=True, sync_dist=True)
logging("`self.log(..., on_step=True, on_epoch=True, sync_dist=True)`", on_step=True, on_epoch=True, sync_dist=True)
logging("`self.log(..., prog_bar=True, sync_dist=True)`", prog_bar=True, sync_dist=True)
logging("`self.log(..., logger=False, sync_dist=True)`", logger=False, sync_dist=True)
logging(
    '`self.log(..., on_epoch=True, reduce_fx="sum", sync_dist=True)`',
    {
        "replicas": "`sync_dist` with `sum` adds up the means of the replicas, as under DDP",
        "split": "`sum` adds up what microbatches log, which is right for counts; a mean loss is added twice",
        "pp": "`sum` adds up what microbatches log, which is right for counts; a mean loss is added twice",
    },
    on_step=False,
    on_epoch=True,
    reduce_fx="sum",
    sync_dist=True,
)
logging(
    '`self.log(..., on_epoch=True, reduce_fx="max", sync_dist=True)`',
    {
        "replicas": "the largest mean of a replica's part of a batch, as under DDP",
        "split": "the largest mean of a microbatch",
        "pp": "the largest mean of a microbatch",
    },
    on_step=False,
    on_epoch=True,
    reduce_fx="max",
    sync_dist=True,
)
logging(
    '`self.log(..., on_epoch=True, reduce_fx="min", sync_dist=True)`',
    {
        "replicas": "the smallest mean of a replica's part of a batch, as under DDP",
        "split": "the smallest mean of a microbatch",
        "pp": "the smallest mean of a microbatch",
    },
    on_step=False,
    on_epoch=True,
    reduce_fx="min",
    sync_dist=True,
)
logging("`self.log(..., rank_zero_only=True)`", OWN, rank_zero_only=True)
logging("`self.log(..., add_dataloader_idx=False, sync_dist=True)`", add_dataloader_idx=False, sync_dist=True)
logging("`self.log(..., enable_graph=True, sync_dist=True)`", enable_graph=True, sync_dist=True)


@row(SECTION, "`self.log(..., batch_size=len(batch[...]))` with a smaller last batch", slots=["step", "data"])
def sized(run: Run) -> dict[str, Any]:
    class Sized(Ordinary):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.loss(batch)
            self.log("val_loss", loss, batch_size=len(batch["label"]), sync_dist=True)

    return fitted(run, Sized(), data={"val_dataloaders": run.loader(20)})


@row(SECTION, "`self.log` without `batch_size`, with a smaller last batch")
def unsized(run: Run) -> dict[str, Any]:
    return fitted(run, Ordinary(), data={"val_dataloaders": run.loader(20)})


@row(SECTION, "`self.log_dict({...}, sync_dist=True)`", slots=["step"])
class LogsDict(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log_dict({"one": loss, "two": 2 * loss}, on_epoch=True, sync_dist=True)
        return loss


@row(SECTION, "a number of Python is logged", slots=["step"])
class LogsNumber(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("number", 3.5, on_step=True, on_epoch=True)
        self.log("index", float(batch_idx))
        return self.loss(batch)


@row(SECTION, "`loss.item()` is logged", slots=["step"], tolerance=1e-6)
class LogsItem(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("item", loss.item(), sync_dist=True)
        return loss


@row(SECTION, "a mean of the logits is logged", slots=["step"])
class LogsLogits(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch)
        self.log("logits", logits.mean(), on_epoch=True, sync_dist=True)
        return F.cross_entropy(logits, batch["label"])


@row(SECTION, "a value of the batch is logged", slots=["step"])
class LogsBatch(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("brightness", batch["images"].mean(), on_epoch=True, sync_dist=True)
        return self.loss(batch)


@row(SECTION, "accuracy by hand: `(logits.argmax(1) == label).float().mean()`", slots=["validation"])
class AccuracyByHand(Ordinary):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        correct = (self(batch).argmax(1) == batch["label"]).double().mean()
        self.log("val_accuracy", correct, sync_dist=True)


@row(SECTION, 'a count by hand: `reduce_fx="sum"` of correct answers', slots=["validation"])
class CountByHand(Ordinary):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        correct = (self(batch).argmax(1) == batch["label"]).double().sum()
        self.log("val_correct", correct, reduce_fx="sum", sync_dist=True)


@row(SECTION, "the learning rate is logged", slots=["step"])
class LogsRate(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        return self.loss(batch)


@row(SECTION, "`self.log` in `on_train_epoch_end`")
class LogsAtEnd(Ordinary):
    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("at_end", float(self.global_step), sync_dist=True)


@row(SECTION, "`self.log` in `on_train_start` and `on_train_epoch_start`")
class LogsAtStart(Ordinary):
    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.log("at_start", float(self.current_epoch), sync_dist=True)


@row(SECTION, "`self.log` in `on_train_batch_start` and `on_train_batch_end`")
class LogsAtBatch(Ordinary):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("before", float(batch_idx), on_step=False, on_epoch=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("after", outputs["loss"], on_epoch=True, sync_dist=True)


@row(SECTION, "`self.log` in `on_before_optimizer_step`")
class LogsBeforeStep(Ordinary):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("rate", optimizer.param_groups[0]["lr"])


@row(SECTION, "`self.log` in `on_validation_epoch_end`")
class LogsAfterValidation(Ordinary):
    def on_validation_epoch_end(self) -> None:
        self.log("epoch_end", 5.0, sync_dist=True, prog_bar=True)


@row(SECTION, "`self.log` in `forward`")
class LogsInForward(Ordinary):
    def forward(self, batch: Any) -> Tensor:
        logits = super().forward(batch)
        self.log("logits", logits.mean(), on_step=False, on_epoch=True, sync_dist=True)
        return logits


@row(SECTION, "`self.log` in `test_step`")
def logs_test(run: Run) -> dict[str, Any]:
    class Testing(Ordinary):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log_dict({"test_loss": self.loss(batch), "test_logit": self(batch).mean()}, sync_dist=True)

    trainer = run.trainer()
    return {"seen": trainer.test(Testing(), run.loader(24), verbose=False)}


def metric(title: str, make: Any, call: str = "call", **options: Any) -> None:
    """A row with a metric of torchmetrics that is updated in training and validation."""

    class Measured(Ordinary):
        def __init__(self) -> None:
            super().__init__()
            self.train_metric, self.val_metric = make(), make()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits = self(batch)
            if call == "call":
                self.train_metric(logits, batch["label"])
            else:
                self.train_metric.update(logits, batch["label"])
            self._log(self.train_metric, "train_metric")
            return F.cross_entropy(logits, batch["label"])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.val_metric.update(self(batch), batch["label"])
            self._log(self.val_metric, "val_metric")

        def _log(self, value: Any, name: str) -> None:
            if isinstance(value, MetricCollection):
                self.log_dict(value, on_step=False, on_epoch=True)
            else:
                self.log(name, value, on_step=False, on_epoch=True)

    row(SECTION, title, slots=["step", "validation"], **options)(Measured)


metric("`MulticlassAccuracy` called and logged", lambda: MulticlassAccuracy(CLASSES))
metric(
    '`MulticlassAccuracy(average="micro")` by `update`', lambda: MulticlassAccuracy(CLASSES, average="micro"), "update"
)
metric("`MulticlassF1Score`", lambda: MulticlassF1Score(CLASSES, average="macro"), "update")
metric("`MulticlassAUROC`, which keeps all samples", lambda: MulticlassAUROC(CLASSES), "update")
metric(
    "a `MetricCollection` by `log_dict`",
    lambda: MetricCollection({"acc": MulticlassAccuracy(CLASSES), "f1": MulticlassF1Score(CLASSES)}),
    "update",
)


@row(SECTION, "`MulticlassConfusionMatrix` computed and reset in `on_validation_epoch_end`", slots=["validation"])
class Confusion(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = MulticlassConfusionMatrix(CLASSES)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.matrix.update(self(batch), batch["label"])

    def on_validation_epoch_end(self) -> None:
        self.seen.append(self.matrix.compute().tolist())
        self.matrix.reset()


@row(SECTION, "a metric's value of the step is logged: `self.log(name, self.accuracy(...))`", slots=["validation"])
class LogsValue(Ordinary):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.accuracy.update(self(batch), batch["label"])

    def on_validation_epoch_end(self) -> None:
        self.log("accuracy", self.accuracy.compute())
        self.accuracy.reset()


@row(SECTION, "`MeanMetric` and `SumMetric` of the loss", slots=["step"], tolerance=1e-6)
class Means(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.sum, self.most = MeanMetric(), SumMetric(), MaxMetric()
        for one in (self.mean, self.sum, self.most):
            one.set_dtype(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch)
        losses = F.cross_entropy(logits, batch["label"], reduction="none")
        for one in (self.mean, self.sum, self.most):
            one.update(losses.detach())
        return losses.mean()

    def on_train_epoch_end(self) -> None:
        self.log_dict({"mean": self.mean.compute(), "sum": self.sum.compute(), "most": self.most.compute()})


@row(SECTION, "`MeanSquaredError` over images", slots=["validation"])
class Squares(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError().set_dtype(torch.float64)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.error(self(batch)[:, 0].contiguous(), batch["label"].double())
        self.log("error", self.error)


@row(SECTION, "`self.logger.log_metrics` in a hook")
class UsesLogger(Ordinary):
    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        if self.logger is not None:
            self.logger.log_metrics({"direct": 1.5}, step=self.global_step)


@row(SECTION, "`self.print` in a step and a hook", slots=["step"])
class Prints(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.print("step", batch_idx)
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.print("end")


def lines(run: Run) -> list[list[float]]:
    """What `CSVLogger` wrote, without text."""
    path = next(run.folder.rglob("metrics.csv"), None)
    return [] if path is None else [line.split(",")[:3] for line in path.read_text().splitlines()]


@row(SECTION, "`CSVLogger`")
def csv(run: Run) -> dict[str, Any]:
    module, trainer = Ordinary(), run.trainer(logger=CSVLogger(run.folder))
    trainer.fit(module, run.training(), run.loader(16))
    rows = [[value[:12] for value in line] for line in lines(run)]
    return observed(trainer, module) | {"files": [sorted(p.name for p in run.folder.rglob("*.*")), rows]}


@row(SECTION, "`TensorBoardLogger`, or its lack")
def tensorboard(run: Run) -> dict[str, Any]:
    module, trainer = Ordinary(), run.trainer(logger=TensorBoardLogger(run.folder))
    trainer.fit(module, run.training(), run.loader(16))
    return observed(trainer, module) | {"files": len(list(run.folder.rglob("events*")))}


@row(SECTION, "two loggers")
def two_loggers(run: Run) -> dict[str, Any]:
    module = Ordinary()
    trainer = run.trainer(logger=[CSVLogger(run.folder, "a"), CSVLogger(run.folder, "b")])
    trainer.fit(module, run.training(), run.loader(16))
    return observed(trainer, module) | {"files": sorted(p.name for p in run.folder.rglob("*.csv"))}


@row(SECTION, "`self.logger.log_hyperparams` and `save_hyperparameters`")
class LogsParameters(Ordinary):
    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.logger is not None:
            self.logger.log_hyperparams({"mine": 3})
        self.seen.append(dict(self.hparams))


@row(SECTION, "`self.all_gather` in `on_validation_epoch_end`")
class Gathers(Ordinary):
    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.seen.append(float(self.all_gather(torch.tensor(2.0)).mean()))


@row(SECTION, "`self.trainer.strategy.reduce` of a number in a hook", over="mean")
class Reduces(Ordinary):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(self.trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean")))


@row(SECTION, "`if self.trainer.is_global_zero:` in a hook")
class OnRankZero(Ordinary):
    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        if self.trainer.is_global_zero and self.logger is not None:
            self.logger.log_metrics({"zero": 1.0}, step=0)
