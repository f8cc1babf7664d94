"""Private names of torch that recomputation needs mean what it takes them for; errors name those that moved."""

from __future__ import annotations

import runpy
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _python_dispatch, checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mm5d.features.recomputation import feature as recompute
from lightning_mm5d.sharded import kept_results
from lightning_mm5d.sharded.torch_internals import in_backward, in_checkpoint, number_of_backward

NAMES: list[tuple[ModuleType, Any, str]] = [
    (recompute, torch._C._autograd, "_top_saved_tensors_default_hooks"),
    (kept_results, checkpoint, "_detach_helper" if hasattr(checkpoint, "_detach_helper") else "_maybe_detach"),
    (kept_results, checkpoint, "SAC_IGNORED_OPS"),
    (kept_results, _python_dispatch, "_disable_current_modes"),
    (kept_results, _python_dispatch, "_get_current_dispatch_mode_stack"),
]


@pytest.mark.parametrize(("user", "owner", "name"), NAMES, ids=[name for *_, name in NAMES])
def test_a_name_that_has_moved_is_an_error_of_the_import(
    user: ModuleType, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert user.__file__ is not None
    monkeypatch.delattr(owner, name)
    with pytest.raises(ImportError, match=f"({name}|_maybe_detach), a private name"):
        runpy.run_path(user.__file__)


def test_the_hooks_are_those_of_the_checkpoint_around() -> None:
    assert recompute._top_hooks(True) is None
    seen: list[bool] = []

    def layer(x: Tensor) -> Tensor:
        seen.append(in_backward() or in_checkpoint())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    with saved_tensors_hooks(lambda one: one, lambda one: one):
        layer(x)
    checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert seen == [False, True, True]


def test_a_backward_has_a_number_and_other_code_has_none() -> None:
    seen: list[int] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(number_of_backward()))
    x.sum().backward()
    assert number_of_backward() == -1 != seen[0]


def test_modes_are_those_that_are_entered_and_can_be_left_out() -> None:
    class Mode(TorchDispatchMode):
        pass

    with Mode() as mode:
        assert kept_results._modes() == [mode]
        with kept_results._disabled():
            assert kept_results._modes() == []
    kept = kept_results._detached(torch.ones(2, requires_grad=True))
    assert not kept.requires_grad
    assert torch.ops.aten.detach.default in kept_results._IGNORED
