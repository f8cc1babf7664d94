"""Checks of `Modality.memory.cache_features`: an encoder whose ranks each compute it by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality, decoders_of, main_modality_of


def check(fields: Mapping[str, Any]) -> None:
    """Refuse `cache_features` where one rank alone cannot say which features are missing.

    Ranks that share an encoder compute together, and a rank that finds features would leave the others waiting.

    Raises:
        ConfigError: it is no encoder, its ranks share layers, sequences, experts or parameters, or pipelines are
            unlike.
    """
    modalities: Mapping[str, Modality] = fields.get("modalities") or {}
    if all(modality.memory.cache_features is None for modality in modalities.values()):
        return
    main, decoders = main_modality_of(modalities), decoders_of(modalities)
    unlike = next((name for name, modality in modalities.items() if modality.pipeline.pipelines is not None), None)
    for name, modality in modalities.items():
        if modality.memory.cache_features is not None:
            _check(name, modality, is_encoder=name != main and name not in decoders, unlike=unlike)


def _check(name: str, modality: Modality, *, is_encoder: bool, unlike: str | None) -> None:
    folder, where = modality.memory.cache_features, f"modalities.{name}.memory.cache_features"
    if not isinstance(folder, str) or not folder.strip():
        rule = "It is the folder in which features are kept"
        raise ConfigError(where, folder, rule, "Use a path such as 'features/vision', or leave it unset")
    if not is_encoder:
        rule = "It keeps what a frozen encoder gives to the language model, and this modality is no such encoder"
        raise ConfigError(where, folder, rule, "Leave it unset here")
    sizes = {"tp_size": modality.tp_size, "cp_size": modality.cp_size, "ep_size": modality.ep_size}
    for size_name, size in {**sizes, "pp_size": modality.num_cuts}.items():
        if size > 1:
            rule = f"Each rank looks features up by itself, and {size_name} has {size} ranks compute them together"
            raise ConfigError(where, folder, rule, f"Use {size_name}=1, with dp_size for speed, or leave it unset")
    if modality.shared_stage == 3:
        rule = "Each rank looks features up by itself, and with zero_stage=3 ranks share the parameters of the encoder"
        raise ConfigError(where, folder, rule, "Use offload='parameters' to save memory, or leave it unset")
    if unlike is not None:
        rule = f"It does not go with unlike pipelines (modalities.{unlike}.pipeline.pipelines)"
        raise ConfigError(where, folder, rule, "Leave it unset")
