"""Makes of layers that are sharded along one dim over q ranks layers in blocks on a grid: weights, biases, norms.

`resolve` has read the plans as for q ranks. Here each weight gets its second dim, and everything else in the layers
must be understood too, because hidden states are in blocks throughout a layer. What is not is refused by name.

What layers on a grid cost, as the planner asks: what they send, and what they keep of a traced step.

Legend, of one linear layer ``Y = X W``: X, W and Y are bytes of the full tensors, q is the side of a grid and d its
depth. A rank sends, with sums as rings and broadcasts that each rank but the last passes on:

- 2d (arXiv:2104.05343) and 2.5d (arXiv:2105.14500): ``(q - 1) / q^2`` of ``X / d + W`` in the forward, and again for
  the gradient of X and for that of W;
- 3d (arXiv:2105.14450): ``(q - 1) / q^3`` of ``X + W + Y`` in the forward; of Y, ``X + W`` for the gradient of X, and
  ``X + W`` for that of W in the backward;
- a low-rank adapter on any grid: ``2 (q - 1) / q^2`` of the ``[rows, r]`` that its first matrix makes (2.5d: by d),
  in the forward and again in the backward; its second matrix sends nothing.

The traced step runs once, on full tensors, so it does what ranks on a grid do besides: it makes a block where a full
hidden state enters a layer and the full tensor where it leaves the last one, and norms by the grid's own function. All
that layers make counts with the part of the rank that has most rows.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D  # the projections of GPT-2 and its kin

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.features.grids.block import AXES, GridShape, Kind
from lightning_mm5d.features.grids.called import PRODUCT, around, called
from lightning_mm5d.features.grids.grid_layers import GridChecks, GridLayers, GridPlan
from lightning_mm5d.features.grids.grid_operations import Line, Norm, norm_of, normed
from lightning_mm5d.partition import Partition
from lightning_mm5d.partition.parts import is_in, with_state
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.sharded.shards import Shard
from lightning_mm5d.tensor_parallel.region import Region
from lightning_mm5d.tensor_parallel.resolve import Division, LayersInBlocks, OwnHeads


class _SingleRank:
    """Stands for the ranks that norm a row together."""

    def sum(self, x: Tensor, *, in_place: bool = False) -> Tensor:
        return x


class GridCosts(NamedTuple):
    """What the layers of one modality cost; the planner describes its products."""

    plan: GridPlan

    @property
    def copies(self) -> int:
        """How many ranks of the grid have equal weights."""
        return self.plan.shape.depth if self.plan.shape.mode == "2.5d" else 1

    def sent(self, products: Iterable[Any]) -> float:
        """Return the bytes that a rank sends in the forward and the backward of `products`."""
        total, shape, side, size = 0.0, self.plan.shape, self.plan.shape.side, self.plan.shape.size
        layers = 1 if shape.mode == "3d" else shape.depth
        for product in products:
            if product.kind == "norm":
                total += (side - 1) / size * product.input * (1 + product.passes)
            elif product.kind == "adapter":
                total += 2 * (side - 1) / side**2 * product.output / layers * (1 + product.passes)
            elif shape.mode == "3d":
                numbers = product.input + product.weight
                backward = product.output * (product.passes or product.trains)
                total += (
                    (side - 1) / size * (numbers * (1 + product.passes + product.trains) + product.output + backward)
                )
            else:
                panels = product.input / shape.depth + product.weight
                total += (side - 1) / side**2 * panels * (1 + product.passes + product.trains)
        return total

    def trace(self, number: Callable[[Tensor], int], note: Callable[[str, Tensor, Tensor], None]) -> GridTrace:
        """Return what a traced step of the layers keeps."""
        return GridTrace(self, number, note)


class GridTrace:
    """The layers of one modality.

    Args:
        costs: of the layers.
        number: of a tensor's storage.
        note: called with the kind, the input and the result of each norm that is computed on the full width (``norm``)
            and of the first matrix of each low-rank adapter (``adapter``).
    """

    def __init__(
        self, costs: GridCosts, number: Callable[[Tensor], int], note: Callable[[str, Tensor, Tensor], None]
    ) -> None:
        self.shape, self._plan, self._number, self._note = costs.plan.shape, costs.plan, number, note
        self._copies, self._checks = costs.copies, GridChecks(costs.plan.modality, costs.plan.shape)
        self._blocks: set[int] = set()  # storages that layers make of blocks
        self._enters = False
        self._entered: tuple[int, ...] = (0, 0, 0)  # shape of the hidden state
        self._wide = 1

    @property
    def _rows(self) -> int:
        return math.ceil(math.ceil(self._entered[0] / self.shape.depth) / self.shape.side)

    def share(self, size: int) -> int:
        """Return how much a rank has of `size` bytes of a full tensor in blocks."""
        return size * self._rows * self._wide // (self._entered[0] * self.shape.side)

    def of_rows(self, size: int) -> int:
        """Return how much a rank has of `size` bytes of a full tensor with all columns of its rows."""
        return self.share(size) * self.shape.side

    def moment(self, product: Any) -> int:
        """Return the bytes that a product needs for a moment, beside what it takes and makes."""
        inputs, outputs = self.share(product.input), self.share(product.output)
        weight = self._copies * product.weight // self.shape.size
        if self.shape.mode == "3d":  # a gradient is laid out anew
            return self.shape.side * max(inputs + weight + outputs, outputs + 2 * inputs + 3 * weight)
        # panels that are used, that come, and that the product before has not let go of; parts of sums under way
        return (min(self.shape.side - 1, 3) + 2) * (inputs + weight)

    def part(self, number: int, output: Tensor, inputs: Collection[int]) -> int:
        """Return a rank's bytes of what an operation in a layer makes.

        Args:
            number: of the storage.
            output: the tensor.
            inputs: numbers of the storages that the operation takes.
        """
        size, samples = output.untyped_storage().nbytes(), self._entered[0]
        if not self._enters and self._blocks.isdisjoint(inputs):  # a mask
            return size * self._rows // samples if output.shape[:1] == (samples,) else size
        self._blocks.add(number)
        is_one_number = output.dim() == 3 and output.shape[-1] == 1  # of each token
        return self.share(size) * (self.shape.side if is_one_number else 1)

    def attach(self, copy: nn.Module) -> list[Callable[[], object]]:
        """Patch the layers of `copy`; return what takes the patches away."""
        undo: list[Callable[[], object]] = []
        for path, norm in self._plan.norms.items():
            module = copy.get_submodule(path)
            vars(module)["forward"] = MethodType(self._norm(norm, module.forward), module)
            undo.append(partial(vars(module).pop, "forward", None))
        for path in filter(self._plan.holds, self._plan.adapters):
            undo.append(copy.get_submodule(path).register_forward_hook(self._note_adapter).remove)
        for path, module in copy.named_modules():
            if isinstance(module, nn.Embedding) and not self._plan.holds(path):
                undo.append(module.register_forward_pre_hook(self._checks.note_ids).remove)
        return undo

    def entered(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any], int]:
        """Return the arguments of a layer with a block as the hidden state, and bytes of the full one.

        Raises:
            ConfigError: the layer cannot compute on blocks.
        """
        place, hidden = self._checks.hidden_state(module, args, kwargs)
        self._entered = tuple(hidden.shape)
        size = hidden.numel() * hidden.element_size()
        if self._number(hidden) not in self._blocks:
            self._enters = True
            args, kwargs = with_state(place, hidden.clone(), args, kwargs)
            self._enters = False
        return args, kwargs, size

    def left(self, module: nn.Module, result: Any) -> None:
        """Refuse a result of a layer that is no hidden state."""
        self._checks.check_result(module, result[0] if isinstance(result, tuple | list) else result, self._entered)

    def full(self, result: Any) -> Any:
        """Return the result of the last layer with a full hidden state."""
        if isinstance(result, tuple | list):
            return type(result)([result[0].clone(), *result[1:]])
        return result.clone()

    def is_adapter(self, path: str) -> bool:
        """Whether a linear layer of a layer on the grid is a matrix of a low-rank adapter."""
        return ".lora_" in path and self._plan.holds(path)

    def _note_adapter(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self._note("adapter", args[0], output)

    def _norm(self, norm: Norm | None, inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(module: nn.Module, input: Tensor) -> Tensor:
            self._checks.normed(module, norm, input, self._entered[-1], self._entered[-1])
            if norm is not None:
                return normed(module, input, norm, _SingleRank())  # type: ignore[arg-type]
            self._note("norm", input, input)
            self._wide = self.shape.side
            full = inner(input.clone())
            self._wide = 1
            return full.clone()

        return forward


_ON_FULL_WIDTH = re.compile(r"norm|scale", re.IGNORECASE)
_DROPS_SAMPLES = re.compile(r"drop_?path|stochastic_?depth|dropout[123]d|featurealphadropout", re.IGNORECASE)
_RATE = re.compile(r"drop|^p$")
_ADAPTED = re.compile(r"\.(?:base_layer|lora_)")  # what peft puts behind the name of a linear layer
_TOKENS_FIRST = re.compile(r"permute\(\s*1,\s*2,\s*0,\s*3\s*\)")  # [sequence, samples, heads, width] to torch's order
# of a hidden state's columns or rows; what attentions and the way between two linear layers do with units is theirs
_MIXES = {
    PRODUCT,
    *("mean", "nanmean", "median", "mode", "sum", "nansum", "prod", "var", "std", "var_mean", "std_mean", "norm"),
    *("vector_norm", "matrix_norm", "normalize", "layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"),
    *("cosine_similarity", "pairwise_distance", "softmax", "softmin", "log_softmax", "gumbel_softmax", "logsumexp"),
    *("logcumsumexp", "cumsum", "cumprod", "cummax", "cummin", "dist", "cdist", "max", "min", "aminmax", "amax"),
    *("amin", "argmax", "argmin", "sort", "argsort", "topk", "kthvalue", "quantile", "roll", "flip", "fliplr"),
    *("reduce", "glu", "cat", "concat", "concatenate", "chunk", "split", "tensor_split", "unbind", "interpolate"),
    *("einsum", "matmul", "bmm", "mm", "mv", "baddbmm", "addmm", "addmv", "addbmm", "tensordot", "dot", "vdot"),
    *("inner", "outer", "kron", "linear", "bilinear", "scaled_dot_product_attention", "conv1d", "conv2d", "conv3d"),
    *("fft", "ifft", "rfft", "irfft", "fft2", "ifft2", "rfft2", "irfft2", "fftn", "ifftn", "rfftn", "irfftn"),
    *("multi_head_attention_forward", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"),
    *("feature_alpha_dropout", "stochastic_depth", "drop_path", "bernoulli", "bernoulli_", "rand"),
    *("vecdot", "multi_dot", "native_layer_norm", "renorm", "avg_pool1d", "adaptive_avg_pool1d", "gather", "pad"),
}
_BY_ENTRY = ("container", "dropout", "activation", "linear", "module")  # files of torch.nn whose modules mix nothing
_NOT_BY_ENTRY = (nn.Softmax, nn.Softmax2d, nn.Softmin, nn.LogSoftmax, nn.GLU, nn.MultiheadAttention, nn.Bilinear)
_FIX = "Use tp_mode='1d' for this modality"


class LayersOnGrid(GridPlan):
    """The layers of one modality on a grid, as tensor parallelism sees them."""

    @property
    def costs(self) -> GridCosts:
        """What they send and keep."""
        return GridCosts(self)

    def lines(
        self, ranks: Sequence[int], get: Callable[[Sequence[int], str], dist.ProcessGroup | None]
    ) -> dict[str, TensorGroup]:
        """Make the groups of all lines among `ranks`; return those that this rank is in, by their axis."""
        lines = dict[str, TensorGroup]()
        for axis in AXES:
            for line in self.shape.lines(axis):
                group = get([ranks[index] for index in line], f"axis {axis}") if len(line) > 1 else None
                if group is not None:
                    lines[axis] = Line(group)
        return lines

    def attach(
        self,
        root: nn.Module,
        division: Division,
        is_here: Callable[[str], bool],
        region: Region,
        lines: Mapping[Any, Any],
    ) -> Callable[[], None]:
        """Let those of the layers of `root` that are here compute on blocks; return what undoes it."""
        layers = GridLayers(self, lines, region)
        layers.attach(root, division, [path for path in self.layers if is_here(path)])
        return layers.remove


def begin(root: nn.Module, partition: Partition, modalities: Mapping[str, Modality]) -> Grids:
    """Return the grids of `modalities`.

    Args:
        root: the LightningModule; the meta device will do.
        partition: of `root`.
        modalities: the configuration.

    Raises:
        ConfigError: a modality on a grid has no list of layers.
    """
    shapes = {name: shape for name, modality in modalities.items() if (shape := GridShape.of(modality)) is not None}
    return Grids(root, shapes, {name: _layers_of(root, partition, name, shape) for name, shape in shapes.items()})


@dataclass(frozen=True)
class Grids:
    """The grids of a module.

    Args:
        root: the module.
        shapes: of the grids, by modality.
        layers: paths of the layers on each.
    """

    root: nn.Module
    shapes: Mapping[str, GridShape]
    layers: Mapping[str, Sequence[str]]

    def pieces(self, path: str) -> int | None:
        """Return in how many pieces a module's units are cut: q where it is in a layer on a grid, else None."""
        every = ((name, layer) for name, layers in self.layers.items() for layer in layers)
        return next((self.shapes[name].side for name, layer in every if is_in(path, layer)), None)

    def divided(self, division: Division, shared: Collection[str]) -> Division:
        """Return `division` with the layers on grids in blocks.

        Args:
            division: of layers on grids as for q ranks.
            shared: names of parameters that several modalities use.

        Raises:
            ConfigError: something in a layer cannot be in blocks.
        """
        for modality, layers in self.layers.items():
            several = next((name for name in shared if any(is_in(name, layer) for layer in layers)), None)
            if several is not None:
                rule = f"{several!r} is shared with another modality, so it cannot be in blocks over the grid of one"
                mode = self.shapes[modality].mode
                raise ConfigError(f"modalities.{modality}.tensor.tp_mode", mode, rule, "Use tp_mode='1d'")
        plans = dict[str, LayersInBlocks]()
        ways = _ways(division)
        for name, shape in self.shapes.items():
            norms: dict[str, Norm | None] = {}
            adapters: dict[str, Kind] = {}
            for path in self.layers[name]:
                layer = _Layer(self.root, division, name, shape, path, ways)
                division = layer.divided()
                norms |= layer.norms
                adapters |= layer.adapters
            plans[name] = LayersOnGrid(name, shape, tuple(self.layers[name]), norms, adapters)
        return replace(division, in_blocks={**division.in_blocks, **plans})


