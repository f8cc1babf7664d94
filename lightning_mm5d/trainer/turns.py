"""All ranks begin a batch together: they agree on which batch it is, and on whether SIGTERM has come to any of them.

Where `Trainer(val_check_interval=...)` is a time, they agree after a batch on whether to validate: each rank has a
clock of its own.

Lightning broadcasts inside of its handler of SIGTERM. That meets whatever collective its rank was in, and may deadlock
with it or take its place. Here the handler notes the signal only. The ranks agree at the start of each batch, where
Lightning asks rank 0; then all of them raise `SIGTERMException` at the same place, so that callbacks can still save.

A rank that SIGINT has interrupted between two steps, as in a hook, says so to those that begin the next batch. All of
them raise `KeyboardInterrupt` there, with the parameters of the same step.

The agreement uses a group of its own, so that a call that only some ranks make (a checkpoint, a log) never meets it.

It refuses ranks that are not in the same batch, which would mix the gradients of different batches, and ranks of one
replica that have read different samples (see `BatchProof`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from types import FrameType
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_mm5d.config.errors import RankMismatchError, private
from lightning_mm5d.data.random_state import CPU
from lightning_mm5d.monitor.verdict import named
from lightning_mm5d.sharded.collectives import join_late, of_all_ranks
from lightning_mm5d.sharded.removable import Removable
from lightning_mm5d.trainer.checkpoints import Checkpoints
from lightning_mm5d.trainer.process_group import decided

_PLACE = 4
"""numbers that say where a rank is"""


class BatchProof(Protocol):
    """Compares what ranks have read or written; raises on all of them where it must not differ."""

    def slots(self) -> list[int]:
        """Return numbers of this rank, as many on all, of which the ranks take the largest."""

    def check(self, agreed: list[int], group: dist.ProcessGroup) -> None:
        """Look at the largest `slots` of all ranks, which are `group`."""

    @property
    def is_due(self) -> bool:
        """Whether ranks compare once more before the training step that begins; the same on all ranks."""

    def compare_alone(self) -> None:
        """Compare among the ranks of each replica, before an evaluation that other replicas may not have."""


class Turns(Removable):
    """Takes the place of Lightning's handler of SIGTERM, and of its broadcast at the start of a batch, until `remove`.

    Args:
        trainer: that runs.
        group: all ranks, for nothing else, with messages in host memory; None for a single rank.
        steps_together: whether evaluation steps involve all ranks, which then agree in them too.
        predicts_together: whether prediction steps do. Where data is divided among replicas, some have one more.
        checkpoints: whose errors all ranks raise at the start of a batch; None where nothing is saved.

    Attributes:
        proofs: compare what ranks have read, and what hooks have written.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        group: dist.ProcessGroup | None,
        *,
        steps_together: bool,
        predicts_together: bool,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self._checkpoints = checkpoints
        self.proofs: list[BatchProof] = []
        self._trainer, self._group = trainer, group
        self._steps_together = predicts_together if trainer.predicting else steps_together
        self._terminates, self._agrees = False, False
        self._connector = private(trainer, "_signal_connector")
        self._loop = trainer.fit_loop.epoch_loop
        private(self._connector, "_sigterm_notifier_fn")
        private(self._loop, "_broadcast_sigterm_tensor")

    def attach(self) -> None:
        """Begin; before Lightning registers its handlers."""
        self.put_attribute(self._connector, "_sigterm_notifier_fn", self.note_sigterm)
        self.put_attribute(self._loop, "_broadcast_sigterm_tensor", self.begin_batch)
        if self._group is not None and private(self._trainer, "_val_check_time_interval") is not None:
            is_due = private(self._loop, "_should_check_val_fx")
            self.put_attribute(self._loop, "_should_check_val_fx", partial(self._any_validates, is_due))

    def note_sigterm(self, signum: int, frame: FrameType | None) -> None:
        """Note the signal, and pass it on to processes that this one started."""
        launcher = self._trainer.strategy.launcher
        if not self._terminates and launcher is not None:
            launcher.kill(signum)
        self._terminates = True
        evaluates_alone = not self._steps_together and self._trainer.state.fn != TrainerFn.FITTING
        if evaluates_alone or self._group is None:
            self._connector.received_sigterm = True  # this rank ends after its batch

    def begin_batch(self) -> None:
        """Agree at the start of a training batch, and at the end of training; collective.

        Raises:
            RankMismatchError: on all ranks, when they are not at the same batch.
            SIGTERMException: on all ranks, when any of them was told to terminate.
            Exception: on all ranks, when a checkpoint that is saved meanwhile has failed.
        """
        epoch, batch = self._trainer.current_epoch, self._loop.batch_progress.current.ready
        rank = self._agreed(epoch, batch)
        if rank is not None:
            error = SIGTERMException()
            error.add_note(
                f"rank {rank} was told to terminate by SIGTERM: the run ends before batch {batch} of epoch {epoch}"
            )
            raise error

    def interrupt(self) -> None:
        """Have ranks that begin a batch end there, where this one has left no step half-finished.

        It waits for them, but not for long: they may wait for this rank elsewhere.
        """
        progress: Any = self._loop.batch_progress.current
        by_time = private(self._trainer, "_val_check_time_interval")
        if self._group is None or self._agrees or progress.ready != progress.processed or by_time is not None:
            return
        told = dist.get_world_size(self._group) + self._trainer.global_rank + 1
        agreed = self._slots(told, False, [0] * _PLACE, [proof.slots() for proof in self.proofs])
        join_late(agreed, self._group)

    @staticmethod
    def _slots(told: int, save_failed: bool, place: list[int], numbers: list[list[int]]) -> Tensor:
        return torch.tensor([told, save_failed, *place, *(-value for value in place), *chain(*numbers)], device=CPU)

    def begin_evaluation_batch(self) -> None:
        """Agree at the start of an evaluation batch; Lightning raises after the batch. Collective.

        Raises:
            RankMismatchError: on all ranks, when they are not at the same batch, or have read different samples.
        """
        if not self._steps_together:
            for proof in self.proofs:
                proof.compare_alone()
        elif self._agreed(self._trainer.current_epoch, position(self._trainer).get("batch", 0)) is not None:
            self._connector.received_sigterm = True

    def begin_training_step(self) -> None:
        """Compare what ranks have read, for batches that are compared; collective.

        Raises:
            RankMismatchError: on all ranks, when those of a replica have read different samples, or some are not here.
        """
        if self._group is not None and any(proof.is_due for proof in self.proofs):
            self._agreed(self._trainer.current_epoch, self._loop.batch_progress.current.ready - 1, in_step=True)

    def _any_validates(self, is_due: Callable[[Any], bool], data_fetcher: Any) -> bool:
        """Return whether `is_due` says of any rank that it is to validate now; collective."""
        return decided(is_due(data_fetcher), False, CPU, self._group)

    def _agreed(self, epoch: int, batch: int, *, in_step: bool = False) -> int | None:
        """Return a rank that was told to terminate; None where none was."""
        rank = self._trainer.global_rank
        save_failed = self._checkpoints is not None and self._checkpoints.has_failed
        if self._group is None:
            self._raise_failed_save(save_failed)
            return rank if self._terminates else None
        stage = list(RunningStage).index(self._trainer.state.stage) if self._trainer.state.stage is not None else -1
        place = [stage, epoch, batch, int(in_step)]
        told = rank + 1 if self._terminates else 0
        numbers = [proof.slots() for proof in self.proofs]
        agreed, self._agrees = self._slots(told, save_failed, place, numbers), True
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._group)
        told, save_failed, *bounds = agreed.tolist()
        if (interrupted := told - dist.get_world_size(self._group)) > 0:
            raise KeyboardInterrupt(f"rank {interrupted - 1} was interrupted by SIGINT")
        if bounds[: len(place)] != [-value for value in bounds[len(place) : 2 * len(place)]]:
            raise RankMismatchError(self._differences(place))
        rest = iter(bounds[2 * len(place) :])
        for proof, proof_slots in zip(self.proofs, numbers, strict=True):
            proof.check([*islice(rest, len(proof_slots))], self._group)
        self._agrees = False
        self._raise_failed_save(save_failed)
        return told - 1 if told else None

    def _raise_failed_save(self, failed: bool) -> None:
        if failed and self._checkpoints is not None:
            self._checkpoints.finish()

    def _differences(self, place: list[int]) -> str:
        assert self._group is not None
        local = torch.tensor(place, device=CPU)
        ranks: dict[tuple[int, ...], list[int]] = {}
        for rank, rank_place in enumerate(of_all_ranks(local, self._group).tolist()):
            ranks.setdefault(tuple(rank_place), []).append(rank)
        told = "; ".join(_place(numbers, *where) for where, numbers in ranks.items())
        return (
            f"ranks begin different batches: {told}. All ranks must run equal numbers of batches: give their "
            "dataloaders equal lengths, or set limit_train_batches, limit_val_batches or trainer.should_stop on all, "
            "and return -1 from on_train_batch_start on all"
        )


def position(trainer: pl.Trainer) -> dict[str, Any]:
    """Return loop, epoch and last batch of a trainer; empty outside of loops."""
    stage = trainer.state.stage
    if stage is None:
        return {}
    fit = trainer.fit_loop.epoch_loop
    loops: dict[RunningStage, Any] = {
        RunningStage.TRAINING: fit,
        RunningStage.SANITY_CHECKING: fit.val_loop,
        RunningStage.VALIDATING: fit.val_loop if trainer.state.fn == "fit" else trainer.validate_loop,
        RunningStage.TESTING: trainer.test_loop,
        RunningStage.PREDICTING: trainer.predict_loop,
    }
    name = {"train": "training", "sanity_check": "sanity check"}.get(stage.value, stage.value)
    batch = loops[stage].batch_progress.current.ready - 1
    return {"loop": name, "epoch": trainer.current_epoch, "batch": batch}


def _place(ranks: list[int], stage: int, epoch: int, batch: int, in_step: int) -> str:
    name = "no loop" if stage < 0 else list(RunningStage)[stage].value
    verb = "is" if len(ranks) == 1 else "are"
    return f"{named(ranks)} {verb} at {'the step of ' * in_step}{name} batch {batch} of epoch {epoch}"
