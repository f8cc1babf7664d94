"""torch still has the private names that sharded tensors build on, and one that has moved is told."""

from __future__ import annotations

import pytest
import torch

from lightning_mm5d.sharded.torch_internals import (
    as_plain_tensors,
    assert_on_device,
    backward_frees_graph,
    in_backward,
    is_view,
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


def test_a_private_name_that_has_moved_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_assert_async")
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    with pytest.raises(ImportError, match=r"torch 2.* has no torch\._assert_async"):
        assert_on_device(torch.tensor(True))
    with pytest.raises(ImportError, match=r"torch 2.* has no torch\._C\._current_graph_task_id"):
        in_backward()
