"""Sharded checkpoints of a run on one rank: what the strategy's hooks call.

The checkpoints beside another one: the last good one before it, and links to them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mm5d.checkpoint.module_state import BufferState, collect_others
from lightning_mm5d.checkpoint.own_shards import AVERAGES, OwnShards, labels_of, own_state
from lightning_mm5d.checkpoint.sharded_load import ShardedCheckpoint
from lightning_mm5d.checkpoint.sharded_save import RankReports, Save, decide
from lightning_mm5d.config.errors import (
    CheckpointCorruptError,
    CheckpointUntrustedError,
    RankLostError,
    private,
    repeated,
)
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.storage.directory import CheckpointDirectory
from lightning_mm5d.storage.files import flush_folder
from lightning_mm5d.storage.replacement import new_save_id, remove_checkpoint, resolve
from lightning_mm5d.trainer.saves import Saves


def earlier_checkpoints(path: str | os.PathLike[str]) -> list[Path]:
    """Return the sharded checkpoints in the folder of `path` that are not it, those of later steps first.

    Those of later steps than that of `path`, where it still says its step, are left out.
    """
    place = resolve(path)
    limit = _step(place)
    found: dict[Path, float] = {}
    for entry in sorted(place.parent.iterdir()) if place.parent.is_dir() else ():
        other = Path(os.path.realpath(entry))
        if entry.name.startswith(".") or not other.is_dir() or other == Path(os.path.realpath(place)):
            continue
        step = _step(other)
        if step is not None and (limit is None or step <= limit):
            found[other] = step
    return sorted(found, key=lambda other: (found[other], other.lstat().st_mtime_ns), reverse=True)


def link(target: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Make `path` a symbolic link to `target` in place of what it is, in one step where that is no directory."""
    place = Path(os.path.abspath(path))
    aside = place.with_name(f".{place.name}.{new_save_id()}.link")
    os.symlink(os.path.relpath(os.path.abspath(target), place.parent), aside)
    if place.is_dir() and not place.is_symlink():
        remove_checkpoint(place)
    os.replace(aside, place)
    flush_folder(place.parent)


def _step(path: Path) -> float | None:
    try:
        step = CheckpointDirectory(path).fields.get("step")
    except (CheckpointCorruptError, OSError):
        return None
    return step if isinstance(step, int) else None


T = TypeVar("T")
_SHARED_ERRORS = {kind.__name__: kind for kind in (CheckpointCorruptError, CheckpointUntrustedError)}


