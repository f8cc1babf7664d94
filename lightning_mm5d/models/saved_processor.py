"""Writes and reads the parts of a `MultimodalProcessor`: JSON and the parts' own files, nothing that runs code.

Layout of a folder: the tokenizer's files, ``multimodal_processor.json`` (modalities, placeholder tokens, the model's
configuration), and ``processors/<name>/`` for each modality. Functions are named there as missing; their code is
never read from a folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoTokenizer,
    AutoVideoProcessor,
    FeatureExtractionMixin,
    ImageProcessingMixin,
)
from transformers.video_processing_utils import BaseVideoProcessor

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.models.multimodal_config import MultimodalConfig

NAME = "multimodal_processor.json"
_LOADERS: dict[str, Any] = {"video": AutoVideoProcessor, "image": AutoImageProcessor, "feature": AutoFeatureExtractor}
_CLASSES = {"video": BaseVideoProcessor, "image": ImageProcessingMixin, "feature": FeatureExtractionMixin}


def save_parts(
    folder: Path,
    tokenizer: Any,
    processors: Mapping[str, Any],
    tokens: Mapping[str, str],
    config: MultimodalConfig,
    frames: int | None,
) -> None:
    """Write all parts into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    kinds = {name: _kind(processor) for name, processor in processors.items()}
    for name, kind in kinds.items():
        if kind is not None:
            processors[name].save_pretrained(folder / "processors" / name)
    fields = {"tokens": dict(tokens), "processors": kinds, "frames": frames, "model": config.to_dict()}
    (folder / NAME).write_text(json.dumps(fields, indent=2, ensure_ascii=False), encoding="utf-8")


def load_parts(folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Read what `save_parts` wrote.

    Args:
        folder: that holds it.
        given: processors to use in place of saved ones.

    Returns:
        ``tokenizer``, ``processors``, ``tokens``, ``frames`` and ``config``.

    Raises:
        ConfigError: there is no such folder, or a processor was a function and is not given.
    """
    path = folder / NAME
    if not path.is_file():
        rule = f"A saved processor has a file {NAME}"
        raise ConfigError("folder", str(folder), rule, "Pass the folder that save_pretrained wrote")
    fields = json.loads(path.read_text(encoding="utf-8"))
    processors = {}
    for name, kind in fields["processors"].items():
        if Path(name).name != name:
            raise ConfigError(f"{path}: processors", name, "It is the name of a modality", "Save the processor again")
        if kind not in (*_LOADERS, None) or (kind is None and name not in given):
            rule = "It is a function, which is not saved"
            fix = f"Write from_pretrained(folder, processors={{{name!r}: ...}})"
            raise ConfigError(f"{path}: processors.{name}", kind, rule, fix)
        if name in given:
            processors[name] = given[name]
        else:
            processors[name] = _LOADERS[kind].from_pretrained(folder / "processors" / name)
    return {
        "tokenizer": AutoTokenizer.from_pretrained(folder),
        "processors": processors,
        "tokens": fields["tokens"],
        "frames": fields["frames"],
        "config": MultimodalConfig.from_dict(fields["model"]),
    }


def _kind(processor: Any) -> str | None:
    return next((kind for kind, cls in _CLASSES.items() if isinstance(processor, cls)), None)
