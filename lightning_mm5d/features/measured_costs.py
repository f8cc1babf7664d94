"""Schedules follow what stages take: the first steps of a run are measured, and later steps ordered by that.

Estimates know the layers of a stage, and not how many tokens of each modality pass them, nor how fast a device computes
which shapes. A schedule that fits such costs closely may then be slower than one that knows none. Phases:

1. From the third update on, `STEPS` training steps are recorded, one for each update;
2. after the last of them all ranks gather the median seconds of the actions of each stage; collective, once;
3. from then on schedules are built from these. Limits on activations do not depend on costs.

Each set of trained parameters has phases of its own. Microbatches of a stage keep their order, so gradients are summed
as before; those of a parameter that several stages on a rank share may be added in another order. With deterministic
algorithms nothing is measured.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

import torch
from lightning.pytorch.trainer.states import TrainerFn

from lightning_mm5d.engine.flight import AroundStep, AroundSteps, Course, Recorder
from lightning_mm5d.partition import stage_costs
from lightning_mm5d.schedule import SCHEDULES, UNSPLIT_SCHEDULES, Kind
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.sharded.collectives import of_all_ranks
from lightning_mm5d.trainer.feature import Attached, Feature, Running
from lightning_mm5d.trainer.optimization import AroundUpdates

WARMUP, STEPS = 2, 3
_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)


class MeasuredCosts(Feature):
    """Has no field: steps of schedules that split backwards are measured, where no `cost` is given."""

    def attach(self, running: Running) -> Attached | None:
        """Measure the first steps of a fit."""
        return _Measured(running) if running.trainer.state.fn == TrainerFn.FITTING and _applies(running) else None


def _applies(running: Running) -> bool:
    """Whether the order of actions fits costs closely, and nothing was derived from it when the run began.

    Gathers of shared parameters and exchanges of experts were.
    """
    is_named = isinstance(running.schedule, str) and running.schedule in SCHEDULES
    return (
        is_named
        and running.schedule not in UNSPLIT_SCHEDULES
        and bool(running.plan.topology.edges)
        and running.plan.layout.size > 1
        and running.experts is None
        and running.engine.gathers is None
        and all(modality.cost is None for modality in running.plan.modalities.values())
        and not torch.are_deterministic_algorithms_enabled()
    )


@dataclass
class _Window:
    """Steps that train the same parameters: the updates after them, and the records of some."""

    updates: int = 0
    recorders: list[Recorder] = field(default_factory=list)


class _Measured(Attached, AroundSteps, AroundUpdates):
    def __init__(self, running: Running) -> None:
        self._running = running
        self._windows: dict[frozenset[str], _Window] = {}
        self._last: frozenset[str] | None = None
        running.engine.around.append(self)
        running.optimization.around.append(self)

    def step(self, course: Course) -> AroundStep | None:
        if not course.step.trains:
            return None
        self._last = course.trainable
        window = self._windows.setdefault(course.trainable, _Window())
        if not 0 <= window.updates - WARMUP == len(window.recorders) < STEPS:
            return None
        window.recorders.append(Recorder(self._running.device))
        return window.recorders[-1].step(course)

    def stepped(self) -> None:
        if self._last is None:
            return
        window = self._windows[self._last]
        window.updates += 1
        if window.updates == WARMUP + STEPS:
            self._learn(self._last, window.recorders)

    def _learn(self, trainable: frozenset[str], recorders: list[Recorder]) -> None:
        """Let all ranks know what the stages of each took; collective."""
        plan, host = self._running.plan, self._running.groups.host
        stages = sorted(plan.topology.members)
        seconds: dict[tuple[StageKey, Kind], list[float]] = {}
        for recorder in recorders:
            for action, (start, end) in recorder.times().items():
                seconds.setdefault((action.stage, action.kind), []).append(end - start)
        recorders.clear()
        local_medians = [[statistics.median(seconds.get((stage, kind), [0.0])) for kind in _KINDS] for stage in stages]
        several = of_all_ranks(torch.tensor(local_medians, dtype=torch.float64), host)
        several[several == 0] = torch.nan
        medians = several.nanmedian(dim=0).values.nan_to_num().tolist()
        if all(forward for forward, *_ in medians):
            self._adopt(trainable, dict(zip(stages, medians, strict=True)))

    def _adopt(self, trainable: frozenset[str], medians: dict[StageKey, list[float]]) -> None:
        """Order later steps by the seconds of forwards, backwards, input and weight gradients of each stage."""
        graphs = self._running.plan.graphs
        trains, costs = graphs.trains(trainable), {}
        for stage, (forward, backward, inputs, weights) in medians.items():
            _, expected, late = stage_costs(graphs.timed_units[stage], trainable, trains[stage][1])
            if weights:
                backward, share = inputs + weights, weights / (inputs + weights)
            else:  # not split, so the share of the estimates
                share = late / expected if expected else 0.0
            costs[stage] = forward, backward, backward * share
        graphs.measured[trainable] = costs
        self._running.engine.preparation.forget()


FEATURE = MeasuredCosts
