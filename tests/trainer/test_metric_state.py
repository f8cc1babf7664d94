"""The guarded place of torchmetrics' private names."""

from __future__ import annotations

import pytest
from torchmetrics import MeanMetric

from lightning_mm5d.trainer import metrics
from lightning_mm5d.trainer.metrics import check_torchmetrics


def test_the_installed_torchmetrics_has_every_name() -> None:
    check_torchmetrics(MeanMetric())


@pytest.mark.parametrize("name", metrics._RELIED_ON)
def test_a_name_that_moved_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = tuple(f"{one}_moved" if one == name else one for one in metrics._RELIED_ON)
    monkeypatch.setattr(metrics, "_RELIED_ON", moved)
    with pytest.raises(ImportError, match=f"{name}_moved any more"):
        check_torchmetrics(MeanMetric())
