"""What a checkpoint says beside Lightning's own, so that a run goes on as if it had not stopped.

It is kept in one entry of the checkpoint, in plain values and tensors: the seed of all random streams, the position of
each training dataloader, and the random state of each rank. Plain Lightning leaves it alone.

Phases of resuming:

1. `Resume.load`, when the checkpoint is read: takes the seed over, before anything depends on it.
2. `Resume.begin`, after all hooks of the start of training: gives dataloaders their positions, sets Lightning's
   counters to them where the layout has changed, and puts random states back.

A checkpoint inside of an accumulation window goes on at the start of that window, because the gradients of the window
are not in the checkpoint: no parameter has seen its batches yet.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_mm5d.config.errors import ConfigError, private
from lightning_mm5d.data.random_state import (
    OrderStream,
    all_states,
    pack_states,
    packed_state,
    seed_all,
    seed_of,
    unpack_states,
)
from lightning_mm5d.data.resumable import Position, Resumable
from lightning_mm5d.engine.codec import receive_tree, send_tree
from lightning_mm5d.sharded.collectives import message_device, of_all_ranks

KEY, RESUME = "lightning_mm5d", "resume"
"""``checkpoint[KEY]`` is all that a checkpoint says beside Lightning's own; ``[RESUME]`` of it what is said here."""
_COMBINED = "combined_loader"


class Watch:
    """How far the trainer is, and the random states with which its step and its accumulation window began.

    Args:
        trainer: that trains.
        device: where this rank computes.

    Attributes:
        step: epoch and number of the step that was fetched for last, and the states before it: random ones, and that of
            `stream`, which a validation inside of an accumulation window draws from again where the window is.
        window: the same for the first step of the accumulation window.
        order_seeds: for seeds of distributed samplers in this process, those of the run that it goes on with.
        stream: what orders are drawn from that no sampler seeds; None before training, and with several dataloaders.
    """

    def __init__(self, trainer: pl.Trainer, device: torch.device) -> None:
        self._trainer, self._device = trainer, device
        self.stream: OrderStream | None = None
        self.order_seeds: dict[int, int] = {}
        self.forget()

    def forget(self) -> None:
        self.step: tuple[Any, Any, dict[str, Any]] = (None, None, {})
        self.window: tuple[Any, Any, dict[str, Any]] = (None, None, {})

    def belongs_to(self, trainer: pl.Trainer) -> bool:
        return self._trainer is trainer

    def steps_taken(self) -> int:
        return _steps(self._trainer)

    def opens_twice(self, epoch: int) -> bool:
        """Return whether dataloaders are made anew for an epoch: Lightning opens these then, and when it begins."""
        every: int = vars(self._trainer)["reload_dataloaders_every_n_epochs"]
        return epoch > 0 and every > 0 and epoch % every == 0

    def fetching(self) -> None:
        steps = _steps(self._trainer)
        epoch = _epochs(self._trainer)
        orders = {} if self.stream is None else self.stream.states(epoch)[1]
        self.step = (epoch, steps), all_states(self._device), orders
        if steps % self._trainer.accumulate_grad_batches == 0:
            self.window = self.step

    def states(self, steps: int) -> tuple[Any, dict[str, Any]]:
        """Return the states after `steps` steps of the epoch; no orders where they are those of now."""
        for step, states, orders in (self.step, self.window):
            if step == (_epochs(self._trainer), steps):
                return states, orders
        return all_states(self._device), {}


