"""Ranks that share experts serve each other: whatever layers their own batches take, nobody waits for ever."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from compare import State
from host_reads import HostReads
from lightning_mm5d.config.errors import ConfigError, RankMismatchError
from lightning_mm5d.expert_parallel import ExpertLayer
from lightning_mm5d.features.shared_experts.held_experts import ExpertGroups, each_expert
from lightning_mm5d.features.shared_experts.shared_experts import SharedExperts
from lightning_mm5d.features.shared_experts.token_exchange import BACKWARD, FORWARD, Rounds, TokenGroup, Wish
from ranks import call_ranks

RANKS, EXPERTS, LAYERS, WIDTH, TOKENS = 3, 5, 3, 4, 6
# the layers that each rank's batch takes, and those that have a part in its loss
WAYS: dict[str, tuple[tuple[list[int], list[int]], ...]] = {
    "the same": (([0, 1, 2], [0, 1, 2]),) * RANKS,
    "none on one": (([0, 1, 2], [0, 1, 2]), ([], []), ([0, 1, 2], [0, 1, 2])),
    "others on each": (([0, 2], [0, 2]), ([1], [1]), ([1, 2], [1, 2])),
    "in another order": (([0, 1], [0, 1]), ([1, 0], [1, 0]), ([2], [2])),
    "twice": (([0, 0, 1], [0, 0, 1]), ([0, 1, 1], [0, 1, 1]), ([1], [1])),
    "without a backward": (([0, 1, 2], [0, 1, 2]), ([0, 1, 2], [1]), ([0, 1, 2], [])),
}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.0)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        found = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = (top_k_index == expert).nonzero(as_tuple=True)
            results = F.linear(self.dropout(hidden_states[token]), self.up[expert]).tanh()
            results = results * top_k_weights[token, place, None]
            found = found.index_add(0, token, results)
        return found


def model() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([Experts() for _ in range(LAYERS)])


def tokens(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of one rank: hidden states, experts and weights; the last rank's all go to the first expert, or to none."""
    draw = torch.Generator().manual_seed(rank)
    hidden, weights = (torch.randn(TOKENS, n, generator=draw).requires_grad_() for n in (WIDTH, 2))
    index = torch.rand(TOKENS, EXPERTS, generator=draw).argsort(1)[:, :2]
    if rank == RANKS - 1:
        index = torch.zeros_like(index)
    index[0, 1] = EXPERTS
    return hidden, index, weights


def loss_of(layers: nn.ModuleList, rank: int, way: tuple[list[int], list[int]], again: bool) -> tuple[Tensor, Any]:
    hidden, index, weights = inputs = tokens(rank)
    loss = hidden.sum() * 0
    for place in way[0]:
        if again:
            result = checkpoint(layers[place], hidden, index, weights, use_reentrant=False)
        else:
            result = layers[place](hidden, index, weights)
        if place in way[1]:
            loss = loss + result.square().sum()
    return loss, inputs


def whole(ways: tuple[tuple[list[int], list[int]], ...]) -> tuple[list[State], State]:
    """Gradients of each rank's tokens and weights, and of all experts, on one process."""
    layers, found = model(), []
    for rank, way in enumerate(ways):
        loss, (hidden, _, weights) = loss_of(layers, rank, way, again=False)
        loss.backward()
        found.append({"hidden": hidden.grad, "weights": weights.grad})
    return found, {name: p.grad for name, p in layers.named_parameters()}


def shared(rank: int) -> tuple[nn.ModuleList, SharedExperts]:
    host = dist.new_group(range(RANKS), timedelta(seconds=30), "gloo")
    layers = model()
    held = [ExpertLayer(str(place), "language", EXPERTS, RANKS, (f"{place}.up",)) for place in range(LAYERS)]
    groups = {one.path: ExpertGroups(TokenGroup(dist.group.WORLD), tuple(range(RANKS)), host, None) for one in held}
    for layer in layers:
        layer.up.data = layer.up.data[slice(*held[0].ranges[rank])].clone()
    cpu = torch.device("cpu")
    return layers, SharedExperts(layers, {"stage": held}, groups, device=cpu, is_dry=lambda: False)


