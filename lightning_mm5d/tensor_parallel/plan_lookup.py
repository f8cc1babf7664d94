"""Finds how the modules of a model can be sharded over tensor parallel ranks, and shards modalities with such a degree.

For each module, the first of these that knows it: what the user registered, what its layers say (`lightning_mm5d.nn`),
the model's own ``tp_plan``, the table of families, rules by names of linear layers. What none of them knows stays full:
every rank computes the same, which is right and gains nothing. `unplanned` lists layers of which nothing is sharded.

It refuses what is registered and is no plan.

**Division** says which plans apply to the modalities of a module that have a tensor parallel degree, and what follows.
It refuses plans that do not fit, and parameters that colocated modalities of different degrees share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.features import parts
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.nn import Linear
from lightning_mm5d.partition import Partition
from lightning_mm5d.source.reads import is_handling
from lightning_mm5d.source.trees import names, own_functions
from lightning_mm5d.tensor_parallel.family_plans import Families, TensorParallelPlan, family_plan, known_families
from lightning_mm5d.tensor_parallel.plan_rules import linear_of, metadata, rules, said_by_layers, sizes
from lightning_mm5d.tensor_parallel.resolve import Division, resolve

Plans = tuple[TensorParallelPlan, ...]

_OF_ATTENTION = {"in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "multi_head_attention_forward"}
_NOT_READ = ("torch.", "lightning.", "pytorch_lightning.", "transformers.modeling_utils.")

_REGISTERED: dict[type[nn.Module] | str, Plans] = {}


def register_tensor_parallel_plan(cls: type[nn.Module] | str, *plans: TensorParallelPlan) -> None:
    """Say how the instances of a class are sharded over tensor parallel ranks.

    It holds for everything in an instance: no other plan is looked for in it, but those of registered classes. A plan
    that names no layer leaves the instances full. A second call for the same class replaces the first.

    Args:
        cls: the class, or its name; it counts for classes that derive from it, too.
        plans: relative to an instance, for instance
            ``TensorParallelPlan(column={"up": ("width",)}, row={"down": ("width",)})``.

    Raises:
        ConfigError: there is no plan, or something else is one.
    """
    fix = "Pass the class and one TensorParallelPlan or more"
    if not (isinstance(cls, str) and cls) and not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ConfigError("register_tensor_parallel_plan", cls, "A plan is for a class of modules or its name", fix)
    if not plans:
        raise ConfigError("register_tensor_parallel_plan", plans, "There must be a plan", fix)
    for plan in plans:
        if not isinstance(plan, TensorParallelPlan):
            raise ConfigError("register_tensor_parallel_plan", plan, "A plan is a TensorParallelPlan", fix)
    _REGISTERED[cls] = plans


def plans_of(root: nn.Module, wanted: Callable[[str], bool] = lambda path: True) -> dict[str, Plans]:
    """Return the plans for the modules of `root`, by path of the module that they are relative to.

    Args:
        root: the LightningModule, on any device.
        wanted: whether the module at a path is to be sharded.
    """
    by_path: dict[str, Plans] = {}
    registered: list[str] = []
    skipped: list[str] = []
    claimed: set[int] = set()
    tp_plans, families = metadata(root), known_families()
    lists = [path for path, module in root.named_modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    for path, module in root.named_modules():
        plans = _registered(type(module))
        if plans:
            registered.append(path)
            if wanted(path):
                by_path[path] = plans
    for path, module in root.named_modules():
        if isinstance(module, nn.MultiheadAttention) and _is_read(root, path):
            skipped.append(path)
        if not wanted(path) or _is_in(path, (*registered, *skipped)):
            continue
        chosen: list[TensorParallelPlan] = []
        stated = said_by_layers(path, module)
        for plan in [stated] if stated else _candidates(module, tp_plans.get(path, ()), families, _is_in(path, lists)):
            held = {id(module.get_submodule(key)) for key in (*plan.column, *plan.row, *plan.experts)}
            if not held & claimed:
                claimed |= held
                chosen.append(plan)
        if chosen:
            by_path[path] = tuple(chosen)
    return by_path


def origins(root: nn.Module, paths: Iterable[str]) -> dict[str, int]:
    """Return where the plans of sharded layers come from, each with the number of layers.

    Args:
        root: the LightningModule, on any device.
        paths: of the layers that plans name.
    """
    counts: dict[str, int] = {}
    tp_plans, families = metadata(root), known_families()
    for path in paths:
        parts = path.split(".")
        around = [(".".join(parts[:at]), ".".join(parts[at:])) for at in range(len(parts))]
        modules = [(root.get_submodule(parent), parent, inside) for parent, inside in around]
        if any(_registered(type(module)) for module, _, _ in modules):
            origin = "register_tensor_parallel_plan"
        elif isinstance(linear_of(root.get_submodule(path)), Linear):
            origin = "its layers"
        elif any(_names(plan, inside) for _, parent, inside in modules for plan in tp_plans.get(parent, ())):
            origin = "the model's tp_plan"
        elif any((plan := family_plan(module, families)) and _names(plan, inside) for module, _, inside in modules):
            origin = "the table of families"
        else:
            origin = "rules by names"
        counts[origin] = counts.get(origin, 0) + 1
    return counts


def _is_read(root: nn.Module, path: str) -> bool:
    """Whether code around an attention of torch computes with its weights, past its own forward."""
    around = [path.rsplit(".", cut)[0] for cut in range(1, path.count(".") + 1)]
    classes = {owner for holder in ("", *around) for owner in type(root.get_submodule(holder)).__mro__}
    functions = [
        function
        for owner in classes
        if owner is not object and not f"{owner.__module__}.".startswith(_NOT_READ)
        for name, function in own_functions(owner)
        if not is_handling(name)
    ]
    named = [names(function) for function in functions]
    return any(words is None or words & _OF_ATTENTION for words in named)


def _names(plan: TensorParallelPlan, inside: str) -> bool:
    return inside in (*plan.column, *plan.row, *plan.experts)


def _candidates(module: nn.Module, plans: Plans, families: Families, in_layers: bool) -> Iterator[TensorParallelPlan]:
    yield from plans
    family = family_plan(module, families)
    if family is not None:
        yield family
    yield from rules(module, in_layers)


def _registered(cls: type) -> Plans:
    for owner in cls.__mro__:
        for key in (owner, owner.__name__):
            if key in _REGISTERED:
                return _REGISTERED[key]
    return ()


def _is_in(path: str, parents: Collection[str]) -> bool:
    return any(not parent or path == parent or path.startswith(f"{parent}.") for parent in parents)


# --- layers in which nothing is sharded ---


def unplanned(root: nn.Module, plans: Mapping[str, Plans], layers: Iterable[str]) -> dict[str, str]:
    """Return the layers with linear layers of which no plan shards anything, by path, and how to shard them.

    Args:
        root: the LightningModule, on any device.
        plans: what is sharded, by path.
        layers: paths of lists of layers.
    """
    planned = {id(root.get_submodule(path)) for path in plans}
    hints = {}
    for path in layers:
        for name, layer in root.get_submodule(path).named_children():
            if planned & {id(module) for module in layer.modules()}:
                continue
            linears, cls = _linears(layer), type(layer).__name__
            if linears or _may_have_experts(layer):
                texts = [f"{key or 'itself'} ({fan_in} to {fan_out})" for key, (fan_in, fan_out) in linears.items()]
                hints[f"{path}.{name}"] = (
                    f"no tensor parallel plan is known for {cls} ({', '.join(texts) or 'tensors of experts'}). "
                    f"Say how it is sharded: {_example(cls, linears)}"
                )
    return hints


def _may_have_experts(layer: nn.Module) -> bool:
    """Whether a layer has tensors of three dims that are not those of convolutions."""
    convolutions = [module for module in layer.modules() if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d))]
    left_out = {id(parameter) for module in convolutions for parameter in module.parameters()}
    return any(parameter.dim() == 3 and id(parameter) not in left_out for parameter in layer.parameters())


def _linears(layer: nn.Module) -> dict[str, tuple[int, int]]:
    """The linear layers in a layer by path, with what they take and give."""
    linears: dict[str, tuple[int, int]] = {}
    for path, module in layer.named_modules():
        adapted = getattr(module, "base_layer", module)
        is_part = path.endswith(".base_layer") or ".lora_" in path
        if isinstance(adapted, (nn.Linear, Conv1D)) and not is_part:
            linears[path] = sizes(adapted)
    return linears


def _example(cls: str, linears: Mapping[str, tuple[int, int]]) -> str:
    """A registration with a layer's own names: its last two linear layers of which one may feed the other."""
    names = list(linears)
    pairs = [
        (first, last)
        for at, first in enumerate(names)
        for last in names[at + 1 :]
        if linears[first][1] == linears[last][0]
    ]
    column, row = pairs[-1] if pairs else (names[0], names[-1]) if names else ("up", "down")
    arguments: dict[str, Any] = {"column": {column: ("width",)}, "row": {row: ("width",)}}
    plan = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"register_tensor_parallel_plan({cls!r}, TensorParallelPlan({plan}))"


