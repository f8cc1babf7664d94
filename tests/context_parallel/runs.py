"""Runs on ranks that share sequences, step by step against one process, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from features.toys import Layout, Outcome, Run, assert_same, weights
from lightning_mm5d import Modality
from parity.harness import Batches, Recorder
from zoo import CASES
from zoo.case import FIRST_TEXT_ID, VOCABULARY, Batch
from zoo.text import PAD


def shared(world: int = 2, **fields: Any) -> Layout:
    return Layout({"language": Modality(**{"cp_size": 2, **fields})}, world)


PAIR = shared()
PIPE = shared(4, cp_mode="ring", pp_size=2)
"""ranks 0-1 and 2-3 as stages"""


def steps(run: Run, module: Any, batches: Any, **options: Any) -> Any:
    """Train on batches given whole; losses, gradients of each step and the weights at the end."""
    recorder = Recorder()
    callbacks = [recorder, *options.pop("callbacks", ())]
    trainer = run.trainer(callbacks=callbacks, use_distributed_sampler=False, **options)
    data = batches if isinstance(batches, IterableDataset) else Batches(batches)
    trainer.fit(module, DataLoader(data, batch_size=None))
    return {"losses": recorder.losses, "gradients": recorder.gradients, "weights": weights(module)}


def same_steps(outcome: Outcome, tolerance: float = 1e-6) -> None:
    """Losses on all ranks, every gradient where its parameter is, and the weights on rank 0."""
    one = outcome.one
    assert_same(outcome.ranks[0]["weights"], one["weights"], tolerance, "weights")
    for rank in outcome.ranks:
        assert_same(rank["losses"], one["losses"], tolerance, "losses")
    for step, expected in enumerate(one["gradients"]):
        found = [rank["gradients"][step] for rank in outcome.ranks]
        assert {name for gradients in found for name in gradients} == set(expected), f"step {step}"
        for gradients in found:
            here = {name: expected[name] for name in gradients}
            assert_same(gradients, here, tolerance, f"step {step}")


def text(count: int, **options: Any) -> list[Batch]:
    return [CASES["llama"].batch(4, seed=seed, **options) for seed in range(count)]  # type: ignore[misc]


class Stream(IterableDataset):
    """Batches whose sequences are of another length each time."""

    def __init__(self, lengths: tuple[int, ...], samples: int = 4) -> None:
        self.lengths, self.samples = lengths, samples

    def __iter__(self) -> Iterator[Batch]:
        for seed, length in enumerate(self.lengths):
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randint(FIRST_TEXT_ID, VOCABULARY, (self.samples, length), generator=generator)
            mask = torch.ones_like(ids)
            for sample in range(self.samples):  # padded unlike, so that microbatches have unlike masks
                mask[sample, max(2, length - 2 * sample) :] = 0
            yield {
                "input_ids": ids.masked_fill(mask == 0, PAD),
                "attention_mask": mask,
                "labels": ids.masked_fill(mask == 0, -100),
            }
