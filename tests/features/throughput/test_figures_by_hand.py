"""The figures of `ModalityThroughput` that are times: of a timeline that is written down here, and not measured."""

from __future__ import annotations

from itertools import count, cycle
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from features.throughput.counted_runs import Kept
from features.toys import PIPE, TOKENS, Run, Toy, together
from lightning_mm5d.engine import flight
from lightning_mm5d.features.throughput import feature

BATCH, SECONDS, STEP = 8, 20.0, 15.0
SPANS = [
    [(0, 1), (1, 2), (7, 9), (10, 12)],  # F0 F1 B0 B1
    [(1, 2), (2, 3), (5, 7), (8, 10)],  # F0 F1 B0 B1
    [(2, 3), (3, 5), (5, 6), (6, 8)],  # F0 B0 F1 B1
]
"""when the actions of each rank of three stages run under 1f1b; optimizers step at 15"""


def moments(rank: int) -> list[float]:
    """What a clock shows whenever it is read in a step: at its begin, around actions, at its end, before optimizers."""
    end = SPANS[rank][-1][1]
    return [float(moment) for moment in (0, 0, *(edge for span in SPANS[rank] for edge in span), end, end, STEP)]


def by_a_clock(run: Run) -> list[dict[str, float]]:
    """Train five batches, each of which takes 20 seconds."""
    clocks: dict[int, Any] = {}

    def moment(_: Any) -> float:
        rank = dist.get_rank()
        return next(clocks.setdefault(rank, cycle(moments(rank))))

    ends, kept = count(SECONDS, SECONDS), Kept()
    time = SimpleNamespace(perf_counter=lambda: next(ends))
    with patch.object(flight, "moment", moment), patch.multiple(feature, moment=moment, time=time):
        trainer = run.trainer(callbacks=[kept], log_every_n_steps=1)
        trainer.fit(Toy(), run.training(5 * BATCH, BATCH))
    return [figures for figures in kept.logged if "samples_per_sec" in figures]


def test_samples_tokens_and_shares_of_time_are_those_of_a_timeline_by_hand(tmp_path: Any) -> None:
    """vision: rank 0; language: ranks 1-2 as stages"""
    samples, tokens = BATCH / SECONDS, BATCH * TOKENS / SECONDS
    ranks, busy = len(SPANS), 6.0
    waits = [(spans[-1][1] - busy) / STEP for spans in SPANS]
    exposed = [1 - spans[-1][1] / STEP for spans in SPANS]
    expected = {
        "samples_per_sec": samples,
        "device/samples_per_sec": samples / ranks,
        "vision/tokens_per_sec": samples,  # a token an image
        "vision/device/tokens_per_sec": samples,
        "language/tokens_per_sec": tokens,
        "language/device/tokens_per_sec": tokens / 2,
        "tokens_per_sec": samples + tokens,
        "device/tokens_per_sec": (samples + tokens) / ranks,
        "device/bubble_share": sum(waits) / ranks,
        "vision/device/bubble_share": waits[0],
        "language/device/bubble_share": (waits[1] + waits[2]) / 2,
        "device/exposed_communication_share": sum(exposed) / ranks,
        "vision/device/exposed_communication_share": exposed[0],
        "language/device/exposed_communication_share": (exposed[1] + exposed[2]) / 2,
    }
    assert waits == pytest.approx([6 / 15, 4 / 15, 2 / 15])
    assert exposed == pytest.approx([3 / 15, 5 / 15, 7 / 15])
    for logged in together(PIPE, by_a_clock, tmp_path):
        assert len(logged) == 4
        for figures in logged:
            assert {name: figures[name] for name in expected} == pytest.approx(expected)
            for name in ("flops_per_sec", "vision/flops_per_sec", "language/flops_per_sec"):
                part, _, figure = name.rpartition("/")
                number = {"": ranks, "vision": 1, "language": 2}[part]
                device = f"{part}/device".lstrip("/")
                assert figures[f"{device}/{figure}"] == pytest.approx(figures[name] / number)
                assert figures[f"{device}/mfu"] == pytest.approx(figures[name] / number / 1e12)
