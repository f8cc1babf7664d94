"""What a run has measured of its stages, in the file that `timeline` wrote: costs for ``mm5d plan --from``.

The file has the actions of one training step of the configured layout. What its stages took, less the exchanges that
the model of links gives their layers, over what the roofline gives them is the scale of all of their layers. So layouts
that cut elsewhere, or that share layers out over other ranks, are compared by measured layers.

It refuses a file that no run wrote, and one of another layout or model than the configured one.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.partition.costs import stage_costs
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.tools.planner.layout_costs import LayoutCosts, span_of

_OPTION = "--from"
_LEAST = 1e-3  # of a stage's time, what its layers take beside exchanges


class MeasuredRun(NamedTuple):
    """A training step of a run.

    Attributes:
        path: of the file.
        seconds: from its first action to the end of its last one, over all ranks.
        stages: seconds of forward and backward of one microbatch, for each stage; medians over microbatches and ranks.
        microbatches: of the step, over all replicas.
    """

    path: Path
    seconds: float
    stages: Mapping[str, float]
    microbatches: int


def read_run(path: Path) -> MeasuredRun:
    """Read what ``timeline: FILE.json`` wrote.

    Raises:
        ConfigError: it is another file, or cannot be read.
    """
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        labels = {one["tid"]: str(one["args"]["name"]) for one in events if one["name"] == "thread_name"}
        simulated = {row for row, label in labels.items() if label.endswith("simulated")}
        actions = [one for one in events if one["ph"] == "X" and one["tid"] not in simulated]
        times: dict[str, dict[str, list[float]]] = {}
        for one in actions:
            times.setdefault(one["args"]["stage"], {}).setdefault(one["cat"], []).append(float(one["dur"]) / 1e6)
        ends = [float(one["ts"]) + float(one["dur"]) for one in actions]
        seconds = (max(ends) - min(float(one["ts"]) for one in actions)) / 1e6
        microbatches = {one["args"]["microbatch"] for one in actions}
    except OSError as error:
        raise ConfigError(_OPTION, str(path), f"It cannot be read: {error.strerror}", "Name a readable file") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _other_file(path) from error
    if not simulated or not seconds > 0:
        raise _other_file(path)
    stages = {stage: sum(map(statistics.median, kinds.values())) for stage, kinds in times.items()}
    return MeasuredRun(path, seconds, stages, len(microbatches))


def _other_file(path: Path) -> ConfigError:
    rule = "It is no timeline of a run, with measured and simulated actions of each rank"
    return ConfigError(_OPTION, str(path), rule, "Train with timeline: run.json (under trainer.strategy), and name it")


def measured_scales(run: MeasuredRun, plan: Plan | None, costs: LayoutCosts) -> dict[str, list[float]]:
    """Return for each unit of all modalities its measured time over that of the roofline.

    Args:
        run: of the configured layout.
        plan: of that layout; None where it cannot run on the ranks of the search.
        costs: without scales.

    Raises:
        ConfigError: the run had other stages.
    """
    if plan is None:
        rule = "It was measured with the configured layout, which cannot run on these ranks"
        raise ConfigError(_OPTION, str(run.path), rule, "Leave dp_size unset, or name as many ranks as the run had")
    stages = sorted(plan.topology.members)
    count = costs.step.num_microbatches
    if run.microbatches % count:
        rule = f"It has {run.microbatches} microbatches, and the configuration {count} for each replica"
        raise ConfigError(_OPTION, str(run.path), rule, "Give the configuration of that run")
    if sorted(run.stages) != stages:
        rule = f"It has the stages {', '.join(sorted(run.stages))}, and the configuration {', '.join(stages)}"
        raise ConfigError(_OPTION, str(run.path), rule, "Give the configuration of that run")
    alone, doubled = (_seconds(plan, costs, scale) for scale in (1.0, 2.0))
    scales = {name: [1.0] * len(row) for name, row in costs.rows.items()}
    for name, cuts in plan.partition.stages.items():
        for cut in cuts:
            stage = plan.topology.stage_of[cut.name]
            layers, span = doubled[stage] - alone[stage], span_of(cut, cuts)
            measured = run.stages[stage]
            took = max(measured - (alone[stage] - layers), _LEAST * measured)
            scales[name][span] = [took / layers if layers > 0 else 1.0] * len(scales[name][span])
    return scales


def _seconds(plan: Plan, costs: LayoutCosts, scale: float) -> dict[Any, float]:
    """Seconds of a microbatch's forward and backward in each stage, with layers of `scale` times the roofline's."""
    scales = {name: [scale] * len(row) for name, row in costs.rows.items()}
    trainable = costs.step.trainable
    graphs = replace(costs, scales=scales, known={}).timed(plan, costs.samples).graphs
    trains = graphs.trains(trainable)
    both = {key: stage_costs(graphs.timed_units[key], trainable, trains[key][1]) for key in plan.topology.members}
    return {key: forward + backward for key, (forward, backward, _) in both.items()}
