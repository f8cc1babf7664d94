"""Reads YAML configurations and refuses at once what they alone show to be wrong, without importing torch.

Checks the fields of the strategy, with the options that override them. Leaves the
rest to the parser of the LightningCLI, and also everything that only that parser resolves: files that are named inside
of the configuration, variables, and strategies that are no `MultimodalStrategy`.

What the parser refuses is told in one line, with the option that was probably meant.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightning_mm5d.config.checks import MOST
from lightning_mm5d.config.errors import ConfigError, did_you_mean
from lightning_mm5d.config.groups import (
    FIELDS,
    OF_MODALITY,
    OF_STRATEGY,
    build_groups,
    names_of,
    path_of,
    refuse_unknown,
)
from lightning_mm5d.config.modality import Modality, as_modalities, for_schedule, loss_modality_of
from lightning_mm5d.config.options import FUNCTIONS
from lightning_mm5d.layout.layout import Layout
from lightning_mm5d.schedule import check_fields, is_table

_CHECKED = (
    *("modalities", "schedule", "placement", "timeline"),
    *(name for group in OF_STRATEGY.values() for name in names_of(group)),
)
"""Names of checked fields, without their groups."""
_MODALITY_FIELDS = {*names_of(Modality), *(name for group in OF_MODALITY.values() for name in names_of(group))} - {
    "module"
}  # which is also a key of other files
_DURATION = re.compile(r"(-?\d+ days?, )?\d+:\d+:[\d.]+")
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

    @property
    def names_data(self) -> bool:
        """Whether a file names the class of the data module, which the script makes else."""
        return has_class("data", self.contents)


def has_class(key: str, contents: Sequence[Mapping[str, Any]], options: Sequence[str] = ()) -> bool:
    """Return whether files or options name the class of the ``model``, or of the ``data``."""
    sections = [content.get(key) for content in contents]
    named = any(isinstance(part, str) or (isinstance(part, Mapping) and "class_path" in part) for part in sections)
    return named or any(option.split("=")[0] in (f"--{key}", f"--{key}.class_path") for option in options)


def prepare(
    configs: Sequence[Path],
    script: Path | None,
    overrides: Sequence[str],
    *,
    sizes_will_do: bool = False,
    other_ranks: bool = False,
) -> Source:
    """Read the files and check what they say, without torch and without running any code of the user.

    Args:
        configs: YAML files, later ones laid on top.
        script: the file that makes the LightningCLI.
        overrides: options of the LightningCLI.
        sizes_will_do: whether the model may be missing, which it is where neither the files nor the options say
            ``model`` and there is no script.
        other_ranks: whether the ranks are others than those configured, which need not fit the sizes.

    Raises:
        ConfigError: a file cannot be read, a field cannot work, or nothing names the class of the model.
        ArgumentError: a field is not there, or has a value of another type.
    """
    contents = [read_configuration(config) for config in configs]
    if script is not None and not script.is_file():
        raise ConfigError("--script", str(script), "There is no such file", "Name the script that trains")
    check_early(contents, overrides, has_script=script is not None, other_ranks=other_ranks)
    keys = {option[2:].split("=")[0].split(".")[0] for option in overrides if option.startswith("--")}
    if sizes_will_do and script is None and "model" not in keys.union(*contents):
        return Source(configs, contents, script, overrides, has_model=False)
    models = [content.get("model") for content in contents]
    # `model.model` is what a MultimodalModule wants, the class where none is named
    is_recipe = any(isinstance(model, dict) and "model" in model for model in models)
    if script is None and not is_recipe and not has_class("model", contents, overrides):
        rule = "Without model.class_path the classes are those of the script that makes the LightningCLI"
        beside = _scripts_beside(configs)
        fix = f"Add --script {beside[0]}" if len(beside) == 1 else "Name that script with --script"
        if len(beside) > 1:
            fix += f". Beside the configuration there are {', '.join(map(str, beside))}"
        raise ConfigError("CONFIG", str(configs[0]), rule, fix)
    return Source(configs, contents, script, overrides)


def read_configuration(config: Path, option: str = "CONFIG") -> dict[str, Any]:
    """Return what a YAML file maps, which `option` names.

    Raises:
        ConfigError: the file cannot be read, is no YAML, gives a key twice, or maps nothing.
    """
    if config.suffix == ".py":
        rule = "A configuration is a YAML file, and this is a script"
        raise ConfigError(option, str(config), rule, f"Name the YAML file, and add --script {config}")
    try:
        content = yaml.load(config.read_text(encoding="utf-8"), _Loader)  # a SafeLoader
    except OSError as error:
        raise ConfigError(option, str(config), f"It cannot be read: {error.strerror}", "Name a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(option, str(config), f"It is no YAML: {error}", "Correct it there") from error
    if isinstance(content, dict) and "trainer" in content and not isinstance(content["trainer"], dict):
        rule = "It maps settings of the trainer, such as devices and strategy, to their values"
        raise ConfigError("trainer", content["trainer"], rule, "Leave the key out, or name a setting under it")
    if not isinstance(content, dict):
        rule, fix = "It maps keys to values", "Write them there as key: value"
        if option == "CONFIG":
            rule = "A configuration maps keys such as trainer, model and data to settings"
            fix = "Name a configuration of a LightningCLI"
        raise ConfigError(option, str(config), rule, fix)
    return content


class _Loader(yaml.SafeLoader):
    """Refuses keys that are given twice, of which YAML's own loader takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                rule = f"The key is given twice, again in line {key.start_mark.line + 1}"
                raise ConfigError(str(key.value), "two values", rule, "Leave it in once")
            if isinstance(key.value, str):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _scripts_beside(configs: Sequence[Path]) -> list[Path]:
    """The Python files in the folders of the configurations that mention LightningCLI; they are not run."""
    files = sorted({file for config in configs for file in config.parent.glob("*.py")})
    return [file for file in files if "LightningCLI" in file.read_text(encoding="utf-8", errors="ignore")]


