"""Draws what a training step did on every rank beside what the simulator says of the same actions.

Phases, on every rank: (1) all ranks hand the times of their own actions round; (2) rank 0 gives every kind of action of
every stage its median time as its cost, and plays the same lists with it; (3) it draws both, two rows a rank. So a row
pair differs by what the simulator does not know: messages on their way, and time that an action takes more than others
of its kind.

It refuses nothing; a step that some rank has not recorded is not drawn, and a file that cannot be written is a warning,
for training is over and its weights matter more.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn

from lightning_mm5d.engine.recorder import Recorder
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.planner.drawing import chrome_trace, draw
from lightning_mm5d.schedule import Graph, Kind, Schedule, Simulation, Span, measured, simulate

_MOMENT = 1e-9  # seconds, of a backward that there is and that took no time that a clock could tell


def write_timeline(
    path: str,
    recorder: Recorder,
    plan: Plan,
    schedule: str | Callable[[Graph], Schedule],
    num_microbatches: int,
    *,
    rank: int,
    wire: torch.device,
) -> None:
    """Write the last step of all ranks to `path`, a picture or, where it ends in ``.json``, a Chrome trace; collective.

    Args:
        path: of the file, which rank 0 writes.
        recorder: this rank's.
        plan: all stages.
        schedule: that ran.
        num_microbatches: M.
        rank: global rank.
        wire: where messages of the default group live.
    """
    trainable = recorder.trainable
    recorded = torch.tensor(int(trainable is not None), device=wire)
    dist.all_reduce(recorded, dist.ReduceOp.MIN)
    if trainable is None or not recorded:
        return
    ran = _ran(plan, schedule, num_microbatches, trainable)
    spans = _gathered(recorder, ran, rank, wire)
    if rank != 0:
        return
    graph = plan.graphs.graph(range(plan.layout.num_replicas), num_microbatches, trainable)
    seen = measured(spans)
    both = _side_by_side(seen, simulate(ran, _costed(graph, seen)))
    names = {
        2 * rank + which: f"{rank}  {label}"
        for rank in ran
        for which, label in enumerate((", ".join(plan.topology.stages_of(rank)), "simulated"))
    }
    try:
        (chrome_trace if path.endswith(".json") else draw)(both, path, names=names)
    except (OSError, ValueError) as error:
        rank_zero_warn(f"timeline: {path} cannot be written: {error}")


def _ran(plan: Plan, schedule: str | Callable[[Graph], Schedule], count: int, trainable: frozenset[str]) -> Schedule:
    """What each rank ran. Ranks that depend on the same replicas have one schedule."""
    built: dict[tuple[int, ...], Schedule] = {}
    ran: Schedule = {}
    for rank in range(plan.layout.size):
        replicas = plan.topology.connected_replicas(rank)
        if replicas not in built:
            built[replicas] = plan.graphs.schedule(schedule, count, trainable, rank=rank)[1]
        ran[rank] = built[replicas][rank]
    return ran


def _gathered(recorder: Recorder, ran: Schedule, rank: int, wire: torch.device) -> list[Span]:
    """The spans of all ranks. Which actions they are all ranks know, so that only times travel."""
    times = recorder.times()
    longest = max(len(actions) for actions in ran.values())
    own = torch.zeros(longest, 2, dtype=torch.float64, device=wire)
    for index, action in enumerate(ran[rank]):
        own[index] = torch.tensor(times[action], dtype=torch.float64)
    every = [torch.empty_like(own) for _ in ran]
    dist.all_gather(every, own)
    return [
        Span(rank, action, *moments)
        for (rank, actions), table in zip(ran.items(), every, strict=True)
        for action, moments in zip(actions, table.tolist(), strict=False)  # rows behind the last action are padding
    ]


def _costed(graph: Graph, seen: Simulation) -> Graph:
    """The graph with the median times of what was measured as its costs."""
    found: dict[tuple[str, int, Kind], list[float]] = {}
    for span in seen.spans:
        found.setdefault((span.action.stage, span.rank, span.action.kind), []).append(span.end - span.start)
    times = {key: statistics.median(values) for key, values in found.items()}

    def of(stage: str, rank: int, kind: Kind) -> float:
        return max(times.get((stage, rank, kind), 0.0), 0.0)

    nodes = []
    for node in graph.nodes:
        key = node.stage, node.rank
        weight = of(*key, Kind.W)
        whole = max(of(*key, Kind.B), of(*key, Kind.I) + weight, _MOMENT) if graph.has_backward(node.stage) else 0.0
        nodes.append(replace(node, forward_cost=of(*key, Kind.F), backward_cost=whole, weight_cost=weight))
    return Graph(tuple(nodes), graph.edges)


def _side_by_side(seen: Simulation, simulated: Simulation) -> Simulation:
    """Both in one, rank ``w`` as ``2 * w`` for what was measured and as ``2 * w + 1`` for what was simulated."""
    parts = (seen, simulated)
    spans = [replace(span, rank=2 * span.rank + which) for which, part in enumerate(parts) for span in part.spans]
    makespan = max(part.makespan for part in parts)
    busy = {2 * rank + which: time for which, part in enumerate(parts) for rank, time in part.busy.items()}
    return Simulation(
        spans=tuple(sorted(spans, key=lambda span: (span.start, span.rank))),
        makespan=makespan,
        busy=busy,
        bubble={2 * rank + which: share for which, part in enumerate(parts) for rank, share in part.bubble.items()},
        peak_activations={
            2 * rank + which: peak for which, part in enumerate(parts) for rank, peak in part.peak_activations.items()
        },
    )
