"""Features of a frozen encoder that are computed once and kept on disk, with ``cache_features`` on a modality.

A call of the encoder's boundary is looked up before it is computed, wherever the encoder runs; its result travels as
one that was computed. The key is the content of the call's own inputs, and what else the features depend on
(`encoder_state`), so that a changed image, another data set or other weights are another key. Where the inputs divide
into items, each item has a key and a file, so that shuffled batches find them; a call of which some items are missing
is computed as a whole.

An item's features must not depend on the items beside it. Of each structure and size of an item, one is encoded once
more, alone: where that gives something else, or fails, calls are kept as wholes, which only equal batches find. So are
calls whose items may have unequal lengths that no table tells (`feature_items`).

It refuses (`ConfigError`) encoders that are trained, or whose dropouts or batch norms are in training mode. In the call
that shows it, it refuses features that are random, that depend on something trained, or whose computation writes
buffers or attributes, arguments or results that no file can hold, and attributes of the encoder whose content cannot be
known.

A folder has one safetensors file for each key, which any number of processes share. A file is written under a name of
its own and renamed when it is whole, so that readers see all of it or nothing, and of two processes that write the same
key one wins. Nothing is flushed to the disk: a file that a power cut has damaged shows by its checksums, like any other
damage, and counts as missing. Files are never removed here.

From a GPU features are copied to pinned memory, in the order of what it computes, and the host goes on. Their files are
written when a later call finds the copies ended, or looks them up, and at the end of the run.

A full disk ends the writing, with a warning, and not the run.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import uuid
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_mm5d.config.errors import CheckpointCorruptError, ConfigError
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.data.random_state import all_states, pack_states
from lightning_mm5d.features.cached_features.encoder_state import EncoderState, is_bookkeeping, update
from lightning_mm5d.features.cached_features.feature_items import (
    DividedError,
    Items,
    items_of,
    join,
    part_of_inputs,
    part_of_result,
    take,
)
from lightning_mm5d.partition.compiled import IN_PLACE, is_compiled_in_place
from lightning_mm5d.partition.parts import is_in, is_metric
from lightning_mm5d.partition.step_uses import Boundary
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.remote_value import is_remote
from lightning_mm5d.sharded.removable import Removable, meanwhile
from lightning_mm5d.sharded.torch_internals import version_of
from lightning_mm5d.source.order import used_fields
from lightning_mm5d.stage.payload import NotSent, Packer, rebuild, tensors_in
from lightning_mm5d.stage.runtime import Runtime
from lightning_mm5d.stage.step_writes import attributes, written
from lightning_mm5d.stage.taps import mark_dependent
from lightning_mm5d.storage.tensor_file import Entry, TensorFile, TensorFileWriter, lay_out
from lightning_mm5d.trainer.feature import Feature

Compute = Callable[..., Any]
_FORMAT = 3  # of keys; files of another one are not read
_MOST_STRUCTURES = 64  # that are tried; calls of any further one are kept as wholes
_MOST_OFF = 1e-3  # relative: of one item alone and among others, in precisions whose rounding is finer


class CachedFeatures(Removable):
    """The boundaries of one rank that are looked up, from the making of this object to `remove`.

    Args:
        runtime: the module and its stages.
        modalities: the configuration.
        device: where this rank computes.
    """

    def __init__(self, runtime: Runtime, modalities: Mapping[str, Modality], device: torch.device) -> None:
        here = {name for stage in runtime.stages for name in stage.cuts}
        for name, modality in modalities.items():
            if modality.memory.cache_features is None or name not in here:
                continue
            files = FeatureFiles(modality.memory.cache_features, f"modalities.{name}.memory.cache_features")
            self.changes.callback(files.close)
            for boundary in runtime.partition.encoders[name].boundaries:
                fields = used_fields(runtime.root, boundary.path, boundary.method)
                runtime.wanted.setdefault(boundary.name, fields)
                self._patch(_CachedCall(runtime, name, boundary, files, device), boundary)

    def _patch(self, cached: _CachedCall, boundary: Boundary) -> None:
        module, method = cached.module, boundary.method
        if method == "forward" and is_compiled_in_place(module):
            method = IN_PLACE
        original = getattr(module, method)

        @torch.compiler.disable
        @wraps(original, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            return cached(original, args, kwargs)

        self.put_attribute(module, method, call)


@dataclass(frozen=True)
class _Single:
    """What a single item gives: description of the result, and the rows of its tensors by the item's size."""

    description: Any
    rows: dict[tuple[int, ...], list[int]]