def check_early(
    contents: Sequence[Mapping[str, Any]],
    overrides: Sequence[str],
    *,
    has_script: bool = False,
    other_ranks: bool = False,
) -> None:
    """Refuse a configuration of the strategy that cannot work, whatever the model and the number of ranks.

    Args:
        contents: of YAML files, later ones laid on top.
        overrides: options that lie on top of them.
        has_script: whether the LightningCLI is a script's, with options and defaults of its own.
        other_ranks: as of `prepare`.

    Raises:
        ConfigError: at the first field that cannot work, or where the class is named in place of a strategy.
        ArgumentError: a field is not there, or has a value of another type.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    check_numbers(contents, overrides)
    _check_places(contents, has_script)
    if not has_script:
        _check_class(contents, overrides)
    for setting in ((content.get("trainer") or {}).get("strategy") for content in contents):
        if isinstance(setting, str) and setting.rpartition(".")[2] == "MultimodalStrategy":
            fix = "Write strategy: {class_path: lightning_mm5d.MultimodalStrategy}, or strategy: mm5d for replicas"
            raise ConfigError("trainer.strategy", setting, "A text is the name of a strategy that Lightning knows", fix)
    try:
        arguments = [part for content in contents for part in ("--config", _checked(content))]
        arguments += _overriding(overrides)
    except _UnresolvedError:
        return
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    types = {"modalities": dict[str, Modality | int], "timeout": timedelta, "watchdog": timedelta}
    for field in _CHECKED:
        parser.add_argument(f"--{field}", type=types.get(field, Any), default=None)
    try:
        parsed = parser.parse_args(arguments)
        instances = (getattr(parser, "instantiate", None) or parser.instantiate_classes)(parsed)
    except (ArgumentError, ValueError):  # the latter where a class is made of what has another type
        _check_as_written(arguments)
        raise
    fields = {field: value for field in _CHECKED if (value := instances[field]) is not None}
    _without_functions(fields)
    if "modalities" in fields:
        fields["modalities"] = as_modalities(fields["modalities"])
    check_fields(fields)
    if not other_ranks:
        _check_world(contents, overrides, fields)


def check_numbers(contents: Sequence[Mapping[str, Any]], overrides: Sequence[str]) -> None:
    """Refuse options for fields of a modality that a file writes as its number of stages, which would be lost.

    Raises:
        ConfigError: at the first such option.
    """
    modalities = _modalities_of(contents)
    for modality, field, value in _modality_options(overrides):
        if type(stages := modalities.get(modality)) is int:
            rule = f"The file says {modality}: {stages}, which leaves no room for another field"
            fix = f"Write {modality}: {{pp_size: {stages}}} there"
            raise ConfigError(f"modalities.{modality}.{field}", value, rule, fix)


def _check_places(contents: Sequence[Mapping[str, Any]], has_script: bool) -> None:
    """Refuse fields of the strategy outside of it: the parser passes over those that hold empty mappings alone.

    Raises:
        ConfigError: at the first such field.
    """
    names = ("init_args", "modalities", "schedule", "placement", "timeline", *OF_STRATEGY)
    for content in (content for content in contents if isinstance(content.get("trainer"), Mapping)):
        places = [(f"trainer.{name}", content["trainer"][name]) for name in names if name in content["trainer"]]
        if not has_script:  # whose LightningCLI may have such options
            places += [(name, content[name]) for name in names if name in content]
        strategy = content["trainer"].get("strategy")
        if isinstance(strategy, Mapping) and "init_args" in strategy:
            places += [(f"trainer.strategy.{name}", strategy[name]) for name in names[1:] if name in strategy]
        for place, value in places:
            name = place.rpartition(".")[2]
            where = f"trainer.strategy.{name if name == 'init_args' else f'init_args.{name}'}"
            raise ConfigError(place, value, "It is a setting of the strategy", f"Move it to {where}")


def _check_class(contents: Sequence[Mapping[str, Any]], overrides: Sequence[str]) -> None:
    """Refuse settings of a strategy beside a model where nothing names the strategy's class.

    Raises:
        ConfigError: no file and no option does.
    """
    settings = [(content.get("trainer") or {}).get("strategy") for content in contents if "trainer" in content]
    given = [setting for setting in settings if setting not in (None, {})]
    names_class = any(not isinstance(setting, Mapping) or "class_path" in setting for setting in given)
    options = {name for name, _ in _pairs(overrides)}
    if not given or names_class or not options.isdisjoint({"--trainer.strategy", "--trainer.strategy.class_path"}):
        return
    if any("model" in content for content in contents):
        fix = "Write class_path: lightning_mm5d.MultimodalStrategy, and its settings under init_args"
        raise ConfigError("trainer.strategy", given[-1], "Nothing names its class", fix)


def _modalities_of(contents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The modalities of files, which may be those of a LightningCLI or of a strategy alone."""
    modalities: dict[str, Any] = {}
    for content in contents:
        section: Any = content
        for key in ("trainer", "strategy", "init_args"):
            section = section[key] if isinstance(section, Mapping) and key in section else section
        named = section.get("modalities") if isinstance(section, Mapping) else None
        modalities |= named if isinstance(named, Mapping) else {}
    return modalities


