"""Copies of submodules during a run compute with weights of their own."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_mm5d.features.copied_modules import CopiedModules
from lightning_mm5d.sharded.remote_value import Guard
from lightning_mm5d.sharded.removable import Removable
from lightning_mm5d.stage import StageError


class Wrapper(nn.Module):
    """Has the attributes of the module inside of it, as a PeftModel has."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.wrapper = Wrapper(nn.Linear(2, 1, bias=False))


class Patched(Removable):
    """Puts a function of its own in front of a layer's, a hook, and a number."""

    def __init__(self, module: Module) -> None:
        layer = module.wrapper.inner
        original = layer.forward

        def forward(x: Tensor) -> Tensor:
            return original(x) + 100

        self.put_attribute(layer, "forward", forward)
        self.put_attribute(layer, "in_features", 1)
        self.changes.callback(layer.register_forward_hook(partial(self.noted)).remove)

    def noted(self, *_: Any) -> None:
        raise AssertionError("a hook of the run on a copy")

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("what the run has is not copied")


@pytest.mark.parametrize("part", ["wrapper", "wrapper.inner"])
def test_a_copy_in_a_hook_is_what_one_process_copies(part: str) -> None:
    module, guard = Module(), Guard(str)
    copies, patched = CopiedModules(module), Patched(module)
    copies.attach(guard)
    guard.shows_full, x = True, torch.ones(1, 2)
    calls: list[Tensor] = []
    module.wrapper.inner.register_forward_hook(lambda *_: calls.append(x))  # the user's
    original = module.get_submodule(part)
    made = copy.deepcopy(original)
    assert type(made) is type(original)
    with torch.no_grad():
        for weight in made.parameters():
            weight.fill_(2.0)
    assert made(x).item() == 4
    assert len(calls) == 1
    layer = made.inner if part == "wrapper" else made
    assert layer.in_features == 2
    assert "forward" not in vars(layer)
    assert copy.deepcopy(made)(x).item() == 4
    copies.remove()
    patched.remove()
    assert "__deepcopy__" not in vars(module.wrapper.inner)


def test_a_copy_elsewhere_is_refused_where_it_would_compute_with_the_original() -> None:
    module = Module()
    copies, patched = CopiedModules(module), Patched(module)
    copies.attach(Guard(str))
    with pytest.raises(StageError, match=r"wrapper\.inner is copied where this rank has parts of the weights"):
        copy.deepcopy(module.wrapper)
    copies.remove()
    patched.remove()


def test_a_module_without_changes_is_copied_and_pickled_as_ever() -> None:
    module = Module()
    copies = CopiedModules(module)
    vars(module.wrapper.inner)["in_features"] = 1
    copies.attach(Guard(str))
    assert "__deepcopy__" in vars(module.wrapper.inner)
    read = pickle.loads(pickle.dumps(module.wrapper.inner))
    assert copy.deepcopy(read).in_features == 1
    copies.remove()
