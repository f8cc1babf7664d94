"""Places the models of the comparison on ranks in three ways of other systems and in ours.

Others run full backwards under ``1f1b``, with one stage a rank:

- *apart*: every encoder has ranks of its own beside those of the language model (modality parallelism);
- *colocated*: all encoders share the first ranks, each cut into as many stages, and run one after the other;
- *replicated*: every rank of the language model runs all encoders on every microbatch before its own layers. Only the
  first takes part in their backward, since no other uses what they give (as in Cornstarch's measurements).

Each chooses its number of ranks and the layers of each by the shortest step that it can foresee: with whatever it
believes to be trained. What is simulated then has the true costs.

Ours are configurations of the strategy, and the planner's search is one of them. It gives each rank one chunk of a
modality, so beside it the language model is cut into up to four chunks a rank, in turns or in a V, with encoders
where the search put them, and with encoders spread over the language model's ranks: pipelines of some stages, as many
replicas of them as there is room for, each with its share of the microbatches.

Where no layout fits, there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product

from paper_models import Model
from placement_search import search

from lightning_mm5d.config.groups import PipelineTemplate, with_fields
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.features.auto_schedule import lower_bound
from lightning_mm5d.layout.layout import Layout
from lightning_mm5d.partition import Encoder, Partition, StageCut, Unit, balance, stage_costs, step_costs
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import Graph, Node, build, simulate

_FORESEEN = 12  # numbers of ranks, best balanced first, whose step is simulated before one is chosen
_CHUNKS = (1, 2, 3, 4)
_STATE = {"trained": (4.0, 12.0), "frozen": (2.0, 0.0)}
"""Bytes of a parameter on every rank that holds it, and bytes that these ranks share (AdamW in bfloat16 with float32
master weights, optimizer states sharded over the replicas)."""


@dataclass(frozen=True)
class Ranks:
    """What 24 devices are divided into.

    Args:
        replicas: of the whole model.
        stages: ranks of one replica.
        width: devices that make one rank, each with an equal share of all that it does (tensor and context
            parallelism; taken to cost nothing).
        microbatches: of one replica.
    """

    replicas: int
    stages: int
    width: int
    microbatches: int


@dataclass(frozen=True)
class Placed:
    """A layout with its stages.

    Args:
        name: what it is.
        graph: its stages, with true costs.
        bytes: of weights, gradients and optimizer states on the fullest rank.
    """

    name: str
    graph: Graph
    bytes: float


def cut(row: Sequence[Unit], parts: int, trained: frozenset[str], passes_on: bool, first: float = 0.0) -> list[int]:
    """Layers of each of ``parts`` stages, balanced by what a step costs; ``first`` comes on top of the first."""
    before, *layers, after = step_costs(row, trained, passes_on)
    return balance(layers, parts, first=first + before, last=after)


def slices(row: Sequence[Unit], sizes: Sequence[int]) -> list[list[Unit]]:
    """The units of each stage, for stages of `sizes` layers."""
    ends = [0, *(1 + end for end in accumulate(sizes[:-1])), len(row)]
    return [list(row[start:end]) for start, end in pairwise(ends)]


def plan_of(model: Model, modalities: dict[str, Modality], ranks: Ranks, *, v_shaped: bool = False) -> Plan:
    """What the strategy plans for one replica of a configuration whose pipelines have templates."""
    stages: dict[str, tuple[StageCut, ...]] = {}
    units: dict[str, tuple[Unit, ...]] = {}
    for name, modality in modalities.items():
        row, template = model.rows[name], modality.pipeline.pipeline_template
        sizes = [int(size) for size in template.stages or ()] if template else [len(row) - 2]
        ends = [0, *accumulate(sizes)]
        stages[name] = tuple(StageCut(name, index, *span) for index, span in enumerate(pairwise(ends)))
        units |= {stage.name: tuple(part) for stage, part in zip(stages[name], slices(row, sizes), strict=True)}
    partition = Partition(
        loss_modality="language",
        encoders={name: Encoder((), ()) for name in modalities if name != "language"},
        layers=dict.fromkeys(modalities),
        stages=stages,
        owners={key: (stage,) for stage, part in units.items() for unit in part for key in unit.costs},
        units=units,
    )
    layout = Layout.build(modalities, world_size=ranks.stages, loss_modality="language")
    return Plan(layout, partition, modalities, model.sizes, v_shaped=v_shaped)


def placed(name: str, model: Model, plan: Plan, ranks: Ranks) -> Placed:
    """A plan's stages with true costs, and the bytes of its fullest rank."""
    held = dict.fromkeys(range(ranks.stages), 0.0)
    for key in model.sizes:
        for rank in plan.ownership.ranks_holding(key):
            held[rank] += _bytes(model, key, len(plan.ownership.ranks_holding(key)) * ranks.replicas)
    graph = plan.graphs.graph(range(plan.layout.num_replicas), ranks.microbatches, model.trained)
    return Placed(name, graph, max(held.values()) / ranks.width)


