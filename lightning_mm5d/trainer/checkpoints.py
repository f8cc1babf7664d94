"""Checkpoints of a run on one rank: one file that rank 0 writes, and a door for the feature that knows folders.

The core saves full files, and refuses to load folders. A feature that `config.features` lists with ``saves`` has a
module ``checkpoints`` with ``CHECKPOINTS``, a subclass of `Checkpoints` that takes its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_mm5d.checkpoint.module_state import BufferState
from lightning_mm5d.checkpoint.rank_reports import RankReports
from lightning_mm5d.config.errors import (
    CheckpointCorruptError,
    CheckpointUntrustedError,
    ConfigError,
    RankLostError,
    repeated,
)
from lightning_mm5d.config.features import FEATURES, parts
from lightning_mm5d.plan.plan import Plan

T = TypeVar("T")
_SHARED_ERRORS = {kind.__name__: kind for kind in (CheckpointCorruptError, CheckpointUntrustedError)}


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """What is saved of a run on one rank, beside what Lightning has collected.

    Attributes:
        module: the LightningModule.
        optimizers: of the trainer.
        plan: all stages; None where rank 0 has the whole module.
        buffers: which ranks have the values of buffers.
        wire: where messages of the default group live.
        fields: for people who look at the checkpoint: step, epoch and layout.
        averages: copies of the module that callbacks average into, by name.
        goes_on: whether the run is not over.
    """

    module: pl.LightningModule
    optimizers: Sequence[Optimizer]
    plan: Plan | None
    buffers: BufferState | None
    wire: torch.device
    fields: Mapping[str, Any]
    averages: Mapping[str, nn.Module]
    goes_on: bool


class SavingInShards(Protocol):
    """Saves of which each rank writes what it holds, so that nothing is gathered, also after a run."""

    def state_dict(self, root: nn.Module, plan: Plan | None, wire: torch.device, average: str = "") -> dict[str, Any]:
        """Return a state dict with placeholders for what this rank does not hold in full; collective.

        Args:
            root: the LightningModule, or a copy that a callback averages into.
            plan: all stages; None where this rank has the whole module.
            wire: where messages of the default group live.
            average: name of the copy.
        """

    def optimizer_state(self, optimizer: Optimizer, number: int) -> dict[str, Any]:
        """Return what stands for the state of the trainer's optimizer of this number."""

    def save(self, checkpoint: Mapping[str, Any], path: str | os.PathLike[str], run: SavedRun) -> None:
        """Save what Lightning has collected, and what each rank holds; all ranks call it."""


class Checkpoints:
    """Full checkpoints of one strategy, as files.

    Args:
        open_reports: opens an occasion of a topic between ranks, over one of several connections.
        fields: of the strategy, by name, as the user gave them.

    Attributes:
        in_shards: saves, and says what a hook sees of states; None where full states are gathered and saved.
    """

    in_shards: SavingInShards | None = None

    def __init__(self, open_reports: Callable[..., RankReports], fields: Mapping[str, Any]) -> None:
        self._open_reports = open_reports

    # --- saving ---

    def remove(self, path: str | os.PathLike[str], remove_file: Callable[[Any], None]) -> None:
        """Delete a checkpoint; called on rank 0.

        Args:
            path: of a file or a folder.
            remove_file: deletes a file.
        """
        remove_file(path)

    @property
    def has_failed(self) -> bool:
        """Whether a save that was under way has failed, which `finish` would raise."""
        return False

    def finish(self) -> None:
        """Wait for the save that is under way; raise the error that it ended with."""

    def attach(self, trainer: pl.Trainer) -> None:
        """Training begins."""

    def close(self, *, failed: bool) -> None:
        """The run is over; wait for a save that is under way, but not long after a failed run, and forget the run."""

    # --- loading ---

    def newest_in_memory(self, rank: int, world_size: int, per_node: int) -> os.PathLike[str] | None:
        """Return the checkpoint that a fit goes on from whose ranks were started again; collective.

        It is called when a fit begins, before the ranks are connected.

        Args:
            rank: global rank.
            world_size: number of ranks.
            per_node: ranks on each node.

        Returns:
            Its folder on this node, or None: the fit goes on from what the user names.
        """
        return None

    def earlier(self, path: str | os.PathLike[str]) -> list[Path]:
        """Return checkpoints to load in place of a damaged one, in the order in which to try them; collective.

        Args:
            path: of the damaged one.
        """
        return []

    def load(self, path: str | os.PathLike[str], *, weights_only: bool) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Return what a folder holds, and what ranks must find equal in it.

        Args:
            path: of the folder.
            weights_only: whether to refuse what would run code.

        Raises:
            ConfigError: nothing knows how to read a folder.
            CheckpointCorruptError: on all ranks, when any rank finds it damaged.
            CheckpointUntrustedError: on all ranks, when it would run code.
        """
        feature = next(feature.name for feature in FEATURES if feature.saves)
        rule = f"A folder is read by the feature {feature!r}, and this installation comes without it"
        raise ConfigError("ckpt_path", os.fspath(path), rule, "Name a full checkpoint, or install the whole package")

    def take_weights(
        self, module: pl.LightningModule, state: Mapping[str, Any], plan: Plan | None, *, strict: bool, before_run: bool
    ) -> bool:
        """Take weights that are read when they are asked for, to load them now or in `load_waiting`; collective.

        Args:
            module: the LightningModule.
            state: the state dict of a checkpoint.
            plan: all stages where the module is cut; None where it is whole.
            strict: whether names must be those of the module.
            before_run: whether the module is whole, and may have its weights now.

        Returns:
            Whether `state` is of that kind.
        """
        return False

    def load_waiting(self, module: pl.LightningModule, plan: Plan, rank: int) -> None:
        """Read the weights that were to be loaded once the module is cut; collective."""

    def load_states(self, module: pl.LightningModule, load: Callable[[], object]) -> None:
        """Load states of optimizers on all ranks."""
        self.together("optimizers", load)

    def together(self, topic: str, action: Callable[[], T]) -> T:
        """Return what `action` returns, once it has succeeded on all ranks.

        Raises:
            CheckpointCorruptError: on all ranks, when any rank finds a checkpoint damaged.
            CheckpointUntrustedError: on all ranks, when it would run code.
            RankLostError: on the other ranks, when one fails by another error.
        """
        self.finish()
        reports, failed = self._open_reports(topic), None
        try:
            outcome = action()
        except Exception as error:
            failed = error
        failure = None if failed is None else [type(failed).__name__, str(failed)]
        failures = reports.exchange("failed", failure)
        if failed is not None:
            raise failed
        for rank, rank_failure in enumerate(failures):
            if rank_failure is not None:
                message = f"{rank_failure[0]}: {rank_failure[1]}"
                kind = _SHARED_ERRORS.get(rank_failure[0])
                if kind is not None:
                    raise repeated(kind(f"rank {rank}: {rank_failure[1]}"), rank, message)
                raise repeated(RankLostError(f"rank {rank}: {message}"), rank, message)
        return outcome


def made_checkpoints(open_reports: Callable[..., RankReports], fields: Mapping[str, Any]) -> Checkpoints:
    """Return what saves and loads checkpoints of a strategy: the feature that does, or the core where it is absent."""
    cls: type[Checkpoints] = next((module.CHECKPOINTS for module in parts("checkpoints")), Checkpoints)
    return cls(open_reports, fields)
