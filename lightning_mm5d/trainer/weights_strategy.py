"""Where the weights of a strategy's module come from: contexts that record how it is built, and what `setup` makes of
the record."""

from __future__ import annotations

from abc import ABC
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_mm5d.checkpoint.module_state import is_partial
from lightning_mm5d.data.random_state import kept_random_state
from lightning_mm5d.data_parallel.main_parameters import convert, give_main
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.backends import message_device
from lightning_mm5d.storage.source import TensorSource
from lightning_mm5d.trainer.configured import is_configured
from lightning_mm5d.trainer.kept_shards import has_kept_shards, release_shards
from lightning_mm5d.trainer.main_precision import main_dtype
from lightning_mm5d.trainer.module_weights import ModuleWeights, has_memory, make_in_full, with_unrecorded
from lightning_mm5d.trainer.process_strategy import ProcessStrategy
from lightning_mm5d.trainer.validation import lost_weights
from lightning_mm5d.weights import DeferredInit, DeferredWeights
from lightning_mm5d.weights.later_writes import LaterWrites


class WeightsStrategy(ProcessStrategy, ABC):
    """Builds modules without memory, and gives each rank its own weights in `setup`.

    Args:
        processes: arguments of `ProcessStrategy`, in its order.
        options: keywords of `ProcessStrategy`.
    """

    def __init__(self, *processes: Any, **options: Any) -> None:
        super().__init__(*processes, **options)
        self._recorder: DeferredInit | None = None
        self._recorded: list[DeferredWeights] = []  # what other processes have recorded
        self._written: LaterWrites | None = None
        self._is_recording = False
        self._builds = False  # between `setup_environment` and `setup`
        self._loads: list[tuple[TensorSource, bool]] = []
        self.main_params: str | None = None

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._builds = True

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Record how a module is built, in `configure_model` and with `empty_init`; elsewhere build it as usual."""
        if not (empty_init or self._builds) or self._is_recording:
            with super().tensor_init_context(empty_init=False if self._is_recording else empty_init):
                yield
            return
        self._recorder = self._recorder or DeferredInit()
        self._written = self._written or LaterWrites(self._recorder)
        self._is_recording = True
        try:
            with self._written, self._recorder, super().tensor_init_context(empty_init=False):
                yield
        finally:
            self._is_recording = False

    def load_in_setup(self, source: TensorSource, *, strict: bool) -> None:
        """Load a source of full tensors once each rank knows what it holds."""
        self._loads.append((source, strict))

    def must_load_in_setup(self, module: pl.LightningModule) -> bool:
        """Whether tensors of `module` have no memory yet, or are shards, so that nothing can be loaded into them."""
        return not has_memory(module) or is_partial(module) or has_kept_shards(module)

    def build_in_full(self, module: pl.LightningModule) -> None:
        """Build what `configure_model` and recorded contexts describe, with memory for all; values will be replaced.

        A process that only waits for ranks calls it, before it gets their weights.
        """
        with kept_random_state(self.root_device):
            if not is_configured(module):
                with self.precision_plugin.module_init_context():
                    module.configure_model()
            make_in_full(module, self._deferred(module))

    def _converted(self, module: pl.LightningModule) -> pl.LightningModule:
        """Convert `module` to the trainer's precision, and what is trained beside it to that of main parameters."""
        convert(module, partial(self.precision_plugin.convert_module, module), main_dtype(self.main_params))
        return module

    def _end_recording(self) -> None:
        """Note what was recorded of the module, before anything converts it."""
        module = self.lightning_module
        assert module is not None
        if self._written is not None:
            self._written.end()
        self._recorded, self._recorder, self._written, self._builds = self._deferred(module), None, None, False

    def _take_weights(self, module: pl.LightningModule, plan: Plan) -> None:
        """Give `module` the weights that this rank holds; collective."""
        wire = message_device(self.root_device)
        weights = ModuleWeights(module, plan, self.global_rank, device=self.root_device, wire=wire)
        if not release_shards(module):
            if self.reduce_boolean_decision(self.is_global_zero and is_partial(module), all=False):
                raise lost_weights()
            weights.share()
            recorded = with_unrecorded(module, self._recorded)  # all, so that ranks draw the same numbers
            weights.drop_remote()
            for record in recorded:
                weights.make(record)
            if (dtype := main_dtype(self.main_params)) is not None:
                give_main(module, dtype)
        for source, strict in self._loads:
            weights.load(source, strict=strict)
        self._forget()

    def _deferred(self, module: pl.LightningModule) -> list[DeferredWeights]:
        return [*self._recorded, *([] if self._recorder is None else [self._recorder.weights(module)])]

    def _forget(self) -> None:
        self._recorder, self._written, self._recorded, self._loads, self._builds = None, None, [], [], False

    @override
    def teardown(self) -> None:
        module = self._lightning_module
        if module is not None and not has_memory(module):
            self._lightning_module = None  # a run that failed before `setup`: nothing can be moved off the device
        try:
            super().teardown()
        finally:
            self._lightning_module = module
            self._forget()

    def __getstate__(self) -> dict[str, Any]:
        if self.lightning_module is not None:  # spawned ranks get what this process keeps alive meanwhile
            self._end_recording()
        return {**super().__getstate__(), "_recorder": None, "_written": None}
