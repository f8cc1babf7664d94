"""The bridges of one rank: between the instances of two stages that run a microbatch, made at first use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_mm5d.engine.bridge import Bridge
from lightning_mm5d.engine.ordered_transport import Wire
from lightning_mm5d.plan.compressions import compression_of
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule.stage_key import StageKey
from lightning_mm5d.sharded.collectives import TensorGroup


class Bridges:
    """Makes and keeps the bridges of one rank.

    Args:
        plan: all stages.
        transport: of this rank; None where one stage sends to nobody.
        rank: global rank.
        instances: groups of the ranks that share layers with this one, by their ranks.
    """

    def __init__(
        self, plan: Plan, transport: Wire | None, rank: int, instances: Mapping[tuple[int, ...], TensorGroup]
    ) -> None:
        self._plan, self._transport, self._rank, self._instances = plan, transport, rank, instances
        self._made: dict[Any, Bridge] = {}

    def between(self, source: StageKey, target: StageKey, place: tuple[int, int], back: bool = False) -> Bridge:
        """Return the bridge between the instances of two stages that run a microbatch.

        Args:
            source: key of the stage that sends activations.
            target: key of the stage that receives them.
            place: replica and index of the microbatch.
            back: whether gradients travel, from `target` to `source`.
        """
        ends = [self._plan.topology.ranks_at(stage, *place) for stage in (source, target)]
        key = (source, target, *ends, back)
        if key not in self._made:
            assert self._transport is not None, "one stage sends to nobody"
            name = f"{source}->{target}"
            if back:
                ends, name = ends[::-1], f"{target}->{source}"
            group = self._instances.get(ends[1])
            sender = self._plan.modalities[(target if back else source).modality]
            self._made[key] = Bridge(
                self._transport,
                rank=self._rank,
                direction="gradients" if back else "activations",
                name=name,
                sources=ends[0],
                targets=ends[1],
                group=None if group is None else group.group,
                compression=compression_of(sender, "payloads"),
            )
        return self._made[key]
