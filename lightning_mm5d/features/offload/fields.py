"""Checks of `Modality.memory.offload`: what moves to host memory, and what does not go with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_mm5d.config.errors import ConfigError, did_you_mean
from lightning_mm5d.config.modality import Modality

_OFFLOADS = ("activations", "optimizer", "parameters")


def check(fields: Mapping[str, Any]) -> None:
    """Refuse what is wrong whatever the model and the number of ranks.

    Raises:
        ConfigError: at the first field that cannot work.
    """
    modalities: Mapping[str, Modality] = fields.get("modalities") or {}
    for name, modality in modalities.items():
        if modality.memory.offload is not None:
            _check(f"modalities.{name}", modality, modalities)


def _check(where: str, modality: Modality, modalities: Mapping[str, Modality]) -> None:
    field, offload = f"{where}.memory.offload", modality.memory.offload
    if not isinstance(offload, str | list | tuple):
        rule = "It is a list of what is in host memory between its uses: activations, optimizer, parameters"
        raise ConfigError(field, offload, rule, "Use ['activations'], or leave it unset")
    unknown = [kind for kind in modality.offloads if kind not in _OFFLOADS]
    if unknown:
        rule = "What moves to host memory is activations, optimizer or parameters"
        raise ConfigError(field, offload, rule, did_you_mean(str(unknown[0]), _OFFLOADS))
    if "parameters" in modality.offloads and modality.sharding.reshard_after_forward:
        rule = "reshard_after_forward gathers parameters that ranks share, and those on the host are whole"
        raise ConfigError(field, offload, rule, "Leave out 'parameters', or reshard_after_forward")
    if "parameters" in modality.offloads and modality.ep_size > 1:
        rule = "Experts that ranks share stay on their devices, and offload names parameters"
        raise ConfigError(f"{where}.ep_size", modality.ep_size, rule, "Leave out 'parameters', or ep_size")
    if modality.pipeline.pipelines is not None:
        rule = f"It does not go with unlike pipelines ({where}.pipeline.pipelines)"
        raise ConfigError(field, offload, rule, "Use None")
    for name, other in modalities.items() if modality.offloads else ():
        if other.pipeline.interleaved_microbatches > 1:
            rule = f"With {field}={offload!r} tensors move to the host and back in the order of one microbatch"
            beside = f"modalities.{name}.pipeline.interleaved_microbatches"
            fix = f"Leave it unset here, or leave {field} unset"
            raise ConfigError(beside, other.pipeline.interleaved_microbatches, rule, fix)
