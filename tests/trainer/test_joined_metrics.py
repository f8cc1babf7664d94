"""What microbatches call metrics with is joined, unless it is too large to be kept."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torchmetrics.classification import BinaryAccuracy

from lightning_mm5d.trainer import metrics
from lightning_mm5d.trainer.logs import LogCapture
from lightning_mm5d.trainer.metrics import JoinedMetrics

LOGITS = torch.tensor([0.4, 0.3, 0.2, 1.5])  # the first two alone would pass for probabilities
LABELS = torch.tensor([1, 1, 0, 1])


def counted() -> float:
    """The value after two microbatches."""
    metric, index = BinaryAccuracy(), 0
    joined = JoinedMetrics(lambda: index)
    for index in range(2):
        at = slice(2 * index, 2 * index + 2)
        joined.call(metric, metric.update, (LOGITS[at], LABELS[at]), {})
    joined.join()
    return float(metric.compute())


def test_logits_of_a_batch_count_as_one() -> None:
    assert counted() == float(BinaryAccuracy()(LOGITS, LABELS)) == 0.75


def test_what_is_too_large_counts_by_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_BYTES", 8)
    parts = [BinaryAccuracy()(LOGITS[at], LABELS[at]) for at in (slice(2), slice(2, 4))]
    assert counted() == float(sum(parts)) / 2 == 0.25


def test_a_logged_value_is_that_of_the_batch() -> None:
    module, metric = pl.LightningModule(), BinaryAccuracy()
    capture = LogCapture(module)
    for _ in range(2):  # a schedule after another joins its own calls
        metric.reset()
        with capture.capture() as joined:
            for index in range(2):
                at = slice(2 * index, 2 * index + 2)
                capture.begin_microbatch(index, 2)
                module.log("accuracy", joined.call(metric, metric.forward, (LOGITS[at], LABELS[at]), {}))
            joined.join()
        (log,) = capture.merge()
        assert float(log.value) == 0.75
