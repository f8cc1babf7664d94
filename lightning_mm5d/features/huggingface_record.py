"""What a checkpoint says about the Hugging Face models in it, as JSON, so that they come out again without the code.

`describe` looks at a module once per run. For each outermost transformers model, and each adapter of PEFT, the record
holds the path, the class, the configuration, the names of its tensors, which of them are tied, and how transformers
would rename them. Processors and tokenizers that are attributes come along as their files.

The record holds names and numbers only: reading it builds no class but those of transformers, by name.
"""

from __future__ import annotations

import base64
import copy
import json
import re
import tempfile
import warnings
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_mm5d.config.errors import CheckpointCorruptError, ConfigError, imported, private
from lightning_mm5d.trainer.feature import Feature
from lightning_mm5d.trainer.resume import KEY

VERSION = 1
RECORD = "huggingface"  # checkpoint[KEY][RECORD] is the record, as text
UNKNOWN = "unknown"  # the kind of a model that cannot be described
COMPILED = "_orig_mod"  # torch.compile's name for the module inside
_PROCESSORS = (
    ("tokenization_utils_base", "PreTrainedTokenizerBase"),
    ("feature_extraction_utils", "FeatureExtractionMixin"),
    ("image_processing_base", "ImageProcessingMixin"),
)
_MOST_FILES = 256 * 2**20  # bytes of a processor's files, before compression


@runtime_checkable
class NamesItsClass(Protocol):
    """A model of transformers that says itself by which class an export builds it."""

    def class_for_export(self) -> str | None:
        """Return the dotted name of the class; None where none can build it."""


def describe(module: nn.Module, *owners: Any) -> dict[str, Any]:
    """Return the record of the Hugging Face models in a module, as JSON; without models it has empty lists.

    Args:
        module: the LightningModule, whole or cut; before it is cut, ties that only memory shows are seen too.
        owners: further objects whose attributes may be processors, for instance the datamodule.
    """
    state = module.state_dict(keep_vars=True)
    models = [_model(path, model, state) for path, model in _outermost(module)]
    processors = [_processor(name, each) for name, each in _processors((module, *owners))]
    same = [names for names in _shared(state) if len(names) > 1] if models else []
    return {"version": VERSION, "models": models, "processors": processors, "same": same}


def with_record(checkpoint: MutableMapping[str, Any], record: Mapping[str, Any]) -> None:
    """Put a record into a checkpoint, as text; one without models and processors is left out."""
    if record["models"] or record["processors"]:
        checkpoint[KEY] = {**checkpoint.get(KEY, {}), RECORD: json.dumps(record)}


