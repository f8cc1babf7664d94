"""Tells which memories have contents that nobody defined, once all recorded operations are replayed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

import torch

from lightning_mm5d.weights.recorded import Memory, Operation, View


class Undefined(Enum):
    """Why the contents of a memory are not defined."""

    EMPTY = "it is as torch.empty made it, in full or in part"
    META = "it was made on the meta device, and is not written in full"
    FROM_META = "it is computed from a tensor of the meta device, which has no contents"


def undefined_memories(operations: Sequence[Operation], memories: Mapping[int, Memory]) -> dict[int, Undefined]:
    """The memories whose final contents are not defined in full."""
    why = {number: Undefined.META for number, memory in memories.items() if memory.undefined}
    views: dict[int, list[View]] = {}
    for operation in operations:
        if "empty" in operation.name:
            why |= dict.fromkeys(operation.writes, Undefined.EMPTY)
            continue
        source = _worst(why[memory] for memory in operation.reads - operation.writes if memory in why)
        for memory in operation.writes:
            if source is not None:
                why[memory] = source
            elif memory in operation.overwrites:
                why.pop(memory, None)
            elif memory in why:
                views.setdefault(memory, []).extend(v for v in operation.overwritten_views() if v.memory == memory)
                if _together(views[memory], memories[memory]):
                    why.pop(memory)
    return why


def _worst(reasons: Iterable[Undefined]) -> Undefined | None:
    """What becomes of contents that are computed from contents that are undefined for these reasons."""
    found = set(reasons)
    if not found:
        return None
    return Undefined.EMPTY if found == {Undefined.EMPTY} else Undefined.FROM_META


def _together(views: Sequence[View], memory: Memory) -> bool:
    """Whether the views reach each element of a memory."""
    if len({view.dtype for view in views}) != 1:
        return False
    reached = torch.zeros(memory.n_bytes // views[0].dtype.itemsize, dtype=torch.bool)
    for view in views:
        reached.as_strided(view.size, view.stride, view.offset).fill_(True)
    return bool(reached.all())
