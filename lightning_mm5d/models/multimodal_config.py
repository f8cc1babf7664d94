"""The configuration of a composed model: those of its parts, and what joins them.

It is plain JSON when saved. Parts are named by the class that they are built by, callbacks and own projectors by the
path that they are imported from.

Names a function or class by the path it is imported from, so that a saved configuration can name it.

Only what an import finds again has such a path. Paths in a configuration name code that will run, so they are
resolved to functions and classes of installed packages alone, never to those of the standard library.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import field
from importlib import import_module
from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    configuration_utils,
)

from lightning_mm5d.config.errors import CheckpointUntrustedError, ConfigError


def import_path(item: Any) -> str | None:
    """Return ``"package.module:name"`` of a function or class; None where an import would not find it again."""
    module, name = getattr(item, "__module__", None), getattr(item, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__" or "<" in name:
        return None
    definition: Any = sys.modules.get(module)
    for step in name.split("."):
        definition = getattr(definition, step, None)
    return f"{module}:{name}" if definition is item else None


def written_path(item: Any) -> str | None:
    """Return the path of a function or class also where an import finds nothing there; None for None."""
    if item is None:
        return None
    name = getattr(item, "__qualname__", f"{type(item).__qualname__}()")
    return f"{getattr(item, '__module__', type(item).__module__)}:{name}"


def from_import_path(path: str, field: str, base: type | None = None) -> Any:
    """Return the function at `path`, or the class.

    Args:
        path: what `import_path` returned.
        field: that holds it, for the error.
        base: what the class derives from; None for a function.

    Raises:
        ConfigError: there is no such function or class.
        CheckpointUntrustedError: it belongs to the standard library, or it is something else than the field holds, so
            it cannot have been written for a module of a model.
    """
    module, _, name = str(path).partition(":")
    if not isinstance(path, str) or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise CheckpointUntrustedError(f"{field} names {path!r}, which is no import path; it is not run")
    if module.partition(".")[0] in {*sys.stdlib_module_names, "builtins"}:
        raise CheckpointUntrustedError(f"{field} names {path!r}, which belongs to the standard library; it is not run")
    try:
        definition: Any = import_module(module)
        for step in name.split("."):
            definition = getattr(definition, step)
    except (ImportError, AttributeError) as error:
        fix = "Make it importable under that path, or compose the model again and load its weights"
        raise ConfigError(field, path, f"There is no such function or class ({error})", fix) from None
    if not (inspect.isfunction(definition) or inspect.isclass(definition)) or import_path(definition) != path:
        raise ConfigError(field, path, "It is neither a function nor a class defined there", "Name the definition")
    if base is None and not inspect.isfunction(definition):
        raise CheckpointUntrustedError(f"{field} names {path!r}, which is no function; it is not run")
    if base is not None and not (inspect.isclass(definition) and issubclass(definition, base)):
        raise CheckpointUntrustedError(f"{field} names {path!r}, which is no {base.__name__}; it is not run")
    return definition


_SPEC = vars(configuration_utils).get("SubConfigSpec")  # None before transformers 5.23
CUSTOMARY_NAMES = {"image": ("image", "vision"), "audio": ("audio", "speech"), "video": ("video",)}


class MultimodalConfig(PreTrainedConfig):
    """What a `MultimodalModel` is built from.

    Attributes:
        encoders: for each modality a mapping with ``model`` (the configuration of its encoder), ``model_class`` (the
            path of the class that it is built by; by default the one that ``AutoModel`` picks), ``projector`` (the
            fields of a `ProjectorConfig`, or ``class`` and ``config`` of a module of one's own), ``before``,
            ``after`` and ``after_projector`` (paths of callbacks) and ``feature_layer``.
        encoder_names: the names of all encoders in the order in which they run; JSON keeps no order.
        text_config: of the language model.
        language_model_class: the path of its class; by default the one that ``AutoModelForCausalLM`` picks.
        token_ids: for each modality the id of the placeholder token that a row of features replaces.
    """

    model_type = "mm5d_multimodal"
    if _SPEC is None:
        sub_configs = {"text_config": AutoConfig}
    else:
        sub_configs_defaults = {"text_config": _SPEC(config_class=AutoConfig, model_type="llama")}

    encoders: dict[str, Any] = field(default_factory=dict)
    encoder_names: list[str] = field(default_factory=list)
    text_config: dict[str, Any] | PreTrainedConfig | None = None
    language_model_class: str | None = None
    token_ids: dict[str, int] = field(default_factory=dict)

    def __post_init__(self, **kwargs: Any) -> None:
        self.token_ids = dict(self.token_ids)
        encoders = self.encoders
        self.encoder_names = list(self.encoder_names or encoders)
        if sorted(self.encoder_names) != sorted(encoders):
            rule = f"It must name each of the encoders, {', '.join(encoders)}, once"
            raise ConfigError("encoder_names", self.encoder_names, rule, "Leave it out")
        self.encoders = {name: _entry(name, encoders[name]) for name in self.encoder_names}
        if isinstance(self.text_config, PreTrainedConfig):  # transformers writes to it
            self.text_config = copy.deepcopy(self.text_config)
        else:
            self.text_config = AutoConfig.for_model(**{"model_type": "llama", **(self.text_config or {})})
        tokens = list(self.token_ids.values())
        if len(set(tokens)) < len(tokens):
            rule = "Each modality needs a placeholder token of its own"
            raise ConfigError("token_ids", self.token_ids, rule, "Use different tokens")
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        output = super().to_dict()
        for entry in output["encoders"].values():
            if isinstance(entry["model"], PreTrainedConfig):
                entry["model"] = entry["model"].to_dict()
        return output

    def _token_id(self, kind: str) -> int | None:
        return next((self.token_ids[name] for name in CUSTOMARY_NAMES[kind] if name in self.token_ids), None)

    @property
    def image_token_id(self) -> int | None:
        """The placeholder of the modality named ``image`` or ``vision``."""
        return self._token_id("image")

    @property
    def audio_token_id(self) -> int | None:
        """The placeholder of the modality named ``audio`` or ``speech``."""
        return self._token_id("audio")

    @property
    def video_token_id(self) -> int | None:
        """The placeholder of the modality named ``video``."""
        return self._token_id("video")


def built_encoder(entry: Mapping[str, Any]) -> Any:
    """Build the encoder that an entry of `MultimodalConfig.encoders` describes."""
    if entry.get("model_class") is None:
        return AutoModel.from_config(entry["model"])
    return from_import_path(entry["model_class"], "encoders.model_class", PreTrainedModel)(entry["model"])


def built_language_model(config: MultimodalConfig) -> Any:
    """Build the language model that `config` describes."""
    if config.language_model_class is None:
        return AutoModelForCausalLM.from_config(config.text_config)
    return from_import_path(config.language_model_class, "language_model_class", PreTrainedModel)(config.text_config)


def _entry(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    known = ("model", "model_class", "projector", "before", "after", "after_projector", "feature_layer")
    if unknown := [key for key in entry if key not in known] or [key for key in ("model",) if key not in entry]:
        rule = f"An encoder has {', '.join(known)}, of which model is needed"
        raise ConfigError(f"encoders.{name}", sorted(entry), rule, f"Correct {unknown[0]!r}")
    entry = {**dict.fromkeys(known), "projector": {"kind": "mlp"}, "feature_layer": -1, **entry}
    if isinstance(entry["model"], Mapping):
        entry["model"] = _sub_config(entry["model"], entry["model_class"], f"encoders.{name}")
    return entry


def _sub_config(fields: Mapping[str, Any], model_class: str | None, where: str) -> PreTrainedConfig:
    if model_class is not None:
        cls = from_import_path(model_class, f"{where}.model_class", PreTrainedModel)
        return cls.config_class.from_dict(dict(fields))
    if "model_type" not in fields:
        raise ConfigError(f"{where}.model", sorted(fields), "It has no model_type", "Name the family of the encoder")
    return AutoConfig.for_model(**fields)


def without_own_code(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fields of a configuration without callbacks; None where it names classes outside of transformers."""
    config = copy.deepcopy(dict(fields))
    classes = [config.get("language_model_class")]
    for entry in config.get("encoders", {}).values():
        entry |= {"before": None, "after": None, "after_projector": None}
        classes += [entry.get("model_class"), entry.get("projector", {}).get("class")]
    of_transformers = [path is None or re.fullmatch(r"transformers\.models\.[\w.]+:\w+", path) for path in classes]
    return config if all(of_transformers) else None
