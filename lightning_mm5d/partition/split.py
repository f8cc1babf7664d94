"""Cuts the modalities of a module into stages and says which stage owns which parameter.

A stage is a run of consecutive layers of one modality, with what the module's own code uses before the first layer
(embeddings) on the first stage and what it uses after the last (norms, heads) on the last. A parameter that several
stages use (tied embeddings) has several owners. Layers are assigned so that the slowest stage is as fast as can be,
unless a template says otherwise.

It refuses more stages than layers, and templates that overlap, leave layers out or name what is not there.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.features import part_of
from lightning_mm5d.config.groups import PipelineTemplate, path_of
from lightning_mm5d.config.modality import Modality, consumers_of
from lightning_mm5d.layout.layout import even_lengths
from lightning_mm5d.partition.costs import (
    KeptOperations,
    Unit,
    balance,
    costed,
    depends_on_cut,
    kept_of,
    step_costs,
    units,
)
from lightning_mm5d.partition.find import find, position
from lightning_mm5d.partition.parts import Parts, tensors_of
from lightning_mm5d.partition.step_uses import Boundary, Encoder, Structure
from lightning_mm5d.schedule.graph import StageKey

_CUTS = 8  # that are tried where the costs of layers depend on the cut


@dataclass(frozen=True)
class StageCut:
    """One stage: layers ``range(first, last)`` of a modality's list (``0, 0`` where it has none)."""

    modality: str
    index: int
    first: int
    last: int

    @cached_property
    def name(self) -> StageKey:
        """Key of the stage."""
        return StageKey(self.modality, self.index)


@dataclass(frozen=True)
class Partition:
    """What is cut where.

    Attributes:
        loss_modality: the modality that computes the loss.
        encoders: the other modalities.
        layers: path of each modality's list of layers.
        parts: what each modality is cut between; the members of that list, where there is one.
        stages: the stages of each modality, in order.
        owners: for every parameter and buffer (tied ones under each of their names), the stages that use it.
        units: what each stage consists of and costs, in the order in which it runs.
        kept_operations: of the modalities with layers that are computed again, what is kept of each layer.
        ends: the callables of the loss modality, where it feeds from another.
        pipelines: of the modalities with unlike pipelines, for each replica the pipeline rank of each stage.
    """

    loss_modality: str
    encoders: dict[str, Encoder]
    layers: dict[str, str | None]
    parts: dict[str, Parts]
    stages: dict[str, tuple[StageCut, ...]]
    owners: dict[str, tuple[StageKey, ...]]
    units: dict[StageKey, tuple[Unit, ...]]
    kept_operations: dict[str, tuple[KeptOperations, ...]] = field(default_factory=dict)
    ends: tuple[Boundary, ...] = ()
    pipelines: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def users(self, *names: str) -> set[str]:
        """Return the modalities that use some of these parameters and buffers."""
        return {stage.modality for name in names for stage in self.owners.get(name, ())}


def partition(root: nn.Module, modalities: Mapping[str, Modality]) -> Partition:
    """Cut `root` into the stages that `modalities` ask for.

    Without a template the slowest stage is made as fast as can be, by what a step costs with the parameters that
    require a gradient now.

    Raises:
        ConfigError: what is asked for does not fit the model.
    """
    structure = find(root, modalities)
    rows = units(root, structure)
    trainable = frozenset(name for name, p in root.named_parameters(remove_duplicate=False) if p.requires_grad)
    sizes: dict[str, list[int]] = {}
    named: dict[str, StageKey] = {}
    kept_operations: dict[str, tuple[KeptOperations, ...]] = {}
    pipelines: dict[str, tuple[tuple[int, ...], ...]] = {}

    def balanced(name: str, modality: Modality, count: int) -> list[int]:
        option = path_of("pp_size" if modalities[name].pipeline.pipelines is None else "pipelines")
        sizes = even_lengths(_enough(name, modality, count, option), modality.num_cuts)
        if modality.num_cuts == 1:
            return sizes
        passes_on = _after_trained(name, structure, modalities, rows, trainable)
        return _balanced(name, modality, rows[name], trainable, passes_on)

    for name, modality in modalities.items():
        template, count = modality.pipeline.pipeline_template, len(structure.parts[name].paths)
        if not depends_on_cut(modality):
            kept_operations[name] = kept_of(name, modality, [count])
            rows[name] = costed(rows[name], kept_operations[name])
        if modality.pipeline.pipelines is not None:
            from_template = partial(_from_template, name=name, num_layers=count)
            sizes[name], pipelines[name] = part_of("pipelines").cut(name, modality, count, balanced, from_template)
        elif template is None:
            sizes[name] = balanced(name, modality, count)
        elif template.stages is not None and isinstance(template.stages[0], list):
            sizes[name], extra = _from_names(root, name, template.stages, structure.parts[name])
            named |= {module: StageKey(name, stage) for module, stage in extra.items()}
        else:
            sizes[name] = _from_template(f"modalities.{name}.pipeline.pipeline_template", name, template, count)
        if depends_on_cut(modality):
            kept_operations[name] = kept_of(name, modality, sizes[name])
            rows[name] = costed(rows[name], kept_operations[name])
    stages: dict[str, tuple[StageCut, ...]] = {}
    for name, counts in sizes.items():
        ends = [0, *accumulate(counts)]
        stages[name] = tuple(StageCut(name, index, *span) for index, span in enumerate(pairwise(ends)))
    held = _held(root, structure, rows, stages, named)
    owners = _owners(root, held)
    kept_operations = {name: per_layer for name, per_layer in kept_operations.items() if per_layer}
    calls = () if structure.ends is None else structure.ends.boundaries
    parts = structure.encoders, structure.layers, structure.parts
    return Partition(structure.loss_modality, *parts, stages, owners, held, kept_operations, calls, pipelines)


