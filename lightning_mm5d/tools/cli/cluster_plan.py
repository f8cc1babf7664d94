"""``mm5d plan``: searches layouts for the ranks of a cluster, prints the best five and writes the first.

``--from`` takes costs from the file that `timeline` wrote, the actions of one training step of the configured layout.
What its stages took, less the exchanges that the model of links gives their layers, over what the roofline gives them
is the scale of all of their layers. So layouts that cut elsewhere, or that share layers out over other ranks, are
compared by measured layers. A file that no run wrote, or one of another layout or model, is refused.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from lightning_mm5d.config.checks import check_count
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.groups import OF_MODALITY, PipelineTemplate, path_of, value_of, with_fields
from lightning_mm5d.config.modality import Modality, for_schedule, loss_modality_of
from lightning_mm5d.config.tables import Table, bytes_of, memory_text
from lightning_mm5d.features.shared_experts.experts import find_experts
from lightning_mm5d.features.timeline.feature import about
from lightning_mm5d.partition.costs import stage_costs, units
from lightning_mm5d.partition.find import find
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import SCHEDULES, check_fields, name_of
from lightning_mm5d.strategy import MultimodalStrategy
from lightning_mm5d.tools.cli.cluster_file import device_here, read_cluster
from lightning_mm5d.tools.cli.configuration import Source
from lightning_mm5d.tools.cli.estimates import first_microbatch, first_samples, may_share, step_of, tracer
from lightning_mm5d.tools.cli.job import STRATEGY, Job, durations, load
from lightning_mm5d.tools.cli.terminal import check_writable, reason, show, warn, write
from lightning_mm5d.tools.planner.activation_trace import Trace
from lightning_mm5d.tools.planner.inspect import plan_maker
from lightning_mm5d.tools.planner.layout_costs import Cluster, LayoutCosts
from lightning_mm5d.tools.planner.profile import Measured, measure, measure_update
from lightning_mm5d.tools.planner.rank_memory import span_of
from lightning_mm5d.tools.planner.search import (
    Candidate,
    Judged,
    LayoutSearch,
    check_searched,
    words,
)

NODE = 8
"""ranks of a node where no file says how many"""


def plan(arguments: Namespace, source: Source) -> None:
    """Search layouts for a cluster, print them and write the best."""
    _check_sources(arguments)
    check_writable("--write", arguments.write)
    run = None if arguments.run is None else read_run(arguments.run)
    cluster = _cluster(arguments)
    world = None if cluster is None else (cluster.ranks, cluster.nodes)
    job = load(source, with_memory=arguments.measure, world=world)
    if cluster is None:
        per_node, size = job.strategy.num_processes, job.strategy.own_world_size
        memory = _memory(arguments) or sys.maxsize
        cluster = Cluster(nodes=size // per_node, ranks=per_node, memory=memory, **device_here())
    traced = tracer(job)
    with quiet():
        scaled = partial(_scaled, job, arguments, run, notes := list[str]())
        search, replica_batch = search_of(job, cluster, arguments.batch, traced, scaled)
        layouts = search.best()
    if not layouts:
        raise search.refusal()
    warn(notes)
    text = layout_file(layouts[0].candidate, job, source, cluster, replica_batch)
    if arguments.write is not None:
        write("--write", arguments.write, text)
    configured, why_not = _configured_layout(job, search, layouts[0])
    if arguments.json:
        best, *others = map(_numbers, layouts)
        instead_of = {"configured": configured and _numbers(configured), "why_not": why_not}
        searched = {"simulated": search.tried, "left": search.left}
        print(json.dumps([{**best, **instead_of, **searched}, *others]))
        return
    rows = []
    for number, layout in enumerate(layouts, 1):
        seconds, bubble = layout.time
        speeds = f"{1e3 * seconds:.4g}", f"{search.batch / seconds:.4g}", memory_text(layout.memory.peak)
        rows.append((number, *speeds, f"{bubble:.1%}", f"{layout.exposed / seconds:.1%}", words(layout.candidate)))
    head = ("", "step (ms)", "samples/s", "fullest rank", "idle", "waits for links", "layout")
    limit = "any" if cluster.memory == sys.maxsize else memory_text(cluster.memory)
    flops = cluster.flops * cluster.efficiency
    assumed = (
        f"\nTimes are those of devices of {flops:.3g} flops and {cluster.memory_bandwidth:.3g} bytes a second, "
        "and of usual links: --cluster names those that `mm5d doctor --links` measures"
    )
    show(
        [
            f"ranks: {cluster.size} on {cluster.nodes} nodes, memory: {limit}, samples of a step: {search.batch}, "
            f"layouts simulated: {search.tried}{'' if arguments.cluster else assumed}",
            Table.of(head, rows),
            *([] if run is None else [f"The step that {run.path} shows took {1e3 * run.seconds:.4g} ms"]),
            *_left(search, layouts[0]),
            why_not,
            *_not_searched(job.modalities),
            text,
        ]
    )


def _left(search: LayoutSearch, best: Judged) -> list[str]:
    """What is known of layouts that were not tried, where one may be faster than those that are shown."""
    if search.left is None:
        return []
    bound = f"{1e3 * search.left:.4g} ms, {search.left / best.time.seconds:.2f} times the step of the best"
    return [f"The search ended at its limit: steps of layouts that it left take at least {bound}"]


def _not_searched(modalities: Mapping[str, Modality]) -> list[str]:
    """Settings of a layout that proposals are without, since the search does not choose them."""
    settings = [
        f"modalities.{name}.{path_of(field)}: {value_of(modality, field)}"
        for name, modality in modalities.items()
        for field in ("inner_ring_size", "tp_mode", "expert_tp_size")
        if value_of(modality, field) != value_of(_free(modality, None), field)
    ]
    return [f"Not searched, and left out of the layouts above: {', '.join(settings)}"] if settings else []


@contextmanager
def quiet() -> Generator[None, None, None]:
    """Without warnings of layouts that are only tried."""
    logger = logging.getLogger("lightning_mm5d")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _memory(arguments: Namespace) -> int | None:
    return None if arguments.memory is None else bytes_of("--memory", arguments.memory)


def _cluster(arguments: Namespace) -> Cluster | None:
    """The cluster of a file, or one of usual links; None for the configured ranks."""
    memory, size = _memory(arguments), arguments.ranks
    if arguments.cluster is not None:
        cluster = read_cluster(arguments.cluster)
        if size not in (None, cluster.size):
            rule = f"{arguments.cluster} has {cluster.nodes} nodes of {cluster.ranks} ranks"
            raise ConfigError("--ranks", size, rule, f"Use --ranks {cluster.size}, or change nodes and ranks there")
        return replace(cluster, memory=memory or cluster.memory)
    if size is None:
        return None
    ranks, nodes = nodes_of("--ranks", size)
    return Cluster(nodes=nodes, ranks=ranks, memory=memory or sys.maxsize, **device_here())


def nodes_of(option: str, size: int) -> tuple[int, int]:
    """Return the ranks of each node and the number of nodes of so many ranks; raise ConfigError where nodes differ."""
    check_count(option, size)
    if size > NODE and size % NODE:
        rule, fix = f"Where no file says how many, nodes have {NODE} ranks", f"Use {size - size % NODE}"
        raise ConfigError(option, size, rule, fix)
    return min(size, NODE), -(-size // NODE)


def _check_sources(arguments: Namespace) -> None:
    """Refuse several sources of durations."""
    sources = {"--cost": arguments.cost, "--measure": arguments.measure or None, "--from": arguments.run}
    options = [option for option, value in sources.items() if value is not None]
    if len(options) > 1:
        rule, fix = "Durations are measured here, or given, or those of a run", f"Leave out {' or '.join(options)}"
        raise ConfigError(options[1], str(sources[options[1]]), rule, fix)


def _scaled(
    job: Job, arguments: Namespace, run: MeasuredRun | None, notes: list[str], costs: LayoutCosts
) -> LayoutCosts:
    """The costs by what is measured or given; what cannot be measured is noted."""
    if run is not None:
        return replace(costs, scales=measured_scales(run, job.plan, costs), known={})
    told: dict[str, Sequence[Measured]] = {}
    update: float | None = None
    if arguments.measure:
        assert job.module is not None
        if torch.cuda.is_available():
            job.module.to("cuda")
        parts = find(job.module, job.strategy.modalities)
        told |= measure(job.module, first_microbatch(job), parts, costs.rows)
        why = "configure_optimizers fails here"
        if costs.step.states is not None:
            try:
                update = measure_update(costs.step.states, costs.step.updated)
            except Exception as error:  # a user's optimizer, or too little memory
                why = reason(error)
        if update is None:
            notes.append(f"The step of the optimizers is estimated, since it could not be measured: {why}")
    else:
        told |= {name: [Measured(total)] for name, total in durations(arguments.cost, job.modalities).items()}
    return costs.measured(told, loss_modality_of(job.modalities), update)


def search_of(
    job: Job,
    cluster: Cluster,
    batch: int | None,
    traced: Callable[[Plan], Trace],
    scaled: Callable[[LayoutCosts], LayoutCosts] = lambda costs: costs,
    *,
    replicas: int | None = None,
) -> tuple[LayoutSearch, int]:
    """Return the search of a job, and the samples of a replica's batch as its data have them.

    Args:
        job: what to train.
        cluster: its ranks.
        batch: samples of a step; those configured where unset.
        traced: as `tracer` returns it.
        scaled: returns costs by what is measured.
        replicas: whose samples make a step where `batch` is unset; those of the configured layout, or as many as fit.

    Raises:
        ConfigError: the search cannot lay out the modalities, or no first batch tells of tokens.
    """
    strategy, module = job.strategy, job.module
    assert module is not None
    check_searched(job.modalities)
    samples, each = first_samples(job)
    loss, loaded = loss_modality_of(job.modalities), strategy.microbatching == "loader"
    base = {name: _free(modality, None if name == loss else loss) for name, modality in job.modalities.items()}

    def accepted(candidate: Candidate) -> Plan:
        modalities = dict(candidate.modalities)
        check_fields(
            {"modalities": modalities, "schedule": candidate.schedule, "num_microbatches": candidate.microbatches}
        )
        placed = copy(strategy)
        lay_out(placed, modalities, candidate.schedule, candidate.microbatches)
        return placed.validate(module)

    plan = accepted(Candidate(base, "1f1b", each, 1))
    plan_of, experts = plan_maker(plan, module), dict[str, int]()
    sharded = dict(base)
    for name in base:
        with suppress(ConfigError):
            tried = replace(base[name], tp_size=2)
            if plan.partition.parts[name].paths and accepted(Candidate({**base, name: tried}, "1f1b", each, 1)):
                sharded[name] = tried
        with suppress(ConfigError):  # it has no experts, or no two ranks share them
            plan_of({**base, name: replace(base[name], ep_size=2)})
            layers = find_experts(module, plan.partition, {name: replace(base[name], ep_size=2)}).values()
            experts[name] = min(layer.number for layer in layers)
    step, notes = step_of(job, plan, traced)
    if step.trace is None or (step.states is None and cluster.memory < sys.maxsize):
        raise ConfigError("CONFIG", "a step", notes[0], "Layouts are compared by what a step computes and keeps")
    two = step.trace
    if sharded != base or experts:
        with_experts = {
            name: replace(modality, ep_size=2) if name in experts else modality for name, modality in sharded.items()
        }
        two = traced(plan_of(with_experts))
    rows = units(module, find(module, plan.modalities))
    costs = scaled(LayoutCosts(cluster, step.trace, two, each, rows, step))
    own_ranks = sum(modality.own_ranks_per_replica for modality in job.modalities.values())
    if replicas is None:
        fitting = job.modalities[loss].dp_size or max(cluster.size // own_ranks, 1)
        replicas = fitting if job.plan is None else job.plan.layout.num_replicas
    if batch is not None:
        check_count("--batch", batch)
    replica_batch = each * strategy.usual_microbatches() if loaded else samples
    able = batch is not None or loaded or sets_batch(job, replica_batch)
    search = LayoutSearch(
        plan,
        costs,
        batch or replica_batch * replicas,
        cluster.memory,
        accepted,
        plan_of,
        batches=(lambda _: True) if able else (lambda size: size == replica_batch),
        samples=each if loaded else None,
        shares=may_share(step),
        experts=experts,
    )
    return search, replica_batch


def lay_out(strategy: MultimodalStrategy, modalities: Mapping[str, Modality], schedule: str, microbatches: int) -> None:
    """Give a strategy another layout, before it runs."""
    vars(strategy).pop("layout", None)
    strategy.schedule = schedule
    strategy.modalities = for_schedule(modalities, schedule, loss_modality_of(modalities))
    strategy.num_microbatches, strategy.microbatch_size = microbatches, None


def _free(modality: Modality, owner: str | None) -> Modality:
    """A modality without its layout, on the ranks of its owner."""
    sizes: dict[str, Any] = dict.fromkeys(("dp_size", "pp_size", "pipeline_template", "cost", "ulysses_size"))
    sizes |= dict.fromkeys(("tp_size", "cp_size", "ep_size", "expert_tp_size", "pp_chunks", "tp_depth"), 1)
    return with_fields(modality, **sizes, tp_mode="1d", inner_ring_size=None, colocate_with=owner)


def sets_batch(job: Job, size: int) -> bool:
    """Whether the configuration can say how many samples a batch has."""
    data = job.data
    return getattr(data, "batch_size", None) == size and "batch_size" in inspect.signature(type(data)).parameters


def layout_file(candidate: Candidate, job: Job, source: Source, cluster: Cluster, replica_batch: int) -> str:
    """The layout as a file that lies over the configuration."""
    modalities, schedule, samples, count = candidate
    settings = {name: said_of(modality, job.modalities[name]) for name, modality in modalities.items()}
    batching: dict[str, Any] = {"num_microbatches": count}
    batching |= {"microbatch_size": None} if job.strategy.microbatch_size is not None else {}
    arguments: dict[str, Any] = {"modalities": settings, "schedule": schedule, "batching": batching}
    arguments |= {"timeline": None} if job.strategy.timeline is not None else {}  # that of the configured layout stays
    strategy = {"class_path": STRATEGY, "init_args": arguments}
    content: dict[str, Any] = {"trainer": {"devices": cluster.ranks, "num_nodes": cluster.nodes, "strategy": strategy}}
    batch_size, note = samples * count, ""
    if batch_size != replica_batch and job.strategy.microbatching != "loader":
        note = f"# each replica takes {batch_size} samples of a batch, and the data have {replica_batch}\n"
        if sets_batch(job, replica_batch):
            kind, note, size = type(job.data), "", {"batch_size": batch_size}
            path = f"{kind.__module__}.{kind.__qualname__}"
            content["data"] = {"class_path": path, "init_args": size} if source.names_data else size
    return note + yaml.safe_dump(content, sort_keys=False)


def said_of(modality: Any, instead_of: Any) -> dict[str, Any]:
    """Return the fields of a modality that are not at their defaults, or were not, as plain values, in their groups.

    A LightningCLI lays one file over another field by field, so what is no longer set must be said too.
    """
    settings: dict[str, Any] = {}
    for each in fields(modality):
        value, before = getattr(modality, each.name), getattr(instead_of, each.name)
        if each.name in OF_MODALITY:
            if inner := said_of(value, before):
                settings[each.name] = inner
        elif isinstance(value, PipelineTemplate):
            had_offsets = before is not None and before.offsets is not None
            settings[each.name] = {"stages": value.stages, **({"offsets": None} if had_offsets else {})}
        elif value != each.default or before != each.default:
            settings[each.name] = value
    return settings


def _numbers(best: Judged) -> Mapping[str, Any]:
    """A layout as JSON; times in seconds, memory in bytes."""
    return {"layout": words(best.candidate), **best.time._asdict(), "exposed": best.exposed, "peak": best.memory.peak}


def _configured_layout(job: Job, search: LayoutSearch, best: Judged) -> tuple[Judged | None, str]:
    """The configured layout, where it can be compared, and what keeps it from being the best."""
    if job.refused is not None:
        return None, f"The configured layout cannot run on these ranks. {job.refused}"
    count = job.strategy.usual_microbatches()
    assert job.plan is not None
    if job.strategy.schedule not in SCHEDULES:
        return None, "The configured schedule is a table or a function, which is for one layout: it is not compared"
    size = max(search.batch // job.plan.layout.num_replicas // count, 1)
    candidate = Candidate(job.plan.modalities, name_of(job.strategy.schedule), size, count)
    try:
        judged = replace(search, memory=2**62).judged(candidate)
    except ConfigError as error:
        return None, f"The configured layout is refused. {error}"
    judged = replace(judged, exposed=search.exposed(judged))
    seconds, bubble = judged.time
    text = f"The configured layout ({words(candidate)}) takes {1e3 * seconds:.4g} ms, of which ranks idle {bubble:.1%}"
    text += f" and wait for links {judged.exposed / seconds:.1%}"
    if judged.memory.peak > search.memory:
        need = memory_text(judged.memory.peak)
        return judged, f"{text}. Rank {judged.memory.rank} needs {need}, more than there is"
    return judged, f"{text}: {seconds / best.time.seconds:.2f} times the step of the best"


_OPTION = "--from"
_LEAST = 1e-3  # of a stage's time, what its layers take beside exchanges


class MeasuredRun(NamedTuple):
    """A training step of a run.

    Attributes:
        path: of the file.
        seconds: from its first action to the end of its last one, over all ranks.
        stages: seconds of forward and backward of one microbatch, for each stage; medians over microbatches and ranks.
        samples: of a microbatch, on the mean.
        told: what else the timeline says of the run.
    """

    path: Path
    seconds: float
    stages: Mapping[str, float]
    samples: float
    told: Mapping[str, Any]


def read_run(path: Path) -> MeasuredRun:
    """Read what ``timeline: FILE.json`` wrote.

    Raises:
        ConfigError: it is another file, or cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        events, told = content["traceEvents"], content["otherData"]
        samples = float(told["samples"])
        labels = {event["tid"]: str(event["args"]["name"]) for event in events if event["name"] == "thread_name"}
        simulated = {row for row, label in labels.items() if label.endswith("simulated")}
        actions = [event for event in events if event["ph"] == "X" and event["tid"] not in simulated]
        times: dict[str, dict[str, list[float]]] = {}
        for event in actions:
            times.setdefault(event["args"]["stage"], {}).setdefault(event["cat"], []).append(float(event["dur"]) / 1e6)
        ends = [float(event["ts"]) + float(event["dur"]) for event in actions]
        seconds = (max(ends) - min(float(event["ts"]) for event in actions)) / 1e6
    except OSError as error:
        raise ConfigError(_OPTION, str(path), f"It cannot be read: {error.strerror}", "Name a readable file") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _other_file(path) from error
    durations = [seconds, samples, *(time for kinds in times.values() for series in kinds.values() for time in series)]
    if not simulated or not all(0 <= duration < math.inf for duration in durations) or not seconds * samples:
        raise _other_file(path)
    stages = {stage: sum(map(statistics.median, kinds.values())) for stage, kinds in times.items()}
    return MeasuredRun(path, seconds, stages, samples, told)


