"""Replicas with unlike batches share experts over modalities, stages and devices that order what they run."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import nccl_order
from lightning_mm5d.data_parallel.shared_parameters import SharedParameter
from ranks import call_ranks

from .replicas import Layout, check, train

SHARED: dict[str, Any] = {"dp_size": 2, "ep_size": 2}
SOME = (0, 0, 1, 1)  # images of samples: none on the first replica
VISION = {"vision": {"dp_size": 2}}
LAYOUTS = {
    "encoders of their own": Layout("qwen3_vl_moe", {**VISION, "language": SHARED}, 4, images=SOME),
    "no images at all": Layout("qwen3_vl_moe", {**VISION, "language": SHARED}, 4, images=(0,) * 4),
    "encoders on the same ranks": Layout(
        "qwen3_vl_moe", {"vision": {"dp_size": 2, "colocate_with": "language"}, "language": SHARED}, 2, images=SOME
    ),
    "one module": Layout("qwen3_vl_moe", {"language": SHARED}, 2, images=SOME),
    "one encoder": Layout("qwen3_vl_moe", {"vision": {"dp_size": 1}, "language": SHARED}, 3, images=SOME),
    "encoders and stages": Layout("qwen3_vl_moe", {**VISION, "language": {**SHARED, "pp_size": 2}}, 6, images=SOME),
    "GLM": Layout("glm4v_moe", {**VISION, "language": SHARED}, 4, images=SOME),
    "experts of images": Layout("ernie4_5_vl_moe", {**VISION, "language": SHARED}, 4, images=SOME),
    "experts of images, stages": Layout(
        "ernie4_5_vl_moe", {**VISION, "language": {**SHARED, "pp_size": 2}}, 6, images=SOME
    ),
    "skipped experts": Layout("deep", {"language": SHARED}, 2, skips=True),
    "skipped experts, computed again": Layout(
        "deep", {"language": {**SHARED, "activation_checkpointing": "full"}}, 2, skips=True
    ),
    "skipped experts, four ranks": Layout("deep", {"language": {"dp_size": 4, "ep_size": 4}}, 4, 4, 1, skips=True),
    "a shorter last batch": Layout("deep", {"language": SHARED}, 2, last=(2, 1)),
    "a shorter last batch, stages": Layout("deep", {"language": {**SHARED, "pp_size": 2}}, 4, last=(2, 1)),
    **{
        schedule: Layout(
            "deep",
            {"language": {**SHARED, "pp_size": 2, "pp_chunks": 2 if schedule == "interleaved" else 1}},
            4,
            microbatches=4,
            samples=8,
            options={"schedule": schedule},
        )
        for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
    },
}
TENSOR = {
    f"{title}, {last}": Layout(
        name, {"language": {**SHARED, "tp_size": 2, **said}}, 4, last=last, images=None if last else SOME
    )
    for (title, name, said), last in (
        *product(
            (
                ("whole experts", "qwen3_moe", {}),
                ("whole experts, sharded sequences", "qwen3_moe", {"sequence_parallel": True}),
                ("divided experts", "qwen3_moe", {"expert_tp_size": 2, "sequence_parallel": True}),
            ),
            ((2, 1),),
        ),
        *product(
            (
                ("whole experts", "qwen3_vl_moe", {}),
                ("whole experts, sharded sequences", "qwen3_vl_moe", {"sequence_parallel": True}),
                ("divided experts", "qwen3_vl_moe", {"expert_tp_size": 2, "sequence_parallel": True}),
                ("experts of images", "ernie4_5_vl_moe", {"sequence_parallel": True}),
            ),
            ((),),
        ),
    )
}
SEQUENCES = Layout(
    "ernie4_5_vl_moe",
    {"language": {"cp_size": 2, "ep_size": 2, "cp_distribution": "uniform"}},
    2,
    replicas=1,
    images=SOME,
)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("which", ["encoders of their own", "skipped experts", "a shorter last batch, stages"])
def test_replicas_with_unlike_batches_equal_one_process(which: str) -> None:
    assert bool(check(LAYOUTS[which])) == bool(LAYOUTS[which].last)  # whether it warns


@pytest.mark.usefixtures("float64")
def test_tensor_parallel_ranks_with_whole_experts_equal_one_process_in_a_batch_that_is_shorter() -> None:
    """language: ranks 0-3, of which tensor parallel ones are neighbours"""
    (said,) = check(TENSOR["whole experts, sharded sequences, (2, 1)"], 1e-6)
    assert "unequal numbers of microbatches" in said


@pytest.mark.usefixtures("float64")
def test_an_order_in_which_replicas_would_wait_in_a_circle_gathers_experts_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vision: rank 0; language: ranks 1-2, on devices that run one operation at a time"""
    monkeypatch.setenv("TEST_BACKEND", nccl_order.NAMES[-1])
    (said,) = check(LAYOUTS["one encoder"])
    assert "1f1b" in said


@pytest.mark.usefixtures("float64")
def test_experts_that_only_some_ranks_of_a_sequence_call_are_gathered() -> None:
    """language: ranks 0-1, each with half of a sequence"""
    (said,) = check(SEQUENCES, 1e-6)
    assert "may not have" in said


@pytest.mark.usefixtures("float64")
def test_gathers_of_layers_around_experts_are_refused_where_operations_have_an_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """language: ranks 0-1"""
    monkeypatch.setenv("TEST_BACKEND", nccl_order.NAMES[0])
    fields = {"language": {**SHARED, "zero_stage": 3, "reshard_after_forward": True}}
    with pytest.raises(AssertionError, match=r"modalities\.language\.sharding\.reshard_after_forward"):
        call_ranks(2, train, Layout("deep", fields, 2), False)


def held(rank: int, one: Layout) -> tuple[int, int, int]:
    """Train, and return the most elements that a parameter of experts showed, its rows, and its whole size."""
    most, rows, whole = 0, 0, 0
    show, reopen = SharedParameter.show_rows, SharedParameter.give_memory

    def shown(self: SharedParameter) -> None:
        nonlocal most, rows, whole
        show(self)
        if self.shard.of_experts:
            size = self.parameter.untyped_storage().nbytes() // self.parameter.element_size()
            most, rows = max(most, size), max(rows, self.own_rows.numel())
            whole = max(whole, torch.Size(self.shape).numel())

    def given(self: SharedParameter) -> None:
        nonlocal most
        reopen(self)
        if self.shard.of_experts:
            most = max(most, torch.Size(self.shape).numel())

    SharedParameter.show_rows, SharedParameter.give_memory = shown, given  # type: ignore[method-assign]
    try:
        train(rank, one, False)
    finally:
        SharedParameter.show_rows, SharedParameter.give_memory = show, reopen  # type: ignore[method-assign]
    return most, rows, whole


@pytest.mark.usefixtures("float64")
def test_no_rank_holds_all_experts_in_a_step_in_which_replicas_meet() -> None:
    """language: ranks 0-1"""
    for most, rows, whole in call_ranks(2, held, LAYOUTS["skipped experts"]):
        assert most == rows < 0.7 * whole  # three of five experts


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("backend", ["", *nccl_order.NAMES])
@pytest.mark.parametrize("which", [*LAYOUTS, *TENSOR, "sequences"])
def test_all_replicas_equal_one_process_on_all_backends(
    which: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend:
        monkeypatch.setenv("TEST_BACKEND", backend)
    one = {**LAYOUTS, **TENSOR, "sequences": SEQUENCES}[which]
    check(one, 1e-6 if which not in LAYOUTS else 1e-9)
