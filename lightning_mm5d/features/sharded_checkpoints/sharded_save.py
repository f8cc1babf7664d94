"""Saves a sharded checkpoint: every rank writes its own pieces, and the directory appears once all have.

Phases of a save, which all ranks go through together (`RankReports`):

1. announce: rank 0 makes the directory, decides from its checkpoint dict what is saved, and says it;
2. take: each rank takes its pieces, or copies of them where it trains on meanwhile;
3. write: each rank writes its files, and reports them or its error;
4. conclude: rank 0 gives the directory its name, or drops it where any rank failed, and says which.

Phases 3 and 4 may run in a thread. The dict of rank 0 counts, as in Lightning: keys that a hook has dropped are not
saved, keys that it has renamed are saved under the new name, and tensors of its own are saved in full. Values computed
from what other ranks hold are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mm5d.checkpoint.rank_reports import RankReports
from lightning_mm5d.config.errors import ConfigError, repeated
from lightning_mm5d.features.sharded_checkpoints.directory import DirectoryWriter, sharding_metadata
from lightning_mm5d.features.sharded_checkpoints.json_state import EncodedState, encode_state
from lightning_mm5d.features.sharded_checkpoints.own_shards import Item, OwnShards, PieceCopies
from lightning_mm5d.sharded.remote_value import is_remote
from lightning_mm5d.storage.files import WrittenFile
from lightning_mm5d.storage.replacement import new_save_id
from lightning_mm5d.storage.tensor_file import storable

STATE_FILE, OBJECTS_FILE = "state.json", "objects.pt"
STATE_DICT, OPTIMIZERS = "state_dict", "optimizer_states"
OWN_PREFIX = "lightning_mm5d/"  # begins the names of stored tensors that are neither the module's nor an optimizer's
VALUES = "lightning_mm5d.values"  # in the metadata of a file: states of optimizers that have no pieces


class SaveFailedError(RuntimeError):
    """A checkpoint was not saved; the message names the rank and its error."""


class OptimizerPart(dict[str, Any]):
    """The state dict of an optimizer on one rank; it stands for that of all ranks in a sharded checkpoint.

    Args:
        optimizer: whose state is saved.
        number: among the optimizers of the trainer.
    """

    def __init__(self, optimizer: Optimizer, number: int) -> None:
        state = optimizer.state_dict()
        super().__init__({**state, "state": MappingProxyType(state.get("state", {}))})
        self.number = number


@dataclass
class Contents:
    """What rank 0 decides to save.

    Attributes:
        module: names of the module's tensors, by the names under which they are stored.
        optimizers: numbers of those whose states are saved.
        items: tensors that only rank 0 has.
        head: what ``state.json`` says.
        objects: what JSON cannot hold.
    """

    module: dict[str, str] = field(default_factory=dict)
    optimizers: list[int] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    head: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)


def decide(checkpoint: Mapping[str, Any], shards: OwnShards, labels: Sequence[list[str]]) -> Contents:
    """Return what is saved of rank 0's checkpoint dict.

    Args:
        checkpoint: of the trainer.
        shards: of rank 0.
        labels: of each optimizer, the names of its parameters in the order of its groups.

    Raises:
        ConfigError: it has values computed from what other ranks hold, or replaced states of optimizers.
    """
    contents = Contents()
    keys, stored = dict[str, str](), dict[str, str]()  # the stored name by key, and by name in the module
    extra = {}
    for key, value in checkpoint.get(STATE_DICT, {}).items():
        name = shards.name_of(value) if isinstance(value, Tensor) else None
        if name is not None:
            keys[key] = stored.setdefault(name, key)
        elif isinstance(value, Tensor):
            keys[key] = key
            contents.items.append(_of_rank_0(f"{STATE_DICT}.{key}", key, value))
        else:
            extra[key] = value
    optimizers = []
    for number, part in enumerate(checkpoint.get(OPTIMIZERS, ())):
        if not isinstance(part, OptimizerPart):
            rule = "Each rank saves the states of its own shards, so that a hook cannot replace them"
            fix = f"Leave checkpoint[{OPTIMIZERS!r}][{number}] as it is, or delete it"
            raise ConfigError(f"checkpoint.{OPTIMIZERS}[{number}]", type(part).__name__, rule, fix)
        contents.optimizers.append(part.number)
        rest = {key: value for key, value in part.items() if key != "state"}
        optimizers.append({"number": part.number, "names": labels[part.number], "rest": rest})
    rest = {key: value for key, value in checkpoint.items() if key not in (STATE_DICT, OPTIMIZERS)}
    whole = {"extra": extra, "optimizers": optimizers, "rest": rest}
    state = encode_state(whole, stands=lambda tensor: shards.name_of(tensor) is not None)
    references = {}
    for path, value in state.tensors.items():
        name = shards.name_of(value)
        if name is None:
            references[path] = f"{OWN_PREFIX}state/{path}"
            contents.items.append(_of_rank_0(path, references[path], value))
        else:
            references[path] = stored.setdefault(name, f"{OWN_PREFIX}module/{name}" if name in keys else name)
    contents.module = {stored_name: name for name, stored_name in stored.items()}
    contents.objects = state.objects
    contents.head = {"keys": keys, "references": references, "state": json.loads(state.text)}
    contents.head["has"] = [key for key in (STATE_DICT, OPTIMIZERS) if key in checkpoint]
    return contents


def _of_rank_0(path: str, stored: str, value: Tensor) -> Item:
    if is_remote(value):
        rule = "It was computed from values that other ranks hold"
        fix = "Save what trainer.strategy.full_state_dict() returns on rank 0; call it on all ranks"
        raise ConfigError(f"checkpoint.{path}", "a value that rank 0 does not have", rule, fix)
    if not storable(value.dtype) or value.layout != torch.strided or value.is_meta:
        rule = "Sharded checkpoints hold dense tensors in the dtypes of safetensors files"
        raise ConfigError(f"checkpoint.{path}", f"{value.dtype}, {value.layout}", rule, "Convert it, or leave it out")
    return Item.whole(stored, value.detach())


@dataclass
class Save:
    """One rank's part of a save, from `announce` to `conclude`.

    Args:
        reports: of this save.
        optimizers: of the trainer.
        fields: of the manifest; read on rank 0.
    """

    reports: RankReports
    optimizers: Sequence[Optimizer]
    fields: Mapping[str, Any]

    def announce(self, path: str, decided: Callable[[], Contents]) -> None:
        """Make the directory and say what is saved; phase 1.

        Args:
            path: of the checkpoint.
            decided: what is saved; called on rank 0.

        Raises:
            SaveFailedError: on all other ranks, when rank 0 failed.
        """
        failed: Exception | None = None
        if self.reports.rank == 0:
            self._writer = self._made_writer(path, new := new_save_id())
            message: dict[str, Any] = {}
            try:
                self._contents = decided()
                self._writer.begin()
                message = {"path": path, "id": new}
                message |= {"module": self._contents.module, "optimizers": self._contents.optimizers}
            except Exception as error:
                failed = error
            self.reports.tell("announced", {"failed": _failure(0, failed), **message})
        announced = self.reports.hear("announced")
        if failed is not None:
            raise failed
        if announced["failed"] is not None:
            raise _failed_on(*announced["failed"])
        if self.reports.rank != 0:
            self._writer = self._made_writer(announced["path"], announced["id"])
            self._contents = Contents(announced["module"], announced["optimizers"])

    def _made_writer(self, path: str, save_id: str) -> DirectoryWriter:
        return DirectoryWriter(path, save_id)

    def take(self, shards: OwnShards, copies: PieceCopies | None) -> None:
        """Take this rank's pieces, as copies, or as views where there is nothing to copy to; phase 2.

        An error is kept, and told in phase 3.
        """
        self._items: list[Item] = []
        self._copies = copies
        self._rest: EncodedState | None = None
        self._failed: Exception | None = None
        try:
            items = [*shards.module_items(self._contents.module), *self._contents.items]
            states, rest = list[Item](), {}
            for number in self._contents.optimizers:
                pieces, others = shards.optimizer_items(self.optimizers[number], f"{OPTIMIZERS}/{number}")
                states += pieces
                rest[str(number)] = others
            self._rest = encode_state(rest)
            prefix = f"{OWN_PREFIX}optimizers/{self.reports.rank}"
            states += [Item.whole(f"{prefix}/{name}", value.detach()) for name, value in self._rest.tensors.items()]
            if self._rest.objects:
                rule = "States of optimizers are tensors and plain values"
                raise ConfigError(f"{OPTIMIZERS}.{next(iter(self._rest.objects))}", "an object", rule, "Use another")
            self._items = items + states if copies is None else copies.take(items, states)
        except Exception as error:
            self._failed = error

    def write(self) -> None:
        """Write and conclude; phases 3 and 4.

        Raises:
            SaveFailedError: another rank failed.
        """
        files: dict[str, WrittenFile] = {}
        error = self._failed
        try:
            if error is None:
                files = self._written()
        except Exception as raised:
            error = raised
        try:
            self._spread(files)
        except Exception as raised:
            error = error or raised
        written = {name: [file.size, file.checksum] for name, file in files.items()}
        self.reports.tell("written", {"files": written, "failed": _failure(self.reports.rank, error)})
        if self.reports.rank == 0:
            error = self._finish(error)
        failed = self.reports.hear("concluded")
        if failed is None:
            self._conclude()
        self.reports.part("concluded")
        if error is not None:
            error.add_note("The checkpoint was not saved, on no rank; the last one stands")
            raise error
        if failed is not None:
            raise _failed_on(*failed)

    def _spread(self, files: Mapping[str, WrittenFile]) -> None:
        """This rank has written its files, none where it has failed."""

    def _conclude(self) -> None:
        """All ranks have written theirs, and rank 0 the manifest."""

    def drop(self) -> None:
        """Remove what rank 0 has made, for a save that ends by an error that is no `Exception`."""
        if self.reports.rank == 0:
            self._writer.abort()

    def _finish(self, error: Exception | None) -> Exception | None:
        """Give the directory its name, or drop it; return the error of rank 0."""
        told = [self.reports.hear("written", rank) for rank in range(self.reports.world_size)]
        failed = next((report["failed"] for report in told if report["failed"]), None)
        try:
            if failed is None:
                files = {name: WrittenFile(*file) for report in told for name, file in report["files"].items()}
                self._writer.commit(files, self.fields)
            else:
                self._writer.abort()
        except Exception as raised:
            error, failed = raised, _failure(0, raised)
        self.reports.tell("concluded", failed)
        return error

    def _written(self) -> dict[str, WrittenFile]:
        files = {}
        assert self._rest is not None
        if self._copies is not None:
            self._copies.ready()
        values = {VALUES: self._rest.text.decode()} if self._contents.optimizers else {}
        for number, items in enumerate(_by_file(self._items)):
            suffix = f"-{number}" if number else ""
            name = f"rank-{self.reports.rank:05}{suffix}.safetensors"
            boxes = {item.name: (item.box, item.shape) for item in items}
            specs = {item.name: (item.tensor.dtype, tuple(item.tensor.shape)) for item in items}
            metadata = sharding_metadata(boxes) | (values if number == 0 else {})
            with self._writer.tensor_file(name, specs, metadata) as file:
                for item in items:
                    file.write(item.name, item.tensor)
            files[name] = file.written
        if self.reports.rank == 0:
            head = json.dumps(self._contents.head).encode()
            files[STATE_FILE] = self._writer.write_bytes(STATE_FILE, head)
            if self._contents.objects:
                data = BytesIO()
                torch.save(self._contents.objects, data)
                files[OBJECTS_FILE] = self._writer.write_bytes(OBJECTS_FILE, data.getvalue())
        return files


def _by_file(items: Iterable[Item]) -> list[list[Item]]:
    """Divide items into files, so that each has one piece of a tensor at most."""
    files: list[list[Item]] = [[]]
    seen: dict[str, int] = {}
    for item in items:
        number = seen.get(item.name, 0)
        seen[item.name] = number + 1
        if number == len(files):
            files.append([])
        files[number].append(item)
    return files


def _failure(rank: int, error: BaseException | None) -> tuple[int, str] | None:
    return None if error is None else (rank, f"{type(error).__name__}: {error}")


def _failed_on(rank: int, reason: str) -> SaveFailedError:
    return repeated(SaveFailedError(f"rank {rank} could not save its part: {reason}"), rank, reason)
