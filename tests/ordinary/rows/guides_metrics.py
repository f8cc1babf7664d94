"""Metrics, and what steps keep, in forms that Lightning's and torchmetrics' guides show and no other row has."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection, MinMetric, RunningMean
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    BinaryF1Score,
    MulticlassAccuracy,
    MulticlassPrecision,
    MulticlassRecall,
    MultilabelAccuracy,
)

from features.toys import CLASSES
from ordinary.uses import Ordinary, row

SECTION = "From Lightning's guides: metrics"
KEPT = {"replicas": "each replica keeps what its own samples give, as under DDP"}


def metric(title: str, make: Any, prediction: Any, **options: Any) -> None:
    """A row that updates a metric in training and validation, and logs it by epoch."""

    class Measures(Ordinary):
        def __init__(self) -> None:
            super().__init__()
            self.train_metric, self.val_metric = make(), make()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits = self(batch)
            self.train_metric(*prediction(logits, batch))
            self.log("train_metric", self.train_metric, on_step=True, on_epoch=True)
            return F.cross_entropy(logits, batch["label"])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.val_metric.update(*prediction(self(batch), batch))
            self.log("val_metric", self.val_metric, on_epoch=True)

    row(SECTION, title, **options)(Measures)


def _logit(logits: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    return logits[:, 0], (batch["label"] == 0).long()


def _small(logits: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """Most are between 0 and 1, and some batches have none outside."""
    return 0.5 + 0.35 * logits[:, 0], (batch["label"] == 0).long()


METRIC = {"replicas": "each replica measures the step by its own samples, as under DDP"}
metric("`BinaryAccuracy` of logits", BinaryAccuracy, _logit, differs=METRIC)
metric("`BinaryAccuracy` of logits, few of them outside [0, 1]", BinaryAccuracy, _small, differs=METRIC)
metric("`BinaryF1Score` of logits, few of them outside [0, 1]", BinaryF1Score, _small, differs=METRIC)
metric("`BinaryAUROC` of logits, few of them outside [0, 1]", BinaryAUROC, _small, differs=METRIC)
metric(
    "`MultilabelAccuracy` of logits, few of them outside [0, 1]",
    lambda: MultilabelAccuracy(CLASSES),
    lambda x, b: (0.5 + 0.35 * x, F.one_hot(b["label"], CLASSES)),
    differs=METRIC,
)
metric(
    "`MulticlassPrecision(average='macro')`",
    lambda: MulticlassPrecision(CLASSES),
    lambda x, b: (x, b["label"]),
    differs=METRIC,
)
metric(
    "`RunningMean` of the loss",
    lambda: RunningMean(3),
    lambda x, b: (F.cross_entropy(x, b["label"]),),
    differs=METRIC | dict.fromkeys(("split", "pp"), "a metric of numbers counts microbatches as updates"),
)
metric(
    "`RunningMean` of the losses of samples",
    lambda: RunningMean(3),
    lambda x, b: (F.cross_entropy(x, b["label"], reduction="none"),),
    differs=METRIC,
)


@row(SECTION, "`MetricCollection` with a prefix, cloned for training and validation", differs=METRIC)
class Collections(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        top = MulticlassAccuracy(CLASSES, top_k=2)  # has states like those of the others
        both = MetricCollection({"p": MulticlassPrecision(CLASSES), "r": MulticlassRecall(CLASSES), "top": top})
        self.train_metrics, self.val_metrics = both.clone(prefix="train_"), both.clone(prefix="val_")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch)
        self.log_dict(self.train_metrics(logits, batch["label"]))
        return F.cross_entropy(logits, batch["label"])

    def on_train_epoch_end(self) -> None:
        self.train_metrics.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_metrics.update(self(batch), batch["label"])

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_metrics.compute())
        self.val_metrics.reset()


@row(
    SECTION,
    'the rate so far, computed in the step: `self.rate.update(...)` and `self.log("rate", self.rate.compute())`',
    tolerance=1e-6,
    differs=dict.fromkeys(("split", "pp"), "it covers the microbatches so far, as a warning tells"),
)
class ComputedInStep(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.rate = MulticlassAccuracy(CLASSES, average="micro")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.rate.update(self(batch), batch["label"])
        self.log("rate", self.rate.compute(), on_epoch=True)


@row(SECTION, "the best value so far: `MinMetric` in `on_validation_epoch_end`", tolerance=1e-6)
class Best(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.val_loss, self.best = MeanMetric(), MinMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_loss(self.loss(batch))
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.best(self.val_loss.compute())
        self.log("val/best", self.best.compute(), sync_dist=True)


@row(SECTION, "metrics in a `ModuleDict` by stage", differs=METRIC)
class ByStage(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.metrics_of = nn.ModuleDict({f"{stage}_stage": MulticlassAccuracy(CLASSES) for stage in ("train", "val")})

    def _shared(self, batch: Any, stage: str) -> Tensor:
        logits = self(batch)
        loss = F.cross_entropy(logits, batch["label"])
        self.metrics_of[f"{stage}_stage"](logits, batch["label"])
        self.log(f"{stage}_accuracy", self.metrics_of[f"{stage}_stage"], on_epoch=True, on_step=stage == "train")
        self.log(f"{stage}_loss", loss, sync_dist=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._shared(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._shared(batch, "val")


# --- kept by steps ---


@row(
    SECTION,
    "losses above a limit are appended: `if loss > x: self.hard.append(...)`",
    differs={
        **KEPT,
        "split": "each microbatch decides by its own samples",
        "pp": "each microbatch decides by its own samples",
    },
)
class Conditional(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.hard: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if loss > 1.15:
            self.hard.append(float(loss))
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen.append(list(self.hard))


@row(SECTION, "wrong samples are appended: `for i in wrong: self.wrong.append(i)`", differs=KEPT)
class Wrong(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch)
        for image, is_wrong in zip(batch["images"], logits.argmax(1) != batch["label"], strict=True):
            if is_wrong:
                self.wrong.append(float(image.sum()))

    def on_validation_epoch_end(self) -> None:
        self.seen.append(list(self.wrong))
        self.wrong.clear()


@row(SECTION, "the first batch of an epoch is kept: `if batch_idx == 0: self.example = logits`", differs=KEPT)
class Example(Ordinary):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch)
        if batch_idx == 0:
            self.example = logits.detach()
        self.log("val_loss", F.cross_entropy(logits, batch["label"]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.seen.append(self.example.clone())


@row(SECTION, "a dict counts classes: `self.counts[label] += 1`", over="sum")
class Counts(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.counts = dict.fromkeys(range(CLASSES), 0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for label in batch["label"].tolist():
            self.counts[label] += 1
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        self.seen.append({str(key): value for key, value in self.counts.items()})


@row(SECTION, "a total is kept: `self.total += len(batch)`, and divided by at the end", over="sum")
class Totals(Ordinary):
    total = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.total += len(batch["label"])
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        self.seen.append(self.total)


@row(SECTION, "a confusion matrix is added up in an attribute by hand", over="sum")
class Confusion(Ordinary):
    def on_validation_epoch_start(self) -> None:
        self.matrix = torch.zeros(CLASSES, CLASSES, dtype=torch.long)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for label, found in zip(batch["label"], self(batch).argmax(1), strict=True):
            self.matrix[label, found] += 1

    def on_validation_epoch_end(self) -> None:
        self.seen.append(self.matrix.tolist())


class RightAnswers(Ordinary):
    """Counts right answers by class in a tensor, from 0 in each epoch."""

    def on_train_epoch_start(self) -> None:
        self.right = torch.zeros(CLASSES, dtype=torch.long)

    def count(self, batch: Any) -> Tensor:
        logits = self(batch)
        right = F.one_hot(logits.argmax(1), CLASSES) * F.one_hot(batch["label"], CLASSES)
        self.right += right.sum(0)
        return F.cross_entropy(logits, batch["label"])


@row(SECTION, "right answers of each class: `self.right += right.sum(0)` in `training_step`", over="sum")
class CountsInTraining(RightAnswers):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.count(batch)

    def on_train_epoch_end(self) -> None:
        self.seen.append(self.right.tolist())


@row(SECTION, "right answers of each class: `self.right += right.sum(0)` in `validation_step`", over="sum")
class CountsInValidation(RightAnswers):
    def on_validation_epoch_start(self) -> None:
        self.on_train_epoch_start()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.count(batch)

    def on_validation_epoch_end(self) -> None:
        self.seen.append(self.right.tolist())


@row(SECTION, "metrics in a plain list: `self.metrics = [MulticlassAccuracy(...)]`", slots=["step"])
class InList(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.metrics = [MulticlassPrecision(CLASSES), MulticlassRecall(CLASSES)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch)
        for metric in self.metrics:
            metric.update(logits, batch["label"])
        return F.cross_entropy(logits, batch["label"])

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.seen += [float(metric.compute()) for metric in self.metrics]
        for metric in self.metrics:
            metric.reset()
