"""Buffers of the LightningModule itself, which every stage's run of the step writes.

The mean of the features needs the encoder's result, which the first stage of language receives and the second does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from features.toys import LANGUAGE, PIPE, VISION, WIDTH, Layout, Run, Toy, assert_same, outcomes
from lightning_mm5d import Modality
from sweeps import dealt

TOGETHER = Layout(
    {"vision": Modality(colocate_with="language", **VISION), "language": Modality(pp_size=2, **LANGUAGE)}, 2
)
"""vision and the first stage of language: rank 0; the second stage: rank 1"""
CHUNKS = Layout(
    {"vision": Modality(**VISION), "language": Modality(pp_size=2, pipeline={"pp_chunks": 2}, **LANGUAGE)}, 3
)
"""vision: rank 0; language: ranks 1-2, stages 0 and 2 on rank 1, stages 1 and 3 on rank 2"""


class Counting(Toy):
    """Notes features before the layers of language, and losses after them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("latest", torch.zeros((), dtype=torch.float64))
        self.register_buffer("largest", torch.zeros((), dtype=torch.long))
        self.register_buffer("begun", torch.zeros((), dtype=torch.long))
        self.register_buffer("ended", torch.zeros((), dtype=torch.long))
        self.register_buffer("short", torch.arange(3, dtype=torch.int16))

    def note(self, features: Tensor) -> None:
        self.mean.mul_(0.9).add_(0.1 * features.mean(dim=0))
        self.latest = features.sum()
        self.largest.add_(features.argmax())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.begun.add_(1)
        self.short.mul_(2)
        features = self.encoder(batch["images"])
        self.note(features.detach())
        loss = F.cross_entropy(self.decoder(batch["tokens"], features), batch["label"])
        self.ended.add_(1)
        return loss


class Late(Counting):
    """Notes features after the rest of the step, which another rank runs."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        features = self.encoder(batch["images"])
        loss = F.cross_entropy(self.decoder(batch["tokens"], features), batch["label"])
        self.note(features.detach())
        return loss


class OfTheEncoder(Toy):
    """Counts steps and averages weights in buffers of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("count", "anew", "average"):
            self.encoder.register_buffer(name, torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.encoder.count += 1
        self.encoder.anew = self.encoder.anew + 1
        self.encoder.average.lerp_(self.encoder.patch.weight.detach().norm(), 0.1)
        return loss


def buffers_in_files(run: Run) -> dict[str, Any]:
    """Buffers in a file, after the run, and after the run was resumed."""
    module, file = Counting(), run.folder / "run.ckpt"
    trainer = run.trainer()
    trainer.fit(module, run.training())
    trainer.save_checkpoint(file)
    saved = torch.load(file, weights_only=False)["state_dict"]
    again = Counting()
    run.trainer(max_epochs=2).fit(again, run.training(), ckpt_path=str(file))
    names = [name for name, _ in module.named_buffers(recurse=False)]
    return {
        "saved": [saved[name] for name in names],
        "after": [module.get_buffer(name).clone() for name in names],
        "resumed": [again.get_buffer(name).clone() for name in names],
    }


def late_buffers(run: Run) -> list[Tensor]:
    """Features travel to where the rest of the step runs, although the step only keeps them."""
    module = Late()
    run.trainer().fit(module, run.training())
    return [buffer.clone() for _, buffer in module.named_buffers(recurse=False)]


def buffers_of_the_encoder(run: Run) -> list[Tensor]:
    """They are written after the loss, where the first stage of language has ended its step."""
    found = []
    for steps in (1, 2):
        module = OfTheEncoder()
        run.trainer(max_steps=steps).fit(module, run.training())
        found += [buffer.clone() for _, buffer in module.named_buffers()]
    return found


@pytest.mark.parametrize("layout", dealt(__file__, [PIPE, TOGETHER]), ids=["pipe", "together"])
def test_buffers_are_those_of_one_process(layout: Layout, tmp_path: Path) -> None:
    scenarios = buffers_in_files, late_buffers, buffers_of_the_encoder
    for outcome in outcomes(layout, *scenarios, folder=tmp_path, num_microbatches=1).values():
        assert_same(outcome.ranks[0], outcome.one)


def test_a_rank_with_several_stages_counts_each_microbatch_once(tmp_path: Path) -> None:
    found = outcomes(CHUNKS, buffers_in_files, folder=tmp_path, num_microbatches=2, schedule="interleaved")
    *_, begun, ended, _ = found["buffers_in_files"].ranks[0]["saved"]
    assert (int(begun), int(ended)) == (4, 4)
