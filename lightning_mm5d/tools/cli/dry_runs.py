"""What ``mm5d dryrun`` prints: memory, messages and time of a rank that ran alone, beside the estimate."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from lightning.pytorch import LightningModule

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.tables import Page, Table, memory_text, spans
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.tools.cli.cluster_plan import nodes_of
from lightning_mm5d.tools.cli.configuration import Source
from lightning_mm5d.tools.cli.estimates import step_of
from lightning_mm5d.tools.cli.job import load
from lightning_mm5d.tools.cli.terminal import show
from lightning_mm5d.tools.dryrun.dry_rank import DryRun, DryRuns
from lightning_mm5d.tools.planner.rank_memory import RankMemory, memory_of

_COVERED: dict[str, Any] = dict(cp_size=(1,), tp_mode=("1d",), sequence_parallel=(False, True), ep_size=(1,))
_COVERED |= dict(interleaved_microbatches=(1,), compile=(False,))
_COVERED |= dict.fromkeys(("pipelines", "offload", "cache_features", "communication_dtype"), (None,))
"""values of fields of a modality that have been compared with runs"""


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
    classes = ranks_by_class(plan) if arguments.all else {arguments.rank: [arguments.rank]}
    step, notes = step_of(job, plan)
    estimates, runs = memory_of(plan, step), DryRuns(job)
    found = [runs.of(rank) for rank in classes]
    if arguments.json:
        print(json.dumps([{**_plain(run), "equal_ranks": classes[run.rank]} for run in found], indent=2))
    else:
        pages = [_shown(run, classes[run.rank], plan, estimates[run.rank]) for run in found]
        show([*(part for page in pages for part in page), *notes])


def ranks_by_class(plan: Plan) -> dict[int, list[int]]:
    """Return, by their first one, the ranks with equal work: equal stages and places in them, in any replica."""
    found: dict[Any, list[int]] = {}
    for rank in range(plan.layout.size):
        places = sorted((one.modality, one.pp, one.cp, one.tp) for one in plan.layout.places_of(rank))
        found.setdefault(tuple(places), []).append(rank)
    return {ranks[0]: ranks for ranks in found.values()}


def _check(module: LightningModule, plan: Plan) -> None:
    """Refuse what a dry run cannot answer for."""
    for name, modality in plan.modalities.items():
        for field, covered in _COVERED.items():
            if (said := getattr(modality, field)) not in covered:
                raise _uncovered(f"modalities.{name}.{field}", said)
    if not module.automatic_optimization:
        raise _uncovered("automatic_optimization", False)


def _uncovered(field: str, said: Any) -> ConfigError:
    rule = "A dry run does not cover it: other ranks cannot be answered for there, or numbers depend on values"
    return ConfigError(field, said, rule, "Leave it out for the dry run, or ask mm5d inspect for an estimate")


def _plain(run: DryRun) -> dict[str, Any]:
    sent = [{"group": group, "to": to, "what": what, "sent": sent} for (group, to, what), sent in run.messages.items()]
    return {"rank": run.rank, "memory": run.memory, "seconds": run.seconds, "messages": sent}


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
    return [
        f"rank {run.rank}: {stages}{same}; its host took {seconds} for two steps",
        Table.of(("memory", "dry run", "estimate"), memory),
        Table.of(("a step sends", "ranks", "what", "messages", "bytes"), sent),
    ]
