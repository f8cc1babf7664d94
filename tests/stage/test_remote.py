"""Placeholders take the place of parameters of other ranks."""

from __future__ import annotations

import torch
from torch import nn

from lightning_mm5d.sharded.remote_value import Guard
from lightning_mm5d.stage import drop_parameters


class _Twice(nn.Module):
    """Modules under several paths, and parameters that are tied to them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*(nn.Linear(2, 2 + index, bias=False) for index in range(20)))
        self.again = self.first
        self.one = self.first[3]
        self.tied = nn.Linear(2, 5, bias=False)
        self.tied.weight = self.first[3].weight


def test_a_module_under_several_paths_has_one_placeholder_for_each_parameter() -> None:
    root = _Twice()
    shapes = {name: p.shape for name, p in root.named_parameters(remove_duplicate=False)}
    drop_parameters(root, list(shapes), torch.device("cpu"), Guard(lambda path: "rank 1"))
    assert {name: p.shape for name, p in root.named_parameters(remove_duplicate=False)} == shapes
    assert len(list(root.parameters())) == 20
    assert root.tied.weight is root.one.weight
