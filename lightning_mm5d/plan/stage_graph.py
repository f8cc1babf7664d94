"""Builds the graph of stages of one step, with costs, and its schedule and simulation.

Microbatch ``i`` of replica ``r`` of the loss modality has the id ``r * M + i``.

Says which ranks hold which parameter, which shard of it, and how their gradients add up.

Examples in this file are of a parameter that one stage uses, with ``tp_size=2, cp_size=2`` and one replica on ranks 0
to 3: tensor parallel ranks run fastest, so ranks 0 and 2 have tensor parallel index 0, ranks 1 and 3 have index 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn

from lightning_mm5d.config.modality import most_beside
from lightning_mm5d.layout import Share
from lightning_mm5d.partition import Unit, stage_costs
from lightning_mm5d.plan.topology import Topology
from lightning_mm5d.schedule import (
    SCHEDULES,
    AnySchedule,
    Graph,
    Grouping,
    Node,
    Schedule,
    Simulation,
    build,
    side_by_side,
    simulate,
)
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.tensor_parallel.resolve import Division


@dataclass(frozen=True)
class Ownership:
    """Which ranks own which parameter.

    Args:
        topology: the stages.
        sizes: elements of every parameter by name.
        division: which parameters tensor parallelism shards, and how.
    """

    topology: Topology
    sizes: Mapping[str, int]
    division: Division = field(default_factory=Division)

    @cached_property
    def parameters(self) -> dict[StageKey, frozenset[str]]:
        """For each stage, the names of the parameters that it uses."""
        owners = self.topology.partition.owners
        return {
            key: frozenset(name for name in self.sizes if not set(members).isdisjoint(owners[name]))
            for key, members in self.topology.members.items()
        }

    def ranks_holding(self, name: str) -> tuple[int, ...]:
        """Return the ranks that hold a parameter, or a shard of it, ascending: ``(0, 1, 2, 3)``."""
        owners = self.topology.partition.owners[name]
        if ("ranks", owners) not in self._known:
            ranks = sorted({rank for ranks, _ in self._instances(name) for rank in ranks})
            self._known["ranks", owners] = tuple(ranks)
        return self._known["ranks", owners]

    def holders(self, path: str) -> str:
        """Return the ranks that hold the parameter of a name, or those of a module, in words: ``"ranks 0 and 1"``."""
        owners = self.topology.partition.owners
        known = next((name for name in owners if name == path or name.startswith(f"{path}.")), None)
        if known is None:
            return "other ranks"
        *others, last = self.ranks_holding(known)
        stages = ", ".join(dict.fromkeys(str(self.topology.stage_of[owner]) for owner in owners[known]))
        ranks = f"ranks {', '.join(map(str, others))} and {last}" if others else f"rank {last}"
        return f"{ranks} ({stages})"

    def ranks_by_shard(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return for each tensor parallel index the ranks of that index: ``((0, 2), (1, 3))``.

        A full parameter has one tuple per index too, because all indices have the same gradient. Where modalities
        with different tensor parallel degrees share a parameter, there is one tuple of all ranks.
        """
        owners, instances = self.topology.partition.owners[name], self._instances(name)
        if ("shards", owners) not in self._known:
            tp = instances[0][1]
            self._known["shards", owners] = tuple(
                tuple(sorted({rank for ranks, _ in instances for rank in ranks[index::tp]})) for index in range(tp)
            )
        return (self.ranks_holding(name),) if len({tp for _, tp in instances}) > 1 else self._known["shards", owners]

    def gradient_weight(self, name: str, rank: int) -> float:
        """Return the factor of `rank`'s gradient in the sum over a tuple of `ranks_by_shard`: ``0.5``.

        Context parallel ranks count with their mean (see `sharded.sequence`), so the factor is one over their degree.
        Where tensor parallel degrees differ, each of the instance's ranks has the full gradient: one over their number.
        """
        instances = self._instances(name)
        ranks, tp = next(instance for instance in instances if rank in instance[0])
        return (1.0 if len({tp for _, tp in instances}) > 1 else tp) / len(ranks)

    def cp_degree(self, name: str, rank: int) -> int:
        """Return the context parallel degree of the stages on `rank` that use a parameter: ``2``.

        It is 0 where their degrees differ, and for a parameter that the partition does not know.
        """
        if name not in self.topology.partition.owners:
            return 0
        degrees = {len(ranks) // tp for ranks, tp in self._instances(name) if rank in ranks}
        return degrees.pop() if len(degrees) == 1 else 0

    def primary_ranks(self, name: str) -> tuple[int, ...]:
        """Return the ranks whose copy of a parameter or buffer is saved and counted in norms.

        A full one has one such rank, ``(0,)``; a sharded one has one for each shard, ``(0, 1)``. They run the first
        replica of the first stage that uses it; of the last stage for a buffer that every stage computes. A parameter
        that was added after planning (pruning adds some) belongs with the others of its module.
        """
        owners = self.topology.partition.owners
        prefix = f"{name.rpartition('.')[0]}."
        known = name if name in owners else next((other for other in owners if other.startswith(prefix)), None)
        if known is None:
            return self.topology.instances(self.topology.last_stage)[0][:1]
        owner = owners[known][0]
        if name not in self.sizes and not self._is_of_one_stage(name):
            owner = self.topology.partition.stages[owner.modality][-1].name
        stage = self.topology.stage_of[owner]
        return self.topology.instances(stage)[0][: self._tp_degree(stage) if name in self.division.shards else 1]

    @cached_property
    def written_by_all(self) -> tuple[str, ...]:
        """The buffers that every stage may write, because they are in no layer and beside no parameter."""
        return tuple(
            name
            for name in self.topology.partition.owners
            if name not in self.sizes and name not in self.division.shards and not self._is_of_one_stage(name)
        )

    @cached_property
    def buffer_stages(self) -> dict[str, frozenset[StageKey]]:
        """For each buffer, the stages that have it in their layers or beside their parameters; none for all others."""
        shared, owners = set(self.written_by_all), self.topology.partition.owners
        return {
            name: frozenset(() if name in shared else map(self.topology.stage_of.__getitem__, owners[name]))
            for name in owners
            if name not in self.sizes
        }

    def shard_index(self, name: str, rank: int) -> int:
        """Return which shard of a sharded parameter `rank` holds: ``1`` for rank 3."""
        keys = (self.topology.stage_of[owner] for owner in self.topology.partition.owners[name])
        key = next(key for key in keys if rank in self.topology.places[key])
        return self.topology.places[key][rank] % self._tp_degree(key)

    def _instances(self, name: str) -> list[tuple[tuple[int, ...], int]]:
        """The ranks and the tensor parallel degree of each instance of the stages that use a parameter."""
        owners, known = self.topology.partition.owners[name], self._known
        if ("instances", owners) not in known:
            keys = dict.fromkeys(self.topology.stage_of[owner] for owner in owners)
            every = [(ranks, self._tp_degree(key)) for key in keys for ranks in self.topology.instances(key)]
            known["instances", owners] = every
        return known["instances", owners]

    # Parameters have few kinds of owners, and each of thousands of ranks asks for each parameter.

    @cached_property
    def _known(self) -> dict[tuple[str, tuple[StageKey, ...]], Any]:
        return {}

    def _tp_degree(self, stage: StageKey) -> int:
        return self.topology.layout.sizes(stage.modality).tp

    def _is_of_one_stage(self, buffer: str) -> bool:
        """Whether only the owner of a buffer runs its module; of other buffers the last stage has the newest value."""
        path = buffer.rpartition(".")[0]
        in_layers = any(parts.index(buffer) is not None for parts in self.topology.partition.parts.values())
        return in_layers or (path != "" and any(name.rpartition(".")[0] == path for name in self.sizes))


@dataclass(frozen=True)
class StageGraphs:
    """Builds graphs of stages, schedules and simulations of one plan.

    Args:
        topology: the stages.
        ownership: which ranks own which parameter.
        measured: by the names of trained parameters, what stages took in a run: ``(forward_cost, backward_cost,
            weight_cost)`` of a `Node` for each of them. The same on all ranks; it replaces estimates.
    """

    topology: Topology
    ownership: Ownership
    measured: dict[frozenset[str], Mapping[StageKey, tuple[float, float, float]]] = field(default_factory=dict)

    def trains(self, trainable: frozenset[str]) -> dict[StageKey, tuple[bool, bool]]:
        """Return for each stage whether anything in it is trainable, and whether anything before it is.

        Args:
            trainable: names of the parameters that require a gradient.
        """
        here = {key: not self.ownership.parameters[key].isdisjoint(trainable) for key in self.topology.members}
        before = dict.fromkeys(self.topology.members, False)
        for _ in self.topology.members:
            for source, target in self.topology.edges:
                before[target] = before[target] or here[source] or before[source]
        return {key: (here[key], before[key]) for key in self.topology.members}

    @cached_property
    def timed_units(self) -> dict[StageKey, tuple[Unit, ...]]:
        """For each stage its units with their costs, in the order in which they run: encoders before what they feed.

        A cost is in multiply-adds per token, or in the unit of `Modality.cost` where that is given.
        """
        order = self.topology.order
        return {
            key: tuple(
                unit
                for member in sorted(members, key=lambda member: order.index(member.modality))
                for unit in self._timed(member)
            )
            for key, members in self.topology.members.items()
        }

    def _timed(self, member: StageKey) -> tuple[Unit, ...]:
        modality, units = self.topology.modalities[member.modality], self.topology.partition.units[member]
        estimate = sum(unit.forward for unit in units)
        if not estimate:  # without matrices it still takes some time
            units, estimate = (*units, Unit(1.0, {})), 1.0
        cost = modality.cost
        if cost is None:
            ranks = modality.tp_size * modality.cp_size
            return tuple(unit.scaled(1 / ranks) for unit in units) if ranks > 1 else units
        if not isinstance(cost, int | float):
            cost = cost[self.topology.pp_of(member.modality, member.number)]
        return tuple(unit.scaled(cost / modality.pipeline.pp_chunks / estimate) for unit in units)

    def simulate(self, schedule: AnySchedule, count: int, module: nn.Module) -> Simulation:
        """Return the ideal timeline of one training step of all replicas; its unit is that of `timed_units`.

        Args:
            schedule: as `build` takes it.
            count: microbatches per replica, M.
            module: the module; its trainable parameters count.
        """
        graph = self.full_graph(schedule, count, module)
        return simulate(self._build(schedule, graph, self.grouping(count)), graph)

    def grouping(self, count: int) -> Grouping | None:
        """Return the groups of microbatches of a training step; None where no modality interleaves any.

        Args:
            count: microbatches per replica, M.
        """
        size = most_beside(self.topology.modalities)
        return Grouping(size, count) if size > 1 else None

    def schedule(
        self, schedule: AnySchedule, count: int, trainable: frozenset[str], *, rank: int, forward_only: bool = False
    ) -> tuple[Graph, Schedule]:
        """Return the stages that `rank` depends on and the actions of their ranks in one step.

        A named schedule covers the replicas that `rank` depends on. A user's own schedule lists all ranks, so it covers
        all replicas; without backwards it is replaced by ``1f1b``, because forwards run in order in any case.

        Args:
            schedule: as `build` takes it.
            count: microbatches per replica, M.
            trainable: names of the parameters that require a gradient.
            rank: global rank.
            forward_only: leave out backwards.
        """
        replicas: Sequence[int] = self.topology.connected_replicas(rank)
        if not _is_named(schedule):
            if forward_only:
                schedule = "1f1b"
            else:
                replicas = range(self.topology.layout.num_replicas)
        graph = self.graph(replicas, count, trainable)
        grouping = None if forward_only else self.grouping(count)
        return graph, self._build(schedule, graph, grouping, forward_only=forward_only)

    def _build(
        self, schedule: AnySchedule, graph: Graph, grouping: Grouping | None = None, *, forward_only: bool = False
    ) -> Schedule:
        """`build`, and `side_by_side` where a schedule's rank stands for several instances of a stage."""
        if grouping is not None:
            return grouping.expanded(self._build(schedule, grouping.coarse(graph), forward_only=forward_only))
        built = build(schedule, graph, forward_only=forward_only)
        lead = self.topology.lead_of_rank
        widths = {
            stage: max(Counter(lead[ranks[0]] for ranks in self.topology.instances(stage)).values())
            for stage in self.topology.members
        }
        if max(widths.values()) == 1 or not _is_named(schedule):
            return built
        return side_by_side(built, graph, widths, forward_only=forward_only)

    def full_graph(self, schedule: object, count: int, module: nn.Module) -> Graph:
        """Return the graph of stages of all replicas, placed for `schedule`; arguments as in `simulate`."""
        named = module.named_parameters(remove_duplicate=False)
        trainable = frozenset(name for name, parameter in named if parameter.requires_grad)
        topology = replace(self.topology, v_shaped=schedule == "zbv")
        placed = StageGraphs(topology, replace(self.ownership, topology=topology))
        counts = topology.layout.microbatches(count)
        return placed.graph(range(topology.layout.num_replicas), max(counts), trainable, counts)

    def graph(
        self, replicas: Sequence[int], count: int, trainable: frozenset[str], counts: Sequence[int] | None = None
    ) -> Graph:
        """Return the graph of stages for one step.

        Args:
            replicas: the replicas of the loss modality that it covers.
            count: microbatches per replica, M.
            trainable: names of the parameters that require a gradient.
            counts: microbatches of each replica, at most `count`, where they are unlike.
        """
        trains, grouping, measured = self.trains(trainable), self.grouping(count), self.measured.get(trainable)
        size = 1 if grouping is None else grouping.size
        nodes = []
        for key in self.topology.members:
            here, before = trains[key]
            costs = stage_costs(self.timed_units[key], trainable, before) if measured is None else measured[key]
            forward, backward, weight = costs
            # training an embedding may cost 0, and a backward of cost 0 would mean that there is none
            backward = max(backward, forward / 1000) if here or before else 0.0
            for rank, instances in self._instances(key, replicas).items():
                ids = sorted(
                    (index // size, share.replica * count + index)
                    for shares in instances.values()
                    for share in shares
                    for index in range(share.start, count if counts is None else counts[share.replica], share.step)
                )
                width = len(instances)  # they run at the same time, on ranks that this rank stands for
                node = Node(
                    stage=key,
                    rank=rank,
                    microbatches=tuple(number for _, number in ids),
                    forward_cost=forward / width,
                    backward_cost=backward / width,
                    weight_cost=min(weight, backward) / width,
                    replica=min(instances),
                )
                nodes.append(node)
        return Graph(tuple(nodes), self.topology.edges)

    def _instances(self, stage: StageKey, replicas: Sequence[int]) -> dict[int, dict[int, list[Share]]]:
        """For each of a schedule's ranks the instances of a stage that serve `replicas`, with what each serves."""
        layout, by_lead = self.topology.layout, dict[int, dict[int, list[Share]]]()
        for dp, ranks in enumerate(self.topology.instances(stage)):
            served = [share for share in layout.serves(stage.modality, dp) if share.replica in replicas]
            if served:
                by_lead.setdefault(self.topology.lead_of_rank[ranks[0]], {})[dp] = served
        return by_lead


def _is_named(schedule: AnySchedule) -> bool:
    return not callable(schedule) and schedule in SCHEDULES
