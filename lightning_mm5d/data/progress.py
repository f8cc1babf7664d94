"""What a training dataloader asks of the trainer, and what its position depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lightning_mm5d.data.order_stream import OrderStream


class TrainerProgress(Protocol):
    """How far the trainer is in its epoch.

    Attributes:
        stream: what orders are drawn from that one process would draw from its global random state; None for seeds.
    """

    stream: OrderStream | None

    def steps_taken(self) -> int:
        """Return the steps that it has finished."""
        ...

    def fetching(self) -> None:
        """Note that a batch is fetched, before the step that uses it and all that it draws."""
        ...

    @property
    def order_seeds(self) -> dict[int, int]:
        """For seeds of distributed samplers in this process, those of the run that it goes on with."""
        ...


@dataclass(frozen=True)
class Progress:
    """What a loader's position depends on, beside its order.

    Attributes:
        trainer: says how far the trainer is; None where no position is kept.
        shards: replicas that this rank serves.
        num_shards: replicas that share the data set.
        batches_per_step: of each replica.
        shares: microbatches of each replica, where they are unlike.
    """

    trainer: TrainerProgress | None
    shards: tuple[int, ...]
    num_shards: int
    batches_per_step: int = 1
    shares: tuple[int, ...] | None = None

    def taken(self) -> int:
        """Return the batches of this epoch that each replica has consumed."""
        return 0 if self.trainer is None else self.trainer.steps_taken() * self.batches_per_step

    def fetching(self) -> None:
        """Tell the trainer's side that a batch is fetched now."""
        if self.trainer is not None:
            self.trainer.fetching()
