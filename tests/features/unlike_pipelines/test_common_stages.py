"""Pipelines that cut the same layers in different places have one list of stages."""

from __future__ import annotations

import random
from collections import Counter
from functools import lru_cache
from itertools import accumulate, combinations, pairwise
from typing import Any

import lightning as L
import pytest

from lightning_mm5d import ConfigError, Modality
from lightning_mm5d.features.unlike_pipelines.pipelines import common_stages
from lightning_mm5d.layout.layout import even_lengths
from lightning_mm5d.partition.costs import step_costs
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.tools.cli.job import settle
from parity.harness import strategy
from zoo import CASES

LAYERS = 4


def test_layers_are_cut_wherever_a_pipeline_cuts_them() -> None:
    stages, ranks = common_stages([[3, 3, 3, 3], [4, 4, 4]])
    assert stages == [3, 1, 2, 2, 1, 3]
    assert ranks == ((0, 1, 1, 2, 2, 3), (0, 0, 1, 1, 2, 2))


def test_equal_pipelines_and_a_modality_without_layers_have_their_own_stages() -> None:
    assert common_stages([[2, 2], [2, 2]]) == ([2, 2], ((0, 1), (0, 1)))
    assert common_stages([[4], [1, 3]]) == ([1, 3], ((0, 0), (0, 1)))
    assert common_stages([[0], [0]]) == ([0], ((0,), (0,)))


def test_each_rank_runs_its_layers() -> None:
    rng = random.Random(0)
    for _ in range(200):
        count = rng.randrange(1, 30)
        pipelines = [even_lengths(count, rng.randrange(1, count + 1)) for _ in range(rng.randrange(1, 4))]
        stages, ranks = common_stages(pipelines)
        assert list(accumulate(stages))[-1] == count
        for sizes, placed in zip(pipelines, ranks, strict=True):
            held = [0] * len(sizes)
            for rank, layers in zip(placed, stages, strict=True):
                held[rank] += layers
            assert held == sizes
            assert list(placed) == sorted(placed)


@lru_cache
def module() -> L.LightningModule:
    return CASES["gpt2"].build()


def plan_of(pipelines: Any, world: int) -> Plan:
    made = strategy({"model": Modality(pipeline={"pipelines": pipelines})}, num_microbatches=4)
    settle(made, world, 1)
    return made.plan(module())


def slowest(costs: list[float], ranks: int) -> float:
    """The slowest rank of the best of all cuts of layers; `costs` begins and ends with what stands around them."""
    first, *layers, last = costs
    found = []
    for cuts in combinations(range(1, len(layers)), ranks - 1):
        sums = [sum(layers[start:end]) for start, end in pairwise((0, *cuts, len(layers)))]
        sums[0] += first
        sums[-1] += last
        found.append(max(sums))
    return min(found)


@pytest.mark.parametrize("said", [[5], [5, 5], [5, 4]])
def test_more_stages_than_layers_are_refused_by_the_field_that_says_them(said: list[int]) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(said, sum(said))
    assert (caught.value.field, caught.value.got) == ("modalities.model.pipeline.pipelines", said)
    assert "has a pipeline of 5 stages" in caught.value.rule
    assert caught.value.fix == "Use at most 4 stages"


@pytest.mark.parametrize("world", range(3, 13))
def test_each_replica_has_all_layers_on_all_its_ranks_and_no_cut_is_faster(world: int) -> None:
    """As many pipelines of three ranks or more as there are, of a model of four layers."""
    if world == 5:
        with pytest.raises(
            ConfigError, match=r"^modalities\.model\.pipeline\.pipelines: got .'min': 3.*5 stages.* smaller min"
        ):
            plan_of({"min": 3}, world)
        return
    plan = plan_of({"min": 3}, world)
    layout, partition = plan.layout, plan.partition
    trained = frozenset(name for name, _ in module().named_parameters(remove_duplicate=False))
    costs = step_costs((unit for row in partition.units.values() for unit in row), trained, passes_on=False)
    assert len(costs) == LAYERS + 2
    each = iter(costs)
    taken = {key: sum(next(each) for _ in row) for key, row in partition.units.items()}
    used: Counter[int] = Counter()
    for replica in range(layout.num_replicas):
        held: dict[int, list[int]] = {rank: [] for rank in layout.replica_ranks(replica)}
        spent = dict.fromkeys(held, 0.0)
        for stage in partition.stages["model"]:
            (rank,) = plan.topology.instances(stage.name)[replica]
            held[rank] += range(stage.first, stage.last)
            spent[rank] += taken[stage.name]
        assert sorted(layer for layers in held.values() for layer in layers) == list(range(LAYERS))
        assert all(layers == list(range(layers[0], layers[-1] + 1)) for layers in held.values())
        assert max(spent.values()) == pytest.approx(slowest(costs, len(held)))
        used.update(held.keys())
    assert used == Counter(range(world))
