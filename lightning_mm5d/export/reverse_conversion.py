"""Names and forms of tensors as `save_pretrained` writes them, computed for one group of tensors at a time.

transformers renames, splits and merges tensors while it loads a model, and reverts that when it saves. The fused
experts of Mixtral, for instance, are one tensor for each expert and projection in a file. `revert_weight_conversion` of
transformers does it for a whole state dict in memory. `ReverseConversion` does the same for each group of tensors that
belong together, and reads them when their turn comes.

The model that transformers asks for is built on the meta device, without memory. Its class comes from transformers by
name, or is this package's composed model of such classes; no other class is imported.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.features.huggingface_record.feature import conversion_key
from lightning_mm5d.models.multimodal_config import without_own_code

try:
    from transformers.core_model_loading import (
        PrefixChange,
        WeightConverter,
        WeightRenaming,
        WeightTransform,
        apply_converters,
        apply_renamings,
        dot_natural_key,
    )
except ImportError as error:
    rule = "Folders of Hugging Face are written with transformers 5.23 or newer"
    fix = "Install 'transformers>=5.23'"
    raise ImportError(f"{rule}, and {transformers.__version__} is installed: {fix}") from error

Read = Callable[[str], Tensor]
_CLASS = re.compile(r"(transformers\.models\.\w+\.modeling_\w+|lightning_mm5d\.models\.multimodal_model)\.(\w+)")


def empty_model(dotted: str, config: Mapping[str, Any], field: str) -> PreTrainedModel:
    """Return a model of transformers on the meta device.

    Args:
        dotted: module and name of the class.
        config: the content of ``config.json``.
        field: where both come from, for the error.

    Raises:
        ConfigError: transformers has no such class, or the configuration is not one of it.
    """
    match = _CLASS.fullmatch(dotted)
    try:
        cls = getattr(importlib.import_module(match[1]), match[2]) if match else None
    except (ImportError, AttributeError):
        cls = None
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel) and cls.config_class is not None):
        rule = "Classes come from transformers by name, never from a checkpoint, and the installed one has none of it"
        raise ConfigError(field, dotted, rule, "Install the version of transformers that the model was trained with")
    try:
        fields = without_own_code(config) if cls.__module__.startswith("lightning_mm5d.") else deepcopy(dict(config))
        if fields is None:
            raise ValueError("it names classes that are not of transformers")
        made = cls.config_class.from_dict(fields)
        with torch.device("meta"):
            return cls(made)
    except Exception as error:  # a configuration can be wrong in any way
        rule = f"{cls.__name__} cannot be made from this configuration: {error}"
        raise ConfigError(field, config.get("model_type"), rule, "Give its own with --config") from error


class ReverseConversion:
    """Takes tensors under their names in a model, and gives them as a file of transformers has them.

    Args:
        model: on the meta device; None for a class that transformers does not know, whose tensors stay as they are.
        used: the conversions with which the model was loaded, by `conversion_key`; None where it was not loaded.
        field: where they come from, for the error.

    Raises:
        ConfigError: the installed transformers has another conversion, or none.
    """

    def __init__(self, model: PreTrainedModel | None, used: Sequence[Any] | None, field: str) -> None:
        self._model = model
        self._transforms = _transforms(model, used, field) if model is not None else []
        self._sorted = used is not None or bool(self._transforms)  # transformers sorts where it may convert

    def tensors(self, names: Sequence[str], read: Read) -> Iterator[tuple[str, Tensor]]:
        """Yield names in a file and tensors, one group after the other.

        Args:
            names: of all tensors of the model, without those that tied ones stand for.
            read: returns a tensor by its name in the model; called for the tensors of one group at a time.
        """
        if not self._sorted:
            yield from ((name, read(name)) for name in names)
            return
        assert self._model is not None or not self._transforms
        reverse = [each.reverse_transform() for each in reversed(self._transforms)]
        renamings = [each for each in reverse if isinstance(each, WeightRenaming)]
        for first, group in self._grouped(names, read, reverse, renamings).items():
            yield from self._converted(first, group, renamings)

    def _converted(self, first: str, group: Any, renamings: list[WeightRenaming]) -> Iterator[tuple[str, Tensor]]:
        config = self._model.config if self._model is not None else None
        made = group.convert(first, model=self._model, config=config)
        while made:  # each is given away before the next one is asked for
            name = next(iter(made))
            value = made.pop(name)
            name = apply_renamings(name, renamings) if isinstance(group, WeightConverter) else name
            yield name, value.pop() if isinstance(value, list) else value
            del value

    def _grouped(
        self, names: Sequence[str], read: Read, reverse: Sequence[WeightTransform], renamings: list[WeightRenaming]
    ) -> dict[str, Any]:
        """For each conversion the names that it takes together, as in transformers' `revert_weight_conversion`."""
        converters = [each for each in reverse if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        groups: dict[str, Any] = {}
        for name in sorted(names, key=dot_natural_key):
            renamed, pattern = apply_converters(name, converters)
            if pattern is not None:
                group = groups.setdefault(renamed, deepcopy(by_pattern[pattern]))
            else:
                renamed, pattern = apply_renamings(name, renamings), name
                group = groups.setdefault(renamed, WeightRenaming(name, renamed))
            group.add_tensor(renamed, name, pattern, partial(read, name))  # called when it is converted
        return groups


def _transforms(model: PreTrainedModel, used: Sequence[Any] | None, field: str) -> list[WeightTransform]:
    known = get_model_conversion_mapping(model, add_legacy=used is not None)
    if used is None:  # whether a prefix was there is not known, so transformers adds none
        return [each for each in known if not isinstance(each, PrefixChange)]
    by_key = {json.dumps(conversion_key(each)): each for each in known}
    return [by_key.get(json.dumps(key)) or _own_renaming(key, field) for key in used]


def _own_renaming(key: Any, field: str) -> WeightRenaming:
    """A renaming that the user gave to `from_pretrained` as ``key_mapping``."""
    try:
        kind, sources, targets, *_ = key
        if kind == "WeightRenaming":
            return WeightRenaming(list(sources), list(targets))
    except (TypeError, ValueError, re.error):
        pass
    rule = "The installed transformers does not convert tensors in this way"
    raise ConfigError(field, key, rule, "Install the version of transformers that the model was trained with")