def _layers_of(root: nn.Module, partition: Partition, modality: str, shape: GridShape) -> list[str]:
    """The paths of the layers of a modality on a grid."""
    path = partition.layers[modality]
    if path is None:
        rule = f"The layers on a grid are those of a list of layers, and {modality!r} has none"
        fix = "Use tp_mode='1d' for this modality"
        raise ConfigError(f"modalities.{modality}.tensor.tp_mode", shape.mode, rule, fix)
    return [f"{path}.{name}" for name, _ in root.get_submodule(path).named_children()]


class _Layer:
    def __init__(
        self,
        root: nn.Module,
        division: Division,
        group: str,
        shape: GridShape,
        path: str,
        ways: Mapping[str, Mapping[str, str]],
    ) -> None:
        self._ways = ways
        self._root, self._division, self._group, self._shape, self._path = root, division, group, shape, path
        self._layer = root.get_submodule(path)
        self._shards: dict[str, Shard] = dict(division.shards)
        self._groups: dict[str, str] = dict(division.groups)
        self._shared = set(division.shared)
        self._known: set[str] = set()
        self.norms: dict[str, Norm | None] = {}
        self.adapters: dict[str, Kind] = {}

    def divided(self) -> Division:
        """Return the division with this layer in blocks."""
        division = self._division
        for path, why in division.whole.items():
            if self._is_in(path):
                self._refuse(path, f"it would be computed in full: {why}")
        for path, kind in division.roles.items():
            if self._is_in(path) and kind not in ("dropout", "own_dropout"):  # all ranks draw for their blocks alone
                self._linear(path, kind)
        for name in division.shards:
            if self._is_in(name) and name not in self._known:
                self._refuse(name, "its plan shards a parameter beside the linear layers")
        for (path, name), values in division.local.items():
            if self._is_in(path) and any(isinstance(value, OwnHeads) for value in values):
                self._refuse(path, f"it divides the width of its input by {name}")
        for path, heads in division.heads.items():
            if self._is_in(path) and heads.arguments:
                self._refuse(path, f"its heads have parts of the arguments {', '.join(heads.arguments)}")
        for path, module in self._layer.named_modules(prefix=self._path):
            self._other(path, module)
            self._code(path, module)
        size = range(self._shape.size)
        local = {
            place: tuple(values[self._shape.columns("inside", index)] for index in size)
            if self._is_in(place[0])
            else values
            for place, values in division.local.items()
        }
        return replace(division, shards=self._shards, groups=self._groups, shared=frozenset(self._shared), local=local)

    def _linear(self, path: str, kind: Any) -> None:
        if kind not in ("column", "row"):
            self._refuse(path, "it holds experts")
        if ".lora_" in path:
            self._adapter(path, kind)
            return
        module: Any = self._root.get_submodule(path)
        weight, bias = f"{path}.weight", f"{path}.bias"
        units = self._shards[weight]
        even = 1 - units.dim
        assert (units.dim == int(isinstance(module, Conv1D))) == (kind == "column")
        size = module.weight.shape[even]
        self._shards[weight] = self._shape.weight(kind, units, even, size)
        self._known.add(weight)
        if module.bias is not None:
            side, parts = ("inside", self._shards[bias]) if kind == "column" else ("outside", self._shape.even(size))
            self._divide(bias, self._shape.vector(side, parts))  # type: ignore[arg-type]

    def _adapter(self, path: str, kind: Kind) -> None:
        """Shard both matrices of a low-rank adapter: the hidden width of one, and the units of the other, at `path`."""
        wrapped, name = path.rsplit(".lora_", 1)
        key = name.partition(".")[2]
        first, second = f"{wrapped}.lora_A.{key}", f"{wrapped}.lora_B.{key}"
        at_width = first if kind == "column" else second
        weight: Any = self._root.get_submodule(at_width).weight
        dim = int(kind == "column")
        self._divide(f"{path}.weight", self._shape.vector("inside", self._shards[f"{path}.weight"]))
        parts = self._shape.even(weight.shape[dim])
        self._divide(f"{at_width}.weight", self._shape.vector("outside", replace(parts, dim=dim)))
        if self._root.get_submodule(second).bias is not None:
            side, held = ("inside", self._shards[f"{second}.bias"]) if kind == "column" else ("outside", parts)
            self._divide(f"{second}.bias", self._shape.vector(side, held))  # type: ignore[arg-type]
        self.adapters[first] = kind

    def _other(self, path: str, module: nn.Module) -> None:
        kind = type(module).__name__
        if _TOKENS_FIRST.search(_code_of(module)):
            self._refuse(path, f"{kind} takes [sequence, samples, ...], whose rows would be tokens")
        if _DROPS_SAMPLES.search(kind) and not _is_off(module):
            self._refuse(path, f"{kind} drops whole samples or tokens, whose columns are on several ranks")
        names = {f"{path}.{name}" for name, parameter in module._parameters.items() if parameter is not None}
        names -= {*self._shards, *self._shared}
        if path in self._division.roles or not (names or self._is_bare_norm(path, module)):
            return
        norm = norm_of(module)
        if norm is not None:
            self.norms[path] = norm
            for name in names:
                self._divide(name, self._shape.vector("outside", self._shape.even(norm.width)))
        elif _ON_FULL_WIDTH.search(kind) and _is_of_tokens(module):
            self.norms[path] = None
            self._shared |= names  # each rank has the gradient of its rows and columns
        else:
            fix = f"Say sharding='column' or 'row' of a lightning_mm5d.nn.Linear, or u{_FIX[1:]}"
            self._refuse(path, f"no plan says how {kind} is sharded", fix if isinstance(module, nn.Linear) else _FIX)

    def _code(self, path: str, module: nn.Module) -> None:
        """Refuse code around attentions and linear layers that does not treat each entry by itself."""
        inside = any(is_in(path, attention) for attention in self._division.heads)
        kind = type(module).__name__
        ways = {} if path in self._division.roles or self._is_adapted(path) else self._ways.get(path, {})
        columns, rows = ([name for name, way in ways.items() if way == role] for role in ("column", "row"))
        if ways and (mixing := _MIXES & around(module, columns, rows)):
            self._refuse(
                path, f"{kind} mixes columns or samples of its input or result, by {', '.join(sorted(mixing))}"
            )
        if inside or path in self._ways or path in self._division.roles or path in self.norms:
            return
        if not _computes_by_entry(module):
            self._refuse(path, f"{kind} is a layer of torch that mixes columns or samples")
        if _DROPS_SAMPLES.search(kind):
            return  # with a rate of zero, else it is refused
        names = called(module)
        if names is None:
            self._refuse(path, f"{kind} has code without source")
        elif mixing := _MIXES & names:
            self._refuse(path, f"{kind} mixes columns or samples, by {', '.join(sorted(mixing))}")

    def _is_adapted(self, path: str) -> bool:
        parent, _, name = path.rpartition(".")
        return name in self._ways.get(parent, {})

    def _is_bare_norm(self, path: str, module: nn.Module) -> bool:
        """Whether a module without parameters norms the hidden state; in an attention it would norm single heads."""
        if [*module.parameters()] or not _is_of_tokens(module) or "norm" not in type(module).__name__.lower():
            return False
        return not any(path.startswith(f"{attention}.") for attention in self._division.heads)

    def _divide(self, name: str, shard: Shard) -> None:
        self._shards[name], self._groups[name] = shard, self._group
        self._known.add(name)

    def _is_in(self, name: str) -> bool:
        return is_in(name, self._path)

    def _refuse(self, path: str, why: str, fix: str = _FIX) -> None:
        rule = f"Everything in a layer is in blocks over the grid, and of {path} that is not known: {why}"
        raise ConfigError(f"modalities.{self._group}.tensor.tp_mode", self._shape.mode, rule, fix)


