"""One encoder of a composed model, with its projector and callbacks; and how many features each of its items gives.

A processor writes as many placeholder tokens. The number is told by a model's configuration and the sizes of its inputs
alone. Callbacks and projectors of one's own run on tensors without memory, so that nobody has to say what they do to
lengths.

Shapes: N frames of items, L_i rows of item i, L rows of an item, T rows of all items, D width of the encoder, E that of
the language model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import MODEL_MAPPING

from lightning_mm5d.config.errors import ConfigError, did_you_mean
from lightning_mm5d.models.encoder_kinds import ItemSize, count_rows, encode, encoder_of, input_names, width
from lightning_mm5d.models.multimodal_config import MultimodalConfig, from_import_path, import_path, written_path
from lightning_mm5d.models.projectors import Projector, ProjectorConfig, build_projector, projected_length

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


Inputs = dict[str, Tensor]
Items = Sequence[Tensor]
"""For each item its rows, (L_i, D) or (L_i, E)."""

CALLBACKS = ("before", "after", "after_projector")


class ModalityEncoder(nn.Module):
    """An encoder, a projector to the language model's width, and callbacks between them.

    Args:
        model: an encoder of transformers, or a model around one, such as all of CLIP, of which the encoder is taken.
        projector: the name of a kind or a `ProjectorConfig`, built once the language model's width is known; or a
            module from (N, L, D) to (N, L', E), which is called with frames of one length at a time.
        before: takes and returns the encoder's inputs, a dict.
        after: takes and returns the list of features of each item, (L_i, D); it may change their lengths.
        after_projector: the same with projected features, (L_i, E).
        feature_layer: whose hidden states are the features; -1 is the encoder's result.

    Raises:
        ConfigError: the model is not an encoder, or the projector is none.
    """

    def __init__(
        self,
        model: nn.Module,
        projector: str | Mapping[str, Any] | ProjectorConfig | nn.Module = "mlp",
        *,
        before: Callable[[Inputs], Inputs] | None = None,
        after: Callable[[Items], Items] | None = None,
        after_projector: Callable[[Items], Items] | None = None,
        feature_layer: int = -1,
    ) -> None:
        super().__init__()
        self.model = _encoder(model)
        self.before, self.after, self.after_projector = before, after, after_projector
        self.feature_layer = feature_layer
        self.projector: nn.Module | None = projector if isinstance(projector, nn.Module) else None
        self.projector_config = None if isinstance(projector, nn.Module) else _projector_config(projector)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the encoder's inputs; the first is the one that it always needs."""
        return input_names(self.model)

    @property
    def is_plain(self) -> bool:
        """Whether it has no callback and no projector of one's own: these may draw numbers, or need their data."""
        return self.projector_config is not None and not any(getattr(self, name) for name in CALLBACKS)

    def fit_to(self, output_width: int, like: Tensor | None = None) -> None:
        """Build the projector, if there is none yet.

        Args:
            output_width: E.
            like: has its dtype and device, where they are not the default ones.
        """
        if self.projector is None:
            assert self.projector_config is not None
            self.projector = build_projector(self.projector_config, width(self.model.config), output_width)
            own = next(self.projector.parameters())
            if like is not None and (own.dtype, own.device) != (like.dtype, like.device):
                self.projector.to(device=like.device, dtype=like.dtype)

    def forward(self, inputs: Inputs) -> Tensor:
        """Return the projected features of all items one after the other, (T, E).

        Args:
            inputs: of the encoder, by the names that its forward has.
        """
        assert self.projector is not None, "MultimodalModel builds the projector"
        if self.before is not None:
            inputs = self.before(inputs)
        if isinstance(dtype := getattr(self.model, "dtype", None), torch.dtype):  # processors give float32
            inputs = {
                name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
                for name, value in inputs.items()
            }
        found = encode(self.model, inputs, self.feature_layer)
        return self._projected(found.rows, found.sizes)

    def _projected(self, rows: Tensor, sizes: list[ItemSize]) -> Tensor:
        parameter = next(self.projector.parameters(), None) if self.projector is not None else None
        if parameter is not None:
            rows = rows.to(parameter.dtype)
        if self.after is not None:
            items = list(self.after(rows.split([size.length for size in sizes])))
            sizes = [_resized(size, len(item)) for size, item in zip(sizes, items, strict=True)]
            rows = torch.cat(items)
        if type(self.projector) is Projector:  # each row by itself
            rows = self.projector(rows[None])[0]
            lengths = [size.length for size in sizes]
        else:
            rows, lengths = self._projected_frames(rows, sizes)
        if self.after_projector is not None:
            rows = torch.cat(list(self.after_projector(rows.split(lengths))))
        return rows

    def _projected_frames(self, rows: Tensor, sizes: list[ItemSize]) -> tuple[Tensor, list[int]]:
        """Call the projector once for all frames of one size; the frames keep their order."""
        frames = [ItemSize(size.length // size.frames, size.grid) for size in sizes for _ in range(size.frames)]
        parts, projected = rows.split([frame.length for frame in frames]), dict[int, Tensor]()
        for size in dict.fromkeys(frames):
            members = [index for index, other in enumerate(frames) if other == size]
            results = self._project(torch.stack([parts[index] for index in members]), size)
            projected |= dict(zip(members, results, strict=True))
        ordered = [projected[index] for index in range(len(frames))]
        counts = iter(map(len, ordered))
        return torch.cat(ordered), [sum(next(counts) for _ in range(size.frames)) for size in sizes]

    def _project(self, features: Tensor, size: ItemSize) -> Tensor:
        assert self.projector is not None
        is_own = self.projector_config is None
        return self.projector(features) if is_own else self.projector(features, size.grid)

    def described(self) -> dict[str, Any]:
        """Return the entry of `MultimodalConfig.encoders`."""
        projector: dict[str, Any] = {}
        if self.projector_config is not None:
            projector = self.projector_config.to_dict()
        elif self.projector is not None:
            config = getattr(self.projector, "config", None)
            projector = {"class": written_path(type(self.projector)), "config": config}
        return {
            "model": getattr(self.model, "config", None),
            "model_class": written_path(type(self.model)),
            "projector": projector,
            **{name: written_path(getattr(self, name)) for name in CALLBACKS},
            "feature_layer": self.feature_layer,
        }

    def check_savable(self, name: str) -> None:
        """Raise ConfigError unless a configuration can name all that this encoder is made of."""
        fix = "Define it at the top of a module that can be imported, and pass it by its name"
        for callback in CALLBACKS:
            if (given := getattr(self, callback)) is not None and import_path(given) is None:
                rule = "A saved model names its callbacks by their import path, and this one has none"
                raise ConfigError(f"encoders.{name}.{callback}", given, rule, fix)
        for part in (self.model, self.projector):
            if import_path(type(part)) is None:
                rule = "A saved model names its classes by their import path, and this one has none"
                raise ConfigError(f"encoders.{name}", type(part).__name__, rule, fix)


def _projector_config(given: str | Mapping[str, Any] | ProjectorConfig) -> ProjectorConfig:
    if isinstance(given, ProjectorConfig):
        return given
    if isinstance(given, str):
        return ProjectorConfig(kind=given)
    if isinstance(given, Mapping):
        known = list(inspect.signature(ProjectorConfig).parameters)
        if unknown := [key for key in given if key not in known]:
            rule = "A projector has no such field"
            raise ConfigError(f"projector.{unknown[0]}", given[unknown[0]], rule, did_you_mean(unknown[0], known))
        return ProjectorConfig(**given)
    rule = "A projector is a module, a ProjectorConfig or the name of a kind"
    raise ConfigError("ModalityEncoder.projector", given, rule, 'Use "mlp"')


def _encoder(model: Any) -> nn.Module:
    base = getattr(model, "base_model", model)
    # what AutoModel builds is itself a base, with parts of its own under that name; a model of timm has no config
    if not hasattr(base, "config") or MODEL_MAPPING.get(type(model.config), None) is type(model):
        base = model
    encoder = encoder_of(base) if isinstance(base, nn.Module) and hasattr(base, "config") else base
    if not isinstance(encoder, nn.Module) or not hasattr(encoder, "config"):
        rule = "An encoder is a model of transformers, with a configuration"
        raise ConfigError("ModalityEncoder.model", type(model).__name__, rule, "Pass an encoder of AutoModel")
    if (main := input_names(encoder)[0]) == "input_ids":
        rule = f"It takes {main}, so it is no encoder of another modality than text"
        raise ConfigError("ModalityEncoder.model", type(model).__name__, rule, "Pass an encoder of images or audio")
    return encoder


def _resized(size: ItemSize, length: int) -> ItemSize:
    return size if size.length == length else ItemSize(length)
