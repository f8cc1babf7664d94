"""The guarded place of torchmetrics' private names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_mm5d.trainer import metrics
from lightning_mm5d.trainer.metrics import check_torchmetrics, count_apart


def test_the_installed_torchmetrics_has_every_name() -> None:
    check_torchmetrics(MeanMetric())
    check_torchmetrics(MetricCollection([MeanMetric()]))


@pytest.mark.parametrize(
    ("names", "name"),
    [(names, name) for names in ("_RELIED_ON", "_OF_COLLECTIONS") for name in getattr(metrics, names)],
)
def test_a_name_that_moved_is_an_error(names: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = tuple(f"{one}_moved" if one == name else one for one in getattr(metrics, names))
    monkeypatch.setattr(metrics, names, moved)
    with pytest.raises(ImportError, match=f"{name}_moved any more"):
        check_torchmetrics(MeanMetric() if names == "_RELIED_ON" else MetricCollection([MeanMetric()]))


def test_metrics_of_a_collection_whose_states_are_equal_after_a_first_update_keep_their_own() -> None:
    def made(**options: Any) -> MetricCollection:
        return MetricCollection({"f1": MulticlassF1Score(3), "top": MulticlassAccuracy(3, top_k=2)}, **options)

    scores = torch.tensor([[0.7, 0.2, 0.1], [0.3, 0.6, 0.1], [0.5, 0.3, 0.2], [0.5, 0.4, 0.1]])
    labels = torch.tensor([0, 1, 1, 2])
    expected = made(compute_groups=False)(scores, labels)
    collection, taken, said = made(), made(), made(compute_groups=[["f1", "top"]])
    for one in (collection, said):
        count_apart(one)
        count_apart(one)
    for one in (collection, taken, said):
        for at in (slice(2), slice(2, 4)):
            one.update(scores[at], labels[at])
    assert collection.compute() == expected != taken.compute(), "else the first update does not show it"
    assert said.compute() == taken.compute()
