"""Gradients are views of memory that is kept over steps, and nobody who holds one sees it change under him."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_mm5d.gradients.buckets import Flat, SideStream

SIDE = SideStream(torch.device("cpu"))


def _made(count: int = 3) -> tuple[list[nn.Parameter], Flat]:
    parameters = [nn.Parameter(torch.ones(3, index + 1)) for index in range(count)]
    return parameters, Flat(parameters, SIDE)


def _backward(*parameters: nn.Parameter, factor: float = 1.0) -> None:
    torch.stack([factor * parameter.sum() for parameter in parameters]).sum().backward()


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _step(parameters: list[nn.Parameter], flat: Flat, *used: nn.Parameter, factor: float = 1.0) -> Tensor:
    """One backward and the end of its sum, as an optimizer finds it."""
    flat.lay()
    _backward(*used, factor=factor)
    memory, there = flat.pack()
    for parameter, view, is_there in zip(parameters, flat.take(), there, strict=True):
        parameter.grad = view if is_there else None
    return memory


def test_gradients_of_the_next_step_have_the_memory_of_the_last() -> None:
    parameters, flat = _made()
    first = _step(parameters, flat, *parameters).data_ptr()
    for parameter in parameters:
        parameter.grad = None
    assert _step(parameters, flat, *parameters, factor=2.0).data_ptr() == first
    assert all(bool((_gradient(parameter) == 2.0).all()) for parameter in parameters)


def test_a_parameter_that_no_backward_used_has_no_gradient() -> None:
    parameters, flat = _made()
    _step(parameters, flat, parameters[0], parameters[2])
    assert [parameter.grad is None for parameter in parameters] == [False, True, False]


def test_gradients_that_are_exactly_zero_exist() -> None:
    parameters, flat = _made()
    _step(parameters, flat, parameters[1], factor=0.0)
    assert [parameter.grad is None for parameter in parameters] == [True, False, True]


def test_a_gradient_that_somebody_keeps_stays_as_it_was() -> None:
    for keep in (lambda grad: grad, lambda grad: grad.view(-1), lambda grad: grad[0].detach()):
        parameters, flat = _made()
        _step(parameters, flat, *parameters)
        kept = keep(_gradient(parameters[1]))
        for parameter in parameters:
            parameter.grad = None
        _step(parameters, flat, *parameters, factor=5.0)
        assert bool((kept == 1.0).all())
        assert bool((_gradient(parameters[1]) == 5.0).all())


def test_gradients_that_are_not_zeroed_are_added_to_while_no_rank_has_sent_them() -> None:
    parameters, flat = _made()
    flat.lay()
    _backward(parameters[0])
    flat.leave()
    assert parameters[1].grad is None
    flat.lay()
    _backward(parameters[0], parameters[1], factor=2.0)
    memory, there = flat.pack()
    assert there == [True, True, False]
    assert [bool((view == value).all()) for view, value in zip(flat.take(), (3.0, 2.0, 0.0), strict=True)] == [True] * 3
    assert memory.sum() == 3 * 3.0 + 6 * 2.0


def test_a_gradient_that_was_replaced_or_dropped_after_a_backward_counts_as_it_is() -> None:
    parameters, flat = _made()
    flat.lay()
    _backward(*parameters)
    parameters[0].grad = torch.full_like(parameters[0], 7.0)
    parameters[1].grad = None
    memory, there = flat.pack()
    assert there == [True, False, True]
    assert memory.sum() == 3 * 7.0 + 9


def test_a_gradient_whose_data_were_replaced_is_packed_and_summed_as_it_is() -> None:
    parameters, flat = _made()
    flat.lay()
    _backward(*parameters)
    for parameter in parameters:
        _gradient(parameter).data = torch.full_like(parameter, 5.0)
    flat.lay()
    _backward(*parameters)  # the next batch of an accumulation
    parameters[1].grad = None
    memory, there = flat.pack()
    memory.mul_(2.0)  # a sum
    assert there == [True, False, True]
    assert [view.unique().tolist() for view in flat.take()] == [[12.0], [0.0], [12.0]]


def test_each_gradient_begins_where_kernels_over_many_tensors_are_fast() -> None:
    parameters, flat = _made(5)
    _step(parameters, flat, *parameters)
    assert all(_gradient(parameter).data_ptr() % 16 == 0 for parameter in parameters)


def test_a_gradient_that_is_copied_on_the_side_stream_is_noted_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory would be given to what computes next, before the side stream has read it."""
    read: list[Tensor] = []
    monkeypatch.setattr(SideStream, "reads", lambda _, tensor: read.append(tensor))
    parameters, flat = _made()
    for pack in (flat.pack, flat.pack_apart):
        own = [torch.full_like(parameter, 2.0) for parameter in parameters]
        for parameter, gradient in zip(parameters, own, strict=True):
            parameter.grad = gradient
        read.clear()
        pack()
        assert [id(tensor) for tensor in read] == [id(tensor) for tensor in own]
