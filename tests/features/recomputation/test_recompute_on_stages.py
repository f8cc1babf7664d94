"""Recomputation that says something of single stages and layers, in schedules with chunks, and under autocast."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from features.toys import LANGUAGE, VISION, Layout, Run, Toy, together, weights
from lightning_mm5d import Modality
from lightning_mm5d.config.groups import with_fields

STAGES = Layout(
    {"vision": Modality(colocate_with="language.0", **VISION), "language": Modality(pp_size=2, **LANGUAGE)}, 2
)
SCHEDULES: dict[str, list[tuple[Any, set[int]]]] = {
    "1f1b": [
        ({"per_stage": ["full", "none"]}, {0, 1}),
        ({"per_stage": [{"every": 2}, {"layers": [0]}]}, {1, 2}),
        ({"per_stage": ["none", "selective"]}, {2, 3}),
        ({"fraction": 0.5}, {1, 3}),
        ({"layers": [0, 3]}, {0, 3}),
    ],
    "zbv": [
        ({"per_stage": ["full", "none", "selective", "none"]}, {0, 2}),
        ({"per_stage": ["none", "full", "none", {"fraction": 1}]}, {1, 3}),
        ({"fraction": 0.5}, {1, 3}),
        ({"layers": [0, 3]}, {0, 3}),
    ],
}
"""What is said of four layers, and which of them run again."""


class Counted(Toy):
    """Counts how often each layer of the decoder runs."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.decoder._runs = Counter()  # other attributes become those of all ranks
        for index, layer in enumerate(self.decoder.layers):
            layer.up.register_forward_pre_hook(partial(self._count, index))

    def _count(self, index: int, *_: Any) -> None:
        self.decoder._runs[index] += 1


class Single(Counted):
    """In single precision, which autocast makes lower."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().loss({**batch, "images": batch["images"].float()})


def fit(run: Run, kind: Any, made: type[Counted] = Counted, **options: Any) -> tuple[dict[str, Any], Counter[int]]:
    assert run.layout is not None
    language = with_fields(run.layout.modalities["language"], activation_checkpointing=kind)
    torch.manual_seed(5)
    module = made()
    chosen = replace(run, layout=replace(run.layout, modalities={**run.layout.modalities, "language": language}))
    chosen.trainer(max_epochs=2, **options).fit(module, run.training())
    return weights(module), module.decoder._runs


def everything(run: Run) -> Any:
    found = {}
    for schedule, cases in SCHEDULES.items():
        there = replace(run, options={"schedule": schedule})
        found[schedule] = [fit(there, kind) for kind in ("none", *(kind for kind, _ in cases))]
    there = replace(run, options={"schedule": "1f1b"})
    kinds = ("none", "full", "selective")
    found["autocast"] = [fit(there, kind, Single, precision="bf16-mixed") for kind in kinds]
    found["single"] = [fit(there, "none", Single)]
    return found


def test_stages_and_layers_that_run_again_give_the_same_bits_in_both_orders_of_chunks_and_under_autocast() -> None:
    """vision and the first stage of language: rank 0; its second: rank 1. Under zbv rank 0 has the stages 0 and 3."""
    ranks = together(STAGES, everything)

    def runs(name: str) -> list[Counter[int]]:
        kinds = zip(*(one[name] for one in ranks), strict=True)
        return [sum((counts for _, counts in kind), Counter[int]()) for kind in kinds]

    for name in (*SCHEDULES, "autocast"):
        (expected, _), *others = ranks[0][name]
        for got, _ in others:
            assert all(torch.equal(got[key], expected[key]) for key in expected), name
    for schedule, cases in SCHEDULES.items():
        plain, *again = runs(schedule)
        for (kind, chosen), got in zip(cases, again, strict=True):
            assert {index for index in plain if got[index] > plain[index]} == chosen, (schedule, kind)
    plain, *again = runs("autocast")
    assert all(got[index] > plain[index] for got in again for index in plain)
    in_single = ranks[0]["single"][0][0]
    assert not all(torch.equal(value, in_single[key]) for key, value in ranks[0]["autocast"][0][0].items())
