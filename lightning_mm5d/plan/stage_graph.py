"""The graph of stages of one step, with costs, and what a schedule makes of it.

The graph covers the replicas that a rank depends on, directly or through an encoder that serves several of them.
Microbatch ``i`` of replica ``r`` has the id ``r * M + i``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from lightning_mm5d.partition import Unit, stage_costs
from lightning_mm5d.plan.ownership import Ownership
from lightning_mm5d.plan.topology import Topology
from lightning_mm5d.schedule import SCHEDULES, Graph, Node, Schedule, Simulation, build, side_by_side, simulate
from lightning_mm5d.schedule.stage_key import StageKey


@dataclass(frozen=True)
class StageGraphs:
    """Makes graphs of stages, schedules and simulations of one plan.

    Args:
        topology: the stages.
        ownership: who owns which parameter.
    """

    topology: Topology
    ownership: Ownership

    def trains(self, trainable: frozenset[str]) -> dict[StageKey, tuple[bool, bool]]:
        """For each stage: whether anything in it is trainable, and whether anything before it is.

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
        """What each stage consists of, in the order in which it runs, a modality that the loss needs before that one.

        The unit of cost is a multiply-add per token, or that of `Modality.cost` where the configuration says it.
        """
        loss_modality = self.topology.partition.loss_modality
        return {
            key: tuple(
                unit
                for member in sorted(members, key=lambda member: member.modality == loss_modality)
                for unit in self._timed(member)
            )
            for key, members in self.topology.members.items()
        }

    def _timed(self, member: StageKey) -> tuple[Unit, ...]:
        modality, units = self.topology.modalities[member.modality], self.topology.partition.units[member]
        estimate = sum(unit.forward for unit in units)
        if not estimate:  # no matrices: it still takes a moment
            units, estimate = (*units, Unit(1.0, {})), 1.0
        cost = modality.cost
        if cost is None:
            ranks = modality.tp_size * modality.cp_size
            return tuple(unit.scaled(1 / ranks) for unit in units) if ranks > 1 else units
        if not isinstance(cost, int | float):
            cost = cost[self.topology.pp_of(member.modality, member.number)]
        return tuple(unit.scaled(cost / modality.pp_chunks / estimate) for unit in units)

    def simulate(self, schedule: str | Callable[[Graph], Schedule], count: int, module: nn.Module) -> Simulation:
        """Return the ideal timeline of one training step of all replicas; its unit is that of `timed_units`.

        Args:
            schedule: as `build` takes it.
            count: microbatches per replica, M.
            module: the module, for what is trainable.
        """
        graph = self.full_graph(schedule, count, module)
        return simulate(self.built(schedule, graph), graph)

    def schedule(
        self,
        schedule: str | Callable[[Graph], Schedule],
        count: int,
        trainable: frozenset[str],
        *,
        rank: int,
        forward_only: bool = False,
    ) -> tuple[Graph, Schedule]:
        """Return the stages that `rank` depends on and what their ranks do in one step.

        A named schedule covers the replicas that `rank` depends on; a user's own covers all, since it says so.

        Args:
            schedule: as `build` takes it.
            count: microbatches per replica, M.
            trainable: names of the parameters that require a gradient.
            rank: global rank.
            forward_only: leave out backwards.
        """
        own = callable(schedule) or schedule not in SCHEDULES
        replicas = (
            range(self.topology.layout.num_replicas)
            if own and not forward_only
            else self.topology.connected_replicas(rank)
        )
        graph = self.graph(replicas, count, trainable)
        # forwards run in the order of their microbatches whatever the schedule is
        return graph, self.built("1f1b" if own and forward_only else schedule, graph, forward_only=forward_only)

    def built(
        self, schedule: str | Callable[[Graph], Schedule], graph: Graph, *, forward_only: bool = False
    ) -> Schedule:
        """Return what ranks do, as `build` does; instances of a stage on ranks of one rank run side by side."""
        made = build(schedule, graph, forward_only=forward_only)
        widths: dict[StageKey, int] = {}
        for stage in self.topology.members:
            ranks = Counter(self.topology.lead_of_rank[ranks[0]] for ranks in self.topology.instances(stage))
            widths[stage] = max(ranks.values())
        if max(widths.values()) == 1 or callable(schedule) or schedule not in SCHEDULES:
            return made
        return side_by_side(made, graph, widths, forward_only=forward_only)

    def full_graph(self, schedule: object, count: int, module: nn.Module) -> Graph:
        """Return the graph of stages of all replicas, placed as `schedule` wants it; arguments as in `simulate`."""
        named = module.named_parameters(remove_duplicate=False)
        trainable = frozenset(name for name, parameter in named if parameter.requires_grad)
        topology = replace(self.topology, v_shaped=schedule == "zbv")
        placed = StageGraphs(topology, replace(self.ownership, topology=topology))
        return placed.graph(range(topology.layout.num_replicas), count, trainable)

    def graph(self, replicas: Sequence[int], counts: int, trainable: frozenset[str]) -> Graph:
        """Return the graph of stages for one step.

        Args:
            replicas: the replicas of the loss modality in it.
            counts: microbatches per replica, M.
            trainable: names of the parameters that require a gradient.
        """
        trains = self.trains(trainable)
        nodes = []
        for key in self.topology.members:
            modality = key.modality
            here, before = trains[key]
            forward, backward, weight = stage_costs(self.timed_units[key], trainable, before)
            # whether there is a backward is not a matter of costs: what is trained may be free, such as an embedding
            backward = max(backward, forward / 1000) if here or before else 0.0
            ids: dict[int, list[tuple[int, int]]] = {}
            sharers: dict[int, list[int]] = {}
            for dp, ranks in enumerate(self.topology.instances(key)):
                served = [share for share in self.topology.layout.serves(modality, dp) if share.replica in replicas]
                if served:
                    rank = self.topology.lead_of_rank[ranks[0]]
                    sharers.setdefault(rank, []).append(dp)
                    ids.setdefault(rank, []).extend(
                        (index, share.replica * counts + index)
                        for share in served
                        for index in range(share.start, counts, share.step)
                    )
            for rank, replica in sharers.items():
                # instances on one rank run side by side, on some of its ranks each
                cost = [one / len(replica) for one in (forward, backward, min(weight, backward))]
                nodes.append(
                    Node(
                        stage=key,
                        rank=rank,
                        microbatches=tuple(number for _, number in sorted(ids[rank])),
                        forward_cost=cost[0],
                        backward_cost=cost[1],
                        weight_cost=cost[2],
                        replica=replica[0],
                    )
                )
        return Graph(tuple(nodes), self.topology.edges)
