"""Gradients of parts, of what is shared and of what is whole are summed, and counted, as on one process.

Every rank gets gradients made up for its parts; the sum over the ranks that hold an element, put together by row, is
what each of them must have afterwards.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mm5d import Modality
from lightning_mm5d.gradients.gradients import SumGroups, make_gradients
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.plan.stage_graph import Ownership
from lightning_mm5d.plan.sums import Rows, Summed, counted_of, sum_groups, sums_of
from lightning_mm5d.sharded.shards import Segment, Shard
from lightning_mm5d.tensor_parallel.resolve import Division
from ranks import run_ranks
from tensor_parallel.handmade import HEAD, VOCABULARY, WIDTH, Model, connect, held_by, model_plan, plan_of

NORMS = (1.0, 2.0, 3.0, float("inf"))


LAYOUTS: dict[str, tuple[int, int, int, dict[str, int]]] = {
    "shared keys, two replicas": (4, 4, 1, {"tp_size": 2, "dp_size": 2}),
    "two stages": (4, 4, 2, {"tp_size": 2, "pp_size": 2}),
    "uneven heads": (3, 6, 2, {"tp_size": 3}),
}


def made_up(plan: Plan, module: L.LightningModule, name: str, rank: int) -> Tensor:
    """The gradient of `name` on `rank` before the sum, of its part; what is whole is equal within a replica."""
    shape, shard = [*module.get_parameter(name).shape], plan.division.shards.get(name)
    replica = min(min(one) for stage in plan.topology.members for one in plan.topology.instances(stage) if rank in one)
    is_equal = shard is None and name not in plan.division.shared
    if shard is not None:
        shape[shard.dim] = shard.lengths[plan.ownership.shard_index(name, rank)]
    generator = torch.Generator().manual_seed(1000 * (replica if is_equal else rank) + list(plan.sizes).index(name))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def expected_sum(plan: Plan, module: L.LightningModule, name: str) -> Tensor:
    """The whole gradient: each element is summed over the instances that have it, or over the ranks that share it."""
    whole, shard = torch.zeros_like(module.get_parameter(name)), plan.division.shards.get(name)
    stages = dict.fromkeys(plan.topology.stage_of[owner] for owner in plan.partition.owners[name])
    for ranks in (ranks for stage in stages for ranks in plan.topology.instances(stage)):
        for index, rank in enumerate(ranks):
            grad = made_up(plan, module, name, rank)
            if shard is not None:
                for row, source in zip(
                    (row for start, stop in shard.ranges[index] for row in range(start, stop)),
                    grad.unbind(shard.dim),
                    strict=True,
                ):
                    whole.select(shard.dim, row).add_(source)
            elif index == 0 or name in plan.division.shared:
                whole += grad
    return whole


def summed(rank: int, plan: Plan, module: L.LightningModule) -> Any:
    groups = connect(rank, plan)
    made = {ranks: groups.get(ranks, "gradients") for ranks in sum_groups(plan)}
    groups.verify()
    held = held_by(plan, module, rank)
    gradients = make_gradients(
        plan, rank, held, SumGroups(made, {}, dist.group.WORLD, False), device=torch.device("cpu")
    )
    for name, parameter in held.items():
        parameter.grad = made_up(plan, module, name, rank)
    gradients.reduce(1.0 / plan.layout.num_replicas)
    norms = [gradients.norm(held.values(), None, norm_type) for norm_type in NORMS]
    return {name: parameter.grad for name, parameter in held.items()}, norms


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_and_norms_are_those_of_one_process(layout: str) -> None:
    """language: ranks 0-3 as 2 x 2 tensor parallel ranks of two replicas or stages, or ranks 0-2 as three."""
    world, query, key_value, fields = LAYOUTS[layout]
    module, plan = model_plan(world, query, key_value, **fields)
    share = 1.0 / plan.layout.num_replicas
    wholes = {name: share * expected_sum(plan, module, name) for name, _ in module.named_parameters()}
    norms = [torch.cat([whole.flatten() for whole in wholes.values()]).norm(p) for p in NORMS]
    seen = set()
    for rank, (grads, found) in enumerate(run_ranks(world, summed, plan, module)):
        torch.testing.assert_close(torch.stack(found), torch.stack(norms), rtol=1e-12, atol=0)
        for name, grad in grads.items():
            shard = plan.division.shards.get(name)
            expected = (
                wholes[name] if shard is None else shard.cut(wholes[name], plan.ownership.shard_index(name, rank))
            )
            torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
            seen.add(name)
    assert seen == set(wholes)


# --- gradients that are not there ---


def partly(rank: int, plan: Plan, module: L.LightningModule) -> Any:
    groups = connect(rank, plan)
    made = {ranks: groups.get(ranks, "gradients") for ranks in sum_groups(plan)}
    held = held_by(plan, module, rank)
    gradients = make_gradients(
        plan, rank, held, SumGroups(made, {}, dist.group.WORLD, False), device=torch.device("cpu")
    )
    held["layers.0.norm.weight"].requires_grad_(False)
    for name in ("layers.0.qkv.weight", "layers.0.columns", "layers.0.norm.bias", "layers.0.norm.weight"):
        if rank == 0:
            held[name].grad = made_up(plan, module, name, rank)
    gradients.reduce()
    norm = gradients.norm(held.values(), None)
    return {name: parameter.grad for name, parameter in held.items()}, norm


def test_a_gradient_that_some_rank_has_comes_to_all_that_hold_its_parameter() -> None:
    """language: ranks 0-1 and 2-3 as replicas of two tensor parallel ranks; only rank 0 has gradients."""
    module, plan = model_plan(4, 4, 1, tp_size=2, dp_size=2)
    results = run_ranks(4, partly, plan, module)
    queries = 2 * HEAD  # on each rank, before the keys and values that all share
    for rank, (grads, _) in enumerate(results):
        rows, columns = grads["layers.0.qkv.weight"], grads["layers.0.columns"]
        own = made_up(plan, module, "layers.0.qkv.weight", 0)
        torch.testing.assert_close(rows[queries:], own[queries:], rtol=0, atol=0)
        torch.testing.assert_close(rows[:queries], own[:queries] if rank in (0, 2) else torch.zeros_like(own[:queries]))
        torch.testing.assert_close(columns[:, queries:], made_up(plan, module, "layers.0.columns", 0)[:, queries:])
        assert bool(columns[:, :queries].any()) == (rank in (0, 2))
        bias = grads["layers.0.norm.bias"]
        assert bool(bias.any()) == (rank in (0, 2)), "what all of a tensor parallel group compute"
        assert (grads["layers.0.norm.weight"] is not None) == (rank == 0), "what is frozen is not summed"
        assert all(grad is None for name, grad in grads.items() if name.startswith(("layers.1", "table")))


def nothing(rank: int, plan: Plan, module: L.LightningModule) -> Any:
    groups = connect(rank, plan)
    made = {ranks: groups.get(ranks, "gradients") for ranks in sum_groups(plan)}
    held = held_by(plan, module, rank)
    gradients = make_gradients(
        plan, rank, held, SumGroups(made, {}, dist.group.WORLD, False), device=torch.device("cpu")
    )
    gradients.reduce()
    norms = [gradients.norm(held.values(), None, norm_type) for norm_type in NORMS]
    return [parameter.grad for parameter in held.values()], norms


def test_without_gradients_there_is_none_and_the_norm_is_zero() -> None:
    """language: ranks 0-1, tensor parallel."""
    module, plan = model_plan(2, 4, 1, tp_size=2)
    for grads, norms in run_ranks(2, nothing, plan, module):
        assert grads
        assert set(grads) == {None}
        assert norms == [0.0] * len(NORMS)


def empty_part(rank: int, plan: Plan, module: L.LightningModule) -> Any:
    connect(rank, plan)
    parameter = nn.Parameter(module.table.weight.data if rank == 0 else module.table.weight.data[:0])
    gradients = make_gradients(
        plan, rank, {"table.weight": parameter}, SumGroups({}, {}, None, False), device=torch.device("cpu")
    )
    parameter.grad = torch.ones_like(parameter)
    gradients.reduce()
    return [gradients.norm([parameter], None, norm_type) for norm_type in NORMS]


def test_a_part_without_rows_counts_nothing() -> None:
    """language: ranks 0-1, tensor parallel; rank 1 has no row of the table."""
    module = Model(4, 1)
    table = Shard(0, VOCABULARY, (((0, VOCABULARY),), ((VOCABULARY, VOCABULARY),)))
    division = Division(shards={"table.weight": table, "head.weight": table})
    plan = plan_of(module, division, 2, language=Modality(tp_size=2))
    count = VOCABULARY * WIDTH
    for norms in run_ranks(2, empty_part, plan, module):
        torch.testing.assert_close(
            torch.stack(norms), torch.tensor([count, count**0.5, count ** (1 / 3), 1.0]).double()
        )


# --- parameters of modalities of unlike degrees ---


class Tied(L.LightningModule):
    """An encoder and a decoder with one table."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(VOCABULARY, WIDTH)
        self.decoder = nn.Embedding(VOCABULARY, WIDTH)
        self.decoder.weight = self.encoder.weight
        self.double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.decoder(batch) + self.encoder(batch)).sum()


