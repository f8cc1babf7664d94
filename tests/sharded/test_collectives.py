"""What collectives of one group ask of tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_mm5d.sharded.collectives import carried


def test_numbers_travel_in_one_piece_on_a_device_that_a_backend_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is torch's "meta"; NCCL carries nothing of the host's."""
    rows = torch.ones(2, 3)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "meta:nccl")
    assert carried(rows).device.type == "meta"
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,meta:nccl")
    assert carried(rows) is rows
    assert carried(rows.t()).is_contiguous()
