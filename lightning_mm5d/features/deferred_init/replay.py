"""Replays recorded operations so that few memories exist at a time.

1. **Slice**: from the last operation back, keep what the wanted memories need. An operation that overwrites a memory in
   full ends the need for what was there before, so a weight that is initialised twice is made once. Random operations
   whose result nobody needs are kept as mere draws: they advance the generator on memory that is dropped at once.
2. **Order**: random operations keep their order. Every other operation moves up to where its last input is ready, so
   that a copy of a model does not keep the whole model waiting.
3. **Run**: each memory is made when first touched. It is final, and handed over and freed, when last touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, UntypedStorage

from lightning_mm5d.features.deferred_init.recorded import Memory, Operation, View, leaves, mapped

# Random operators that draw as many numbers as their inputs' values demand.
DRAWS_BY_VALUE = ("multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet")


@dataclass(frozen=True, slots=True)
class Step:
    """One recorded operation in the order of replay; `dropped` means that only its random draws matter."""

    index: int
    operation: Operation
    dropped: bool

    @property
    def draws_by_value(self) -> bool:
        """Whether the values of its arguments tell how many numbers it draws."""
        return any(name in self.operation.name for name in DRAWS_BY_VALUE)

    @property
    def touched(self) -> frozenset[int]:
        return frozenset() if self.dropped else self.operation.reads | self.operation.writes


def sliced(operations: Sequence[Operation], wanted: Iterable[int], draws: bool) -> list[Step]:
    """The operations that the final contents of `wanted` need, in their recorded order.

    Args:
        operations: everything recorded.
        wanted: the memories whose final contents are asked for.
        draws: whether random operations that nobody needs are kept, as mere draws.
    """
    live = set(wanted)
    steps: list[Step] = []
    for index in range(len(operations) - 1, -1, -1):
        operation = operations[index]
        needed = not live.isdisjoint(operation.writes)
        if not needed and not (draws and operation.draw):
            continue
        step = Step(index, operation, dropped=not needed)
        if not needed and step.draws_by_value:
            step = Step(index, operation, dropped=False)
        if not step.dropped:
            live -= operation.overwrites
            live |= operation.reads
        steps.append(step)
    return steps[::-1]


def ordered(steps: Sequence[Step]) -> list[Step]:
    """The steps with each deterministic one moved up to right after the last step that it depends on."""
    when: dict[int, int] = {}
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for step in steps:
        operation, index = step.operation, step.index
        after: list[int] = []
        if not step.dropped:
            after += [writer[m] for m in operation.reads | operation.writes if m in writer]
            after += [reader for m in operation.writes for reader in readers.get(m, ())]
            for memory in operation.writes:
                writer[memory], readers[memory] = index, []
            for memory in operation.reads - operation.writes:
                readers.setdefault(memory, []).append(index)
        when[index] = index if operation.draw or not after else max(when[i] for i in after)
    return sorted(steps, key=lambda step: (when[step.index], step.index))


@dataclass
class States:
    """States of generators before and after random operations, by the operation's index."""

    before: dict[int, Tensor] = field(default_factory=dict)
    after: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Replay:
    """One replay: the memories that exist at the moment, and what is still to come.

    Args:
        memories: every recorded memory.
        steps: what to run, from `sliced`.
        generators: for each random source, the generator to draw from; it already has its first state.
        known: states of the generators at each random operation; none means that they draw from one stream.
        noted: where to note these states.
        final: called with each memory of `kept` once it is final.
        kept: the memories that are asked for.
    """

    memories: Mapping[int, Memory]
    steps: Sequence[Step]
    generators: Sequence[Generator]
    kept: frozenset[int]
    final: Callable[[int, UntypedStorage], None]
    known: States | None = None
    noted: States | None = None
    _storages: dict[int, UntypedStorage] = field(default_factory=dict)
    _after: dict[int, Tensor] = field(default_factory=dict)

    def run(self, ends: Mapping[int, Tensor | int] | None = None) -> None:
        """Run all steps, then give generators the states of `ends`, by the index of their source."""
        steps = ordered(self.steps)
        last = {memory: position for position, step in enumerate(steps) for memory in step.touched}
        marks = {
            step.operation.draw.restore
            for step in steps
            if step.operation.draw and _is_mark(step.operation.draw.restore)
        }
        marks |= {end for end in (ends or {}).values() if isinstance(end, int)}
        for memory in self.kept - last.keys():
            self._hand_over(memory)
        dtype = torch.get_default_dtype()
        try:
            for position, step in enumerate(steps):
                self._run(step)
                draw = step.operation.draw
                if draw and (step.index in marks or self.noted is not None):
                    (self.noted.after if self.noted else self._after)[step.index] = self.generators[
                        draw.source
                    ].get_state()
                for memory in step.touched:
                    if last[memory] == position:
                        self._hand_over(memory)
        finally:
            torch.set_default_dtype(dtype)
        for source, end in (ends or {}).items():
            self.generators[source].set_state(self._state(end))

    def _hand_over(self, memory: int) -> None:
        if memory in self.kept:
            self.final(memory, self._storage(memory))
        self._storages.pop(memory, None)

    def _storage(self, memory: int) -> UntypedStorage:
        if memory not in self._storages:
            self._storages[memory] = _made(self.memories[memory])
        return self._storages[memory]

    def _run(self, step: Step) -> None:
        operation = step.operation
        torch.set_default_dtype(operation.default_dtype)
        scratch: dict[int, UntypedStorage] = {}

        def storage(memory: int) -> UntypedStorage:
            if not step.dropped:
                return self._storage(memory)
            if memory not in scratch:
                scratch[memory] = _made(self.memories[memory])
            return scratch[memory]

        def value(item: Any) -> Any:
            return item.tensor(storage(item.memory)) if isinstance(item, View) else item

        args = mapped(value, operation.args)
        kwargs = {name: mapped(value, item) for name, item in operation.kwargs.items()}
        if operation.draw is not None:
            generator = self._ready(step)
            if "generator" in kwargs:
                kwargs["generator"] = generator
        with torch.no_grad():
            made = operation.function(*args, **kwargs)
        if not step.dropped:
            inputs = {
                t.untyped_storage().data_ptr() for t in leaves([args, list(kwargs.values())]) if isinstance(t, Tensor)
            }
            for view, tensor in zip(operation.results, leaves(made), strict=False):
                if view is not None:
                    self._keep(operation, view, tensor, inputs)

    def _ready(self, step: Step) -> Generator:
        """The generator of a random operation, in the state that it had there."""
        draw = step.operation.draw
        assert draw is not None
        generator = self.generators[draw.source]
        if self.known is not None:
            generator.set_state(self.known.before[step.index])
        elif draw.restore is not None:
            generator.set_state(self._state(draw.restore))
        if self.noted is not None:
            self.noted.before[step.index] = generator.get_state()
        return generator

    def _state(self, restore: Tensor | int) -> Tensor:
        if not isinstance(restore, int):
            return restore
        return self._after[restore] if self.noted is None else self.noted.after[restore]

    def _keep(self, operation: Operation, view: View, made: Tensor, inputs: set[int]) -> None:
        """Make the memory of a result, by taking over what was made where it has the recorded geometry."""
        if tuple(made.shape) != view.size or made.dtype != view.dtype:
            raise RuntimeError(
                f"{operation.name} made a tensor of shape {tuple(made.shape)} and {made.dtype} where it was recorded "
                f"with {view.size} and {view.dtype}, so its shape depends on random values"
            )
        storage = made.untyped_storage()
        same = made.stride() == view.stride and made.storage_offset() == view.offset and not made.is_conj()
        if same and storage.nbytes() == self.memories[view.memory].n_bytes and storage.data_ptr() not in inputs:
            self._storages[view.memory] = storage
            return
        view.tensor(self._storage(view.memory)).copy_(made)


def _is_mark(restore: Tensor | int | None) -> bool:
    return isinstance(restore, int)


def _made(memory: Memory) -> UntypedStorage:
    if memory.initial is not None:
        return memory.initial.clone().untyped_storage()
    return torch.zeros(memory.n_bytes, dtype=torch.uint8, device=memory.device).untyped_storage()
