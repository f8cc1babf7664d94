"""The rules of the greedy scheduler: what each of them changes, and that none of them costs correctness."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from lightning_mm5d.schedule import simulate, validate
from lightning_mm5d.schedule.greedy import Pipeline, Rules

from .graphs import chain, random_graph


@pytest.mark.parametrize("seed", range(8))
def test_every_mixture_of_rules_can_be_executed(seed: int) -> None:
    graph = random_graph(Random(seed))
    pipeline = Pipeline(graph)
    held = dict.fromkeys(graph.ranks, 3)
    for split, eager, lazy, patience in product((True, False), (True, False), (True, False), (0.0, 0.5)):
        rules = Rules(held=held, split=split, eager=eager, lazy=lazy, patience=patience, stretch=(1.2, 1.4))
        played = pipeline.play(rules)
        validate(played.schedule, graph)
        assert played.makespan == pytest.approx(simulate(played.schedule, graph).makespan)


def test_lazy_rules_defer_backwards_that_no_stage_waits_for() -> None:
    slow = chain(2, 4, forward_cost=3.0, backward_cost=1.0)
    for lazy, order in ((True, "FFFFBBBB"), (False, "FFFBFBBB")):
        actions = Pipeline(slow).play(Rules(lazy=lazy)).schedule[0]
        assert "".join(action.kind.value for action in actions) == order


def test_stretched_times_decide_on_the_order_but_the_makespan_is_true() -> None:
    graph = chain(4, 8, forward_cost=1.0, backward_cost=2.0)
    played = Pipeline(graph).play(Rules(split=True, stretch=(3.0, 0.5)))
    assert played.makespan == pytest.approx(simulate(played.schedule, graph).makespan)
