"""Records each training step of a run, and writes the last whole one when the run has ended.

The measured timeline is drawn next to a simulation of the same actions. Phases: (1) all ranks gather the times of their
actions; (2) rank 0 simulates the same lists of actions, each with the median time of its kind and stage; (3) rank 0
draws both, two rows a rank. The rows differ by messages on their way and by actions that take longer than others of
their kind.

The last batch of an epoch may be smaller than others, so it is drawn only where the epoch has no other. Ranks that
have not recorded the same step, with as many microbatches, draw none. A JSON file says of what run it is, see `about`.
A file that cannot be written gives a warning only, because training is over and its weights matter more.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.groups import path_of, value_of
from lightning_mm5d.engine.flight import AroundStep, Course, Recorder
from lightning_mm5d.features.timeline.drawing import SECONDS, chrome_trace, draw
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import Action, AnySchedule, Graph, Kind, Schedule, Simulation, Span, measured, simulate
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.sharded.collectives import message_device, of_all_ranks
from lightning_mm5d.trainer.feature import Attached, Feature, Running


class Timeline(Feature):
    """The field `timeline`: the path of a file, or None."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._path: str | None = fields["timeline"]
        self._is_split = fields["microbatch_size"] is not None or fields["num_microbatches"] not in (None, 0, 1)

    def check(self, module: pl.LightningModule, plan: Plan, device: torch.device) -> None:
        """Refuse a timeline where all ranks run the whole model in one piece."""
        is_split = self._is_split or not plan.topology.is_replicated or plan.main_params is not None
        if self._path is not None and not is_split:
            rule = "Every rank runs the whole model in one piece, so there is no schedule to draw"
            fix = "Leave it unset, or set num_microbatches or a layout with stages"
            raise ConfigError("timeline", self._path, rule, fix)

    def attach(self, running: Running) -> Attached | None:
        """Record the steps of a fit."""
        if self._path is None or running.trainer.state.fn != TrainerFn.FITTING:
            return None
        return _Recorded(self._path, running)


class _Recorded(Attached):
    """Writes the last step of all ranks: a Chrome trace where the path ends in ``.json``, else a picture.

    Args:
        path: of the file; rank 0 writes it.
        running: the run on this rank.
    """

    def __init__(self, path: str, running: Running) -> None:
        self._path, self._running = path, running
        self._recorder = _UsualSteps(running)
        running.engine.around.append(self._recorder)

    def finish(self) -> None:
        """Draw the last step; collective."""
        path, recorder, running = self._path, self._recorder, self._running
        plan, wire, trainable = running.plan, message_device(running.device), recorder.trainable
        counts = [recorder.count, recorder.number]
        recorded = torch.tensor([*counts, *(-value for value in counts)], device=wire)
        dist.all_reduce(recorded, dist.ReduceOp.MIN)
        least, most = recorded[:2].tolist(), recorded[2:].neg().tolist()
        if trainable is None or least != most:
            return
        ran = _ran(plan, running.schedule, recorder.count, trainable)
        spans = _gathered(recorder, plan, ran, recorder.count, running.rank, wire)
        if running.rank != 0:
            return
        graph = plan.graphs.graph(range(plan.layout.num_replicas), recorder.count, trainable)
        seen = measured(spans)
        both = _side_by_side(seen, simulate(ran, _costed(graph, seen)))
        names = {
            2 * lead + which: f"{lead}  {label}"
            for lead in ran
            for which, label in enumerate((", ".join(plan.topology.stages_of(lead)), "simulated"))
        }
        try:
            if path.endswith(".json"):
                told = {**about(plan, recorder.count), "samples": recorder.samples}
                chrome_trace(both, path, names=names, unit=SECONDS, about=told)
            else:
                draw(both, path, names=names, unit=SECONDS)
        except (OSError, ValueError) as error:
            rank_zero_warn(f"timeline: {path} cannot be written: {error}")


class _UsualSteps(Recorder):
    """Leaves out last batches of epochs.

    Attributes:
        samples: of a microbatch of the step, on the mean.
    """

    def __init__(self, running: Running) -> None:
        super().__init__(running.device, running.num_microbatches)
        self.samples, self._trainer = 0.0, running.trainer

    def step(self, course: Course) -> AroundStep | None:
        """Record the step, unless a smaller one could hide those before it."""
        if self._trainer.is_last_batch and self._trainer.fit_loop.epoch_loop.batch_idx > 0:
            return None
        recorded = super().step(course)
        if recorded is not None:
            self.samples = statistics.fmean(m.samples for parts in course.step.microbatches.values() for m in parts)
        return recorded


