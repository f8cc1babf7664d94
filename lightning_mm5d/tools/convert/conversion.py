"""Finds out whose configuration is given, and says it in ours: files of Python, YAML and JSON, and mappings.

Python files are read and never run. Refuses what no table knows, values that only a run could tell, and configurations
in which nothing tells whose they are.

A converted configuration as YAML of a LightningCLI, with what became of each knob as comments above.
"""

from __future__ import annotations

import os
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_mm5d.config.errors import ConfigError, did_you_mean
from lightning_mm5d.config.groups import OF_STRATEGY, in_groups
from lightning_mm5d.tools.convert import colossalai, cornstarch, mindformers, replicas
from lightning_mm5d.tools.convert.knobs import Conversion, Effect, Entry, Knob
from lightning_mm5d.tools.convert.python_source import read_python, refuse_unread

_HEADINGS: tuple[tuple[Effect, str], ...] = (
    ("mapped", "Converted"),
    ("results", "No equal, and results depend on it"),
    ("costs", "No equal; time or memory may differ"),
    ("elsewhere", "Said elsewhere: in the model, the data or the Trainer"),
    ("always", "Nothing to say"),
)
_WIDEST = 60


def as_yaml(conversion: Conversion) -> str:
    """Return the configuration; its comments list every given knob."""
    settings: dict[str, Any] = {
        "trainer": {
            **conversion.trainer,
            "strategy": {"class_path": "lightning_mm5d.MultimodalStrategy", "init_args": conversion.strategy},
        }
    }
    listed = "".join(f"# {line}\n" if line else "#\n" for line in as_lines(conversion))
    return f"{listed}{yaml.safe_dump(settings, sort_keys=False)}"


def as_lines(conversion: Conversion) -> list[str]:
    """Return a line for every given knob, below headings that say what became of them."""
    lines = [f"From {conversion.source}"]
    for effect, heading in _HEADINGS:
        entries = conversion.of(effect)
        if entries:
            lines += ["", f"{heading}:"]
        if effect == "elsewhere":
            for about in dict.fromkeys(entry.about for entry in entries):
                names = ", ".join(_one_line(entry.name) for entry in entries if entry.about == about)
                lines += [f"  {part}" for part in textwrap.wrap(f"{names}  ({about})", 110)]
        else:
            lines += [f"  {_line(entry)}" for entry in entries]
    return lines


def _line(entry: Entry) -> str:
    line = f"{_one_line(entry.name)}={_shown(entry.got)}"
    if entry.fields:
        line += " -> " + ", ".join(f"{name}: {_shown(value)}" for name, value in entry.fields.items())
    return _one_line(f"{line}  ({entry.about})" if entry.about else line)


def _shown(value: Any) -> str:
    text = _one_line(repr(value))
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def _one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


PLUGINS: dict[str, tuple[Callable[[Mapping[str, Any]], Conversion], Sequence[Knob]]] = {
    "HybridParallelPlugin": (colossalai.convert_hybrid, colossalai.KNOBS),
    "MoeHybridParallelPlugin": (colossalai.convert_moe, colossalai.MOE_KNOBS),
    **replicas.PLUGINS,
    "MultimodalParallelPlugin": (cornstarch.convert_multimodal, cornstarch.KNOBS),
    "EncodersColocatedMultimodalParallelPlugin": (cornstarch.convert_colocated, cornstarch.KNOBS),
    "HeterogeneousParallelPlugin": (cornstarch.convert_unlike, cornstarch.UNLIKE_KNOBS),
    "ModalParallelPlugin": (cornstarch.convert_modal, cornstarch.MODAL_KNOBS),
}
"""For the class of each plugin what converts its arguments, and their table; a file or mapping may name a class."""
_MAKERS: dict[str, tuple[str, ...]] = {
    **{
        name: tuple(dict.fromkeys(knob.name.partition(".")[0] for knob in table))
        for name, (_, table) in PLUGINS.items()
    },
    "GradientCheckpointConfig": ("gradient_checkpointing_ratio",),
    "PipelineGradientCheckpointConfig": ("gradient_checkpointing_ratio", "num_ckpt_layers_per_stage"),
    "PipelineTemplate": ("model_name", "modules_per_stage", "latency", "kstar_latency", "mem_required"),
}
_MOST_BYTES = 2**22  # of a configuration
_MOST_VALUES = 100_000


