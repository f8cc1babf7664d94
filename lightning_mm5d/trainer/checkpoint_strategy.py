"""Checkpoints of a strategy: what Lightning asks for when it saves and loads, and whom it is delegated to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mm5d.checkpoint.fingerprint import fingerprint
from lightning_mm5d.checkpoint.huggingface_record import describe, with_record
from lightning_mm5d.checkpoint.module_state import collect_module, is_partial, load_module
from lightning_mm5d.checkpoint.optimizer_state import collect_optimizer, load_optimizers
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.storage.source import StateDictSource
from lightning_mm5d.trainer.process_group import message_device
from lightning_mm5d.trainer.resume import Resume
from lightning_mm5d.trainer.session import Session
from lightning_mm5d.trainer.validation import lost_weights, required
from lightning_mm5d.trainer.weights_strategy import WeightsStrategy


class CheckpointStrategy(WeightsStrategy):
    """Saves and loads what the ranks of a run hold together.

    Args:
        processes: arguments of `ProcessStrategy`, in its order.
        checkpoint: ``"full"`` or ``"sharded"``.
        async_checkpoint: whether training goes on while a sharded checkpoint is written.
        on_corrupt_checkpoint: ``"raise"``, or load the ``"previous"`` good checkpoint.
        options: keywords of `ProcessStrategy`.
    """

    def __init__(
        self,
        *processes: Any,
        checkpoint: Literal["full", "sharded"],
        async_checkpoint: bool,
        on_corrupt_checkpoint: Literal["raise", "previous"],
        **options: Any,
    ) -> None:
        super().__init__(*processes, **options)
        self.checkpoint, self.async_checkpoint = checkpoint, async_checkpoint
        self.on_corrupt_checkpoint = on_corrupt_checkpoint
        self._fit_plan: Plan | None = None
        self._last_plan: Plan | None = None
        self._failed = False
        self._described: tuple[pl.LightningModule, dict[str, Any]] | None = None
        self._resume = Resume()

    # --- saving ---

    def _note_position(self, checkpoint: dict[str, Any]) -> None:
        """Add what exact resuming needs; collective."""
        trainer = self._module("save_checkpoint").trainer
        if self._fit_plan is not None and "optimizer_states" in checkpoint:
            self._resume.collect(
                trainer,
                checkpoint,
                seed=self._seed,
                layout=self._layout_of_states(),
                device=self.root_device,
                wire=message_device(self.root_device),
            )

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        module = self._module("lightning_module_state_dict")
        if self._session is None:
            if self._failed and is_partial(module):
                raise lost_weights()
            return module.state_dict()
        return collect_module(module, self._session.plan, self.global_rank, buffers=self._session.buffers)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        module, plan = self._module("optimizer_state"), self._fitted("optimizer_state")
        inner = getattr(optimizer, "optimizer", optimizer)
        return collect_optimizer(inner, module, plan, self.global_rank, message_device(self.root_device))

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        self._note_position(checkpoint)
        if self.is_global_zero:
            with_record(checkpoint, self._models_record())
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _models_record(self) -> dict[str, Any]:
        """What a checkpoint says of the Hugging Face models in the module, described once for each module."""
        module = self._module("save_checkpoint")
        if self._described is None or self._described[0] is not module:
            trainer = module.trainer
            self._described = module, describe(module, getattr(trainer, "datamodule", None))
        return self._described[1]

    # --- loading ---

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return what the file holds, equal on all ranks; collective where ranks are connected.

        Raises:
            RankMismatchError: ranks have read unequal files, or some could not read theirs.
        """
        checkpoint: dict[str, Any] = {}
        failed: Exception | None = None
        try:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        except Exception as error:
            failed = error
        if self._agreement is not None:
            found = "read" if failed is None else f"not read ({type(failed).__name__}: {failed})"[:300]
            self._agreement.check("reading a checkpoint", {"checkpoint": found})
            self._agreement.check("checkpoint", fingerprint(checkpoint))
        if failed is not None:
            raise failed
        module = self._module("load_checkpoint")
        if module.trainer.state.fn == TrainerFn.FITTING and (seed := self._resume.load(checkpoint)) is not None:
            self._seed = seed
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True, **kwargs: Any) -> None:
        module = self._module("load_model_state_dict")
        if self._session is None and self.must_load_in_setup(module):
            self.load_in_setup(StateDictSource(checkpoint["state_dict"]), strict=strict)
        elif self._session is None:  # before anything is cut
            module.load_state_dict(checkpoint["state_dict"], strict=strict)
        else:
            load_module(module, checkpoint["state_dict"], strict, self._session.plan, self.global_rank)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any], **kwargs: Any) -> None:
        module, plan = self._module("load_optimizer_state_dict"), self._fitted("load_optimizer_state_dict")
        load_optimizers(self.optimizers, checkpoint["optimizer_states"], module, plan, self.global_rank)

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

    def _layout_of_states(self) -> dict[str, Any]:
        """Return what decides which random numbers each rank draws."""
        layout = self._fitted("save_checkpoint").layout
        return {
            "ranks": {name: list(ranks) for name, ranks in layout.ranks.items()},
            "sizes": {name: list(sizes) for name, sizes in layout.axes.items()},
            "device": self.root_device.type,
        }

    # --- what a call needs ---

    def _module(self, method: str) -> pl.LightningModule:
        rule = "The strategy has no module before a trainer is given one"
        return required(self.lightning_module, method, rule, "Call trainer.fit, validate, test or predict first")

    def _run(self, method: str) -> Session:
        rule = "It is called while the trainer fits, validates, tests or predicts, and nothing runs now"
        return required(self._session, method, rule, "Call the trainer, or the method of the module itself on rank 0")

    def _fitted(self, method: str) -> Plan:
        # of the last fit, also after it: another may come out then, because it depends on what is trainable
        return required(self._fit_plan, method, "Optimizers exist from the start of a fit on", "Call trainer.fit first")
