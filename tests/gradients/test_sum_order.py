"""Sums of gradients cannot hang a device that has one order for all messages, whatever the batches of replicas are.

All messages run on a backend with that order, where one that never comes is an error.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import nccl_order
from features.toys import LANGUAGE, TWINS, VISION, Layout, Run, assert_same, outcomes
from gradients.test_presence import BLOCKS, SHARED, TIED_STAGES, images, on_all
from lightning_mm5d import Modality
from lightning_mm5d.gradients.reduction import Reduction


def pipes(**sharing: Any) -> Layout:
    """vision: ranks 0-1; language: ranks 2-3"""
    encoder = Modality(dp_size=2, **sharing, **VISION)
    return Layout({"vision": encoder, "language": Modality(dp_size=2, **sharing, **LANGUAGE)}, 4, 2)


RESHARDED = on_all(2, zero_stage=3, reshard_after_forward=True)


def in_order(run: Run) -> Any:
    nccl_order.register()
    return images(run)["weights"]


def in_device_thread(run: Run) -> Any:
    """Hooks of a backward run in autograd's thread of the device, while the main thread waits, as on a GPU."""
    called = Reduction._is_final

    def apart(reduction: Reduction, key: int) -> None:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(called, reduction, key).result()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reduction, "_is_final", apart)
        return images(run)["weights"]


def test_sums_that_the_thread_of_a_device_starts_are_those_of_one_process() -> None:
    """two blocks of two ranks; vision: ranks 0-3, language: ranks 0-3"""
    for layout in (BLOCKS, SHARED):
        found = outcomes(layout, in_device_thread, num_microbatches=2, bucket_bytes=2000)["in_device_thread"]
        assert_same(found.ranks[0], found.one)


@pytest.mark.parametrize(
    ("layout", "microbatches"),
    [
        pytest.param(TIED_STAGES, 2, id="replicas that share ranks"),
        pytest.param(BLOCKS, 1, id="blocks"),
        pytest.param(pipes(), 2, id="pipes", marks=pytest.mark.exhaustive),
        pytest.param(pipes(zero_stage=2), 2, id="pipes with rows", marks=pytest.mark.exhaustive),
        pytest.param(TWINS, 2, id="one encoder", marks=pytest.mark.exhaustive),
        pytest.param(SHARED, 1, id="plain", marks=pytest.mark.exhaustive),
        pytest.param(SHARED, 2, id="microbatches", marks=pytest.mark.exhaustive),
        pytest.param(RESHARDED, 2, id="resharded", marks=pytest.mark.exhaustive),
    ],
)
def test_replicas_without_images_hang_no_device(layout: Layout, microbatches: int) -> None:
    found = outcomes(
        layout,
        in_order,
        num_microbatches=microbatches,
        bucket_bytes=2000,
        process_group_backend="nccl_order_serial",
    )["in_order"]
    assert_same(found.ranks[0], found.one)