def apart(model: Model, ranks: Ranks, believed: frozenset[str]) -> Placed | None:
    """Encoders on ranks of their own, balanced as if ``believed`` were trained."""
    encoders = list(model.rows)[:-1]
    costs: dict[tuple[str, int], tuple[float, list[int]]] = {}
    for name, row in model.rows.items():
        passes_on = name == "language" and _any_trained(model, encoders, believed)
        for parts in range(1, min(ranks.stages - len(encoders), len(row) - 2) + 1):
            sizes = cut(row, parts, believed, passes_on)
            step = step_costs(row, believed, passes_on)
            costs[name, parts] = max(_sums(step, sizes)), sizes
    choices = []
    for counts in product(range(1, ranks.stages), repeat=len(encoders)):
        keys = list(zip(model.rows, (*counts, ranks.stages - sum(counts)), strict=True))
        if all(key in costs for key in keys):
            choices.append((max(costs[key][0] for key in keys), {name: costs[name, parts][1] for name, parts in keys}))
    best: tuple[float, Plan] | None = None
    for _, sizes in sorted(choices, key=lambda choice: choice[0])[:_FORESEEN]:
        plan = plan_of(model, {name: _pipeline(mine) for name, mine in sizes.items()}, ranks)
        foreseen = _one_f_one_b(plan.graphs.graph(range(1), ranks.microbatches, believed))
        if best is None or foreseen < best[0]:
            best = foreseen, plan
    return best and placed("apart", model, best[1], ranks)


def colocated(model: Model, ranks: Ranks, believed: frozenset[str]) -> Placed | None:
    """Encoders one after the other on the first ranks, balanced as if ``believed`` were trained."""
    *encoders, language = model.rows
    passes_on = _any_trained(model, encoders, believed)
    best: tuple[float, dict[str, list[int]]] | None = None
    for first in range(1, ranks.stages):
        if first > min(len(model.rows[name]) - 2 for name in encoders):
            break
        if ranks.stages - first > len(model.rows[language]) - 2:
            continue
        sizes = {name: cut(model.rows[name], first, believed, False) for name in encoders}
        sizes[language] = cut(model.rows[language], ranks.stages - first, believed, passes_on)
        foreseen = _one_f_one_b(_chain(model, sizes, ranks, believed))
        if best is None or foreseen < best[0]:
            best = foreseen, sizes
    if best is None:
        return None
    sizes = best[1]
    first = len(sizes[encoders[0]])
    held = [0.0] * ranks.stages
    for name, mine in sizes.items():
        for index, part in enumerate(slices(model.rows[name], mine)):
            keys = [key for unit in part for key in unit.costs]
            held[index + first * (name == language)] += sum(_bytes(model, key, ranks.replicas) for key in keys)
    return Placed("colocated", _chain(model, sizes, ranks, model.trained), max(held) / ranks.width)


def replicated(model: Model, ranks: Ranks, believed: frozenset[str]) -> Placed | None:
    """All encoders on every rank of the language model, whose layers are balanced as if ``believed`` were trained."""
    *encoders, language = model.rows
    row = model.rows[language]
    if ranks.stages > len(row) - 2:
        return None
    backward = sum(stage_costs(model.rows[name], believed, False)[1] for name in encoders)
    sizes = cut(row, ranks.stages, believed, _any_trained(model, encoders, believed), first=backward)
    extra = [stage_costs(model.rows[name], model.trained, False) for name in encoders]
    nodes, held = [], []
    for index, part in enumerate(slices(row, sizes)):
        forward, back, weight = stage_costs(part, model.trained, _any_trained(model, encoders, model.trained))
        forward += sum(cost[0] for cost in extra)
        back += sum(cost[1] for cost in extra) if index == 0 else 0.0
        nodes.append(_node(index, ranks, forward, back, weight))
        layer_bytes = sum(_bytes(model, key, ranks.replicas) for unit in part for key in unit.costs)
        copies = ranks.replicas * ranks.stages
        held.append(
            layer_bytes + sum(_bytes(model, k, copies) for n in encoders for unit in model.rows[n] for k in unit.costs)
        )
    return Placed("replicated", Graph(tuple(nodes), _links(ranks.stages)), max(held) / ranks.width)


