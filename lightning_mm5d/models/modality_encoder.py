"""One encoder of a composed model, with its projector and callbacks; and how many features each of its items gives.

A processor writes as many placeholder tokens. The number is told by a model's configuration and the sizes of its inputs
alone. Callbacks and projectors of one's own run on tensors without memory, so that nobody has to say what they do to
lengths.

Shapes: N frames of items, L_i rows of item i, L rows of an item, T rows of all items, D width of the encoder, E that of
the language model.

Projectors: from the width of an encoder's features to the width of a language model's embeddings.

Some also change how many rows an item has; `projected_length` tells how many, without running anything.

Shapes: N items of equal length, L rows of an item, D width of the encoder, E width of the language model, H x W the
grid of patches whose rows are the L rows.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from transformers import MODEL_MAPPING
from transformers.activations import ACT2FN

from lightning_mm5d.config.errors import ConfigError, did_you_mean
from lightning_mm5d.models.encoder_kinds import ItemSize, count_rows, encode, encoder_of, input_names, width
from lightning_mm5d.models.multimodal_config import MultimodalConfig, from_import_path, import_path, written_path

_KINDS = ("linear", "mlp", "pixel_shuffle", "average_pool", "query_former")
Grid = tuple[int, int] | None


@dataclass(frozen=True, kw_only=True)
class ProjectorConfig:
    """What a projector is made of.

    Attributes:
        kind: ``linear``, ``mlp``, ``pixel_shuffle`` (squares of neighbouring patches become one wider row, then an
            MLP), ``average_pool`` (the mean of neighbouring rows, then an MLP) or ``query_former`` (learned queries
            attend to the features: every item has as many rows as there are queries).
        depth: linear layers of an MLP.
        activation: between them, and in a query former; a name that transformers knows.
        bias: whether linear layers have a bias.
        factor: side of the squares of ``pixel_shuffle``.
        kernel: side of the squares of ``average_pool``; its length where rows form no grid.
        queries: rows of an item after a ``query_former``.
        layers: of a query former.
        heads: of its attention; they divide the width of the language model.
    """

    kind: str = "mlp"
    depth: int = 2
    activation: str = "gelu"
    bias: bool = True
    factor: int = 2
    kernel: int = 2
    queries: int = 64
    layers: int = 2
    heads: int = 8

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            rule = "There is no such projector"
            raise ConfigError("projector.kind", self.kind, rule, did_you_mean(self.kind, _KINDS))
        for name in ("depth", "factor", "kernel", "queries", "layers", "heads"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise ConfigError(f"projector.{name}", value, "It counts something", "Use 1 or more")
        if self.activation not in ACT2FN:
            rule = "transformers has none of this name"
            raise ConfigError("projector.activation", self.activation, rule, 'Use "gelu"')

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON can hold them."""
        return asdict(self)


