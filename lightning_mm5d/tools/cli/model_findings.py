"""What ``mm5d inspect --model`` finds in a model: its modalities, what degrees of parallelism would do, and why not.

Every degree is tried on its own by the checks of a run, with all that they refuse. Nothing is computed, and the module
may be on the meta device. Where a layout is named, it is shown too.

**The model.** Builds the model that ``mm5d inspect --model`` names, without its weights. A name is the import path of a
class, a ``config.json`` of Hugging Face, or a folder with one. Configurations are read as JSON; the class is the one
that they name (``architectures``) where transformers has it, else that of the auto classes. No code of a folder runs,
nothing is unpickled and nothing is downloaded. Refuses everything else by its name.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from lightning.pytorch.plugins import Precision
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.config.tables import Page, Table, memory_text
from lightning_mm5d.partition.find import discover, find
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.recipes.module import named_class
from lightning_mm5d.schedule import name_of
from lightning_mm5d.strategy import MultimodalStrategy
from lightning_mm5d.tensor_parallel.plan_lookup import origins
from lightning_mm5d.tools.cli.configuration import prepare
from lightning_mm5d.tools.cli.job import load, needed_ranks, settle
from lightning_mm5d.tools.cli.terminal import FIELD, FIX, configuration_file, read_fields, reason, show
from lightning_mm5d.tools.planner.inspect import as_json, holdings, parameters_of, report
from lightning_mm5d.trainer.construction import configured, made_construction
from lightning_mm5d.trainer.validation import check_package

_COMPOSED = "mm5d_multimodal"
_AUTO = (
    *("AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq", "AutoModelForCausalLM"),
    *("AutoModelForMaskedLM", "AutoModelForImageClassification", "AutoModel"),
)


class Shown(pl.LightningModule):
    """The customary LightningModule around a model, which it has as ``self.model``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss of the model's own forward."""
        return self.model(**batch).loss


def named_model(name: str) -> pl.LightningModule:
    """Return a LightningModule of the named class, or one around the named model; it has no weights.

    Raises:
        ConfigError: there is no such model, or it cannot be built so.
    """
    file = configuration_file(name)
    model = _of_class(name) if file is None else _of_configuration(file)
    return configured(model, Precision()) if isinstance(model, pl.LightningModule) else Shown(model)


def _of_configuration(path: Path) -> nn.Module:
    fields = read_fields(path)
    kind = fields["model_type"]
    if kind == _COMPOSED:
        importlib.import_module("lightning_mm5d.models.multimodal_model")  # registers the family
    try:
        config = CONFIG_MAPPING[kind].from_dict(fields)
    except KeyError as error:
        code = "; the code beside it (auto_map) is not run" if "auto_map" in fields else ""
        near = difflib.get_close_matches(kind, list(CONFIG_MAPPING.keys()), n=1)
        fix = f"The nearest is {near[0]!r}; otherwise" if near else "Otherwise"
        rule = f"transformers {transformers.__version__} has no model_type {kind!r}{code}"
        raise ConfigError(FIELD, str(path), rule, f"{fix} give the import path of your own class") from error
    except Exception as error:  # checks of transformers' own, of many kinds
        raise ConfigError(FIELD, str(path), f"transformers refuses it: {reason(error)}", "Correct it there") from error
    return _built(str(path), lambda: _of_config(config, str(path)))


def _of_config(config: PreTrainedConfig, name: str) -> nn.Module:
    if (cls := named_class(config)) is not None:
        return cls(config)
    for auto in _AUTO:
        cls = getattr(transformers, auto)
        if type(config) in cls._model_mapping:
            return cls.from_config(config, trust_remote_code=False)
    raise ConfigError(FIELD, name, f"transformers has no model for {type(config).__name__}", FIX)


