"""Every schedule that runs gives what one process gives, together with what changes a step around it.

vision: rank 0 (frozen or not); language: ranks 1-2, two chunks of its layers on each.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_mm5d import Modality
from lightning_mm5d.schedule import SCHEDULES
from parity.harness import fit, strategy
from parity.test_parity import SAMPLES, build
from ranks import call_ranks
from zoo import CASES

STEPS = 5
AROUND: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}


def batches() -> list[Any]:
    """Steps of unlike sizes: the last one gives fewer microbatches."""
    sizes = [SAMPLES] * (STEPS - 1) + [3]
    return [CASES["llava"].batch(size, seed=step) for step, size in enumerate(sizes)]


def train(rank: int, schedule: str, variant: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    module = build("llava", variant)
    modalities = {"vision": Modality(), "language": Modality(pp_size=2, pp_chunks=2)}
    recorder = fit(module, batches(), strategy(modalities, schedule=schedule, num_microbatches=4), 3, **AROUND)
    return recorder.losses, module.state_dict()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("variant", ["none", "encoder"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_with_accumulation_and_clipping_equal_one_process(schedule: str, variant: str) -> None:
    module = build("llava", variant)
    expected = fit(module, batches(), **AROUND)
    for rank, (losses, state) in enumerate(call_ranks(3, train, schedule, variant)):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected.losses), rtol=1e-6, atol=1e-7)
        if rank == 0:
            torch.testing.assert_close(state, module.state_dict(), rtol=1e-6, atol=1e-8)
