"""Schedules follow what stages took in the first steps; the numbers stay those of one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from features.toys import (
    LANGUAGE,
    PAIR,
    PIXELS,
    SHARED,
    VISION,
    WIDTH,
    Encoder,
    Layout,
    Run,
    Toy,
    assert_same,
    outcomes,
    weights,
)
from lightning_mm5d import Modality
from lightning_mm5d.engine.flight import AroundStep, Course
from lightning_mm5d.features import measured_costs
from lightning_mm5d.features.measured_costs import STEPS, WARMUP
from nccl_order import NAMES

FIRST = Layout(
    {"vision": Modality(colocate_with="language.0", **VISION), "language": Modality(pp_size=2, **LANGUAGE)}, 2
)
"""vision and language.0: rank 0; language.1: rank 1"""
LEARNED = WARMUP + STEPS
SERIAL = NAMES[1]
"""a backend that runs operations in the order of issue, one at a time"""
Orders = list[list[str]]
_MEASURED = measured_costs._Measured


class SlowLinear(nn.Linear):
    """Takes far longer than its matrix says."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return super().forward(x)


class SlowEncoder(Encoder):
    """Has a slow first layer, which runs where the encoder is alone."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = SlowLinear(PIXELS, WIDTH)


class Slow(Toy):
    """Has a slow encoder; some of it may thaw."""

    def __init__(self, thaws_at: int | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.encoder = SlowEncoder().double()
        self.thaws_at = thaws_at
        self.encoder.requires_grad_(thaws_at is None)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.thaws_at:
            self.encoder.requires_grad_(True)


def watched(run: Run, module: L.LightningModule, steps: int, **options: Any) -> tuple[Orders, list[Any]]:
    """Train so many steps; the orders of the actions of each, and the measured costs of all sets of parameters."""
    orders, costs = Orders(), list[Any]()

    class Watched(_MEASURED):
        def step(self, course: Course) -> AroundStep | None:
            if course.step.trains:
                orders.append(list(map(str, course.actions)))
            return super().step(course)

        def leave(self, *_: Any, **__: Any) -> None:
            costs.extend(self._running.plan.graphs.measured.values())

    measured_costs._Measured = Watched  # in this process, which ends with the scenario
    run.trainer(**options).fit(module, run.training(8 * steps))
    measured_costs._Measured = _MEASURED
    return orders, costs


def learning(run: Run) -> Any:
    module = Slow()
    orders, costs = watched(run, module, LEARNED + 3)
    return weights(module), orders, costs


def accumulating(run: Run) -> Any:
    module = Slow()
    orders, costs = watched(run, module, 2 * LEARNED + 2, accumulate_grad_batches=2)
    return weights(module), orders, costs


def thawing(run: Run) -> Any:
    module = Slow(thaws_at=LEARNED)
    orders, costs = watched(run, module, 2 * LEARNED + 1)
    return weights(module), orders, costs


def short(run: Run) -> Any:
    module = Slow()
    orders, costs = watched(run, module, LEARNED - 1)
    return weights(module), orders, costs


@pytest.mark.parametrize(
    ("schedule", "backend"), [("zero_bubble", None), ("auto", None), ("zero_bubble", SERIAL)], ids=str
)
def test_later_steps_are_ordered_by_what_earlier_ones_took(
    schedule: str, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend is not None:
        monkeypatch.setenv("TEST_BACKEND", backend)
    found = outcomes(FIRST, learning, accumulating, thawing, short, schedule=schedule, num_microbatches=4)
    for name, learned in {"learning": LEARNED, "accumulating": 2 * LEARNED, "thawing": LEARNED, "short": None}.items():
        one, ranks = found[name].one, found[name].ranks
        assert_same(ranks[0][0], one[0])
        for _, orders, costs in ranks:
            assert len(costs) == {"thawing": 2, "short": 0}.get(name, 1)
            assert costs == ranks[0][2]  # the same on all ranks
            for taken in costs:
                of = {str(stage): forward for stage, (forward, *_) in taken.items()}
                assert of["vision.0"] > max(0.015, of["language.0"], of["language.1"])
            before, after = orders[:learned], orders[learned:]
            assert all(order == before[0] for order in before)
            assert all(sorted(order) == sorted(after[0]) for order in after if name != "thawing")
        if name == "learning":
            orders = ranks[0][1]
            assert orders[LEARNED] != orders[0]
            assert all(order == orders[LEARNED] for order in orders[LEARNED:])


def quick(run: Run) -> Any:
    module = Toy()
    return weights(module), *watched(run, module, LEARNED + 2)


def deterministic(run: Run) -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        return quick(run)
    finally:
        torch.use_deterministic_algorithms(False)


ALONE = Layout({"vision": Modality(colocate_with="language", **VISION), "language": Modality(**LANGUAGE)}, 1)
COSTLY = Layout({name: Modality(**fields, cost=1) for name, fields in (("vision", VISION), ("language", LANGUAGE))}, 2)
ZERO3 = Layout(
    {
        "vision": Modality(colocate_with="language.0", dp_size=2, sharding={"zero_stage": 3}, **VISION),
        "language": Modality(pp_size=2, dp_size=2, sharding={"zero_stage": 3}, **LANGUAGE),
    },
    4,
    2,
)


@pytest.mark.parametrize(
    ("layout", "scenario", "options"),
    [
        (COSTLY, quick, {"schedule": "zero_bubble"}),
        (FIRST, deterministic, {"schedule": "zero_bubble"}),
        (PAIR, quick, {"schedule": "1f1b"}),
        (SHARED, quick, {"schedule": "zero_bubble"}),
        (ALONE, quick, {"schedule": "zero_bubble"}),
        (ZERO3, quick, {"schedule": "zero_bubble"}),
    ],
    ids=["costs given", "deterministic", "1f1b", "one stage", "one rank", "zero 3"],
)
def test_orders_stay_where_costs_must_not_change_them(
    layout: Layout, scenario: Callable[[Run], Any], options: dict[str, Any]
) -> None:
    found = outcomes(layout, scenario, **options)[scenario.__name__]
    for _, orders, costs in found.ranks:
        assert not costs
        assert all(order == orders[0] for order in orders)
