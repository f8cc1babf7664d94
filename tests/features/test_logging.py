"""`self.log` and torchmetrics on every rank equal one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torchmetrics import MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from features.toys import (
    CLASSES,
    PAIR,
    PIPE,
    SHARED,
    TWINS,
    Layout,
    Run,
    Samples,
    Toy,
    alone,
    assert_same,
    figures,
    together,
)
from sweeps import dealt


class Loud(Toy):
    """Logs in every way; `counted` shows whether a sample is counted twice."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = SumMetric()
        self.several = MetricCollection(
            {"f1": MulticlassF1Score(CLASSES), "acc": MulticlassAccuracy(CLASSES, average="micro")}, prefix="m_"
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch)
        loss = torch.nn.functional.cross_entropy(logits, batch["label"])
        size = len(batch["label"])
        self.log("plain", loss, sync_dist=True)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("sized", loss, on_step=False, on_epoch=True, batch_size=size, sync_dist=True)
        self.log("most", batch["images"].max(), on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)
        self.log("number", 3.0, prog_bar=True)
        self.log_dict({"d1": loss * 2, "d2": logits.mean()}, on_step=False, on_epoch=True, sync_dist=True)
        self.accuracy(logits, batch["label"])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.counted.update(torch.ones(len(logits)))
        self.log("samples", self.counted, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        logits = self(batch)
        self.log("val_loss", torch.nn.functional.cross_entropy(logits, batch["label"]), sync_dist=True)
        self.several(logits, batch["label"])
        self.log_dict(self.several)

    def on_validation_epoch_end(self) -> None:
        self.log("made_at_end", 5.0, sync_dist=True)


class Bars(Callback):
    def __init__(self) -> None:
        self.bar: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.bar.append({k: float(v) for k, v in trainer.progress_bar_metrics.items()})


def log_everything(run: Run) -> dict[str, Any]:
    module, bars = Loud(), Bars()
    trainer = run.trainer(max_epochs=2, callbacks=[bars])
    trainer.fit(module, run.training(16), [run.loader(16), run.loader(Samples(8, seed=1))])
    return {"metrics": figures(trainer), "bar": bars.bar}


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return alone(log_everything)


@pytest.mark.parametrize(
    "layout", dealt(__file__, [PAIR, PIPE, TWINS, SHARED], 2), ids=["pair", "pipe", "twins", "shared"]
)
def test_every_logged_value_is_that_of_one_process_on_every_rank(expected: dict[str, Any], layout: Layout) -> None:
    """vision: rank 0; language: rank 1 | vision, language in 2 stages | vision for 2 replicas | 2 replicas."""
    for got in together(layout, log_everything):
        assert_same(got["metrics"], expected["metrics"])
        assert_same(got["bar"], expected["bar"])


def test_the_module_logs_what_the_comparison_needs(expected: dict[str, Any]) -> None:
    metrics = expected["metrics"]
    assert {"both_step", "both_epoch", "val_loss/dataloader_idx_1", "m_f1/dataloader_idx_0"} <= set(metrics)
    assert metrics["samples"] == 16  # of the last epoch, each counted once
    assert metrics["made_at_end"] == 5.0