class Resume:
    """Saves and restores what one rank's run depends on.

    Attributes:
        saved: what the checkpoint says that this run goes on from; None without one.
    """

    def __init__(self) -> None:
        self.saved: Mapping[str, Any] | None = None
        self._foreign: list[Any] = []
        self._is_loaded = False
        self._watch: Watch | None = None
        self._first: Tensor | None = None  # the random state with which training began

    def watch(self, trainer: pl.Trainer) -> Watch:
        """Return what training dataloaders of this trainer tell, and are told, about its steps."""
        if self._watch is None or not self._watch.belongs_to(trainer):
            self._watch = Watch(trainer, trainer.strategy.root_device)
        return self._watch

    def end(self) -> None:
        """Leave the random state as the orders of a run on one process leave it: a second run draws other numbers.

        A state that code of the run has changed stays as it is.
        """
        if self._watch is not None and self._watch.stream is not None:
            self._watch.stream.leave()
        if self._first is not None and torch.equal(packed_state(), self._first):  # a seed gave all orders
            torch.rand(())
        self._first = None

    def on_validation(self, trainer: pl.Trainer) -> None:
        """Draw what a validation in the midst of training draws on one process."""
        draws = None if self._watch is None or trainer.sanity_checking else self._watch.stream
        for loader in tree_leaves(trainer.val_dataloaders, is_leaf=lambda leaf: isinstance(leaf, DataLoader)):
            if isinstance(loader, Resumable) and loader.reseeds_generator:
                if draws is not None:
                    draws.pass_over(loader.served_indices, seeds_workers=loader.seeds_workers(not loader.has_validated))
                loader.has_validated = True

    # --- saving ---

    def collect(
        self, trainer: pl.Trainer, checkpoint: dict[str, Any], *, seed: int, layout: Any, device: torch.device
    ) -> None:
        """Add to `checkpoint` what a run needs to go on from it; complete on rank 0 only. Collective.

        Args:
            trainer: that runs.
            checkpoint: of Lightning, with optimizer states.
            seed: of all random streams.
            layout: plain values that are equal where ranks stand for the same parts of a run.
            device: where this rank computes.
        """
        loaders = training_loaders(trainer)
        if not loaders and self.saved is not None:  # nothing was read since the checkpoint that this run goes on from
            checkpoint[KEY] = {**checkpoint.get(KEY, {}), RESUME: self.saved}
            return
        loops = checkpoint["loops"]["fit_loop"]
        steps, wire = _wound_back(trainer, loaders, loops), message_device(device)
        positions = [_gathered(loader.position(steps), wire) for loader in loaders]
        if _begins_epoch(trainer, loops):
            positions = [replace(position, epoch=position.epoch - 1) for position in positions]
        states, orders = (all_states(device), {}) if self._watch is None else self._watch.states(steps)
        positions = [
            replace(position, now=position.now | orders) if orders.keys() <= position.now.keys() else position
            for position in positions
        ]
        saved = {
            "format": 1,
            "seed": seed,
            "layout": layout,
            "loaders": [position.saved() for position in positions],
            "random": _all_gathered(pack_states(states), wire),
        }
        checkpoint[KEY] = {**checkpoint.get(KEY, {}), RESUME: saved}
        loops["state_dict"].pop(_COMBINED, None)
        own_states = [next(iter(position.own.values())) for position in positions if position.kind == "stateful"]
        if own_states and all(state is not None for state in own_states):  # as plain Lightning saves and expects it
            loops["state_dict"][_COMBINED] = own_states

    # --- loading ---

    def load(self, checkpoint: Mapping[str, Any]) -> int | None:
        """Remember what `checkpoint` says; return the seed of the run that saved it, None where it does not tell."""
        self.saved = checkpoint.get(KEY, {}).get(RESUME)
        self._is_loaded = "loops" in checkpoint
        state = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        self._foreign = state.pop(_COMBINED, [])
        return None if self.saved is None else int(self.saved["seed"])

    def begin(self, trainer: pl.Trainer, *, layout: Any, device: torch.device, replica: int, rank: int) -> None:
        """Go on from the checkpoint that was loaded, if any. Collective.

        Args:
            trainer: about to train.
            layout: as for `collect`.
            device: where this rank computes.
            replica: the first that this rank serves.
            rank: global rank.

        Raises:
            ConfigError: on all ranks, when the dataloaders cannot go on in the midst of the epoch.
        """
        saved, self.saved = self.saved, None
        is_loaded, self._is_loaded = self._is_loaded, False
        loaders = training_loaders(trainer)
        watch, state = self.watch(trainer), packed_state().to(message_device(device))
        watch.forget()
        if dist.is_initialized():
            dist.broadcast(state, 0)
        watch.stream = OrderStream(state.cpu()) if len(loaders) == 1 else None
        if is_loaded and saved is None:
            self._begin_foreign(trainer, loaders)
        elif is_loaded and saved is not None and saved["loaders"]:  # tuners save before training begins
            _place_loaders(trainer, loaders, saved)
            if saved["layout"] == layout:
                unpack_states(saved["random"][rank], device)
            else:
                seed_all(seed_of(int(saved["seed"]), "resumed", trainer.fit_loop.total_batch_idx, replica), device)
        self._first = packed_state()

    def _begin_foreign(self, trainer: pl.Trainer, loaders: list[Resumable]) -> None:
        """Go on from a checkpoint that does not say which samples were consumed."""
        stateful = [loader for loader in loaders if loader.kind == "stateful"]
        if self._foreign and len(self._foreign) == len(stateful) == len(loaders):
            for loader, state in zip(stateful, self._foreign, strict=True):
                loader.resume_own(state, _steps(trainer), _epochs(trainer))
            _fetch_again(trainer)
        elif trainer.fit_loop.restarting and 0 < _steps(trainer) < trainer.num_training_batches:
            warnings.warn(
                "The checkpoint was saved in the midst of an epoch and does not say which samples were consumed: the "
                "rest of the epoch reads samples from the beginning of the data again",
                stacklevel=2,
            )