_MOMENT = 1e-9  # seconds; a cost of 0 would mean that there is no backward


_COSTLY = ("tp_size", "tp_mode", "cp_size", "cp_mode", "ep_size", "activation_checkpointing")
"""fields of a modality by which stages of equal names take unlike times"""


def about(plan: Plan, num_microbatches: int) -> dict[str, Any]:
    """Return what tells runs apart whose stages have equal names, and take other times; plain values by name."""
    figures: dict[str, Any] = {"num_microbatches": num_microbatches, "parameters": sum(plan.sizes.values())}
    for name, modality in plan.modalities.items():
        figures |= {f"modalities.{name}.{path_of(field)}": value_of(modality, field) for field in _COSTLY}
    plain: dict[str, Any] = json.loads(json.dumps(figures, default=str))
    return plain


def _ran(plan: Plan, schedule: AnySchedule, count: int, trainable: frozenset[str]) -> Schedule:
    """For each rank that leads others, or itself, the actions of them all: see `Topology.lead_of_rank`."""
    built: dict[tuple[int, ...], Schedule] = {}
    ran: Schedule = {}
    for lead in sorted(set(plan.topology.lead_of_rank.values())):
        replicas = plan.topology.connected_replicas(lead)
        if replicas not in built:
            built[replicas] = plan.graphs.schedule(schedule, count, trainable, rank=lead)[1]
        ran[lead] = built[replicas][lead]
    return ran


def _gathered(recorder: Recorder, plan: Plan, ran: Schedule, count: int, rank: int, wire: torch.device) -> list[Span]:
    """The spans of all leads. All ranks know the actions, so only times are gathered; the first rank's time counts."""
    times = recorder.times()
    by_rank = {other: plan.topology.actions_of(other, ran, count) for other in range(plan.layout.size)}
    rows = [times[action] for action in by_rank[rank]]
    rows += [(0.0, 0.0)] * (max(map(len, by_rank.values())) - len(rows))
    table = torch.tensor(rows, dtype=torch.float64, device=wire)
    spans: dict[tuple[int, Action], Span] = {}
    for (other, actions), gathered in zip(by_rank.items(), of_all_ranks(table).tolist(), strict=True):
        lead = plan.topology.lead_of_rank[other]
        for action, moments in zip(actions, gathered, strict=False):  # later rows are padding
            spans.setdefault((lead, action), Span(lead, action, *moments))
    return list(spans.values())


def _costed(graph: Graph, seen: Simulation) -> Graph:
    """The graph with the median measured times as its costs."""
    seconds: dict[tuple[StageKey, int, Kind], list[float]] = {}
    for span in seen.spans:
        seconds.setdefault((span.action.stage, span.rank, span.action.kind), []).append(span.end - span.start)
    times = {key: statistics.median(values) for key, values in seconds.items()}

    def of(stage: StageKey, rank: int, kind: Kind) -> float:
        return max(times.get((stage, rank, kind), 0.0), 0.0)

    nodes = []
    for node in graph.nodes:
        key = node.stage, node.rank
        weight = of(*key, Kind.W)
        backward = max(of(*key, Kind.B), of(*key, Kind.I) + weight, _MOMENT) if graph.has_backward(node.stage) else 0.0
        nodes.append(replace(node, forward_cost=of(*key, Kind.F), backward_cost=backward, weight_cost=weight))
    return Graph(tuple(nodes), graph.edges)


def _side_by_side(seen: Simulation, simulated: Simulation) -> Simulation:
    """Both in one: rank r is row ``2 * r`` as measured and row ``2 * r + 1`` as simulated."""
    parts = (seen, simulated)
    spans = [replace(span, rank=2 * span.rank + which) for which, part in enumerate(parts) for span in part.spans]
    return Simulation(
        spans=tuple(sorted(spans, key=lambda span: (span.start, span.rank))),
        makespan=max(part.makespan for part in parts),
        busy={2 * rank + which: time for which, part in enumerate(parts) for rank, time in part.busy.items()},
        bubble={2 * rank + which: share for which, part in enumerate(parts) for rank, share in part.bubble.items()},
        peak_activations={
            2 * rank + which: peak for which, part in enumerate(parts) for rank, peak in part.peak_activations.items()
        },
    )


FEATURE = Timeline
