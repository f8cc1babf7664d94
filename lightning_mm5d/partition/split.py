"""Cuts the modalities of a module into stages and says which stage owns which parameter.

A stage is a run of consecutive layers of one modality, with what the module's own code uses before the first layer
(embeddings) on the first stage and what it uses after the last (norms, heads) on the last. A parameter that several
stages use (tied embeddings) has several owners.

It refuses more stages than layers, and templates that overlap, leave layers out or name what is not there.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from lightning_mm5d.config import Modality, PipelineTemplate
from lightning_mm5d.errors import ConfigError
from lightning_mm5d.partition.find import Encoder, Found, find, position


@dataclass(frozen=True)
class StageCut:
    """One stage: layers ``range(first, last)`` of a modality's list (``0, 0`` where it has none)."""

    modality: str
    index: int
    first: int
    last: int

    @property
    def name(self) -> str:
        return f"{self.modality}.{self.index}"


@dataclass(frozen=True)
class Partition:
    """What is cut where.

    Attributes:
        terminal: the modality that computes the loss.
        encoders: the other modalities.
        layers: path of each modality's list of layers.
        stages: the stages of each modality, in order.
        owners: for every parameter and buffer (tied ones under each of their names), the stages that use it.
    """

    terminal: str
    encoders: dict[str, Encoder]
    layers: dict[str, str | None]
    stages: dict[str, tuple[StageCut, ...]]
    owners: dict[str, tuple[str, ...]]


def partition(root: nn.Module, modalities: Mapping[str, Modality]) -> Partition:
    """Cut `root` into the stages that `modalities` ask for.

    Raises:
        ConfigError: what is asked for does not fit the model.
    """
    found = find(root, modalities)
    stages: dict[str, tuple[StageCut, ...]] = {}
    named: dict[str, str] = {}
    for name, modality in modalities.items():
        path = found.layers[name]
        count = len(root.get_submodule(path)) if path is not None else 0  # type: ignore[arg-type]
        template = modality.pipeline_template
        if template is not None and isinstance(template.stages[0], list):
            sizes, extra = _from_names(root, name, template, path, count)
            named |= {module: f"{name}.{stage}" for module, stage in extra.items()}
        elif template is not None:
            sizes = _from_sizes(name, template, count)
        else:
            sizes = _even(name, modality.num_cuts, count)
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        stages[name] = tuple(
            StageCut(name, index, start, start + size)
            for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
        )
    return Partition(found.terminal, found.encoders, found.layers, stages, _owners(root, found, stages, named))


