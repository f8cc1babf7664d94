"""Attributes that an encoder or a layer writes on modules while it computes, such as an auxiliary loss or a statistic.

A stage that skips the call has older values there. `attributes` and `written` find what a call wrote where it is made,
and `StaleAttributes` puts what was sent of it, or a `RemoteValue`, in its place elsewhere until the step ends. So a
step that reads one that stays with its rank raises `RemoteParameterError`, and a step that does not is left alone.
`StepWrites` says when.

Buffers and parameters are not meant: gradients and the sharing of buffers see to them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_mm5d.partition.parts import holds_metrics, is_lightnings
from lightning_mm5d.sharded.remote_value import Guard, Origin, marked

_MODULE_NAMES = frozenset(vars(nn.Module())) | {"forward"}
_PLAIN = (bool, int, float, str, tuple)
_MISSING = object()
Written = tuple[str, str, bool]  # path of the module, name of the attribute, and whether it is a list
Attributes = dict[tuple[str, str], Any]


def attributes(module: nn.Module, path: str) -> Attributes:
    """Return what all modules in `module`, which is at `path`, hold beside parameters, buffers and submodules.

    Metrics are left out, because ranks add up their states after the step.
    """
    return {
        (where, name): _state(value)
        for where, part in module.named_modules(prefix=path)
        if not holds_metrics(part)
        for name, value in vars(part).items()
        if name not in _MODULE_NAMES and not is_lightnings(part, name)
    }


def written(before: Attributes, after: Attributes) -> list[Written]:
    """Return the attributes that were written between two calls of `attributes`."""
    return [
        (path, name, isinstance(state, list))
        for (path, name), state in sorted(after.items(), key=lambda item: item[0])
        if not _equal(before.get((path, name), _MISSING), state)
    ]


class StaleAttributes:
    """The attributes in which this rank has older values than the step has written.

    Args:
        root: the LightningModule.
        guard: of its remote values.
    """

    def __init__(self, root: nn.Module, guard: Guard) -> None:
        self._root, self._guard = root, guard
        self._marks: list[tuple[nn.Module, str, Any, Any]] = []
        self._aside: list[tuple[nn.Module, str, Any]] = []

    def mark(self, attribute: Written, value: Any) -> None:
        """Let an attribute hold `value`, or a remote value in place of None."""
        path, name, is_list = attribute
        module = self._root.get_submodule(path)
        if value is None:
            value = marked(torch.full((1,), torch.nan), Origin(f"{path}.{name}".lstrip("."), self._guard))
            value = [value] if is_list else value
        self._marks.append((module, name, value, vars(module).get(name, _MISSING)))
        vars(module)[name] = value

    def lay_aside(self) -> None:
        """Put back what was there while another microbatch is computed."""
        self._aside = [mark[:3] for mark in self._marks]
        self.restore()

    def take_up(self) -> None:
        """Undo `lay_aside`."""
        aside, self._aside = self._aside, []
        for module, name, value in aside:
            self._marks.append((module, name, value, vars(module).get(name, _MISSING)))
            vars(module)[name] = value

    def restore(self) -> None:
        """Put back what was there, except where the step itself wrote something else."""
        for module, name, value, before in reversed(self._marks):
            if vars(module).get(name) is not value:
                continue
            if before is _MISSING:
                del vars(module)[name]
            else:
                vars(module)[name] = before
        self._marks.clear()


def _state(value: Any) -> Any:
    if isinstance(value, list):
        return [*value]
    if isinstance(value, Tensor) and not value.is_inference():
        return value, value._version
    return value


def _equal(before: Any, after: Any) -> bool:
    if isinstance(before, (list, tuple)) and type(before) is type(after):
        return len(before) == len(after) and all(map(_equal, before, after))
    return before is after or (type(before) is type(after) and isinstance(after, _PLAIN) and before == after)
