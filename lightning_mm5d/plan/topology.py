"""Which rank runs which stages, and the edges between stages: a layout and a partition combined.

Modalities with equal ranks run as one stage, so no message passes between them, unless others run between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_mm5d.config.modality import Modality, Where, consumers_of, running_order
from lightning_mm5d.layout import Layout
from lightning_mm5d.partition import Partition, StageCut
from lightning_mm5d.schedule import Action, Schedule, pp_rank_of
from lightning_mm5d.schedule.graph import StageKey


def pairs_of(sources: Sequence[int], targets: Sequence[int]) -> list[tuple[int, int]]:
    """Return the indices of sources and targets between which pieces of a payload travel, in the order of issue.

    Source i of a covers the share from i / a to (i + 1) / a of a payload, target j of b that from j / b to (j + 1) / b.
    Those that overlap make a pair, also where sender and receiver are one rank. Nothing is sent where every target is a
    source. From ranks 0 and 1 to ranks 2, 3 and 4: ``[(0, 0), (0, 1), (1, 1), (1, 2)]``.
    """
    if set(targets) <= set(sources):
        return [(sources.index(target), j) for j, target in enumerate(targets)]
    a, b = len(sources), len(targets)
    return [(i, j) for i in range(a) for j in range(b) if i * b < (j + 1) * a and j * a < (i + 1) * b]


@dataclass(frozen=True)
class Topology:
    """The stages, their ranks and their edges.

    Args:
        layout: which rank is where.
        partition: what is cut where.
        modalities: the configuration.
        v_shaped: whether chunks lie in a V over the pipeline ranks (``zbv``), 0 1 1 0, instead of in turn, 0 1 0 1.
    """

    layout: Layout
    partition: Partition
    modalities: Mapping[str, Modality]
    v_shaped: bool = False

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has the full module: one stage, unsharded."""
        return len(self.members) == 1 and len(self.instances(self.last_stage)[0]) == 1

    @cached_property
    def consumers(self) -> dict[str, dict[str, Where]]:
        """For each modality those that it feeds, and which of their stages."""
        return consumers_of(self.modalities)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The modalities, those that feed another before it; the loss modality is last."""
        others = [name for name in running_order(self.modalities) if name != self.partition.loss_modality]
        return (*others, self.partition.loss_modality)

    @cached_property
    def members(self) -> dict[StageKey, tuple[StageKey, ...]]:
        """For each stage, the stages of the partition that it runs: ``{"language.0": ("vision.0", "language.0")}``."""
        members: dict[StageKey, list[StageKey]] = {}
        for name, cuts in self.partition.stages.items():
            for cut in cuts:
                members.setdefault(StageKey(self._owners[name], cut.index), []).append(cut.name)
        return {key: tuple(names) for key, names in members.items()}

    @cached_property
    def _owners(self) -> dict[str, str]:
        """For each modality the one whose stages it runs in: itself, or one on the same ranks.

        Two on the same ranks run apart where a third on others runs between them: it would wait for itself.
        """
        reached: dict[str, set[str]] = {}
        for name in reversed(self.order):
            fed = self.consumers.get(name, {})
            reached[name] = set(fed).union(*(reached[consumer] for consumer in fed))
        owners: dict[str, str] = {}
        for name in self.layout.modalities:
            groups: dict[str, list[str]] = {}
            for member, owner in owners.items():
                groups.setdefault(owner, []).append(member)
            owners[name] = next(
                (
                    owner
                    for owner, group in groups.items()
                    if self.layout.same_ranks(owner, name) and not self._is_between([*group, name], reached)
                ),
                name,
            )
        return owners

    def _is_between(self, group: Sequence[str], reached: Mapping[str, set[str]]) -> bool:
        """Whether a modality on other ranks runs after one of `group` and before another one."""
        return any(
            not self.layout.same_ranks(other, group[0])
            and any(other in reached[name] for name in group)
            and not reached[other].isdisjoint(group)
            for other in self.layout.modalities
        )

    @cached_property
    def stage_of(self) -> dict[StageKey, StageKey]:
        """For each stage of the partition, the stage that runs it: the inverse of `members`."""
        return {member: key for key, members in self.members.items() for member in members}

    @cached_property
    def last_stage(self) -> StageKey:
        """The stage that computes the loss."""
        return self.stage_of[self.partition.stages[self.partition.loss_modality][-1].name]

    @cached_property
    def consumes(self) -> dict[StageKey, frozenset[str]]:
        """For each stage that receives encoders' results, the names of these encoders."""
        consumed: dict[StageKey, set[str]] = {}
        for name, encoder in self.partition.encoders.items():
            source = self.stage_of[self.partition.stages[name][-1].name]
            for consumer, where in self.consumers[name].items():
                stages = [self.stage_of[cut.name] for cut in self.partition.stages[consumer]]
                for target in _targets(stages, where, used_late=encoder.used_late):
                    if target != source:
                        consumed.setdefault(target, set()).add(name)
        return {key: frozenset(names) for key, names in consumed.items()}

    @cached_property
    def edges(self) -> tuple[tuple[StageKey, StageKey], ...]:
        """Pairs (source stage, target stage), sorted."""
        edges: list[tuple[StageKey, StageKey]] = []
        for cuts in self.partition.stages.values():
            keys = [self.stage_of[cut.name] for cut in cuts]
            edges += itertools.pairwise(keys)
        for target, names in self.consumes.items():
            edges += [(self.stage_of[self.partition.stages[name][-1].name], target) for name in names]
        return tuple(sorted(set(edges)))

    def ranks_of(self, stage: StageKey) -> tuple[int, ...]:
        """Return the ranks of a stage: those of instance 0, then of instance 1, and so on."""
        return tuple(rank for ranks in self.instances(stage) for rank in ranks)

    def instances(self, stage: StageKey) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each instance of a stage, by replica of its modality: ``((0, 1), (2, 3))``.

        Ranks of one instance share its layers and run the same actions. Tensor parallel ranks run fastest among them,
        then context parallel ranks.
        """
        return self._instances[stage]

    @cached_property
    def _instances(self) -> dict[StageKey, tuple[tuple[int, ...], ...]]:
        return {
            stage: tuple(
                self.layout.ranks_of(stage.modality, pp=self.pp_of(stage.modality, stage.number, dp), dp=dp)
                for dp in range(self.layout.sizes(stage.modality).dp)
            )
            for stage in self.members
        }

    @cached_property
    def places(self) -> dict[StageKey, dict[int, int]]:
        """For each stage the place of each of its ranks in its instance: ``{0: 0, 1: 1, 2: 0, 3: 1}``."""
        return {
            stage: {rank: place for ranks in reversed(instances) for place, rank in enumerate(ranks)}
            for stage, instances in self._instances.items()
        }

    @cached_property
    def lead_of_rank(self) -> dict[int, int]:
        """For each rank, the rank that stands for it in schedules, as `Node.rank`.

        Ranks that share the layers of a stage run the same actions in the same order, so a schedule lists the first of
        them only: with ``tp_size=2`` it is ``{0: 0, 1: 0, 2: 2, 3: 2}``. Instances that overlap are joined.
        """
        lead = list(range(self.layout.size))

        def lead_of(rank: int) -> int:
            while lead[rank] != rank:
                lead[rank] = rank = lead[lead[rank]]
            return rank

        for ranks in (ranks for stage in self.members for ranks in self.instances(stage) if len(ranks) > 1):
            joined = {lead_of(rank) for rank in ranks}
            first = min(joined)
            for rank in joined:
                lead[rank] = first
        return {rank: lead_of(rank) for rank in range(self.layout.size)}

    def ranks_at(self, stage: StageKey, replica: int, index: int) -> tuple[int, ...]:
        """Return the ranks that run a stage on a microbatch.

        Args:
            stage: key of the stage.
            replica: replica of the loss modality.
            index: index of the microbatch in that replica's batch.
        """
        return self.instances(stage)[self.layout.instance_of(stage.modality, replica, index)]

    def pp_of(self, modality: str, index: int, dp: int = 0) -> int:
        """Return the pipeline rank of stage number `index` in replica `dp` of a modality."""
        if modality in self.partition.pipelines:
            return self.partition.pipelines[modality][dp][index]
        return pp_rank_of(index, self.layout.sizes(modality).pp, v_shaped=self.v_shaped)

    def cuts_at(self, modality: str, pp: int, dp: int = 0) -> tuple[StageCut, ...]:
        """Return the stages of a modality on one of the pipeline ranks of its replica `dp`."""
        return tuple(cut for cut in self.partition.stages[modality] if self.pp_of(modality, cut.index, dp) == pp)

    def stages_of(self, rank: int) -> tuple[StageKey, ...]:
        """Return the stages of one rank."""
        return tuple(key for key in self.members if rank in self.places[key])

    def stage_names(self) -> list[str]:
        """Return the stages of each rank, for messages: ``["vision.0", "language.0+language.1"]``."""
        return ["+".join(self.stages_of(rank)) for rank in range(self.layout.size)]

    def connected_replicas(self, rank: int) -> tuple[int, ...]:
        """Return the replicas that `rank` depends on, directly or through others, ascending.

        Replicas depend on each other through ranks that work for both, and through ranks that share layers with those:
        with two replicas of the language model and one encoder for both, it is ``(0, 1)`` for every rank.
        """
        return next(replicas for leads, replicas in self._connected if self.lead_of_rank[rank] in leads)

    @cached_property
    def _connected(self) -> list[tuple[frozenset[int], tuple[int, ...]]]:
        """Leads of ranks that depend on each other, with the replicas that they serve."""
        served: dict[int, set[int]] = {}
        for rank, lead in self.lead_of_rank.items():
            served.setdefault(lead, set()).update(self.layout.replicas_of_rank(rank))
        groups: list[tuple[frozenset[int], set[int]]] = []
        for lead, replicas in served.items():
            joined = [group for group in groups if not replicas.isdisjoint(group[1])]
            groups = [group for group in groups if replicas.isdisjoint(group[1])]
            leads = frozenset({lead}).union(*(others for others, _ in joined))
            groups.append((leads, replicas.union(*(others for _, others in joined))))
        return [(leads, tuple(sorted(replicas))) for leads, replicas in groups]

    def actions_of(self, rank: int, schedule: Schedule, count: int) -> list[Action]:
        """Return the actions that `rank` itself runs, of those that a schedule lists for its lead.

        Args:
            rank: global rank.
            schedule: actions by lead, see `lead_of_rank`.
            count: microbatches per replica, M.
        """
        return [
            action
            for action in schedule[self.lead_of_rank[rank]]
            if rank in self.ranks_at(action.stage, *divmod(action.microbatch, count))
        ]


def _targets(stages: Sequence[StageKey], where: Where, *, used_late: bool) -> Sequence[StageKey]:
    """The stages of a modality that are sent the result of another one."""
    if not isinstance(where, str):
        return [stages[index] for index in where]
    if where == "all":
        return stages
    if where == "ends":
        return [stages[0], stages[-1]]
    return [stages[-1] if where == "last" or used_late else stages[0]]
