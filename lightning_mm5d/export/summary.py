"""What a checkpoint holds, as a page: step, layout, files, parameters, optimizers, models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_mm5d.checkpoint.huggingface_record import record_in
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.export.plain_file import open_plain, tensors_in
from lightning_mm5d.planner.tables import Page, Table

_UNITS = ("KB", "MB", "GB", "TB", "PB")


def summary(path: Path, *, verify: bool, weights_only: bool = True) -> Page:
    """Return the page of a checkpoint.

    Args:
        path: of a full checkpoint, or of the folder of a sharded one.
        verify: whether to read all of it and compare it with its checksums.
        weights_only: whether to refuse what needs pickle to run code.

    Raises:
        ConfigError: there is no checkpoint.
        CheckpointCorruptError: it is damaged.
        CheckpointUntrustedError: it asks for code to be run.
    """
    if not path.exists():
        raise ConfigError("CHECKPOINT", str(path), "There is no such file or folder", "Name a checkpoint")
    content = open_plain(path, weights_only)
    rows = [("checkpoint", str(path)), ("format", "full, one file"), *_progress(content)]
    rows += [("size", human(path.stat().st_size)), ("content", "all checksums hold")]
    return [Table.of(("", ""), rows), *_parts(content), *_models(record_in(content))]


def human(size: int) -> str:
    """Return a number of bytes as ``"1.2 GB"``."""
    if size < 1000:
        return f"{size} bytes"
    power = min(int(math.log(size + size // 2000, 1000)), len(_UNITS))  # 999.9 KB are 1.0 MB
    number = size / 1000**power
    return f"{number:.{0 if number >= 99.95 else 1}f} {_UNITS[power - 1]}"


def _progress(content: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for key, name in (("epoch", "epoch"), ("global_step", "step"), ("pytorch-lightning_version", "Lightning")):
        if key in content:
            yield name, str(content[key])


def _parts(content: Mapping[str, Any]) -> Page:
    """Tables of what takes memory, and of the rest by its keys."""
    state = content["state_dict"]
    rows = [("weights", *_amount(state))]
    for number, each in enumerate(content.get("optimizer_states", ())):
        rows.append((f"optimizer {number}", *_amount(each)))
    others = sorted(set(content) - {"state_dict", "optimizer_states", "epoch", "global_step"})
    return [Table.of(("part", "tensors", "numbers", "bytes"), rows), f"Also in it: {', '.join(others)}"]


def _amount(tree: Any) -> tuple[int, int, str]:
    tensors: list[Tensor] = list({id(each): each for each in tensors_in(tree)}.values())
    return len(tensors), sum(each.numel() for each in tensors), human(sum(each.nbytes for each in tensors))


def _models(record: Mapping[str, Any] | None) -> Page:
    if record is None or not record["models"]:
        return []
    rows = [(model["path"] or ".", model["name"], ", ".join(model.get("adapters", ()))) for model in record["models"]]
    page: Page = [Table.of(("path", "model of Hugging Face", "adapters"), rows)]
    processors = [f"{each['path']} ({each['class']})" for each in record["processors"]]
    return [*page, f"Processors: {', '.join(processors)}"] if processors else page