def _other_file(path: Path) -> ConfigError:
    rule = "It is no timeline of a run, with measured and simulated actions of each rank"
    return ConfigError(_OPTION, str(path), rule, "Train with timeline: run.json (under trainer.strategy), and name it")


def measured_scales(run: MeasuredRun, plan: Plan | None, costs: LayoutCosts) -> dict[str, list[Measured]]:
    """Return for each unit of all modalities its measured time over that of the roofline.

    Args:
        run: of the configured layout.
        plan: of that layout; None where it cannot run on the ranks of the search.
        costs: without scales.

    Raises:
        ConfigError: the run had another layout, model or number of microbatches.
    """
    if plan is None:
        rule = "It was measured with the configured layout, which cannot run on these ranks"
        raise ConfigError(_OPTION, str(run.path), rule, "Leave dp_size unset, or name as many ranks as the run had")
    expected = {"stages": sorted(plan.topology.members), **about(plan, costs.step.num_microbatches)}
    told = {**run.told, "stages": sorted(run.stages)}
    for key, configured in expected.items():
        if told.get(key) != configured:
            rule = f"There {key} is {told.get(key)}, and in the configuration {configured}"
            raise ConfigError(_OPTION, str(run.path), rule, "Give the configuration of that run")
    unscaled, doubled = (_seconds(plan, costs, scale, run.samples) for scale in (1.0, 2.0))
    scales = {name: [Measured(1.0, 1.0)] * len(row) for name, row in costs.rows.items()}
    for name, cuts in plan.partition.stages.items():
        for cut in cuts:
            stage = plan.topology.stage_of[cut.name]
            layers, span = doubled[stage] - unscaled[stage], span_of(cut, cuts)
            measured, beside = run.stages[stage], unscaled[stage] - layers
            if cut.index and name == plan.partition.loss_modality:  # what comes before the layers runs here, too
                repeated = costs.units(name, plan.modalities[name], run.samples)[0].forward
                layers -= repeated
                beside += repeated * scales[name][0].forward
            took = max(measured - beside, _LEAST * measured)
            scale = took / layers if layers > 0 else 1.0
            scales[name][span] = [Measured(scale, scale)] * len(scales[name][span])
    return scales


def _seconds(plan: Plan, costs: LayoutCosts, scale: float, samples: float) -> dict[Any, float]:
    """Seconds of a microbatch's forward and backward in each stage, with layers of `scale` times the roofline's."""
    scales = {name: [Measured(scale, scale)] * len(row) for name, row in costs.rows.items()}
    trainable = costs.step.trainable
    graphs = replace(costs, scales=scales, known={}).timed(plan, samples).graphs
    trains = graphs.trains(trainable)
    both = {key: stage_costs(graphs.timed_units[key], trainable, trains[key][1]) for key in plan.topology.members}
    return {key: forward + backward for key, (forward, backward, _) in both.items()}
