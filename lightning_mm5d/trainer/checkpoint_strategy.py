"""Checkpoints of a strategy: what Lightning asks for when it saves and loads, and whom it is delegated to."""

from __future__ import annotations

import inspect
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from datetime import timedelta
from functools import partial, wraps
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mm5d.checkpoint.module_state import collect_module, is_partial, load_module
from lightning_mm5d.checkpoint.optimizer_state import collect_optimizer, load_optimizers
from lightning_mm5d.checkpoint.rank_reports import RankReports, fingerprint
from lightning_mm5d.config.errors import CheckpointCorruptError, RankLostError, RemoteParameterError, private
from lightning_mm5d.config.features import owned
from lightning_mm5d.plan.holdings import DataShards
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.collectives import message_device
from lightning_mm5d.sharded.remote_value import is_remote
from lightning_mm5d.sharded.removable import put
from lightning_mm5d.storage.files import StateDictSource
from lightning_mm5d.storage.replacement import is_checkpoint_directory
from lightning_mm5d.trainer.checkpoints import SavedRun, made_checkpoints
from lightning_mm5d.trainer.feature import Feature
from lightning_mm5d.trainer.kept_shards import has_kept_shards
from lightning_mm5d.trainer.process_strategy import ProcessStrategy, required
from lightning_mm5d.trainer.resume import Resume
from lightning_mm5d.trainer.validation import lost_weights

T = TypeVar("T")
_CKPT_PATH = "ckpt_path"  # of `Trainer.fit`, and of what it has a launcher run


def _on_parts(method: Callable[..., T]) -> Callable[..., T]:
    """Have a method of a strategy see what this rank holds, also when a hook calls it that sees full tensors."""

    @wraps(method)
    def called(self: CheckpointStrategy, *args: Any, **kwargs: Any) -> T:
        session, use = self._session, f"strategy.{method.__name__}()"
        with nullcontext() if session is None else session.guard.suspended(use):
            try:
                return method(self, *args, **kwargs)
            except RuntimeError as error:  # of a connection, in a callback that saves after a failure
                cause = None if self._guard is None else self._guard.monitor.cause
                if cause is None or not (type(error) is RuntimeError or isinstance(error, dist.DistError)):
                    raise
                what = f"{use} needs all ranks, and others have ended, so that no checkpoint is written"
                raise RankLostError(f"{what}: {cause['line']}") from error

    return called