def _ways(division: Division) -> dict[str, dict[str, str]]:
    """Return the kinds of linear layers by the path of what calls them, then by name; of adapted ones both paths."""
    ways: dict[str, dict[str, str]] = {}
    for role, kind in division.roles.items():
        for path in dict.fromkeys((role, _ADAPTED.split(role)[0])):
            parent, _, name = path.rpartition(".")
            ways.setdefault(parent, {})[name] = kind
    return ways


def _code_of(module: nn.Module) -> str:
    try:
        return inspect.getsource(type(module).forward)
    except (OSError, TypeError):  # made without a file
        return ""


def _is_off(module: nn.Module) -> bool:
    """Whether all rates of a module that drops something are zero, or none; False where it names none."""
    rates = [value for name, value in vars(module).items() if _RATE.search(name)]
    return bool(rates) and all(rate is None or rate == 0 for rate in rates)


def _computes_by_entry(module: nn.Module) -> bool:
    """Whether a forward that torch has written treats each entry by itself; True where torch has not written it."""
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    if not owner.__module__.startswith("torch."):
        return True
    file = owner.__module__.removeprefix("torch.nn.modules.")
    return file in _BY_ENTRY and not isinstance(module, _NOT_BY_ENTRY)


def _is_of_tokens(module: nn.Module) -> bool:
    """Whether a norm or scale may be computed on some samples: it is no norm over samples or over the sequence."""
    has_parts = next(module.children(), None) is not None or next(module.buffers(), None) is not None
    return not has_parts and not isinstance(module, nn.GroupNorm)
