"""Random generators while nothing is drawn: where each recorded draw stands in its generator's stream.

A recorded operation draws nothing, so a state that user code saves and sets again (`fork_rng`) would say nothing.
So the generator moves on by one number at each recorded operation. Each state that it passes stands for "after
operation i".
A state that it did not pass was set by the user's code (`torch.manual_seed`), and replay sets it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Generator, Tensor

from lightning_mm5d.config.errors import private
from lightning_mm5d.weights.recorded import Draw


def default_generator(device: torch.device) -> Generator:
    """The generator that operations on `device` draw from where they are given none."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    if not module.default_generators:
        module.init()
    return module.default_generators[index]


@contextmanager
def unmoved(generators: Sequence[Generator]) -> Iterator[None]:
    """Give generators their states back at the end."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def same(one: Generator, other: Generator) -> bool:
    """Whether two objects are one generator; operators are given generators in wrappers of their own."""
    return bool(private(one, "_cdata") == private(other, "_cdata"))


class RandomSource:
    """One generator, from the first recorded operation that would draw from it."""

    def __init__(self, generator: Generator, index: int) -> None:
        self.generator, self.index = generator, index
        self.start = generator.get_state()
        self._passed: dict[bytes, int | None] = {_key(self.start): None}
        self._now = _key(self.start)

    @property
    def stands_for(self) -> Generator | torch.device:
        """The generator; its device where it is that device's default."""
        device = self.generator.device
        return device if same(default_generator(device), self.generator) else self.generator

    def draw(self, operation: int) -> Draw:
        """Note that the operation of this index draws now."""
        draw = Draw(self.index, self.changed())
        torch.rand((), generator=self.generator, device=self.generator.device)
        self._now = _key(self.generator.get_state())
        self._passed[self._now] = operation
        return draw

    def changed(self) -> Tensor | int | None:
        """What the user's code set the state to since the last draw, none if nothing."""
        state = self.generator.get_state()
        key = _key(state)
        if key == self._now:
            return None
        self._now = key
        passed = self._passed.get(key, state)
        return self.start if passed is None else passed

    def rewind(self) -> None:
        """Give the generator the state from before recording."""
        self.generator.set_state(self.start)
        self._now = _key(self.start)


def _key(state: Tensor) -> bytes:
    return state.numpy().tobytes()
