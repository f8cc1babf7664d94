"""How a rank comes to its own weights.

The module is built in contexts of `trainer.construction`, without memory where a feature can make its weights later. In
`setup`, on all ranks: (1) tensors with memory get the values of rank 0; (2) those without are made, cut to this rank's
shards; (3) weights in files and state dicts take their place. A module that kept its shards after a run has phase 3
alone.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_mm5d.checkpoint.module_state import equalize, is_partial, load_local
from lightning_mm5d.data.random_state import kept_random_state
from lightning_mm5d.data_parallel.main_parameters import convert, give_main
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.backends import message_device
from lightning_mm5d.storage.source import TensorSource
from lightning_mm5d.trainer.construction import has_memory, is_configured, made_construction
from lightning_mm5d.trainer.kept_shards import has_kept_shards, release_shards
from lightning_mm5d.trainer.main_precision import main_dtype
from lightning_mm5d.trainer.process_strategy import ProcessStrategy
from lightning_mm5d.trainer.validation import lost_weights


class WeightsStrategy(ProcessStrategy, ABC):
    """Builds modules, and gives each rank its own weights in `setup`.

    Args:
        processes: arguments of `ProcessStrategy`, in its order.
        options: keywords of `ProcessStrategy`.
    """

    def __init__(self, *processes: Any, **options: Any) -> None:
        super().__init__(*processes, **options)
        self._construction = made_construction()
        self._is_building = False
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
        """Say how a module is built, in `configure_model` and with `empty_init`; elsewhere build it as usual."""
        if not (empty_init or self._builds) or self._is_building:
            with super().tensor_init_context(empty_init=False if self._is_building else empty_init):
                yield
            return
        self._is_building = True
        try:
            with self._construction.building(), super().tensor_init_context(empty_init=False):
                yield
        finally:
            self._is_building = False

    def load_in_setup(self, source: TensorSource, *, strict: bool) -> None:
        """Load a source of full tensors once each rank knows what it holds."""
        self._loads.append((source, strict))

    def must_load_in_setup(self, module: pl.LightningModule) -> bool:
        """Whether tensors of `module` have no memory yet, or are shards, so that nothing can be loaded into them."""
        return not has_memory(module) or is_partial(module) or has_kept_shards(module)

    def build_in_full(self, module: pl.LightningModule) -> None:
        """Build what `configure_model` and such contexts describe, with memory for all; values will be replaced.

        A process that only waits for ranks calls it, before it gets their weights.
        """
        with kept_random_state(self.root_device):
            if not is_configured(module):
                with self.precision_plugin.module_init_context():
                    module.configure_model()
            self._construction.make_in_full(module)

    def _converted(self, module: pl.LightningModule) -> pl.LightningModule:
        """Convert `module` to the trainer's precision, and what is trained beside it to that of main parameters."""
        convert(module, partial(self.precision_plugin.convert_module, module), main_dtype(self.main_params))
        return module

    def _end_construction(self) -> None:
        """The module is built; called before anything converts it."""
        assert self.lightning_module is not None
        self._construction.end(self.lightning_module)
        self._builds = False

    def _take_weights(self, module: pl.LightningModule, plan: Plan) -> None:
        """Give `module` the weights that this rank holds; collective."""
        wire = message_device(self.root_device)
        if not release_shards(module):
            if self.reduce_boolean_decision(self.is_global_zero and is_partial(module), all=False):
                raise lost_weights()
            equalize(module, wire)
            self._construction.make(module, plan, self.global_rank, device=self.root_device, wire=wire)
            if (dtype := main_dtype(self.main_params)) is not None:
                give_main(module, dtype)
        for source, strict in self._loads:
            loaded = load_local(module, source, plan, self.global_rank)
            if strict:
                loaded.check(module)
        self._forget()

    def _forget(self) -> None:
        self._construction.forget()
        self._loads, self._builds = [], False

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
            self._end_construction()
        return super().__getstate__()