def projected_length(config: ProjectorConfig, length: int, grid: Grid) -> int:
    """Return how many rows an item of `length` rows has after the projector.

    Args:
        config: of the projector.
        length: L.
        grid: of its patches, if any.

    Raises:
        ConfigError: the kind needs a grid that it can cut into squares, and there is none.
    """
    if config.kind == "pixel_shuffle":
        height, width = _grid(length, grid, config.factor)
        return (height // config.factor) * (width // config.factor)
    if config.kind == "average_pool":
        if grid is None:
            return -(-length // config.kernel)
        return -(-grid[0] // config.kernel) * -(-grid[1] // config.kernel)
    return config.queries if config.kind == "query_former" else length


def build_projector(config: ProjectorConfig, input_width: int, output_width: int) -> nn.Module:
    """Return a new projector.

    Args:
        config: what it is made of.
        input_width: D.
        output_width: E.
    """
    classes: dict[str, type[nn.Module]] = {
        "pixel_shuffle": PixelShuffleProjector,
        "average_pool": AveragePoolProjector,
        "query_former": QueryFormer,
    }
    return classes.get(config.kind, Projector)(config, input_width, output_width)


class Projector(nn.Module):
    """Linear layers with activations between them, each row by itself; ``linear`` is one layer."""

    def __init__(self, config: ProjectorConfig, input_width: int, output_width: int) -> None:
        super().__init__()
        self.config = config
        depth = 1 if config.kind == "linear" else config.depth
        widths = [input_width] + [output_width] * depth
        self.steps = [f"fc{step}" for step in range(1, depth + 1)]
        for name, fan_in, fan_out in zip(self.steps, widths, widths[1:], strict=False):
            self.add_module(name, nn.Linear(fan_in, fan_out, bias=config.bias))
        self.activation = ACT2FN[config.activation]

    def forward(self, features: Tensor, grid: Grid = None) -> Tensor:
        """(N, L, D) -> (N, L, E)."""
        hidden = self.get_submodule(self.steps[0])(features)
        for name in self.steps[1:]:
            hidden = self.get_submodule(name)(self.activation(hidden))
        return hidden


class PixelShuffleProjector(Projector):
    """Each square of ``factor`` x ``factor`` patches becomes one row, which linear layers project."""

    def __init__(self, config: ProjectorConfig, input_width: int, output_width: int) -> None:
        super().__init__(config, input_width * config.factor**2, output_width)

    def forward(self, features: Tensor, grid: Grid = None) -> Tensor:
        """(N, H * W, D) -> (N, H / factor * W / factor, E)."""
        items, length, width = features.shape
        factor = self.config.factor
        rows, columns = _grid(length, grid, factor)
        squares = features.view(items, rows // factor, factor, columns // factor, factor, width)
        return super().forward(squares.transpose(2, 3).reshape(items, length // factor**2, factor**2 * width))


class AveragePoolProjector(Projector):
    """The mean of ``kernel`` x ``kernel`` patches, or of ``kernel`` rows, which linear layers project."""

    def forward(self, features: Tensor, grid: Grid = None) -> Tensor:
        """(N, L, D) -> (N, ceil(L / kernel), E), or ceil of both sides of a grid; means at the end have fewer rows."""
        kernel, channels = self.config.kernel, features.transpose(1, 2)
        if grid is None:
            pooled = F.avg_pool1d(channels, kernel, ceil_mode=True)
        else:
            pooled = F.avg_pool2d(channels.unflatten(2, grid), kernel, ceil_mode=True).flatten(2)
        return super().forward(pooled.transpose(1, 2))


class QueryFormer(nn.Module):
    """Learned queries that attend to the features of an item, layer after layer."""

    def __init__(self, config: ProjectorConfig, input_width: int, output_width: int) -> None:
        super().__init__()
        self.config = config
        if output_width % config.heads:
            fits = [n for n in range(1, output_width + 1) if output_width % n == 0]
            rule = f"They must divide the language model's width of {output_width}"
            raise ConfigError("projector.heads", config.heads, rule, f"Use one of {', '.join(map(str, fits))}")
        self.queries = nn.Parameter(torch.empty(config.queries, output_width))
        self.input_norm = nn.LayerNorm(input_width)
        self.layers = nn.ModuleList(QueryFormerLayer(config, input_width, output_width) for _ in range(config.layers))
        self.norm = nn.LayerNorm(output_width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new queries; layers have their own method."""
        nn.init.normal_(self.queries, std=0.02)

    def forward(self, features: Tensor, grid: Grid = None) -> Tensor:
        """(N, L, D) -> (N, queries, E)."""
        features = self.input_norm(features)
        hidden = self.queries.expand(len(features), -1, -1)
        for layer in self.layers:
            hidden = layer(hidden, features)
        return self.norm(hidden)


class QueryFormerLayer(nn.Module):
    """Cross-attention of queries to features, then two linear layers; norms come first, sums after."""

    def __init__(self, config: ProjectorConfig, input_width: int, output_width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(output_width)
        self.attention = QueryFormerAttention(config, input_width, output_width)
        self.mlp_norm = nn.LayerNorm(output_width)
        self.mlp = QueryFormerMLP(config, output_width)

    def forward(self, hidden: Tensor, features: Tensor) -> Tensor:
        """(N, queries, E) and (N, L, D) -> (N, queries, E)."""
        hidden = hidden + self.attention(self.attention_norm(hidden), features)
        return hidden + self.mlp(self.mlp_norm(hidden))


class QueryFormerAttention(nn.Module):
    """Attention of queries to the features of their item."""

    def __init__(self, config: ProjectorConfig, input_width: int, output_width: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.heads, output_width // config.heads
        self.q_proj = nn.Linear(output_width, output_width, bias=config.bias)
        self.k_proj = nn.Linear(input_width, output_width, bias=config.bias)
        self.v_proj = nn.Linear(input_width, output_width, bias=config.bias)
        self.o_proj = nn.Linear(output_width, output_width, bias=config.bias)

    def forward(self, hidden: Tensor, features: Tensor) -> Tensor:
        """(N, queries, E) and (N, L, D) -> (N, queries, E)."""
        query = self.q_proj(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        key = self.k_proj(features).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        value = self.v_proj(features).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(query, key, value)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class QueryFormerMLP(nn.Module):
    """Two linear layers, the first of which is four times as wide."""

    def __init__(self, config: ProjectorConfig, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width, bias=config.bias)
        self.activation = ACT2FN[config.activation]
        self.fc2 = nn.Linear(4 * width, width, bias=config.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """(N, queries, E) -> (N, queries, E)."""
        return self.fc2(self.activation(self.fc1(hidden)))


def _grid(length: int, grid: Grid, factor: int) -> tuple[int, int]:
    """The grid of an item's patches, a square where none is given."""
    side = math.isqrt(length)
    height, width = grid or (side, side)
    if height * width != length or height % factor or width % factor:
        got = f"{length} rows" if height * width != length else f"a grid of {height} x {width}"
        rule = f"Its features must be a grid of patches whose sides {factor} divides"
        fix = "Drop class tokens by ModalityEncoder(after=...), choose another factor, or use projector='mlp'"
        raise ConfigError(f"projector.{'factor' if height * width == length else 'kind'}", got, rule, fix)
    return height, width


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
    custom = None
    if "class" in entry["projector"]:
        custom = encoder.projector if encoder is not None else built_projector(entry["projector"], field, device="meta")
    counted: dict[ItemSize, int] = {}
    sizes = count_rows(entry["model"], inputs)
    for size in dict.fromkeys(sizes):
        now = _changed(callback("after"), size, features)
        frame = now.length // now.frames
        if custom is None:
            length = projected_length(ProjectorConfig(**entry["projector"]), frame, now.grid)
        else:
            length = len(_on_meta(custom, (1, frame, features))[0])
        counted[size] = _changed(callback("after_projector"), ItemSize(length * now.frames), embedded).length
    return [counted[size] for size in sizes]


def batch_keys(config: MultimodalConfig) -> dict[str, dict[str, str]]:
    """For each modality its encoder's inputs and their keys in a batch.

    A key is the input's own name, with the modality's name in front where two encoders or the text have that name.
    """
    inputs_of = {name: input_names(entry["model"]) for name, entry in config.encoders.items()}
    names = [key for keys in inputs_of.values() for key in keys]
    taken = ("input_ids", "attention_mask", "position_ids", "labels", "inputs_embeds")
    return {
        name: {key: key if names.count(key) == 1 and key not in taken else f"{name}_{key}" for key in keys}
        for name, keys in inputs_of.items()
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
    projector_class = from_import_path(described["class"], f"{field}.projector", nn.Module)
    with torch.device(device or torch.get_default_device()):
        try:
            return projector_class(**(described.get("config") or {}))
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
            parameter = next(self.projector.parameters())
            if like is not None and (parameter.dtype, parameter.device) != (like.dtype, like.device):
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
        encoded = encode(self.model, inputs, self.feature_layer)
        return self._projected(encoded.rows, encoded.sizes)

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
        assert self.projector is not None
        is_own = self.projector_config is None
        frames = [ItemSize(size.length // size.frames, size.grid) for size in sizes for _ in range(size.frames)]
        parts, projected = rows.split([frame.length for frame in frames]), dict[int, Tensor]()
        for size in dict.fromkeys(frames):
            members = [index for index, other in enumerate(frames) if other == size]
            features = torch.stack([parts[index] for index in members])
            results = self.projector(features) if is_own else self.projector(features, size.grid)
            projected |= dict(zip(members, results, strict=True))
        ordered = [projected[index] for index in range(len(frames))]
        counts = iter(map(len, ordered))
        return torch.cat(ordered), [sum(next(counts) for _ in range(size.frames)) for size in sizes]

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
