"""What ranks issue in a step: messages, gathers and sums of all of them end, in random layouts of every kind."""

from __future__ import annotations

from random import Random

import pytest

from lightning_mm5d import Modality
from lightning_mm5d.config.checks import check
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import for_schedule
from lightning_mm5d.layout import Layout
from lightning_mm5d.plan.issued import Issued
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.plan.topology import pairs_of
from lightning_mm5d.schedule import SCHEDULES
from lightning_mm5d.tools.planner.outcomes import sketched_plan


def _sizes(rng: Random) -> dict[str, int]:
    found = {
        "pp_size": rng.choice([1, 1, 2, 3]),
        "tp_size": rng.choice([1, 1, 2, 4]),
        "cp_size": rng.choice([1, 1, 1, 2]),
        "dp_size": rng.choice([1, 1, 2, 3]),
    }
    return {**found, "pp_chunks": rng.choice([1, 2]) if found["pp_size"] > 1 else 1}


def _modalities(rng: Random, schedule: str) -> dict[str, Modality] | None:
    """Up to two encoders, some colocated with the language model; None where these sizes are refused."""
    language = _sizes(rng)
    found = {}
    for number in range(rng.randint(0, 2)):
        fields: dict[str, object] = dict(_sizes(rng))
        if rng.random() < 0.5:
            fields = {"colocate_with": "language", "tp_size": rng.choice([1, 1, 2]), "pp_size": rng.choice([None, 1])}
        elif rng.random() < 0.2:
            fields = {**language, "colocate_with": "language.0", "pp_size": 1, "pp_chunks": 1}
        found[f"encoder{number}"] = Modality(**fields, cost=rng.choice([0.3, 1.0, 2.5]))  # type: ignore[arg-type]
    found["language"] = Modality(**language, cost=1.0)  # type: ignore[arg-type]
    try:
        check(found, num_microbatches=4, schedule=schedule)
    except ConfigError:
        return None
    return for_schedule(found, schedule, "language")


def _plan(rng: Random) -> tuple[Plan, str]:
    """The plan of a random layout on as few ranks as it fits."""
    while True:
        schedule = rng.choice(SCHEDULES[:-1])
        modalities = _modalities(rng, schedule)
        for world in range(1, 49) if modalities else ():
            try:
                layout = Layout.build(modalities, world_size=world, loss_modality="language")
            except ConfigError:
                continue
            return sketched_plan(layout, modalities, v_shaped=schedule == "zbv"), schedule


@pytest.mark.parametrize("seed", range(40))
def test_everything_that_ranks_issue_ends_on_every_kind_of_stream(seed: int) -> None:
    rng = Random(seed)
    for _ in range(2):
        plan, schedule = _plan(rng)
        frozen = {name for name in plan.modalities if rng.random() < 0.25}
        trained = frozenset(name for name in plan.sizes if name.rpartition(".")[0] not in frozen)
        Issued(plan, schedule, rng.choice([1, 2, 3, 5]), trained, forward_only=rng.random() < 0.2).check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(40, 440))
def test_everything_ends_in_many_more_layouts(seed: int) -> None:
    test_everything_that_ranks_issue_ends_on_every_kind_of_stream(seed)


def test_ranks_that_share_a_replica_through_others_follow_one_schedule() -> None:
    """encoder: a replica on each rank; language pp 2, tp 4, dp 3 on ranks 0-23. Rank 0 works for one replica only, but
    rank 1, which shares its layers, also encodes for another."""
    modalities = {"encoder": Modality(colocate_with="language"), "language": Modality(pp_size=2, tp_size=4, dp_size=3)}
    plan = sketched_plan(Layout.build(modalities, world_size=24, loss_modality="language"), modalities)
    assert any(len(plan.layout.replicas_of_rank(rank)) == 1 for rank in range(24))
    assert {plan.topology.connected_replicas(rank) for rank in range(24)} == {(0, 1, 2)}
    Issued(plan, "zero_bubble", 8, frozenset(plan.sizes)).check()


def test_a_payload_travels_between_ranks_whose_shares_overlap() -> None:
    assert pairs_of([0, 1], [2, 3, 4]) == [(0, 0), (0, 1), (1, 1), (1, 2)]
    assert pairs_of([0, 1, 2, 3], [4, 5]) == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert pairs_of([0], [0, 1]) == [(0, 0), (0, 1)]
    assert pairs_of([0, 1], [1]) == [(1, 0)]


def test_a_step_of_two_ranks_is_listed_in_order() -> None:
    modalities = {"vision": Modality(), "language": Modality()}
    plan = sketched_plan(Layout.build(modalities, world_size=2, loss_modality="language"), modalities)
    issued = Issued(plan, "1f1b", 1, frozenset(plan.sizes))
    told = [[("waits for " * waits) + str(operation.name[0]) for operation, waits in issued.steps(r)] for r in (0, 1)]
    activations = "activations of microbatch 0, vision.0 -> language.0"
    gradients = "gradients of microbatch 0, language.0 -> vision.0"
    assert told == [
        [activations, gradients, f"waits for {gradients}", f"waits for {activations}"],
        [activations, f"waits for {activations}", gradients, f"waits for {gradients}"],
    ]