def record_in(checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the record of a checkpoint; None where there is none.

    Raises:
        CheckpointCorruptError: it is not what `describe` makes.
        ConfigError: a later version of lightning_mm5d made it.
    """
    section = checkpoint.get(KEY)
    text = section.get(RECORD) if isinstance(section, Mapping) else None
    if text is None:
        return None
    try:
        record: dict[str, Any] = json.loads(text)
        version = int(record["version"])
        wrong = [key for key in ("models", "processors", "same") if not isinstance(record[key], list)]
        wrong += [model for model in record["models"] if not {"path", "name", "kind"} <= model.keys()]
        wrong += [processor for processor in record["processors"] if not {"path", "class", "files"} <= processor.keys()]
        if wrong:
            raise ValueError(f"it has no such {str(wrong[0])[:100]}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointCorruptError(
            f"The checkpoint's record of Hugging Face models is not readable: {error}"
        ) from None
    if version > VERSION:
        rule = f"Its record of Hugging Face models has a later format than {VERSION}"
        raise ConfigError("CHECKPOINT", version, rule, "Install the version of lightning_mm5d that saved it")
    return record


def _outermost(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Paths and models that lie in no other model, each once, by its first path."""
    classes = imported("transformers.modeling_utils", "PreTrainedModel"), imported("peft.peft_model", "PeftModel")
    kinds = tuple(kind for kind in classes if kind is not None)
    models = [(path, part) for path, part in module.named_modules() if isinstance(part, kinds)]
    inner = {id(child) for _, model in models for child in model.modules() if child is not model}
    return ((path, model) for path, model in models if id(model) not in inner)


def _shared(state: Mapping[str, Any]) -> list[list[str]]:
    """Names by tensor, in the order of the state dict."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, value in state.items():
        if isinstance(value, Tensor):
            groups[id(value)].append(name)
    return list(groups.values())


def _model(path: str, model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    prefix = f"{path}." if path else ""
    tensors = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
    record: dict[str, Any] = {"path": path, "name": type(model).__name__}
    try:
        adapters = getattr(model, "peft_config", None)
        if adapters:
            return record | {"kind": "adapter", "adapters": {name: _adapter(model, name, tensors) for name in adapters}}
        return record | {"kind": "model"} | _pretrained(model, tensors)
    except Exception as error:  # of somebody's own configuration or model; the checkpoint is saved all the same
        return record | {"kind": UNKNOWN, "error": f"{type(error).__name__}: {error}"}


# --- models ---


def _pretrained(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    generates = model.can_generate() and model.generation_config is not None
    ties = _tied(model, tensors)
    ignored = model._keys_to_ignore_on_save or ()  # documented in PreTrainedModel for those who derive from it
    return {
        "class": _class(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "config": _config(model),
        "generation_config": json.loads(model.generation_config.to_json_string()) if generates else None,
        "names": [name for name in tensors if name not in ties and name not in ignored],
        "tied": ties,
        "ignored": [name for name in tensors if name in ignored],
        "conversions": _conversions(model),
        "quantized": bool(getattr(model, "is_quantized", False)),
    }


def _class(model: Any) -> str | None:
    """Return the dotted name of the class, or of its nearest base that transformers defines; None without one."""
    if isinstance(model, NamesItsClass):
        return model.class_for_export()
    for base in type(model).__mro__:
        if base.__module__.startswith("transformers.models."):
            return f"{base.__module__}.{base.__qualname__}"
    return None


def _config(model: Any) -> dict[str, Any]:
    """Return the configuration as `save_pretrained` writes it; the model keeps its own unchanged."""
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    return json.loads(config.to_json_string())


def _tied(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names that are left out of a file, each with the one that is written for it.

    Leaves out a tied tensor only where `from_pretrained` ties it again by the configuration. Other tensors that share
    memory are written under each of their names.
    """
    declared = model.get_expanded_tied_weights_keys(all_submodels=True)
    ties: dict[str, str] = {}
    for names in _shared(tensors):
        targets = sorted(name for name in names if name in declared)
        if len(targets) == len(names):
            targets.pop()
        written = next(name for name in names if name not in targets)
        ties |= dict.fromkeys(targets, written)
    return ties


def _conversions(model: nn.Module) -> list[Any] | None:
    """Return the renamings and conversions with which weights were loaded; None where they were not loaded from files.

    transformers notes them on a model that `from_pretrained` made, and saves with the reverse of them alone.
    """
    used = vars(model).get("_weight_conversions")
    return None if used is None else [conversion_key(each) for each in used]


def conversion_key(transform: Any) -> list[Any]:
    """Return the JSON by which a conversion of transformers is found again."""
    patterns = [list(transform.source_patterns), list(transform.target_patterns)]
    return [type(transform).__name__, *patterns, transform.scope_prefix, transform.base_model_prefix]


# --- adapters ---


def _adapter(model: Any, adapter: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The configuration of one adapter, and which tensor of the model is which of its file."""
    file_tensors = _adapter_tensors(model, adapter, tensors)
    saved = set(file_tensors.values()) if file_tensors is not None else set()
    return {
        "config": _adapter_config(model, adapter),
        "tensors": file_tensors,
        "trained_outside": [name for name, tensor in tensors.items() if tensor.requires_grad and name not in saved],
    }


def _adapter_tensors(model: Any, adapter: str, state: Mapping[str, Tensor]) -> dict[str, str] | None:
    """Names in the adapter's file, each with the name in the model; None where a file holds computed tensors."""
    import peft

    marks = {name: torch.empty(0, device="meta") for name in state}  # peft chooses and renames: each keeps its identity
    names = {id(mark): name for name, mark in marks.items()}
    embeddings = _with_embeddings(model, model.peft_config[adapter])
    try:
        with warnings.catch_warnings(action="ignore"):  # it says that it takes embeddings along
            chosen = peft.get_peft_model_state_dict(model, marks, adapter, save_embedding_layers=embeddings)
    except (RuntimeError, KeyError, AttributeError, TypeError, IndexError):  # it computes with what it takes
        return None
    start = "" if isinstance(model, peft.PeftModel) else "base_model.model."  # adapters that transformers holds
    if any(id(value) not in names for value in chosen.values()):
        return None
    return {start + name: names[id(value)] for name, value in chosen.items()}


def _with_embeddings(model: Any, config: Any) -> bool | str:
    """Whether embeddings belong to the adapter; PEFT alone would ask the network where the base model lies there."""
    from peft.utils.other import EMBEDDING_LAYER_NAMES

    base, targets = config.base_model_name_or_path, getattr(config, "target_modules", None) or ()
    if not base or Path(base, "config.json").exists():
        return "auto"
    if isinstance(targets, str):
        paths = (path for path, _ in model.named_modules() if path.rpartition(".")[2] in EMBEDDING_LAYER_NAMES)
        return any(re.fullmatch(targets, path) for path in paths)
    return any(name in targets for name in EMBEDDING_LAYER_NAMES)


def _adapter_config(model: Any, adapter: str) -> dict[str, Any]:
    """``adapter_config.json`` as PEFT writes it."""
    config = copy.deepcopy(model.peft_config[adapter])
    config.inference_mode = True
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = vars(base).get("name_or_path")
    of = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=of if config.task_type is None else None)
        return json.loads(Path(folder, "adapter_config.json").read_text(encoding="utf-8"))


# --- processors ---


def _processors(owners: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Attributes that turn texts, images or sounds into inputs, without those that are parts of another."""
    mixin = imported("transformers.processing_utils", "ProcessorMixin")
    classes = (mixin, *(imported(f"transformers.{place}", name) for place, name in _PROCESSORS))
    kinds = tuple(kind for kind in classes if kind is not None)
    attributes = [item for owner in owners for item in getattr(owner, "__dict__", {}).items()]
    known = {id(value): (name, value) for name, value in attributes if isinstance(value, kinds)}
    whole = [value for _, value in known.values() if mixin and isinstance(value, mixin)]
    parts = {id(part) for processor in whole for part in vars(processor).values()}
    return (item for key, item in known.items() if key not in parts)


def _processor(name: str, processor: Any) -> dict[str, Any]:
    """Its class and its files, compressed, in base64; no files where it cannot be saved."""
    record: dict[str, Any] = {"path": name, "class": type(processor).__name__, "files": {}}
    with tempfile.TemporaryDirectory() as folder:
        try:
            processor.save_pretrained(folder)
        except Exception:  # some need files that are not there, or libraries
            return record
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        if sum(path.stat().st_size for path in paths) <= _MOST_FILES:
            record["files"] = {path.relative_to(folder).as_posix(): _packed(path.read_bytes()) for path in paths}
    return record


def _packed(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode("ascii")


def unpacked(text: str) -> bytes:
    """Return a file's content.

    Raises:
        ValueError: the text is no such file, or a larger one than is ever written.
    """
    try:
        decoder = zlib.decompressobj()
        content = decoder.decompress(base64.b64decode(text, validate=True), _MOST_FILES)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not decoder.eof:
        raise ValueError("it is truncated or too large")
    return content


class HuggingFaceRecord(Feature):
    """Describes the models of a module once."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._described: tuple[pl.LightningModule, dict[str, Any]] | None = None

    def saving(self, checkpoint: dict[str, Any], module: pl.LightningModule) -> None:
        """Add the record."""
        if self._described is None or self._described[0] is not module:
            # a process that only waited for ranks has a module without a trainer
            trainer = private(module, "_trainer")
            self._described = module, describe(module, getattr(trainer, "datamodule", None))
        with_record(checkpoint, self._described[1])


FEATURE = HuggingFaceRecord