_log = logging.getLogger(__name__)


class OtherDivision(Protocol):
    """Layers that a feature divides: what ``begin(root, partition, modalities)`` of its `layers_in_blocks` returns."""

    def pieces(self, path: str) -> int | None:
        """Return in how many pieces the units of the module at `path` are cut; None for the number of its ranks."""

    def divided(self, division: Division, shared: Collection[str]) -> Division:
        """Return `division` with these layers in blocks; `shared` are parameters that several modalities use."""


def divide(
    root: nn.Module,
    partition: Partition,
    modalities: Mapping[str, Modality],
    experts: Mapping[str, tuple[str, ...]] | None = None,
) -> Division:
    """Return what tensor parallelism makes of `root`; logs which modules of a sharded modality stay full.

    Args:
        root: the LightningModule; the meta device will do.
        partition: which stage uses which parameter.
        modalities: the configuration.
        experts: modules whose experts ranks share besides, by path, with the names of their parameters.

    Raises:
        ConfigError: a plan does not fit.
    """
    _check_shared(partition, modalities)
    others: list[OtherDivision] = [module.begin(root, partition, modalities) for module in parts("layers_in_blocks")]

    def pieces(path: str, degree: int) -> int:
        return next((count for other in others if (count := other.pieces(path)) is not None), degree)

    degrees = {name: modality.tp_size for name, modality in modalities.items()}
    if set(degrees.values()) == {1}:
        return Division()

    def place(parameter: str) -> tuple[str, int] | None:
        # what several modalities share stays full: their ranks are in different groups
        users = partition.users(parameter)
        return (user, degrees[user]) if len(users) == 1 and (user := next(iter(users))) else None

    sharded = [name for name in partition.owners if (group := place(name)) is not None and group[1] > 1]
    around = {name.rsplit(".", cut)[0] for name in sharded for cut in range(1, name.count(".") + 1)} | {""}
    layers = [path for name, path in partition.layers.items() if path is not None and degrees[name] > 1]
    plans, whole = plans_of(root, around.__contains__), dict[str, tuple[str, str]]()
    full = {path: why for path, why in unplanned(root, plans, layers).items() if path in around}
    for path, weights in (experts or {}).items():
        group = place(weights[0])
        if group is not None and group[1] > 1 and modalities[group[0]].tensor.expert_tp_size == 1:
            whole |= dict.fromkeys(weights, (path, group[0]))
    plans = _without(plans, {path for path, _ in whole.values()})
    full_embeddings = {name for name, modality in modalities.items() if not modality.tensor.shard_embedding}
    wanted = {name: modality.tensor.make_vocab_size_divisible_by for name, modality in modalities.items()}
    multiples = {name: multiple for name, multiple in wanted.items() if multiple is not None}
    division = resolve(root, plans, place, full_embeddings, pieces, multiples)
    _check_vocabularies(division, multiples)
    _check_divided(division, modalities, experts or {}, place)
    # each rank sends some of the tokens to whole experts, and so has a part of their gradients
    division = replace(
        division,
        shared=division.shared | whole.keys(),
        groups={**division.groups, **{name: modality for name, (_, modality) in whole.items()}},
        whole={**division.whole, **full},
    )
    several = [name for name in partition.owners if place(name) is None]
    for other in others:
        division = other.divided(division, several)
    for why in dict.fromkeys(division.whole.values()):
        paths = [path for path, reason in division.whole.items() if reason == why]
        more = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
        _log.warning("%s%s is computed in full on every tensor parallel rank: %s", paths[0], more, why)
    return division


