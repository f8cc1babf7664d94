"""The journal of a construction: which operations made or wrote deferred memory, in which order.

It grows while modules are built. `value` computes from it what a deferred tensor holds now; `read_by` then names what
first asked for a random value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
from lightning_mm5d.features.deferred_init.replay import Replay, States, Step, sliced


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
        own = [self.memories.device(t) if self.memories.holds(t) else t.device for t in tensors]
        own = [CPU if device == META else device for device in own]
        return next((device for t, device in zip(tensors, own, strict=True) if t.dim()), own[0] if own else CPU)

    def note(self, call: Call, made: list[Any]) -> None:
        """Write a call down, with the meta tensors that it made; all that it writes is in known memory."""
        device = self.device(call)
        if call.signature.empty:
            for item in made:
                self.memories.add(item, device, empty=True)
            return
        results = tuple(self._result(item, device) for item in made)
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
        found: list[UntypedStorage] = []
        generators = [source.generator for source in self.sources]
        with unmoved(generators):
            if any(step.operation.draw for step in steps):
                self.read_by = self.read_by or asked_by
                self._draw_until_now(table, asked_by)
            kept = frozenset([view.memory])
            Replay(table, steps, generators, kept, lambda _, s: found.append(s), known=self._states).run()
        return view.tensor(found[0])

    def _draw_until_now(self, table: dict[int, Memory], asked_by: str) -> None:
        """Draw what the operations so far draw, and note the states of their generators."""
        steps = [
            Step(index, operation, dropped=True)
            for index, operation in enumerate(self.operations[self._drawn :], self._drawn)
            if operation.draw
        ]
        for step in steps:
            if step.draws_by_value:
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
        Replay(table, steps, generators, frozenset(), lambda *_: None, noted=self._states).run()
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
