"""What a forward saves is on the host until its backward, as it was saved."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.features.offload import moves
from lightning_mm5d.features.offload.moves import (
    HostMemory,
    OffloadedParameters,
    SavedActivations,
    free_memory,
    long_flights,
    most_away,
)
from lightning_mm5d.schedule import Action, Kind
from lightning_mm5d.schedule.graph import StageKey

CPU = torch.device("cpu")
STAGE = StageKey("language", 0)


class Emptied(HostMemory):
    """Fills what it has copied with NaN: whoever still reads it gives a wrong result."""

    def store(self, tensor: Tensor) -> Any:
        stored = super().store(tensor)
        with torch.no_grad():
            tensor.fill_(255 if tensor.dtype is torch.uint8 else float("nan"))
        return stored


def gradients(forward: Callable[[Tensor, Tensor], Tensor], memory: HostMemory | None) -> list[Tensor | None]:
    """Gradients of a weight and of an input, with what the forward saves on the host meanwhile if `memory` is given."""
    torch.manual_seed(0)
    weight, x = nn.Parameter(torch.randn(32, 32)), torch.randn(32, 32, requires_grad=True)
    if memory is None:
        forward(weight, x).backward()
        return [weight.grad, x.grad]
    saved = SavedActivations(memory, lambda: True)
    with saved:
        loss = forward(weight, x)
    saved.leave([weight, x], lambda count: None)
    saved.fetch()
    loss.backward()
    return [weight.grad, x.grad]


def views(weight: Tensor, x: Tensor) -> Tensor:
    hidden = (x @ weight).exp()
    parts = hidden.view(2, 16, 32).transpose(0, 1)[:, :, ::3]
    return (parts * parts.flip(0)).sum() + (hidden.t() * hidden).sum()


def odd_tensors(weight: Tensor, x: Tensor) -> Tensor:
    hidden = x @ weight
    chosen = hidden[torch.arange(32 * 40) % 32]  # saves integers
    kept = torch.where(hidden > 0, hidden, hidden * 2)  # and booleans
    nothing = hidden[:0] * hidden[:0]
    complex_ = torch.fft.rfft(hidden).conj() * torch.fft.rfft(kept)
    sparse = torch.sparse.mm(torch.eye(32).to_sparse(), hidden.tanh())
    return chosen.cos().sum() + kept.sigmoid().sum() + nothing.sum() + complex_.abs().sum() + sparse.sin().sum()


def half(weight: Tensor, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.nn.functional.gelu(x @ weight).float().square().mean()


@pytest.mark.parametrize("forward", [views, odd_tensors, half])
def test_gradients_are_the_same(forward: Callable[[Tensor, Tensor], Tensor]) -> None:
    memory = Emptied(CPU)
    for got, expected in zip(gradients(forward, memory), gradients(forward, None), strict=True):
        assert torch.equal(got, expected)  # type: ignore[arg-type]
    gc.collect()
    assert memory.bytes_out > 0
    assert memory.bytes_back > 0
    assert memory.bytes_held == 0


def test_views_of_one_tensor_travel_once() -> None:
    memory = HostMemory(CPU)
    gradients(views, memory)
    assert memory.bytes_out == 32 * 32 * 4 + 32 * 11 * 4  # `hidden`, and the copy that flips a third of it


def test_a_copy_of_a_weight_that_autocast_keeps_for_all_microbatches_stays() -> None:
    layer, inputs = nn.Linear(32, 32), torch.randn(3, 32, 32)

    def gradient(memory: HostMemory | None) -> Tensor:
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            for x in inputs:
                saved = nullcontext() if memory is None else SavedActivations(memory, lambda: True)
                with saved:
                    loss = layer(x).exp().sum()
                if isinstance(saved, SavedActivations):
                    saved.leave(layer.parameters(), lambda count: None)
                loss.backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    memory = Emptied(CPU)
    torch.testing.assert_close(gradient(memory), gradient(None), rtol=0.0, atol=0.0)
    assert memory.bytes_out == 3 * 2 * 2 * 32 * 32  # of each microbatch the cast input, and what `exp` returns


def test_a_tensor_that_was_changed_in_place_fails_in_the_backward() -> None:
    def changed(weight: Tensor, x: Tensor) -> Tensor:
        hidden = (x @ weight).exp()
        total = (hidden * hidden).sum()
        hidden.add_(1)
        return total

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(changed, HostMemory(CPU))


def test_the_device_holds_nothing_of_what_is_away() -> None:
    saved = SavedActivations(HostMemory(CPU), lambda: True)
    x = torch.randn(64, 64, requires_grad=True)
    with saved:
        hidden = x.exp()
        loss = (hidden * hidden).sum()
    alive = weakref.ref(hidden)
    del hidden
    saved.leave([x], lambda count: None)
    gc.collect()
    assert alive() is None
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * (2 * x.detach()).exp())


def test_a_part_of_the_graph_without_a_backward_ends_with_its_forward() -> None:
    """As of the last layer of LLaVA's vision tower, whose output nobody reads."""

    class Results:
        unread: Tensor

    def leaves() -> weakref.ref[Results]:
        results = Results()
        saved = SavedActivations(memory, lambda: results is not None)
        with saved:
            x = torch.randn(64, 64, requires_grad=True).exp()
            results.unread = x.square().sum()
            loss = x.sum()
        saved.leave([], lambda count: None)
        assert memory.bytes_held
        loss.backward()
        return weakref.ref(results)

    memory = HostMemory(CPU)
    results = leaves()
    gc.collect()
    assert results() is None
    assert memory.bytes_held == 0


