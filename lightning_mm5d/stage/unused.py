"""Refuses what arrived in a stage and its step did not use: it would get no gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_mm5d.stage.runtime import Runtime
from lightning_mm5d.stage.view import StageError, StageView


def check_used(
    stage: StageView,
    runtime: Runtime,
    boundaries: Mapping[str, Sequence[Any]],
    consumed: Mapping[str, int],
    calls: Mapping[str, Sequence[Any]],
    entered: Mapping[str, int],
) -> None:
    """Refuse results of an encoder in its last consumer, and hidden states, that a step left unused.

    Args:
        stage: that ran.
        runtime: the patched module.
        boundaries: the results that arrived, by boundary.
        consumed: how many of them were used.
        calls: the hidden states that arrived, by modality.
        entered: how many of them a layer was entered with.

    Raises:
        StageError: something was left.
    """
    for name, results in boundaries.items():
        used, modality = consumed.get(name, 0), runtime.modality_of(name)
        if modality in stage.must_use and used < len(results):
            raise StageError(
                f"{len(results)} results of {name} arrived in stage {stage.name}, and the step used {used} of "
                f"them there: set modalities.{modality}.feeds to the stages whose layers follow its use, or "
                f"modalities.{modality}.boundary to the callable whose result the step uses"
            )
    for modality, arrived in calls.items():
        if entered.get(modality, 0) < len(arrived):
            raise StageError(
                f"{len(arrived)} hidden states arrived in stage {stage.name}, and the step entered its first "
                f"layer {entered.get(modality, 0)} times: a layer that a stage begins with must run in every "
                f"step. Choose another cut with modalities.{modality}.pipeline_template, or set pp_size to 1"
            )
