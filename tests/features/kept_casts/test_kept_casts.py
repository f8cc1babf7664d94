"""Autocast casts each trained weight once in a step, whatever the number of microbatches."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from context_parallel.runs import text
from features.test_precision import Precise, Singles
from features.toys import LANGUAGE, PIPE, VISION, Layout, Run, assert_same, weights
from lightning_mm5d import ConfigError, Modality
from lightning_mm5d.features.kept_casts import CastingOnce
from parity.harness import Batches
from ranks import run_ranks
from zoo import CASES

ONE = Layout({"model": Modality()}, 1)
"""the whole model: rank 0"""
AGAIN = Layout(
    {
        "vision": Modality(memory={"activation_checkpointing": "full"}, **VISION),
        "language": Modality(pp_size=2, memory={"activation_checkpointing": "selective"}, **LANGUAGE),
    },
    3,
)
"""vision: rank 0; language: ranks 1-2 as stages; layers run again"""


class Casts(TorchDispatchMode):
    """Counts casts of tensors of the shape of an `up` layer's weight to bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is torch.bfloat16:
            self.found[tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


def trained(layout: Layout, count: int, schedule: str) -> Any:
    casts, module = Casts(), Precise()
    run = Run(layout, {"num_microbatches": count, "schedule": schedule})
    trainer = run.trainer(precision="bf16-mixed", limit_val_batches=0)
    with casts:
        trainer.fit(module, run.loader(Singles(8), shuffle=False), run.loader(Singles(8)))
    return casts.found[16, 8], weights(module)


def test_a_weight_is_cast_once_in_a_step() -> None:
    """vision: rank 0; language: ranks 1-2 as stages. Also where layers run again. The first microbatch keeps none."""

    def counts(rank: int) -> Any:
        return [trained(layout, count, "1f1b")[0] for layout in (PIPE, AGAIN) for count in (2, 4)]

    for twice, often, twice_again, often_again in run_ranks(3, counts):
        assert twice == often
        assert twice_again == often_again


class Writing(Precise):
    """Doubles a weight between two forwards, from a step on."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.start = start

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight, loss = self.decoder.head.weight, super().training_step(batch, batch_idx)
        if self.global_step < self.start:
            return loss
        before = weight.detach().clone()
        with torch.no_grad():
            weight.mul_(2.0)
        loss = loss + super().training_step(batch, batch_idx)
        with torch.no_grad():
            weight.copy_(before)
        return loss


def test_casts_are_not_kept_over_writes_to_weights() -> None:
    """the whole model: rank 0"""

    def both(rank: int) -> Any:
        trained = []
        for layout in (None, ONE):
            module = Writing(0)
            loaders = Run(layout).training(Singles(16)), Run(layout).loader(Singles(8))
            Run(layout).trainer(precision="bf16-mixed").fit(module, *loaders)
            trained.append(weights(module))
        with pytest.raises(ConfigError, match=r"a write to 'decoder.head.weight'"):
            Run(ONE).trainer(precision="bf16-mixed").fit(Writing(1), *loaders)
        return trained

    expected, got = run_ranks(1, both)[0]
    assert_same(got, expected, 1e-3)


class WritingData(Precise):
    """Writes to a weight through `data` while it is used again, from the second step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight, loss = self.decoder.head.weight, super().training_step(batch, batch_idx)
        if self.global_step:
            before = weight.detach().clone()
            weight.data.clamp_(-0.1, 0.1)
            loss = loss + super().training_step(batch, batch_idx)
            weight.data.copy_(before)
        return loss


class SwappingData(Precise):
    """Computes a target with other weights, in the first layers of the last stage."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step:
            weight = self.decoder.layers[2].up.weight
            own, weight.data = weight.data, weight.detach() * 0.5
            with torch.no_grad():
                self(batch)
            weight.data = own
        return super().training_step(batch, batch_idx)


class Twice(Precise):
    """Uses its encoder twice for a sample, so that gradients of its weights have two terms."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        other = {**batch, "images": batch["images"].flip(1)}
        return super().training_step(batch, batch_idx) + super().training_step(other, batch_idx)


class Later(Precise):
    """Uses its encoder twice from the second step on, whose batches have other images."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "other": batch["images"].flip(1)} if self.global_step else batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if "other" in batch:
            loss = loss + super().training_step({**batch, "images": batch["other"]}, batch_idx)
        return loss


class Thawed(Twice):
    """Trains the encoder, which it uses twice, from the second step on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.encoder.requires_grad_(batch_idx > 0)


class Clamping(Precise):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.decoder.head.weight.clamp_(-0.1, 0.1)
        return super().training_step(batch, batch_idx)


def test_writes_to_weights_stay_allowed_without_autocast() -> None:
    """the whole model: rank 0"""

    def on_rank(rank: int) -> None:
        run = Run(ONE)
        run.trainer(precision="32-true").fit(Clamping(), run.training(Singles(16)), run.loader(Singles(8)))

    run_ranks(1, on_rank)


@pytest.mark.filterwarnings("ignore:It is recommended to use")
def test_casts_are_kept_where_a_head_is_fused_with_its_loss() -> None:
    """language: rank 0"""
    fused = Layout({"language": Modality(compute={"fused_linear_cross_entropy": True})}, 1)

    def on_rank(rank: int) -> None:
        with patch.object(CastingOnce, "_stop", side_effect=AssertionError("a weight is cast twice")):
            batches = DataLoader(Batches(text(2)), batch_size=None)
            Run(fused).trainer(precision="bf16-mixed").fit(CASES["llama"].build(), batches, batches)

    run_ranks(1, on_rank)


def test_casts_that_could_change_a_number_are_not_kept() -> None:
    """the whole model: rank 0. Compared with casts for each use, bit by bit."""

    def trained(kind: type[Precise]) -> Any:
        module, run = kind(), Run(ONE)
        run.trainer(precision="bf16-mixed", limit_val_batches=0).fit(
            module, run.training(Singles(16)), run.loader(Singles(8))
        )
        return weights(module)

    def both(rank: int) -> None:
        for kind in (WritingData, SwappingData, Twice, Later, Thawed):
            got = trained(kind)
            with patch.object(CastingOnce, "entered", lambda _, context, way: context()):
                expected = trained(kind)
            for name, value in expected.items():
                assert torch.equal(got[name], value), (kind, name)
        assert "data" not in vars(torch.nn.Parameter)

    run_ranks(1, both)


def test_casts_that_are_kept_change_no_bit() -> None:
    """vision: rank 0; language: ranks 1-2 as stages. The others cast in each microbatch."""

    def both(rank: int) -> Any:
        cases = [(PIPE, "1f1b"), (PIPE, "zero_bubble"), (AGAIN, "1f1b")]
        kept = [trained(layout, 4, schedule)[1] for layout, schedule in cases]
        with patch.object(CastingOnce, "entered", lambda _, context, way: context()):
            return kept, [trained(layout, 4, schedule)[1] for layout, schedule in cases]

    kept, cast = run_ranks(3, both)[0]
    for one, other in zip(kept, cast, strict=True):
        for name, value in one.items():
            assert torch.equal(value, other[name]), name