def _modality_options(overrides: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the modality, the field and the value of options that set a field of a modality."""
    for name, value in _pairs(overrides):
        modality, _, field = name.partition("modalities.")[2].partition(".")
        if field:
            yield modality, field, value


def _check_spelling(contents: Sequence[Mapping[str, Any]], overrides: Sequence[str]) -> None:
    """Refuse an option for a modality that no file has, and whose name is nearly that of one."""
    modalities = [*map(str, _modalities_of(contents))]
    for modality, field, value in _modality_options(overrides):
        if modality not in modalities and difflib.get_close_matches(modality, modalities):
            rule = "The option adds a modality to those of the files, and the layout does not fit the ranks"
            raise ConfigError(f"modalities.{modality}.{field}", value, rule, did_you_mean(modality, modalities))


def _without_functions(fields: dict[str, Any]) -> None:
    """Take out the import paths of functions, which only the parser of the LightningCLI imports."""
    for field in ("schedule", *FUNCTIONS):
        if isinstance(path := fields.get(field), str) and "." in path and not (field == "schedule" and is_table(path)):
            del fields[field]


def _check_world(contents: Sequence[Mapping[str, Any]], overrides: Sequence[str], fields: Mapping[str, Any]) -> None:
    """Refuse sizes that do not fill the ranks, where their number is written down."""
    trainer: dict[str, Any] = {}
    for content in contents:
        trainer |= content.get("trainer", {})
    for name, value in _pairs(overrides):
        if name in ("--trainer.devices", "--trainer.num_nodes"):
            trainer[name.rpartition(".")[2]] = _loaded(name, value)
    nodes = trainer.get("num_nodes", 1)
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        raise ConfigError("trainer.num_nodes", nodes, "It is a whole number of at least 1", "Use 1 for one machine")
    if trainer.get("devices", "auto") in ("auto", -1, "-1"):
        return
    per_node = devices(trainer["devices"])
    modalities = fields.get("modalities") or {"model": Modality()}
    loss_modality = loss_modality_of(modalities)
    try:
        Layout.build(
            for_schedule(modalities, fields.get("schedule"), loss_modality),
            world_size=per_node * nodes,
            loss_modality=loss_modality,
            ranks_per_node=per_node,
            placement=fields.get("placement"),
        )
    except ConfigError:
        _check_spelling(contents, overrides)
        raise


def devices(given: Any) -> int:
    """Return the number of processes per node, from the forms that Lightning knows.

    Args:
        given: a number, a list of devices, or either as text.

    Raises:
        ConfigError: only the training machine can tell, or it is none of these.
    """
    ids = given if isinstance(given, list) else [part for part in str(given).split(",") if part.strip()]
    if isinstance(given, list) and len(set(map(repr, ids))) < len(ids):
        raise ConfigError("trainer.devices", given, "It lists each device once", f"Use {len(set(map(repr, ids)))}")
    if ids and (isinstance(given, list) or len(ids) > 1):
        return len(ids)
    if str(given).isdecimal() and 0 < int(given) <= MOST:
        return int(given)
    if str(given) not in ("auto", "-1"):
        rule = f"It is a number of devices from 1 to {MOST}, or a list of them"
        raise ConfigError("trainer.devices", given, rule, "Use for instance 8")
    rule = "It depends on the machine that trains, which may not be this one, so it must be a number here"
    raise ConfigError("trainer.devices", given, rule, "Add --trainer.devices=8, or whatever that machine has")


def _check_as_written(arguments: Sequence[str]) -> None:
    """Refuse in the words of `check_fields` what the parser found to have another type.

    Args:
        arguments: each ``--config`` with the text of a file, and ``--modalities.vision.tp_size=2``.
    """
    written: dict[str, Any] = {}
    for argument in arguments:
        name, given, value = argument.removeprefix("--").partition("=")
        if argument == "--config":
            continue
        if argument.startswith("--") and given:
            *path, last = name.split(".")
            fields: Any = {last: _loaded(argument, value)}
            for key in reversed(path):
                fields = {key: fields}
        else:
            fields = yaml.safe_load(argument)
        _lay(written, fields)
    if "modalities" in written:
        written["modalities"] = as_modalities(written["modalities"])
    written = {field: value for field, value in written.items() if value is not None}
    for field, usual in (("timeout", "0:30:00"), ("watchdog", "0:05:00")):
        duration = written.pop(field, None)
        if duration is not None and not (isinstance(duration, str) and _DURATION.fullmatch(duration)):
            rule = "It is a duration, written as hours:minutes:seconds in quotes"
            raise ConfigError(path_of(field), duration, rule, f"Use for instance {usual!r}")
    _without_functions(written)
    check_fields(written)


def _lay(under: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(under.get(key), dict):
            _lay(under[key], value)
        else:
            under[key] = value


def _checked(content: Mapping[str, Any]) -> str:
    """The fields to be checked as YAML; raises ConfigError for unknown ones that the parser passes over."""
    trainer = content.get("trainer")
    strategy: Any = content if "trainer" not in content and "model" not in content else {}
    if isinstance(trainer, dict):
        strategy = trainer.get("strategy", {})
    if strategy == "mm5d":
        strategy = {}
    if not isinstance(strategy, dict) or str(strategy.get("class_path", "MultimodalStrategy")).split(".")[-1] != (
        "MultimodalStrategy"
    ):
        raise _UnresolvedError
    arguments = strategy.get("init_args", strategy)
    if isinstance(arguments, dict):
        _check_keys(arguments, only_near="trainer" not in content)
    fields = _without_groups(arguments) if isinstance(arguments, dict) else {}
    checked = {key: fields[key] for key in _CHECKED if key in fields}
    if isinstance(modalities := checked.get("modalities"), dict):
        given = {name: spec for name, spec in modalities.items() if isinstance(spec, dict) and "class_path" not in spec}
        as_modalities({name: {key: spec[key] for key in spec if spec[key] == {}} for name, spec in given.items()})
    text = yaml.safe_dump(checked, sort_keys=False)
    if "${" in text or isinstance(checked.get("modalities"), str):
        raise _UnresolvedError
    return text


def _check_keys(arguments: Mapping[str, Any], *, only_near: bool) -> None:
    """Refuse keys that are no fields of the strategy: the parser of the LightningCLI passes over some of them.

    Args:
        arguments: of the strategy, or a whole file that gives sizes alone.
        only_near: whether other keys are fine unless they look like a field.
    """
    for key, value in arguments.items():
        near = difflib.get_close_matches(str(key), [*FIELDS, *_CHECKED], n=1, cutoff=0.8 if only_near else 0.0)
        if key not in ("class_path", "dict_kwargs") and (near or key in _MODALITY_FIELDS):
            refuse_unknown({str(key): value})


def _overriding(overrides: Sequence[str]) -> Iterator[str]:
    """The options that override checked fields, as ``--modalities.vision.tp_size=2``."""
    for name, value in _pairs(overrides):
        if name in ("--trainer", "--trainer.strategy", "--trainer.strategy.class_path", "--trainer.strategy.init_args"):
            raise _UnresolvedError
        field = next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), "")
        group, _, inner = field.partition(".")
        if group in OF_STRATEGY and inner:
            field = inner
        elif group in OF_STRATEGY:
            for key, setting in _without_groups({group: _loaded(name, value)}).items():
                yield f"--{key}={setting}"
            continue
        if name.startswith("--trainer.strategy."):
            _check_keys({group: value}, only_near=False)
        if field.split(".")[0] not in _CHECKED:
            continue
        if field == "modalities" and isinstance(_loaded(name, value), str):
            raise _UnresolvedError
        yield f"--{field}={value}"


def _without_groups(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the strategy by their names alone; raises ConfigError for groups that are none."""
    fields = dict(arguments)
    if isinstance(kind := fields.get("checkpoint"), str):
        fields["checkpoint"] = {"checkpoint_format": kind}
    groups = {group: fields.pop(group) for group in OF_STRATEGY if group in fields}
    build_groups(OF_STRATEGY, groups, "")
    return fields | {name: value for group in groups.values() for name, value in (group or {}).items()}


def _pairs(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The options' names and values, of ``--name=value`` and ``--name value``."""
    rest = iter(overrides)
    for option in rest:
        name, given, value = option.partition("=")
        yield name, value if given else next(rest, "")


def _loaded(option: str, value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(option, value, "It is no YAML", "Write for instance {language: {pp_size: 2}}") from error


_UNION = "Does not validate against any of the Union subtypes"
_NOISE = ("Subtypes:", "Errors:", "Given value", "Expected a <class 'NoneType'>", "Expected a <class 'str'>")
_UNKNOWN = re.compile(
    r"(?:given class_path '(?P<owner>[\w.]+)':\s+)?(?:Option|not accept option|Key) '(?P<key>[\w.]+)'"
    r"|unrecognized arguments: --(?P<option>[\w.]+)"
)
_OF_COMMANDS = (
    *("script", "json", "out", "cost", "frozen", "ranks", "memory", "cluster", "from", "write", "measure"),
    *("world", "rank", "all"),
)
"""options of commands, beside those of a LightningCLI"""
_LONG = 20  # names; longer lists are not printed


def one_line(message: str) -> str:
    """The message in one line, without the list of types that jsonargparse tried, and with the nearest key."""
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    shortened = " ".join(line for line in lines if not line.startswith(_NOISE)).replace(_UNION, "")
    text = " ".join((" ".join(lines) if shortened.rstrip().endswith(":") else shortened).split())
    given = re.search(r"^\s*Given value: (.+)$", message, re.MULTILINE)
    if given is not None and given[1] not in text:
        text = f"{text.rstrip('.')}. Given: {given[1]}"
    advice = _suggestion(message)
    return f"{text.rstrip('.')}. {advice}" if advice else text


def _suggestion(message: str) -> str:
    """``Did you mean 'pp_size'?`` for a key that some class does not accept; nothing for other messages."""
    *_, match = [None, *_UNKNOWN.finditer(message)]
    if match is None:
        return ""
    if (option := match["option"]) and option.split(".")[0] in {*FIELDS, *_CHECKED}:
        return f"Write --trainer.strategy.init_args.{option if '.' in option else path_of(option)}"
    path, _, key = (match["key"] or option).rpartition(".")
    owner = match["owner"] or {"trainer": "lightning.pytorch.Trainer"}.get(path)
    top = ["trainer", "model", "data", "seed_everything", *FIELDS, *map(path_of, _CHECKED), *_OF_COMMANDS]
    known = _parameters(owner) if owner else [] if path else list(dict.fromkeys(top))
    if not difflib.get_close_matches(key, known):
        return ""
    advice = did_you_mean(key, known)
    return advice if len(known) <= _LONG else f"{advice.split('? ')[0]}?"


def _parameters(path: str) -> list[str]:
    module, _, name = path.rpartition(".")
    if module.startswith("lightning.") and module not in sys.modules:
        return []
    try:
        constructor = getattr(importlib.import_module(module), name).__init__
        parameters = inspect.signature(constructor).parameters.values()
    except (ImportError, AttributeError, TypeError, ValueError):
        return []
    return [each.name for each in parameters if each.name != "self" and each.kind is not each.VAR_KEYWORD]
