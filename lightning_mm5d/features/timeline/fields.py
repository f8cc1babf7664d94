"""Checks of `timeline`: a file that can be written, of a step in which all replicas have as many microbatches."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.groups import path_of


def check(fields: Mapping[str, Any]) -> None:
    """Refuse files that no timeline can be written to, and what none can show.

    Raises:
        ConfigError: it is no path, its suffix stands for no kind of file, matplotlib is missing for a picture, the
            file cannot be written, or replicas may have unlike numbers of microbatches.
    """
    path = fields.get("timeline")
    if path is None:
        return
    if not isinstance(path, str | os.PathLike) or not str(path):
        rule = "It is the path of a file"
        raise ConfigError("timeline", path, rule, "Use for instance 'timeline.json', or leave it unset")
    _check_file(path, Path(path))
    for name, modality in (fields.get("modalities") or {}).items():
        if modality.pipeline.pipelines is not None or modality.pipeline.speeds is not None:
            field = path_of("speeds" if modality.pipeline.pipelines is None else "pipelines")
            rule = (
                f"Replicas may have unlike numbers of microbatches (modalities.{name}.{field}), and a timeline shows a "
                "step in which all have as many"
            )
            raise ConfigError("timeline", path, rule, "Leave it unset")


def _check_file(path: str | os.PathLike[str], file: Path) -> None:
    if file.suffix not in (".json", ".png", ".svg", ".pdf"):
        rule = "A timeline is a picture (.png, .svg, .pdf) or a Chrome trace (.json)"
        fix = f"Use {(file.with_suffix('.json').name if file.name else 'a.json')!r}"
        raise ConfigError("timeline", path, rule, fix)
    if file.suffix != ".json" and find_spec("matplotlib") is None:
        rule = "Pictures are drawn by matplotlib, which is not installed"
        raise ConfigError("timeline", path, rule, "Install lightning_mm5d[plot], or use a .json file")
    if file.is_dir():
        raise ConfigError("timeline", path, "It is a folder", f"Name a file in it, such as {str(file / 'a.json')!r}")
    if not file.parent.is_dir():
        rule = f"There is no folder {str(file.parent)!r}"
        raise ConfigError("timeline", path, rule, "Make it, or name a file in a folder that is there")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        rule = "This process may not write it"
        raise ConfigError("timeline", path, rule, "Name a file in a folder that it may write to")
