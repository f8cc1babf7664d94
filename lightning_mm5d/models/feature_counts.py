"""How many features each item gives, told by a model's configuration and the sizes of its inputs alone.

A processor writes as many placeholder tokens. Callbacks and projectors of one's own run on tensors without memory, so
that nobody has to say what they do to lengths.

Shapes: L rows of an item, D width of the encoder, E width of the language model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_mm5d.config.errors import ConfigError, did_you_mean
from lightning_mm5d.models.encoder_kinds import ItemSize, count_rows, input_names, width
from lightning_mm5d.models.multimodal_config import MultimodalConfig, from_import_path
from lightning_mm5d.models.projectors import ProjectorConfig, projected_length

Change = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def feature_counts(config: MultimodalConfig, name: str, inputs: Mapping[str, Tensor], encoder: Any = None) -> list[int]:
    """Return how many features each item of a modality gives after the projector.

    Args:
        config: of the model.
        name: of the modality.
        inputs: of its encoder, by the names that the encoder's forward has.
        encoder: the `ModalityEncoder`, for its own callbacks and projector; without it those that `config` names are
            imported.

    Raises:
        ConfigError: there is no such modality, or its features do not suit its projector.
    """
    if name not in config.encoders:
        rule = "The model has no such modality"
        raise ConfigError("num_features", name, rule, did_you_mean(name, config.encoders))
    entry, field = config.encoders[name], f"encoders.{name}"

    def callback(key: str) -> Any:
        if encoder is not None:
            return getattr(encoder, key)
        return entry[key] and from_import_path(entry[key], f"{field}.{key}")

    if (before := callback("before")) is not None:
        inputs = before(dict(inputs))
    features, embedded = width(entry["model"]), config.get_text_config().hidden_size
    own = None
    if "class" in entry["projector"]:
        own = encoder.projector if encoder is not None else built_projector(entry["projector"], field, device="meta")
    counted: dict[ItemSize, int] = {}
    sizes = count_rows(entry["model"], inputs)
    for size in dict.fromkeys(sizes):
        now = _changed(callback("after"), size, features)
        frame = now.length // now.frames
        if own is None:
            length = projected_length(ProjectorConfig(**entry["projector"]), frame, now.grid)
        else:
            length = len(_on_meta(own, (1, frame, features))[0])
        counted[size] = _changed(callback("after_projector"), ItemSize(length * now.frames), embedded).length
    return [counted[size] for size in sizes]


def batch_keys(config: MultimodalConfig) -> dict[str, dict[str, str]]:
    """For each modality its encoder's inputs and their keys in a batch.

    A key is the input's own name, with the modality's name in front where two encoders or the text have that name.
    """
    own = {name: input_names(entry["model"]) for name, entry in config.encoders.items()}
    names = [key for keys in own.values() for key in keys]
    taken = ("input_ids", "attention_mask", "position_ids", "labels", "inputs_embeds")
    return {
        name: {key: key if names.count(key) == 1 and key not in taken else f"{name}_{key}" for key in keys}
        for name, keys in own.items()
    }


def built_projector(described: Mapping[str, Any], field: str, device: str | None = None) -> nn.Module:
    """Build a projector of one's own from what a configuration says of it.

    Args:
        described: ``class``, its import path, and ``config``, the keywords of its constructor.
        field: of its encoder, for errors.
        device: where.

    Raises:
        ConfigError: there is no such class, or its constructor takes other arguments.
    """
    own = from_import_path(described["class"], f"{field}.projector", nn.Module)
    with torch.device(device or torch.get_default_device()):
        try:
            return own(**(described.get("config") or {}))
        except TypeError as error:
            rule = f"A projector is built again from its attribute `config`, a dict of keywords ({error})"
            fix = "Set self.config in its constructor, or use ProjectorConfig"
            raise ConfigError(f"{field}.projector", described["class"], rule, fix) from None


def _changed(change: Change | None, size: ItemSize, columns: int) -> ItemSize:
    """The size of an item after a callback; without a grid where the callback changed its length."""
    if change is None:
        return size
    with torch.device("meta"):
        length = len(change([torch.empty(size.length, columns)])[0])
    return size if length == size.length else ItemSize(length)


def _on_meta(module: nn.Module, shape: tuple[int, ...]) -> Tensor:
    state = {name: value.to("meta") for name, value in [*module.named_parameters(), *module.named_buffers()]}
    return functional_call(module, state, (torch.empty(shape, device="meta"),))
