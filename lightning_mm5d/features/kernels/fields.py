"""Checks of `Modality.compute.kernels`: which there are, and what goes together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_mm5d.config.errors import ConfigError, did_you_mean
from lightning_mm5d.config.modality import Modality

ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3")
"""by the names that transformers gives them"""
KERNELS = (*ATTENTIONS, "rms_norm", "liger")


def check(fields: Mapping[str, Any]) -> None:
    """Refuse kernels that do not exist, or do not go together, whatever the model and the device.

    Raises:
        ConfigError: at the first kernel that cannot work.
    """
    for name, modality in (fields.get("modalities") or {}).items():
        _check(f"modalities.{name}.compute.kernels", modality)


def _check(field: str, modality: Modality) -> None:
    kernels = modality.compute.kernels
    if kernels is None:
        return
    rule = f"It is one of {', '.join(KERNELS)}, or a list of these"
    if not isinstance(kernels, str | list | tuple):
        raise ConfigError(field, kernels, rule, "Use ['sdpa'], or leave it unset")
    chosen = modality.chosen_kernels
    unknown = [kernel for kernel in chosen if kernel not in KERNELS]
    if unknown:
        raise ConfigError(field, kernels, rule, did_you_mean(str(unknown[0]), KERNELS))
    several = [kernel for kernel in dict.fromkeys(chosen) if kernel in ATTENTIONS]
    if len(several) > 1:
        rule = f"{' and '.join(several)} both compute the attention"
        raise ConfigError(field, kernels, rule, f"Leave out {several[1]!r}")
    if modality.cp_size > 1 and not {*chosen}.isdisjoint(ATTENTIONS):
        rule = "An attention over sequences that ranks share has kernels of its own, with cp_size above 1"
        raise ConfigError(field, kernels, rule, "Leave the attention out, or use cp_size=1")
    if modality.tensor.tp_mode != "1d" and not {*chosen}.isdisjoint(("rms_norm", "liger")):
        rule = f"With tp_mode={modality.tensor.tp_mode!r} ranks hold blocks of hidden states, not whole rows"
        raise ConfigError(field, kernels, rule, "Leave out 'rms_norm' and 'liger', or use tp_mode='1d'")
    if "liger" in chosen and (modality.cp_size > 1 or modality.tensor.sequence_parallel):
        rule = "Liger's kernels take plain tensors, and hidden states stand for those of other ranks here"
        raise ConfigError(field, kernels, rule, "Leave out 'liger', or sequence_parallel and cp_size")
