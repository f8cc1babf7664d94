"""Microbatches that a stage computes side by side: what they need, and what does not go with them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_mm5d.config.errors import ConfigError, nearest, one_of
from lightning_mm5d.config.features import parts
from lightning_mm5d.config.groups import path_of
from lightning_mm5d.config.modality import Modality

_FIX = "Leave it unset here"


def check(fields: Mapping[str, Any]) -> None:
    """Refuse microbatches side by side that cannot work whatever the model and the number of ranks.

    Raises:
        ConfigError: at the first field that cannot work.
    """
    modalities = fields.get("modalities") or {}
    for name in modalities:
        _check(name, modalities)
        _check_number(name, modalities[name].pipeline.interleaved_microbatches, fields)


def _check(name: str, modalities: Mapping[str, Modality]) -> None:
    modality = modalities[name]
    field, count = f"modalities.{name}.pipeline.interleaved_microbatches", modality.pipeline.interleaved_microbatches
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(field, count, "It must be a whole number of at least 1", "Use 1, or leave it unset")
    if count == 1:
        return
    if modality.tp_size == modality.cp_size == modality.ep_size == 1:
        rule = "One computes while another communicates with tensor, context or expert parallel ranks: there are none"
        raise ConfigError(field, count, rule, f"Use a tp_size, cp_size or ep_size above 1. {_FIX}")
    check_beside(name, name, modalities)
    others = {other.pipeline.interleaved_microbatches for other in modalities.values()} - {1, count}
    if others:
        rule = f"Modalities that interleave take one number, and another one has {max(others)}"
        raise ConfigError(field, count, rule, f"Use {max(others)}, or 1")
    for other, peer in modalities.items():
        if peer.pipeline.pipelines is not None or peer.pipeline.speeds is not None:
            unlike = path_of("pipelines" if peer.pipeline.pipelines is not None else "speeds")
            rule = f"With modalities.{other}.{unlike} replicas have unlike numbers of microbatches"
            raise ConfigError(field, count, rule, f"{_FIX}, or leave {unlike} unset")


def _check_number(name: str, count: int, fields: Mapping[str, Any]) -> None:
    """Refuse a number that does not divide that of microbatches, where the strategy says anything of that."""
    if count == 1 or not fields.keys() & {"num_microbatches", "microbatch_size"}:
        return
    field, num_microbatches = f"modalities.{name}.pipeline.interleaved_microbatches", fields.get("num_microbatches")
    if num_microbatches is None and fields.get("microbatch_size") is None:
        num_microbatches = 1
    if num_microbatches is None:
        rule = "With microbatch_size a batch may have any number of microbatches, and it divides that number"
        raise ConfigError(field, count, rule, "Set num_microbatches in place of microbatch_size")
    if isinstance(num_microbatches, int) and num_microbatches % count:
        rule = f"It divides num_microbatches={num_microbatches}"
        near = nearest(count, lambda n: num_microbatches % n == 0)
        raise ConfigError(field, count, rule, f"Use {one_of(near)}")


def check_beside(name: str, other: str, modalities: Mapping[str, Modality]) -> None:
    """Refuse what the stages of a modality with microbatches side by side cannot hold.

    Args:
        name: of this modality.
        other: of one that runs in its stages, or itself.
        modalities: all of them.

    Raises:
        ConfigError: at the first field that cannot work.
    """
    field = f"modalities.{name}.pipeline.interleaved_microbatches"
    count = modalities[name].pipeline.interleaved_microbatches
    modality, of = modalities[other], f"modalities.{other}"
    if modality.shared_stage == 3:
        rule = f"With {of}.sharding.zero_stage=3 replicas gather layers in each microbatch, which runs by itself"
        raise ConfigError(field, count, rule, f"{_FIX}, or use a zero_stage below 3")
    for checks in parts("fields"):
        if (why := getattr(checks, "why_not_side_by_side", lambda _: None)(modality)) is not None:
            rule, fix = why
            raise ConfigError(field, count, f"With {of}.{rule}", f"{_FIX}, or {fix}")
    if modality.compute.compile:
        rule = f"With {of}.compute.compile layers do not stop at their communication"
        raise ConfigError(field, count, rule, f"{_FIX}, or compile")
