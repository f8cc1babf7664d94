"""What ``mm5d inspect``, ``mm5d simulate`` and ``mm5d dryrun`` print and write."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.groups import path_of, value_of
from lightning_mm5d.config.modality import Modality, for_schedule
from lightning_mm5d.config.tables import Page, Table, memory_text, spans
from lightning_mm5d.engine.run_groups import communicators, wanted_groups
from lightning_mm5d.features.timeline.drawing import COSTS, SECONDS, WORK, TimeUnit, chrome_trace, draw
from lightning_mm5d.features.unlike_pipelines.pipelines import UNLIKE_SCHEDULES
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import SCHEDULES, AnySchedule, Graph, name_of
from lightning_mm5d.strategy import MultimodalStrategy
from lightning_mm5d.tools.cli.cluster_file import read_cluster
from lightning_mm5d.tools.cli.cluster_plan import nodes_of, quiet, search_of
from lightning_mm5d.tools.cli.configuration import Source
from lightning_mm5d.tools.cli.estimates import first_samples, step_of, tracer
from lightning_mm5d.tools.cli.job import Job, check_name, durations, load
from lightning_mm5d.tools.cli.terminal import show, unwritable, warn
from lightning_mm5d.tools.dryrun.dry_rank import DryRun, DryRuns
from lightning_mm5d.tools.planner.inspect import as_json, holdings, memory_table, options_table, report, warnings
from lightning_mm5d.tools.planner.layout_costs import Cluster, LayoutCosts
from lightning_mm5d.tools.planner.outcomes import (
    STAGES_NOTE,
    Outcome,
    Sends,
    compare,
    comparison,
    num_stages,
    ranks,
    sketch,
)
from lightning_mm5d.tools.planner.rank_memory import RankMemory, memory_of

_FORWARDS = TimeUnit("units", "units of a forward on one rank of any modality")
_MIXED = TimeUnit("units", "units of the given costs, 1 where none is given")

MOST_FORWARDS = 3000
"""of a step for which all schedules are compared, at about a millisecond each and schedule"""
_TOO_MANY = 100_000
"""forwards of a step that take about a minute under the simplest schedule"""


def inspect(arguments: Namespace, source: Source) -> None:
    """Print which rank holds what."""
    job = load(source)
    strategy, module, plan = job.strategy, job.module, job.plan
    assert module is not None
    assert plan is not None
    step, notes = step_of(job, plan)
    memory = memory_of(plan, step)
    if arguments.json:
        print(json.dumps(as_json(holdings(plan, module), memory), indent=2))
    else:
        name = name_of(strategy.schedule)
        page = report(plan, module, schedule=name, num_microbatches=strategy.usual_microbatches())
        show([*page, memory_table(memory), *notes, _communicators(plan), options_table(plan, step)])
    warn(warnings(plan.layout))


def _communicators(plan: Plan) -> str:
    most, splits = communicators(wanted_groups(plan))
    return (
        f"On NCCL a rank has at most {most + 1} communicators, that of all ranks included, made by {splits} splits. "
        "Each may take up to half a gigabyte of its device"
    )


def simulate(arguments: Namespace, source: Source) -> None:
    """Print what every schedule would do, and write pictures and traces of the configured one."""
    cluster = None if arguments.cluster is None else read_cluster(arguments.cluster)
    job = load(source, world=None if cluster is None else (cluster.ranks, cluster.nodes))
    if job.refused is not None:
        raise job.refused
    _check_size(job.strategy)
    priced = None if cluster is None else _priced(job, cluster, arguments)
    job = job._replace(modalities=_costed(job, arguments.cost))
    frozen = _frozen(job, arguments.frozen)
    configured = job.strategy.schedule
    graph, sends = partial(_graph, job, frozen=frozen, priced=priced), _sends(priced)
    schedules, left_out = _compared(graph(configured), configured, unlike=bool(job.strategy.layout.pipelines))
    outcomes = compare(graph, schedules, sends)
    at = schedules.index(configured)
    if configured == "auto" and job.module is not None:  # training chooses the order only, not the placement
        outcomes[at : at + 1] = compare(graph(configured), [configured], sends)
    chosen, unit = outcomes[at], _unit(job) if priced is None else SECONDS
    for path in arguments.out:
        _write(chosen, path, unit)
    if arguments.json:
        print(json.dumps([outcome.as_json() for outcome in outcomes]))
    else:
        show(_simulated(job, outcomes, chosen, unit))
    warn([*_chunks_missing(job, chosen), *left_out])


class _Priced(NamedTuple):
    """What layers and messages cost on a cluster.

    Attributes:
        costs: of layers.
        sends: of each graph that was made, how long its messages take.
    """

    costs: LayoutCosts
    sends: dict[Graph, Sends]


def _priced(job: Job, cluster: Cluster, arguments: Namespace) -> _Priced:
    path = str(arguments.cluster)
    if job.module is None:
        raise ConfigError(
            "--cluster", path, "Seconds are those of a model's layers", "Add the model to the configuration"
        )
    if arguments.cost is not None:
        raise ConfigError("--cluster", path, "Durations are given, or those of a cluster", "Leave out --cost")
    with quiet():
        return _Priced(search_of(job, cluster, None, tracer(job))[0].costs, {})


def _sends(priced: _Priced | None) -> Callable[[Graph], Sends | float]:
    return (lambda _: 0.0) if priced is None else priced.sends.__getitem__


def _check_size(strategy: MultimodalStrategy) -> None:
    """Refuse a step whose simulation would hardly end."""
    layout, count = strategy.layout, strategy.usual_microbatches()
    forwards = sum(layout.microbatches(count)) * sum(modality.num_cuts for modality in strategy.modalities.values())
    if forwards > _TOO_MANY:
        rule = f"A step has {forwards} forwards then, on {layout.size} ranks, and more than {_TOO_MANY} take minutes"
        fix = f"Use {_TOO_MANY * count // forwards}" if count * _TOO_MANY >= forwards else "Name fewer replicas"
        raise ConfigError("batching.num_microbatches", count, rule, fix)


def _compared(graph: Graph, configured: AnySchedule, *, unlike: bool) -> tuple[list[AnySchedule], list[str]]:
    """The schedules to be shown: all, or the quickly built ones of a large graph, with a warning that says so."""
    schedules: list[AnySchedule] = [*SCHEDULES, *([configured] if configured not in SCHEDULES else [])]
    if unlike:
        schedules = [schedule for schedule in schedules if schedule in UNLIKE_SCHEDULES]
    forwards = sum(len(node.microbatches) for node in graph.nodes)
    if forwards <= MOST_FORWARDS:
        return schedules, []
    quick = [schedule for schedule in schedules if schedule in ("gpipe", "1f1b", configured)]
    names = ", ".join(name_of(schedule) for schedule in schedules if schedule not in quick)
    return quick, [f"{names} are left out, which take minutes for {forwards} forwards: configure one to see it"]


def _costed(job: Job, given: str | None) -> dict[str, Modality]:
    """The modalities of the configuration with the costs of ``--cost``."""
    modalities = dict(job.modalities)
    modalities |= {name: replace(modalities[name], cost=cost) for name, cost in durations(given, modalities).items()}
    without = [name for name, modality in modalities.items() if modality.cost is None]
    if job.module is not None and 0 < len(without) < len(modalities):
        got = {name: modality.cost for name, modality in modalities.items() if modality.cost is not None}
        rule = f"Those of {', '.join(without)} would be estimated in another unit"
        raise ConfigError("cost", got, rule, "Give a cost for every modality, or for none")
    return modalities


def _frozen(job: Job, given: str | None) -> frozenset[str]:
    names = given.split(",") if given is not None else []
    if names and job.module is not None:
        rule = "There is a model, which says by requires_grad what is frozen"
        raise ConfigError("--frozen", given, rule, "Freeze it there, or leave the model out of the configuration")
    for name in names:
        check_name("--frozen", name, job.modalities)
    return frozenset(names)


def _graph(job: Job, schedule: AnySchedule, frozen: frozenset[str], priced: _Priced | None) -> Graph:
    """The graph of stages as `schedule` wants them.

    ``interleaved`` and ``zbv`` are given two chunks of the loss modality a rank where the user said nothing about
    chunks, and the model has the layers for it.
    """
    strategy, module, written, *_ = job
    loss_modality = strategy.layout.loss_modality
    wanted = for_schedule(written, "zbv" if schedule == "interleaved" else schedule, loss_modality)
    if module is None:
        v_shaped = schedule == "zbv"
        return sketch(strategy.layout, wanted, strategy.usual_microbatches(), frozen=frozen, v_shaped=v_shaped)
    placed = copy(strategy)
    placed.schedule, placed.modalities = schedule, wanted
    try:
        plan = placed.plan(module)
    except ConfigError:
        placed.modalities = dict(written)
        plan = placed.plan(module)
    if priced is None:
        return plan.graphs.full_graph(schedule, strategy.usual_microbatches(), module)
    costs, plan = priced.costs, replace(plan, v_shaped=schedule == "zbv")
    graph = costs.timed(plan, costs.samples).graphs.full_graph(schedule, strategy.usual_microbatches(), module)
    priced.sends[graph] = costs.sends(plan, costs.samples)
    return graph


def _simulated(job: Job, outcomes: Sequence[Outcome], chosen: Outcome, unit: TimeUnit) -> Page:
    strategy, loss_modality = job.strategy, job.strategy.layout.loss_modality
    unit = unit.fitted(max(outcome.simulation.makespan for outcome in outcomes))
    longest = unit.text(max(chosen.simulation.busy.values()))
    stages = {num_stages(outcome.graph, loss_modality) for outcome in outcomes}
    return [
        f"microbatches: {strategy.layout.microbatches_text(strategy.usual_microbatches())}, "
        f"ranks: {strategy.layout.size}, "
        f"times in {unit.meaning}",
        comparison(outcomes, configured=chosen.schedule, loss_modality=loss_modality, unit=unit),
        *([STAGES_NOTE] if len(stages) > 1 else []),
        f"* {_summary(chosen, unit)}, the busiest rank works {longest} {unit.symbol}",
        ranks(chosen, unit),
    ]


def _summary(outcome: Outcome, unit: TimeUnit) -> str:
    makespan = f"{unit.text(outcome.simulation.makespan)} {unit.symbol}"
    return f"{outcome.schedule}: makespan {makespan}, ranks idle {outcome.bubble:.1%} of a step"


def _unit(job: Job) -> TimeUnit:
    costed = [modality.cost is not None for modality in job.modalities.values()]
    if all(costed):
        return COSTS
    if job.module is not None:
        return WORK
    return _MIXED if any(costed) else _FORWARDS


def _write(outcome: Outcome, path: Path, unit: TimeUnit) -> None:
    try:
        if path.suffix == ".json":
            chrome_trace(outcome.simulation, path, unit=unit)
        else:
            title = _summary(outcome, unit.fitted(outcome.simulation.makespan))
            draw(outcome.simulation, path, title=title, unit=unit)
    except OSError as error:
        raise unwritable("--out", path, error) from error
    except (ImportError, ValueError) as error:
        raise ConfigError("--out", str(path), f"It cannot be drawn: {error}", "Try a .json file") from error


def _chunks_missing(job: Job, chosen: Outcome) -> list[str]:
    """A warning where training would have fewer stages than are shown, since `pp_chunks` is not set."""
    loss_modality = job.strategy.layout.loss_modality
    modality, shown = job.strategy.modalities[loss_modality], num_stages(chosen.graph, loss_modality)
    if job.module is None or shown == modality.num_cuts:
        return []
    chunks = shown // modality.stages
    return [
        f"{chosen.schedule} is shown with {chunks} stages of {loss_modality} on a rank, and training would have "
        f"{modality.pipeline.pp_chunks}: set modalities.{loss_modality}.pipeline.pp_chunks to {chunks}"
    ]


_UNCOVERED = ("compile", "cache_features")
"""fields of a modality that a dry run does not follow where they are set"""


def dryrun(arguments: Namespace, source: Source) -> None:
    """Run one rank, or one of each class, and print what was found."""
    job = load(source, world=None if arguments.world is None else nodes_of("--world", arguments.world))
    if job.refused is not None:
        raise job.refused
    module, plan, world = job.module, job.plan, job.strategy.own_world_size
    assert module is not None
    assert plan is not None
    _check(module, plan)
    if not 0 <= arguments.rank < world:
        raise ConfigError("--rank", arguments.rank, f"There are {world} ranks", f"Name one from 0 to {world - 1}")
    first_samples(job)  # refuses what has no data
    classes = ranks_by_class(plan) if arguments.all else {arguments.rank: [arguments.rank]}
    step, notes = step_of(job, plan)
    estimates, runs = memory_of(plan, step), DryRuns(job)
    dry_runs = [runs.of(rank) for rank in classes]
    if arguments.json:
        print(json.dumps([{**_plain(run, plan), "equal_ranks": classes[run.rank]} for run in dry_runs], indent=2))
    else:
        pages = [_shown(run, classes[run.rank], plan, estimates[run.rank]) for run in dry_runs]
        show([*(part for page in pages for part in page), *notes])


def ranks_by_class(plan: Plan) -> dict[int, list[int]]:
    """Return, by their first one, the ranks with equal work: equal stages and places in them, in any replica."""
    classes: dict[Any, list[int]] = {}
    for rank in range(plan.layout.size):
        places = sorted((place.modality, place.pp, place.cp, place.tp) for place in plan.layout.places_of(rank))
        classes.setdefault(tuple(places), []).append(rank)
    return {ranks[0]: ranks for ranks in classes.values()}


def _check(module: LightningModule, plan: Plan) -> None:
    """Refuse what a dry run cannot answer for."""
    for name, modality in plan.modalities.items():
        for field in _UNCOVERED:
            if value := value_of(modality, field):
                raise _uncovered(f"modalities.{name}.{path_of(field)}", value)
    if not module.automatic_optimization:
        raise _uncovered("automatic_optimization", False)


def _uncovered(field: str, value: Any) -> ConfigError:
    rule = "A dry run does not cover it: other ranks cannot be answered for there, or numbers depend on values"
    return ConfigError(field, value, rule, "Leave it out for the dry run, or ask mm5d inspect for an estimate")


def sent_over(run: DryRun, ranks_per_node: int) -> dict[str, Counter[str]]:
    """Return messages and bytes that a rank sends inside its node and between nodes; a group counts where it spans."""
    sent = {kind: Counter(messages=0, bytes=0) for kind in ("inside", "between")}
    for (_, to, _), (count, size) in run.messages.items():
        nodes = {rank // ranks_per_node for rank in ([run.rank, to] if isinstance(to, int) else to)}
        sent["inside" if len(nodes) == 1 else "between"].update(messages=count, bytes=size)
    return sent


def _plain(run: DryRun, plan: Plan) -> dict[str, Any]:
    sent = [{"group": group, "to": to, "what": what, "sent": sent} for (group, to, what), sent in run.messages.items()]
    links = sent_over(run, plan.layout.ranks_per_node)
    return {"rank": run.rank, "memory": run.memory, "seconds": run.seconds, "messages": sent, "links": links}


def _shown(run: DryRun, equal: list[int], plan: Plan, estimate: RankMemory) -> Page:
    stages = ", ".join(map(str, plan.topology.stages_of(run.rank)))
    same = f", as ranks {spans(equal, 8)}" if len(equal) > 1 else ""
    seconds = " and ".join(f"{second:.1f} s" for second in run.seconds)
    guesses = {kind: getattr(estimate, kind) for kind in run.memory}
    memory = [
        (kind, memory_text(size), "-" if guesses[kind] is None else memory_text(guesses[kind]))
        for kind, size in run.memory.items()
    ]
    sent = [
        (group, spans([to] if isinstance(to, int) else to, 4), what, count, memory_text(size))
        for (group, to, what), (count, size) in run.messages.items()
    ]
    inside, between = sent_over(run, plan.layout.ranks_per_node).values()
    links = [("inside its node", inside), ("between nodes", between), ("all", inside + between)]
    return [
        f"rank {run.rank}: {stages}{same}; its host took {seconds} for two steps",
        Table.of(("memory", "dry run", "estimate"), memory),
        Table.of(("a step sends", "ranks", "what", "messages", "bytes"), sent),
        Table.of(
            ("links", "messages", "bytes"),
            [(name, counts["messages"], memory_text(counts["bytes"])) for name, counts in links],
        ),
    ]
