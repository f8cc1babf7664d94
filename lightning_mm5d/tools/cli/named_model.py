"""Builds the model that ``mm5d inspect --model`` names, without its weights.

A name is the import path of a class, a ``config.json`` of Hugging Face, or a folder with one. Configurations are read
as JSON; the class is the one that they name (``architectures``) where transformers has it, else that of the auto
classes. No code of a folder runs, nothing is unpickled and nothing is downloaded. Refuses everything else by its name.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from lightning.pytorch.plugins import Precision
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.tools.cli.configuration import FIELD, FIX, configuration_file, read_fields
from lightning_mm5d.tools.cli.terminal import reason
from lightning_mm5d.trainer.construction import configured, made_construction
from lightning_mm5d.trainer.other_package import check_package

_COMPOSED = "mm5d_multimodal"
_AUTO = (
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModel",
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
    made = _of_class(name) if file is None else _of_configuration(file)
    return configured(made, Precision()) if isinstance(made, pl.LightningModule) else Shown(made)


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
    for architecture in config.architectures or ():
        cls = getattr(transformers, str(architecture), None)
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel):
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
