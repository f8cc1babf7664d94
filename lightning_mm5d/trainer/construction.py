"""How modules are built, and who gives values to tensors without memory: a door for the feature that knows how.

The core builds modules as their code says, and refuses what has no memory. A feature that `config.features` lists with
``builds`` has a module ``construction`` with ``CONSTRUCTION``, a subclass of `Construction` that takes its place.

`configured` runs `configure_model` before a run, on a copy of the module without memory, for plans and early refusals.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from lightning_mm5d.config.errors import ConfigError, private
from lightning_mm5d.config.features import FEATURES, parts
from lightning_mm5d.data.random_state import kept_random_state
from lightning_mm5d.plan.plan import Plan

_log = logging.getLogger(__name__)
_ATTRIBUTE = "_mm5d_configured"
_Module = TypeVar("_Module", bound=nn.Module)
_CONTAINERS = (dict, OrderedDict, set, list)


class Construction:
    """Builds modules for one strategy, each tensor with its memory and values.

    A run calls, on each process, `building` around all code that builds the module, then `end`, `make` and `forget`. It
    may be pickled between `end` and `make`, together with the module.
    """

    def building(self) -> AbstractContextManager[object]:
        """Enter where a run builds its module: in `configure_model`, and with ``init_module(empty_init=True)``."""
        return nullcontext()

    def without_memory(self) -> AbstractContextManager[object]:
        """Enter where a module is built whose values do not matter; a feature spares their memory."""
        return nullcontext()

    def end(self, module: pl.LightningModule) -> None:
        """`module` is built, and nothing has converted it."""

    def make(
        self, module: pl.LightningModule, plan: Plan, rank: int, *, device: torch.device, wire: torch.device
    ) -> None:
        """Give tensors of `module` without memory what this rank holds of their values; collective.

        Args:
            module: of which tensors with memory are equal on all ranks.
            plan: all stages.
            rank: global rank.
            device: where this rank computes.
            wire: where messages of the default group live.

        Raises:
            ConfigError: nothing says what the value of a tensor is.
        """
        self.make_in_full(module)

    def make_in_full(self, module: pl.LightningModule) -> None:
        """Give all tensors of `module` without memory their full values.

        Raises:
            ConfigError: nothing says what the value of a tensor is.
        """
        tensors = [*module.named_parameters(), *module.named_buffers()]
        if name := next((name for name, tensor in tensors if tensor.is_meta), None):
            feature = next(feature.name for feature in FEATURES if feature.builds)
            rule = f"Such a tensor gets its value from the feature {feature!r}, and this installation comes without it"
            fix = "Build the module outside of torch.device('meta'), or install the whole package"
            raise ConfigError(name, "a tensor of the meta device", rule, fix)

    def forget(self) -> None:
        """The run is over, or its module has its weights."""


def made_construction() -> Construction:
    """Return how a strategy builds modules: as the feature does that builds them, or for real where it is not there."""
    return next((module.CONSTRUCTION() for module in parts("construction")), Construction())


def has_memory(root: nn.Module) -> bool:
    """Whether all parameters and buffers have memory, here or on other ranks."""
    return not any(tensor.is_meta for tensor in (*root.parameters(), *root.buffers()))


def is_configured(module: pl.LightningModule) -> bool:
    """Whether a module is as a run would have it: it has no `configure_model`, or is a copy on which it has run."""
    return _ATTRIBUTE in vars(module) or not is_overridden("configure_model", module)


def configured(module: pl.LightningModule, precision: Precision) -> pl.LightningModule:
    """Return `module`, or a copy without memory on which `configure_model` has run.

    `configure_model` runs again where it has run before; Lightning asks that nothing changes then.
    """
    if is_configured(module):
        return module
    clone = copy_without_memory(module)
    with kept_random_state(), made_construction().without_memory(), precision.module_init_context():
        clone.configure_model()
    vars(clone)[_ATTRIBUTE] = True
    return clone


def try_configured(module: pl.LightningModule, precision: Precision) -> pl.LightningModule | None:
    """Return what `configured` returns, or None where `configure_model` cannot run yet, as before `prepare_data`."""
    try:
        return configured(module, precision)
    except ConfigError:
        raise
    except Exception as error:  # a user's code
        _log.debug("configure_model is left to the run: %r", error)
        return None


def copy_without_memory(module: _Module) -> _Module:
    """Return modules of the same classes and names, whose tensors are on the meta device; tied ones stay tied.

    The values of all other attributes are shared with `module`; what is set or added on the copy is not there.
    """
    return _copy(module, {})


def _copy(module: _Module, memo: dict[int, Any]) -> _Module:
    if id(module) in memo:
        return memo[id(module)]
    clone = memo[id(module)] = object.__new__(type(module))
    for name, value in vars(module).items():
        vars(clone)[name] = type(value)(value) if type(value) in _CONTAINERS else value
    for name, tensor in module._parameters.items():
        clone._parameters[name] = None if tensor is None else _empty(tensor, memo)
    for name, buffer in module._buffers.items():
        clone._buffers[name] = None if buffer is None else _empty(buffer, memo)
    for name, child in module._modules.items():
        clone._modules[name] = None if child is None else _copy(child, memo)
    if isinstance(clone, Metric):  # its constructor wraps methods, which would write to the original's states
        state = clone.__getstate__()
        vars(clone).clear()
        clone.__setstate__(state)
        for name in private(clone, "_defaults"):  # an update in place stays with the copy
            value = vars(clone)[name]
            vars(clone)[name] = value.clone() if isinstance(value, Tensor) else [*value]
    return clone


def _empty(tensor: Tensor, memo: dict[int, Any]) -> Any:
    if id(tensor) not in memo:
        if is_lazy(tensor) or tensor.is_meta:
            memo[id(tensor)] = tensor
        else:
            empty: Any = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = empty
    return memo[id(tensor)]