class ShardedCheckpoints:
    """Saves and loads the shards of one rank.

    Args:
        open_reports: opens an occasion of a topic between ranks.

    Attributes:
        saves: that may be under way.
    """

    def __init__(self, open_reports: Callable[[str], RankReports]) -> None:
        self._open_reports = open_reports
        self.saves = Saves()
        self._stand_ins: dict[str, Tensor] = {}
        self._linked: list[ModelCheckpoint] = []

    # --- saving ---

    def state_dict(self, module: pl.LightningModule, plan: Plan | None, wire: torch.device) -> dict[str, Any]:
        """Return the state dict of a module with placeholders for what this rank does not hold in full; collective."""
        state = own_state(module, plan, self._stand_ins)
        if plan is not None:
            collect_others(module, state, plan, dist.get_rank(), wire=wire)
        return state

    def state_of_average(self, root: nn.Module, plan: Plan, name: str, wire: torch.device) -> dict[str, Any]:
        """Return the same of the copy of the module that a callback averages into; collective."""
        state = own_state(root, plan, self._stand_ins, f"{AVERAGES}/{name}/")
        collect_others(root, state, plan, dist.get_rank(), wire=wire)
        return state

    def save(
        self,
        checkpoint: Mapping[str, Any],
        path: str | os.PathLike[str],
        module: pl.LightningModule,
        optimizers: Sequence[Optimizer],
        plan: Plan | None,
        *,
        buffers: BufferState | None,
        wire: torch.device,
        fields: Mapping[str, Any],
        in_thread: bool,
        averages: Mapping[str, nn.Module],
    ) -> None:
        """Save on all ranks.

        Args:
            checkpoint: what Lightning has collected.
            path: of the checkpoint.
            module: the LightningModule.
            optimizers: of the trainer.
            plan: all stages; None where rank 0 has the whole module.
            buffers: which ranks have the values of buffers.
            wire: where messages of the default group live.
            fields: of the manifest.
            in_thread: whether to return once this rank's shards are copied.
            averages: copies of the module that callbacks average into, by name.
        """
        self.saves.finish()
        reports = self._open_reports("save")
        sources = {} if buffers is None else buffers.sources(wire)
        shards = OwnShards(module, plan, reports.rank, sources, self._stand_ins, averages)
        save = Save(reports, optimizers, fields)
        labels = [labels_of(optimizer, module) for optimizer in optimizers]
        save.announce(os.fspath(path), lambda: decide(checkpoint, shards, labels))
        save.take(shards, copies=in_thread)
        self.saves.run(save, in_thread=in_thread)

    def remove(self, path: str | os.PathLike[str], remove_file: Callable[[Any], None]) -> None:
        """Delete a checkpoint, once the one that replaces it stands; called on rank 0.

        Args:
            path: of a directory or a file.
            remove_file: deletes a file.
        """
        remove = remove_checkpoint if os.path.isdir(path) and not os.path.islink(path) else remove_file
        self.saves.then(partial(remove, path))

    def attach(self, trainer: pl.Trainer) -> None:
        """Let links to checkpoints be made in one step, and once what they lead to stands; until `detach`."""

        def link_checkpoint(trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
            if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
                self.saves.then(partial(link, filepath, linkpath))
            trainer.strategy.barrier()

        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                private(callback, "_link_checkpoint")
                vars(callback)["_link_checkpoint"] = link_checkpoint
                self._linked.append(callback)

    def detach(self) -> None:
        """Give Lightning its own links back, and forget what belongs to a run."""
        for callback in self._linked:
            vars(callback).pop("_link_checkpoint", None)
        self._linked.clear()
        self._stand_ins.clear()

    # --- loading ---

    def load(
        self, path: str | os.PathLike[str], *, weights_only: bool, falls_back: bool
    ) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Return what a checkpoint holds, and what ranks must find equal in it.

        Args:
            path: of the directory.
            weights_only: whether to refuse what would run code.
            falls_back: whether to load the last good one of the folder where this one is damaged.

        Raises:
            CheckpointCorruptError: on all ranks, when any rank finds it damaged.
            CheckpointUntrustedError: on all ranks, when it would run code.
        """
        candidates, problem = [Path(path)], None
        for number, candidate in enumerate(candidates):  # it grows
            try:
                return self.together("load", partial(self._opened, candidate, weights_only, verify=falls_back))
            except CheckpointCorruptError as error:
                problem = problem or error
                if number == 0 and falls_back:
                    reports = self._open_reports("earlier checkpoints")
                    own = [os.fspath(one) for one in earlier_checkpoints(path)] if reports.rank == 0 else []
                    candidates += map(Path, reports.exchange("found", own)[0])
                if candidate == candidates[-1]:
                    raise problem from None
                following = candidates[number + 1]
                warnings.warn(f"{candidate} is damaged, so that {following} is loaded: {error}", stacklevel=2)
        raise AssertionError("the last candidate is returned or raises")

    def _opened(self, path: Path, weights_only: bool, *, verify: bool) -> tuple[dict[str, Any], Mapping[str, Any]]:
        checkpoint = ShardedCheckpoint(path, weights_only=weights_only)
        directory = CheckpointDirectory(path)
        if verify:  # all bytes now, because nothing can be loaded instead later on
            world = dist.get_world_size() if dist.is_initialized() else 1
            rank = dist.get_rank() if dist.is_initialized() else 0
            for name in sorted(directory.tensor_files())[rank::world]:
                directory.tensor_file(name).verify()
        written = {name: [file.size, file.checksum] for name, file in directory.files.items()}
        return checkpoint.state, {"files": written}

    def together(self, topic: str, action: Callable[[], T]) -> T:
        """Return what `action` returns, once it has succeeded on all ranks.

        Raises:
            CheckpointCorruptError: on all ranks, when any rank finds a checkpoint damaged.
            CheckpointUntrustedError: on all ranks, when it would run code.
            RankLostError: on the other ranks, when one fails by another error.
        """
        self.saves.finish()
        reports, failed = self._open_reports(topic), None
        try:
            found = action()
        except Exception as error:
            failed = error
        told = None if failed is None else [type(failed).__name__, str(failed)]
        others = reports.exchange("failed", told)
        if failed is not None:
            raise failed
        for rank, other in enumerate(others):
            if other is not None:
                said = f"{other[0]}: {other[1]}"
                kind = _SHARED_ERRORS.get(other[0])
                if kind is not None:
                    raise repeated(kind(f"rank {rank}: {other[1]}"), rank, said)
                raise repeated(RankLostError(f"rank {rank}: {said}"), rank, said)
        return found


def reads_weights_early(module: pl.LightningModule) -> bool:
    """Return whether code of the user's own, or an average of weights, expects them loaded before `Strategy.setup`."""
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return True
    usual = pl.Callback.on_load_checkpoint, pl.Callback.load_state_dict
    return any(
        isinstance(one, WeightAveraging)
        or (
            not type(one).__module__.startswith("lightning.")
            and (type(one).on_load_checkpoint, type(one).load_state_dict) != usual
        )
        for one in vars(module.trainer)["callbacks"]
    )
