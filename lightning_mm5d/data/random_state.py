"""Seeds and states of random generators: one way for loading, for the user's step and for sharded dropout.

Every stage runs the user's step for itself, and every rank of a replica loads its batches for itself: augmentation and
noise must come out equal everywhere. So generators are seeded from a key, such as (seed, step, microbatch, replica),
and put back afterwards, so that the code around draws as if nothing had drawn in between.

The random states from which one process would draw the orders of its epochs.

A sampler without a generator of its own draws from the global random state, of which each pass over a dataloader takes
some numbers. To see the batches of one process, ranks draw from such a state too: that of rank 0 when training begins,
advanced as one process advances it. It is not the ranks' own global state, which code on some ranks alone may advance.
It is advanced once an epoch and once a validation, also where callbacks read the dataloader: it is equal on all ranks.

What the steps draw on the CPU does not advance it, so orders equal those of one process up to the first such step.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import RandomSampler

CPU = torch.device("cpu")
_TAG_BITS = 16
_NUMBERS = 2**46
_STREAM = 0x9E3779B97F4A7C15  # odd, so that ranks get seeds that are far apart


def seed_of(*key: int | str) -> int:
    """Return a seed below 2**63 that depends on all of `key`, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1


def drawn_seed(index: int) -> int:
    """Return a seed of rank `index`'s own, from a number drawn from torch's CPU generator, equal on all ranks.

    A layer that is computed again with the generator's former state gets the same seed.
    """
    return _rank_seed(int(torch.randint(_NUMBERS, (), device=CPU)), index)


@contextmanager
def drawing_together(index: int, device: torch.device = CPU) -> Iterator[None]:
    """Draw the same on all ranks meanwhile, where generators have a seed of `drawn_seed`; then go on with another one.

    What is drawn depends on the seed alone, which generators have again where a layer is computed again.
    """
    tagged = (torch.default_generator.initial_seed() - (index + 1) * _STREAM) % 2**63
    number = tagged >> _TAG_BITS
    if _tagged(number) != tagged:  # not a rank's own: all ranks draw the same anyway
        yield
        return
    seed_torch(seed_of("together", number), device)
    try:
        yield
    finally:
        seed_torch(_rank_seed((number + 1) % _NUMBERS, index), device)


def _rank_seed(number: int, index: int) -> int:
    return (_tagged(number) + (index + 1) * _STREAM) % 2**63


def _tagged(number: int) -> int:
    """Return `number` with a check sum, so that seeds of ranks are told from others."""
    return number << _TAG_BITS | seed_of("rank", number) % 2**_TAG_BITS


def seed_all(seed: int, device: torch.device = CPU) -> None:
    """Seed Python's, numpy's and torch's generators, of the CPU and of `device`."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    seed_torch(seed, device)


def seed_torch(seed: int, device: torch.device = CPU) -> None:
    """Seed torch's generators of the CPU and of `device`.

    `torch.manual_seed` would seed all other devices too, and takes a millisecond for a GPU that nobody uses.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)


class StepDraws:
    """What draws in one microbatch of one stage with streams of its own: layers, and boundaries after encoders.

    The step's code around them then draws the same in every stage, wherever they are computed. Each call begins a
    stream of its own, so that a second pass through a stage draws anew.

    Args:
        key: of the microbatch.
        stage: key of the stage.
        device: whose generators are meant, beside those of the CPU.
    """

    def __init__(self, key: tuple[int | str, ...], stage: str, device: torch.device) -> None:
        self._key, self._stage, self._device = key, stage, device
        self._begun = Counter[str]()

    def layers(self) -> None:
        """Begin a stream of the stage's layers."""
        seed_torch(seed_of(*self._key, self._stage, *self._pass("layers")), self._device)

    def backward(self) -> None:
        """Begin the stream of the stage's backward, of Python's and numpy's generators too.

        What it draws then depends neither on what ran before it, which is the schedule's choice, nor on the rank.
        """
        seed_all(seed_of(*self._key, self._stage, "backward"), self._device)

    @contextmanager
    def apart(self, name: str) -> Iterator[None]:
        """Draw from a stream of the boundary `name` meanwhile."""
        states = torch_states(self._device)
        seed_torch(seed_of(*self._key, "boundary", name, *self._pass(f"boundary {name}")), self._device)
        try:
            yield
        finally:
            set_torch_states(states, self._device)

    def _pass(self, name: str) -> tuple[int, ...]:
        """Return what tells a pass from earlier ones: nothing for the first."""
        self._begun[name] += 1
        return () if self._begun[name] == 1 else (self._begun[name] - 1,)


