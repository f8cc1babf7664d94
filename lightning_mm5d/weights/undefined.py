"""Tells which memories have contents that nobody defined, once all recorded operations are replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lightning_mm5d.weights.recorded import Memory, Operation, Undefined, View


def undefined_memories(operations: Sequence[Operation], memories: Mapping[int, Memory]) -> dict[int, Undefined]:
    """The memories whose final contents are not defined in full."""
    why = {number: memory.undefined for number, memory in memories.items() if memory.undefined is not None}
    views: dict[int, list[View]] = {}  # what was overwritten of memories that are not defined in full

    def reason(memory: int) -> Undefined | None:
        if memory in views and _together(views[memory], memories[memory]):
            del views[memory], why[memory]
        return why.get(memory)

    for operation in operations:
        reasons = {reason(memory) for memory in operation.reads - operation.writes} - {None}
        for memory in operation.writes:
            if reasons:
                why[memory] = Undefined.EMPTY if reasons == {Undefined.EMPTY} else Undefined.FROM_META
            elif memory in operation.overwrites:
                why.pop(memory, None)
                views.pop(memory, None)
            elif memory in why:
                views.setdefault(memory, []).extend(v for v in operation.overwritten_views() if v.memory == memory)
    return {memory: found for memory in list(why) if (found := reason(memory)) is not None}


def _together(views: Sequence[View], memory: Memory) -> bool:
    """Whether the views reach each element of a memory."""
    if len({view.dtype for view in views}) != 1:
        return False
    reached = torch.zeros(memory.n_bytes // views[0].dtype.itemsize, dtype=torch.bool)
    for view in views:
        reached.as_strided(view.size, view.stride, view.offset).fill_(True)
    return bool(reached.all())
