"""Says which ranks hold which parameter, which shard of it, and how their gradients add up.

Examples in this file are of a parameter that one stage uses, with ``tp_size=2, cp_size=2`` and one replica on ranks 0
to 3: tensor parallel ranks run fastest, so ranks 0 and 2 have tensor parallel index 0, ranks 1 and 3 have index 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lightning_mm5d.plan.topology import Topology
from lightning_mm5d.schedule.stage_key import StageKey
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
        ranks, tp = next(one for one in instances if rank in one[0])
        return (1.0 if len({tp for _, tp in instances}) > 1 else tp) / len(ranks)

    def cp_degree(self, name: str, rank: int) -> int:
        """Return the context parallel degree of the stages on `rank` that use a parameter: ``2``.

        It is 0 where their degrees differ, and for a parameter that the partition does not know.
        """
        if name not in self.topology.partition.owners:
            return 0
        found = {len(ranks) // tp for ranks, tp in self._instances(name) if rank in ranks}
        return found.pop() if len(found) == 1 else 0

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
