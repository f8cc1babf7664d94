"""Optimizers step on states that are on the host between steps."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from lightning_mm5d import Modality
from lightning_mm5d.features.offload.feature import OffloadedStates
from lightning_mm5d.features.offload.moves import HostMemory
from lightning_mm5d.plan.plan import Plan

LAYERS, BYTES = 6, 32 * 32 * 4


class Own(torch.optim.AdamW):
    """A class of the user's."""


def states(module: nn.Module, bucket_bytes: int) -> OffloadedStates:
    plan = SimpleNamespace(
        modalities={"language": Modality(memory={"offload": "optimizer"})},
        partition=SimpleNamespace(users=lambda _: {"language"}),
    )
    return OffloadedStates(module, cast(Plan, plan), HostMemory(torch.device("cpu")), bucket_bytes)


def train(kind: Any, bucket_bytes: int | None) -> tuple[list[torch.Tensor], list[int]]:
    """The parameters after three steps, and the numbers of parameters in each call of the optimizer's own step."""
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(LAYERS)])
    optimizer = kind([{"params": module[:2].parameters(), "lr": 0.1}, {"params": module[2:].parameters()}], lr=0.01)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    calls, step = [], optimizer.step

    def spied(closure: Any = None) -> Any:
        calls.append(sum(len(group["params"]) for group in optimizer.param_groups))
        return step(closure)

    optimizer.step = spied
    offloaded = states(module, bucket_bytes) if bucket_bytes is not None else None
    groups = optimizer.param_groups
    for number in range(3):

        def closure(number: int = number) -> torch.Tensor:
            optimizer.zero_grad()
            loss = module(torch.ones(4, 32) * number).square().mean()
            loss.backward()
            return loss

        if offloaded is None:
            optimizer.step(closure)
        else:
            with offloaded.stepping(optimizer):

                def agreed(closure: Any = closure, offloaded: OffloadedStates = offloaded) -> Any:
                    loss = closure()
                    offloaded.ready(optimizer, is_scaled=False)
                    return loss

                assert optimizer.step(agreed) is not None
    assert optimizer.param_groups is groups
    assert optimizer.step is spied
    state = copy.deepcopy(optimizer.state_dict())  # what a checkpoint would hold
    optimizer.load_state_dict(state)
    return [parameter.detach() for parameter in module.parameters()], calls


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, Own])
def test_steps_on_some_parameters_at_a_time_equal_a_step_on_all(kind: Any) -> None:
    expected, _ = train(kind, None)
    for bucket_bytes in (1, 2 * BYTES, 2**20):
        got, calls = train(kind, bucket_bytes)
        assert all(map(torch.equal, got, expected))
        at_once = LAYERS if kind is Own else min(max(bucket_bytes // BYTES, 1), LAYERS)
        assert set(calls) == {at_once}


def test_all_states_are_on_the_host_between_steps() -> None:
    module = nn.Linear(32, 32, bias=False)
    optimizer = torch.optim.AdamW(module.parameters())
    offloaded = states(module, 2**20)
    memory = offloaded._memory
    module(torch.ones(1, 32)).sum().backward()
    for _ in range(2):
        with offloaded.stepping(optimizer):
            offloaded.ready(optimizer, is_scaled=False)
            assert memory.bytes_held == 0
            optimizer.step()
        assert memory.bytes_held == 2 * BYTES
