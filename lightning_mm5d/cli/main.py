"""The command ``mm5d``: plans multimodal training before it runs, without processes or process groups.

``mm5d inspect`` prints which rank holds what; ``mm5d simulate`` prints, and draws, how long ranks would idle under
every schedule; ``mm5d plan`` searches a better layout. All read the configuration of a LightningCLI (see `job`); for
``simulate`` sizes alone will do.

It refuses, in one line and with exit code 2, whatever cannot work.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from jsonargparse import ArgumentError

from lightning_mm5d.cli.job import Job, first_microbatch, load
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality, for_schedule
from lightning_mm5d.partition.costs import units
from lightning_mm5d.partition.find import find
from lightning_mm5d.planner.comparison import comparison, num_stages, ranks
from lightning_mm5d.planner.drawing import chrome_trace, draw
from lightning_mm5d.planner.inspect import as_json, holdings, report, warnings
from lightning_mm5d.planner.profile import measure
from lightning_mm5d.planner.proposal import propose
from lightning_mm5d.planner.sketch import sketch
from lightning_mm5d.schedule import SCHEDULES, AnySchedule, Graph, Outcome, ScheduleError, compare, name_of

_OPTIONS = ("--help", "--json", "--out", "--script", "--cost", "--frozen", "--measure")
_UNION = "Does not validate against any of the Union subtypes"
_NOISE = ("Subtypes:", "Errors:", "Given value", "Expected a <class 'NoneType'>", "Expected a <class 'str'>")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0, or 2 where the configuration is refused.

    Args:
        argv: the arguments, by default those of the process.
    """
    own, overrides = _split(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(own)
    try:
        arguments.run(arguments, overrides)
    except (ConfigError, ArgumentError, ScheduleError) as error:
        print(f"mm5d: error: {_one_line(str(error))}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    """A subparser for each command, whose `run` takes the arguments and what overrides the configuration."""
    parser = argparse.ArgumentParser(
        prog="mm5d", allow_abbrev=False, description="Plan multimodal training before it runs."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("configs", nargs="+", type=Path, metavar="CONFIG", help="YAML files, later ones laid on top")
    shared.add_argument(
        "--script",
        type=Path,
        help="Python file that makes the LightningCLI; found beside CONFIG where that does not name the model's class",
    )
    rest = "Further options override the configuration, for instance --trainer.devices=8."

    one = commands.add_parser("inspect", parents=[shared], epilog=rest, help="show which rank holds what")
    one.add_argument("--json", action="store_true", help="print a list with an entry per rank and modality")
    one.set_defaults(run=_inspect)

    about = (
        "Show how long ranks would idle, under every schedule and rank by rank under the configured one. A CONFIG "
        "without a model, or with nothing but the arguments of the strategy (modalities, num_microbatches, schedule), "
        "is simulated from its sizes."
    )
    one = commands.add_parser(
        "simulate", parents=[shared], epilog=rest, description=about, help="show how long ranks would idle"
    )
    one.add_argument(
        "--cost",
        metavar="NAME=NUMBER,...",
        help="duration of a forward on each pipeline rank of these modalities, instead of an estimate; without a model "
        "it is 1 where nothing is said",
    )
    one.add_argument(
        "--frozen",
        metavar="NAME,...",
        help="modalities of which nothing is trained; only where there is no model to say so by requires_grad",
    )
    one.add_argument(
        "--out",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="draw the configured schedule: a picture (.png, .svg, .pdf), or a Chrome trace for Perfetto (.json); may "
        "be given several times",
    )
    one.add_argument("--json", action="store_true", help="print what every schedule would do, rank by rank")
    one.set_defaults(run=_simulate)

    about = (
        "Search how many ranks each modality should have and which stages should share one, for the configured number "
        "of ranks, schedule and microbatches."
    )
    one = commands.add_parser("plan", parents=[shared], epilog=rest, description=about, help="search a better layout")
    one.add_argument(
        "--cost",
        metavar="NAME=NUMBER,...",
        help="duration of a forward through each whole modality, in any unit, instead of an estimate; for all of them",
    )
    one.add_argument(
        "--measure",
        action="store_true",
        help="time the forward of every layer on one microbatch of the training data, here, instead of estimating it",
    )
    one.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the modalities there, as YAML that --trainer.strategy.init_args.modalities=FILE reads",
    )
    one.add_argument("--json", action="store_true", help="print what was found as JSON")
    one.set_defaults(run=_plan)
    return parser


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments of this command, and those that override the configuration, each with its value."""
    own, overrides, rest = [], [], iter(argv)
    for argument in rest:
        if not argument.startswith("--") or argument.split("=")[0] in _OPTIONS:
            own.append(argument)
        else:
            overrides += [argument] if "=" in argument else [argument, *islice(rest, 1)]
    return own, overrides


def _one_line(message: str) -> str:
    """The message without what jsonargparse tells of types that were tried in vain."""
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    kept = " ".join(line for line in lines if not line.startswith(_NOISE)).replace(_UNION, "")
    return " ".join((" ".join(lines) if kept.rstrip().endswith(":") else kept).split())


def _inspect(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    strategy, module, *_ = load(arguments.configs, arguments.script, overrides)
    assert module is not None
    plan = strategy.plan(module)
    if arguments.json:
        print(json.dumps(as_json(holdings(plan, module)), indent=2))
    else:
        name = name_of(strategy.schedule)
        print(report(plan, module, schedule=name, num_microbatches=strategy.num_microbatches))
    _warn(warnings(plan.layout))


def _simulate(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    job = load(arguments.configs, arguments.script, overrides, sizes_will_do=True)
    job = job._replace(modalities=_costed(job, arguments.cost))
    frozen = _frozen(job, arguments.frozen)
    configured = job.strategy.schedule
    schedules = [*SCHEDULES, *([configured] if configured not in SCHEDULES else [])]
    outcomes = compare(lambda schedule: _graph(job, schedule, frozen), schedules)
    at = schedules.index(configured)
    if configured == "auto" and job.module is not None:  # training chooses the order only, not the placement
        outcomes[at : at + 1] = compare(_graph(job, configured, frozen), [configured])
    chosen = outcomes[at]
    for path in arguments.out:
        _write(chosen, path)
    if arguments.json:
        print(json.dumps([outcome.as_json() for outcome in outcomes]))
    else:
        print(_simulated(job, outcomes, chosen))
    _warn(_untold(job, chosen))


def _plan(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    job = load(arguments.configs, arguments.script, overrides, with_memory=arguments.measure)
    strategy, module = job.strategy, job.module
    assert module is not None
    if strategy.schedule not in SCHEDULES:
        rule = "A table or a function is for one layout, and others are searched"
        raise ConfigError(
            "schedule", name_of(strategy.schedule), rule, "Add --trainer.strategy.init_args.schedule=1f1b"
        )
    durations: Mapping[str, float | Sequence[float]] = _durations(arguments.cost, job.modalities)
    if arguments.measure:
        durations = _measured(job, arguments.cost)
    proposal = propose(
        strategy.plan(module),
        module,
        schedule=strategy.schedule,
        num_microbatches=strategy.num_microbatches,
        durations=durations,
    )
    if arguments.out is not None:
        try:
            arguments.out.write_text(proposal.as_yaml(), encoding="utf-8")
        except OSError as error:
            rule = f"It cannot be written: {error.strerror}"
            raise ConfigError("--out", str(arguments.out), rule, "Name another file") from error
    print(json.dumps(proposal.as_json()) if arguments.json else proposal.as_text())
    _warn(warnings(proposal.proposed.plan.layout))


def _measured(job: Job, given: str | None) -> dict[str, list[float]]:
    """Seconds of each unit's forward, on a GPU where there is one."""
    assert job.module is not None
    if given is not None:
        raise ConfigError("--measure", True, "Durations are either measured or given", "Leave out --cost or --measure")
    if torch.cuda.is_available():
        job.module.to("cuda")
    found = find(job.module, job.strategy.modalities)
    return measure(job.module, first_microbatch(job), found, units(job.module, found))


def _durations(given: str | None, modalities: Mapping[str, Modality]) -> dict[str, float]:
    """What ``--cost`` says, by name of the modality."""
    found: dict[str, float] = {}
    for part in given.split(",") if given is not None else ():
        name, _, number = part.partition("=")
        _check_name("--cost", name, modalities)
        try:
            found[name] = float(number)
        except ValueError:
            found[name] = math.nan
        if not 0 < found[name] < math.inf:
            rule = "A forward takes a positive, finite time"
            raise ConfigError("--cost", part, rule, f"Write for instance --cost {name}=1.5")
    return found


def _costed(job: Job, given: str | None) -> dict[str, Modality]:
    """The modalities as they were written, with the costs of ``--cost``."""
    modalities = dict(job.modalities)
    modalities |= {name: replace(modalities[name], cost=cost) for name, cost in _durations(given, modalities).items()}
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
        _check_name("--frozen", name, job.modalities)
    return frozenset(names)


def _check_name(option: str, name: str, modalities: Mapping[str, Modality]) -> None:
    if name not in modalities:
        raise ConfigError(option, name, "There is no such modality", f"There are {', '.join(modalities)}")


def _graph(job: Job, schedule: AnySchedule, frozen: frozenset[str]) -> Graph:
    """The graph of stages as `schedule` wants them.

    ``interleaved`` and ``zbv`` are given two chunks of the loss modality a rank where the user said nothing about
    chunks, and the model has the layers for it.
    """
    strategy, module, written, _ = job
    loss_modality = strategy.layout.loss_modality
    wanted = for_schedule(written, "zbv" if schedule == "interleaved" else schedule, loss_modality)
    if module is None:
        v_shaped = schedule == "zbv"
        return sketch(strategy.layout, wanted, strategy.num_microbatches, frozen=frozen, v_shaped=v_shaped)
    placed = copy(strategy)
    placed.schedule, placed.modalities = schedule, wanted
    try:
        plan = placed.plan(module)
    except ConfigError:
        placed.modalities = dict(written)
        plan = placed.plan(module)
    return plan.graphs.full_graph(schedule, strategy.num_microbatches, module)


def _simulated(job: Job, outcomes: Sequence[Outcome], chosen: Outcome) -> str:
    strategy, loss_modality = job.strategy, job.strategy.layout.loss_modality
    longest = max(chosen.simulation.busy.values())
    parts = (
        f"microbatches: {strategy.num_microbatches} per replica, ranks: {strategy.layout.size}, "
        f"unit of time: {_unit(job)}",
        comparison(outcomes, configured=chosen.schedule, loss_modality=loss_modality),
        f"* {_summary(chosen)}, the busiest rank works {longest:.5g}",
        ranks(chosen),
    )
    return "\n\n".join(parts)


def _summary(outcome: Outcome) -> str:
    return f"{outcome.schedule}: makespan {outcome.simulation.makespan:.5g}, ranks idle {outcome.bubble:.1%} of a step"


def _unit(job: Job) -> str:
    costed = [modality.cost is not None for modality in job.modalities.values()]
    if all(costed):
        return "that of the costs"
    if job.module is not None:
        return "a multiply-add per token"
    return "that of the costs, 1 where none is given" if any(costed) else "a forward on one rank of any modality"


def _write(outcome: Outcome, path: Path) -> None:
    try:
        if path.suffix == ".json":
            chrome_trace(outcome.simulation, path)
        else:
            draw(outcome.simulation, path, title=_summary(outcome))
    except OSError as error:
        raise ConfigError("--out", str(path), f"It cannot be written: {error.strerror}", "Name another file") from error
    except (ImportError, ValueError) as error:
        raise ConfigError("--out", str(path), f"It cannot be drawn: {error}", "Try a .json file") from error


def _untold(job: Job, chosen: Outcome) -> list[str]:
    """Says where training would have fewer stages than were shown, for nobody told it to have more."""
    loss_modality = job.strategy.layout.loss_modality
    modality, shown = job.strategy.modalities[loss_modality], num_stages(chosen.graph, loss_modality)
    if job.module is None or shown == modality.num_cuts:
        return []
    chunks = shown // modality.stages
    return [
        f"{chosen.schedule} is shown with {chunks} stages of {loss_modality} on a rank, and training would have "
        f"{modality.pp_chunks}: set modalities.{loss_modality}.pp_chunks to {chunks}"
    ]


def _warn(sentences: Sequence[str]) -> None:
    for sentence in sentences:
        print(f"mm5d: warning: {sentence}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