def _even(name: str, num_stages: int, num_layers: int) -> list[int]:
    if num_stages == 1:
        return [num_layers]
    if num_stages > num_layers:
        raise ConfigError(
            f"modalities.{name}.pp_size",
            num_stages,
            f"a stage needs at least one layer, and {name} has {num_layers or 'no list of'} layers",
            f"Use at most {max(num_layers, 1)}",
        )
    # the last stage also computes the head, so that the earlier ones take what is left over
    return [num_layers // num_stages + (index < num_layers % num_stages) for index in range(num_stages)]


def _from_sizes(name: str, template: PipelineTemplate, num_layers: int) -> list[int]:
    sizes = [size for size in template.stages if isinstance(size, int)]
    if sum(sizes) != num_layers:
        fixed = [*sizes[:-1], num_layers - sum(sizes[:-1])]
        raise ConfigError(
            f"modalities.{name}.pipeline_template.stages",
            template.stages,
            f"the stages must hold each of the {num_layers} layers of {name} once, and hold {sum(sizes)}",
            f"Use {fixed if fixed[-1] > 0 else _even(name, min(len(sizes), max(num_layers, 1)), num_layers)}",
        )
    return sizes


def _from_names(
    root: nn.Module, name: str, template: PipelineTemplate, path: str | None, num_layers: int
) -> tuple[list[int], dict[str, int]]:
    field = f"modalities.{name}.pipeline_template.stages"
    every = {full: full for full, _ in root.named_modules() if full}
    layer_of = {f"{path}.{index}": index for index in range(num_layers)}
    stage_of: dict[int, int] = {}
    extra: dict[str, int] = {}
    for stage, modules in enumerate(template.stages):
        assert isinstance(modules, list)
        for module in modules:
            matches = [full for full in every if full == module or full.endswith(f".{module}")]
            exact = [full for full in matches if full == module or full in layer_of]
            matches = exact or matches
            if len(matches) != 1:
                near = difflib.get_close_matches(module, matches or list(every), n=1, cutoff=0.0)[0]
                raise ConfigError(
                    f"{field}[{stage}]",
                    module,
                    f"it must name one module of the model, and names {len(matches)}",
                    f"Use the full path, for instance {near!r}",
                )
            if matches[0] not in layer_of:
                extra[matches[0]] = stage
            elif layer_of[matches[0]] in stage_of:
                raise ConfigError(field, module, "a layer may be in one stage only", "Name it once")
            else:
                stage_of[layer_of[matches[0]]] = stage
    missing = [full for full, index in layer_of.items() if index not in stage_of]
    if missing:
        raise ConfigError(field, template.stages, f"the stages leave out {missing}", "Add them to a stage")
    order = [stage_of[index] for index in range(num_layers)]
    if order != sorted(order):
        raise ConfigError(
            field, template.stages, "the layers of a stage must be consecutive", "Keep the layers in order"
        )
    sizes = [order.count(stage) for stage in range(len(template.stages))]
    if 0 in sizes:
        raise ConfigError(
            f"{field}[{sizes.index(0)}]",
            template.stages[sizes.index(0)],
            "a stage needs at least one layer",
            "Move a layer to it",
        )
    return sizes, extra


def _owners(
    root: nn.Module, found: Found, stages: Mapping[str, tuple[StageCut, ...]], named: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    owned = {path: name for name, encoder in found.encoders.items() for path in encoder.owns}
    by_parameter: dict[int, list[str]] = {}
    names: dict[str, int] = {}
    memo: dict[str, list[str]] = {}
    for full, parameter in (
        *root.named_parameters(remove_duplicate=False),
        *root.named_buffers(remove_duplicate=False),
    ):
        names[full] = id(parameter)
        # whatever a leaf module holds stays together, so its parameters are classified once
        unit = full if full in owned else full.rpartition(".")[0] or full
        if unit not in memo:
            memo[unit] = _owners_of(root, full, found, stages, named, owned)
        known = by_parameter.setdefault(id(parameter), [])
        known += [stage for stage in memo[unit] if stage not in known]
    order = [cut.name for cuts in stages.values() for cut in cuts]
    return {full: tuple(sorted(by_parameter[key], key=order.index)) for full, key in names.items()}


def _owners_of(
    root: nn.Module,
    full: str,
    found: Found,
    stages: Mapping[str, tuple[StageCut, ...]],
    named: Mapping[str, str],
    owned: Mapping[str, str],
) -> list[str]:
    prefixes = [".".join(full.split(".")[:depth]) for depth in range(full.count(".") + 1, 0, -1)]
    for prefix in prefixes:
        if prefix in named:
            return [named[prefix]]
    name = next((owned[prefix] for prefix in prefixes if prefix in owned), found.terminal)
    cuts, layers = stages[name], found.layers[name]
    if len(cuts) == 1 or layers is None:
        return [cuts[0].name]
    if full.startswith(f"{layers}."):
        index = int(full[len(layers) + 1 :].split(".")[0]) if full[len(layers) + 1].isdigit() else None
        if index is None:  # a named Sequential
            keys = list(root.get_submodule(layers)._modules)
            index = keys.index(full[len(layers) + 1 :].split(".")[0])
        return [cut.name for cut in cuts if cut.first <= index < cut.last]
    before, after = position(root, full, layers)
    return [cuts[0].name] * before + [cuts[-1].name] * after
