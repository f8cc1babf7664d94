"""The journal of a construction: which operations made or wrote deferred memory, in which order.

It grows while modules are built. `value` computes from it what a deferred tensor holds now; `read_by` then names what
first asked for a random value.

Replays recorded operations so that few memories exist at a time.

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

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.features.deferred_init.recorded import (
    CPU,
    META,
    Draw,
    Memories,
    Memory,
    Operation,
    RandomSource,
    Signature,
    View,
    default_generator,
    leaves,
    mapped,
    same,
    unmoved,
)


@dataclass(frozen=True, slots=True)
class Step:
    """One recorded operation in the order of replay; `dropped` means that only its random draws matter."""

    index: int
    operation: Operation
    dropped: bool

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
        step = Step(index, operation, dropped=not needed and not operation.draws_by_value)
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
        states: of the generators at random operations.
        repeats: whether each random operation draws from the state that `states` has; else they draw from one stream.
        notes: whether the states of all random operations are noted there; else only those that later ones need.
        final: called with each memory of `wanted` once it is final.
        wanted: the memories that are asked for.
    """

    memories: Mapping[int, Memory]
    steps: Sequence[Step]
    generators: Sequence[Generator]
    wanted: frozenset[int]
    final: Callable[[int, UntypedStorage], None]
    states: States = field(default_factory=States)
    repeats: bool = False
    notes: bool = False
    _storages: dict[int, UntypedStorage] = field(default_factory=dict)

    def run(self, ends: Mapping[int, Tensor | int] | None = None) -> None:
        """Run all steps, then give generators the states of `ends`, by the index of their source."""
        steps = ordered(self.steps)
        last = {memory: position for position, step in enumerate(steps) for memory in step.touched}
        marks = {
            step.operation.draw.restore
            for step in steps
            if step.operation.draw and isinstance(step.operation.draw.restore, int)
        }
        marks |= {end for end in (ends or {}).values() if isinstance(end, int)}
        for memory in self.wanted - last.keys():
            self._hand_over(memory)
        dtype = torch.get_default_dtype()
        try:
            for position, step in enumerate(steps):
                self._run(step)
                draw = step.operation.draw
                if draw and (step.index in marks or self.notes):
                    self.states.after[step.index] = self.generators[draw.source].get_state()
                for memory in step.touched:
                    if last[memory] == position:
                        self._hand_over(memory)
        finally:
            torch.set_default_dtype(dtype)
        for source, end in (ends or {}).items():
            self.generators[source].set_state(self._state(end))

    def _hand_over(self, memory: int) -> None:
        if memory in self.wanted:
            self.final(memory, self._storage(memory))
        self._storages.pop(memory, None)

    def _storage(self, memory: int) -> UntypedStorage:
        if memory not in self._storages:
            self._storages[memory] = _initial_storage(self.memories[memory])
        return self._storages[memory]

    def _run(self, step: Step) -> None:
        operation = step.operation
        torch.set_default_dtype(operation.default_dtype)
        scratch: dict[int, UntypedStorage] = {}

        def storage(memory: int) -> UntypedStorage:
            if not step.dropped:
                return self._storage(memory)
            if memory not in scratch:
                scratch[memory] = _initial_storage(self.memories[memory])
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
            results = operation.function(*args, **kwargs)
        if not step.dropped:
            inputs = {
                t.untyped_storage().data_ptr() for t in leaves([args, list(kwargs.values())]) if isinstance(t, Tensor)
            }
            for view, tensor in zip(operation.results, leaves(results), strict=False):
                if view is not None:
                    self._keep(operation, view, tensor, inputs)

    def _ready(self, step: Step) -> Generator:
        """The generator of a random operation, in the state that it had there."""
        draw = step.operation.draw
        assert draw is not None
        generator = self.generators[draw.source]
        if self.repeats:
            generator.set_state(self.states.before[step.index])
        elif draw.restore is not None:
            generator.set_state(self._state(draw.restore))
        if self.notes:
            self.states.before[step.index] = generator.get_state()
        return generator

    def _state(self, restore: Tensor | int) -> Tensor:
        return self.states.after[restore] if isinstance(restore, int) else restore

    def _keep(self, operation: Operation, view: View, fresh: Tensor, inputs: set[int]) -> None:
        """Make the memory of a result, by taking over what was made where it has the recorded geometry."""
        if tuple(fresh.shape) != view.size or fresh.dtype != view.dtype:
            raise RuntimeError(
                f"{operation.name} made a tensor of shape {tuple(fresh.shape)} and {fresh.dtype} where it was recorded "
                f"with {view.size} and {view.dtype}, so its shape depends on random values"
            )
        storage = fresh.untyped_storage()
        same = fresh.stride() == view.stride and fresh.storage_offset() == view.offset and not fresh.is_conj()
        if same and storage.nbytes() == self.memories[view.memory].n_bytes and storage.data_ptr() not in inputs:
            self._storages[view.memory] = storage
            return
        view.tensor(self._storage(view.memory)).copy_(fresh)