def training_loaders(trainer: pl.Trainer) -> list[Resumable]:
    """Return the training dataloaders of a run in Lightning's order; none before they are made."""
    leaves = tree_leaves(trainer.train_dataloader, is_leaf=lambda leaf: isinstance(leaf, Resumable))
    return [loader for loader in leaves if isinstance(loader, Resumable)]


def _steps(trainer: pl.Trainer) -> int:
    """Return the steps of this epoch that are finished."""
    return int(_batches(trainer).processed)


def _batches(trainer: pl.Trainer) -> Any:
    return trainer.fit_loop.epoch_loop.batch_progress.current


def _epochs(trainer: pl.Trainer) -> int:
    """Return how many epochs are finished."""
    current: Any = trainer.fit_loop.epoch_progress.current
    return int(current.processed)


def _wound_back(trainer: pl.Trainer, loaders: list[Resumable], loops: dict[str, Any]) -> int:
    """Return how many steps of this epoch count as taken; set the saved counters of Lightning back to it.

    A step that has begun does not count. Inside of an accumulation window, only the steps before it do.
    """
    steps, loop, current = _steps(trainer), trainer.fit_loop.epoch_loop, _batches(trainer)
    has_begun = current.ready > steps
    back = steps % trainer.accumulate_grad_batches
    # Lightning knows of a batch that has begun whether it is the last one
    if (loop.batch_progress.is_last_batch and not has_begun) or steps == trainer.num_training_batches:
        back = 0
    if back and any(loader.began_after(steps - back) for loader in loaders):
        warnings.warn(
            "A checkpoint is saved inside of an accumulation window in which a dataloader began its data again: a run "
            "that is resumed from it loses the gradients of this window",
            stacklevel=3,
        )
        return steps
    if back or has_begun:
        saved = loops["epoch_loop.batch_progress"] | {"is_last_batch": False}
        for name in ("current", "total"):
            saved[name] = dict.fromkeys(saved[name], saved[name]["processed"] - back)
        loops["epoch_loop.batch_progress"] = saved
    return steps - back


