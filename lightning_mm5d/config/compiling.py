"""What a modality may compile, and what goes together. Imports no torch."""

from __future__ import annotations

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality


def check_compile(field: str, modality: Modality) -> None:
    """Refuse a `compile` that names no backend or does not go with other fields; raise ConfigError."""
    said = modality.compile
    if not isinstance(said, bool | str) or not (isinstance(said, bool) or said.strip()):
        rule = "It is true, false or the name of a backend of torch.compile"
        raise ConfigError(field, said, rule, f"Use {bool(said)}")
    if said and modality.sequence_parallel:
        rule = (
            "With sequence_parallel layers take hidden states that stand for shards of other ranks, and run uncompiled"
        )
        raise ConfigError(field, said, rule, "Leave out compile, or sequence_parallel")
