"""What a plan puts where, as data and as a page: ranks, stages, layers, parameters, bytes, cuts and copies.

A layout is easier to correct on paper than on a cluster. Everything is counted from the plan that a run executes, and
from a module that may be on the meta device.

Tables of estimated memory have a row per rank, and a row per option with what the busiest rank would need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from torch import nn

from lightning_mm5d.config.checks import check_memory
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.features import check_features
from lightning_mm5d.config.groups import with_fields
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.config.tables import Page, Table, memory_text, spans
from lightning_mm5d.features.shared_experts.experts import find_experts
from lightning_mm5d.features.unlike_pipelines.pipelines import check_pipelines
from lightning_mm5d.layout.layout import Layout, Place
from lightning_mm5d.partition import StageCut, partition
from lightning_mm5d.partition.costs import kept_of
from lightning_mm5d.plan.holdings import DataShards
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.tensor_parallel.plan_lookup import divide
from lightning_mm5d.tensor_parallel.resolve import Division
from lightning_mm5d.tools.planner.rank_memory import RankMemory, Step, memory_of


class Holding(NamedTuple):
    """What one place holds.

    Attributes:
        place: a rank's position in one modality.
        cuts: its stages; several where a rank has several chunks of its modality.
        layers: full names of the layers in them.
        parameters: elements of the parameters that it uses, tied ones once, of sharded ones its shard, of experts its
            own.
        bytes: memory of these parameters between steps, without gradients and optimizer state.
    """

    place: Place
    cuts: tuple[StageCut, ...]
    layers: tuple[str, ...]
    parameters: int
    bytes: int


def holdings(plan: Plan, module: nn.Module) -> list[Holding]:
    """Return what each place holds, by rank and then by modality; a rank with several modalities has several places."""
    per_place, shards = [], DataShards(plan)
    known: dict[Any, tuple[tuple[str, ...], int, int]] = {}
    named = [*module.named_parameters(remove_duplicate=False)]
    for place in sorted(plan.layout.places, key=lambda place: place.rank):  # stable: modalities keep their order
        cuts = plan.topology.cuts_at(place.modality, place.pp, place.dp)
        key = tuple(cut.name for cut in cuts), place.tp, place.rank if plan.experts else None
        if key not in known:  # of replicas that hold the same, one is counted
            held = parameters_of(named, plan, key[0])
            layers = tuple(layer for cut in cuts for layer in _layers(plan, cut))
            counts = {name: _elements(plan, shards, name, p, place) for name, p in held.items()}
            size = sum(counts[name] * plan.held_dtype(p).itemsize for name, p in held.items())
            known[key] = layers, sum(counts.values()), size
        per_place.append(Holding(place, cuts, *known[key]))
    return per_place


def as_json(held: Sequence[Holding], memory: Sequence[RankMemory]) -> list[dict[str, Any]]:
    """Return the holdings, each with the memory of its rank in bytes.

    They are ``{"rank", "node", "modality", "dp", "pp", "cp", "tp", "layers", "parameters", "memory"}``; ``memory`` is
    ``{"parameters", "gradients", "optimizer", "activations", "buffers", "peak", "host", "together"}`` with null
    for what is not known.

    Args:
        held: of all places.
        memory: of all ranks; where there is none, entries have none.
    """
    sizes = [estimate._asdict() for estimate in memory]
    return [
        holding.place._asdict()
        | {"layers": list(holding.layers), "parameters": holding.parameters}
        | ({"memory": {key: v for key, v in sizes[holding.place.rank].items() if key != "rank"}} if sizes else {})
        for holding in held
    ]


def report(plan: Plan, module: nn.Module, *, schedule: str, num_microbatches: int) -> Page:
    """Return the plan as a page: how it runs, what is cut where, the stages, and the places of all ranks.

    Args:
        plan: what runs where.
        module: the full module; the meta device will do.
        schedule: name of the schedule.
        num_microbatches: M.
    """
    layout = plan.layout
    whole = sum(p.numel() for p in module.parameters())
    lines = [
        ("schedule", f"{schedule}, microbatches: {layout.microbatches_text(num_microbatches)}"),
        ("ranks", f"{layout.size}, nodes: {-(-layout.size // layout.ranks_per_node)}, replicas: {layout.num_replicas}"),
        ("model", f"{whole:,} parameters, loss in {plan.partition.loss_modality}"),
        *_cuts(plan),
        *_copies(plan, module),
        *_experts(plan),
        *(("whole", f"{path} on every tensor parallel rank: {why}") for path, why in plan.division.whole.items()),
    ]
    width = max(len(name) for name, _ in lines)
    return ["\n".join(f"{name:{width}}  {text}" for name, text in lines), _stages(plan, module), _places(plan, module)]


def warnings(layout: Layout) -> list[str]:
    """Return a sentence for each group of ranks that talk much over a link between nodes."""
    words = {"tp": "tensor parallel group", "cp": "context parallel block"}
    return [
        f"ranks {spans(ranks)}, a {words[axis]} of {modality}, are on the nodes "
        f"{spans({rank // layout.ranks_per_node for rank in ranks})}: their traffic crosses the slower link"
        for modality, axis, ranks in layout.straddling
    ]


def _cuts(plan: Plan) -> Iterable[tuple[str, str]]:
    for name, encoder in plan.partition.encoders.items():
        source = plan.topology.stage_of[plan.partition.stages[name][-1].name]
        targets = [_title(plan, stage) for stage, names in plan.topology.consumes.items() if name in names]
        where = " and ".join(cut.name for cut in encoder.boundaries)
        to = f"sends to {', '.join(targets)}" if targets else f"runs inside {_title(plan, source)}, sends nothing"
        yield name, f"cut at {where}, {to}"


def _copies(plan: Plan, module: nn.Module) -> Iterable[tuple[str, str]]:
    """Parameters that several stages hold, with all their names."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for tied in names.values():
        stages = dict.fromkeys(plan.topology.stage_of[owner] for owner in plan.partition.owners[tied[0]])
        if len(stages) > 1:
            yield "copies", f"{' = '.join(tied)} in {', '.join(_title(plan, stage) for stage in stages)}, kept equal"


