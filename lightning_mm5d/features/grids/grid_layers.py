"""Layers of one modality that compute on blocks of hidden states, each rank on its rows and columns.

A layer takes a full hidden state or a `Block` and returns a `Block`. Inside of it all modules work on local tensors:
linear layers and norms by `grid_operations`; attentions get the rows of masks and positions that are theirs.

`GridChecks` refuses calls that layers cannot compute, which a model's code alone does not tell: hidden states that are
not ``[B, S, D]``, arguments that need gradients, and caches that are reordered (beam search). Layers ask in every call,
and the planner in the one step that it traces, on full tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map
from transformers.pytorch_utils import Conv1D  # the projections of GPT-2 and its kin

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.features.grids.block import Axis, Block, Frame, GridShape, Kind, Side, even_frame, scattered
from lightning_mm5d.features.grids.grid_operations import Cube, Line, Norm, Panels, normed, on_full_width
from lightning_mm5d.layout.layout import even_lengths
from lightning_mm5d.partition.parts import Place, at, hidden_place, is_in, with_state
from lightning_mm5d.sharded.collectives import differentiable
from lightning_mm5d.sharded.removable import Removable
from lightning_mm5d.sharded.shards import Shard
from lightning_mm5d.sharded.tensor import Sharded
from lightning_mm5d.tensor_parallel.region import Region
from lightning_mm5d.tensor_parallel.resolve import Division, Heads

_REORDERS = ("reorder_cache", "batch_select_indices", "batch_repeat_interleave", "batch_split")


@dataclass(frozen=True)
class GridPlan:
    """The layers of one modality on a grid: plain data.

    Attributes:
        modality: its name.
        shape: the grid.
        layers: their paths.
        norms: modules that norm the hidden state, by path: how, or None where they are computed on the full width.
        adapters: the first matrices of low-rank adapters, by path, with what the layer beside them is: ``column`` or
            ``row``.
    """

    modality: str
    shape: GridShape
    layers: tuple[str, ...]
    norms: Mapping[str, Norm | None] = field(default_factory=dict)
    adapters: Mapping[str, Kind] = field(default_factory=dict)

    def holds(self, path: str) -> bool:
        """Whether `path` is in one of the layers."""
        return any(is_in(path, layer) for layer in self.layers)


class GridLayers(Removable):
    """The layers of one modality on one rank.

    Args:
        plan: of the modality.
        lines: this rank's line along each axis.
        region: of all ranks of the grid, with the rank's own random stream, which layers on a grid draw from.
    """

    def __init__(self, plan: GridPlan, lines: Mapping[Axis, Line], region: Region) -> None:
        self._plan, self._shape, self._group, self._lines = plan, plan.shape, region.group, lines
        self._region = region
        self._place = self._shape.places[self._group.index]
        self._frame: Frame | None = None  # of the hidden state of the layer that runs
        self._checks = GridChecks(plan.modality, plan.shape)

    def attach(self, root: nn.Module, division: Division, layers: Sequence[str]) -> None:
        """Let the layers at these paths of `root` compute on blocks, until `remove`."""
        plan = self._plan
        held = replace(plan, layers=tuple(layers))
        for path in layers:
            layer = root.get_submodule(path)
            self.put_forward(layer, self._layer(layer.forward))
        for path, kind in division.roles.items():
            if held.holds(path) and kind in ("column", "row") and ".lora_" not in path:
                self.put_forward(root.get_submodule(path), self._linear(kind, division.shards[f"{path}.weight"]))
        for path, kind in plan.adapters.items():
            if held.holds(path):
                self.put_forward(root.get_submodule(path), self._low_rank(kind))
        for path, norm in plan.norms.items():
            if held.holds(path):
                self.put_forward(root.get_submodule(path), self._norm(norm))
        for path, module in root.named_modules():
            if isinstance(module, nn.Embedding) and not plan.holds(path):
                self.changes.callback(module.register_forward_pre_hook(self._checks.note_ids).remove)
        attentions = [path for path in division.heads if held.holds(path)]
        for path in attentions:
            module = root.get_submodule(path)
            if not any(path.startswith(f"{outer}.") for outer in attentions):
                self.changes.callback(module.register_forward_pre_hook(self._own_rows, with_kwargs=True).remove)
            leave = partial(self._leave_heads, division.heads[path])
            self.changes.callback(module.register_forward_hook(leave, prepend=True).remove)

    # --- forwards ---

    def _layer(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            place, hidden = self._checks.hidden_state(module, args, kwargs)
            frame = even_frame(self._shape, hidden.shape[0], hidden.shape[-1], self._group)
            if isinstance(hidden, Block):
                local = hidden.local
            else:
                local = scattered(hidden.full() if isinstance(hidden, Sharded) else hidden, frame)
            args, kwargs = with_state(place, local, args, kwargs)
            self._frame = frame
            with self._region.inside() if module.training else nullcontext(), self._checks.told(module):
                result = inner(*args, **kwargs)
            several = isinstance(result, tuple | list)
            first, *others = result if several else (result,)
            self._checks.check_result(module, first, local.shape)
            if any(type(out) is Tensor for out in others):
                rule = "A layer on a grid returns no tensor beside its hidden state and the weights of its attention"
                raise self._checks.error(module, [tuple(out.shape) for out in others if isinstance(out, Tensor)], rule)
            block = frame.wrapped(first)
            return type(result)([block, *others]) if several else block

        return forward

    def _linear(self, kind: str, shard: Shard) -> Callable[..., Tensor]:
        is_column, across, side = kind == "column", shard.across, self._shape.side
        assert across is not None
        widths = even_lengths(across.size, side)
        if is_column:
            lengths = tuple(widths)
        else:
            lengths = tuple(shard.lengths[self._shape.index(self._place._replace(b=part))] for part in range(side))
        input_axis, output_axis = self._axes(kind)
        blocks = tuple(even_lengths(widths[self._place.b], self._shape.depth))

        def forward(module: Any, input: Tensor) -> Tensor:
            weight, bias, is_conv = module.weight, module.bias, isinstance(module, Conv1D)
            if torch.is_autocast_enabled(input.device.type) and input.dtype != torch.float64:
                dtype = torch.get_autocast_dtype(input.device.type)
                input, weight = input.to(dtype), weight.to(dtype)
            if self._shape.mode == "3d":
                lines = self._lines[input_axis], self._lines[output_axis], self._lines["a"]
                y = Cube(*lines, self._row_lengths(), blocks, across.dim, is_conv).product(input, weight)
            else:
                y = Panels(self._lines["c"], self._lines["b"], lengths, is_conv).product(input, weight)
            return y if bias is None else y + bias.to(y.dtype)

        return forward

    def _low_rank(self, kind: str) -> Callable[..., Tensor]:
        """The first matrix of an adapter, whose result ``[rows, ..., r]`` all ranks with the same rows have."""
        input_line, output_line = (self._lines[axis] for axis in self._axes(kind))
        is_3d = self._shape.mode == "3d"

        def forward(module: Any, input: Tensor) -> Tensor:
            part = F.linear(input, module.weight)
            rows = self._row_lengths() if is_3d else ()

            def complete(x: Tensor, over: Line, of: Line) -> Tensor:
                """Sum what ranks `over` have of the same rows, and go on with those rows that ranks `of` have next."""
                return over.sum_scattered(of.gather(x, 0, rows, exact=True), 0, rows) if is_3d else over.sum(x)

            return differentiable(
                part, lambda x: complete(x, input_line, output_line), lambda x: complete(x, output_line, input_line)
            )

        return forward

    def _axes(self, kind: str) -> tuple[Axis, Axis]:
        """The axes of the columns that a linear layer takes and gives."""
        sides: tuple[Side, Side] = ("outside", "inside") if kind == "column" else ("inside", "outside")
        return self._shape.column_axis(sides[0]), self._shape.column_axis(sides[1])

    def _row_lengths(self) -> tuple[int, ...]:
        """Lengths of the parts of the rows of this rank's ``a``."""
        assert self._frame is not None
        return tuple(even_lengths(even_lengths(self._frame.rows, self._shape.depth)[self._place.a], self._shape.side))

    def _norm(self, norm: Norm | None) -> Callable[..., Tensor]:
        axis = self._shape.column_axis("outside")
        line = self._lines[axis]

        def forward(module: nn.Module, input: Tensor) -> Tensor:
            assert self._frame is not None
            lengths = tuple(even_lengths(self._frame.size, self._shape.side))
            self._checks.normed(module, norm, input, lengths[line.index], self._frame.size)
            return on_full_width(module, input, lengths, line) if norm is None else normed(module, input, norm, line)

        return forward

    # --- attentions ---

    def _own_rows(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Leave an attention this rank's rows of masks and positions."""
        assert self._frame is not None
        frame = replace(self._frame, side="inside")

        def local_rows(value: Any) -> Any:
            is_full = type(value) is Tensor and value.dim() > 1 and value.shape[0] == frame.samples > 1
            return frame.own_rows(value) if is_full else value

        return tree_map(local_rows, args), {name: tree_map(local_rows, value) for name, value in kwargs.items()}

    def _leave_heads(self, heads: Heads, module: nn.Module, args: Any, result: Any) -> Any:
        """Let what an attention returns for each of its heads, such as their weights, act as that of all heads."""
        if not isinstance(result, tuple) or self._frame is None:
            return result
        results = list(result)
        start, stop = self._shape.rows("inside", self._group.index, self._frame.rows)
        count = heads.lengths[self._shape.columns("inside", self._group.index)]
        for position, dim in heads.results.items():
            value = results[position] if position < len(results) else None
            if type(value) is Tensor and value.dim() > dim and (len(value), value.shape[dim]) == (stop - start, count):
                columns = tuple(pairwise(accumulate(heads.lengths, initial=0)))
                inside = replace(self._frame, side="inside", dim=dim - value.dim(), columns=columns)
                results[position] = replace(inside, size=columns[-1][1]).wrapped(value)
        return tuple(results)


class GridChecks:
    """The layers of one modality.

    Args:
        modality: its name.
        shape: the grid.
    """

    def __init__(self, modality: str, shape: GridShape) -> None:
        self._modality, self._shape = modality, shape
        self._ids: dict[int, tuple[int, ...]] = {}  # shapes of what embeddings took
        self._has_samples_first = False

    def note_ids(self, module: nn.Module, args: tuple) -> None:
        """Note what an embedding takes, which tells the order of samples and tokens; a forward pre-hook."""
        self._ids[id(module)] = tuple(args[0].shape) if args and isinstance(args[0], Tensor) else ()

    def hidden_state(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[Place, Tensor]:
        """Return the hidden state among the arguments of a layer, and where it is.

        Raises:
            ConfigError: the arguments cannot be in blocks.
        """
        place = hidden_place(args, kwargs)
        hidden = None if place is None else at(place, args, kwargs)
        if place is None or hidden is None or hidden.dim() != 3:
            shape = None if hidden is None else tuple(hidden.shape)
            raise self.error(module, shape, "The hidden state of a layer on a grid is [samples, sequence, width]")
        self._check_order(module, hidden)
        self._check_others(module, hidden, args, kwargs)
        return place, hidden

    def check_result(self, module: nn.Module, first: object, shape: tuple[int, ...]) -> None:
        """Refuse a layer whose first result is no hidden state of `shape`."""
        if not isinstance(first, Tensor) or tuple(first.shape) != tuple(shape):
            got = tuple(first.shape) if isinstance(first, Tensor) else type(first).__name__
            rule = f"A layer on a grid returns its hidden state, here {tuple(shape)}, first"
            raise self.error(module, got, rule)

    def normed(self, module: nn.Module, norm: Norm | None, input: Tensor, columns: int, width: int) -> None:
        """Refuse a norm of something else than the hidden state.

        Args:
            module: the norm.
            norm: how it norms, where that is known.
            input: what it takes.
            columns: those that `input` has of a hidden state.
            width: of the hidden state.
        """
        if (norm is not None and norm.width != width) or input.shape[-1] != columns:
            rule = f"It takes a hidden state, here of {columns} columns on this rank"
            raise self.error(module, tuple(input.shape), rule)

    @contextmanager
    def told(self, module: nn.Module) -> Iterator[None]:
        """Add to an error of torch in a layer what the layer has of its arguments, which code around may not know."""
        try:
            yield
        except (RuntimeError, IndexError) as error:
            kind = type(module).__name__
            error.add_note(
                f"{self._field}={self._shape.mode!r}: {kind} computes on this rank's samples and columns of its hidden "
                "state, and other arguments are whole outside of its attention. With tp_mode='1d' its state is whole."
            )
            raise

    def error(self, module: nn.Module, got: object, rule: str) -> ConfigError:
        """Return the error for a module that breaks a rule."""
        fix = f"{type(module).__name__} needs tp_mode='1d' for this modality"
        return ConfigError(self._field, f"{self._shape.mode}, and {got}", rule, fix)

    def _check_order(self, module: nn.Module, hidden: Tensor) -> None:
        """Refuse hidden states [sequence, samples, width]: rows would be tokens, which attend to each other."""
        shape, seen = tuple(hidden.shape[:2]), set(self._ids.values())
        if shape not in seen and shape[::-1] in seen:
            raise self.error(module, tuple(hidden.shape), "Its hidden states are [sequence, samples, width]")
        self._has_samples_first |= shape in seen and shape[0] != shape[1]
        if shape in seen and shape[0] == shape[1] > 1 and not self._has_samples_first:
            rule = "The first batch has as many samples as tokens, so that its hidden states may be either way round"
            raise self.error(module, tuple(hidden.shape), rule)

    def _check_others(self, module: nn.Module, hidden: Tensor, args: tuple, kwargs: Mapping[str, Any]) -> None:
        samples, length, width = hidden.shape
        for value in tree_leaves((args, {name: arg for name, arg in kwargs.items() if arg is not None})):
            if value is hidden or value is None:
                continue
            for name in _REORDERS:
                if hasattr(value, name) and name not in vars(value):
                    setattr(value, name, self._no_reordering)
            if type(value).__name__ == "BlockMask":
                raise self.error(module, "a BlockMask", "A mask of an attention on a grid is a tensor")
            if not isinstance(value, Tensor):
                continue
            got = tuple(value.shape)
            if value.requires_grad or isinstance(value, Sharded):
                raise self.error(module, got, "Beside its hidden state a layer on a grid takes no trained values")
            is_real = value.is_floating_point() or value.is_complex()
            if is_real and value.dim() == 3 and value.shape[-1] == width and samples in (value.shape[0], 1):
                raise self.error(module, got, "A layer on a grid takes one hidden state")
            is_table = value.dim() == 2 or (value.dim() == 3 and value.shape[1] not in (1, length))
            may_be_mask = is_real or value.dtype is torch.bool  # integers are positions of samples
            if may_be_mask and is_table and value.shape[0] == samples == length > 1:
                rule = "With as many samples as tokens its first dim may be either, and its rows are unknown"
                raise self.error(module, got, rule)

    def _no_reordering(self, *_: Any, **__: Any) -> None:
        rule = "Caches of layers on a grid hold this rank's samples, and beam search would reorder those of all"
        raise ConfigError(self._field, self._shape.mode, rule, "Generate with num_beams=1, or use tp_mode='1d'")

    @property
    def _field(self) -> str:
        return f"modalities.{self._modality}.tensor.tp_mode"