def _begins_epoch(trainer: pl.Trainer, loops: dict[str, Any]) -> bool:
    """Whether an epoch begins whose first hooks still run; then the saved counter says that it has not begun.

    Lightning's counter of batches is still that of the epoch before.
    """
    current: Any = trainer.fit_loop.epoch_progress.current
    if not 0 < current.processed == current.started < current.ready:
        return False
    saved = loops["epoch_progress"]
    loops["epoch_progress"] = {name: {**saved[name], "ready": saved[name]["started"]} for name in saved}
    return True


def _place_loaders(trainer: pl.Trainer, loaders: list[Resumable], saved: Mapping[str, Any]) -> None:
    """Have dataloaders go on where those of a checkpoint were."""
    positions = [Position.load(fields) for fields in saved["loaders"]]
    if len(positions) != len(loaders):
        rule = f"The checkpoint was saved with {len(positions)}"
        raise ConfigError("train_dataloader", f"{len(loaders)} dataloaders", rule, "Return the same dataloaders")
    epoch, progress = _epochs(trainer), trainer.fit_loop.epoch_loop.batch_progress
    is_left = not progress.is_last_batch and _steps(trainer) < trainer.num_training_batches
    for loader, position in zip(loaders, positions, strict=True):
        loader.resume(position, int(saved["seed"]), epoch, is_left=is_left)
    if any(position.epoch == epoch for position in positions):
        _place(trainer, loaders)
    else:
        _place_at_beginning(trainer)
    _fetch_again(trainer)


def _place(trainer: pl.Trainer, loaders: list[Resumable]) -> None:
    """Set Lightning's counter of batches to the steps that loaders go on with."""
    current = _batches(trainer)
    current.ready = current.started = current.processed
    if all(loader.same_steps() for loader in loaders):
        return
    steps = [step for loader in loaders if (step := loader.resumed_step()) is not None]
    if not steps:
        return
    combined = private(trainer.fit_loop, "_combined_loader")
    step, end = (min if private(combined, "_mode") != "min_size" else max)(steps), trainer.num_training_batches
    if step >= end:  # Lightning ends an epoch by a step, or where there is no batch for it
        step = int(end) - 1
        for loader in loaders:
            loader.end_pass()
    moved = step - current.processed
    for name in ("ready", "started", "processed", "completed"):
        setattr(current, name, getattr(current, name) + moved)


def _place_at_beginning(trainer: pl.Trainer) -> None:
    """Set Lightning's counter for an epoch that follows one whose end only its last batch could tell."""
    current, loop = _batches(trainer), trainer.fit_loop.epoch_loop
    if trainer.num_training_batches != float("inf"):
        return
    current.ready = current.started = current.processed = current.completed = 0
    if loop.restarting and loop.restarted_on_train_batch_end:
        current.completed = -1  # Lightning counts one more then


def _fetch_again(trainer: pl.Trainer) -> None:
    """Begin to fetch again where Lightning has fetched ahead, before loaders had their positions."""
    fetcher: Any = private(trainer.fit_loop, "_data_fetcher")
    if fetcher is not None and fetcher.length is None:
        iter(fetcher)


def _all_gathered(state: Tensor, wire: torch.device) -> Tensor:
    """Return the states of all ranks ``[ranks, bytes]``; collective."""
    if not dist.is_initialized():
        return state[None]
    return of_all_ranks(state.to(wire)).cpu()


def _gathered(position: Position, wire: torch.device) -> Position:
    """Return a position with the own states of all replicas' loaders, on rank 0; collective.

    Raises:
        ConfigError: the state of a loader holds something other than tensors and plain values.
    """
    if position.kind != "stateful" or not dist.is_initialized():
        return position
    states = dict(position.own)
    failed: str | None = None
    for src in range(1, dist.get_world_size()):
        try:
            if dist.get_rank() == src:
                send_tree(position.own, 0, wire)
            elif dist.get_rank() == 0:
                states = {**receive_tree(src, wire), **states}
        except ValueError as error:
            failed = str(error)
    if failed is not None:
        rule = "A checkpoint holds tensors and plain values"
        raise ConfigError("dataloader.state_dict()", failed, rule, "Return such values")
    return replace(position, own=states)