def _initial_storage(memory: Memory) -> UntypedStorage:
    if memory.initial is not None:
        return memory.initial.clone().untyped_storage()
    return torch.zeros(memory.n_bytes, dtype=torch.uint8, device=memory.device).untyped_storage()


@dataclass(frozen=True)
class Call:
    """A call of an operator as user code made it."""

    function: Callable[..., Any]
    signature: Signature
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return [item for item in leaves([list(self.args), list(self.kwargs.values())]) if isinstance(item, Tensor)]

    @property
    def written(self) -> list[Tensor]:
        """The arguments that the operator writes."""
        named = self.signature.named(self.args, self.kwargs)
        return [t for name, item in named if name in self.signature.written for t in leaves(item) if t is not None]

    def mapped(self, function: Callable[[Any], Any], **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with `function` applied to each; of `options`, those that the call has are replaced."""
        kwargs = self.kwargs | {name: value for name, value in options.items() if name in self.kwargs}
        return mapped(function, tuple(self.args)), {name: mapped(function, item) for name, item in kwargs.items()}


class Journal:
    """Recorded operations, the memories that they work on and the generators that they draw from."""

    def __init__(self) -> None:
        self.memories = Memories()
        self.operations: list[Operation] = []
        self.sources: list[RandomSource] = []
        self.ends: dict[int, Tensor | int] = {}
        self.read_by: str | None = None
        self._states = States()
        self._reached: dict[int, Tensor] = {}  # states of the generators after the first `_drawn` operations
        self._drawn = 0

    def device(self, call: Call) -> torch.device:
        """The device on which the results of a call would be."""
        asked = call.kwargs.get("device")
        if asked is not None and asked != META:
            return torch.device(asked)
        tensors = call.tensors
        devices = [self.memories.device(t) if self.memories.holds(t) else t.device for t in tensors]
        devices = [CPU if device == META else device for device in devices]
        return next(
            (device for t, device in zip(tensors, devices, strict=True) if t.dim()), devices[0] if devices else CPU
        )

    def note(self, call: Call, outputs: list[Any]) -> None:
        """Write a call down, with the meta tensors that it made; all that it writes is in known memory."""
        device = self.device(call)
        if call.signature.empty:
            for item in outputs:
                self.memories.add(item, device, empty=True)
            return
        results = tuple(self._result(item, device) for item in outputs)
        new = {view.memory for view in results if view is not None}
        writes = new | {self.memories.known(t) for t in call.written}
        if not writes:
            return  # only a view
        reads, overwritten = self._effects(call)
        args, kwargs = call.mapped(self._meta if call.signature.shape_only else self._frozen, generator=None)
        if call.signature.shape_only or "device" in kwargs:
            kwargs["device"] = device
        operation = Operation(
            function=call.function,
            args=args,
            kwargs=kwargs,
            results=results,
            reads=frozenset(reads),
            writes=frozenset(writes),
            overwrites=frozenset(new | overwritten),
            draw=self._draw(call, device),
            default_dtype=torch.get_default_dtype(),
        )
        self.operations.append(operation)

    def value(self, tensor: Tensor, asked_by: str) -> Tensor:
        """The contents of a deferred tensor now.

        Where they are random, the numbers are drawn up to here by generators of its own. What comes after depends on
        them, so the record then holds for this random state only.

        Raises:
            ConfigError: a draw on the way takes as many numbers as other random values demand.
        """
        view = self.memories.view(tensor)
        steps = sliced(self.operations, [view.memory], draws=False)
        table = self.memories.table()
        storages: list[UntypedStorage] = []
        generators = [source.generator for source in self.sources]
        with unmoved(generators):
            if any(step.operation.draw for step in steps):
                self.read_by = self.read_by or asked_by
                self._draw_until_now(table, asked_by)
            wanted = frozenset([view.memory])
            Replay(table, steps, generators, wanted, lambda _, s: storages.append(s), self._states, repeats=True).run()
        return view.tensor(storages[0])

    def _draw_until_now(self, table: dict[int, Memory], asked_by: str) -> None:
        """Draw what the operations so far draw, and note the states of their generators."""
        steps = [
            Step(index, operation, dropped=True)
            for index, operation in enumerate(self.operations[self._drawn :], self._drawn)
            if operation.draw
        ]
        for step in steps:
            if step.operation.draws_by_value:
                raise ConfigError(
                    "configure_model",
                    f"{asked_by} of a random value, after {step.operation.name}",
                    "Weights are drawn after the module is built, and how many numbers this operation draws is only "
                    "known then",
                    "Build this part in __init__, or compute the number from the module's configuration",
                )
        for source in self.sources:
            source.generator.set_state(self._reached.get(source.index, source.start))
        generators = [source.generator for source in self.sources]
        Replay(table, steps, generators, frozenset(), lambda *_: None, self._states, notes=True).run()
        self._reached = {source.index: source.generator.get_state() for source in self.sources}
        self._drawn = len(self.operations)

    def close(self) -> None:
        """Note what was last set of the generators' states, and give them back the states from before."""
        self.ends = {source.index: end for source in self.sources if (end := source.changed()) is not None}
        for source in self.sources:
            source.rewind()

    def _effects(self, call: Call) -> tuple[set[int], set[int]]:
        """The memories whose contents a call needs, and those that it overwrites in full."""
        if call.signature.shape_only:
            return set(), set()
        unread = call.signature.unread
        reads: set[int] = set()
        covered: set[int] = set()
        for name, argument in call.signature.named(call.args, call.kwargs):
            for t in leaves(argument):
                if not isinstance(t, Tensor) or not self.memories.holds(t):
                    continue
                overwritten = name in unread and self.memories.covered(t)
                (covered if overwritten else reads).add(self.memories.known(t))
        return reads, covered - reads

    def _draw(self, call: Call, device: torch.device) -> Draw | None:
        if not call.signature.random:
            return None
        generator: Generator | None = call.kwargs.get("generator")
        generator = default_generator(device) if generator is None else generator
        source = next((source for source in self.sources if same(source.generator, generator)), None)
        if source is None:
            source = RandomSource(generator, len(self.sources))
            self.sources.append(source)
        return source.draw(len(self.operations))

    def _result(self, item: Any, device: torch.device) -> View | None:
        """The view of a tensor that a call made, none where it lies in memory that was there."""
        if not isinstance(item, Tensor) or self.memories.holds(item):
            return None
        self.memories.add(item, device)
        return self.memories.view(item)

    def _frozen(self, item: Any) -> Any:
        """An argument as it is kept: a view, a copy of a real tensor, or the thing itself."""
        if not isinstance(item, Tensor):
            return item
        return self.memories.view(item) if self.memories.holds(item) else item.detach().clone()

    def _meta(self, item: Any) -> Any:
        return self.memories.twin(item).detach() if isinstance(item, Tensor) else item
