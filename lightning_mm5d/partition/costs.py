"""What a forward and a backward through each part of a module cost, told from its parameters, without running it.

A modality is a row of *units*: what runs before its layers (embeddings, patch convolutions), each layer, and what runs
after them (norms, projectors, heads). The unit of cost is a multiply-add per token, so a unit costs as many as the
matrices that a token passes have elements. Attention scores are left out: they depend on the length of the samples.

- A lookup in an embedding is free. The same weight counts where a linear head uses it.
- Of routed experts (weights ``[experts, ...]`` or a list of expert modules) a token passes a few: they count by the
  share that the nearest config tells.
- Buffers are free.

What is not known counts in full.

Splits a row of layers into consecutive parts whose largest is as small as can be, exactly.

A pipeline runs at the pace of its slowest stage, so the largest part counts first. Many splits share the best largest
part; the sum of squares chooses the most even one among them, and a tie gives the left-over layers to the earlier
parts. Costs are compared as whole numbers, without rounding: every rank must find the same split.

The largest part is found by bisection over the sums of runs of layers, the split by dynamic programming over the
number of parts, where the end of the best first part moves one way only (F. F. Yao, *Efficient dynamic programming
using quadrangle inequalities*, 1980).

The caller has checked that there is a layer for every part.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial
from itertools import accumulate
from typing import Any

from torch import nn

from lightning_mm5d.config.features import parts
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.partition.find import position, runs_between
from lightning_mm5d.partition.parts import is_in
from lightning_mm5d.partition.step_uses import Boundary, StepUses, Structure


def balance(costs: Sequence[float], parts: int, *, first: float = 0.0, last: float = 0.0) -> list[int]:
    """Return how many layers each part gets, at least one each.

    Args:
        costs: of each layer in order, not negative.
        parts: 1 to ``len(costs)``.
        first: cost of what the first part has beside its layers.
        last: cost of what the last part has beside its layers.

    Returns:
        The sizes with the smallest largest part, among these the smallest sum of squared costs, and among these the
        lexicographically largest: equal costs give ``[3, 3, 2, 2]``. Takes O(parts * n^2) at worst.
    """
    assert 1 <= parts <= len(costs), (costs, parts)
    assert min(first, last, *costs) >= 0, (costs, first, last)
    upto = [0, *accumulate(_whole(costs, first, last))]
    ends = _ends(upto, parts, _smallest_largest(upto, parts))
    sizes, start = [], 0
    for left in range(parts, 0, -1):
        sizes.append(ends[left][start] - start)
        start = ends[left][start]
    return sizes


def _whole(costs: Sequence[float], first: float, last: float) -> list[int]:
    """The costs, those at the ends with what lies beside them, as integers in the same proportions."""
    exact = [Fraction(cost) for cost in costs]
    exact[0] += Fraction(first)
    exact[-1] += Fraction(last)
    unit = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * unit) for cost in exact]


def _smallest_largest(upto: Sequence[int], parts: int) -> int:
    """The smallest bound on the cost of a part that `parts` parts can keep; `upto` are the sums before each layer."""

    def fits(bound: int) -> bool:
        start = 0
        for _ in range(parts):
            start = bisect_right(upto, upto[start] + bound) - 1
        return start == len(upto) - 1

    sums = sorted({later - earlier for index, earlier in enumerate(upto) for later in upto[index:]})
    return sums[bisect_left(sums, True, key=fits)]


def _ends(upto: Sequence[int], parts: int, bound: int) -> list[dict[int, int]]:
    """For each number of parts and each first layer, where the first of these parts ends, none above `bound`."""
    num_layers = len(upto) - 1
    never = upto[-1] ** 2 + 1
    squares = [never] * num_layers + [0]
    by_count: list[dict[int, int]] = [{}]
    for left in range(1, parts + 1):
        row, ends = [never] * (num_layers + 1), {}
        end = num_layers - left + 1
        for start in range(num_layers - left, -1, -1):
            end = min(end, bisect_right(upto, upto[start] + bound) - 1)
            before = upto[start]
            sums = [(upto[stop] - before) ** 2 + squares[stop] for stop in range(start + 1, end + 1)]
            row[start] = min(sums, default=never)
            if row[start] >= never:
                break  # earlier layers have even more after them
            end = ends[start] = start + len(sums) - sums[::-1].index(row[start])
        squares = row
        by_count.append(ends)
    return by_count


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
KeptOperations = tuple[str, ...] | None
"""Of a layer: None where nothing is computed again; else the operations whose results are kept, maybe none."""
_PRODUCTS = {"aten.linear", "aten.matmul", "aten.mm", "aten.addmm"}
_BESIDE_PRODUCTS = 0.1  # of a forward: norms, activations and residuals
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "top_k_experts")


@dataclass(frozen=True)
class Unit:
    """A part of a modality that is never cut: one layer, or all that runs before the layers or after them.

    Attributes:
        forward: multiply-adds per token of its forward.
        costs: the share of every parameter and buffer in it by name, tied ones under each of their names.
        recomputed: the part of its forward that runs again in its backward, 0 to 1.
        backward: how often its forward fits into its input gradients.
    """

    forward: float
    costs: Mapping[str, float]
    recomputed: float = 0.0
    backward: float = 1.0

    @classmethod
    def of(cls, costs: Mapping[str, float], recomputed: float = 0.0) -> Unit:
        """A unit that costs as much as all that is in it."""
        return cls(sum(costs.values()), costs, recomputed)

    def scaled(self, factor: float) -> Unit:
        """The same in another unit of cost."""
        costs = {name: cost * factor for name, cost in self.costs.items()}
        return replace(self, forward=self.forward * factor, costs=costs)


def kept_of(name: str, modality: Modality, sizes: Sequence[int]) -> tuple[KeptOperations, ...]:
    """Return what is kept of each layer of a modality until its backward; empty where all of it is.

    Args:
        name: of the modality.
        modality: its configuration.
        sizes: number of layers of each stage.

    Raises:
        ConfigError: it names layers or operations that are not there.
    """
    return next((per_layer for module in parts("costs") if (per_layer := module.kept_of(name, modality, sizes))), ())


def depends_on_cut(modality: Modality) -> bool:
    """Whether the layers that are computed again depend on where the modality is cut."""
    return any(module.depends_on_cut(modality) for module in parts("costs"))


def costed(row: Sequence[Unit], per_layer: Sequence[KeptOperations]) -> tuple[Unit, ...]:
    """Return the units of a modality with what its layers compute again in their backward.

    Args:
        row: what runs before its layers, each layer, and what runs after them.
        per_layer: of `kept_of`.
    """
    if not per_layer:
        return tuple(row)
    before, *layers, after = row
    again = (
        replace(unit, recomputed=max(unit.recomputed, share_again(ops)))
        for unit, ops in zip(layers, per_layer, strict=True)
    )
    return before, *again, after


def share_again(operations: KeptOperations) -> float:
    """Return the part of a layer's forward that runs again in its backward."""
    if operations is None:
        return 0.0
    return _BESIDE_PRODUCTS if _PRODUCTS.intersection(operations) else 1.0