def ours(model: Model, ranks: Ranks) -> Iterator[Placed]:
    """The layouts that the strategy is configured for."""
    *encoders, language = model.rows
    row = model.rows[language]
    searched = search(
        model.rows,
        {name: Modality() for name in model.rows},
        ranks.stages,
        loss_modality=language,
        trainable=model.trained,
        num_microbatches=ranks.microbatches,
        schedule="zero_bubble",
    )
    layouts = {"search": {name: searched[name] for name in encoders}}
    depths = [depth for depth in range(1, ranks.stages + 1) if ranks.stages % depth == 0]
    for several in [*zip(*[depths] * len(encoders), strict=True), *([(1, 2), (2, 1)] if len(encoders) > 1 else [])]:
        if all(depth <= len(model.rows[name]) - 2 for name, depth in zip(encoders, several, strict=True)):
            layouts[f"spread over {'+'.join(map(str, several))}"] = {
                name: replace(_pipeline(cut(model.rows[name], depth, model.trained, False)), colocate_with=language)
                for name, depth in zip(encoders, several, strict=True)
            }
    for layout, colocated in layouts.items():
        own_ranks = ranks.stages - sum(modality.own_ranks_per_replica for modality in colocated.values())
        for chunks, v_shaped in [*((chunks, False) for chunks in _CHUNKS), (2, True)]:
            if own_ranks * chunks > len(row) - 2 or (own_ranks == 1 and chunks > 1):
                continue
            sizes = cut(row, own_ranks * chunks, model.trained, _any_trained(model, encoders, model.trained))
            if layout == "search" and chunks == 1:
                modalities = {**colocated, language: searched[language]}
            else:
                modalities = {**colocated, language: with_fields(_pipeline(sizes), pp_size=own_ranks, pp_chunks=chunks)}
            plan = plan_of(model, modalities, ranks, v_shaped=v_shaped)
            yield placed(f"{layout}, {'V' if v_shaped else chunks}", model, plan, ranks)


def shortest(layouts: Sequence[Placed], schedules: Iterable[str], transfer_cost: float) -> tuple[float, Placed, str]:
    """The shortest step over layouts and schedules, its layout and its schedule; what cannot be it is skipped."""
    best: tuple[float, Placed, str] | None = None
    bounds = [lower_bound(layout.graph) for layout in layouts]
    for bound, layout in sorted(zip(bounds, layouts, strict=True), key=lambda pair: pair[0]):
        if best is not None and bound >= best[0]:
            break
        for schedule in schedules:
            makespan = simulate(build(schedule, layout.graph), layout.graph, transfer_cost=transfer_cost).makespan
            if best is None or makespan < best[0]:
                best = makespan, layout, schedule
    assert best is not None
    return best


def _pipeline(sizes: list[int]) -> Modality:
    if len(sizes) == 1:
        return Modality()
    return Modality(pp_size=len(sizes), pipeline={"pipeline_template": PipelineTemplate(stages=sizes)})


def _any_trained(model: Model, names: Sequence[str], trained: frozenset[str]) -> bool:
    return any(trained.intersection(unit.costs) for name in names for unit in model.rows[name])


def _sums(costs: Sequence[float], sizes: Sequence[int]) -> list[float]:
    ends = [0, *(1 + end for end in accumulate(sizes[:-1])), len(costs)]
    return [sum(costs[start:end]) for start, end in pairwise(ends)]


def _bytes(model: Model, key: str, holders: int) -> float:
    each, together = _STATE["trained" if key in model.trained else "frozen"]
    return model.sizes[key] * (each + together / holders)


def _one_f_one_b(graph: Graph) -> float:
    return simulate(build("1f1b", graph), graph).makespan


def _chain(model: Model, sizes: dict[str, list[int]], ranks: Ranks, trained: frozenset[str]) -> Graph:
    """Encoders in the first stages, the language model in the others."""
    *encoders, language = model.rows
    first = len(sizes[encoders[0]])
    costs = [(0.0, 0.0, 0.0)] * ranks.stages
    for name, mine in sizes.items():
        before = _any_trained(model, encoders, trained) if name == language else False
        for index, part in enumerate(slices(model.rows[name], mine), start=first * (name == language)):
            more = stage_costs(part, trained, before)
            costs[index] = tuple(a + b for a, b in zip(costs[index], more, strict=True))
            before = before or any(trained.intersection(unit.costs) for unit in part)
    return Graph(tuple(_node(index, ranks, *cost) for index, cost in enumerate(costs)), _links(ranks.stages))


def _node(index: int, ranks: Ranks, forward: float, backward: float, weight: float) -> Node:
    return Node(
        stage=f"chain.{index}",
        rank=index,
        microbatches=tuple(range(ranks.microbatches)),
        forward_cost=forward,
        backward_cost=backward,
        weight_cost=weight,
    )


def _links(stages: int) -> tuple[tuple[str, str], ...]:
    return tuple((f"chain.{index}", f"chain.{index + 1}") for index in range(stages - 1))
