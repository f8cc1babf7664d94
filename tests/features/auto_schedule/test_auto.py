"""The search: at least as short as the named schedules, within the bound, the same on every rank; and the bound."""

from __future__ import annotations

from random import Random

import pytest

from lightning_mm5d.config.modality import Modality
from lightning_mm5d.features.auto_schedule import lower_bound
from lightning_mm5d.schedule import ScheduleError, build, simulate, validate
from lightning_mm5d.schedule.greedy import Pipeline
from schedule.graphs import case, chain, chunked, random_graph, tree

_UNEVEN = {
    "vision": Modality(pp_size=2, cost=0.6),
    "audio": Modality(cost=0.8),
    "language": Modality(pp_size=4, cost=[1.0, 1.3, 0.9, 1.2]),
}


@pytest.mark.parametrize("seed", range(12))
def test_no_named_schedule_is_shorter_nor_any_schedule_than_the_lower_bound(seed: int) -> None:
    graph = random_graph(Random(seed))
    makespans = {
        name: simulate(build(name, graph), graph).makespan for name in ("1f1b", "interleaved", "zero_bubble", "auto")
    }
    assert makespans["auto"] == pytest.approx(min(makespans.values()))
    assert makespans["auto"] >= lower_bound(graph) - 1e-9


def test_reaches_the_lower_bound_on_uneven_costs_where_no_named_schedule_does() -> None:
    graph = case(12, **_UNEVEN)
    named = min(simulate(build(name, graph), graph).makespan for name in ("gpipe", "1f1b", "zero_bubble"))
    assert simulate(build("auto", graph), graph).makespan == pytest.approx(lower_bound(graph))
    assert named > 1.02 * lower_bound(graph)


@pytest.mark.parametrize("bound", [3, 4, 8])
def test_keeps_the_bound_on_activations(bound: int) -> None:
    graph = case(12, **_UNEVEN)
    schedule = build("auto", graph, max_activations=bound)
    validate(schedule, graph)
    assert max(simulate(schedule, graph).peak_activations.values()) <= bound


def test_keeps_the_bound_of_the_rank_that_is_named() -> None:
    graph = chain(4, 12)
    peaks = simulate(build("auto", graph, max_activations={0: 2}), graph).peak_activations
    assert peaks[0] == 2


def test_more_memory_never_makes_it_longer() -> None:
    graph = tree(12, vision=2, language=3)
    makespans = [simulate(build("auto", graph, max_activations=bound), graph).makespan for bound in (1, 2, 3, 5, 8)]
    assert makespans == sorted(makespans, reverse=True)
    assert makespans[0] > makespans[-1]


def test_a_bound_that_nothing_keeps_is_refused_with_what_would_do() -> None:
    with pytest.raises(ScheduleError, match=r"max_activations is 1 on rank 0, .*fewer than 2 there"):
        build("auto", chunked(2, 2, 4), max_activations=1)


def test_searches_a_number_of_rules_that_the_actions_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    played = 0
    original = Pipeline.play

    def counting(pipeline: Pipeline, rules: object) -> object:
        nonlocal played
        played += 1
        return original(pipeline, rules)  # type: ignore[arg-type]

    monkeypatch.setattr(Pipeline, "play", counting)
    build("auto", case(32, vision=Modality(pp_size=4, cost=0.8), language=Modality(pp_size=12, cost=1.1)))
    assert 0 < played <= 20


@pytest.mark.parametrize(("name", "graph"), [("1f1b", chain(1, 5)), ("zbv", chunked(4, 2, 16, schedule="zbv"))])
def test_lower_bound_is_reached_where_nothing_idles_in_between(name: str, graph: object) -> None:
    assert simulate(build(name, graph), graph).makespan == lower_bound(graph)  # type: ignore[arg-type]


def test_lower_bound_of_one_microbatch_is_its_way_there_and_back() -> None:
    graph = tree(1, vision=2, language=2)
    assert lower_bound(graph) == 4 * 1 + 3 * 1 + 2
    assert simulate(build("zero_bubble", graph), graph).makespan == lower_bound(graph)