def run(rank: int, names: list[str], again: bool) -> list[tuple[State, State]]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    found = []
    for name in names:
        layers, experts = shared(rank)
        for _ in range(2):  # the second step knows which layers are computed again
            layers.zero_grad()
            experts.begin(nullcontext, lambda _: nullcontext())
            with experts.during("stage", 0, forward=True):
                loss, (hidden, _, weights) = loss_of(layers, rank, WAYS[name][rank], again)
            with experts.during("stage", 0, forward=False):
                loss.backward()
            experts.end()
        own = {key: p.grad for key, p in layers.named_parameters()}
        found.append(({"hidden": hidden.grad, "weights": weights.grad}, own))
    return found


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("again", [False, True])
def test_gradients_are_those_of_all_ranks_whatever_layers_each_batch_takes(again: bool) -> None:
    ranks = call_ranks(RANKS, run, list(WAYS), again)
    for place, (name, ways) in enumerate(WAYS.items()):
        tokens_of, experts = whole(ways)
        for rank, results in enumerate(ranks):
            mine, own = results[place]
            for key, expected in tokens_of[rank].items():
                torch.testing.assert_close(mine[key], expected, msg=lambda text: f"{name}, {key}: {text}")  # noqa: B023
            start, stop = ExpertLayer("", "", EXPERTS, RANKS, ()).ranges[rank]
            for key, gradient in own.items():
                expected = experts[key]
                zero = torch.zeros(stop - start, WIDTH, WIDTH)
                torch.testing.assert_close(
                    zero if gradient is None else gradient, zero if expected is None else expected[start:stop]
                )


def _disagree(rank: int) -> list[str]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    found = []
    rounds = Rounds(dist.group.WORLD, EXPERTS, lambda found: None)
    with pytest.raises(RankMismatchError) as raised:
        rounds.reach(Wish(FORWARD if rank else BACKWARD), forward=bool(rank))
    found.append(str(raised.value))
    layers, _ = shared(rank)
    with pytest.raises(ConfigError) as refused:
        layers[0](*tokens(rank))
    return [*found, str(refused.value)]


def test_other_actions_and_calls_outside_of_a_step_are_refused() -> None:
    for different, outside in call_ranks(RANKS, _disagree):
        assert "a forward and a backward at the same time" in different
        assert "rows of 5 experts" in outside


def _draws(rank: int) -> str:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    layers, experts = shared(rank)
    for layer in layers:
        layer.dropout.p = 0.5
    try:
        experts.begin(nullcontext, lambda _: nullcontext())
        with experts.during("stage", 0, forward=True):
            loss, _ = loss_of(layers, rank, WAYS["none on one"][rank], again=True)
        with experts.during("stage", 0, forward=False):
            loss.backward()
    except (ConfigError, RuntimeError) as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return ""


def test_a_rank_that_skips_a_layer_does_not_draw_other_dropout_when_it_is_computed_again() -> None:
    messages = call_ranks(RANKS, _draws)
    assert "nothing restores what its experts have drawn" in messages[1]
    assert all(messages)


def test_experts_of_a_list_compute_rows_that_are_counted_without_asking_the_device_which_these_are() -> None:
    """All on one rank: rows 1 and 3 are of the first module, row 0 of the third, row 2 of none."""
    members = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    rows, index = torch.randn(4, WIDTH), torch.tensor([2, 0, 3, 0])
    expected = torch.zeros_like(rows)
    for row, number in enumerate(index.tolist()):
        if number < len(members):
            expected[row] = members[number](rows[row])
    with HostReads() as reads:
        found = each_expert(members, rows, index, [2, 0, 1])
    torch.testing.assert_close(found, expected)
    assert not reads.found
    with HostReads() as reads:
        torch.testing.assert_close(each_expert(members, rows, index), expected)
    assert sum(reads.found.values()) == 1
