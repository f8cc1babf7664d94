"""Trains from YAML alone, and reads what a LightningCLI configuration describes without training or processes.

**Training.** ``mm5d fit`` and its siblings: a LightningCLI from YAML alone. Where the configuration names no class, the
model is a `MultimodalModule` and the data a `MultimodalDataModule`.

**Jobs.** The parser is that of the user's own LightningCLI, so that keys, defaults and links mean what they mean in
training: the script that makes it runs until its parser exists. Without a script it is that of ``mm5d fit``. Then only
model, data module and strategy are made, the model without memory where its code allows it.

A configuration without a model holds ``trainer.strategy``, or the strategy's arguments alone. Refuses what the parser
and the strategy refuse, and settings that only the training machine could resolve (``devices: auto``).
"""

from __future__ import annotations

import argparse
import inspect
import math
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins import HalfPrecision
from lightning.pytorch.strategies import Strategy

from lightning_mm5d import ModalityThroughput
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.groups import fields_of_strategy, with_fields
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.recipes.data import MultimodalDataModule
from lightning_mm5d.recipes.module import MultimodalModule
from lightning_mm5d.strategy import MultimodalStrategy
from lightning_mm5d.tools.cli.configuration import Source, check_early, devices, has_class, one_line, read_configuration
from lightning_mm5d.trainer.construction import configured, made_construction
from lightning_mm5d.trainer.validation import check_package


class RecipeCLI(LightningCLI):
    """A LightningCLI that shows throughput and MFU, and ends with the figures of the last validation."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Let a configuration say ``elastic``."""
        about = "whether other numbers of ranks, with which torchrun starts `mm5d fit`, get a layout of `mm5d plan`"
        parser.add_argument("--elastic", type=bool, default=False, help=about)

    def before_fit(self) -> None:
        """Show tokens per second and MFU in the progress bar, unless the configuration says how."""
        callbacks = vars(self.trainer)["callbacks"]
        is_ours = isinstance(self.trainer.strategy, MultimodalStrategy)
        if is_ours and not any(isinstance(callback, ModalityThroughput) for callback in callbacks):
            callbacks.insert(0, ModalityThroughput(prog_bar=True))

    def after_fit(self) -> None:
        """Print what the last validation measured, on the first rank."""
        metrics = {key: float(value) for key, value in self.trainer.callback_metrics.items() if key.startswith("val_")}
        if metrics and self.trainer.is_global_zero:
            print("last validation: " + ", ".join(f"{name[4:]} {value:.4g}" for name, value in sorted(metrics.items())))


def command_line(contents: Sequence[Mapping[str, Any]], options: Sequence[str] = ()) -> Any:
    """Return what makes the LightningCLI of a configuration, when it is called.

    Args:
        contents: of its files.
        options: that lie on top of them.
    """
    names_model, names_data = (has_class(key, contents, options) for key in ("model", "data"))
    has_data = any("data" in content for content in contents) or any(option.startswith("--data.") for option in options)
    module = None if names_model else MultimodalModule
    data = None if names_data or (names_model and not has_data) else MultimodalDataModule
    return partial(RecipeCLI, module, data, save_config_kwargs={"overwrite": True})


def train(arguments: Sequence[str]) -> None:
    """Run ``mm5d fit ...``; `arguments` are those of a LightningCLI.

    Classes may lie beside a configuration, or in the folder where the command runs.
    """
    configs, others = configurations(arguments)
    if others and Path(others[0]).suffix in (".yaml", ".yml") and Path(others[0]).is_file():
        raise ConfigError(
            "CONFIG", others[0], f"mm5d {arguments[0]} takes files by name", f"Write --config {others[0]}"
        )
    contents = [_content(path) for path in configs]
    with _importable([*(config.parent for config in configs), Path()]), warnings.catch_warnings():
        with suppress(ArgumentError):  # which the parser tells itself
            check_early(contents, arguments[1:])
        warnings.filterwarnings("ignore", "LightningCLI's args parameter")  # they are those of the command line
        command_line(contents, arguments)(args=list(arguments))


def is_elastic(arguments: Sequence[str]) -> bool:
    """Whether the configuration of ``mm5d fit ...`` says ``elastic: true``."""
    configs, options = configurations(arguments)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--elastic", type=yaml.safe_load)
    flags = [
        *(content.get("elastic") for content in map(_content, configs)),
        parser.parse_known_args(options)[0].elastic,
    ]
    return arguments[0] == "fit" and next((flag for flag in reversed(flags) if flag is not None), False) is True


