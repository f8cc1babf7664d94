"""The command ``mm5d``: trains from YAML alone, plans training before it runs, and takes checkpoints out again.

``mm5d fit`` and its siblings are a LightningCLI, with a ready module where the configuration names no class. All other
commands run in one process. ``mm5d convert`` says another system's configuration in ours.

``mm5d inspect`` prints which rank holds what; ``mm5d simulate`` prints, and draws, how long ranks would idle under
every schedule; ``mm5d plan`` searches a better layout; ``mm5d dryrun`` runs the code of one rank. These read the
configuration of a LightningCLI; for ``simulate`` sizes alone will do. ``mm5d export`` writes a checkpoint as Hugging
Face or plain Lightning load it; ``mm5d checkpoint show`` prints what one holds. ``mm5d doctor`` shows what would not
work on this machine.

Help and refusals of a wrong configuration come before torch is imported. Refuses in one line, with exit code 2, what
cannot work; an interrupt ends it with exit code 130.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from typing_extensions import override

from lightning_mm5d.config.errors import CheckpointCorruptError, CheckpointUntrustedError, ConfigError, private

_CONFIGURED = ("inspect", "simulate", "plan", "dryrun")  # commands whose other options override the configuration
_TRAINING = ("fit", "validate", "test", "predict")
_OF_A_MODEL = ("--model", "--config", "--tp", "--pp")  # of `inspect`; beside a CONFIG they are the LightningCLI's


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: the arguments, by default those of the process.

    Returns:
        The exit code: 0; 1 where `doctor` finds that training cannot work; 2 where the configuration is refused; 130
        after an interrupt.
    """
    given = _joined(sys.argv[1:] if argv is None else argv)
    if next(iter(given), "") in _TRAINING:
        return _attempt(lambda: _train(given))
    parser, parsers = _parser()
    command_args, overrides = _split(given, parsers)
    arguments = parser.parse_args(command_args)
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        return _run(arguments, overrides)
    except KeyboardInterrupt:
        print("mm5d: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, for instance `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    if arguments.command == "doctor":
        return _attempt(lambda: _doctor(arguments))
    if arguments.command == "convert":
        return _attempt(lambda: _convert(arguments.file, arguments.out))
    if arguments.command not in _CONFIGURED:
        hint = " Here that is --unsafe."
        return _attempt(lambda: _run_on_checkpoint(arguments), CheckpointCorruptError, OSError, untrusted=hint)
    from jsonargparse import ArgumentError

    from lightning_mm5d.schedule.validate import ScheduleError

    return _attempt(lambda: _run_configured(arguments, overrides), ArgumentError, ScheduleError)


def _attempt(command: Callable[[], int | None], *errors: type[Exception], untrusted: str = "") -> int:
    """Return the exit code of a command, 2 where it is refused: by errors of ours, or by one of `errors`.

    Args:
        command: what is run.
        errors: besides those of a configuration or of a checkpoint that is not trusted.
        untrusted: what is said after the latter.
    """
    from lightning_mm5d.tools.cli.configuration import one_line

    refused: tuple[type[Exception], ...] = (ConfigError, CheckpointUntrustedError, *errors)
    try:
        return command() or 0
    except refused as error:
        hint = untrusted if isinstance(error, CheckpointUntrustedError) else ""
        print(f"mm5d: error: {one_line(str(error))}{hint}", file=sys.stderr)
        return 2


def _train(arguments: Sequence[str]) -> None:
    from lightning_mm5d.tools.cli.job import is_elastic, train  # imports torch

    if not is_elastic(arguments):
        train(arguments)
        return
    from lightning_mm5d.tools.cli.elastic_layouts import with_layout

    with TemporaryDirectory() as folder:
        train(with_layout(arguments, Path(folder) / "layout.yaml"))


def _doctor(arguments: argparse.Namespace) -> int:
    from lightning_mm5d.tools.cli.terminal import check_writable

    if arguments.out is not None and not arguments.links:
        raise ConfigError("--out", str(arguments.out), "It is the file of the links", "Add --links")
    check_writable("--out", arguments.out)
    if arguments.links:
        from lightning_mm5d.tools.cli.cluster_file import measure_links  # imports torch

        return measure_links(arguments.out)
    from lightning_mm5d.tools.cli.doctor import doctor

    return doctor()


def _convert(file: Path, out: Path | None) -> None:
    """Print a configuration of another system as YAML, or write it to `out` and print what became of each knob."""
    from lightning_mm5d.config.modality import as_modalities
    from lightning_mm5d.schedule import check_fields
    from lightning_mm5d.tools.cli.terminal import warn, write
    from lightning_mm5d.tools.convert.conversion import as_lines, as_yaml, read_configuration

    conversion = read_configuration(file)
    check_fields({**conversion.strategy, "modalities": as_modalities(conversion.strategy["modalities"])})
    warn(f"{entry.name}={entry.got!r} has no equal. {entry.about}" for entry in conversion.of("results"))
    if out is None:
        print(as_yaml(conversion), end="")
        return
    write("--out", out, as_yaml(conversion))
    print("\n".join(as_lines(conversion)))


def _run_configured(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    from lightning_mm5d.tools.cli.configuration import prepare
    from lightning_mm5d.tools.cli.terminal import configuration_file, read_fields

    if arguments.command == "inspect" and arguments.model is not None and not arguments.configs:
        if (file := configuration_file(arguments.model)) is not None:
            read_fields(file)
        from lightning_mm5d.tools.cli.model_findings import inspect_model  # imports torch

        inspect_model(arguments)
        return
    if not arguments.configs:
        fix = "Name one" + ", or a model: --model NAME" * (arguments.command == "inspect")
        raise ConfigError("CONFIG", None, "It names the YAML file of a LightningCLI", fix)
    source = prepare(
        arguments.configs,
        arguments.script,
        overrides,
        sizes_will_do=arguments.command == "simulate",
        other_ranks=any(getattr(arguments, name, None) is not None for name in ("ranks", "cluster", "world")),
    )
    from lightning_mm5d.tools.cli import cluster_plan, commands  # imports torch

    run = {
        "inspect": commands.inspect,
        "simulate": commands.simulate,
        "plan": cluster_plan.plan,
        "dryrun": commands.dryrun,
    }
    run[arguments.command](arguments, source)


def _run_on_checkpoint(arguments: argparse.Namespace) -> None:
    if not arguments.checkpoint.exists():  # before torch is imported
        got = str(arguments.checkpoint)
        raise ConfigError("CHECKPOINT", got, "There is no such file or folder", "Name a checkpoint")
    from lightning_mm5d.tools.cli.terminal import show

    if arguments.command == "export":
        _export(arguments)
        return
    from lightning_mm5d.export.summary import summary

    show(summary(arguments.checkpoint, verify=arguments.verify, weights_only=not arguments.unsafe))


def _export(arguments: argparse.Namespace) -> None:
    """Write a checkpoint in another format, and print the files."""
    from transformers.utils import logging

    from lightning_mm5d.config.tables import Table
    from lightning_mm5d.export.exported import export
    from lightning_mm5d.export.summary import human
    from lightning_mm5d.tools.cli.terminal import show, warn

    logging.set_verbosity_error()  # it would print whole configurations where a user's environment asks for more
    done = export(
        arguments.checkpoint,
        arguments.folder,
        format=arguments.format,
        module=arguments.module,
        config=arguments.config,
        max_shard_size=arguments.max_shard_size,
        dtype=arguments.dtype,
        weights_only=not arguments.unsafe,
    )
    show([f"{done.name} is in {done.path}", Table.of(("file", "size"), [(k, human(v)) for k, v in done.files.items()])])
    warn(done.warnings)


class _Parser(argparse.ArgumentParser):
    """Refuses in one line, as all else that is refused."""

    @override
    def error(self, message: str) -> NoReturn:
        print(f"mm5d: error: {message}. {self.prog} --help shows what there is.", file=sys.stderr)
        raise SystemExit(2)


def _joined(argv: Sequence[str]) -> list[str]:
    """Arguments in which values that begin with a minus and a digit stand at their options: ``--memory=-3GiB``.

    Otherwise argparse takes what is no number for an option.
    """
    arguments: list[str] = []
    for argument in argv:
        if re.match(r"-\.?\d", argument) and arguments and re.match("--[^=]+$", arguments[-1]):
            arguments[-1] += f"={argument}"
        else:
            arguments.append(argument)
    return arguments


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser, and that of each command."""
    parser = _Parser(
        prog="mm5d",
        allow_abbrev=False,
        description="Train from YAML, plan training before it runs, and take checkpoints out again.",
    )
    parser.add_argument("--version", action="version", version=f"mm5d {version('lightning_mm5d')}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    for name, about in (("fit", "train"), ("validate", "validate"), ("test", "test"), ("predict", "predict")):
        commands.add_parser(name, help=f"{about} what a YAML file says: a LightningCLI; {name} --help has its options")
    configured = _Parser(add_help=False)
    configured.add_argument(
        "configs", nargs="*", type=Path, metavar="CONFIG", help="YAML files, later ones laid on top"
    )
    configured.add_argument(
        "--script",
        type=Path,
        help="Python file that makes the LightningCLI, which runs until it does so; needed where CONFIG does not name "
        "the model's class",
    )
    configured.add_argument("--json", action="store_true", help="print what is found as JSON")
    rest = "Further options override the configuration, for instance --trainer.devices=8."

    def add(name: str, summary: str, about: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, parents=[configured], epilog=rest, help=summary, description=about)

    about = (
        "Show which rank holds what; or with --model and without CONFIG, what is found in a model and which degrees "
        "of parallelism would work, without its weights."
    )
    command = add("inspect", "show which rank holds what", about)
    command.add_argument(
        "--model", metavar="NAME", help="import path of a class, config.json of Hugging Face, or a folder with one"
    )
    command.add_argument("--tp", type=int, default=2, metavar="N", help="with --model: the tp_size that is tried (2)")
    command.add_argument("--pp", type=int, default=2, metavar="N", help="with --model: the pp_size that is tried (2)")
    command.add_argument("--config", type=Path, metavar="FILE", help="with --model: a layout, which is shown too")

    about = (
        "Show how long ranks would idle, under every schedule and rank by rank under the configured one. A CONFIG "
        "without a model, or with nothing but the arguments of the strategy (modalities, batching, schedule), "
        "is simulated from its sizes."
    )
    command = add("simulate", "show how long ranks would idle", about)
    command.add_argument(
        "--cost",
        metavar="NAME=NUMBER,...",
        help="duration of a forward on each pipeline rank of these modalities, instead of an estimate; without a model "
        "it is 1 where nothing is said",
    )
    command.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="nodes, links and devices in YAML, as of mm5d plan: times are seconds of layers and messages there",
    )
    command.add_argument(
        "--frozen",
        metavar="NAME,...",
        help="modalities of which nothing is trained; only where there is no model to say so by requires_grad",
    )
    command.add_argument(
        "--out",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="draw the configured schedule: a picture (.png, .svg, .pdf), or a Chrome trace for Perfetto (.json); may "
        "be given several times",
    )

    about = (
        "Search sizes, placements, schedules, microbatches, recomputation and ZeRO together, for the shortest step on "
        "a cluster that fits into the memory of its ranks."
    )
    command = add("plan", "search a better layout", about)
    command.add_argument("--ranks", type=int, metavar="N", help="number of ranks, instead of those configured")
    command.add_argument(
        "--memory", "--memory-limit", metavar="SIZE", help="most memory of a rank, for instance 80GiB; any where unset"
    )
    command.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="nodes, memory, links and devices in YAML, in place of usual ones; mm5d doctor --links writes one",
    )
    command.add_argument("--batch", type=int, metavar="N", help="samples of a step, instead of those configured")
    command.add_argument(
        "--cost",
        metavar="NAME=SECONDS,...",
        help="seconds of the forward of a microbatch through a whole modality, instead of an estimate",
    )
    command.add_argument(
        "--measure",
        action="store_true",
        help="time forward and backward of every layer several times, on one microbatch of the training data and here, "
        "instead of estimating it",
    )
    command.add_argument(
        "--from",
        dest="run",
        type=Path,
        metavar="FILE",
        help="take what layers cost from a run of the configured layout, from its timeline: FILE.json",
    )
    command.add_argument(
        "--write", "--out", type=Path, metavar="FILE", help="write the best layout, a file to lay over CONFIG"
    )

    about = (
        "Run one rank's real code in this process: setup, plan, groups, layers, two training steps and optimizers, on "
        "tensors without memory. Other ranks are answered for. Shows memory, messages and time on the host."
    )
    command = add("dryrun", "run one rank of a cluster without the cluster", about)
    command.add_argument(
        "--world", type=int, metavar="N", help="number of ranks, eight on each node, instead of those configured"
    )
    command.add_argument("--rank", type=int, default=0, metavar="R", help="which rank (0)")
    command.add_argument("--all", action="store_true", help="one rank of each class of ranks with equal work")

    _add_checkpoint_commands(commands)

    about = (
        "Write a configuration of ColossalAI (parallel = dict(...), HybridParallelPlugin), Cornstarch "
        "(MultimodalParallelPlugin) or MindFormers (parallel_config) as YAML for a LightningCLI, and list what has no "
        "equal. Nothing of the file is run."
    )
    command = commands.add_parser("convert", description=about, help="convert a configuration of another system")
    command.add_argument("file", type=Path, metavar="FILE", help="Python, YAML or JSON")
    command.add_argument("--out", type=Path, metavar="FILE", help="write the YAML there, and print the list alone")

    about = "Show versions, devices and backends, and what would not work here."
    command = commands.add_parser("doctor", description=about, help="show versions, devices and what would not work")
    command.add_argument(
        "--links",
        action="store_true",
        help="measure the links between the processes that this is started with (torchrun), or two here where it is "
        "alone, and print the file of a cluster for mm5d plan --cluster",
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="with --links: write the file there, too")
    return parser, commands.choices


def _add_checkpoint_commands(commands: argparse._SubParsersAction[_Parser]) -> None:
    """`export` and `checkpoint show`."""
    shared = _Parser(add_help=False)
    shared.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="file or folder")
    shared.add_argument(
        "--unsafe",
        action="store_true",
        help="also open a checkpoint that can run code while it is read, of somebody whom you trust",
    )
    about = (
        "Write a checkpoint, sharded or full, as Hugging Face loads it: weights in safetensors, configuration, "
        "processors; an adapter as PEFT has it. No more than one tensor is in memory at a time."
    )
    parser = commands.add_parser(
        "export", parents=[shared], description=about, help="write a checkpoint for Hugging Face or plain Lightning"
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="new folder, or with --format lightning a new file")
    parser.add_argument(
        "--format",
        choices=("huggingface", "lightning"),
        default="huggingface",
        help="huggingface (default), or lightning for one file with everything in it",
    )
    parser.add_argument(
        "--module", metavar="PATH", help="the model's path in the LightningModule, where there are several"
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="config.json of the model, or a folder with one, for a checkpoint that was saved without this strategy",
    )
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="most bytes of a file of weights (5GB)")
    parser.add_argument("--dtype", help="dtype of all floating-point tensors, for instance bfloat16")

    group = commands.add_parser("checkpoint", help="show what a checkpoint holds")
    actions = group.add_subparsers(metavar="ACTION", required=True)
    about = "Show a checkpoint's step, layout, files and models."
    parser = actions.add_parser("show", parents=[shared], description=about, help="print what a checkpoint holds")
    parser.add_argument("--verify", action="store_true", help="read all of it, and compare it with its checksums")


def _split(argv: Sequence[str], parsers: Mapping[str, argparse.ArgumentParser]) -> tuple[list[str], list[str]]:
    """Arguments of this command, and those that override the configuration, each with its value."""
    if next(iter(argv), "") not in _CONFIGURED or _names_model_alone(argv):
        return list(argv), []
    known = private(parsers[argv[0]], "_option_string_actions").keys() - _OF_A_MODEL
    command_args, overrides, rest = [], [], iter(argv)
    for argument in rest:
        if not argument.startswith("--") or argument.split("=")[0] in known:
            command_args.append(argument)
        else:
            overrides += [argument] if "=" in argument else [argument, *islice(rest, 1)]
    return command_args, overrides


def _names_model_alone(argv: Sequence[str]) -> bool:
    """Whether ``inspect`` is given a model, and no configuration that the model's options would override."""
    if argv[0] != "inspect" or not any(arg.split("=")[0] == "--model" for arg in argv):
        return False
    values = {at + 1 for at, arg in enumerate(argv) if arg.startswith("--") and arg != "--json" and "=" not in arg}
    return all(arg.startswith("--") or at in values for at, arg in enumerate(argv[1:], start=1))


if __name__ == "__main__":
    sys.exit(main())
