"""Reads a sharded checkpoint: as a source of weights, and as the dict that Lightning loads.

Nothing of a tensor is read before somebody asks for it, and then only the region that is asked for. So each rank reads
what it holds, whatever the layout of the ranks that wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mm5d.checkpoint.full_file import load_opened
from lightning_mm5d.checkpoint.module_state import Loaded, check_shape, load_local, settle
from lightning_mm5d.checkpoint.optimizer_state import StoredStates
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.features.sharded_checkpoints.directory import CheckpointDirectory, Reader, StoredTensors
from lightning_mm5d.features.sharded_checkpoints.json_state import decode_state
from lightning_mm5d.features.sharded_checkpoints.sharded_save import (
    OBJECTS_FILE,
    OPTIMIZERS,
    OWN_PREFIX,
    STATE_DICT,
    STATE_FILE,
    VALUES,
)
from lightning_mm5d.partition.parts import tensors_of
from lightning_mm5d.plan.holdings import Holdings
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.remote_value import is_remote
from lightning_mm5d.storage.files import Region, StateDictSource, TensorSource, corrupt


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
        copy = SavedWeights(self._source, self._set)
        copy._names = dict(self._names)
        return copy

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
        saved_sizes = [len(group["params"]) for group in groups]
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        here = [names.get(id(param), f"@{position}") for position, param in enumerate(params)]
        if (here, sizes) == (self.labels, saved_sizes):
            return
        lost, new = set(self.labels) - set(here), set(here) - set(self.labels)
        parts = [f"It has no {', '.join(sorted(new)[:3])}"] if new else []
        parts += [f"It has {', '.join(sorted(lost)[:3])}, which this optimizer has not"] if lost else []
        if not parts:
            parts = [f"Its groups have {saved_sizes} parameters, or others in each, and here they have {sizes}"]
        rule = ". ".join(parts)
        fix = "Make the same groups of the same trainable parameters, or load the weights alone"
        raise ConfigError("checkpoint.optimizer_states", f"a state of {len(self.labels)} parameters", rule, fix)

    @override
    def parts(self, index: int) -> tuple[TensorSource, Mapping[str, str], Mapping[str, Any]]:
        return (self._source, *self._entries[index])


class ShardedCheckpoint:
    """A sharded checkpoint: a `TensorSource` of its weights, with the rest of it beside them.

    Args:
        path: of the directory.
        weights_only: whether to refuse objects that need pickle to run code.
        elsewhere: what reads files that other hosts have, by name.

    Attributes:
        path: where it was found.
        stored: all tensors, also those of optimizers.
        fields: what the manifest says: the step, the epoch and the layout.
        state: the dict that Lightning loads; weights and states of optimizers are read when they are asked for.

    Raises:
        CheckpointCorruptError: it is not as it was written.
        CheckpointUntrustedError: it has objects that would run code.
    """

    def __init__(
        self, path: str | Path, *, weights_only: bool = True, elsewhere: Mapping[str, Reader] | None = None
    ) -> None:
        directory = CheckpointDirectory(path, elsewhere)
        self.path, self.fields = directory.path, directory.fields
        self.stored = StoredTensors(directory)
        try:
            head = json.loads(directory.read_bytes(STATE_FILE).decode())
            self._keys: dict[str, str] = dict(head["keys"])
            references = head["references"]
            stored_names = set(self.stored.names())
            lost = [name for name in (*self._keys.values(), *references.values()) if name not in stored_names]
            text, has = json.dumps(head["state"]).encode(), head["has"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise corrupt(self.path / STATE_FILE, f"it is not readable: {error}") from None
        if lost:
            raise corrupt(self.path, f"its files do not hold {lost[0]!r}")
        objects = _objects(directory, weights_only)
        state = decode_state(text, lambda name: self.stored.read(references[name]), objects)
        try:
            self.state: dict[str, Any] = dict(state["rest"])
            if STATE_DICT in has:
                self.state[STATE_DICT] = SavedWeights(self, state["extra"])
            if OPTIMIZERS in has:
                self.state[OPTIMIZERS] = self._optimizers(state["optimizers"])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise corrupt(self.path, f"its parts do not fit together ({type(error).__name__}: {error})") from None

    def names(self) -> list[str]:
        """Return the names of all weights, tied ones under each of their names."""
        return list(self._keys)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight; raise KeyError for an unknown name."""
        return self.stored.shape(self._keys[name])

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a weight; raise KeyError for an unknown name."""
        return self.stored.dtype(self._keys[name])

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return a weight, or its `region`, in new memory of the CPU."""
        return self.stored.read(self._keys[name], region)

    def _optimizers(self, parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        tensors: dict[int, dict[str, dict[str, str]]] = {}
        for name in self.stored.names():
            if name.startswith(f"{OPTIMIZERS}/"):
                _, number, key, label = name.split("/", 3)
                tensors.setdefault(int(number), {}).setdefault(label, {})[key] = name
        values = list(self._values())
        optimizers = []
        for part in parts:
            number, labels = part["number"], part["names"]
            by_label = tensors.get(number, {})
            rest = {label: state for value in values for label, state in value.get(str(number), {}).items()}
            entries = {
                index: (by_label.get(label, {}), rest.get(label, {}))
                for index, label in enumerate(labels)
                if label in by_label or label in rest
            }
            optimizers.append({**part["rest"], "state": SavedOptimizerState(self.stored, labels, entries)})
        return optimizers

    def _values(self) -> Iterator[dict[str, Any]]:
        """Yield what each file says of states that have no pieces."""
        for name, file in self.stored.files.items():
            text = file.metadata.get(VALUES)
            if text is not None:
                prefix = f"{OWN_PREFIX}optimizers/{int(name.removeprefix('rank-').split('.')[0])}"

                def tensor(path: str, prefix: str = prefix) -> Tensor:
                    return self.stored.read(f"{prefix}/{path}")

                yield decode_state(text.encode(), tensor, {})


def _objects(directory: CheckpointDirectory, weights_only: bool) -> dict[str, Any]:
    """Return what JSON could not hold."""
    if OBJECTS_FILE not in directory.files:
        return {}
    data = BytesIO(directory.read_bytes(OBJECTS_FILE))
    return load_opened(data, str(directory.path / OBJECTS_FILE), weights_only)


def check_weights(root: nn.Module, state: SavedWeights, strict: bool, plan: Plan | None) -> None:
    """Compare names and shapes of weights with those of a module.

    Args:
        root: the LightningModule.
        state: what was saved.
        strict: whether names must be the same.
        plan: all stages where the module is cut; None where it is whole.

    Raises:
        RuntimeError: they are others.
    """
    expected = root.state_dict(keep_vars=True)
    holdings = None if plan is None else Holdings(plan, root)
    for name in state.names():
        value = expected.get(name)
        if isinstance(value, Tensor):
            shape = value.shape if holdings is None else holdings.full_shape(name, value.shape)
            check_shape(root, name, state.shape(name), shape)
    if strict:
        saved_ids = {id(value) for name, value in expected.items() if name in state}
        missing = [name for name, value in expected.items() if id(value) not in saved_ids]
        Loaded(missing, [name for name in state if name not in expected]).check(root)


def load_weights(root: nn.Module, state: SavedWeights, plan: Plan, rank: int) -> None:
    """Read what this rank holds of the weights; names that the module does not have are left out."""
    local_names = {name for name, _ in tensors_of(root)}
    settle(root.buffers())
    load_local(root, Chosen(state, [name for name in state.names() if name in local_names]), plan, rank)
    others: dict[str, Any] = {name: state[name] for name in state if name not in local_names}
    if others:  # states of metrics, and what modules save that are no tensors
        root.load_state_dict(others, strict=False)


def void_weights(root: nn.Module) -> None:
    """Fill all that this rank holds and a checkpoint has with NaN, so that nobody uses half of what was loaded."""
    for value in root.state_dict().values():
        if isinstance(value, Tensor) and not is_remote(value) and (value.is_floating_point() or value.is_complex()):
            value.fill_(float("nan"))


class Chosen:
    """Some tensors of a source.

    Args:
        source: of tensors.
        names: of those that this one has.
    """

    def __init__(self, source: TensorSource, names: list[str]) -> None:
        self._names = names
        self.shape, self.dtype, self.read = source.shape, source.dtype, source.read

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return self._names
