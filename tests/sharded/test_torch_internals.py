"""torch still has the private names that sharded tensors build on, and one that has moved is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mm5d.sharded.torch_internals import (
    as_plain_tensors,
    assert_on_device,
    backward_frees_graph,
    in_backward,
    is_held_once,
    is_observed,
    is_view,
    number_in_backward,
    renumber_in_backward,
    version_of,
    writes_counted,
)


def test_torch_has_the_private_names() -> None:
    seen: list[tuple[bool, bool]] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: seen.append((in_backward(), backward_frees_graph())))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert seen == [(True, False), (True, True)]
    assert not in_backward()
    assert is_view(x.view(2, 1))
    assert not is_view(x.clone())
    assert_on_device(torch.tensor(True))
    with as_plain_tensors():
        assert type(torch.nn.Parameter(x.detach()) * 1) is torch.Tensor


def test_memory_is_held_once_where_nothing_else_will_read_it() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    product = x @ x
    assert is_held_once(product)
    root = product.sqrt()
    assert not is_held_once(root), "its backward has kept it"
    alias = product.detach()
    assert not is_held_once(product)
    assert not is_held_once(alias)
    assert not is_held_once(product.view(4))


def test_a_backward_runs_ready_nodes_by_their_numbers_the_largest_first() -> None:
    ran: list[str] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
            ctx.name = name
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            ran.append(ctx.name)
            return gradient, None

    x = torch.ones(2, requires_grad=True)
    before = Noted.apply(x, "before")
    first, second, third = (Noted.apply(x, name) for name in ("first", "second", "third"))
    renumber_in_backward(third, number_in_backward(before))
    (first + second + third).sum().backward()
    assert ran == ["second", "first", "third"]
    with _Sees():
        assert is_observed()
    assert not is_observed()


class _Sees(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_private_name_that_has_moved_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_assert_async")
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    with pytest.raises(ImportError, match=r"torch 2.* has no torch\._assert_async"):
        assert_on_device(torch.tensor(True))
    with pytest.raises(ImportError, match=r"torch 2.* has no torch\._C\._current_graph_task_id"):
        in_backward()


def test_writes_to_tensors_of_inference_mode_are_counted_where_they_are_made_so() -> None:
    with torch.inference_mode():
        with writes_counted():
            copy = torch.ones(2).clone()
            assert not torch.is_grad_enabled()
        assert torch.is_inference_mode_enabled()
        copy += 1
    assert version_of(copy) == 1