def _without(plans: Mapping[str, Plans], paths: Collection[str]) -> dict[str, Plans]:
    """Return `plans` without what they say of modules at `paths` and in them."""
    remaining = {}
    for path, several in plans.items():
        join = f"{path}.".lstrip(".")
        pruned = tuple(
            replace(
                plan,
                column={key: parts for key, parts in plan.column.items() if not _is_in(join + key, paths)},
                row={key: parts for key, parts in plan.row.items() if not _is_in(join + key, paths)},
                experts=tuple(key for key in plan.experts if not _is_in(join + key, paths)),
                parameters={key: parts for key, parts in plan.parameters.items() if not _is_in(join + key, paths)},
            )
            for plan in several
        )
        if not _is_in(path, paths):
            remaining[path] = pruned
    return remaining


def _check_divided(
    division: Division,
    modalities: Mapping[str, Modality],
    experts: Mapping[str, tuple[str, ...]],
    place: Callable[[str], tuple[str, int] | None],
) -> None:
    for path, weights in experts.items():
        group = place(weights[0])
        size = 1 if group is None else modalities[group[0]].tensor.expert_tp_size
        cut = [shard for name in weights if (shard := division.shards.get(name)) is not None]
        if group is not None and size > 1 and (division.roles.get(path) != "experts" or any(s.dim == 0 for s in cut)):
            rule = f"No plan says how the experts of {path} are divided"
            raise ConfigError(f"modalities.{group[0]}.tensor.expert_tp_size", size, rule, "Use expert_tp_size=1")


def _check_vocabularies(division: Division, multiples: Mapping[str, int]) -> None:
    shared = {division.groups[path] for path, kind in division.roles.items() if kind in ("embedding", "head")}
    for name, multiple in multiples.items():
        if name not in shared:
            rule = f"It is said of a vocabulary that tensor parallel ranks share, and those of {name!r} share none"
            fix = "Leave it unset"
            raise ConfigError(f"modalities.{name}.tensor.make_vocab_size_divisible_by", multiple, rule, fix)


def _check_shared(partition: Partition, modalities: Mapping[str, Modality]) -> None:
    for parameter, stages in partition.owners.items():
        users = list(dict.fromkeys(stage.modality for stage in stages))
        for size in ("tp_size", "cp_size"):
            degrees = {user: getattr(modalities[user], size) for user in users}
            unlike = [user for user in users if degrees[user] != degrees[users[0]]]
            if unlike and any(modalities[user].owner is not None for user in users):
                rule = f"{parameter!r} is shared by {' and '.join(map(repr, users))}, which are colocated"
                fix = f"Use {size}={degrees[users[0]]}, or ranks of their own"
                raise ConfigError(f"modalities.{unlike[0]}.{size}", degrees[unlike[0]], rule, fix)
