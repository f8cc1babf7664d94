"""Sharded checkpoints of a run on one rank: what the strategy's hooks call, and the checkpoints beside another one.

A rank has one save at a time, in the calling thread or in one of its own. What has to wait for it, such as the deletion
of an older checkpoint, is done after it, and not at all where it fails. An error of a thread is raised by `finish`, on
all ranks, because all of them hear how a save ended.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mm5d.checkpoint.module_state import collect_others
from lightning_mm5d.checkpoint.rank_reports import RankReports, joined
from lightning_mm5d.config.errors import CheckpointCorruptError, private
from lightning_mm5d.features.sharded_checkpoints.directory import UNCHECKED, CheckpointDirectory, Reader
from lightning_mm5d.features.sharded_checkpoints.in_memory import HostMemory, Nodes
from lightning_mm5d.features.sharded_checkpoints.own_shards import (
    AVERAGES,
    OwnShards,
    Piece,
    PieceCopies,
    Saved,
    labelled,
    own_state,
    pieces_of,
)
from lightning_mm5d.features.sharded_checkpoints.sharded_load import (
    SavedWeights,
    ShardedCheckpoint,
    check_weights,
    load_weights,
    void_weights,
)
from lightning_mm5d.features.sharded_checkpoints.sharded_save import OptimizerPart, Save, decide
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.removable import meanwhile, put
from lightning_mm5d.storage.files import flush
from lightning_mm5d.storage.replacement import new_save_id, remove_checkpoint, resolve
from lightning_mm5d.trainer.checkpoints import Checkpoints, SavedRun, SavingInShards

FAILED_RUN_S = 20.0
"""how long a run that has failed waits for a save that other ranks may never finish"""


class Saves:
    """Runs the phases of saves after their first one."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._after: list[Callable[[], object]] = []
        self._is_busy = False
        self._lock = threading.Lock()

    @property
    def has_failed(self) -> bool:
        """Whether a save in a thread has failed, which `finish` would raise."""
        return self._error is not None

    def run(self, save: Save, *, in_thread: bool) -> None:
        """Write and conclude a save whose pieces are taken.

        Args:
            save: after `Save.take`.
            in_thread: whether to return at once.
        """
        if not in_thread:
            try:
                save.write()
            except Exception:
                raise
            except BaseException:
                save.drop()
                raise
            return

        def work() -> None:
            try:
                save.write()
                while action := self._next():
                    action()
            except BaseException as error:
                with self._lock:
                    self._error, self._is_busy = error, False
                    self._after.clear()

        self._is_busy = True
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def then(self, action: Callable[[], object]) -> None:
        """Call `action` once no save is under way; not at all where that one fails, which `finish` raises."""
        with self._lock:
            if self._is_busy:
                self._after.append(action)
            if self._is_busy or self._error is not None:
                return
        action()

    def _next(self) -> Callable[[], object] | None:
        with self._lock:
            self._is_busy = bool(self._after)
            return self._after.pop(0) if self._after else None

    def finish(self) -> None:
        """Wait for the save that is under way; raise the error that a thread ended with."""
        joined(self._thread)
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self, *, failed: bool) -> None:
        """Wait for the save that is under way; after a failed run not for long, and without its error."""
        if not failed:
            self.finish()
            return
        with suppress(BaseException):
            joined(self._thread, FAILED_RUN_S)
        self._thread = None


