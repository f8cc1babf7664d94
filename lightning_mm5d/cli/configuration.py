"""Reads YAML configurations and refuses at once what they alone show to be wrong, without importing torch.

Checks `modalities`, `schedule` and `num_microbatches` of the strategy, with the options that override them. Leaves the
rest to the parser of the LightningCLI, and also everything that only that parser resolves: files that are named inside
of the configuration, variables, and strategies that are no `MultimodalStrategy`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightning_mm5d.config.checks import check
from lightning_mm5d.config.errors import ConfigError

FIELDS = (
    "modalities",
    "schedule",
    "num_microbatches",
    "microbatching",
    "loss_weight",
    "placement",
    "start_method",
    "process_group_backend",
    "timeout",
    "timeline",
)
"""What a user may say of the strategy."""
CHECKED = ("modalities", "schedule", "num_microbatches")
_PREFIXES = ("--trainer.strategy.init_args.", "--trainer.strategy.", "--")


class _UnresolvedError(Exception):
    """Only the parser of the LightningCLI can tell what is configured."""


class Source(NamedTuple):
    """Where a job is described.

    Attributes:
        configs: YAML files, later ones laid on top.
        contents: of these files.
        script: the file that makes the LightningCLI; None where the configuration names the classes.
        overrides: options of the LightningCLI, such as ``--trainer.devices=8``.
        has_model: whether there is a model, or sizes alone.
    """

    configs: Sequence[Path]
    contents: Sequence[dict[str, Any]]
    script: Path | None
    overrides: Sequence[str]
    has_model: bool = True


def prepare(
    configs: Sequence[Path], script: Path | None, overrides: Sequence[str], *, sizes_will_do: bool = False
) -> Source:
    """Read the files and check what they say, without torch and without running any code of the user.

    Args:
        configs: YAML files, later ones laid on top.
        script: the file that makes the LightningCLI.
        overrides: options of the LightningCLI.
        sizes_will_do: whether the model may be missing, which it is where neither the files nor the options say
            ``model`` and there is no script.

    Raises:
        ConfigError: a file cannot be read, a field cannot work, or nothing names the class of the model.
        ArgumentError: a field is not there, or has a value of another type.
    """
    contents = [_read(config) for config in configs]
    if script is not None and not script.is_file():
        raise ConfigError("--script", str(script), "There is no such file", "Name the script that trains")
    check_early(contents, overrides)
    keys = {option[2:].split("=")[0].split(".")[0] for option in overrides if option.startswith("--")}
    if sizes_will_do and script is None and "model" not in keys.union(*contents):
        return Source(configs, contents, script, overrides, has_model=False)
    models = [content.get("model") for content in contents]
    named = any(isinstance(model, str) or (isinstance(model, dict) and "class_path" in model) for model in models)
    named = named or any(option.split("=")[0] in ("--model", "--model.class_path") for option in overrides)
    if script is None and not named:
        rule = "Without model.class_path the classes are those of the script that makes the LightningCLI"
        beside = _scripts_beside(configs)
        fix = f"Add --script {beside[0]}" if len(beside) == 1 else "Name that script with --script"
        if len(beside) > 1:
            fix += f". Beside the configuration there are {', '.join(map(str, beside))}"
        raise ConfigError("CONFIG", str(configs[0]), rule, fix)
    return Source(configs, contents, script, overrides)


def _read(config: Path) -> dict[str, Any]:
    if config.suffix == ".py":
        rule = "A configuration is a YAML file, and this is a script"
        raise ConfigError("CONFIG", str(config), rule, f"Name the YAML file, and add --script {config}")
    try:
        content = yaml.safe_load(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("CONFIG", str(config), f"It cannot be read: {error.strerror}", "Name a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("CONFIG", str(config), f"It is no YAML: {error}", "Correct it there") from error
    if isinstance(content, dict) and "trainer" in content and not isinstance(content["trainer"], dict):
        rule = "It maps settings of the trainer, such as devices and strategy, to their values"
        raise ConfigError("trainer", content["trainer"], rule, "Leave the key out, or name a setting under it")
    if not isinstance(content, dict):
        rule = "A configuration maps keys such as trainer, model and data to settings"
        raise ConfigError("CONFIG", str(config), rule, "Name a configuration of a LightningCLI")
    return content


def _scripts_beside(configs: Sequence[Path]) -> list[Path]:
    """The Python files in the folders of the configurations that mention LightningCLI; they are not run."""
    files = sorted({file for config in configs for file in config.parent.glob("*.py")})
    return [file for file in files if "LightningCLI" in file.read_text(encoding="utf-8", errors="ignore")]


def check_early(contents: Sequence[Mapping[str, Any]], overrides: Sequence[str]) -> None:
    """Refuse a configuration of the strategy that cannot work, whatever the model and the number of ranks.

    Raises:
        ConfigError: at the first field that cannot work.
        ArgumentError: a field is not there, or has a value of another type.
    """
    from jsonargparse import ArgumentParser

    from lightning_mm5d.config.modality import Modality
    from lightning_mm5d.schedule import SCHEDULES, is_table

    try:
        arguments = [part for content in contents for part in ("--config", _checked(content))]
        arguments += _overriding(overrides)
    except _UnresolvedError:
        return
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_argument("--modalities", type=dict[str, Modality], default=None)
    parser.add_argument("--schedule", type=str, default="1f1b")
    parser.add_argument("--num_microbatches", type=int, default=1)
    parsed = parser.parse_args(arguments)
    made = (getattr(parser, "instantiate", None) or parser.instantiate_classes)(parsed)
    # a table, or the path of a function
    own = made.schedule is not None and (is_table(made.schedule) or "." in made.schedule)
    check(
        made.modalities or {"model": Modality()},
        num_microbatches=made.num_microbatches,
        schedule="own" if own else made.schedule,
        schedules=("own",) if own else SCHEDULES,
    )


def _checked(content: Mapping[str, Any]) -> str:
    """The fields to be checked as YAML."""
    trainer = content.get("trainer")
    found: Any = content if "trainer" not in content and "model" not in content else {}
    if isinstance(trainer, dict):
        found = trainer.get("strategy", {})
    if found == "mm5d":
        found = {}
    if not isinstance(found, dict) or str(found.get("class_path", "MultimodalStrategy")).split(".")[-1] != (
        "MultimodalStrategy"
    ):
        raise _UnresolvedError
    arguments = found.get("init_args", found)
    if isinstance(arguments, dict):
        _check_keys(arguments, only_near="trainer" not in content)
    kept = {key: arguments[key] for key in CHECKED if key in arguments} if isinstance(arguments, dict) else {}
    text = yaml.safe_dump(kept, sort_keys=False)
    if "${" in text or not isinstance(kept.get("modalities") or {}, dict):
        raise _UnresolvedError
    return text


def _check_keys(arguments: Mapping[str, Any], *, only_near: bool) -> None:
    """Refuse keys that are no fields of the strategy: the parser of the LightningCLI passes over some of them.

    Args:
        arguments: of the strategy, or a whole file that gives sizes alone.
        only_near: whether other keys are fine unless they look like a field.
    """
    for key in arguments:
        near = difflib.get_close_matches(str(key), FIELDS, n=1, cutoff=0.8 if only_near else 0.0)
        if key not in (*FIELDS, "class_path", "dict_kwargs") and near:
            fix = f"Did you mean {near[0]!r}? There are {', '.join(FIELDS)}"
            raise ConfigError(str(key), arguments[key], "The strategy has no such field", fix)


def _overriding(overrides: Sequence[str]) -> Iterator[str]:
    """The options that override checked fields, as ``--modalities.vision.tp_size=2``."""
    rest = iter(overrides)
    for option in rest:
        name, given, value = option.partition("=")
        value = value if given else next(rest, "")
        if name in ("--trainer", "--trainer.strategy", "--trainer.strategy.class_path", "--trainer.strategy.init_args"):
            raise _UnresolvedError
        field = next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), "")
        if field.split(".")[0] not in CHECKED:
            continue
        if field == "modalities" and not isinstance(_loaded(name, value), dict):
            raise _UnresolvedError
        yield f"--{field}={value}"


def _loaded(option: str, value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(option, value, "It is no YAML", "Write for instance {language: {pp_size: 2}}") from error