def test_other_modalities_stay() -> None:
    memory = HostMemory(CPU)
    saved = SavedActivations(memory, lambda: False)
    x = torch.randn(64, 64, requires_grad=True)
    with saved:
        loss = x.exp().square().sum()
    saved.leave([], lambda count: None)
    loss.backward()
    assert memory.bytes_out == 0


def test_a_copy_has_the_strides_of_the_tensor() -> None:
    tensor = torch.randn(4, 6, 8).permute(2, 0, 1)
    stored = HostMemory(CPU).store(tensor)
    assert stored.take().stride() == tensor.stride()
    assert torch.equal(stored.take(), tensor)


def test_only_microbatches_with_two_actions_between_travel() -> None:
    kinds = [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("I", 1), ("W", 1), ("B", 2)]
    actions = [Action(Kind[kind], STAGE, number) for kind, number in kinds]
    flights = long_flights(actions)
    assert flights == {(STAGE, 1), (STAGE, 2)}
    assert most_away(actions, flights, STAGE) == 2
    assert long_flights([*actions[:5], *actions[6:], actions[0], actions[5]], Kind.I) == {(STAGE, 1)}


def test_parameters_are_on_the_host_until_they_are_used() -> None:
    memory = Emptied(CPU)
    parameters = [nn.Parameter(torch.randn(8, 8), requires_grad=False) for _ in range(2)]
    expected = [parameter.clone() for parameter in parameters]
    held = OffloadedParameters("vision", parameters, memory)
    for _ in range(2):
        held.leave()
        assert all(map(torch.equal, parameters, expected))  # reads between steps see the values
        held.fetch()
        held.arrive()
        assert all(map(torch.equal, parameters, expected))
    assert memory.bytes_out == 2 * 8 * 8 * 4
    with torch.no_grad():
        parameters[0].zero_()
    held.leave()
    assert memory.bytes_out > 2 * 8 * 8 * 4
    assert not parameters[0].any()


def test_parameters_that_somebody_trains_stay_from_then_on() -> None:
    parameter = nn.Parameter(torch.randn(8, 8), requires_grad=False)
    held = OffloadedParameters("vision", [parameter], HostMemory(CPU))
    held.leave()
    parameter.requires_grad_(True)
    held.arrive()
    device = parameter.data_ptr()
    with pytest.warns(UserWarning, match=r"modalities.vision.memory.offload"):
        held.leave()
    assert parameter.data_ptr() == device


def test_a_host_without_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_memory()
    assert free is not None
    assert free > 0
    monkeypatch.setattr(moves, "free_memory", lambda: 2**30)
    memory = HostMemory(CPU, 4)
    memory.check_room("modalities.vision.memory.offload", 2**28, "saved activations")
    with pytest.raises(ConfigError, match=r"4 ranks of this host would keep 2 GiB .* has 1 GiB free"):
        memory.check_room("modalities.vision.memory.offload", 2**29, "saved activations")
