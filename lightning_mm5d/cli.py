"""The command ``mm5d``: looks at a LightningCLI configuration without training, processes or process groups.

``mm5d inspect`` prints which rank holds what; ``mm5d simulate`` prints, and draws, how long ranks would idle. Both
read the configuration with the parser of the user's own LightningCLI, so that its keys, defaults and links mean what
they mean in training: the script that makes it is run until its parser exists. Without a script the parser is that of
a LightningCLI whose classes the configuration names (``class_path``). Then only model, data module and strategy are
made, the model without memory where its code allows it.

It refuses, in one line and with exit code 2, what the parser and the strategy refuse, and settings that only the
training machine could resolve (``devices: auto``).
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import Strategy

from lightning_mm5d.errors import ConfigError
from lightning_mm5d.planner.inspect import as_json, holdings, report, table, warnings
from lightning_mm5d.planner.timeline import chrome_trace, draw
from lightning_mm5d.schedule import compare
from lightning_mm5d.strategy import MultimodalStrategy

# what Lightning's precision plugins make of a module's parameters; all other settings leave them alone
_DTYPES = {"64-true": torch.float64, "64": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
_OPTIONS = ("--help", "--json", "--out", "--script")
_UNION = "Does not validate against any of the Union subtypes"
_NOISE = ("Subtypes:", "Errors:", "Given value", "Expected a <class 'NoneType'>", "Expected a <class 'str'>")


class Job(NamedTuple):
    """What a configuration describes: a strategy that knows its ranks, and a module that may lack memory."""

    strategy: MultimodalStrategy
    module: LightningModule


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0, or 2 where the configuration is refused.

    Args:
        argv: the arguments, by default those of the process.
    """
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
    one = commands.add_parser("simulate", parents=[shared], epilog=rest, help="show how long ranks would idle")
    one.add_argument("--out", type=Path, help="timeline: a picture (.png, .svg, .pdf), or a trace for Perfetto (.json)")
    one.add_argument("--json", action="store_true", help="print what every schedule would do, rank by rank")
    one.set_defaults(run=_simulate)
    own, overrides = _split(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(own)
    try:
        arguments.run(load(arguments.configs, arguments.script, overrides), arguments)
    except (ConfigError, ArgumentError) as error:
        print(f"mm5d: error: {_one_line(str(error))}", file=sys.stderr)
        return 2
    return 0


def load(configs: Sequence[Path], script: Path | None, overrides: Sequence[str]) -> Job:
    """Read a job from the configuration of a LightningCLI.

    Args:
        configs: YAML files, later ones laid on top.
        script: the file that makes the LightningCLI; unset, it is looked for if the configuration does not name
            the model's class.
        overrides: options of the LightningCLI.

    Raises:
        ConfigError: it cannot be read, or cannot work.
        ArgumentError: the parser refuses it.
    """
    named = any(option.split("=")[0] in ("--model", "--model.class_path") for option in overrides)
    for config in configs:
        model = _read(config).get("model")
        named = named or isinstance(model, str) or (isinstance(model, dict) and "class_path" in model)
    if script is None and not named:
        script = _script_beside(configs)
    if script is not None and not script.is_file():
        raise ConfigError("--script", str(script), "There is no such file", "Name the script that trains")
    arguments = [part for config in configs for part in ("--config", str(config))] + list(overrides)
    folders = [script.parent] if script else []
    with _importable([*folders, *(config.parent for config in configs), Path()]):
        return _job_of(script, arguments)


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


def _inspect(job: Job, arguments: argparse.Namespace) -> None:
    strategy, module = job
    plan = strategy.plan(module)
    if arguments.json:
        print(json.dumps(as_json(holdings(plan, module)), indent=2))
    else:
        print(report(plan, module, schedule=strategy.schedule, num_microbatches=strategy.num_microbatches))
    for warning in warnings(plan.layout):
        print(f"mm5d: warning: {warning}", file=sys.stderr)


def _simulate(job: Job, arguments: argparse.Namespace) -> None:
    strategy, module = job
    plan = strategy.plan(module)
    if arguments.json:
        graphs = partial(plan.whole_graph, count=strategy.num_microbatches, module=module)
        print(json.dumps(compare(graphs)))
        return
    result = strategy.simulate(module)
    idle = sum(result.bubble.values()) / len(result.bubble)
    longest = max(result.busy.values())
    print(
        f"{strategy.schedule}, microbatches: {strategy.num_microbatches} per replica, ranks idle {idle:.1%} of a step"
    )
    print(f"makespan {result.makespan:.4g}, the busiest rank works {longest:.4g} (unit: a forward of one parameter)\n")
    rows = [
        (rank, "+".join(plan.stages_of(rank)), f"{result.busy[rank]:.4g}", f"{result.bubble[rank]:.1%}", peak)
        for rank, peak in sorted(result.peak_activations.items())
    ]
    print(table(("rank", "stages", "busy", "idle", "microbatches held"), rows))
    if arguments.out is not None:
        try:
            (chrome_trace if arguments.out.suffix == ".json" else draw)(result, arguments.out)
        except (ImportError, OSError, ValueError) as error:
            raise ConfigError(
                "--out", str(arguments.out), f"It cannot be drawn: {error}", "Try a .json file"
            ) from error


def _read(config: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("CONFIG", str(config), f"It cannot be read: {error.strerror}", "Name a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("CONFIG", str(config), f"It is no YAML: {error}", "Correct it there") from error
    if not isinstance(content, dict):
        rule = "A configuration maps keys such as trainer, model and data to settings"
        raise ConfigError("CONFIG", str(config), rule, "Name a configuration of a LightningCLI")
    return content


def _script_beside(configs: Sequence[Path]) -> Path:
    """The only Python file in the folders of the configurations that mentions LightningCLI."""
    files = sorted({file for config in configs for file in config.parent.glob("*.py")})
    found = [file for file in files if "LightningCLI" in file.read_text(encoding="utf-8", errors="ignore")]
    if len(found) != 1:
        seen = ", ".join(map(str, found)) or "none"
        rule = f"Without model.class_path the classes are those of a script, and of scripts beside it there are: {seen}"
        raise ConfigError("CONFIG", str(configs[0]), rule, "Name the script that makes the LightningCLI with --script")
    return found[0]


@contextmanager
def _importable(folders: Sequence[Path]) -> Generator[None, None, None]:
    before = list(sys.path)
    sys.path[:0] = [str(folder.resolve()) for folder in folders]
    try:
        yield
    finally:
        sys.path[:] = before


class _Finished(BaseException):
    """Leaves the user's script with what came of it; no `except Exception` of theirs stops it, and goes on to train."""

    def __init__(self, outcome: Job | Exception) -> None:
        self.outcome = outcome


def _job_of(script: Path | None, arguments: list[str]) -> Job:
    """Run what makes a LightningCLI until it has made its parser, and let that parser read `arguments`."""
    setup_parser, fit = LightningCLI.setup_parser, {"fit": LightningCLI.subcommands()["fit"]}

    def read(cli: LightningCLI, run: bool, main_kwargs: dict[str, Any], sub_kwargs: dict[str, Any]) -> None:
        setup_parser(cli, run, main_kwargs | {"exit_on_error": False}, sub_kwargs)
        try:
            outcome: Job | Exception = _parsed(cli.parser, ["fit"] if run else [], arguments)
        except Exception as error:
            outcome = error
        raise _Finished(outcome)

    run_script = partial(runpy.run_path, str(script), run_name="__main__")
    make: Callable[[], Any] = LightningCLI if script is None else run_script
    # a parser for each of the other subcommands would take most of the time
    patched = patch.multiple(LightningCLI, setup_parser=read, subcommands=staticmethod(lambda: fit))
    try:
        with patched, patch.object(sys, "argv", [str(script)]):
            make()
    except _Finished as finished:
        if isinstance(finished.outcome, Exception):
            raise finished.outcome from None
        return finished.outcome
    raise ConfigError("--script", str(script), "It makes no LightningCLI", "Name the script that trains")


def _parsed(parser: Any, command: list[str], arguments: list[str]) -> Job:
    parsed = parser.parse_args([*command, *arguments])
    settings = (parsed[command[0]] if command else parsed).trainer
    strategy = _strategy(settings.strategy)
    devices, nodes = _devices(settings.devices), settings.num_nodes
    strategy.parallel_devices, strategy.num_nodes = [torch.device("cpu")] * devices, nodes
    strategy.cluster_environment = LightningEnvironment()
    strategy.cluster_environment.set_world_size(devices * nodes)
    dtype = _DTYPES.get(str(settings.precision))
    for key in list(vars(settings)):
        del settings[key]  # callbacks and loggers need not be made

    def make() -> tuple[LightningModule, Any]:
        made = _instantiate(parser, parsed)
        made = made[command[0]] if command else made
        made.model.configure_model()
        return made.model, made.get("data")

    try:
        with torch.device("meta"):
            module, data = make()
    except Exception:  # a constructor that computes with values, or loads them, needs memory
        module, data = make()
    strategy.validate(module, data)
    return Job(strategy, module if dtype is None else module.to(dtype))


def _strategy(given: Any) -> MultimodalStrategy:
    """The strategy of the trainer's settings: an object, a registered name, or a class and its arguments."""
    if isinstance(given, Namespace):
        # by a parser of its own: that of the trainer's `str | Strategy` would bury a ConfigError
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--strategy", type=Strategy)
        given = _instantiate(parser, parser.parse_object({"strategy": given.as_dict()})).strategy
    if given == "mm5d":
        given = MultimodalStrategy()
    if not isinstance(given, MultimodalStrategy):
        got = given if isinstance(given, str) else type(given).__name__
        fix = "Use class_path: lightning_mm5d.MultimodalStrategy"
        raise ConfigError("trainer.strategy", got, "Only the plans of MultimodalStrategy can be shown", fix)
    return given


def _instantiate(parser: Any, config: Namespace) -> Namespace:
    return (getattr(parser, "instantiate", None) or parser.instantiate_classes)(config)  # renamed in jsonargparse 4.49


def _devices(devices: Any) -> int:
    """Processes per node, of the forms that Lightning knows: a number, a list of devices, or either as text."""
    ids = devices if isinstance(devices, list) else [part for part in str(devices).split(",") if part.strip()]
    if isinstance(devices, list) or len(ids) > 1:
        return len(ids)
    if str(devices).isdigit() and int(devices) > 0:
        return int(devices)
    rule = "It depends on the machine that trains, which may not be this one, so it must be a number here"
    raise ConfigError("trainer.devices", devices, rule, "Add --trainer.devices=8, or whatever that machine has")


if __name__ == "__main__":
    sys.exit(main())