def unlike(rank: int, plan: Plan, module: Tied) -> Any:
    groups = connect(rank, plan)
    made = {ranks: groups.get(ranks, "gradients") for ranks in sum_groups(plan)}
    parameter = nn.Parameter(module.encoder.weight.data)
    gradients = make_gradients(
        plan,
        rank,
        {"encoder.weight": parameter},
        SumGroups(made, {}, dist.group.WORLD, False),
        device=torch.device("cpu"),
    )
    given = torch.full_like(parameter, 3.0 if rank == 0 else 5.0)
    parameter.grad = given
    gradients.reduce()
    return parameter.grad, gradients.norm([parameter], None), given


def test_what_ranks_of_unlike_degrees_share_counts_once_per_modality() -> None:
    """encoder: rank 0; language: ranks 1-2, tensor parallel, which have one gradient."""
    module = Tied()
    encoder = Modality(module="encoder", boundary="encoder")
    plan = plan_of(module, Division(), 3, encoder=encoder, language=Modality(tp_size=2, module="decoder"))
    assert sum_groups(plan) == [(0, 1, 2)]
    assert [sums_of(plan, rank)["encoder.weight"][0].weight for rank in range(3)] == [1.0, 0.5, 0.5]
    for grad, norm, given in run_ranks(3, unlike, plan, module):
        assert grad.unique().tolist() == [8.0]
        torch.testing.assert_close(norm, grad.norm())
        assert given.unique().numel() == 1
        assert given[0, 0] in (3.0, 5.0), "the weight is not left on a gradient that somebody else may hold"