class _CachedCall:
    """One boundary, looked up."""

    def __init__(
        self, runtime: Runtime, modality: str, boundary: Boundary, files: FeatureFiles, device: torch.device
    ) -> None:
        self._runtime, self._boundary, self._files, self._device = runtime, boundary, files, device
        self._modality, self._field = modality, f"modalities.{modality}.memory.cache_features"
        self.module = runtime.root.get_submodule(boundary.path)
        owned = [name for name in runtime.partition.owners if modality in runtime.partition.users(name)]
        self._state = EncoderState(runtime.root, boundary.path, boundary.method, owned, device)
        # what one item gives, by the structure of a call; None where calls are kept as wholes
        self._singles: dict[Hashable, _Single | None] = {}
        self._warned = False

    def __call__(self, original: Compute, args: tuple, kwargs: dict[str, Any]) -> Any:
        run = self._runtime.active
        if run is not None and self._modality not in run.stage.cuts:  # its layers are passed by, in this stage
            return original(*args, **kwargs)
        packer = Packer()
        try:
            description = packer.describe([args, kwargs])
        except ValueError as error:
            raise self._refused(f"Its arguments must have a content to know them by, and {error}") from None
        inputs = packer.tensors
        if any(map(is_remote, inputs)) or self._runtime.guard.is_dry or self._is_trained():
            return original(*args, **kwargs)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            raise self._refused("An input of the encoder needs a gradient through it")
        call = json.dumps([_FORMAT, self._fingerprint(), self._boundary.name, self._fields(), description])
        structure = call, *((tensor.dtype, tensor.shape[1:]) for tensor in inputs)
        items = None
        if self._singles.get(structure, True) is not None:
            items = items_of([*description["l"][0]["u"], *(node for _, node in description["l"][1]["d"])], inputs)
        cached_parts: list[Any] = []
        if items is not None:
            cached_parts = [self._files.read(key) for key in _item_keys(call, inputs, items)]
            cached = self._joined(cached_parts)
            if cached is not None:
                return cached
        cached = self._files.read(_key("call", call, inputs))
        if cached is not None:
            return self._on_device(*cached)
        result = self._computed(original, args, kwargs)
        whole, tensors = self._described(result)
        item_parts = None
        if items is not None and (structure in self._singles or len(self._singles) < _MOST_STRUCTURES):

            def encoded(item: int) -> Any:
                arguments = rebuild(description, [part_of_inputs(tensor, items, item) for tensor in inputs])
                return self._described(self._computed(original, *arguments))

            single = self._singles[structure] = self._measured(
                self._singles.get(structure), whole, tensors, encoded, items
            )
            item_parts = None if single is None else _or_none(_parts, whole, tensors, single, items)
        if items is None or item_parts is None:
            self._write(_key("call", call, inputs), whole, tensors)
            return result
        for key, part, read in zip(_item_keys(call, inputs, items), item_parts, cached_parts, strict=True):
            if read is None:
                self._write(key, *part)
        return result

    def _is_trained(self) -> bool:
        """Whether somebody has begun to train the encoder; its features are computed then."""
        trained = any(
            isinstance(tensor, nn.Parameter) and tensor.requires_grad for tensor in self._state.tensors().values()
        )
        if trained and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._field}: parameters of {self._modality} require a gradient now, so its features are computed "
                "from here on",
                stacklevel=2,
            )
        return trained

    def _fingerprint(self) -> str:
        try:
            return self._state.fingerprint()
        except ValueError as error:
            rule = f"The features may depend on an attribute of the encoder, and {error}"
            raise self._refused(rule, "Hold plain values there, or leave it unset") from None

    def _fields(self) -> list[str] | None:
        """The fields of a result that are kept; None for all."""
        fields = self._runtime.wanted[self._boundary.name]
        return None if fields is None else sorted(fields)

    def _computed(self, original: Compute, args: Any, kwargs: Any) -> Any:
        """Call the boundary; refuse a call that does more than give features, or gives others each time."""
        path, run = self._boundary.path, self._runtime.active
        # its layers would begin a stream of their own, and must not draw from any
        drawing = nullcontext() if run is None else meanwhile(run, draws=None)
        drawn = pack_states(all_states(self._device))
        before, buffers, updates = attributes(self.module, path), self._buffers(), self._updates()
        # nothing here is trained, so no graph is kept, and what depends on something else that is trained shows
        with drawing, nullcontext() if torch.is_inference_mode_enabled() else torch.enable_grad():
            result = original(*args, **kwargs)
        if not torch.equal(drawn, pack_states(all_states(self._device))):
            raise self._refused(
                "The encoder draws random numbers, as a dropout does, so that its features are others each time",
                f"Call eval() on {self._modality} in __init__ or configure_model",
            )
        names = [
            name
            for name, (buffer, version) in self._buffers().items()
            if name not in buffers or buffers[name][0] is not buffer or buffers[name][1] != version
        ]
        if names:
            raise self._refused(
                f"The encoder writes the buffer {names[0]} while it computes, as a batch norm does in training",
                f"Call eval() on {self._modality} in __init__ or configure_model",
            )
        root, notes = self._runtime.root, written(before, attributes(self.module, path))
        notes = [note for note in notes if not is_bookkeeping(root.get_submodule(note[0]), note[1])]
        if notes:
            rule = f"The encoder writes the attribute {'.'.join(notes[0][:2]).lstrip('.')}"
            raise self._refused(f"{rule}, which a call that is looked up does not")
        if self._updates() != updates:
            raise self._refused("The encoder updates a metric, which a call that is looked up does not")
        if any(tensor.requires_grad for _, tensor in tensors_in(result)):
            raise self._refused("The features depend on something that is trained outside of the encoder")
        return result

    def _described(self, result: Any) -> tuple[Any, list[Tensor]]:
        packer, features = Packer(), self._runtime.read_fields(self._boundary.name, result)
        for value in features.values() if isinstance(features, Mapping) else ():
            if isinstance(value, NotSent):
                raise self._refused(f"Its result must be one that files can hold, and it has {value.what.rstrip(',')}")
        try:
            described = packer.describe(features)
        except ValueError as error:
            raise self._refused(f"Its result must be one that files can hold, and {error}") from None
        return described, packer.tensors

    def _buffers(self) -> dict[str, tuple[Tensor, int]]:
        """The buffers that there are now, and how often each has been written."""
        tensors = self._state.tensors().items()
        return {name: (tensor, version_of(tensor)) for name, tensor in tensors if not isinstance(tensor, nn.Parameter)}

    def _updates(self) -> list[int]:
        """How often each metric has been updated."""
        return [module.update_count for module in self.module.modules() if is_metric(module)]

    def _measured(
        self, known: _Single | None, whole: Any, tensors: list[Tensor], encoded: Callable[[int], Any], items: Items
    ) -> _Single | None:
        """Encode an item of each size that is not `known` yet, the last of it.

        Returns:
            What items give; None where an item fails, or gives something else than among the others.
        """
        rows = {} if known is None else dict(known.rows)
        new = {items.size(item): item for item in range(items.count) if items.size(item) not in rows}
        shown: dict[int, list[Tensor]] = {}
        for size, item in new.items():
            try:
                description, shown[item] = encoded(item)
            except Exception:  # code that takes no single item, in any way
                return None
            known = known or _Single(description, rows)
            if description != known.description:
                return None
            rows[size] = [len(tensor) if tensor.dim() else 0 for tensor in shown[item]]
        if known is None or not new:
            return known
        single = _Single(known.description, rows)
        parts = _or_none(_parts, whole, tensors, single, items)
        if parts is None:
            return None
        for item, single_tensors in shown.items():
            part = parts[item][1]
            if len(part) != len(single_tensors) or not all(map(_is_close, single_tensors, part)):
                return None
        return single

    def _joined(self, parts: Sequence[tuple[Any, list[Tensor]] | None]) -> Any:
        """Return the result of which every item has been read; None where one is missing, or unlike the others."""
        read = [part for part in parts if part is not None]
        if len(read) < len(parts) or any(description != read[0][0] for description, _ in read):
            return None
        joined = _or_none(join, read[0][0], [tensors for _, tensors in read])
        return None if joined is None else self._on_device(*joined)

    def _write(self, key: str, description: Any, tensors: Sequence[Tensor]) -> None:
        if any(tensor.device.type != self._device.type for tensor in tensors):
            raise self._refused(f"Its result must be on the {self._device.type}, where it is read to")
        try:
            self._files.write(key, description, tensors)
        except ValueError as error:
            raise self._refused(f"Its result must be one that files can hold, and {error}") from None

    def _on_device(self, description: Any, tensors: Sequence[Tensor]) -> Any:
        arrived = [tensor.to(self._device) for tensor in tensors]
        for tensor in arrived:  # a stage that looks for what travels to later ones takes them for the encoder's result
            mark_dependent(tensor)
        return rebuild(description, arrived)

    def _refused(self, rule: str, fix: str = "Leave it unset") -> ConfigError:
        return ConfigError(self._field, self._boundary.name, rule, fix)


