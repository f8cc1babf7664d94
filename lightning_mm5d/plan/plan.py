"""Which rank runs which stages, and who sends what to whom: a layout and a partition put together.

Modalities that share all their ranks and have one stage each run as one stage; nothing crosses between them. The
graph of stages that schedules are built from covers the replicas that this rank depends on, directly or through an
encoder that serves several of them; microbatch ``i`` of replica ``r`` has the id ``r * M + i``.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from torch import nn

from lightning_mm5d.config.modality import Modality
from lightning_mm5d.layout.layout import Layout
from lightning_mm5d.partition import Partition, StageCut, Unit, stage_costs
from lightning_mm5d.schedule import SCHEDULES, Graph, Node, Schedule, Simulation, abreast, build, simulate, worker_of
from lightning_mm5d.tensor_parallel.resolve import Division


@dataclass(frozen=True)
class Plan:
    """The stages of all ranks.

    Args:
        layout: which rank is where.
        partition: what is cut where.
        modalities: the configuration.
        sizes: elements of every parameter by name.
        v_shaped: whether model chunks go down the ranks and up again (``zbv``) instead of round and round.
        division: what tensor parallelism makes of the layers.
    """

    layout: Layout
    partition: Partition
    modalities: Mapping[str, Modality]
    sizes: Mapping[str, int]
    v_shaped: bool = False
    division: Division = field(default_factory=Division)

    @cached_property
    def members(self) -> dict[str, tuple[str, ...]]:
        """For each stage, the stages of the partition that run as this one."""
        found: dict[str, list[str]] = {}
        for name, cuts in self.partition.stages.items():
            host = next(
                other for other in self.layout.modalities if other == name or self.layout.same_ranks(other, name)
            )
            for cut in cuts:
                found.setdefault(f"{host}.{cut.index}", []).append(cut.name)
        return {key: tuple(names) for key, names in found.items()}

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all of the module, unsharded."""
        return len(self.members) == 1 and len(self.instances(self.last_stage)[0]) == 1

    @cached_property
    def stage_of(self) -> dict[str, str]:
        """The stage that runs each stage of the partition."""
        return {member: key for key, members in self.members.items() for member in members}

    @cached_property
    def last_stage(self) -> str:
        """The stage that computes the loss."""
        return self.stage_of[self.partition.stages[self.partition.loss_modality][-1].name]

    @cached_property
    def consumes(self) -> dict[str, frozenset[str]]:
        """For each stage, the encoders whose results it is sent."""
        found: dict[str, set[str]] = {}
        loss_modality = [cut.name for cut in self.partition.stages[self.partition.loss_modality]]
        for name, encoder in self.partition.encoders.items():
            feeds: Literal["first", "all"] | list[int] = self.modalities[name].feeds
            if feeds == "first":
                targets = [loss_modality[-1] if encoder.used_late else loss_modality[0]]
            else:
                targets = loss_modality if feeds == "all" else [loss_modality[index] for index in feeds]
            for target in targets:
                if self.stage_of[target] != self.stage_of[self.partition.stages[name][-1].name]:
                    found.setdefault(self.stage_of[target], set()).add(name)
        return {key: frozenset(names) for key, names in found.items()}

    @cached_property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """Who feeds whom."""
        found: list[tuple[str, str]] = []
        for cuts in self.partition.stages.values():
            keys = [self.stage_of[cut.name] for cut in cuts]
            found += itertools.pairwise(keys)
        for target, names in self.consumes.items():
            found += [(self.stage_of[self.partition.stages[name][-1].name], target) for name in names]
        return tuple(sorted(set(found)))

    def ranks_of(self, stage: str) -> tuple[int, ...]:
        """The ranks of a stage: of its instances, one after the other."""
        return tuple(rank for ranks in self.instances(stage) for rank in ranks)

    def instances(self, stage: str) -> tuple[tuple[int, ...], ...]:
        """The ranks of each instance of a stage, by replica; those of one share its layers and act alike.

        Tensor parallel ranks run fastest among them, then context parallel ones.
        """
        modality, _, index = stage.rpartition(".")
        pp = self.pp_of(modality, int(index))
        return tuple(self.layout.ranks_of(modality, pp=pp, dp=dp) for dp in range(self.layout.sizes(modality).dp))

    @cached_property
    def worker_of_rank(self) -> dict[int, int]:
        """The worker that each rank belongs to, named by its first rank.

        Ranks that share a stage's layers act in one order, so they are one worker to a schedule; so are those of
        colocated modalities whose groups overlap.
        """
        found = {rank: rank for rank in range(self.layout.size)}
        for ranks in (ranks for stage in self.members for ranks in self.instances(stage) if len(ranks) > 1):
            joined = {found[rank] for rank in ranks}
            found = {rank: min(joined) if worker in joined else worker for rank, worker in found.items()}
        return found

    def ranks_at(self, stage: str, replica: int, index: int) -> tuple[int, ...]:
        """The ranks that run a stage on a microbatch.

        Args:
            stage: its key.
            replica: of the loss modality.
            index: of the microbatch in that replica's batch.
        """
        return self.instances(stage)[self.layout.instance_of(stage.rpartition(".")[0], replica, index)]

    def pp_of(self, modality: str, index: int) -> int:
        """The pipeline rank of a stage: in turn, or there and back where the schedule is V-shaped."""
        return worker_of(index, self.layout.sizes(modality).pp, v_shaped=self.v_shaped)

    def cuts_at(self, modality: str, pp: int) -> tuple[StageCut, ...]:
        """The stages of a modality on one of its pipeline ranks."""
        return tuple(cut for cut in self.partition.stages[modality] if self.pp_of(modality, cut.index) == pp)

    def stages_of(self, rank: int) -> tuple[str, ...]:
        """The stages of one rank."""
        return tuple(key for key in self.members if rank in self.ranks_of(key))

    def holds(self, stage: str) -> frozenset[str]:
        """The names of the parameters that a stage uses."""
        members = set(self.members[stage])
        return frozenset(name for name in self.sizes if members.intersection(self.partition.owners[name]))

    def owners(self, name: str) -> tuple[int, ...]:
        """The ranks that hold a parameter, or a part of it, ascending."""
        return tuple(sorted({rank for ranks, _ in self._instances_with(name) for rank in ranks}))

    def holders(self, name: str) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold each part of a parameter, in the order of the parts, ascending.

        What is whole everywhere is one part for each tensor parallel index, since ranks of one index have gradients
        that the others have too; it is a single part where modalities of unlike degrees share it.
        """
        instances = self._instances_with(name)
        if len({parts for _, parts in instances}) > 1:
            return (self.owners(name),)
        parts = instances[0][1]
        return tuple(
            tuple(sorted({rank for ranks, _ in instances for rank in ranks[index::parts]})) for index in range(parts)
        )

    def weight_of(self, name: str, rank: int) -> float:
        """What the gradient of a parameter on `rank` counts in the sum over one tuple of `holders`.

        Context parallel ranks have gradients of which the mean counts (see `context_parallel.sequence`), and where
        modalities of unlike tensor parallel degrees share a parameter, each of its ranks has the whole gradient.
        """
        instances = self._instances_with(name)
        ranks, parts = next(one for one in instances if rank in one[0])
        return (1.0 if len({parts for _, parts in instances}) > 1 else parts) / len(ranks)

    def degree_of(self, name: str, rank: int) -> int:
        """The context parallel degree of the ranks among which the mean of a parameter's gradient counts.

        It is 0 where they are of unlike degrees, or no such parameter is known.
        """
        if name not in self.partition.owners:
            return 0
        found = {len(ranks) // parts for ranks, parts in self._instances_with(name) if rank in ranks}
        return found.pop() if len(found) == 1 else 0

    def _instances_with(self, name: str) -> list[tuple[tuple[int, ...], int]]:
        """The ranks of each instance of the stages that use a parameter, and how many parts it has there."""
        keys = dict.fromkeys(self.stage_of[owner] for owner in self.partition.owners[name])
        return [(ranks, self._parts(key)) for key in keys for ranks in self.instances(key)]

    def _parts(self, stage: str) -> int:
        """Tensor parallel degree of a stage; it runs fastest among the ranks of an instance."""
        return self.layout.sizes(stage.rpartition(".")[0]).tp

    def keepers(self, name: str) -> tuple[int, ...]:
        """The ranks that stand for a parameter or buffer: one, or one for each part of what is divided.

        They are those of the first replica of the first stage that uses it. A buffer that every stage computes is kept
        by the last. One that came after the plan was made (pruning adds some) belongs with the others of its module.
        """
        owners = self.partition.owners
        prefix = f"{name.rpartition('.')[0]}."
        known = name if name in owners else next((other for other in owners if other.startswith(prefix)), None)
        if known is None:
            return self.instances(self.last_stage)[0][:1]
        owner = owners[known][0]
        if name not in self.sizes and not self._stays(name):
            owner = self.partition.stages[owner.rpartition(".")[0]][-1].name
        stage = self.stage_of[owner]
        return self.instances(stage)[0][: self._parts(stage) if name in self.division.shards else 1]

    def part_of(self, name: str, rank: int) -> int:
        """Which part of a divided parameter a rank that holds one has."""
        return next(ranks.index(rank) % parts for ranks, parts in self._instances_with(name) if rank in ranks)

    def _stays(self, buffer: str) -> bool:
        """Whether only the owner of a buffer runs the module that it is in; else the last stage has come furthest."""
        path = buffer.rpartition(".")[0]
        in_layers = any(layers and buffer.startswith(f"{layers}.") for layers in self.partition.layers.values())
        return in_layers or (path != "" and any(name.rpartition(".")[0] == path for name in self.sizes))

    def component(self, rank: int) -> tuple[int, ...]:
        """The replicas whose microbatches `rank` depends on, directly or through encoders that serve several."""
        found = set(self.layout.replicas_of_rank(rank))
        while True:
            more = {
                share.replica
                for name in self.layout.modalities
                for dp in range(self.layout.sizes(name).dp)
                for served in [self.layout.serves(name, dp)]
                if found.intersection(share.replica for share in served)
                for share in served
            }
            if more <= found:
                return tuple(sorted(found))
            found |= more

    def trains(self, trainable: frozenset[str]) -> dict[str, tuple[bool, bool]]:
        """For each stage: whether anything in it is trainable, and whether anything before it is.

        Args:
            trainable: names of the parameters that require a gradient.
        """
        here = {key: not self.holds_any[key].isdisjoint(trainable) for key in self.members}
        before = dict.fromkeys(self.members, False)
        for _ in self.members:
            for source, target in self.edges:
                before[target] = before[target] or here[source] or before[source]
        return {key: (here[key], before[key]) for key in self.members}

    @cached_property
    def holds_any(self) -> dict[str, frozenset[str]]:
        """`holds` of every stage."""
        return {key: self.holds(key) for key in self.members}

    @cached_property
    def timed_units(self) -> dict[str, tuple[Unit, ...]]:
        """What each stage consists of, in the order in which it runs, a modality that the loss needs before that one.

        The unit of cost is a multiply-add per token, or that of `Modality.cost` where the configuration says it.
        """
        loss_modality = self.partition.loss_modality
        return {
            key: tuple(
                unit
                for member in sorted(members, key=lambda member: member.rpartition(".")[0] == loss_modality)
                for unit in self._timed(member)
            )
            for key, members in self.members.items()
        }

    def _timed(self, member: str) -> tuple[Unit, ...]:
        name, _, index = member.rpartition(".")
        modality, units = self.modalities[name], self.partition.units[member]
        estimate = sum(unit.forward for unit in units)
        if not estimate:  # no matrices: it still takes a moment
            units, estimate = (*units, Unit(1.0, {})), 1.0
        cost = modality.cost
        if cost is None:
            ranks = modality.tp_size * modality.cp_size
            return tuple(unit.scaled(1 / ranks) for unit in units) if ranks > 1 else units
        if not isinstance(cost, int | float):
            cost = cost[self.pp_of(name, int(index))]
        return tuple(unit.scaled(cost / modality.pp_chunks / estimate) for unit in units)

    def simulate(self, schedule: str | Callable[[Graph], Schedule], count: int, module: nn.Module) -> Simulation:
        """Return the ideal timeline of one training step of all replicas; its unit is that of `timed_units`.

        Args:
            schedule: as `build` takes it.
            count: microbatches per replica, M.
            module: the module, for what is trainable.
        """
        graph = self.whole_graph(schedule, count, module)
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
        replicas = range(self.layout.num_replicas) if own and not forward_only else self.component(rank)
        graph = self.graph(replicas, count, trainable)
        # forwards run in the order of their microbatches whatever the schedule is
        return graph, self.built("1f1b" if own and forward_only else schedule, graph, forward_only=forward_only)

    def built(
        self, schedule: str | Callable[[Graph], Schedule], graph: Graph, *, forward_only: bool = False
    ) -> Schedule:
        """Return what workers do, as `build` does; instances of a stage on ranks of one worker run side by side."""
        made = build(schedule, graph, forward_only=forward_only)
        widths: dict[str, int] = {}
        for stage in self.members:
            workers = Counter(self.worker_of_rank[ranks[0]] for ranks in self.instances(stage))
            widths[stage] = max(workers.values())
        if max(widths.values()) == 1 or callable(schedule) or schedule not in SCHEDULES:
            return made
        return abreast(made, graph, widths, forward_only=forward_only)

    def whole_graph(self, schedule: object, count: int, module: nn.Module) -> Graph:
        """Return the graph of stages of all replicas, placed as `schedule` wants it; arguments as in `simulate`."""
        named = module.named_parameters(remove_duplicate=False)
        trainable = frozenset(name for name, parameter in named if parameter.requires_grad)
        placed = replace(self, v_shaped=schedule == "zbv")
        return placed.graph(range(self.layout.num_replicas), count, trainable)

    def graph(self, replicas: Sequence[int], counts: int, trainable: frozenset[str]) -> Graph:
        """Return the graph of stages for one step.

        Args:
            replicas: the replicas of the loss modality in it.
            counts: microbatches per replica, M.
            trainable: names of the parameters that require a gradient.
        """
        trains = self.trains(trainable)
        nodes = []
        for key in self.members:
            modality = key.rpartition(".")[0]
            here, before = trains[key]
            forward, backward, weight = stage_costs(self.timed_units[key], trainable, before)
            # whether there is a backward is not a matter of costs: what is trained may be free, such as an embedding
            backward = max(backward, forward / 1000) if here or before else 0.0
            ids: dict[int, list[tuple[int, int]]] = {}
            sharers: dict[int, list[int]] = {}
            for dp, ranks in enumerate(self.instances(key)):
                served = [share for share in self.layout.serves(modality, dp) if share.replica in replicas]
                if served:
                    worker = self.worker_of_rank[ranks[0]]
                    sharers.setdefault(worker, []).append(dp)
                    ids.setdefault(worker, []).extend(
                        (index, share.replica * counts + index)
                        for share in served
                        for index in range(share.start, counts, share.step)
                    )
            for worker, replica in sharers.items():
                # instances on one worker run side by side, on some of its ranks each
                cost = [one / len(replica) for one in (forward, backward, min(weight, backward))]
                nodes.append(
                    Node(
                        stage=key,
                        worker=worker,
                        microbatches=tuple(number for _, number in sorted(ids[worker])),
                        forward_cost=cost[0],
                        backward_cost=cost[1],
                        weight_cost=cost[2],
                        replica=replica[0],
                    )
                )
        return Graph(tuple(nodes), self.edges)
