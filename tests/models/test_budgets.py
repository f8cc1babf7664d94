"""Batches hold what budgets allow, are about equally full, and have every sample once an epoch on all replicas."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from features.toys import TWINS, Layout, Run, Samples, Toy, alone, together
from lightning_mm5d import BudgetBatchSampler, BudgetStream
from lightning_mm5d.config.errors import ConfigError

RANDOM = np.random.default_rng(0)
TOKENS = (np.minimum(4000, RANDOM.lognormal(6, 1, 2000)).astype(int) + 1).tolist()
PIXELS = np.minimum(30, RANDOM.lognormal(1, 1, 2000)).astype(int).tolist()


def flat(batches: Any) -> list[int]:
    return sorted(itertools.chain(*batches))


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_sample_comes_once_and_tokens_are_even_over_steps(shuffle: bool) -> None:
    sampler = BudgetBatchSampler(
        TOKENS, 16384, pixels=PIXELS, pixel_budget=160, max_samples=64, shuffle=shuffle, seed=1
    )
    seen = []
    for epoch in range(3):
        sampler.sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        assert flat(batches) == [*range(2000)]
        tokens = [sum(TOKENS[one] for one in batch) for batch in batches]
        assert max(tokens) <= 16384
        assert max(tokens) <= 1.1 * np.mean(tokens)
        assert max(sum(PIXELS[one] for one in batch) for batch in batches) <= 160
        assert max(map(len, batches)) <= 64
        assert batches == list(sampler), "an epoch has one order"
        seen.append(batches)
    assert (seen[0] == seen[1]) is not shuffle
    assert (sorted(map(sorted, seen[0])) == sorted(map(sorted, seen[1]))) is not shuffle, "batches are packed anew"


@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_have_equally_many_batches_and_share_the_samples(replicas: int) -> None:
    data = range(len(TOKENS))
    samplers = [
        BudgetBatchSampler(
            TOKENS,
            8192,
            shuffle=True,
            sampler=DistributedSampler(data, replicas, rank),  # type: ignore[arg-type]
        )
        for rank in range(replicas)
    ]
    assert len({len(list(sampler)) for sampler in samplers} | {len(sampler) for sampler in samplers}) == 1
    assert flat(itertools.chain(*samplers)) == [*data]


def test_a_stream_is_packed_in_windows() -> None:
    stream = BudgetStream([*enumerate(TOKENS)], lambda sample: sample[1], 8192, window=100)
    batches = list(stream)
    assert flat([number for number, _ in batch] for batch in batches) == [*range(2000)]
    tokens = [sum(size for _, size in batch) for batch in batches]
    assert max(tokens) <= 8192
    assert max(tokens[:-1]) <= 1.1 * np.mean(tokens[:-1])
    both = BudgetStream(
        [*zip(TOKENS, PIXELS, strict=True)], lambda sample: sample, 8192, pixel_budget=90, max_samples=9, window=100
    )
    for batch in both:
        assert len(batch) <= 9
        assert sum(tokens for tokens, _ in batch) <= 8192
        assert sum(pixels for _, pixels in batch) <= 90
    small = list(BudgetStream([(1, 5), (2, 5)], lambda sample: sample[1], 100, window=1))
    assert small == [[(1, 5)], [(2, 5)]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"token_budget": 0}, "token_budget: got 0. It is a whole number"),
        ({"token_budget": 3}, "token_budget: got 3. Sample 1 alone has 4, and 2 of 3 are over it"),
        ({"token_budget": 9, "pixels": [1, 2, 3]}, "pixel_budget: got 'pixels without pixel_budget'"),
        ({"token_budget": 9, "pixel_budget": 3}, "pixel_budget: got 'pixel_budget without pixels'"),
        ({"token_budget": 9, "pixels": [1, 2], "pixel_budget": 3}, r"pixel_budget: got '\(2,\) for 3 samples'"),
        ({"token_budget": 9, "pixels": [1, 2, float("nan")], "pixel_budget": 3}, "pixel_budget: got .* at least 0"),
        ({"token_budget": 9, "max_samples": 1.5}, "max_samples: got 1.5"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BudgetBatchSampler([3, 4, 5], **options)


class Counted(Toy):
    """Loads by budgets, and notes which samples each step has."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.steps = kind, list[list[float]]()
        self.data = Samples(40)

    def train_dataloader(self) -> Any:
        sizes = [1 + index % 7 for index in range(40)]
        if self.kind == "map":
            return DataLoader(self.data, batch_sampler=BudgetBatchSampler(sizes, 24, shuffle=True))
        stream = BudgetStream(Stream(self.data), lambda sample: sizes[0], 4)
        return DataLoader(stream, batch_size=None, collate_fn=torch.utils.data.default_collate)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(batch["images"][:, 0].tolist())


class Stream(IterableDataset):
    def __init__(self, data: Samples) -> None:
        self.data = data

    def __iter__(self) -> Any:
        rank, world = 0, 1
        if torch.distributed.is_initialized():
            rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return (self.data[index] for index in range(rank, 40, world))


def trained(run: Run) -> Any:
    found: dict[str, Any] = {}
    for kind in ("map", "stream"):
        module = Counted(kind)
        run.trainer(max_epochs=2).fit(module)
        whole = module.steps
        # the same, which stops within the second epoch and goes on
        steps = len(whole) // 2 + 1
        first, second = Counted(kind), Counted(kind)
        saving = ModelCheckpoint(run.folder / kind, "last", every_n_train_steps=steps, save_top_k=1)
        run.trainer(max_steps=steps, max_epochs=None, enable_checkpointing=True, callbacks=[saving]).fit(first)
        run.trainer(max_epochs=2).fit(second, ckpt_path=run.folder / kind / "last.ckpt", weights_only=False)
        found[kind] = whole, first.steps + second.steps, list(module.data.images[:, 0].tolist())
    outside = Counted("map")
    run.trainer(max_epochs=2).fit(outside, outside.train_dataloader())  # which no hook makes
    assert outside.steps == found["map"][0]
    return found


def test_replicas_train_with_all_samples_and_go_on_in_the_midst_of_an_epoch(tmp_path: Path) -> None:
    """vision: rank 0, for both replicas of language: ranks 1-2"""
    layout: Layout = TWINS
    found = together(layout, trained, tmp_path)
    for kind in ("map", "stream"):
        replicas = [got[kind] for got in found[1:]]
        for whole, resumed, _ in replicas:
            assert whole == resumed
        epochs = [whole[: len(whole) // 2] for whole, _, _ in replicas]
        assert flat(step for epoch in epochs for step in epoch) == sorted(replicas[0][2])


def one_epoch(run: Run) -> Counted:
    module = Counted("map")
    run.trainer().fit(module)
    return module


def test_one_process_trains_by_it() -> None:
    module = alone(one_epoch)
    assert flat(module.steps) == sorted(module.data.images[:, 0].tolist())
