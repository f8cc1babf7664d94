"""What a checkpoint holds, as a page: step, layout, files, parameters, optimizers, models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.tables import Page, Table
from lightning_mm5d.export.lightning_file import open_plain
from lightning_mm5d.features.huggingface_record import record_in
from lightning_mm5d.features.sharded_checkpoints.directory import VERSION, CheckpointDirectory
from lightning_mm5d.features.sharded_checkpoints.sharded_load import (
    SavedOptimizerState,
    SavedWeights,
    ShardedCheckpoint,
)
from lightning_mm5d.sharded.remote_value import tensors_of
from lightning_mm5d.storage.replacement import is_checkpoint_directory

_UNITS = ("KB", "MB", "GB", "TB", "PB")
_PROGRESS = {"epoch": "epoch", "global_step": "step", "pytorch-lightning_version": "Lightning"}
_RUN = {
    "world_size": "ranks",
    "schedule": "schedule",
    "num_microbatches": "microbatches",
    "microbatch_size": "samples per microbatch",
}
_KNOWN = {"state_dict", "optimizer_states", "epoch", "global_step"}
_MOST_FILES = 20  # in the table; of more only the number and the sum are said


def summary(path: Path, *, verify: bool, weights_only: bool = True) -> Page:
    """Return the page of a checkpoint.

    Args:
        path: of a full checkpoint, or of the folder of a sharded one.
        verify: whether to read all of a sharded one and compare it with its checksums; a full one always is.
        weights_only: whether to refuse what needs pickle to run code.

    Raises:
        ConfigError: there is no checkpoint.
        CheckpointCorruptError: it is damaged.
        CheckpointUntrustedError: it asks for code to be run.
    """
    if is_checkpoint_directory(path):
        return _of_folder(path, verify, weights_only)
    if not path.exists():
        raise ConfigError("CHECKPOINT", str(path), "There is no such file or folder", "Name a checkpoint")
    content = open_plain(path, weights_only)
    rows = [("checkpoint", str(path)), ("format", "full, one file"), *_named(content, _PROGRESS)]
    rows += [("size", human(path.stat().st_size)), ("content", "all checksums hold")]
    record = record_in(content)
    return [Table.of(("", ""), rows), *_parts(content, record), *_models(record)]


def human(size: int) -> str:
    """Return a number of bytes as ``"1.2 GB"``."""
    if size < 1000:
        return f"{size} bytes"
    power = min(int(math.log(size + size // 2000, 1000)), len(_UNITS))  # 999.9 KB are 1.0 MB
    number = size / 1000**power
    return f"{number:.{0 if number >= 99.95 else 1}f} {_UNITS[power - 1]}"


def _of_folder(path: Path, verify: bool, weights_only: bool) -> Page:
    directory = CheckpointDirectory(path)
    directory.check_sizes()
    if verify:
        directory.verify()
    sharded = ShardedCheckpoint(path, weights_only=weights_only)
    sizes = {name: file.size for name, file in directory.files.items()}
    held = "all checksums hold" if verify else "sizes and headers hold; --verify reads the rest"
    given = sharded.fields.get("layout")
    layout = given if isinstance(given, Mapping) else {}
    rows = [("checkpoint", str(directory.path)), ("format", f"sharded, version {VERSION}")]
    rows += [*_named(sharded.state, _PROGRESS), *_named(layout, _RUN)]
    rows += [("size", f"{human(sum(sizes.values()))} in {len(sizes)} files"), ("content", held)]
    page: Page = [Table.of(("", ""), rows), *_sizes_of(layout)]
    if len(sizes) <= _MOST_FILES:
        page.append(Table.of(("file", "size"), [(name, human(size)) for name, size in sorted(sizes.items())]))
    record, classes = record_in(sharded.state), sharded.fields.get("optimizers")
    named = classes if isinstance(classes, list) else []
    return [*page, *_parts(sharded.state, record, named), *_models(record)]


def _named(fields: Mapping[str, Any], names: Mapping[str, str]) -> list[tuple[str, str]]:
    """Those of the fields that are there, under their names."""
    return [(name, str(fields[key])) for key, name in names.items() if key in fields]


def _sizes_of(layout: Mapping[str, Any]) -> Page:
    """A row for each modality with its sizes."""
    modalities = layout.get("modalities")
    if not isinstance(modalities, Mapping) or not all(isinstance(sizes, Mapping) for sizes in modalities.values()):
        return []
    axes = list(dict.fromkeys(axis for sizes in modalities.values() for axis in sizes))
    rows = [(name, *(str(sizes.get(axis, "")) for axis in axes)) for name, sizes in modalities.items()]
    return [Table.of(("modality", *axes), rows)] if rows else []


def _parts(content: Mapping[str, Any], record: Mapping[str, Any] | None, classes: Sequence[str] = ()) -> Page:
    """Tables of what takes memory, and of the rest by its keys."""
    same = record["same"] if record is not None else ()
    first = {name: group[0] for group in same for name in group}
    weights = [(first.get(key, key), *size) for key, *size in _sizes(content.get("state_dict", {}))]
    rows = [("weights", *_amount(weights))]
    for number, each in enumerate(content.get("optimizer_states", ())):
        groups = each.get("param_groups", ()) if isinstance(each, Mapping) else ()
        name = str(classes[number]) if number < len(classes) else f"optimizer {number}"
        rows.append((f"{name}, {len(groups)} group{'s' * (len(groups) != 1)}", *_amount(_sizes(each))))
    others = sorted(set(content) - _KNOWN)
    return [Table.of(("part", "tensors", "numbers", "bytes"), rows), f"Also in it: {', '.join(others)}"]


def _sizes(tree: Any) -> Iterable[tuple[Any, Sequence[int], int]]:
    """Identity, shape and bytes of a number, for each tensor; nothing is read."""
    if isinstance(tree, SavedWeights):
        return [(name, tree.shape(name), tree.dtype(name).itemsize) for name in tree.names()]
    if isinstance(tree, SavedOptimizerState):
        parts = [tree.parts(index) for index in tree]
        stored = [(source, name) for source, names, _ in parts for name in names.values()]
        rest_sizes = [(id(each), each.shape, each.itemsize) for _, _, rest in parts for each in tensors_of(rest)]
        return [*((name, source.shape(name), source.dtype(name).itemsize) for source, name in stored), *rest_sizes]
    if isinstance(tree, Mapping):
        return [size for value in tree.values() for size in _sizes(value)]
    return [(each.data_ptr() if each.numel() else id(each), each.shape, each.itemsize) for each in tensors_of(tree)]


def _amount(sizes: Iterable[tuple[Any, Sequence[int], int]]) -> tuple[int, int, str]:
    once = {key: (math.prod(shape), itemsize) for key, shape, itemsize in sizes}
    numbers = sum(count for count, _ in once.values())
    return len(once), numbers, human(sum(count * itemsize for count, itemsize in once.values()))


def _models(record: Mapping[str, Any] | None) -> Page:
    if record is None or not record["models"]:
        return []
    rows = [(model["path"] or ".", model["name"], ", ".join(model.get("adapters", ()))) for model in record["models"]]
    page: Page = [Table.of(("path", "model of Hugging Face", "adapters"), rows)]
    processors = [f"{each['path']} ({each['class']})" for each in record["processors"]]
    return [*page, f"Processors: {', '.join(processors)}"] if processors else page