def units(root: nn.Module, structure: Structure) -> dict[str, tuple[Unit, ...]]:
    """Return the units of each modality: before its layers, each layer, after them.

    Where a parameter is used before the layers and after them, it is in both units, and in all where a loop over the
    layers uses it. A modality without a list of layers has all in its first unit, and an empty one after it.

    Args:
        root: the LightningModule; the meta device will do.
        structure: its modalities.
    """
    owned = {path: name for name, encoder in structure.encoders.items() for path in encoder.owns}
    owned |= dict.fromkeys(() if structure.ends is None else structure.ends.owns, structure.loss_modality)
    rows: dict[str, list[dict[str, float]]] = {
        name: [{} for _ in range(len(parts.paths) + 2)] for name, parts in structure.parts.items()
    }
    around, between = cache(partial(position, root)), cache(partial(runs_between, root))
    memo: dict[str, list[tuple[str, list[int]]]] = {}

    def all_of(name: str, full: str) -> list[int]:
        """All units of a modality, where its code uses `full` between layers: any stage may begin or end there."""
        layers = structure.layers[name] if structure.parts[name].uses is None else None
        return [] if layers is None or not between(_parted(full, layers), layers) else list(range(len(rows[name])))

    for full, cost, lookup in _costs(root, frozenset(path for path in structure.layers.values() if path)):
        # whatever a leaf module holds stays together, so its parameters are placed once; not what is held by modules
        # that hold layers too
        holder = full if full in owned else full.rpartition(".")[0] or full
        if any(parts.holds(holder) for parts in structure.parts.values()):
            holder = full
        if holder not in memo:
            placed = _place(full, structure, owned, around)
            memo[holder] = [(name, all_of(name, full) or places) for name, places in placed]
        for name, places in memo[holder]:
            for place in places:
                # a table that is looked up before the layers is a head where it is used again after them
                free = lookup and (place == 0 or len(places) == 1)
                rows[name][place][full] = 0.0 if free else cost
    again = {
        name: [float(recomputes_itself(root, path)) for path in parts.paths] for name, parts in structure.parts.items()
    }
    return {name: tuple(map(Unit.of, row, [0.0, *again[name], 0.0])) for name, row in rows.items()}


