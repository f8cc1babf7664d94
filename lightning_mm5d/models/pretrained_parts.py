"""Reads the parts of a composed model from where each was pretrained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModel, AutoModelForCausalLM

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.models.modality_encoder import ModalityEncoder


def loaded_encoder(name: str, source: Any, projector: Any, options: dict[str, Any]) -> ModalityEncoder:
    """Return an encoder with its projector.

    Args:
        name: of the modality, for errors.
        source: a folder or a name on the hub, a model, or an encoder with its projector already.
        projector: what `ModalityEncoder` takes, or None.
        options: of ``from_pretrained``.

    Raises:
        ConfigError: two projectors are given.
    """
    if isinstance(source, ModalityEncoder):
        if projector is not None:
            rule = "The encoder of that name has a projector already"
            raise ConfigError(f"projectors.{name}", projector, rule, "Leave one of them out")
        return source
    model = AutoModel.from_pretrained(source, **options) if isinstance(source, str | Path) else source
    return ModalityEncoder(model, "mlp" if projector is None else projector)


def loaded_language_model(source: Any, options: dict[str, Any]) -> Any:
    """Return a causal language model from a folder or a name on the hub; a model as it is."""
    return AutoModelForCausalLM.from_pretrained(source, **options) if isinstance(source, str | Path) else source
