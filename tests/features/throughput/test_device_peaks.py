"""Peaks of devices, by the names that torch and people give them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_mm5d.features.throughput.device_peaks import PEAKS, peaks_of
from lightning_mm5d.features.throughput.feature import _peak


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("h100", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
    ],
)
def test_a_name_is_that_of_the_closest_form(name: str, known: str) -> None:
    assert peaks_of(name) is PEAKS[known]


@pytest.mark.parametrize("name", ["", "cpu", "Tesla V100-SXM2-32GB", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "H1000"])
def test_other_devices_and_parts_of_devices_are_not_known(name: str) -> None:
    assert peaks_of(name) is None


def test_mfu_is_by_the_peak_of_the_device_that_computes_in_16_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Strategy:
        root_device = torch.device("cuda", 0)

    class Trainer:
        strategy, precision = Strategy(), "bf16-mixed"

    trainer: Any = Trainer()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200 NVL")
    assert _peak(trainer, None) == 835.5e12  # type: ignore[arg-type]