def _parts(whole: Any, tensors: list[Tensor], single: _Single, items: Items) -> list[tuple[Any, list[Tensor]]]:
    """Return the part of each item; raise DividedError where a result has none."""
    part = part_of_result(whole, single.description, items)
    rows = [single.rows[items.size(item)] for item in range(items.count)]
    return [take(part, tensors, items, item, rows) for item in range(items.count)]


def _or_none(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except DividedError:
        return None


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    """Whether two results are equal but for rounding."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if not actual.is_floating_point():
        return torch.equal(actual, expected)
    off = max(torch.finfo(actual.dtype).eps ** 0.5, _MOST_OFF)
    actual, expected = actual.double(), expected.double()
    return bool((actual - expected).abs().max() <= off * expected.abs().max()) if actual.numel() else True


def _key(kind: str, call: str, tensors: Sequence[Tensor]) -> str:
    digest = hashlib.sha256(f"{kind}\n{call}\n".encode())
    for tensor in tensors:
        update(digest, tensor)
    return digest.hexdigest()


def _item_keys(call: str, tensors: Sequence[Tensor], items: Items) -> list[str]:
    return [
        _key("item", call, [part_of_inputs(tensor, items, item) for tensor in tensors]) for item in range(items.count)
    ]


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FeatureFiles:
    """The files of one folder.

    Args:
        folder: made with the first file.
        field: of the configuration that named it, for warnings.
    """

    def __init__(self, folder: str | os.PathLike[str], field: str) -> None:
        self._folder, self._field = Path(folder), field
        self._writes = True
        self._leaving: dict[str, tuple[Any, list[Tensor], Any]] = {}  # copies in host memory, whole after an event

    def path(self, key: str) -> Path:
        """Return the file of a key, of hexadecimal digits."""
        return self._folder / key[:2] / f"{key}.safetensors"

    def read(self, key: str) -> tuple[Any, list[Tensor]] | None:
        """Return what was written under `key`: its description, and its tensors on the CPU; None without a whole file.

        A damaged file is reported by a warning.
        """
        self.finish(lambda other, event: other == key or event.query())
        path = self.path(key)
        if not path.exists():
            return None
        try:
            file = TensorFile(path)
            description = json.loads(file.metadata["description"])
            if not file.has_checksums or file.metadata["digest"] != _digest(key, description, file.entries):
                raise CheckpointCorruptError(f"{str(path)!r}: its description differs from what was written")
            return description, [file.read(str(index)) for index in range(len(file.names()))]
        except (CheckpointCorruptError, KeyError, ValueError, RecursionError) as error:
            warnings.warn(f"{self._field}: these features are computed again. {error}", stacklevel=2)
            return None

    def write(self, key: str, description: Any, tensors: Sequence[Tensor]) -> None:
        """Keep a description, which JSON can hold, and tensors under `key`; from a GPU, once they have left it.

        Raises:
            ValueError: a dtype or layout that no safetensors file can hold.
            OSError: the folder may not be written.
        """
        if not tensors or not all(tensor.is_cuda and tensor.layout == torch.strided for tensor in tensors):
            self._write(key, description, tensors)
        elif self._writes:
            lay_out({str(index): (tensor.dtype, tuple(tensor.shape)) for index, tensor in enumerate(tensors)})
            copies = [
                torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True) for tensor in tensors
            ]
            for copy, tensor in zip(copies, tensors, strict=True):  # what is written to features later comes after it
                copy.copy_(tensor.detach(), non_blocking=True)
            event = torch.cuda.current_stream(tensors[0].device).record_event()
            self._leaving[key] = description, copies, event

    def close(self) -> None:
        """Write what has left a GPU; a run that its device has failed leaves nothing to write."""
        with suppress(RuntimeError):
            self.finish()

    def finish(self, is_due: Callable[[str, Any], bool] = lambda key, event: True) -> None:
        """Write what has left a GPU, as far as `is_due` says so of a key and the event at the end of its copies."""
        for key in [key for key, (_, _, event) in self._leaving.items() if is_due(key, event)]:
            description, copies, event = self._leaving.pop(key)
            event.synchronize()
            self._write(key, description, copies)

    def _write(self, key: str, description: Any, tensors: Sequence[Tensor]) -> None:
        if not self._writes:
            return
        path = self.path(key)
        new = path.with_name(f".{key}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
        specs = {str(index): (tensor.dtype, tuple(tensor.shape)) for index, tensor in enumerate(tensors)}
        entries = {name: Entry(dtype, shape, 0, 0) for name, (dtype, shape) in specs.items()}
        metadata = {"description": json.dumps(description), "digest": _digest(key, description, entries)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with TensorFileWriter(new, specs, metadata, flush=False) as file:
                for index, tensor in enumerate(tensors):
                    file.write(str(index), tensor)
            new.replace(path)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._writes = False
            warnings.warn(f"{self._field}: no more features are kept from here on: {error}", stacklevel=2)
        finally:
            new.unlink(missing_ok=True)


def _digest(key: str, description: Any, entries: Mapping[str, Entry]) -> str:
    """Return what a file's header must agree with; the bytes of tensors have checksums of their own."""
    shapes = sorted((name, str(entry.dtype), list(entry.shape)) for name, entry in entries.items())
    return hashlib.sha256(json.dumps([key, description, shapes]).encode()).hexdigest()


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class CacheFeatures(Feature):
    """The field `Modality.memory.cache_features`: the folder in which features are kept."""

    def check(self, module: pl.LightningModule, plan: Plan, device: torch.device) -> None:
        """Refuse encoders whose features change from step to step.

        Random numbers that no dropout module draws show in the first call (`CachedFeatures`).

        Raises:
            ConfigError: parameters are trained, or a dropout or batch norm is in training mode.
        """
        for name, modality in plan.modalities.items():
            if modality.memory.cache_features is None:
                continue
            field, got = f"modalities.{name}.memory.cache_features", modality.memory.cache_features
            owned = [full for full in plan.partition.owners if name in plan.partition.users(full)]
            parameters = dict(module.named_parameters(remove_duplicate=False))
            trained = [full for full in owned if full in parameters and parameters[full].requires_grad]
            if trained:
                count = sum(full in parameters for full in owned)
                rule = (
                    f"Features of a frozen encoder are kept, and {len(trained)} of the {count} parameters of {name} are"
                )
                fix = "Freeze them with requires_grad_(False), or let module and boundary name the part that is frozen"
                raise ConfigError(field, got, f"{rule} trained, {trained[0]} among them", fix)
            owns = plan.partition.encoders[name].owns
            for path, part in module.named_modules():
                is_random = isinstance(part, _DROPOUTS) and part.p > 0
                if (
                    part.training
                    and (is_random or isinstance(part, _BATCH_NORMS))
                    and any(is_in(path, owned_path) for owned_path in owns)
                ):
                    where = f"{path} ({type(part).__name__})"
                    rule = f"{where} is in training mode, and gives an image other features each time"
                    fix = f"Call eval() on {owns[0]} in __init__ or configure_model, which Lightning keeps"
                    raise ConfigError(field, got, rule, fix)

    def cut(self, runtime: Runtime, plan: Plan, device: torch.device) -> Callable[[], None] | None:
        """Look calls of boundaries up before they are computed, and before any patch says that another rank does."""
        if all(modality.memory.cache_features is None for modality in plan.modalities.values()):
            return None
        return CachedFeatures(runtime, plan.modalities, device).remove


FEATURE = CacheFeatures
