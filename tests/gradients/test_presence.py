"""Which gradients exist is agreed by all ranks, once for each structure, and never read from a device."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from features.toys import LANGUAGE, SHARED, VISION, WIDTH, Layout, Run, Samples, Toy, assert_same, outcomes, weights
from host_reads import HostReads
from lightning_mm5d import Modality
from lightning_mm5d.gradients.reduction import Presence
from ranks import run_ranks


def on_all(world: int, **sharing: Any) -> Layout:
    encoder = Modality(colocate_with="language", **sharing, **VISION)
    return Layout({"vision": encoder, "language": Modality(**sharing, **LANGUAGE)}, world, world)


SHARES = on_all(2, zero_stage=2)
BLOCKS = on_all(4, zero_stage=3, dp_shard_size=2)
"""two blocks of two ranks"""
TIED_STAGES = Layout(
    {
        "vision": Modality(colocate_with="language", **VISION),
        "language": Modality(pp_size=2, dp_size=2, **LANGUAGE),
    },
    4,
    2,
)
"""vision: ranks 0-1; language: ranks 0-1 and 2-3 as stages"""


# --- the agreement ---

STEPS = [
    # what each of three ranks has, and what came again
    ([{0, 1}, {0, 1}, {0, 1}], [set(), set(), set()]),
    ([{0, 1}, {0, 1}, {0, 1}], [set(), set(), set()]),
    ([{0}, {0, 1}, {0}], [set(), set(), set()]),
    ([{0, 1}, {0}, {0}], [set(), set(), set()]),  # the same sets on other ranks
    ([{0}, {0}, {0}], [set(), set(), set()]),
    ([{0}, {0, 1}, {0}], [set(), set(), set()]),
    ([{0}, {0}, {0}], [set(), {0}, set()]),
    ([set(), set(), set()], [set(), set(), set()]),
]


def agreements(rank: int) -> list[tuple[list[int], list[int], int]]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    presence, found = Presence(3, dist.group.WORLD), []
    exchanged, exchange = [], presence._exchange
    presence._exchange = lambda flags: exchanged.append(1) or exchange(flags)  # type: ignore[func-returns-value]
    for there, again in STEPS:
        got = presence.agree(there[rank], again[rank])
        found.append((sorted(got.there), sorted(got.again), len(exchanged)))
    dist.destroy_process_group()
    return found


def test_ranks_exchange_what_they_have_once_for_each_structure_and_all_notice_a_change_of_one() -> None:
    there = [[0, 1]] * 4 + [[0], [0, 1], [0], []]
    exchanged = [1, 1, 2, 3, 4, 4, 5, 6]
    for found in run_ranks(3, agreements, limit=30):
        assert [one[0] for one in found] == there
        assert [one[1] for one in found] == [[]] * 6 + [[0], []]
        assert [one[2] for one in found] == exchanged


# --- batches without images ---

SHOWN = ["both", "even", "odd", "none", "even", "both", "none", "first", "odd"]
"""of each batch of 8 samples, which have an image: of two replicas, one has the even ones"""
STRUCTURES = 4
"""sets of parameters with gradients on two replicas, in these"""


class Shown(Samples):
    """Samples of which some have no image."""

    def __init__(self) -> None:
        super().__init__(8 * len(SHOWN))
        ways = {"both": [1] * 8, "even": [1, 0] * 4, "odd": [0, 1] * 4, "none": [0] * 8, "first": [1] + [0] * 7}
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(0))  # of Lightning's sampler
        self.shown = torch.empty(len(self), dtype=torch.long)
        self.shown[order] = torch.tensor([flag for name in SHOWN for flag in ways[name]])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "shown": self.shown[index]}


class Images(Toy):
    """Images where there are any; an optimizer that moves parameters whose gradient is zero."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        rows = batch["shown"].nonzero().flatten()
        features = torch.zeros(len(batch["shown"]), WIDTH, dtype=torch.float64)
        if len(rows):
            features = features.index_add(0, rows, self.encoder(batch["images"][rows]))
        return F.cross_entropy(self.decoder(batch["tokens"], features), batch["label"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-2, weight_decay=0.5)


class Missing(L.Callback):
    """Which parameters of this rank have no gradient at each step of the optimizer."""

    def __init__(self) -> None:
        self.found: list[list[str]] = []

    def on_before_optimizer_step(self, _: Any, module: L.LightningModule, *args: Any) -> None:
        own = [(name, p) for name, p in module.named_parameters() if 0 not in p.stride()]
        self.found.append([name for name, p in own if p.grad is None])


def fitted(run: Run, **options: Any) -> Any:
    module, missing = Images(), Missing()
    trainer = run.trainer(callbacks=[missing], **options)
    trainer.fit(module, run.training(Shown(), 8))
    return {"weights": weights(module), "missing": missing.found}


def images(run: Run) -> Any:
    return fitted(run)


def accumulated(run: Run) -> Any:
    return fitted(run, accumulate_grad_batches=2)


def kept_gradients(run: Run) -> Any:
    """Gradients that are zeroed in place exist afterwards."""

    class InPlace(Images):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)

    module = InPlace()
    run.trainer().fit(module, run.training(Shown(), 8))
    return {"weights": weights(module)}


EXHAUSTIVE = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("layout", "microbatches"),
    [
        pytest.param(SHARED, 1, id="plain"),
        pytest.param(TIED_STAGES, 2, id="stages"),
        pytest.param(BLOCKS, 1, id="blocks"),
        pytest.param(SHARED, 2, id="microbatches", marks=EXHAUSTIVE),
        pytest.param(SHARES, 2, id="rows", marks=EXHAUSTIVE),
    ],
)
def test_replicas_with_and_without_images_train_as_one_process(layout: Layout, microbatches: int) -> None:
    cases = (images, accumulated) if layout is BLOCKS else (images, accumulated, kept_gradients)
    found = outcomes(layout, *cases, num_microbatches=microbatches, bucket_bytes=2000)
    for scenario, outcome in found.items():
        assert_same(outcome.ranks[0]["weights"], outcome.one["weights"], where=scenario)
        for rank in outcome.ranks if "missing" in outcome.one else ():
            for mine, expected in zip(rank["missing"], outcome.one["missing"], strict=True):
                assert set(mine) <= set(expected), scenario
                assert {name for name in expected if name in mine or "encoder" not in name} <= set(mine), scenario


# --- what a device is asked ---


def reads(run: Run) -> dict[str, Any]:
    """How often the host reads values in a fit, and how often ranks exchange what they have."""
    exchanges, exchange = [], Presence._exchange
    Presence._exchange = lambda self, flags: exchanges.append(1) or exchange(self, flags)  # type: ignore
    with HostReads() as seen:
        fitted(run)
    Presence._exchange = exchange  # type: ignore[method-assign]
    return {"reads": {where for where in seen.found if where.startswith("gradients/")}, "exchanges": len(exchanges)}


def test_only_messages_of_the_host_are_read() -> None:
    outcome = outcomes(SHARED, reads, num_microbatches=2, bucket_bytes=2000)["reads"]
    for rank in outcome.ranks:
        assert rank["exchanges"] == STRUCTURES
        assert rank["reads"]
        assert all(where.startswith("gradients/reduction.py") for where in rank["reads"]), rank["reads"]
