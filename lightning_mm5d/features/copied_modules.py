"""Deep copies of parts of the module during a run: of a teacher, of an average of weights.

What a run puts into modules (callables in front of theirs, hooks, numbers of heads) belongs to these very objects: a
copy would compute with the weights of the module that it was copied from. Hooks of users see full weights. So a copy
that is made in one is what one process would have copied. Elsewhere a rank has parts of the weights, and a copy whose
callables belong to another module is refused.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_mm5d.partition.parts import holds_metrics
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.remote_value import Guard
from lightning_mm5d.stage import StageError
from lightning_mm5d.trainer.feature import Attached, Feature, Running

_COPY = "__deepcopy__"
_MISSING = object()
_TENSORS = frozenset(("_parameters", "_buffers", "_modules"))


class CopiesOfModules(Feature):
    """Has no field: it stands before copies that a user makes during a run."""

    def check(self, module: pl.LightningModule, plan: Plan, device: torch.device) -> None:
        """Note what modules have before a run changes them; the last check is that of the run."""
        self._copies = CopiedModules(module)

    def attach(self, running: Running) -> Attached | None:
        """Take what has changed since; all other features come before this one."""
        self._copies.attach(running.runtime.guard)
        return self._copies


class CopiedModules(Attached):
    """Lets deep copies of the submodules of `module` be as they are when this object is made, with weights of then.

    Args:
        module: the LightningModule, before a run changes it.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._before = {
            path: (child, _attributes(child))
            for path, child in module.named_modules()
            if path and not holds_metrics(child) and not hasattr(child, _COPY)
        }

    def attach(self, guard: Guard) -> None:
        """Take what has changed since this object was made as the run's."""
        for path, (module, before) in self._before.items():
            changes = {
                name: (value, before.get(name, _MISSING))
                for name, value in _attributes(module).items()
                if not _same(value, before.get(name, _MISSING))
            }
            if changes:
                self.put_attribute(module, _COPY, _Copy(path, module, changes, guard))
        for path, (module, _) in self._before.items():
            if _COPY not in vars(module) and hasattr(module, _COPY):  # it has the attributes of a module inside
                self.put_attribute(module, _COPY, _Copy(path, module, {}, guard))


class _Copy:
    """Makes copies of one module.

    Args:
        path: of the module.
        module: that has this object as an attribute.
        changes: by the names of attributes, what the run has put there, and what was there before.
        guard: knows whether all weights are shown.
    """

    def __init__(self, path: str, module: nn.Module, changes: Mapping[str, tuple[Any, Any]], guard: Guard) -> None:
        self._path, self._module, self._changes, self._guard = path, module, changes, guard

    def __call__(self, memo: dict[int, Any]) -> Any:
        if not self._guard.shows_full and any(map(_is_of_another, self._now().values())):
            raise StageError(
                f"{self._path} is copied where this rank has parts of the weights, and its copy would compute with "
                "those of the original: copy it in a hook, such as on_fit_start, or before the fit"
            )
        attributes = vars(self._module)
        saved = dict(attributes)
        shown = self._as_before() if self._guard.shows_full else saved
        try:
            attributes.clear()
            attributes.update({**shown, _COPY: None})
            copied = copy.deepcopy(self._module, memo)
            vars(copied).pop(_COPY)
            return copied
        finally:
            attributes.clear()
            attributes.update(saved)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # pickles of a module are read where no run is

    def _now(self) -> dict[str, Any]:
        """What the run has put there, where nobody has put something else."""
        values = {name: (value, vars(self._module).get(name)) for name, (value, _) in self._changes.items()}
        return {name: value for name, (value, now) in values.items() if now is value or isinstance(value, OrderedDict)}

    def _as_before(self) -> dict[str, Any]:
        """The attributes of the module without what the run has put there."""
        plain = dict(vars(self._module))
        for name, value in self._now().items():
            before = self._changes[name][1]
            if isinstance(value, OrderedDict):  # of hooks: those that came later are the user's
                plain[name] = OrderedDict(
                    (key, hook) for key, hook in plain[name].items() if key in before or key not in value
                )
            elif before is _MISSING:
                del plain[name]
            else:
                plain[name] = before
        return plain


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module but its tensors and submodules, and copies of its dicts of hooks."""
    attributes = {name: value for name, value in vars(module).items() if name not in _TENSORS}
    return {name: OrderedDict(value) if isinstance(value, OrderedDict) else value for name, value in attributes.items()}


def _same(value: Any, before: Any) -> bool:
    both_hooks = isinstance(value, OrderedDict) and isinstance(before, OrderedDict)
    return value.keys() == before.keys() if both_hooks else value is before


def _is_of_another(value: Any) -> bool:
    """Whether a copied attribute, or a hook in it, would go on with the module that it was copied from."""
    if isinstance(value, OrderedDict):
        return any(isinstance(hook, partial) and isinstance(hook.func, MethodType) for hook in value.values())
    return isinstance(value, FunctionType)


FEATURE = CopiesOfModules
