"""Weights and optimizer states of a checkpoint as mappings that read a tensor when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mm5d.checkpoint.optimizer_state import StoredStates
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.storage.files import Region, StateDictSource, TensorSource


class SavedWeights(MutableMapping[str, Any]):
    """The state dict of a sharded checkpoint, also a `TensorSource`: a weight is read when it is asked for.

    Hooks may change it like a dict. What they set stays in memory.

    Args:
        source: of the weights.
        extra: values that are no tensors.
    """

    def __init__(self, source: TensorSource, extra: Mapping[str, Any]) -> None:
        self._source = source
        self._set: dict[str, Any] = dict(extra)
        self._names: dict[str, None] = dict.fromkeys([*source.names(), *extra])

    def __getitem__(self, key: str) -> Any:
        if key not in self._names:
            raise KeyError(key)
        return self._set[key] if key in self._set else self._source.read(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self._names[key] = None
        self._set[key] = value

    def __delitem__(self, key: str) -> None:
        del self._names[key]
        self._set.pop(key, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, key: object) -> bool:
        return key in self._names

    def copy(self) -> SavedWeights:
        """Return another one with the same values, which changes by itself."""
        other = SavedWeights(self._source, self._set)
        other._names = dict(self._names)
        return other

    def extra(self) -> dict[str, Any]:
        """Return the values that are no tensors."""
        return {key: value for key, value in self._set.items() if not isinstance(value, Tensor)}

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return [key for key in self._names if key not in self._set or isinstance(self._set[key], Tensor)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; raise KeyError for an unknown name."""
        return tuple(self._set[name].shape) if name in self._set else self._source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor; raise KeyError for an unknown name."""
        return self._set[name].dtype if name in self._set else self._source.dtype(name)

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return a tensor, or its `region`."""
        source = StateDictSource(self._set) if name in self._set else self._source
        return source.read(name, region)


class SavedOptimizerState(StoredStates):
    """The states of an optimizer's parameters, by position; a tensor is read when it is asked for.

    Args:
        source: of all tensors.
        labels: the parameters' names, in the order of the optimizer's groups.
        entries: by position: the stored names of tensors by key, and other values by key.
    """

    def __init__(
        self,
        source: TensorSource,
        labels: Sequence[str],
        entries: Mapping[int, tuple[Mapping[str, str], Mapping[str, Any]]],
    ) -> None:
        self._source, self.labels, self._entries = source, list(labels), entries

    def __getitem__(self, index: int) -> dict[str, Any]:
        tensors, rest = self._entries[index]
        return {**{key: self._source.read(name) for key, name in tensors.items()}, **rest}

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, index: object) -> bool:
        return index in self._entries  # without reading it

    @override
    def check(self, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> None:
        sizes = [len(group["params"]) for group in groups]
        ends = list(accumulate(sizes))
        saved = [list(self.labels[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
        own, position = list[list[str]](), 0
        for group in optimizer.param_groups:
            own.append([names.get(id(one), f"@{position + number}") for number, one in enumerate(group["params"])])
            position += len(group["params"])
        if own == saved:
            return
        here = [name for group in own for name in group]
        lost, new = set(self.labels) - set(here), set(here) - set(self.labels)
        parts = [f"It has no {', '.join(sorted(new)[:3])}"] if new else []
        parts += [f"It has {', '.join(sorted(lost)[:3])}, which this optimizer has not"] if lost else []
        if not parts:
            parts = [f"Its groups have {sizes} parameters, or others in each, and here they have {list(map(len, own))}"]
        raise ConfigError(
            "checkpoint.optimizer_states",
            f"a state of {len(self.labels)} parameters",
            ". ".join(parts),
            "Make the same groups of the same trainable parameters, or load the weights alone",
        )

    @override
    def parts(self, index: int) -> tuple[TensorSource, Mapping[str, str], Mapping[str, Any]]:
        return (self._source, *self._entries[index])
