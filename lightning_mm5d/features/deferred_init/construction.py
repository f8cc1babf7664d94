"""How a run builds modules without memory, and gives each rank its own weights.

`Recording` records how modules are built, in one record for all contexts, until a rank knows what it holds. After a
context and before the run, `load_state_dict` is recorded too, so that its values count. Other writes would be lost,
because there is no memory to write to: `LaterWrites` finds them by the version of each tensor, and refuses them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.features.deferred_init.deferred_init import DeferredInit
from lightning_mm5d.features.deferred_init.deferred_weights import DeferredWeights
from lightning_mm5d.features.deferred_init.module_weights import ModuleWeights, make_in_full, with_unrecorded
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.trainer.construction import Construction


class Recording(Construction):
    """Builds modules without memory, and makes on each rank what it holds."""

    def __init__(self) -> None:
        self._recorder: DeferredInit | None = None
        self._written: LaterWrites | None = None
        self._recorded: list[DeferredWeights] = []  # also what other processes have recorded

    @override
    @contextmanager
    def building(self) -> Iterator[None]:
        self._recorder = self._recorder or DeferredInit()
        self._written = self._written or LaterWrites(self._recorder)
        with self._written, self._recorder:
            yield

    @override
    def without_memory(self) -> DeferredInit:
        return DeferredInit()

    @override
    def end(self, module: pl.LightningModule) -> None:
        if self._written is not None:
            self._written.end()
        self._recorded, self._recorder, self._written = self._deferred(module), None, None

    @override
    def make(
        self, module: pl.LightningModule, plan: Plan, rank: int, *, device: torch.device, wire: torch.device
    ) -> None:
        recorded = with_unrecorded(module, self._recorded)  # all, so that ranks draw the same numbers
        weights = ModuleWeights(module, plan, rank, device=device, wire=wire)
        weights.drop_remote()
        for record in recorded:
            weights.make(record)

    @override
    def make_in_full(self, module: pl.LightningModule) -> None:
        make_in_full(module, self._deferred(module))

    @override
    def forget(self) -> None:
        self._recorded, self._recorder, self._written = [], None, None

    def _deferred(self, module: pl.LightningModule) -> list[DeferredWeights]:
        return [*self._recorded, *([] if self._recorder is None else [self._recorder.weights(module)])]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_recorder": None, "_written": None}


CONSTRUCTION = Recording


class LaterWrites:
    """A context beside that of a recorder, which watches the modules that are built in it.

    Args:
        recorder: goes on recording where a state dict is loaded later.
    """

    def __init__(self, recorder: DeferredInit) -> None:
        self._recorder = recorder
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._versions: dict[tuple[int, str], int] = {}
        self._hooks: dict[int, RemovableHandle] = {}

    def __enter__(self) -> None:
        self._check()
        hooks = (register_module_parameter_registration_hook, register_module_buffer_registration_hook)
        self._watching = [register(self._note) for register in hooks]

    def __exit__(self, *_: object) -> None:
        for hook in self._watching:
            hook.remove()
        for module in filter(None, (ref() for ref in self._modules.values())):
            self._versions |= {(id(module), name): tensor._version for name, tensor in _own(module)}
            if id(module) not in self._hooks:
                self._hooks[id(module)] = module.register_load_state_dict_pre_hook(_Load(self))

    def end(self) -> None:
        """Stop recording; raise ConfigError where a tensor without memory was written to since."""
        for hook in self._hooks.values():
            hook.remove()
        self._check()

    def _check(self) -> None:
        for key, ref in self._modules.items():
            module = ref()
            for name, tensor in _own(module) if module is not None else ():
                if tensor._version != self._versions.get((key, name), tensor._version):
                    raise ConfigError(
                        f"{type(module).__name__}.{name}",
                        "a weight that was written to after the context in which it was built",
                        "It has no memory before a run, so the write is lost",
                        "Write to it in configure_model or inside of the context, or in on_fit_start",
                    )

    def load(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Record that a module's own tensors without memory get the values of a state dict."""
        for name, tensor in _own(module):
            value = state.get(f"{prefix}{name}")
            if not isinstance(value, Tensor) or value.shape != tensor.shape:
                continue
            with self._recorder, torch.no_grad():
                tensor.copy_(value)
            state[f"{prefix}{name}"] = tensor.detach()  # torch would warn of a copy into no memory
            self._versions.pop((id(module), name), None)

    def _note(self, module: nn.Module, name: str, tensor: Tensor | None) -> None:
        known = self._modules.get(id(module))
        if known is None or known() is None:  # an id is taken again when its module is gone
            self._modules[id(module)] = weakref.ref(module)
            self._hooks.pop(id(module), None)


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of `module` itself that have no memory."""
    found = [*module._parameters.items(), *module._buffers.items()]
    return [(name, tensor) for name, tensor in found if tensor is not None and tensor.is_meta]


class _Load:
    """A hook before a module loads a state dict; in another process it does nothing.

    Args:
        writes: records what is loaded.
    """

    def __init__(self, writes: LaterWrites | None) -> None:
        self._writes = writes

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if self._writes is not None:
            self._writes.load(module, state, prefix)

    def __getstate__(self) -> dict[str, Any]:
        return {"_writes": None}
