"""A run says once at its start what was found and which rank holds what, unless summaries are off."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelSummary

from features.toys import LANGUAGE, PIPE, VISION, Run, Toy, together
from lightning_mm5d import Modality
from lightning_mm5d.features import start_summary
from lightning_mm5d.features.start_summary import summary
from lightning_mm5d.layout.layout import Layout
from lightning_mm5d.plan.plan import Plan


def planned(ranks: int, **modalities: Modality) -> Plan:
    layout = Layout.build(modalities, world_size=ranks, loss_modality="language", ranks_per_node=8)
    return Plan.of(Toy(), layout, modalities)


def test_each_stage_has_a_row_with_its_ranks_layers_and_parameters() -> None:
    plan = planned(3, vision=Modality(**VISION), language=Modality(pp_size=2, **LANGUAGE))
    rows = summary(plan).rows
    assert [row[:4] for row in rows] == [
        ("vision.0", "0", "whole", "encoder.layers[0:2]"),
        ("language.0", "1", "pp 2", "decoder.layers[0:2]"),
        ("language.1", "2", "pp 2", "decoder.layers[2:4]"),
    ]
    whole = sum(parameter.numel() for parameter in Toy().parameters())
    assert sum(int(row[4].replace(",", "")) for row in rows) == whole


@pytest.mark.parametrize("replicas", [100, 300])
def test_many_ranks_take_few_lines(replicas: int) -> None:
    vision, language = Modality(dp_size=replicas, **VISION), Modality(dp_size=replicas, pp_size=4, **LANGUAGE)
    plan = planned(5 * replicas, vision=vision, language=language)
    text = str(summary(plan))
    assert len(text.splitlines()) == 6
    assert max(map(len, text.splitlines())) < 120


def printed(run: Run) -> list[str]:
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start_summary, "rank_zero_info", found.append)
        for shown in (True, False):
            options: dict[str, Any] = {"enable_model_summary": shown, "callbacks": [ModelSummary()] if shown else []}
            run.trainer(**options).fit(Toy(), run.training(8))
    return found


def test_rank_0_prints_it_where_lightning_prints_its_summary() -> None:
    first, *others = together(PIPE, printed)
    assert len(first) == 1
    assert first[0].startswith("MultimodalStrategy: 3 ranks, 1 replica, 1f1b, microbatches: 2")
    assert others == [[], []]