def torch_states(device: torch.device) -> list[Tensor]:
    """Return the states of torch's generators of the CPU and of `device`."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_torch_states(states: list[Tensor], device: torch.device) -> None:
    """Put `torch_states` back."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)


def all_states(device: torch.device) -> tuple[Any, Any, list[Tensor]]:
    """Return the states of Python's, numpy's and torch's generators."""
    return random.getstate(), np.random.get_state(legacy=True), torch_states(device)


def set_all_states(states: tuple[Any, Any, list[Tensor]], device: torch.device) -> None:
    """Put `all_states` back."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    set_torch_states(states[2], device)


def pack_states(states: tuple[Any, Any, list[Tensor]]) -> Tensor:
    """Return what `all_states` returned as bytes ``[N]``, uint8, N equal on all ranks."""
    version, numbers, gauss = states[0]
    _, keys, position, has_gauss, cached = states[1]
    integers = np.array([version, *numbers, gauss is not None, *map(int, keys), position, has_gauss], dtype=np.int64)
    floats = np.array([gauss or 0.0, cached], dtype=np.float64)
    parts = [torch.from_numpy(integers).view(torch.uint8), torch.from_numpy(floats).view(torch.uint8)]
    return torch.cat([*parts, *(state.cpu() for state in states[2])])


def unpack_states(packed: Tensor, device: torch.device) -> None:
    """Put `pack_states` back; the state of another kind of device is left out."""
    packed = packed.cpu()
    count = len(random.getstate()[1])
    size = 8 * (count + 2 + 624 + 2)
    integers = packed[:size].clone().view(torch.int64).tolist()
    gauss, cached = packed[size : size + 16].clone().view(torch.float64).tolist()
    version, numbers, has_own = integers[0], integers[1 : count + 1], integers[count + 1]
    random.setstate((version, tuple(numbers), gauss if has_own else None))
    *keys, position, has_gauss = integers[count + 2 :]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    states = [part.clone() for part in packed[size + 16 :].tensor_split([len(torch.get_rng_state())])]
    set_torch_states(states if device.type == "cuda" and len(states[1]) else states[:1], device)


@contextmanager
def kept_random_state(device: torch.device = CPU) -> Iterator[None]:
    """Put the states of Python's, numpy's and torch's generators back at the end."""
    states = all_states(device)
    try:
        yield
    finally:
        set_all_states(states, device)


@contextmanager
def seeded(*key: int | str) -> Iterator[None]:
    """Seed Python's, numpy's and torch's CPU generators from `key`; put their states back at the end."""
    with kept_random_state():
        seed_all(seed_of(*key))
        yield


_KEY = "order stream"  # among states of generators