def stage_costs(units: Iterable[Unit], trainable: frozenset[str], passes_on: bool) -> tuple[float, float, float]:
    """Return what a stage costs per microbatch, in multiply-adds per token.

    Args:
        units: of the stage, in the order in which they run.
        trainable: names of the parameters that require a gradient.
        passes_on: whether anything before the stage is trained.

    Returns:
        ``(forward_cost, backward_cost, weight_cost)`` of a `Node`. In backward a unit with something trained at or
        before it costs its forward once for input gradients, once more (or a part of that) where it is recomputed, and
        the matrices that are trained in it for theirs. The latter are `weight_cost`. Where the stage passes no gradient
        on, all of the backward is, because no stage waits for it. In a stage that recomputes, `weight_cost` is 0: its
        backward is never split, since what it computes again would be kept for the second part.
    """
    units = list(units)
    forward = sum(unit.forward for unit in units)
    backwards = list(_backwards(units, trainable, passes_on))
    backward = sum(cost for cost, _ in backwards)
    if not passes_on:
        return forward, backward, backward
    again = any(unit.recomputed for unit in units)
    return forward, backward, 0.0 if again else sum(weight for _, weight in backwards)


def step_costs(units: Iterable[Unit], trainable: frozenset[str], passes_on: bool) -> list[float]:
    """Return what each unit costs per microbatch, forward and backward; arguments as in `stage_costs`."""
    units = list(units)
    backwards = _backwards(units, trainable, passes_on)
    return [unit.forward + cost for unit, (cost, _) in zip(units, backwards, strict=True)]


def _backwards(units: Iterable[Unit], trainable: frozenset[str], passes_on: bool) -> Iterator[tuple[float, float]]:
    """For each unit what its backward costs, and the part of it that computes weight gradients."""
    for unit in units:
        trained = [cost for name, cost in unit.costs.items() if name in trainable]
        passes_on = passes_on or bool(trained)
        yield (unit.forward * (unit.backward + unit.recomputed) + sum(trained) if passes_on else 0.0), sum(trained)


def _place(
    full: str, structure: Structure, owned: Mapping[str, str], around: Callable[[str, str], tuple[bool, bool]]
) -> list[tuple[str, list[int]]]:
    """The modalities that use a parameter or buffer, and the units in each that do; `around` is `position`.

    One modality, but for what the step itself uses before the language model's boundary and after it.
    """
    prefixes = (full.rsplit(".", cut)[0] for cut in range(full.count(".") + 1))
    name = next((owned[prefix] for prefix in prefixes if prefix in owned), None)
    if structure.main is None or structure.step is None:
        return [(name or structure.loss_modality, _units_of(full, name or structure.loss_modality, structure, around))]
    if name is not None:
        names = [name]
        if name == structure.main and any(is_in(full, path) for path in structure.used_again):
            names += _after_language(full, structure, structure.step)
    else:
        names = _users(full, structure, structure.step, around)
    return [(modality, _units_of(full, modality, structure, around)) for modality in names]


def _users(
    full: str, structure: Structure, step: StepUses, around: Callable[[str, str], tuple[bool, bool]]
) -> list[str]:
    """Of the language model and what runs after it those that use what the step itself uses."""
    assert structure.main is not None
    sides = []
    for cut in structure.encoders[structure.main].boundaries:
        in_step = step.around(full, cut.path)
        sides.append(in_step or around(_parted(full, cut.path), cut.path))
    before, after = any(side[0] for side in sides), any(side[1] for side in sides)
    return [structure.main] * before + (_after_language(full, structure, step) if after or not before else [])


