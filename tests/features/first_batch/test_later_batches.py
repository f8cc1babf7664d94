"""What a step keeps of a batch, and what shows in the second batch or after the sanity check alone, is told of."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from features.toys import CLASSES, PAIR, Layout, Run, Toy
from ranks import call_ranks

LAYOUTS = {1: Layout(None, 1), 2: PAIR}  # type: ignore[arg-type]


class Keeping(Toy):
    """Keeps something of each batch in attributes, of which those in `PARTS` are other ones for a microbatch."""

    PARTS = ("first", "pairs", "scores", "means", "losses", "text", "moving", "by_batch", "counts['batches']", "table")

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pairs, self.scores, self.means, self.text = [], [], [], [], ""
        self.losses, self.moving, self.by_batch = torch.zeros(0), torch.zeros(CLASSES).double(), torch.zeros(4, CLASSES)
        self.table, self.counts = torch.zeros(16, CLASSES), {"samples": 0, "batches": 0}
        self.rows, self.at, self.all_rows, self.total = torch.zeros(32, CLASSES), 0, torch.zeros(0, CLASSES), 0.0
        self.names, self.labels, self.best, self.outputs, self.by_class = [], {}, [], [], {"0": [], "1": [], "2": []}
        self.hardest, self.last, self.means_of_batches = [], None, []

    def keep(self, logits: Tensor, labels: Tensor, batch_idx: int) -> None:
        if batch_idx == 0:
            self.first += [int(label) for label in labels[:3]]
        for row in range(3):
            self.scores.append([float(logits[row, 0]), f"{row}"])
        self.pairs.append((logits[:2], labels[:2]))
        self.means.append(logits.mean(0))
        self.losses = torch.cat([self.losses, logits.mean()[None]])
        self.text += f"{batch_idx}: {float(logits.mean()):.4f}; "
        self.moving = 0.9 * self.moving + 0.1 * logits.mean(0)
        self.by_batch[batch_idx] = logits.mean(0)
        self.table[8 * batch_idx : 8 * batch_idx + len(logits)] = logits
        self.counts["batches"] += 1
        self.counts["samples"] += len(logits)
        self.rows[self.at : self.at + len(logits)] = logits
        self.at += len(logits)
        self.all_rows = torch.cat([self.all_rows, logits])
        self.total = self.total + logits.sum(0)
        self.names.extend(f"{label}" for label in labels.tolist())
        self.labels.update({float(value): label for value, label in zip(logits[:, 0], labels, strict=True)})
        self.best = sorted(self.best + logits[:, 0].tolist())[-2:]
        self.outputs.append({"logits": logits, "labels": labels.tolist()})
        for label, row in zip(labels.tolist(), logits, strict=True):
            self.by_class[str(label)].append(row)
            if row[0] > row[1]:
                self.hardest.append(float(row[0]))
        self.last = logits
        self.guesses = [1] * len(logits)
        self.means_of_batches.append(logits.mean())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch)
        self.keep(logits.detach(), batch["label"], batch_idx)
        return F.cross_entropy(logits, batch["label"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.keep(self(batch), batch["label"], batch_idx)

    def on_validation_epoch_start(self) -> None:
        self.losses, self.table, self.by_batch = torch.zeros(0), torch.zeros(16, CLASSES), torch.zeros(4, CLASSES)


def _told_of_kept(rank: int, world: int) -> list[str]:
    run = Run(LAYOUTS[world])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.trainer(use_distributed_sampler=False).fit(Keeping(), run.loader(16), run.loader(16))
    return [str(one.message).partition(" is ")[0] for one in caught if "first two microbatches" in str(one.message)]


@pytest.mark.parametrize("world", [1, 2])
def test_what_a_step_keeps_of_a_batch_and_not_of_each_sample_is_told_of_once_after_the_sanity_check(world: int) -> None:
    """all: rank 0 | vision: rank 0, language: rank 1"""
    said = [text for rank in call_ranks(world, _told_of_kept, world) for text in rank]
    expected = [f"{step}: self.{name}" for step in ("training_step", "validation_step") for name in Keeping.PARTS]
    assert sorted(said) == sorted(expected)


class Masked(Toy):
    """A mean over samples that a mask marks: as many in both microbatches of the first batch, and one less later."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = F.cross_entropy(self(batch), batch["label"], reduction="none")
        mask = (batch["tokens"][:, 0] < 8).double()
        return (losses * mask).sum() / mask.sum()


def _told_of_masked(rank: int, world: int) -> list[str]:
    run = Run(LAYOUTS[world])
    samples = run.loader(24).dataset
    samples.tokens[:, 0] = torch.tensor([0, 0, 9, 9] * 2 + [0, 9, 9, 9, 0, 0, 0, 9] * 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.trainer(use_distributed_sampler=False).fit(Masked(), run.loader(samples))
    return [str(one.message) for one in caught if "loss of the first two microbatches" in str(one.message)]


@pytest.mark.parametrize("world", [1, 2])
def test_the_second_batch_tells_of_a_loss_that_is_right_in_the_first_by_chance(world: int) -> None:
    """all: rank 0 | vision: rank 0, language: rank 1"""
    said = [text for rank in call_ranks(world, _told_of_masked, world) for text in rank]
    assert len(said) == 1


class Holding(Toy):
    """Has attributes that torch cannot compare, also in lists that its step appends to."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {
            "texts": np.array(["cat", "dog"]),
            "objects": np.array([None, "dog"], dtype=object),
            "reversed": np.arange(4)[::-1],
            "sparse": torch.eye(3).to_sparse(),
            "rows": torch.eye(3).to_sparse_csr(),
            "meta": torch.ones(3, device="meta"),
            "large": 2**70,
        }
        self.names, self.adjacency, self.kept = self.held["texts"], self.held["sparse"], []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.names = self.names.copy()
        if self.trainer.world_size == 1:  # such tensors do not cross to other ranks
            self.adjacency = self.adjacency.clone()
            self.kept.append([*self.held.values()])
        return self.loss(batch)


def _told_of_held(rank: int, world: int) -> list[str]:
    run = Run(LAYOUTS[world])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.trainer(max_steps=2, use_distributed_sampler=False).fit(Holding(), run.loader(16))
    return [str(one.message) for one in caught if "first two microbatches" in str(one.message)]


@pytest.mark.parametrize("world", [1, 2])
def test_attributes_that_torch_cannot_compare_do_not_end_the_training(world: int) -> None:
    """all: rank 0 | vision: rank 0, language: rank 1"""
    assert not any("self.names" in text for rank in call_ranks(world, _told_of_held, world) for text in rank)
