"""Where a training dataloader stands in its epoch, in terms that another layout can go on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

Kind = Literal["map", "iterable", "stateful"]


@dataclass(kw_only=True)
class Position:
    """The position of one dataloader.

    Attributes:
        kind: a map-style data set, whose order can be drawn again; an iterable, which can be read again; or a loader
            that saves its own state.
        epoch: of its order.
        segments: what was consumed in this pass over the data: ``[replicas, batch size, batches of each replica]`` for
            each layout that has worked on it; the last one is that of the run that saved it.
        batches_per_step: of each replica.
        cycled: whether the data were read to their end before in this epoch.
        samples: in the data set; None where it does not tell.
        workers: worker processes for each replica.
        order_seed: of a `DistributedSampler`.
        begun: how the layout that began the epoch draws its order, as `remaining.order_of` says it.
        before: states of the samplers' own generators when the pass began.
        now: these states when the checkpoint was saved.
        own: a loader's own states, by the replicas that it serves.
    """

    kind: Kind
    epoch: int
    segments: list[list[Any]]
    batches_per_step: int = 1
    cycled: bool = False
    samples: int | None = None
    workers: int = 0
    order_seed: int | None = None
    begun: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)
    now: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)

    def saved(self) -> dict[str, Any]:
        """Return plain values and tensors."""
        return asdict(self)

    @classmethod
    def load(cls, saved: Mapping[str, Any]) -> Position:
        """Return what `saved` returned; fields that later versions add are left out."""
        names = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in saved.items() if name in names})