class CheckpointStrategy(ProcessStrategy, ABC):
    """Saves and loads what the ranks of a run hold together.

    Args:
        processes: arguments of `ProcessStrategy`, in its order.
        fields: of the strategy, by name, of which features own some.
        options: keywords of `ProcessStrategy`.

    Attributes:
        copies: of the module, into which callbacks average weights, by names that are the same on all ranks.
    """

    _features: tuple[Feature, ...]

    def __init__(self, *processes: Any, fields: Mapping[str, Any], **options: Any) -> None:
        super().__init__(*processes, **options)
        vars(self).update(owned(fields))
        self._fit_plan: Plan | None = None
        self._last_plan: Plan | None = None
        self._failed = False
        self._resume = Resume()
        self._checkpoints = made_checkpoints(self._open_reports, fields)
        self._stores: dict[str, dist.Store] = {}  # one for each thread that may use it
        self.copies: Mapping[str, nn.Module] = {}
        self._saving = ExitStack()  # of hooks after a run

    def _open_reports(
        self, topic: str, timeout: timedelta | None = None, *, connection: str = "checkpoints"
    ) -> RankReports:
        has_ranks = dist.is_initialized() or (self._guard is not None and connection != "checkpoints")
        world = self.world_size if has_ranks else 1
        if connection not in self._stores and world > 1:
            self._stores[connection] = dist.PrefixStore(connection, self.new_store())
        limit, store = self._timeout if timeout is None else timeout, self._stores.get(connection)
        return RankReports(store, topic, rank=self.global_rank, world_size=world, timeout=limit)

    @override
    def run_guarded(
        self,
        function: Callable[..., Any],
        trainer: pl.Trainer | None,
        reports: Connection | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        def begun(*args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(function).bind(*args, **kwargs)
            if (
                trainer is not None
                and trainer.state.fn == TrainerFn.FITTING
                and _CKPT_PATH in bound.signature.parameters
            ):
                path = self._checkpoints.newest_in_memory(self.global_rank, self.world_size, self.num_processes)
                if path is not None:
                    bound.arguments[_CKPT_PATH] = os.fspath(path)
            return function(*bound.args, **bound.kwargs)

        return super().run_guarded(begun, trainer, reports, *args, **kwargs)

    @property
    def _wire(self) -> torch.device:
        """Where messages of the default group live, also after a run has moved the module to host memory."""
        return message_device(self.root_device)

    # --- saving ---

    def state_of_copy(self, name: str) -> Mapping[str, Any]:
        """Return what a checkpoint holds of one of the `copies` of the module; collective."""
        plan = required(self._last_plan, "state_of_copy", "Copies are cut when a run begins", "Call the trainer first")
        if (in_shards := self._checkpoints.in_shards) is not None:
            return in_shards.state_dict(self.copies[name], plan, self._wire, name)
        buffers = None if self._session is None else self._session.buffers
        return collect_module(self.copies[name], plan, self.global_rank, wire=self._wire, buffers=buffers)

    def _note_position(self, checkpoint: dict[str, Any]) -> None:
        """Add what exact resuming needs; collective."""
        if self._fit_plan is not None and "optimizer_states" in checkpoint:
            trainer, layout = self._module("save_checkpoint").trainer, self._layout_of_states()
            self._resume.collect(trainer, checkpoint, seed=self._seed, layout=layout, device=self.root_device)

    @override
    @_on_parts
    def lightning_module_state_dict(self) -> dict[str, Any]:
        module = self._module("lightning_module_state_dict")
        if self._session is None and self._failed and is_partial(module):
            raise lost_weights()
        if self._session is not None:
            self._session.shared.leave_step()
        elif not self._failed:
            self._meet_after_run()
        if (in_shards := self._checkpoints.in_shards) is not None:
            return in_shards.state_dict(module, self._shards_plan(), self._wire)
        if self._session is None and not self.is_global_zero:
            self._let_hooks_end(module)
        return self.full_state_dict()

    def _meet_after_run(self) -> None:
        """Wait for all ranks where no monitor watches over a wait any more.

        Raises:
            RankLostError: a rank has not come.
        """
        limit = min(self._timeout, self._watchdog)
        try:
            self._open_reports("save after a run", limit).exchange("call", None)
        except RankLostError as error:
            fix = "Call it on all ranks, not under trainer.is_global_zero: rank 0 alone writes the file"
            raise RankLostError(f"trainer.save_checkpoint after a run: {str(error).split(': ')[-1]}. {fix}") from error

    def _let_hooks_end(self, module: pl.LightningModule) -> None:
        """Let hooks of a save after a run end where they read weights: rank 0 has these, and writes the file."""
        self._saving.close()
        for owner in (module, *vars(module.trainer)["callbacks"]):
            hook = owner.on_save_checkpoint

            @wraps(hook)
            def called(*args: Any, hook: Callable[..., object] = hook) -> None:
                with suppress(RemoteParameterError):
                    hook(*args)

            self._saving.callback(put(owner, "on_save_checkpoint", called))

    @_on_parts
    def full_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict, on rank 0 with full tensors; collective, so that all ranks call it.

        Those that rank 0 did not hold are in host memory. On other ranks it has what these hold, and placeholders.
        """
        module, plan = self._module("full_state_dict"), self._shards_plan()
        if plan is None:
            return module.state_dict()
        buffers = None if self._session is None else self._session.buffers
        with self._exact() as rounded:
            state = collect_module(module, plan, self.global_rank, wire=self._wire, buffers=buffers)
            clones = {id(value): value.clone() for value in state.values() if rounded and _address(value) in rounded}
        return {name: clones.get(id(value), value) for name, value in state.items()}

    def _exact(self) -> AbstractContextManager[frozenset[int]]:
        return nullcontext(frozenset()) if self._session is None else self._session.shared.exact()

    def _shards_plan(self) -> Plan | None:
        """Return the plan whose shards the module has on this rank; None where it is whole."""
        if self._session is not None:
            return self._session.plan
        if has_kept_shards(self._module("state_dict")):
            return self._last_plan
        # states of optimizers are shared also where no parameter is
        in_shards, fitted = self._checkpoints.in_shards is not None, self._fit_plan
        shares = in_shards and fitted is not None and DataShards(fitted).exist
        return self._last_plan if shares else None

    @override
    @_on_parts
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        module, plan = self._module("optimizer_state"), self._fitted("optimizer_state")
        inner = getattr(optimizer, "optimizer", optimizer)
        if (in_shards := self._checkpoints.in_shards) is not None:
            number = next(n for n, candidate in enumerate(self.optimizers) if candidate is optimizer)
            return in_shards.optimizer_state(inner, number)
        return collect_optimizer(inner, module, plan, self.global_rank, self._wire)

    @override
    @_on_parts
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        self._saving.close()
        self._note_position(checkpoint)
        if self.is_global_zero:
            for feature in self._features:
                feature.saving(checkpoint, self._module("save_checkpoint"))
        in_shards = self._checkpoints.in_shards
        if in_shards is None:
            write = partial(super().save_checkpoint, checkpoint, filepath, storage_options)
            self._checkpoints.together("full save", write)  # an error of rank 0 is one on all ranks
            return
        module, session = self._module("save_checkpoint"), self._session
        trainer, optimizers = module.trainer, [getattr(outer, "optimizer", outer) for outer in self.optimizers]
        fields = {"step": trainer.global_step, "epoch": trainer.current_epoch, "layout": self._layout_fields()}
        with self._exact():
            run = SavedRun(
                module=module,
                optimizers=optimizers,
                plan=self._shards_plan(),
                buffers=None if session is None else session.buffers,
                wire=self._wire,
                fields={**fields, "optimizers": [type(optimizer).__name__ for optimizer in optimizers]},
                averages=self.copies,
                goes_on=session is not None,
            )
            in_shards.save(checkpoint, filepath, run)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            self._checkpoints.remove(filepath, self.checkpoint_io.remove_checkpoint)

    @abstractmethod
    def _layout_fields(self) -> dict[str, Any]:
        """Return the layout as JSON, for people who look at a checkpoint."""

    # --- loading ---

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return what the file holds, equal on all ranks; collective where ranks are connected.

        Raises:
            RankMismatchError: ranks have read unequal files, or some could not read theirs.
            CheckpointCorruptError: it is not as it was written.
            CheckpointUntrustedError: it would run code.
        """
        checkpoint = self._load_good(checkpoint_path, weights_only)
        # a process that only waited for ranks has a module without a trainer
        trainer = private(self._module("load_checkpoint"), "_trainer")
        fits = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if fits and (seed := self._resume.load(checkpoint)) is not None:
            self._seed = seed
        return checkpoint

    def _load_good(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        """Return what the file or folder holds, or an earlier one where it is damaged and the user allows that."""
        candidates, problem = [path], None
        for candidate in candidates:  # it grows
            load = self._load_folder if is_checkpoint_directory(candidate) else self._load_file
            try:
                return load(candidate, weights_only)
            except CheckpointCorruptError as error:
                if problem is None:
                    problem = error
                    candidates += self._checkpoints.earlier(path)
                if candidate is candidates[-1]:
                    raise problem from None
                following = candidates[candidates.index(candidate) + 1]
                warnings.warn(f"{candidate} is damaged, so that {following} is loaded: {error}", stacklevel=2)
        raise AssertionError("the last candidate is returned or raises")

    def _load_folder(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        checkpoint, files = self._checkpoints.load(path, weights_only=weights_only is not False)
        if self._agreement is not None:
            self._agreement.check("checkpoint", files)
        return checkpoint

    def _load_file(self, checkpoint_path: Any, weights_only: bool | None) -> dict[str, Any]:
        checkpoint: dict[str, Any] = {}
        failed: Exception | None = None
        try:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        except Exception as error:
            failed = error
        if self._agreement is not None:
            outcome = "read" if failed is None else f"not read ({type(failed).__name__}: {failed})"[:300]
            self._agreement.check("reading a checkpoint", {"checkpoint": outcome})
            self._agreement.check("checkpoint", fingerprint(checkpoint))
        if failed is not None:
            raise failed
        return checkpoint

    @override
    @_on_parts
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True, **kwargs: Any) -> None:
        module, state = self._module("load_model_state_dict"), checkpoint["state_dict"]
        is_wider = self.main_params is not None or isinstance(self.precision_plugin, DoublePrecision)
        if self._session is None and is_wider:
            self._converted(module)  # or what is loaded now would be rounded
        plan, in_setup = self._shards_plan(), self._session is None and self.must_load_in_setup(module)
        before_run = self._session is None and not in_setup
        if self._checkpoints.take_weights(module, state, plan, strict=strict, before_run=before_run):
            if self._session is not None:
                self._load_waiting()
        elif in_setup:
            self.load_in_setup(StateDictSource(state), strict=strict)
        elif self._session is None:  # before anything is cut
            module.load_state_dict(state, strict=strict)
        else:
            load_module(module, state, strict, self._session.plan, self.global_rank)

    def _load_waiting(self) -> None:
        """Read the weights that were to be loaded once the module is cut; collective."""
        module, plan = self._module("load_model_state_dict"), self._run("load_model_state_dict").plan
        self._checkpoints.load_waiting(module, plan, self.global_rank)

    @override
    @_on_parts
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any], **kwargs: Any) -> None:
        module, plan = self._module("load_optimizer_state_dict"), self._fitted("load_optimizer_state_dict")
        states = checkpoint["optimizer_states"]
        load = partial(load_optimizers, self.optimizers, states, module, plan, self.global_rank)
        self._checkpoints.load_states(module, load)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        trainer, replica = self._module("on_train_start").trainer, self._run("on_train_start").plan.layout
        self._resume.begin(
            trainer,
            layout=self._layout_of_states(),
            device=self.root_device,
            replica=replica.replicas_of_rank(self.global_rank)[0],
            rank=self.global_rank,
        )
        self._checkpoints.attach(trainer)

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._resume.on_validation(self._module("on_validation_start").trainer)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._resume.end()
        self._checkpoints.finish()

    @override
    def teardown(self) -> None:
        try:
            self._checkpoints.close(failed=self._failed)
        finally:
            super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_checkpoints": None, "_stores": {}, "copies": {}, "_saving": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._checkpoints, self._saving = made_checkpoints(self._open_reports, vars(self)), ExitStack()

    def _layout_of_states(self) -> dict[str, Any]:
        """Return what decides which random numbers each rank draws."""
        layout = self._fitted("save_checkpoint").layout
        return {
            "ranks": {name: list(ranks) for name, ranks in layout.ranks.items()},
            "sizes": {name: list(sizes) for name, sizes in layout.axes.items()},
            "device": self.root_device.type,
        }

    def _fitted(self, method: str) -> Plan:
        # of the last fit, also after it: another may come out then, because it depends on what is trainable
        return required(self._fit_plan, method, "Optimizers exist from the start of a fit on", "Call trainer.fit first")


def _address(value: Any) -> int | None:
    return value.data_ptr() if isinstance(value, Tensor) and not is_remote(value) else None