# --- plans ---


def test_only_shared_rows_are_summed_over_tensor_parallel_ranks() -> None:
    """language: ranks 0-1 and 2-3 as replicas of two tensor parallel ranks; keys and values are on all of them."""
    _, plan = model_plan(4, 4, 1, tp_size=2, dp_size=2)
    assert sum_groups(plan) == [(0, 2), (1, 3), (0, 1, 2, 3)]
    queries, shared = Segment(0, 4, (1,)), Segment(4, 4, (0, 1))
    found = sums_of(plan, 3)
    for name, dim in (("layers.0.qkv.bias", 0), ("layers.1.columns", 1)):
        assert found[name] == (
            Summed((1, 3), Rows(dim, (queries,))),
            Summed((0, 1, 2, 3), Rows(dim, (shared,))),
        )
    assert found["layers.0.out.weight"] == (Summed((1, 3)),)
    assert found["layers.0.out.bias"] == (Summed((1, 3)),)
    assert found["layers.0.head_norm.weight"] == (Summed((0, 1, 2, 3)),)
    assert found["table.weight"] == found["head.weight"] == (Summed((1, 3)),)


def test_one_rank_counts_what_several_share() -> None:
    _, plan = model_plan(4, 4, 1, tp_size=2, dp_size=2)
    counted = [counted_of(plan, rank, plan.sizes) for rank in range(4)]
    assert set(counted[0]) == set(plan.sizes)
    assert set(counted[0].values()) == {None}
    divided_names = set(plan.division.shards) & set(plan.sizes)
    assert set(counted[1]) == divided_names
    rows = Segment(0, 4, (1,))
    assert {name: held for name, held in counted[1].items() if held is not None} == {
        f"layers.{index}.{name}": Rows(dim, (rows,))
        for index in range(2)
        for name, dim in (("qkv.weight", 0), ("qkv.bias", 0), ("columns", 1))
    }
    assert counted[2] == counted[3] == {}


