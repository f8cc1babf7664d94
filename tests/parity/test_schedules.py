"""Every schedule that runs gives what one process gives, together with what changes a step around it.

vision: rank 0 (frozen or not); language: ranks 1-2, two chunks of its layers on each.
A schedule of one's own: vision on both ranks; language: ranks 0-1 as stages. The default run holds each schedule with
vision frozen or with vision trained; `exhaustive` holds the others.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch

from features.toys import LANGUAGE, VISION, Layout, Run, Samples, Toy, assert_same, outcomes, weights
from lightning_mm5d import Modality
from lightning_mm5d import schedule as schedules
from lightning_mm5d.schedule import SCHEDULES, Graph, Schedule
from nccl_order import NAMES
from parity.harness import Recorder, fit, strategy
from parity.test_parity import SAMPLES, build
from ranks import call_ranks
from sweeps import covering
from zoo import CASES

STEPS = 5
AROUND: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}


def batches() -> list[Any]:
    """Steps of unlike sizes: the last one gives fewer microbatches."""
    sizes = [SAMPLES] * (STEPS - 1) + [3]
    return [CASES["llava"].batch(size, seed=step) for step, size in enumerate(sizes)]


def train(rank: int, schedule: str, variant: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    module = build("llava", variant)
    modalities = {"vision": Modality(), "language": Modality(pp_size=2, pipeline={"pp_chunks": 2})}
    recorder = fit(module, batches(), strategy(modalities, schedule=schedule, num_microbatches=4), 3, **AROUND)
    return recorder.losses, module.state_dict()


@lru_cache
def reference(variant: str) -> tuple[Recorder, dict[str, torch.Tensor]]:
    module = build("llava", variant)
    return fit(module, batches(), **AROUND), module.state_dict()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("schedule", "variant"), covering(product(SCHEDULES, ["none", "encoder"]), (0,), (1,)))
def test_schedules_with_accumulation_and_clipping_equal_one_process(schedule: str, variant: str) -> None:
    expected, parameters = reference(variant)
    for rank, (losses, state) in enumerate(call_ranks(3, train, schedule, variant)):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected.losses), rtol=1e-6, atol=1e-7)
        if rank == 0:
            torch.testing.assert_close(state, parameters, rtol=1e-6, atol=1e-8)


def _crossed(graph: Graph) -> Schedule:
    """GPipe, but rank 0 runs its microbatches of vision in the other order, first of all and last of all."""
    schedule = schedules.build("gpipe", graph)
    own = [action for action in schedule[0] if action.stage.modality == "vision"][::-1]
    others = [action for action in schedule[0] if action not in own]
    forwards = [action for action in own if not action.passes_gradients]
    schedule[0] = [*forwards, *others, *(action for action in own if action.passes_gradients)]
    return schedule


def stages_of_one_rank_in_other_orders(run: Run) -> Any:
    module = Toy()
    run.trainer(use_distributed_sampler=False).fit(module, run.loader(Samples(11), 11))
    return weights(module)


@pytest.mark.parametrize("backend", ["gloo", NAMES[1]])
def test_what_stays_on_a_rank_may_be_taken_in_any_order(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Microbatches are of 3, 3, 3 and 2 samples; on one rank payloads of another one would be taken, and train."""
    monkeypatch.setenv("TEST_BACKEND", backend)
    layout = Layout(
        {"vision": Modality(colocate_with="language", **VISION), "language": Modality(pp_size=2, **LANGUAGE)}, 2
    )
    found = outcomes(layout, stages_of_one_rank_in_other_orders, schedule=_crossed, num_microbatches=4)
    outcome = found["stages_of_one_rank_in_other_orders"]
    assert_same(outcome.ranks[0], outcome.one)
