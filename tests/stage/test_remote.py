"""Placeholders take the place of parameters of other ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_mm5d import LazyTensor
from lightning_mm5d.sharded.remote_value import Guard, Origin, marked
from lightning_mm5d.stage import drop_parameters, is_placeholder
from lightning_mm5d.stage.remote import ShapeMemory, shown_stand_ins


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


class _Kernel(nn.Module):
    """Takes for granted that its weight is contiguous, as kernels of other libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            self.seen.append(self.weight.untyped_storage().nbytes())
            assert self.weight.is_contiguous()
            return x @ self.weight.detach().as_subclass(torch.Tensor)


def test_no_kernel_gets_a_placeholder_without_memory() -> None:
    module, guard = _Kernel(), Guard(lambda path: "rank 1")
    drop_parameters(module, ["weight"], torch.device("cpu"), guard)
    with guard.dry_run():
        result = ShapeMemory().placeholder(module, Origin("kernel", guard), module.forward, (torch.ones(2, 4),), {})
    assert result.shape == (2, 3)
    assert module.seen == [4 * 3 * 4]
    assert is_placeholder(module.weight)
    with torch._C.DisableTorchFunctionSubclass():
        assert module.weight.untyped_storage().nbytes() == 4


def test_what_a_remote_module_returns_is_known_without_loading_its_items() -> None:
    module, guard = nn.Conv1d(3, 4, 2), Guard(lambda path: "rank 1")
    drop_parameters(module, ["weight", "bias"], torch.device("cpu"), guard)
    lazy = LazyTensor(lambda: 1 / 0, (2, 3, 8))
    with guard.dry_run():
        result = ShapeMemory().placeholder(module, Origin("conv", guard), module.forward, (lazy,), {})
    assert result.shape == (2, 4, 7)
    assert not lazy.is_read


def _with_a_pair_of_hooks(calls: list[Any]) -> nn.Module:
    """A module of which a part has hooks that go together: the first reads a number of what the part takes."""
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    module[1].register_forward_pre_hook(lambda _, args: calls.append(float(args[0].detach().sum())))
    module[1].register_forward_hook(lambda *_: calls.append("ends"))
    return module


def test_pairs_of_hooks_are_left_out_together_where_a_shape_is_found() -> None:
    calls: list[Any] = []
    module = _with_a_pair_of_hooks(calls)
    assert ShapeMemory().computed(module, module.forward, (torch.ones(1, 2),), {}).shape == (1, 4)
    assert calls == []
    module(torch.ones(1, 2))
    assert len(calls) == 2


def test_a_pre_hook_that_reads_a_number_of_a_stand_in_goes_without() -> None:
    calls: list[Any] = []
    module, guard = _with_a_pair_of_hooks(calls), Guard(lambda path: "rank 1")
    with shown_stand_ins(module):
        module(marked(torch.ones(1, 2), Origin("patch", guard)))
    assert calls == ["ends"]