def _after_trained(
    name: str,
    structure: Structure,
    modalities: Mapping[str, Modality],
    rows: Mapping[str, Sequence[Unit]],
    trainable: frozenset[str],
) -> bool:
    """Whether a modality's layers pass gradients on to another one."""
    consumers = consumers_of(modalities)
    return any(
        any(not trainable.isdisjoint(unit.costs) for unit in rows[source])
        or _after_trained(source, structure, modalities, rows, trainable)
        for source, encoder in structure.encoders.items()
        if (where := consumers[source].get(name, "last")) != "last" and not (encoder.used_late and where == "first")
    )


def _balanced(
    name: str, modality: Modality, row: Sequence[Unit], trainable: frozenset[str], passes_on: bool
) -> list[int]:
    """The sizes of the stages with the shortest slowest stage.

    Where what a stage computes again depends on the cut, it is cut again with these costs, until nothing gets better.
    """
    best, shortest, again = list[int](), math.inf, row
    for _ in range(_CUTS):
        first, *layers, last = step_costs(again, trainable, passes_on)
        # a layer without parameters still takes its time
        sizes = balance([max(cost, 1.0) for cost in layers], modality.num_cuts, first=first, last=last)
        if not depends_on_cut(modality):
            return sizes
        again = costed(row, kept_of(name, modality, sizes))
        first, *layers, last = step_costs(again, trainable, passes_on)
        ends = [0, *accumulate(sizes)]
        stages = [sum(layers[start:end]) for start, end in pairwise(ends)]
        stages[0] += first
        stages[-1] += last
        if max(stages) >= shortest:
            break
        best, shortest = sizes, max(stages)
    return best


def _enough(name: str, modality: Modality, num_layers: int, option: str) -> int:
    """The number of layers, where each stage gets one; else an error at `option`, which says how many stages."""
    ranks, chunks, most = modality.stages, modality.pipeline.pp_chunks, max(num_layers, 1)
    if ranks * chunks > most:
        several = f"{ranks} ranks with {chunks} chunks each are {ranks * chunks} stages. " if chunks > 1 else ""
        rule = f"{several}A stage needs at least one layer, and {name} has {num_layers or 'no list of'} layers"
        if not num_layers:
            rule += ", and no code that calls submodules one after the other by their names"
        fewer = ", or fewer chunks (pp_chunks; the schedule zbv takes 2)" if chunks > 1 else ""
        raise ConfigError(f"modalities.{name}.{option}", ranks, rule, f"Use at most {most // chunks or most}{fewer}")
    return num_layers


def _from_template(field: str, name: str, template: PipelineTemplate, num_layers: int) -> list[int]:
    if template.offsets is not None:
        return _from_offsets(f"{field}.offsets", name, template.offsets, num_layers)
    return _from_sizes(f"{field}.stages", name, template, num_layers)


def _from_sizes(field: str, name: str, template: PipelineTemplate, num_layers: int) -> list[int]:
    sizes = [size for size in template.stages or () if isinstance(size, int)]
    if sum(sizes) != num_layers:
        fixed = [*sizes[:-1], num_layers - sum(sizes[:-1])]
        rule = f"The stages must hold each of the {num_layers} layers of {name} once, and hold {sum(sizes)}"
        fix = f"Use {fixed if fixed[-1] > 0 else even_lengths(num_layers, min(len(sizes), max(num_layers, 1)))}"
        raise ConfigError(field, template.stages, rule, fix)
    return sizes


def _from_offsets(field: str, name: str, offsets: Sequence[int], num_layers: int) -> list[int]:
    if 1 < len(offsets) > num_layers:
        rule = f"A stage needs at least one layer, and {name} has {num_layers or 'no list of'} layers"
        raise ConfigError(field, offsets, rule, f"Use at most {max(num_layers, 1)} stages")
    even = even_lengths(num_layers, len(offsets))
    sizes = [size + offset for size, offset in zip(even, offsets, strict=True)]
    if len(sizes) > 1 and min(sizes) < 1:
        fixed = [max(size, 1) for size in sizes]
        while sum(fixed) > num_layers:
            fixed[fixed.index(max(fixed))] -= 1
        fix = f"Use {[size - usual for size, usual in zip(fixed, even, strict=True)]}, which gives {fixed}"
        raise ConfigError(field, offsets, f"A stage needs at least one layer, and they would get {sizes}", fix)
    return sizes