def test_groups_of_stages_that_tie_a_table_span_them_by_part() -> None:
    """language: ranks 0-1 and 2-3 as stages of two tensor parallel ranks."""
    _, plan = model_plan(4, 4, 2, tp_size=2, pp_size=2)
    assert sums_of(plan, 1) == {
        "table.weight": (Summed((1, 3)),),
        "head.weight": (Summed((1, 3)),),
        "layers.0.head_norm.weight": (Summed((0, 1)),),
        "layers.0.head_norm.bias": (Summed((0, 1)),),
    }
    assert set(sum_groups(plan)) == {(0, 2), (1, 3), (0, 1), (2, 3)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_sum_has_a_group(layout: str) -> None:
    world, query, key_value, fields = LAYOUTS[layout]
    _, plan = model_plan(world, query, key_value, **fields)
    wanted = {one.ranks for rank in range(world) for sums in sums_of(plan, rank).values() for one in sums}
    assert wanted == set(sum_groups(plan))
    assert all(ranks == tuple(sorted(set(ranks))) for ranks in wanted)


def test_parameters_of_one_kind_are_planned_once() -> None:
    _, plan = model_plan(4, 4, 1, tp_size=2, dp_size=2)
    with patch.object(Ownership, "ranks_by_shard", autospec=True, side_effect=Ownership.ranks_by_shard) as holders:
        sum_groups(plan)
        sums_of(plan, 0)
    kinds = 4  # fused by rows, by columns, output projections, tables; the norms and biases are whole
    assert holders.call_count <= 2 * (kinds + 1)
    assert len(plan.sizes) > 3 * kinds


# --- messages ---


def counted_messages(rank: int, plan: Plan, module: L.LightningModule) -> list[int]:
    groups = connect(rank, plan)
    made = {ranks: groups.get(ranks, "gradients") for ranks in sum_groups(plan)}
    held = held_by(plan, module, rank)
    gradients = make_gradients(
        plan, rank, held, SumGroups(made, {}, dist.group.WORLD, False), device=torch.device("cpu")
    )
    for name, parameter in held.items():
        parameter.grad = made_up(plan, module, name, rank)
    with patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as sent:
        gradients.reduce()
    # those of the world tell which gradients there are
    found = [call for call in sent.call_args_list if dist.group.WORLD not in (*call.args, *call.kwargs.values())]
    return [call.args[0].numel() for call in found]


def test_gradients_of_a_group_travel_in_few_messages() -> None:
    """language: ranks 0-1 and 2-3 as replicas of two tensor parallel ranks; two groups for each rank."""
    module, plan = model_plan(4, 4, 1, tp_size=2, dp_size=2)
    for rank, sizes in enumerate(run_ranks(4, counted_messages, plan, module)):
        held = held_by(plan, module, rank)
        assert len(sizes) <= 2 * 5  # a quarter at once, and what has rows of its own
        assert sum(sizes) == sum(parameter.numel() for parameter in held.values())