def earlier_checkpoints(path: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints in the folder of `path` that are of its kind and not it, those of later steps first.

    Those of later steps than that of `path`, where it still says its step, are left out. Files do not say theirs before
    they are unpickled, so that their times count.
    """
    place = Path(os.path.realpath(resolve(path)))
    is_folder, limit = place.is_dir(), _order(place)
    orders: dict[Path, tuple[int, int]] = {}
    for entry in sorted(place.parent.iterdir()) if place.parent.is_dir() else ():
        other = Path(os.path.realpath(entry))
        if entry.name.startswith(".") or other == place or other.is_dir() != is_folder or other.suffix != place.suffix:
            continue
        order = _order(other)
        if order is not None and (limit is None or order[0] <= limit[0]):
            orders[other] = order
    return sorted(orders, key=lambda other: orders[other], reverse=True)


def link(target: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Make `path` a symbolic link to `target` in place of what it is, in one step where that is no directory."""
    place = Path(os.path.abspath(path))
    aside = place.with_name(f".{place.name}.{new_save_id()}.link")
    os.symlink(os.path.relpath(os.path.abspath(target), place.parent), aside)
    if place.is_dir() and not place.is_symlink():
        remove_checkpoint(place)
    os.replace(aside, place)
    flush(place.parent)


def _order(path: Path) -> tuple[int, int] | None:
    """Return what orders checkpoints: the step of a folder, and the time of either; None where it cannot be told."""
    try:
        written = path.lstat().st_mtime_ns
        step = CheckpointDirectory(path).fields.get("step") if path.is_dir() else written
    except (CheckpointCorruptError, OSError):
        return None
    return (step, written) if isinstance(step, int) else None


class ShardedCheckpoints(Checkpoints, SavingInShards):
    """Saves and loads the shards of one rank."""

    def __init__(self, open_reports: Callable[..., RankReports], fields: Mapping[str, Any]) -> None:
        super().__init__(open_reports, fields)
        self.in_shards = self if fields["checkpoint_format"] == "sharded" else None
        self._in_thread, self._falls_back = fields["async_checkpoint"], fields["on_corrupt_checkpoint"] == "previous"
        self._saves = Saves()
        self._stand_ins: dict[str, Tensor] = {}
        self._division: tuple[Plan, Mapping[str, Saved], list[Piece]] | None = None
        self._links = ExitStack()  # what lets Lightning make links again
        self._waiting: SavedWeights | None = None  # to load once the module is cut
        every = fields["in_memory_every_n_steps"]
        self._memory = None if every is None else HostMemory(every)
        self._memory_saves, self._memory_copies, self._is_for_memory = Saves(), PieceCopies(beside=True), False

    # --- saving ---

    @override
    def state_dict(self, root: nn.Module, plan: Plan | None, wire: torch.device, average: str = "") -> dict[str, Any]:
        state = own_state(root, plan, self._stand_ins, f"{AVERAGES}/{average}/" if average else "")
        if plan is not None:
            collect_others(root, state, plan, dist.get_rank(), wire=wire)
        return state

    @override
    def optimizer_state(self, optimizer: Optimizer, number: int) -> dict[str, Any]:
        return OptimizerPart(optimizer, number)

    @override
    def save(self, checkpoint: Mapping[str, Any], path: str | os.PathLike[str], run: SavedRun) -> None:
        memory = self._memory if self._is_for_memory else None
        make_save: Callable[..., Save] = Save
        saves, open_reports = self._saves, self._open_reports
        if memory is not None:
            saves, open_reports, make_save = self._memory_saves, self._open_memory_reports, memory.next_save
        saves.finish()
        # which returns once this rank's shards are copied
        in_thread = memory is not None or (self._in_thread and run.goes_on)
        reports = open_reports("save")
        sources = {} if run.buffers is None else run.buffers.sources(run.wire)
        shards = OwnShards(
            run.module, run.plan, reports.rank, sources, self._stand_ins, run.averages, division=self._pieces_of
        )
        save = make_save(reports, run.optimizers, run.fields)
        labels = [[label for label, _ in labelled(optimizer, run.module)] for optimizer in run.optimizers]
        save.announce(os.fspath(path), lambda: decide(checkpoint, shards, labels))
        copies = self._memory_copies if memory is not None else PieceCopies()
        save.take(shards, copies if in_thread else None)
        saves.run(save, in_thread=in_thread)

    def _pieces_of(self, plan: Plan, tensors: Mapping[str, Saved]) -> list[Piece]:
        """Return `pieces_of` these arguments, found once for saves that follow each other."""
        if self._division is None or self._division[0] is not plan or self._division[1] != tensors:
            self._division = plan, tensors, pieces_of(plan, tensors)
        return self._division[2]

    def _open_memory_reports(self, topic: str) -> RankReports:
        return self._open_reports(topic, connection="memory")  # whose thread may be under way beside the other one

    def _save_in_memory(self, trainer: pl.Trainer) -> None:
        barrier = trainer.strategy.barrier

        def later(name: str | None = None) -> None:  # ranks hear of each other's files later than Lightning's own one
            if name != "Trainer.save_checkpoint":
                barrier(name)

        with meanwhile(self, in_shards=self, _is_for_memory=True), ExitStack() as undo:
            undo.callback(put(trainer.strategy, "barrier", later))
            trainer.save_checkpoint("memory", weights_only=False)  # not the weights alone, but the states too

    @override
    def remove(self, path: str | os.PathLike[str], remove_file: Callable[[Any], None]) -> None:
        """Delete a checkpoint, once the one that replaces it stands."""
        remove = remove_checkpoint if os.path.isdir(path) and not os.path.islink(path) else remove_file
        self._saves.then(partial(remove, path))

    @override
    def attach(self, trainer: pl.Trainer) -> None:
        """Let links to checkpoints be made in one step, and once what they lead to stands; until `close`."""

        def link_checkpoint(trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
            if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
                self._saves.then(partial(link, filepath, linkpath))
            trainer.strategy.barrier()

        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                private(callback, "_link_checkpoint")
                self._links.callback(put(callback, "_link_checkpoint", link_checkpoint))
        if self._memory is not None:
            self._memory.attach(trainer, self._save_in_memory, self._memory_copies.await_on_device)

    @property
    @override
    def has_failed(self) -> bool:
        return self._saves.has_failed or self._memory_saves.has_failed

    @override
    def finish(self) -> None:
        self._saves.finish()
        self._memory_saves.finish()

    @override
    def close(self, *, failed: bool) -> None:
        with ExitStack() as stack:
            stack.callback(self._saves.close, failed=failed)
            if self._memory is not None:
                stack.callback(self._memory_copies.close)
                stack.push(partial(self._close_memory, failed))
            self._links.close()
            self._stand_ins.clear()
            self._waiting = self._division = None
            if self._memory is not None and not failed:
                self._memory_saves.finish()

    def _close_memory(self, failed: bool, error: type[BaseException] | None, *_: object) -> None:
        """Keep what is in memory where the last save into it has failed, so that ranks that start again go on."""
        assert self._memory is not None
        self._memory.close(failed=failed or error is not None)

    # --- loading ---

    @override
    def newest_in_memory(self, rank: int, world_size: int, per_node: int) -> Path | None:
        nodes = Nodes(rank, world_size, per_node)
        return None if self._memory is None else self._memory.newest_checkpoint(nodes, self._open_memory_reports)

    @override
    def earlier(self, path: str | os.PathLike[str]) -> list[Path]:
        if not self._falls_back:
            return []
        reports = self._open_reports("earlier checkpoints")
        paths = [os.fspath(checkpoint) for checkpoint in earlier_checkpoints(path)] if reports.rank == 0 else []
        return [Path(checkpoint) for checkpoint in reports.exchange("found", paths)[0]]

    @override
    def load(self, path: str | os.PathLike[str], *, weights_only: bool) -> tuple[dict[str, Any], Mapping[str, Any]]:
        elsewhere = {} if self._memory is None else self._memory.elsewhere(Path(path), self._open_memory_reports)
        return self.together("load", partial(self._opened, Path(path), weights_only, elsewhere))

    def _opened(
        self, path: Path, weights_only: bool, elsewhere: Mapping[str, Reader]
    ) -> tuple[dict[str, Any], Mapping[str, Any]]:
        checkpoint = ShardedCheckpoint(path, weights_only=weights_only, elsewhere=elsewhere)
        directory = CheckpointDirectory(path, elsewhere)
        if self._falls_back and UNCHECKED not in directory.fields:  # all bytes now: nothing can be loaded instead later
            world = dist.get_world_size() if dist.is_initialized() else 1
            rank = dist.get_rank() if dist.is_initialized() else 0
            for name in sorted(directory.tensor_files())[rank::world]:
                directory.tensor_file(name).verify()
        written = {name: [file.size, file.checksum] for name, file in directory.files.items()}
        return checkpoint.state, {"files": written}

    @override
    def take_weights(
        self, module: pl.LightningModule, state: Mapping[str, Any], plan: Plan | None, *, strict: bool, before_run: bool
    ) -> bool:
        if not isinstance(state, SavedWeights):
            return False
        check_weights(module, state, strict, plan)
        if before_run and reads_weights_early(module):
            self._load_together(module, "weights", partial(module.load_state_dict, state, strict=strict))
        else:
            self._waiting = state
        return True

    @override
    def load_waiting(self, module: pl.LightningModule, plan: Plan, rank: int) -> None:
        if self._waiting is not None:
            state, self._waiting = self._waiting, None
            self._load_together(module, "weights", partial(load_weights, module, state, plan, rank))

    @override
    def load_states(self, module: pl.LightningModule, load: Callable[[], object]) -> None:
        self._load_together(module, "optimizers", load)

    def _load_together(self, module: pl.LightningModule, topic: str, load: Callable[[], object]) -> None:
        """Load on all ranks; where the checkpoint proves to be damaged meanwhile, no rank keeps a part of it."""
        try:
            self.together(topic, load)
        except CheckpointCorruptError as error:
            void_weights(module)
            error.add_note("Some of it was loaded before. So the module's weights are NaN now: build it again")
            raise


def reads_weights_early(module: pl.LightningModule) -> bool:
    """Return whether code of the user's own, or an average of weights, expects them loaded before `Strategy.setup`."""
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return True
    usual = pl.Callback.on_load_checkpoint, pl.Callback.load_state_dict
    return any(
        isinstance(callback, WeightAveraging)
        or (
            not type(callback).__module__.startswith("lightning.")
            and (type(callback).on_load_checkpoint, type(callback).load_state_dict) != usual
        )
        for callback in vars(module.trainer)["callbacks"]
    )


CHECKPOINTS = ShardedCheckpoints
