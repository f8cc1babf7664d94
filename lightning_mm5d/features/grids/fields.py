"""Checks of grids of tensor parallel ranks: how many ranks each mode has, and what does not go with a grid."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from lightning_mm5d.config.checks import check_count
from lightning_mm5d.config.errors import ConfigError, did_you_mean, one_of
from lightning_mm5d.config.groups import TensorOptions, path_of
from lightning_mm5d.config.modality import Modality


def grid_side(mode: str, size: int, depth: int = 1) -> int:
    """Return the side q of the grid of `size` ranks: ``grid_side("2d", 4) == 2``; 0 where they form none.

    Args:
        mode: ``2d`` has q * q ranks, ``2.5d`` depth * q * q, ``3d`` q * q * q.
        size: number of ranks.
        depth: of ``2.5d``.
    """
    side = round(size ** (1 / 3)) if mode == "3d" else math.isqrt(size // depth)
    return side if _ranks(mode, side, depth) == size else 0


def check(fields: Mapping[str, Any]) -> None:
    """Refuse ranks that form no grid, and what a grid cannot be combined with, whatever the model.

    Raises:
        ConfigError: at the first field that cannot work.
    """
    for name, modality in (fields.get("modalities") or {}).items():
        _check(f"modalities.{name}", modality)


def why_not_side_by_side(modality: Modality) -> tuple[str, str] | None:
    """Return why stages of `modality` cannot compute microbatches side by side, and what they could with."""
    if modality.tensor.tp_mode == "1d":
        return None
    return f"tp_mode={modality.tensor.tp_mode!r} a product waits for its panels by itself", "use tp_mode='1d'"


def _check(field: str, modality: Modality) -> None:
    mode, size, depth = modality.tensor.tp_mode, modality.tp_size, modality.tensor.tp_depth
    check_count(f"{field}.tensor.tp_depth", depth)
    modes = get_args(get_type_hints(TensorOptions)["tp_mode"])
    if mode not in modes:
        rule = f"It is one of {', '.join(modes)}"
        raise ConfigError(f"{field}.tensor.tp_mode", mode, rule, did_you_mean(str(mode), modes))
    if mode != "2.5d" and depth != 1:
        rule = f"It is the depth of a grid of tp_mode='2.5d', and tp_mode is {mode!r}"
        raise ConfigError(f"{field}.tensor.tp_depth", depth, rule, "Leave it unset, or use tp_mode='2.5d'")
    if mode == "1d" or (size == 1 and depth == 1):
        return
    if grid_side(mode, size, depth) < 2:
        form = {"2d": "q * q", "2.5d": f"tp_depth * q * q = {depth} * q * q", "3d": "q * q * q"}[mode]
        below = max((q for q in range(2, 1025) if _ranks(mode, q, depth) <= size), default=2)
        near = sorted({_ranks(mode, below, depth), _ranks(mode, below + 1, depth)})
        rule = f"The ranks of tp_mode={mode!r} form a grid of {form} with q of at least 2"
        fix = f"The nearest are {one_of(near)}; any number fits tp_mode='1d'"
        raise ConfigError(f"{field}.tp_size", size, rule, fix)
    refused = {
        "sequence_parallel": (modality.tensor.sequence_parallel, "Hidden states are in blocks on all ranks already"),
        "cp_size": (modality.cp_size if modality.cp_size > 1 else None, "A grid shards samples, not sequences"),
        "ep_size": (modality.ep_size if modality.ep_size > 1 else None, "Experts are not sharded over a grid"),
        "compile": (modality.compute.compile, "Layers on a grid wait for other ranks between their products"),
    }
    for name, (setting, rule) in refused.items():
        if setting:
            rule = f"{rule}, and tp_mode is {mode!r}"
            raise ConfigError(f"{field}.{path_of(name)}", setting, rule, f"Leave out {name}, or use tp_mode='1d'")


def _ranks(mode: str, side: int, depth: int) -> int:
    return side**3 if mode == "3d" else side**2 * (depth if mode == "2.5d" else 1)