def configurations(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the files that arguments of a LightningCLI name, and the options beside them and the subcommand."""
    files, others, rest = list[Path](), list[str](), iter(arguments[1:])
    for argument in rest:
        name, given, value = argument.partition("=")
        if name in ("--config", "-c"):
            files.append(Path(value if given else next(rest, "")))
        else:
            others.append(argument)
    return files, others


def _content(path: Path) -> dict[str, Any]:
    if ":" in str(path) and not path.is_file():  # an address, or the text itself, which the parser reads
        return {}
    return read_configuration(path)


# what Lightning's precision plugins make of a module's parameters; all other settings leave them alone
DTYPES = {"64-true": torch.float64, "64": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
_ARGUMENTS = frozenset(
    f for owner in (MultimodalStrategy, fields_of_strategy) for f in inspect.signature(owner).parameters
)
_PACKAGE = Path(__file__).parents[2]
_WRAPPED = 10  # errors around one that are looked into
STRATEGY = "lightning_mm5d.MultimodalStrategy"
"""the path of the strategy's class"""


class Job(NamedTuple):
    """What a configuration describes.

    Attributes:
        strategy: knows its ranks.
        module: may lack memory; None where the configuration has no model.
        modalities: as they were written, without the chunks that a schedule adds.
        data: the data module, where the configuration has one.
        precision: of the trainer.
        accumulates: whether it adds up the gradients of several batches.
        plan: which rank runs what of the module, where there is one.
        refused: why the layout cannot run, where `load` was given the ranks.
    """

    strategy: MultimodalStrategy
    module: LightningModule | None
    modalities: Mapping[str, Modality]
    data: LightningDataModule | None = None
    precision: str = "32-true"
    accumulates: bool = False
    plan: Plan | None = None
    refused: ConfigError | None = None


def load(source: Source, *, with_memory: bool = False, world: tuple[int, int] | None = None) -> Job:
    """Read a job from the configuration of a LightningCLI.

    Args:
        source: as `prepare` returns it. Without a model and without ``trainer.devices``, ranks are as many as the
            sizes need.
        with_memory: whether the model is to be run.
        world: ranks of each node and nodes, in place of those of the configuration, which need not run there.

    Raises:
        ConfigError: it cannot work.
        ArgumentError: the parser refuses it.
    """
    if not source.has_model:
        texts = [yaml.safe_dump(_without_model(content), sort_keys=False) for content in source.contents]
        arguments = [part for text in texts for part in ("--config", text)] + list(map(_in_full, source.overrides))
        read = partial(_parsed, arguments=arguments, with_model=False)
        return _job_of(None, partial(LightningCLI, LightningModule), read)
    arguments = [part for config in source.configs for part in ("--config", str(config))] + list(source.overrides)
    folders = [source.script.parent] if source.script else []
    with _importable([*folders, *(config.parent for config in source.configs), Path()]):
        try:
            recipe = command_line(source.contents, source.overrides)
            read = partial(_parsed, arguments=arguments, with_memory=with_memory, world=world)
            return _job_of(source.script, recipe, read)
        except ArgumentError:
            _check_models(source)
            raise


def _check_models(source: Source) -> None:
    """Refuse a model of `pytorch_lightning`, of which the parser says that it is no LightningModule."""
    models = [content.get("model") for content in source.contents]
    paths = [model.get("class_path") if isinstance(model, dict) else model for model in models]
    for path in filter(None, paths):
        owner, _, name = str(path).rpartition(".")
        classes: list[Any] = []
        with suppress(ImportError, ValueError):
            classes.append(getattr(import_module(owner), name, None))
        check_package("model", classes)


def _without_model(content: dict[str, Any]) -> dict[str, Any]:
    """The same configuration as a LightningCLI without classes of a user's own would take it."""
    if "trainer" not in content and not _ARGUMENTS.isdisjoint(content):
        return {"trainer": {"strategy": {"class_path": STRATEGY, "init_args": content}}}
    content = {key: value for key, value in content.items() if key not in ("data", "elastic")}
    trainer = content.get("trainer")
    strategy = trainer.get("strategy") if isinstance(trainer, dict) else None
    if isinstance(trainer, dict) and isinstance(strategy, dict) and "class_path" not in strategy:
        arguments = strategy.get("init_args", strategy)
        content["trainer"] = {**trainer, "strategy": {"class_path": STRATEGY, "init_args": arguments}}
    return content


def _in_full(option: str) -> str:
    """``--trainer.strategy.init_args.schedule=zbv`` for ``--schedule=zbv``; a value on its own stays."""
    short = option.startswith("--") and option[2:].split("=")[0].split(".")[0] in _ARGUMENTS
    return f"--trainer.strategy.init_args.{option[2:]}" if short else option


def _importable(folders: Sequence[Path]) -> AbstractContextManager[Any]:
    """A context in which modules are found in these folders first."""
    return patch.object(sys, "path", [*(str(folder.resolve()) for folder in folders), *sys.path])


class _Finished(BaseException):
    """Leaves the user's script with the outcome, past any `except Exception` after which the script would train."""

    def __init__(self, outcome: Job | Exception) -> None:
        self.outcome = outcome


def _job_of(script: Path | None, without_script: Callable[[], Any], parsed: Callable[[Any, list[str]], Job]) -> Job:
    """Run what makes a LightningCLI until it has made its parser, and return what `parsed` makes of that parser."""
    setup_parser, fit = LightningCLI.setup_parser, {"fit": LightningCLI.subcommands()["fit"]}

    def read(cli: LightningCLI, run: bool, main_kwargs: dict[str, Any], sub_kwargs: dict[str, Any]) -> None:
        setup_parser(cli, run, main_kwargs | {"exit_on_error": False}, sub_kwargs)
        try:
            outcome: Job | Exception = parsed(cli.parser, ["fit"] if run else [])
        except Exception as error:
            outcome = error
        raise _Finished(outcome)

    run_script = partial(runpy.run_path, str(script), run_name="__main__")
    make = without_script if script is None else run_script
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


def _parsed(
    parser: Any,
    command: list[str],
    *,
    arguments: list[str],
    with_model: bool = True,
    with_memory: bool = False,
    world: tuple[int, int] | None = None,
) -> Job:
    """What the parser of a LightningCLI, which may have the subcommand `fit`, reads from the arguments."""
    parsed = parser.parse_args([*command, *arguments])
    settings = (parsed[command[0]] if command else parsed).trainer
    strategy, modalities = _strategy(settings.strategy)
    if world is not None:
        settle(strategy, *world)
    elif not with_model and settings.devices == "auto":
        settle(strategy, needed_ranks(modalities), 1)
    else:
        settle(strategy, devices(settings.devices), settings.num_nodes)
    if not with_model:
        assert strategy.layout.size  # raises where the sizes do not fill the world
        return Job(strategy, None, modalities)
    precision, accumulates = str(settings.precision or "32-true"), (settings.accumulate_grad_batches or 1) != 1
    dtype = DTYPES.get(precision)
    if precision in ("bf16-true", "16-true"):
        strategy.precision_plugin = HalfPrecision(precision)  # type: ignore[arg-type]
    for key in list(vars(settings)):
        del settings[key]  # callbacks and loggers need not be made

    def make() -> tuple[LightningModule, Any]:
        instances = _instantiate(parser, parsed)
        instances = instances[command[0]] if command else instances
        if with_memory:
            instances.model.configure_model()
        return instances.model, instances.get("data")

    try:
        with nullcontext() if with_memory else made_construction().without_memory():
            module, data = make()
    except Exception:  # a constructor that reads random numbers needs memory
        try:
            module, data = make()
        except (ArgumentError, ConfigError):
            raise
        except Exception as error:
            raise _fails(error, parsed[command[0]] if command else parsed) from error
    if not with_memory:
        module = configured(module, strategy.precision_plugin)
    plan, refused = None, None
    try:
        plan = strategy.validate(module, data)
    except ConfigError as error:
        if world is None:
            raise
        refused = error
    module = module if dtype is None else module.to(dtype)
    return Job(strategy, module, modalities, data, precision, accumulates, plan, refused)


def _fails(error: Exception, parsed: Namespace) -> ConfigError:
    """What a constructor of the user's raised, with the line that called what raised it."""
    others = str(_PACKAGE), sys.prefix, sys.base_prefix, "<frozen"
    users_calls = list[traceback.FrameSummary]()
    cause: BaseException | None = error
    for _ in range(_WRAPPED):  # the parser wraps some errors
        if users_calls or cause is None:
            break
        users_calls = [
            call for call in traceback.extract_tb(cause.__traceback__) if not call.filename.startswith(others)
        ]
        cause = cause.__cause__ or cause.__context__
    place = f", at {users_calls[-1].filename}, line {users_calls[-1].lineno}" if users_calls else ""
    settings = {key: parsed[key] for key in ("model", "data") if parsed.get(key) is not None}
    got = {key: value.as_dict() if isinstance(value, Namespace) else value for key, value in settings.items()}
    rule = f"What they make fails: {type(error).__name__}: {one_line(str(error))}{place}"
    return ConfigError(", ".join(settings), got, rule, "Change the settings that it depends on, or the code there")


def _strategy(given: Any) -> tuple[MultimodalStrategy, Mapping[str, Modality]]:
    """The strategy of the trainer's settings (an object, a registered name, or a class and its arguments), and the
    modalities as they were written there."""
    written = None
    if isinstance(given, Namespace):
        settings = given.as_dict()
        given = _strategy_of(settings)
        if isinstance(given, MultimodalStrategy) and settings.get("init_args", {}).get("schedule") == "zbv":
            # under another schedule it takes them as they are
            written = _strategy_of({**settings, "init_args": {**settings["init_args"], "schedule": "1f1b"}})
    if given == "mm5d":
        given = MultimodalStrategy()
    if not isinstance(given, MultimodalStrategy):
        got = given if isinstance(given, str) else type(given).__name__
        fix = f"Use class_path: {STRATEGY}"
        raise ConfigError("trainer.strategy", got, "Only the plans of MultimodalStrategy can be shown", fix)
    return given, (written or given).modalities


def _strategy_of(settings: dict[str, Any]) -> Any:
    # by a parser of its own: that of the trainer's `str | Strategy` would bury a ConfigError
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--strategy", type=Strategy)
    strategy = _instantiate(parser, parser.parse_object({"strategy": settings})).strategy
    if isinstance(strategy, MultimodalStrategy):
        strategy.raise_refused()
    return strategy


class _FirstRank(LightningEnvironment):
    """The first rank of a job, also in a process that torchrun has started as another one."""

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return 0


def settle(strategy: MultimodalStrategy, devices: int, nodes: int) -> None:
    """Set the number of ranks of a strategy, as a trainer would."""
    strategy.parallel_devices, strategy.num_nodes = [torch.device("cpu")] * devices, nodes
    strategy.cluster_environment = _FirstRank()
    strategy.cluster_environment.set_world_size(devices * nodes)


def _instantiate(parser: Any, config: Namespace) -> Namespace:
    return (getattr(parser, "instantiate", None) or parser.instantiate_classes)(config)  # renamed in jsonargparse 4.49


def needed_ranks(modalities: Mapping[str, Modality]) -> int:
    """Return the ranks of a world in which every modality that does not say otherwise has one replica.

    It has as many as `pipelines` lists, or one of the shortest that `pipelines` allows.
    """
    least = {
        name: with_fields(modality, pipelines=None, pp_size=modality.pipeline.pipelines["min"])
        if isinstance(modality.pipeline.pipelines, Mapping)
        else modality
        for name, modality in modalities.items()
    }
    count = max(len(modality.lengths) for modality in modalities.values()) or 1

    def replicas(name: str) -> int:
        owner = modalities[name].owner
        return modalities[name if owner is None else owner.modality].dp_size or count

    return sum(modality.own_ranks(replicas(name)) for name, modality in least.items())


def durations(given: str | None, modalities: Mapping[str, Modality]) -> dict[str, float]:
    """Return the durations of ``--cost`` by name of the modality."""
    costs: dict[str, float] = {}
    for part in given.split(",") if given is not None else ():
        name, _, number = part.partition("=")
        check_name("--cost", name, modalities)
        try:
            costs[name] = float(number)
        except ValueError:
            costs[name] = math.nan
        if not 0 < costs[name] < math.inf:
            rule = "A forward takes a positive, finite time"
            raise ConfigError("--cost", part, rule, f"Write for instance --cost {name}=1.5")
    return costs


def check_name(option: str, name: str, modalities: Mapping[str, Modality]) -> None:
    """Refuse a name of an option that no modality has."""
    if name not in modalities:
        raise ConfigError(option, name, "There is no such modality", f"There are {', '.join(modalities)}")