def _of_class(name: str) -> nn.Module:
    owner, _, last = name.rpartition(".")
    try:
        module = importlib.import_module(owner)
    except Exception as error:  # the user's code
        raise ConfigError(FIELD, name, f"{owner} cannot be imported: {reason(error)}", FIX) from error
    cls = getattr(module, last, None)
    if cls is None:
        near = difflib.get_close_matches(last, dir(module), n=1)
        raise ConfigError(FIELD, name, f"{owner} has no {last}", f"The nearest is {owner}.{near[0]}" if near else FIX)
    check_package(FIELD, [cls])
    if not isinstance(cls, type) or not issubclass(cls, nn.Module):
        got = f"a {cls.__name__ if isinstance(cls, type) else type(cls).__name__}"
        raise ConfigError(FIELD, name, f"It is {got}, and no class of modules", FIX)
    if issubclass(cls, PreTrainedModel) and isinstance(cls.config_class, type):
        config = cls.config_class
        return _built(name, lambda: cls(config()))
    needed = [
        parameter.name
        for parameter in inspect.signature(cls).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        rule = f"Its constructor needs {', '.join(needed)}"
        fix = (
            "Name a class whose arguments have defaults, or a configuration of a LightningCLI as CONFIG in place of it"
        )
        raise ConfigError(FIELD, name, rule, fix)
    return _built(name, cls)


def _built(name: str, make: Callable[[], nn.Module]) -> nn.Module:
    """The module, on the meta device, or recorded where its constructor reads values."""
    try:
        with torch.device("meta"):
            return make()
    except ConfigError:
        raise
    except Exception:  # it computes with values, which meta tensors lack
        try:
            with made_construction().without_memory():
                return make()
        except Exception as error:
            rule = f"It cannot be built without its weights: {reason(error)}"
            raise ConfigError(FIELD, name, rule, "Correct its configuration or its constructor") from error


_LOSS = "language"
"""Name of the modality that owns what no other does, where there are several."""
_SHARDED = ("column", "row", "experts")


@dataclass(frozen=True)
class Part:
    """A modality of the model: what it owns, where it is cut off, its layers and their class, and its parameters."""

    modality: str
    owns: tuple[str, ...]
    boundaries: tuple[str, ...]
    layers: str | None
    number: int
    layer: str | None
    parameters: int
    trainable: int


@dataclass(frozen=True)
class Try:
    """A degree of parallelism of one modality: whether it works, and how, or why not."""

    modality: str
    setting: str
    works: bool
    text: str


@dataclass(frozen=True)
class Findings:
    """All that is found.

    Attributes:
        model: class of the model.
        parameters: elements, tied ones once.
        bytes: of parameters, in their dtype.
        parts: its modalities, the one with the loss last.
        tries: of each modality.
    """

    model: str
    parameters: int
    bytes: int
    parts: list[Part]
    tries: list[Try]

    def page(self) -> Page:
        """Return what is printed."""
        rows = [
            (
                part.modality,
                ", ".join(part.boundaries) or "the loss",
                f"{part.layers} ({part.number} x {part.layer})" if part.layers else "none",
                part.parameters,
                part.trainable,
            )
            for part in self.parts
        ]
        tries = [
            (trial.modality, trial.setting, "yes" if trial.works else "no", trial.text or "-") for trial in self.tries
        ]
        return [
            f"model       {self.model}\nparameters  {self.parameters:,}, {memory_text(self.bytes)}",
            Table.of(("modality", "cut at", "layers", "parameters", "trainable"), rows),
            Table.of(("modality", "setting", "works", "how, or why not"), tries),
        ]


def findings(module: pl.LightningModule, *, tp_size: int = 2, pp_size: int = 2) -> Findings:
    """Return what is found in a module.

    Args:
        module: the meta device will do.
        tp_size: that is tried.
        pp_size: that is tried.
    """
    encoders = discover(module)
    names = [*encoders, _LOSS if encoders else "model"]
    plain: dict[str, Modality] = {name: Modality() for name in names}
    modalities = find(module, plain)
    whole = _planned(module, plain)
    parts, named = [], [*module.named_parameters(remove_duplicate=False)]
    for name in names:
        layers, encoder = modalities.layers[name], modalities.encoders.get(name)
        container = module.get_submodule(layers) if layers else None
        held = parameters_of(named, whole, [cut.name for cut in whole.partition.stages[name]]).values()
        parts.append(
            Part(
                name,
                encoder.owns if encoder else (),
                tuple(cut.name for cut in encoder.boundaries) if encoder else (),
                layers,
                len(modalities.parts[name].paths),
                ", ".join(dict.fromkeys(type(layer).__name__ for layer in container.children()))
                if container is not None
                else None,
                sum(p.numel() for p in held),
                sum(p.numel() for p in held if p.requires_grad),
            )
        )
    every = list(module.parameters())
    shown = getattr(module, "model", module) if type(module).__name__ == "Shown" else module
    return Findings(
        type(shown).__name__,
        sum(p.numel() for p in every),
        sum(p.numel() * p.element_size() for p in every),
        parts,
        [_tried(module, plain, name, setting) for name in names for setting in _settings(tp_size, pp_size)],
    )


def _settings(tp_size: int, pp_size: int) -> list[dict[str, Any]]:
    return [{"tp_size": tp_size}, {"pp_size": pp_size}, {"cp_size": 2}, {"ep_size": 2, "dp_size": 2}]


def _planned(module: pl.LightningModule, modalities: Mapping[str, Modality]) -> Plan:
    strategy = MultimodalStrategy(dict(modalities), batching={"num_microbatches": 2})
    settle(strategy, needed_ranks(modalities), 1)
    return strategy.validate(module)


def _tried(module: pl.LightningModule, plain: Mapping[str, Modality], name: str, setting: dict[str, Any]) -> Try:
    title = ", ".join(f"{key}={value}" for key, value in setting.items())
    others = {"dp_size": setting["dp_size"]} if "dp_size" in setting else {}
    modalities = {modality: Modality(**(setting if modality == name else others)) for modality in plain}
    try:
        text = _how(module, _planned(module, modalities), name, setting)
    except ConfigError as error:
        return Try(name, title, False, " ".join(f"{error.rule}. {error.fix}".split()))
    return Try(name, title, True, text)


def _how(module: nn.Module, plan: Plan, name: str, setting: Mapping[str, Any]) -> str:
    if "tp_size" in setting:
        sharded = [path for path, role in plan.division.roles.items() if role in _SHARDED]
        counts, whole = origins(module, sharded), list(plan.division.whole)
        text = ", ".join(f"{count} layers from {origin}" for origin, count in counts.items())
        return text + (f"; full on every rank: {_listed(whole)}" if whole else "")
    if "pp_size" in setting:
        cuts = plan.partition.stages[name]
        return "layers " + ", ".join(f"[{cut.first}:{cut.last}]" for cut in cuts)
    if "ep_size" in setting:
        layers = [layer for layer in plan.experts.values() if layer.modality == name]
        numbers = ", ".join(str(number) for number in dict.fromkeys(layer.number for layer in layers))
        return f"{numbers} experts in {len(layers)} layers"
    return ""


def _listed(paths: list[str]) -> str:
    return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")


def inspect_model(arguments: Namespace) -> None:
    """Print what is found in the model that `arguments` name.

    Raises:
        ConfigError: there is no such model, or the layout does not fit it.
    """
    for name in ("tp", "pp"):
        if getattr(arguments, name) < 2:
            rule = "It is a degree that is tried, of at least 2"
            raise ConfigError(f"--{name}", getattr(arguments, name), rule, f"Use --{name} 2, or leave it out")
    sys.path.insert(0, str(Path().resolve()))  # as `python -m` does
    logging.getLogger("lightning_mm5d").setLevel(logging.ERROR)  # what stays full is in the table
    job = None if arguments.config is None else load(prepare([arguments.config], None, (), sizes_will_do=True))
    module = named_model(arguments.model)
    summary = findings(module, tp_size=arguments.tp, pp_size=arguments.pp)
    page, output = summary.page(), asdict(summary)
    if job is not None:
        plan = job.strategy.validate(module)
        name = name_of(job.strategy.schedule)
        page += report(plan, module, schedule=name, num_microbatches=job.strategy.usual_microbatches())
        output["places"] = as_json(holdings(plan, module), [])
    if arguments.json:
        print(json.dumps(output, indent=2))
    else:
        show(page)