def _experts(plan: Plan) -> Iterable[tuple[str, str]]:
    """Which ranks share the experts of how many layers, a line for each kind."""
    shards, kinds = DataShards(plan), dict[str, int]()
    for layer in plan.experts.values():
        ranks = plan.ownership.ranks_holding(layer.parameters[0])
        blocks = dict.fromkeys(shards.expert_block(layer, rank) for rank in ranks)
        numbers = ", ".join(str(count) for count in dict.fromkeys(stop - start for start, stop in layer.ranges))
        degree = plan.modalities[layer.modality].tensor.expert_tp_size
        divided = f", each divided over {degree} tensor parallel ranks" if degree > 1 else ""
        where = "; ".join(spans(block) for block in blocks)
        text = f"{layer.number} of {layer.modality} shared by ranks {where}, {numbers} on each{divided}"
        kinds[text] = kinds.get(text, 0) + 1
    for text, count in kinds.items():
        yield "experts", f"{text}, in {count} {'layer' if count == 1 else 'layers'}"


def _stages(plan: Plan, module: nn.Module) -> Table:
    rows, named = [], [*module.named_parameters(remove_duplicate=False)]
    for stage, members in plan.topology.members.items():
        held = parameters_of(named, plan, members)
        targets = [_title(plan, target) for source, target in plan.topology.edges if source == stage]
        total, trained = (sum(p.numel() for p in held.values() if p.requires_grad >= flag) for flag in (False, True))
        rows.append(
            (_title(plan, stage), spans(plan.topology.ranks_of(stage)), total, trained, ", ".join(targets) or "-")
        )
    return Table.of(("stage", "ranks", "parameters", "trainable", "feeds"), rows)


def _places(plan: Plan, module: nn.Module) -> Table:
    rows = []
    for place, cuts, layers, parameters, size in holdings(plan, module):
        slices = ", ".join(f"[{cut.first}:{cut.last}]" for cut in cuts)
        path = plan.partition.layers[place.modality]
        where = f"{path}{slices}" if path is not None else ", ".join(layers)
        rows.append((*place, where or "-", parameters, memory_text(size)))
    return Table.of((*Place._fields, "layers", "parameters", "bytes"), rows)


def parameters_of(
    named: Iterable[tuple[str, nn.Parameter]], plan: Plan, stages: Iterable[str]
) -> dict[str, nn.Parameter]:
    """Return the distinct parameters that stages of the partition use, each under one of its names.

    Args:
        named: of the module, under all names.
        plan: of all ranks.
        stages: names of stages of the partition.
    """
    wanted = set(stages)
    used = {name: p for name, p in named if wanted.intersection(plan.partition.owners[name])}
    return {name: p for name, p in {id(p): (name, p) for name, p in used.items()}.values()}


def _elements(plan: Plan, shards: DataShards, name: str, parameter: nn.Parameter, place: Place) -> int:
    """Elements of a parameter that one rank computes with: its tensor parallel shard, of experts its own."""
    shard, count = plan.division.shards.get(name), parameter.numel()
    count = count if shard is None else math.prod(shard.local_shape(plan.shapes[name], place.tp))
    owned = shards.of(name, place.rank) if plan.experts else None
    if owned is None or not owned.of_experts:
        return count
    return count // owned.length * owned.own_shape((owned.length,))[0]


def _layers(plan: Plan, cut: StageCut) -> tuple[str, ...]:
    return plan.partition.parts[cut.modality].paths[cut.first : cut.last]


def _title(plan: Plan, stage: StageKey) -> str:
    return "+".join(plan.topology.members[stage])