class OrderStream:
    """Where orders are drawn from, equal on all ranks.

    Args:
        state: packed, with which training begins.
    """

    def __init__(self, state: Tensor) -> None:
        self._first = self._state = state
        self._begun: tuple[int, Tensor] | None = None
        self._advanced: int | None = None

    @classmethod
    def begun(cls, before: dict[str, Any], epoch: int) -> OrderStream | None:
        """Return the stream that drew an epoch's order, from the state `before` it; None where a seed drew it."""
        if _KEY not in before:
            return None
        stream = cls(before[_KEY])
        stream._begun, stream._advanced = (epoch, before[_KEY]), epoch
        return stream

    def states(self, epoch: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what a checkpoint keeps: the state before the order of `epoch` was drawn, and that of now."""
        begun = self._state if self._begun is None or self._begun[0] != epoch else self._begun[1]
        return {_KEY: begun}, {_KEY: self._state}

    def resume(self, before: dict[str, Any], now: dict[str, Any], epoch: int | None) -> bool:
        """Go on from `states`, in the midst of `epoch` if any; return whether they were among what was saved."""
        if _KEY not in now:
            return False
        self._state, self._begun, self._advanced = now[_KEY], None, None
        if epoch is not None:
            self._begun, self._advanced = (epoch, before[_KEY]), epoch
        return True

    @contextmanager
    def drawing(self, epoch: int, *, seeds_workers: bool) -> Iterator[None]:
        """Enter where the first item of an epoch's order is drawn.

        Args:
            epoch: of the order; the same one is drawn again where it was drawn before.
            seeds_workers: whether the dataloader draws a seed for its workers first, also where it has none.
        """
        if self._begun is None or self._begun[0] != epoch:
            self._begun = epoch, self._state
        with kept_random_state():
            unpack_states(self._begun[1], CPU)
            if seeds_workers:
                _draw_seed()
            yield
            if self._advanced != epoch:
                self._advanced, self._state = epoch, packed_state()

    def leave(self) -> None:
        """Advance the process's global random state as this one, where it is still as training began."""
        if torch.equal(packed_state(), self._first):
            unpack_states(self._state, CPU)

    def pass_over(self, order: Any, *, seeds_workers: bool = True, is_read: bool = True) -> None:
        """Advance it by what a pass over a dataloader draws.

        Args:
            order: its sampler or batch sampler.
            seeds_workers: whether the dataloader draws a seed for its workers, also where it has none.
            is_read: whether any item of the order is drawn.
        """
        with kept_random_state():
            unpack_states(self._state, CPU)
            if seeds_workers:
                _draw_seed()
            sampler = getattr(order, "sampler", order)
            if is_read and type(sampler) is RandomSampler and sampler.generator is None:
                _draw_seed()
            self._state = packed_state()


def packed_state() -> Tensor:
    """Return the process's global random state."""
    return pack_states(all_states(CPU))


def _draw_seed() -> None:
    torch.empty((), dtype=torch.int64).random_()


_GENERATORS = (random.Random, np.random.Generator, torch.Generator)


_HAVE_ITERATORS = frozenset(("builtins", "itertools", "torch", "torchdata"))
"""Packages whose iterators do nothing but give items."""


def is_iterator(value: Any) -> bool:
    """Whether ``next(value)`` takes something that nobody else gets: a pass over a dataloader, a generator, a `zip`.

    Those of the user's own classes are not: their attributes are kept as those of other objects.
    """
    return isinstance(value, Iterator) and type(value).__module__.partition(".")[0] in _HAVE_ITERATORS


def generator_states(values: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return the random generators among `values`, each with its state."""
    return [(generator, _state_of(generator)) for generator in values if isinstance(generator, _GENERATORS)]


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state() if isinstance(generator, torch.Generator) else generator.getstate()


def moved(states: Iterable[tuple[Any, Any]]) -> list[Any]:
    """Return the generators that have drawn since `generator_states` returned their states."""
    return [generator for generator, state in states if _as_bytes(_state_of(generator)) != _as_bytes(state)]


def _as_bytes(state: Any) -> bytes:
    return state.numpy().tobytes() if isinstance(state, Tensor) else pickle.dumps(state)


def put_generators_back(states: Iterable[tuple[Any, Any]]) -> None:
    """Give generators the states that `generator_states` returned."""
    for generator, state in states:
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        else:
            (generator.set_state if isinstance(generator, torch.Generator) else generator.setstate)(state)