def _after_language(full: str, structure: Structure, step: StepUses) -> list[str]:
    """The loss modality, and the others that run after the language model and after the step's first use of `full`.

    Each of them runs the step up to its boundary, and any of its arguments may come from there. Where it does not, the
    copy gets no gradient.
    """
    others = [name for name, encoder in structure.encoders.items() if encoder.runs_after and name != structure.main]
    used = {
        name: [step.around(full, cut.path) or (True, False) for cut in _boundaries(name, structure)] for name in others
    }
    return [*(name for name in others if any(before for before, _ in used[name])), structure.loss_modality]


def _units_of(full: str, name: str, structure: Structure, around: Callable[[str, str], tuple[bool, bool]]) -> list[int]:
    """The units of a modality that use a parameter or buffer."""
    layers, parts = structure.layers[name], structure.parts[name]
    count, inside = len(parts.paths), [1 + index for index in parts.indices(full)]
    if not count:
        return [0]
    if parts.uses is not None:
        # what is used after a part runs on its stage; what the code does not name runs on all of them
        used = [gap if gap < count else count + 1 for gap in parts.gaps(full)]
        return sorted({*used, *inside}) or list(range(count + 2))
    if inside:
        return inside
    assert layers is not None
    in_step = None
    if structure.step is not None and not any(is_in(full, cut.path) for cut in _boundaries(name, structure)):
        in_step = structure.step.around(full, layers)  # a part of the step's own code
    before, after = in_step or around(_parted(full, layers), layers)
    return [0] * before + [count + 1] * after


def _boundaries(name: str, structure: Structure) -> Sequence[Boundary]:
    encoder = structure.encoders.get(name, structure.ends)
    return () if encoder is None else encoder.boundaries


def _parted(full: str, other: str) -> str:
    """The module where `full` parts from `other`: all that is below it runs when that module does."""
    names, others = full.split("."), other.split(".")
    shared = next((depth for depth, (a, b) in enumerate(zip(names, others, strict=False)) if a != b), len(names) - 1)
    return ".".join(names[: shared + 1])


def _costs(root: nn.Module, layers: frozenset[str]) -> Iterator[tuple[str, float, bool]]:
    """Yield the name and the cost of every parameter and buffer, and whether it is a table for lookups."""
    inherited: dict[str, tuple[Any, float]] = {"": (None, 1.0)}
    for path, module in root.named_modules(remove_duplicate=False):
        config, share = inherited[path.rpartition(".")[0]]
        config = getattr(module, "config", config)
        experts, routed = _routing(config)
        if isinstance(module, nn.ModuleList) and len(module) == experts and path not in layers:
            share = routed
        inherited[path] = config, share
        lookup = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        stacked = _holds_experts(module, experts)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                part = routed if stacked and tensor.shape[:1] == (experts,) else share
                cost = tensor.numel() * part if name in module._parameters else 0.0
                yield f"{path}.{name}" if path else name, cost, lookup


def _holds_experts(module: nn.Module, experts: int) -> bool:
    """Whether the module has a weight ``[experts, ...]`` that is no convolution's."""
    shapes = (parameter.shape for parameter in module._parameters.values() if parameter is not None)
    return not isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)) and any(
        len(shape) == 3 and shape[0] == experts for shape in shapes
    )


def _routing(config: Any) -> tuple[int, float]:
    """How many routed experts a config tells of, and the share of them that a token passes; 0 where it tells none."""
    experts, chosen = (
        next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)
        for names in (_EXPERTS, _EXPERTS_PER_TOKEN)
    )
    return (experts, min(chosen / experts, 1.0)) if experts > 1 and chosen > 0 else (0, 1.0)


def recomputes_itself(root: nn.Module, layer: str) -> bool:
    """Whether a layer is told to be recomputed, by its own flag or that of the module that has the list of layers.

    Transformers' layers that derive from ``GradientCheckpointingLayer`` obey their own flag; older ones are called
    through ``checkpoint`` by the module that has the list. Both do so in training mode only.
    """
    layer_module, owner = root.get_submodule(layer), root.get_submodule(layer.rpartition(".")[0].rpartition(".")[0])
    module = layer_module if hasattr(layer_module, "gradient_checkpointing") else owner
    return bool(getattr(module, "gradient_checkpointing", False)) and module.training
