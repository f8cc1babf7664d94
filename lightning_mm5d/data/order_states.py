"""How a dataloader draws its order: random generators that it and its samplers hold, their states saved and put back.

A sampler with a generator of its own draws the order of an epoch from that generator's state. So a resumed epoch needs
the state with which the epoch began.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from lightning_mm5d.config.errors import private
from lightning_mm5d.data.samplers import Drawing, leaf_of


def generator_states(*holders: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of the generators in the first of `holders` that has any, by path."""
    for holder in holders:
        if states := {path: _state(generator) for path, generator in _generators(holder)}:
            return states
    return {}


def set_generator_states(states: Mapping[str, Any], *holders: Mapping[str, Any]) -> None:
    """Put `generator_states` back in each of `holders`, where a path still leads to a generator of the same kind."""
    for path, generator in itertools.chain.from_iterable(map(_generators, holders)):
        state = states.get(path)
        if isinstance(generator, torch.Generator) and isinstance(state, Tensor):
            generator.set_state(state.cpu())
        elif isinstance(generator, random.Random) and isinstance(state, list | tuple):
            version, numbers, gauss = state
            generator.setstate((version, tuple(numbers), gauss))
        elif isinstance(generator, np.random.RandomState) and isinstance(state, dict):
            generator.set_state(_arrays(state))
        elif isinstance(generator, np.random.Generator) and isinstance(state, dict):
            generator.bit_generator.state = _arrays(state)


def _generators(holder: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield path and generator for those of `holder`, and of samplers that it draws from, each once."""
    seen = set() if seen is None else seen
    seen.add(id(holder))
    values = holder if isinstance(holder, Mapping) else getattr(holder, "__dict__", {})
    for name, value in list(values.items()):
        where = f"{path}.{name}" if path else name
        if id(value) in seen:
            continue
        if isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
            seen.add(id(value))
            yield where, value
        elif _draws(name, value):
            yield from _generators(value, where, seen)
        elif isinstance(value, list) and value and all(_draws("", one) for one in value):
            for index, one in enumerate(value):
                yield from _generators(one, f"{where}.{index}", seen)


def _draws(name: str, value: Any) -> bool:
    """Whether a dataloader takes its order from `value`. Its data set is the user's own and stays as it is."""
    if isinstance(value, Sampler) or name == "indices":
        return True
    # Lightning's wrapper holds a sampler as its data set, and that one holds the user's sampler
    return (name == "dataset" and isinstance(value, Dataset) and hasattr(value, "_sampler")) or name == "_sampler"


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, numbers, gauss = generator.getstate()
        return [version, list(numbers), gauss]
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return _plain(generator.bit_generator.state)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": str(value.dtype)}
    return value.item() if isinstance(value, np.generic) else value


def _arrays(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"array", "dtype"}:
            return np.array(value["array"], dtype=value["dtype"])
        return {key: _arrays(inner) for key, inner in value.items()}
    return value


Segment = tuple[int, int | None, int]
RANDOM = "random"  # in `order_of`: arguments of a RandomSampler
SEED = "seed"


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """How the order of an epoch was drawn.

    Attributes:
        number: of the epoch.
        seed: of the run.
        begun: what `order_of` says of the loader that began it.
        before: states of the samplers' generators when it began.
        drawing: entered where a sampler without a generator draws; None for a seed.
    """

    number: int
    seed: int
    begun: Mapping[str, Any]
    before: Mapping[str, Any]
    drawing: Drawing | None = None


def order_of(indices: Any) -> dict[str, Any]:
    """Return, in plain values, how a loader draws its order, by what another layout's loader does not know of it.

    Args:
        indices: its batch sampler, or its sampler where it does not batch.
    """
    leaf = leaf_of(indices)
    if isinstance(leaf, DistributedSampler):
        return {SEED: leaf.seed}
    sampler = indices if leaf is None else leaf
    if type(sampler) is not RandomSampler:
        return {}
    drawn_by = {"replacement": sampler.replacement, "num_samples": private(sampler, "_num_samples")}
    return {RANDOM: {**drawn_by, "generator": sampler.generator is not None}}


def batch_size_of(indices: Any) -> int | None:
    """Return the batch size that a batch sampler states; None without one."""
    size = getattr(getattr(indices, "batches", indices), "batch_size", None)
    return size if isinstance(size, int) else None
