"""Tells which memories have contents that nobody defined, once all recorded operations are replayed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from lightning_mm5d.weights.recorded import Memory, Operation, Undefined, View


def undefined_memories(
    operations: Sequence[Operation], memories: Mapping[int, Memory], used: Iterable[View]
) -> dict[int, Undefined]:
    """The memories of which a view in `used` has final contents that are not defined in full."""
    why = {number: memory.undefined for number, memory in memories.items() if memory.undefined is not None}
    views: dict[int, list[View]] = {}  # what was overwritten of memories that are not defined in full

    def reason(memory: int, wanted: Sequence[View] = ()) -> Undefined | None:
        if memory in views and _reached(views[memory], memories[memory], wanted):
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
    wanted: dict[int, list[View]] = {}
    for view in used:
        wanted.setdefault(view.memory, []).append(view)
    return {memory: found for memory, of in wanted.items() if (found := reason(memory, of)) is not None}


def _reached(views: Sequence[View], memory: Memory, wanted: Sequence[View]) -> bool:
    """Whether the views reach each element of the wanted views; of the memory, if none are given."""
    if len({view.dtype for view in [*views, *wanted]}) != 1:
        return False
    reached = torch.zeros(memory.n_bytes // views[0].dtype.itemsize, dtype=torch.bool)
    for view in views:
        reached.as_strided(view.size, view.stride, view.offset).fill_(True)
    return all(bool(reached.as_strided(v.size, v.stride, v.offset).all()) for v in wanted) and bool(
        wanted or reached.all()
    )
