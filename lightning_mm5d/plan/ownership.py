"""Which ranks hold which parameter, which part of it, and how their gradients add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from lightning_mm5d.plan.topology import Topology
from lightning_mm5d.schedule.stage_key import StageKey
from lightning_mm5d.tensor_parallel.resolve import Division


@dataclass(frozen=True)
class Ownership:
    """Who owns which parameter.

    Args:
        topology: the stages.
        sizes: elements of every parameter by name.
        division: what tensor parallelism makes of the layers.
    """

    topology: Topology
    sizes: Mapping[str, int]
    division: Division = field(default_factory=Division)

    def holds(self, stage: StageKey) -> frozenset[str]:
        """The names of the parameters that a stage uses."""
        members = set(self.topology.members[stage])
        return frozenset(name for name in self.sizes if members.intersection(self.topology.partition.owners[name]))

    @cached_property
    def holds_any(self) -> dict[StageKey, frozenset[str]]:
        """`holds` of every stage."""
        return {key: self.holds(key) for key in self.topology.members}

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
        if name not in self.topology.partition.owners:
            return 0
        found = {len(ranks) // parts for ranks, parts in self._instances_with(name) if rank in ranks}
        return found.pop() if len(found) == 1 else 0

    def keepers(self, name: str) -> tuple[int, ...]:
        """The ranks that stand for a parameter or buffer: one, or one for each part of what is divided.

        They are those of the first replica of the first stage that uses it. A buffer that every stage computes is kept
        by the last. One that came after the plan was made (pruning adds some) belongs with the others of its module.
        """
        owners = self.topology.partition.owners
        prefix = f"{name.rpartition('.')[0]}."
        known = name if name in owners else next((other for other in owners if other.startswith(prefix)), None)
        if known is None:
            return self.topology.instances(self.topology.last_stage)[0][:1]
        owner = owners[known][0]
        if name not in self.sizes and not self._stays(name):
            owner = self.topology.partition.stages[owner.modality][-1].name
        stage = self.topology.stage_of[owner]
        return self.topology.instances(stage)[0][: self._parts(stage) if name in self.division.shards else 1]

    def part_of(self, name: str, rank: int) -> int:
        """Which part of a divided parameter a rank that holds one has."""
        return next(ranks.index(rank) % parts for ranks, parts in self._instances_with(name) if rank in ranks)

    def _instances_with(self, name: str) -> list[tuple[tuple[int, ...], int]]:
        """The ranks of each instance of the stages that use a parameter, and how many parts it has there."""
        keys = dict.fromkeys(self.topology.stage_of[owner] for owner in self.topology.partition.owners[name])
        return [(ranks, self._parts(key)) for key in keys for ranks in self.topology.instances(key)]

    def _parts(self, stage: StageKey) -> int:
        """Tensor parallel degree of a stage; it runs fastest among the ranks of an instance."""
        return self.topology.layout.sizes(stage.modality).tp

    def _stays(self, buffer: str) -> bool:
        """Whether only the owner of a buffer runs the module that it is in; else the last stage has come furthest."""
        path = buffer.rpartition(".")[0]
        in_layers = any(
            layers and buffer.startswith(f"{layers}.") for layers in self.topology.partition.layers.values()
        )
        return in_layers or (path != "" and any(name.rpartition(".")[0] == path for name in self.sizes))