def read_configuration(config: str | os.PathLike[str] | Mapping[str, Any]) -> Conversion:
    """Say another system's configuration in ours.

    Args:
        config: a file (``.py``, else YAML or JSON), or what such a file holds. It may name one of `PLUGINS`; others are
            known by their knobs.

    Raises:
        ConfigError: it cannot be read, has unknown knobs, or nothing tells whose it is.
    """
    if isinstance(config, Mapping):
        _refuse_expansion(config, _parts_of_value, "config")
        return _of_mapping(config, "config")
    if not isinstance(config, str | os.PathLike):
        raise ConfigError("config", config, "It is a file or a mapping", "Name a file")
    path = Path(config)
    text = _text(path)
    return _of_python(text, str(path)) if path.suffix == ".py" else _of_mapping(_yaml(text, path), str(path))


def arguments_of(config: str | os.PathLike[str] | Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the strategy that a configuration of another system asks for.

    Args:
        config: as for `read_configuration`.
        given: arguments that take the place of converted ones.

    Raises:
        ConfigError: as for `read_configuration`; or a knob has no equal, and results depend on it or the run fails.
    """
    conversion = read_configuration(config)
    if missing := conversion.of("results"):
        raise _refused(missing)
    for entry in conversion.of("costs"):
        warnings.warn(f"{entry.name}={entry.got!r} has no equal and is left out. {entry.about}.", stacklevel=5)
    if conversion.trainer:
        arguments = ", ".join(f"{name}={value!r}" for name, value in conversion.trainer.items())
        warnings.warn(f"The configuration also sets what is the Trainer's: Trainer({arguments}).", stacklevel=5)
    if rest := conversion.of("elsewhere"):
        names = ", ".join(entry.name for entry in rest)
        warnings.warn(f"The model, the data or the Trainer says what the configuration says of {names}.", stacklevel=5)
    given = in_groups(OF_STRATEGY, given, "")
    merged = {group: {**ours, **given[group]} for group, ours in conversion.strategy.items() if _is_group(group, given)}
    return {**conversion.strategy, **given, **merged}


def _is_group(name: str, given: Mapping[str, Any]) -> bool:
    return name in OF_STRATEGY and isinstance(given.get(name), Mapping)


def _refused(missing: tuple[Entry, ...]) -> ConfigError:
    first = missing[0]
    rest = f" So it is with {', '.join(entry.name for entry in missing[1:])}" if missing[1:] else ""
    rule = f"It has no equal here, and results depend on it. {first.about}"
    return ConfigError(first.name, first.got, rule, f"Leave it out of the configuration.{rest}".rstrip("."))


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError("FILE", str(path), f"It has more than {_MOST_BYTES} bytes", "Name a configuration")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError("FILE", str(path), f"It is no text: {error}", "Name a configuration") from error
    except (OSError, ValueError) as error:  # the latter of a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise ConfigError("FILE", str(path), f"It cannot be read: {reason}", "Name a file") from error


def _refuse_expansion(value: Any, parts: Callable[[Any], list[Any]], file: str) -> None:
    """Refuse what aliases or names make larger than a configuration is when it is written out, or endless."""
    sizes: dict[int, int] = {}

    def size(part: Any) -> int:
        if id(part) not in sizes:
            sizes[id(part)] = _MOST_VALUES  # of what holds itself
            sizes[id(part)] = min(_MOST_VALUES, 1 + sum(map(size, parts(part))))
        return sizes[id(part)]

    if size(value) >= _MOST_VALUES:
        rule = f"With its aliases written out it has more than {_MOST_VALUES} values, or no end"
        raise ConfigError("FILE", file, rule, "Write the values that it needs")


def _parts_of_node(node: yaml.Node) -> list[yaml.Node]:
    return (
        [part for pair in node.value for part in pair]
        if isinstance(node, yaml.MappingNode)
        else (node.value if isinstance(node, yaml.SequenceNode) else [])
    )


def _parts_of_value(value: Any) -> list[Any]:
    return [*value.values()] if isinstance(value, Mapping) else list(value) if isinstance(value, list | tuple) else []


def _yaml(text: str, path: Path) -> Mapping[str, Any]:
    try:
        _refuse_expansion(yaml.compose(text, Loader=yaml.SafeLoader), _parts_of_node, str(path))
        content = yaml.safe_load(text)  # JSON is YAML, too
    except ConfigError:
        raise
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError) as error:  # `2024-13-45`
        raise ConfigError("FILE", str(path), f"It is no YAML: {error}", "Correct it there") from error
    if not isinstance(content, Mapping):
        raise ConfigError("FILE", str(path), "A configuration maps names to values", "Name a configuration")
    return content


def _of_python(text: str, file: str) -> Conversion:
    names, calls = read_python(text, file, _MAKERS)
    _refuse_expansion([names, *(call.arguments for call in calls)], _parts_of_value, file)
    plugins = [call for call in calls if call.name in PLUGINS]
    # scripts that choose one at the start make plugins for replicas beside the one that shards
    plugins = [call for call in plugins if call.name not in replicas.PLUGINS] or plugins
    whole = [call for call in plugins if call.name != "ModalParallelPlugin"] or plugins
    if len(whole) > 1:
        lines = ", ".join(f"{call.name} in line {call.line}" for call in whole)
        raise ConfigError("FILE", file, f"It makes several plugins: {lines}", "Leave one of them in a copy of it")
    if whole:
        convert, table = PLUGINS[whole[0].name]
        knobs = (*table, *cornstarch.MODAL_KNOBS)
        read = {knob.name.rpartition(".")[2] for knob in knobs if knob.ours or knob.rule}
        refuse_unread(whole[0].arguments, "", {knob.name.rpartition(".")[2] for knob in knobs} - read)
        return convert(whole[0].arguments)
    if colossalai.is_legacy(names):
        refuse_unread({name: names[name] for name in colossalai.LEGACY_READ if name in names}, "")
        return colossalai.convert_legacy(names)
    raise colossalai.missing_parallel(names, file)


def _of_mapping(given: Mapping[str, Any], file: str) -> Conversion:
    if len(given) == 1 and (name := next(iter(given))) in PLUGINS:
        arguments = given[name]
        if not isinstance(arguments, Mapping):
            raise ConfigError(str(name), arguments, "It maps arguments to values", "Write for instance {tp_size: 2}")
        return PLUGINS[str(name)][0](arguments)
    keys = given.keys()
    if not keys.isdisjoint(("encoder_plugins", "language_model_plugin")):
        return cornstarch.convert_multimodal(given)
    if colossalai.is_legacy(given):
        return colossalai.convert_legacy(given)
    if mindformers.is_mindformers(given):
        return mindformers.convert_mindformers(given)
    if "tp_size" in keys and "pipelines" in keys:
        return cornstarch.convert_unlike(given)
    if "tp_size" in keys and "pipeline_template" in keys:
        return cornstarch.convert_modal(given)
    if {"tp_size", "pp_size", "ep_size"} <= keys:
        return colossalai.convert_moe(given)
    if "tp_size" in keys or "pp_size" in keys:
        return colossalai.convert_hybrid(given)
    marks = ("parallel", "parallel_config", "tp_size", "encoder_plugins", "language_model_plugin", *PLUGINS)
    fix = did_you_mean(next(iter(given), None), marks)
    rule = "Nothing tells that it is of ColossalAI, Cornstarch or MindFormers"
    raise ConfigError("FILE", file, rule, fix)
