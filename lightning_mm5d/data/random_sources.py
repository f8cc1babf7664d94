"""Random generators that samplers and dataloaders hold themselves, and how their states are saved and put back.

A sampler with a generator of its own draws the order of an epoch from that generator's state. So a resumed epoch needs
the state with which the epoch began.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler


def generators(holder: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield path and generator for those of `holder`, and of samplers that it draws from, each once.

    Args:
        holder: a dataloader, sampler or batch sampler.
        path: where it was found.
        seen: ids of what was looked at before.
    """
    seen = set() if seen is None else seen
    seen.add(id(holder))
    for name, value in list(getattr(holder, "__dict__", {}).items()):
        where = f"{path}.{name}" if path else name
        if id(value) in seen:
            continue
        if isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
            seen.add(id(value))
            yield where, value
        elif _draws(name, value):
            yield from generators(value, where, seen)
        elif isinstance(value, list) and value and all(_draws("", one) for one in value):
            for index, one in enumerate(value):
                yield from generators(one, f"{where}.{index}", seen)


def generator_states(holder: Any) -> dict[str, Any]:
    """Return the states of `generators(holder)` by path: tensors, and plain values."""
    return {path: _state(generator) for path, generator in generators(holder)}


def set_generator_states(holder: Any, states: dict[str, Any]) -> None:
    """Put `generator_states` back where the paths still hold generators of the same kind."""
    for path, generator in generators(holder):
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


def _draws(name: str, value: Any) -> bool:
    """Whether a dataloader takes its order from `value`. Its data set is the user's own and stays as it is."""
    if isinstance(value, Sampler):
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
