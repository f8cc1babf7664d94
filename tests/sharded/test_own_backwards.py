"""What stands in front of torch's backward changes nothing for tensors that know it by itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mm5d.sharded.host_copies import HostCopies
from lightning_mm5d.sharded.own_backwards import replaced

SEEN: list[Any] = []


class Knowing(Tensor):
    """Tells which function takes it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        SEEN.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("around", [nullcontext, HostCopies])
@pytest.mark.parametrize("name", ["backward", "grad"])
def test_tensors_are_asked_for_torchs_own_function(name: str, around: Callable[[], Any]) -> None:
    """Also within the mode that follows what the host knows of a GPU."""
    original, calls = getattr(torch.autograd, name), list[str]()

    def noted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    leaf = torch.ones(3, requires_grad=True)
    loss = (leaf * 2).sum().as_subclass(Knowing)
    SEEN.clear()
    with around(), replaced(noted, name), replaced(noted, name):
        getattr(torch.autograd, name)(*((loss,) if name == "backward" else (loss, leaf)))
    assert original in SEEN
    assert calls[:2] == [name, name]
    assert getattr(torch.autograd, name) is original