def changed(plan: Plan, modalities: Mapping[str, Modality]) -> Plan:
    """Return the plan with other options of memory in its modalities, whose layers stay where they are.

    Raises:
        ConfigError: a modality has no layers that could run again.
    """
    partition = plan.partition
    sizes = {name: [cut.last - cut.first for cut in cuts] for name, cuts in partition.stages.items()}
    kept_of_layers = {name: kept_of(name, modality, sizes[name]) for name, modality in modalities.items()}
    partition = replace(partition, kept_operations={name: layers for name, layers in kept_of_layers.items() if layers})
    return replace(plan, modalities=modalities, partition=partition)


def plan_maker(plan: Plan, module: nn.Module) -> Callable[[Mapping[str, Modality]], Plan]:
    """Return what makes the plan of other modalities on the ranks of `plan`; what tensor parallelism makes is kept."""
    divisions: dict[object, Division] = {}

    def plan_of(modalities: Mapping[str, Modality]) -> Plan:
        layout = Layout.build(
            modalities,
            world_size=plan.layout.size,
            loss_modality=plan.partition.loss_modality,
            ranks_per_node=plan.layout.ranks_per_node,
        )
        cut = partition(module, modalities)
        experts = find_experts(module, cut, modalities)
        key = tuple(
            (cfg.tensor.tp_mode, cfg.tensor.tp_depth, cfg.tp_size, cfg.tensor.expert_tp_size, experts != {})
            for cfg in modalities.values()
        )
        if key not in divisions:
            names = {path: layer.parameters for path, layer in experts.items()}
            divisions[key] = divide(module, cut, modalities, names)
        changed = replace(plan, layout=layout, partition=cut, modalities=modalities)
        return replace(changed, division=divisions[key], experts=experts)

    return plan_of


_UNKNOWN = "?"


def memory_table(memory: Sequence[RankMemory]) -> Table:
    """Return a row per rank; ranks in a row that need the same share one."""
    rows = []
    for _, (first, *others) in groupby(memory, key=lambda estimate: estimate[1:]):
        ranks = f"{first.rank}-{others[-1].rank}" if others else str(first.rank)
        rows.append((ranks, *(_UNKNOWN if size is None else memory_text(size) for size in first[1:])))
    return Table.of(["on the host" if name == "host" else name for name in RankMemory._fields], rows)


class Option(NamedTuple):
    """What the rank that needs most would need with an option of memory in all modalities.

    Attributes:
        name: of the option, as it is configured.
        modalities: with it.
        peak: bytes on its device.
        host: bytes in host memory.
    """

    name: str
    modalities: Mapping[str, Modality]
    peak: int
    host: int


def options(plan: Plan, step: Step) -> Iterator[Option]:
    """Yield the plan as it is, then with each option of memory, and without each one that is configured."""
    yield _option("as configured", plan, step)
    for name, modalities in _variants(plan):
        try:
            for modality, changes in modalities.items():
                check_memory(f"modalities.{modality}", changes)
            check_pipelines(modalities, "1f1b")
            check_features({"modalities": modalities})
            yield _option(name, changed(plan, modalities), step)
        except ConfigError:  # it does not go with what is configured
            continue


def options_table(plan: Plan, step: Step) -> Table:
    """Return the table of `options`."""
    rows = [(each.name, memory_text(each.peak), memory_text(each.host)) for each in options(plan, step)]
    return Table.of(("all modalities", "largest peak", "on the host"), rows)


def _option(name: str, plan: Plan, step: Step) -> Option:
    memory = memory_of(plan, step)
    return Option(name, plan.modalities, max(rank.peak for rank in memory), max(rank.host for rank in memory))


def _variants(plan: Plan) -> Iterator[tuple[str, Mapping[str, Modality]]]:
    """Names of options, and the modalities with them."""
    now = plan.modalities
    shares = any(plan.layout.sizes(name).dp * plan.layout.sizes(name).cp > 1 for name in now)
    changes: list[tuple[str, dict[str, Any]]] = []
    if shares:
        changes += [
            (f"zero_stage: {stage}", {"zero_stage": stage, "dp_shard_size": None, "reshard_after_forward": False})
            for stage in (0, 1, 2, 3)
        ]
        changes.append(("zero_stage: 3, reshard_after_forward", {"zero_stage": 3, "reshard_after_forward": True}))
    changes += [(f"activation_checkpointing: {kind}", {"activation_checkpointing": kind}) for kind in _KINDS]
    changes.append(("offload: nothing", {"offload": None}))
    changes += [(f"offload: {kind}", {"offload": [kind]}) for kind in ("activations", "optimizer", "parameters")]
    for name, fields in changes:
        others = {
            key: with_fields(modality, **fields)
            if plan.partition.parts[key].paths or "activation_checkpointing" not in fields
            else modality
            for key, modality in now.items()
        }
        if others != dict(now):
            yield name, others


_KINDS = ("none", "selective", "full")
