"""Which hooks a stage calls of modules that an earlier stage has computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_mm5d.sharded.remote_value import Guard
from lightning_mm5d.stage.taps import Taps


def test_pre_hooks_are_called_before_the_hooks_that_go_with_them() -> None:
    root = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    calls: list[str] = []

    def begins(module: nn.Module, args: Any) -> None:
        calls.append("begins")

    def begins_with_names(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append("begins with names")

    def ends(module: nn.Module, args: Any, result: Tensor) -> None:
        calls.append("ends")

    root[0][0].register_forward_hook(ends)
    root[0][0].register_forward_pre_hook(begins)
    root[0][0].register_forward_pre_hook(begins_with_names, with_kwargs=True)
    _call_hooks(root)
    assert calls == ["begins", "begins with names", "ends"]


def test_pre_hooks_of_torch_which_write_to_buffers_are_not_called() -> None:
    torch.manual_seed(0)
    root = nn.Sequential(nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4))))
    before = root[0][0].weight_u.clone()
    _call_hooks(root)
    assert torch.equal(root[0][0].weight_u, before)
    root(torch.zeros(1, 4))
    assert not torch.equal(root[0][0].weight_u, before)


def _call_hooks(root: nn.Module) -> None:
    """Call them in a stage that has only received that ``root[0][0]`` was called."""
    taps = Taps(frozenset(), None)
    none: Any = None  # of sharded tensors, which are not among what is received
    taps.accept([[["inner", "0.0", 0, 0, ""], None]], [], none)
    taps.call_hooks(root, "0", 0, torch.zeros(1, 2), Guard(str))
