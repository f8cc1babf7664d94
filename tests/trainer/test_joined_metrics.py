"""What microbatches call metrics with is joined, unless it is too large to be kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import lightning.pytorch as pl
import pytest
import torch
from torchmetrics import Metric, RunningMean
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric, MultioutputWrapper, Running

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


def called(metric: Metric, method: str, given: Sequence[torch.Tensor], parts: Sequence[slice]) -> None:
    """Let a metric be called in a schedule, with a part of `given` in each microbatch."""
    microbatch = [0]
    joined = JoinedMetrics(lambda: microbatch[0])
    for microbatch[0], at in enumerate(parts):
        joined.call(metric, getattr(metric, method), tuple(one[at] for one in given), {})
    joined.join()


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


WRAPPERS: dict[str, Callable[[], Metric]] = {
    "the last batches": lambda: RunningMean(2),
    "the last batches of a metric": lambda: Running(BinaryAccuracy(), 2),
    "the least and the largest": lambda: MinMaxMetric(BinaryAccuracy()),
    "each class": lambda: ClasswiseWrapper(MulticlassAccuracy(2, average=None)),
    "each output": lambda: MultioutputWrapper(BinaryAccuracy(), 1),
}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("method", ["update", "forward"])
def test_wrappers_count_batches(name: str, method: str) -> None:
    metric, plain = WRAPPERS[name](), WRAPPERS[name]()
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        logits, labels = torch.randn(4, generator=generator), torch.randint(2, (4,), generator=generator)
        given = [logits, labels]
        if name == "the last batches":
            given = [logits]
        elif name == "each class":
            given = [torch.stack([-logits, logits], dim=1), labels]
        elif name == "each output":
            given = [logits[:, None], labels[:, None]]
        called(metric, method, given, (slice(1), slice(1, 4)))
        getattr(plain, method)(*given)
        torch.testing.assert_close(metric.compute(), plain.compute())


def test_a_metric_that_the_step_resets_counts_as_the_step_says() -> None:
    metric, index = BinaryAccuracy(), 0
    joined = JoinedMetrics(lambda: index)
    for index in range(4):
        joined.call(metric, metric.update, (LOGITS[index : index + 1], LABELS[index : index + 1]), {})
        if index == 1:
            metric.reset()
            joined.reset(metric)
    joined.join()
    assert metric.update_count == 2
