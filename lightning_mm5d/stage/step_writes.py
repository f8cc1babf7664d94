"""What modules write on themselves during one run of a stage, and what of it the run must not read.

A call of a boundary or of a layer may write attributes, such as an auxiliary loss or a statistic. A stage that has a
stand-in for the call has older values there. So the stage that makes a call notes what it writes (`attributes` and
`written`), the first time for each structure of batches; that travels with its results. Where a later stage stands in
for the call, such an attribute holds what the call wrote if that is a tensor of one number, through which gradients go
back, and else a `RemoteValue`, until the step ends. So a step that reads one that stays with its rank raises
`RemoteParameterError`, and a step that does not is left alone.

Buffers and parameters are not meant: gradients and the sharing of buffers see to them. Not seen are writes that a
structure's first call does not make, and objects that modules share (a list in a closure).

In a stage that is not the last, the first step of each structure goes on after its layers only to look for what later
stages need: what it writes there is put back (`Tail`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mm5d.partition.parts import holds_metrics, is_lightnings
from lightning_mm5d.sharded.remote_value import Guard, Origin, is_remote, marked
from lightning_mm5d.sharded.torch_internals import version_of
from lightning_mm5d.stage.payload import Packer, copies, rebuild, unsharded
from lightning_mm5d.stage.remote import buffers_in, copied_buffers
from lightning_mm5d.stage.runtime import Runtime, Written

_MODULE_NAMES = frozenset(vars(nn.Module())) | {"forward"}
_PLAIN = (bool, int, float, str, tuple)
_MISSING = object()
Attributes = dict[tuple[str, str], Any]
Row = tuple[Written, list[Tensor | None]]
"""An attribute, and what each call wrote there in this run: None where it stays with its rank."""


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


class StepWrites(StaleAttributes):
    """The attributes that calls of one run write.

    Args:
        runtime: the patched module, which keeps what is known.
        structure: key of the batches that take the same way through the stage.
    """

    def __init__(self, runtime: Runtime, structure: Any) -> None:
        super().__init__(runtime.root, runtime.guard)
        self._runtime, self._structure = runtime, structure
        self._received: dict[str, list[Row]] = {}
        self._own_rows: dict[str, list[Row]] = {}
        self._skipped: Counter[str] = Counter()

    def accept(self, rows: Iterable[Any], tensors: list[Tensor]) -> None:
        """Take what calls in an earlier stage write, as `described` gave it there."""
        for call, call_rows in rows:
            self._received[call] = [
                ((path, name, is_list), [None if value is None else rebuild(value, tensors) for value in values])
                for path, name, is_list, values in call_rows
            ]

    def noted(self, call: str, path: str, *, is_whole: bool) -> AbstractContextManager[None]:
        """Enter around a call, a boundary's or a layer's, that may write on the module at `path` and in it.

        Args:
            call: name of the boundary, or path of the layer.
            path: of the module.
            is_whole: whether what it computes here is of whole samples and no stand-in.
        """
        writes_nothing = self._runtime.written.get((self._structure, call)) == []
        return nullcontext() if writes_nothing else self._noted(call, path, is_whole=is_whole)

    @contextmanager
    def _noted(self, call: str, path: str, *, is_whole: bool) -> Iterator[None]:
        known, key, root = self._runtime.written, (self._structure, call), self._runtime.root
        before = None if key in known else attributes(root.get_submodule(path), path)
        yield
        if before is not None:
            changed = written(before, attributes(root.get_submodule(path), path))
            known[key] = [(attribute, _missing(_number(root, attribute))) for attribute in changed]
        if call not in self._own_rows:
            self._own_rows[call] = [(attribute, []) for attribute, _ in known[key]]
        for (_, missing), (attribute, values) in zip(known[key], self._own_rows[call], strict=True):
            if missing is None or not is_whole:
                values.append(None)
                continue
            number = _number(root, attribute)
            values.append(unsharded(copies(missing if number is None else number)))

    def skipped(self, call: str) -> None:
        """From now on, until `restore`, let attributes hold what `call` wrote in another stage, or a remote value."""
        if call not in self._received:
            return
        number = self._skipped[call]
        self._skipped[call] += 1
        for attribute, values in self._received[call]:
            value = values[number] if number < len(values) else None
            self.mark(attribute, None if value is None else copies(value))

    def described(self, packer: Packer, boundaries: Iterable[str], layers_of: str | None) -> list[Any]:
        """Return what is sent to a later stage.

        Args:
            packer: takes the tensors.
            boundaries: names of those whose results it takes.
            layers_of: the modality whose layers it continues, if any.
        """
        rows = {} if layers_of is None else dict(self._received)  # the end of the step may be further on
        for name in boundaries:
            rows[name] = [*self._of(name), *self._in_layers(self._runtime.modality_of[name])]
        rows |= {path: self._of(path) for path in self._paths(layers_of)}
        return [
            [call, [[*attribute, [packer.describe(value) for value in values]] for attribute, values in call_rows]]
            for call, call_rows in rows.items()
            if call_rows
        ]

    def _in_layers(self, modality: str) -> list[Row]:
        """What the layers of earlier stages of an encoder wrote, which its boundary in this stage did not write."""
        return [row for path in self._paths(modality) for row in self._received.get(path, ())]

    def _of(self, call: str) -> list[Row]:
        return self._received.get(call) or self._own_rows.get(call, [])

    def _paths(self, modality: str | None) -> Iterable[str]:
        parts = self._runtime.partition.parts.get(modality) if modality else None
        return () if parts is None else parts.paths


def _number(root: nn.Module, attribute: Written) -> Tensor | None:
    """The tensor of one number that an attribute holds; None where it holds something else."""
    value = vars(root.get_submodule(attribute[0])).get(attribute[1])
    if not isinstance(value, Tensor) or value.numel() != 1 or value.layout != torch.strided or is_remote(value):
        return None
    return value


def _missing(number: Tensor | None) -> Tensor | None:
    """Return NaN in the form of `number`, which an attribute held after the first call.

    It is sent where a later call leaves no number there, because all payloads of a structure have the same tensors.
    """
    return None if number is None else torch.full_like(number, torch.nan, requires_grad=number.requires_grad)


class Tail:
    """Remembers, where it is made, the attributes and buffers that the rest of a step may write.

    Lists and other objects that the step changes in place stay changed.

    Args:
        root: the LightningModule.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root, self._attributes = root, dict(vars(root))
        self._buffers = ExitStack()
        self._buffers.enter_context(copied_buffers(buffers_in(root)))

    def undo(self) -> None:
        """Put all back."""
        vars(self._root).clear()
        vars(self._root).update(self._attributes)
        self._buffers.close()

    def keep(self) -> None:
        """Let what was written stay, for a further pass, but in buffers that took values of later stages."""
        modules = [*self._root.modules()]
        written = [dict(module._buffers) for module in modules]
        self._buffers.close()
        for module, buffers in zip(modules, written, strict=True):
            for name, buffer in buffers.items():
                before = module._buffers[name]
                if buffer is None or before is None or is_remote(buffer) or is_remote(before):
                    continue
                if version_of(buffer):  # counted as a write, which the kernels of a batch norm are not
                    before.detach().copy_(buffer)
                else:
                    before.data.copy_(buffer)
