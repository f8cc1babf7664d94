"""What microbatches in flight take on a rank, action by action; bytes are small numbers."""

from __future__ import annotations

from lightning_mm5d.schedule import Action, Kind
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.tools.planner.flights import StageFlight, UnitFlight, flown

STAGE = StageKey("language", 0)


def stage(*, per_call: int = 1, working: int = 0, away: bool = False, joins: bool = False) -> StageFlight:
    """Two units, which share storage 1 and pass storage 0; gradients of 7 bytes each."""
    units = [
        UnitFlight(saved, working, gradients=7, laid=0, away=away, put_off=put_off, joins=joins)
        for saved, put_off in (({1: 10, 2: 100}, {1: 10, 4: 3}), ({1: 10, 3: 200}, {1: 10, 5: 4}))
    ]
    return StageFlight(units, passed={0: 1000}, has_backward=True, per_call=per_call)


def flight(*actions: tuple[Kind, int]) -> tuple[int, int]:
    found = flown([Action(kind, STAGE, number) for kind, number in actions], {STAGE: stage()})
    return found.activations, found.peak


def test_a_backward_frees_what_its_forward_kept() -> None:
    assert flight((Kind.F, 0), (Kind.B, 0)) == (1310, 1310)
    assert flight((Kind.F, 0), (Kind.F, 1), (Kind.B, 0), (Kind.B, 1)) == (2620, 2620)
    assert flight((Kind.F, 0), (Kind.B, 0), (Kind.F, 1), (Kind.B, 1)) == (1310, 1310 + 14)


def test_weight_gradients_that_are_put_off_keep_what_they_are_made_of() -> None:
    kept = 10 + 3 + 4
    assert flight((Kind.F, 0), (Kind.I, 0), (Kind.F, 1), (Kind.I, 1), (Kind.W, 0), (Kind.W, 1)) == (
        1310 + kept,
        1310 + kept,
    )
    assert flight((Kind.F, 0), (Kind.I, 0), (Kind.W, 0), (Kind.F, 1), (Kind.B, 1)) == (1310, 1310 + 14)


def test_a_joined_call_holds_all_its_microbatches_from_the_first_forward_to_the_last_backward() -> None:
    joined = stage(per_call=2, joins=True, working=5)
    actions = [Action(kind, STAGE, number) for kind, number in ((Kind.F, 0), (Kind.F, 1), (Kind.B, 0), (Kind.B, 1))]
    found = flown(actions, {STAGE: joined})
    assert found.activations == 2 * 1310
    assert found.peak == 2 * 1310
    apart = [actions[0], Action(Kind.B, STAGE, 0), *actions[1:2], actions[3]]
    early = flown(apart, {STAGE: joined})
    assert early.activations == 1310 + 310, "the first forward computes the second microbatch, too"


def test_what_is_fetched_is_on_the_host_too_until_its_backward_has_freed_it() -> None:
    away = stage(away=True)
    actions = [Action(kind, STAGE, number) for kind in (Kind.F, Kind.B) for number in range(3)]
    taken = flown(actions, {STAGE: away})
    assert taken.host == 3 * 310
    # as the first backward begins: two microbatches have been fetched, and of the third what is passed has stayed
    assert taken.peak == 2 * 1310 + 1000
    assert taken.together == taken.peak + taken.host
