"""Finds every tensor that a module holds: parameters, buffers, and those in plain attributes, wherever they stand.

Plain attributes matter because a tensor without memory must become real there too. They are followed into containers,
plain objects, closures, and modules that are not registered (a teacher in a list).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, Literal

from torch import Tensor, nn

Kind = Literal["parameter", "buffer", "attribute"]
# Objects of these packages hold no tensors that a constructor of user code made, or the whole run.
SKIPPED_PACKAGES = frozenset({"torch", "lightning", "pytorch_lightning", "numpy", "builtins", "lightning_mm5d"})


def tensors_of(module: nn.Module) -> Iterator[tuple[tuple[str, ...], Kind, Tensor]]:
    """All parameters, buffers and tensors in plain attributes, each once with all its names; attributes by path."""
    names: dict[int, list[str]] = {}
    found: dict[int, tuple[Kind, Tensor]] = {}
    kinds: list[tuple[Kind, Iterator[tuple[str, Tensor]]]] = [
        ("parameter", module.named_parameters(remove_duplicate=False)),
        ("buffer", module.named_buffers(remove_duplicate=False)),
        ("attribute", _attributes(module)),
    ]
    for kind, pairs in kinds:
        for name, tensor in pairs:
            names.setdefault(id(tensor), []).append(name)
            found.setdefault(id(tensor), (kind, tensor))
    for key, (kind, tensor) in found.items():
        yield tuple(names[key]), kind, tensor


def _attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are reached through attributes, and are no parameter or buffer."""
    registered = {id(t) for t in [*module.parameters(), *module.buffers()]}
    queue: deque[tuple[str, Any]] = deque(module.named_modules())
    seen: dict[int, Any] = {}  # holds what it has seen, so that no identity is given twice
    while queue:
        path, value = queue.popleft()
        if id(value) in seen or isinstance(value, str | int | float | None):
            continue
        seen[id(value)] = value
        if not isinstance(value, Tensor):
            queue.extend((f"{path}.{name}".lstrip("."), item) for name, item in _within(value))
        elif id(value) not in registered:
            yield path, value


def _within(value: Any) -> Iterable[tuple[object, Any]]:
    """What a value holds, by name."""
    if isinstance(value, nn.Module):
        return [(name, item) for name, item in vars(value).items() if name not in ("_trainer", "_fabric")]
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple | deque | set | frozenset):
        return list(enumerate(value))
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return [(name, cell.cell_contents) for name, cell in cells if _is_filled(cell)]
    if isinstance(value, MethodType):
        return [("__self__", value.__self__)]
    if isinstance(value, type | ModuleType) or type(value).__module__.partition(".")[0] in SKIPPED_PACKAGES:
        return ()
    return list(getattr(value, "__dict__", {}).items())


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