def _from_names(root: nn.Module, name: str, stages: Sequence[Any], parts: Parts) -> tuple[list[int], dict[str, int]]:
    field = f"modalities.{name}.pipeline.pipeline_template.stages"
    every = {full: full for full, _ in root.named_modules() if full}
    layer_of = {path: index for index, path in enumerate(parts.paths)}
    stage_of: dict[int, int] = {}
    extra: dict[str, int] = {}
    for stage, modules in enumerate(stages):
        for module in modules:
            matches = [full for full in every if full == module or full.endswith(f".{module}")]
            exact = [full for full in matches if full == module or full in layer_of]
            matches = exact or matches
            if len(matches) != 1:
                near = difflib.get_close_matches(module, matches or list(every), n=1, cutoff=0.0)[0]
                rule = f"It must name one module of the model, and names {len(matches)}"
                raise ConfigError(f"{field}[{stage}]", module, rule, f"Use the full path, for instance {near!r}")
            if matches[0] not in layer_of:
                extra[matches[0]] = stage
            elif layer_of[matches[0]] in stage_of:
                raise ConfigError(field, module, "A layer may be in one stage only", "Name it once")
            else:
                stage_of[layer_of[matches[0]]] = stage
    missing = [full for full, index in layer_of.items() if index not in stage_of]
    if missing:
        raise ConfigError(field, stages, f"The stages leave out {missing}", "Add them to a stage")
    order = [stage_of[index] for index in range(len(parts.paths))]
    if order != sorted(order):
        raise ConfigError(field, stages, "The layers of a stage must be consecutive", "Keep the layers in order")
    sizes = [order.count(stage) for stage in range(len(stages))]
    if 0 in sizes:
        rule = "A stage needs at least one layer"
        raise ConfigError(f"{field}[{sizes.index(0)}]", stages[sizes.index(0)], rule, "Move a layer to it")
    return sizes, extra


def _held(
    root: nn.Module,
    structure: Structure,
    rows: Mapping[str, Sequence[Unit]],
    stages: Mapping[str, tuple[StageCut, ...]],
    named: Mapping[str, StageKey],
) -> dict[StageKey, tuple[Unit, ...]]:
    """The units of each stage; what a template names is in the stage that it says, before its layers or after them."""
    costs: dict[str, float] = {}
    for unit in (unit for row in rows.values() for unit in row):
        costs |= {full: max(cost, costs.get(full, 0.0)) for full, cost in unit.costs.items()}
    moved = {full: path for full in costs if (path := _nearest_above(full, named)) is not None}
    extra: dict[tuple[StageKey, bool], dict[str, float]] = {}
    for full, path in moved.items():
        parts, layers = structure.parts[named[path].modality], structure.layers[named[path].modality]
        before = 0 in parts.gaps(path) if layers is None else position(root, path, layers)[0]
        extra.setdefault((named[path], before), {})[full] = costs[full]
    held: dict[StageKey, tuple[Unit, ...]] = {}
    for name, cuts in stages.items():
        left = [_without(unit, moved) for unit in rows[name]] if moved else rows[name]
        for cut in cuts:
            # units of the row: 0 runs before the layers, 1 is the first layer, -1 runs after them
            start, end = cut.first + (cut.index > 0), cut.last + (2 if cut is cuts[-1] else 1)
            ahead, later = (cut.name, True), (cut.name, False)
            held[cut.name] = (
                *([Unit.of(extra[ahead])] if ahead in extra else ()),
                *left[start:end],
                *([Unit.of(extra[later])] if later in extra else ()),
            )
    return held


def _nearest_above(full: str, paths: Mapping[str, object]) -> str | None:
    """The longest of `paths` that `full` is in."""
    above = (full.rsplit(".", cut)[0] for cut in range(full.count(".") + 1))
    return next((path for path in above if path in paths), None)


def _without(unit: Unit, names: Mapping[str, object]) -> Unit:
    return Unit.of({full: cost for full, cost in unit.costs.items() if full not in names}, unit.recomputed)


def _owners(root: nn.Module, held: Mapping[StageKey, Sequence[Unit]]) -> dict[str, tuple[StageKey, ...]]:
    users: dict[str, dict[StageKey, None]] = {}
    for stage, row in held.items():
        for full in (full for unit in row for full in unit.costs):
            users.setdefault(full, {})[stage] = None
    ids = {full: id(tensor) for full, tensor in tensors_of(root)}
    shared: dict[int, set[StageKey]] = {}
    for full, key in ids.items():
        shared.setdefault(key, set()).update(users[full])
    order = {stage: index for index, stage in enumerate(held)}
    return {full: tuple(sorted(shared[key], key=order.__getitem__)) for full, key in ids.items()}
