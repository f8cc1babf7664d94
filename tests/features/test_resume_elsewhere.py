"""An epoch goes on under another layout with the samples that are left, or with an error that says why it cannot."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from features.resuming import (
    Case,
    Drawn,
    Shuffled,
    Streamed,
    loader,
    samples,
    train,
)
from features.toys import PIPE, TWINS, Layout, Run, together
from lightning_mm5d import ConfigError, Modality

ONE = Layout({"model": Modality()}, 1)
"""rank 0"""
TWO = Layout({"model": Modality()}, 2, 2)
"""two replicas: ranks 0-1"""
THREE = Layout({"model": Modality()}, 3, 3)
"""three replicas: ranks 0-2"""
COUNT = 26
CASES = {
    "shuffled": Case(loader(COUNT, 2, shuffle=True)),
    "workers": Case(loader(COUNT, 2, shuffle=True, num_workers=1)),
    "subset": Case(lambda run: DataLoader(Drawn(30), 2, sampler=SubsetRandomSampler(range(COUNT)))),
    "generator": Case(
        lambda run: DataLoader(
            Drawn(COUNT), 2, sampler=SubsetRandomSampler(range(COUNT), generator=torch.Generator().manual_seed(3))
        )
    ),
    "batches": Case(
        lambda run: DataLoader(Drawn(COUNT), batch_sampler=Shuffled(SequentialSampler(range(COUNT)), 2, False))
    ),
}
Chain = list[tuple[Layout, dict[str, Any], int]]
"""layouts, options, and after how many steps each stops"""


def seen(chain: Chain, cases: dict[str, Case], folder: Path) -> dict[str, Any]:
    """For each case, how often each sample was seen in the first epoch, and in the second by the last layout."""
    found: dict[str, tuple[Counter[int], Counter[int]]] = {name: (Counter(), Counter()) for name in cases}
    for number, (layout, options, stop) in enumerate(chain):

        def everything(run: Run, number: int = number, stop: int = stop) -> dict[str, Any]:
            results = {}
            for name, case in cases.items():
                before = folder / f"{name}{number - 1}.ckpt" if number else None
                path = folder / f"{name}{number}.ckpt" if stop else None
                results[name] = train(run, case, path=path, after=stop, ckpt_path=before, seed=5 + number)["steps"]
            return results

        ranks = together(layout, everything, folder, **{"num_microbatches": 1, **options})
        for rank in ranks[-layout.replicas :]:  # one of each replica
            for name, steps in rank.items():
                for epoch in range(2):
                    found[name][epoch].update(samples(steps, epoch))
    return found


LOADED = {"microbatching": "loader"}
CHAINS: dict[str, Chain] = {
    "two replicas, one": [(TWO, {}, 2), (ONE, {}, 0)],
    "modalities, three, one": [(TWINS, {}, 1), (THREE, {}, 1), (ONE, {}, 0)],
    "two batches a step, three": [
        (ONE, {**LOADED, "num_microbatches": 2}, 2),
        (PIPE, {**LOADED, "num_microbatches": 3}, 0),
    ],
}


@pytest.mark.parametrize("name", CHAINS)
def test_the_samples_that_are_left_are_seen_once(name: str, tmp_path: Path) -> None:
    chain = CHAINS[name]
    cases = CASES if name == "two replicas, one" else {case: CASES[case] for case in ("shuffled", "batches")}
    for first, second in seen(chain, cases, tmp_path).values():
        assert first == Counter(range(COUNT))
        assert set(second) == set(range(COUNT))


@pytest.mark.exhaustive
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
@pytest.mark.parametrize("after", [ONE, TWO, THREE, TWINS, PIPE], ids=["one", "two", "three", "twins", "pipe"])
@pytest.mark.parametrize("before", [ONE, TWO, THREE, TWINS, PIPE], ids=["one", "two", "three", "twins", "pipe"])
def test_no_sample_is_skipped_between_any_two_layouts(before: Layout, after: Layout, stop: int, tmp_path: Path) -> None:
    for first, second in seen([(before, {}, stop), (after, {}, 0)], CASES, tmp_path).values():
        assert set(first) == set(second) == set(range(COUNT))
        # a DistributedSampler repeats samples where they do not fill all replicas
        assert sum(first.values()) - COUNT < after.replicas + before.replicas
        assert max(first.values()) <= 2


def test_samples_drawn_with_replacement_are_those_of_the_epoch(tmp_path: Path) -> None:
    """What is left is counted by how often the order holds a sample."""

    def weighted(run: Run) -> Any:
        return DataLoader(Drawn(COUNT), 2, sampler=WeightedRandomSampler([1.0, 5.0] * 13, COUNT))

    cases = {"weighted": Case(weighted)}
    whole = seen([(TWO, {}, 0)], cases, tmp_path)["weighted"]
    assert seen([(TWO, {}, 2), (ONE, {}, 0)], cases, tmp_path)["weighted"][0] == whole[0]


REFUSED = {
    "stateful": (
        Case(lambda run: StatefulDataLoader(Drawn(24), 2)),
        Case(lambda run: StatefulDataLoader(Drawn(24), 2)),
        "by 2 replicas, each with its own position",
    ),
    "stream": (
        Case(lambda run: DataLoader(Streamed(24), 2)),
        Case(lambda run: DataLoader(Streamed(24), 2)),
        "by 2 replicas, each with its own position",
    ),
    "samples": (Case(loader(24, 2)), Case(loader(26, 2)), "an epoch of 24 samples"),
    "kind": (Case(loader(24, 2)), Case(lambda run: DataLoader(Streamed(24), 2)), "of kind 'map'"),
    "loaders": (Case(loader(24, 2)), Case(lambda run: [loader(24, 2)(run)] * 2), "was saved with 1"),
}


def test_what_cannot_go_on_is_refused(tmp_path: Path) -> None:
    def saved(run: Run) -> None:
        for name, (case, _, _) in REFUSED.items():
            train(run, case, path=tmp_path / f"{name}.ckpt", after=2)

    def refused(run: Run) -> dict[str, str]:
        told = {}
        for name, (_, case, _) in REFUSED.items():
            with pytest.raises(ConfigError) as error:
                train(run, case, ckpt_path=tmp_path / f"{name}.ckpt")
            told[name] = str(error.value)
        return told

    together(TWO, saved, tmp_path, num_microbatches=1)
    for name, told in together(ONE, refused, tmp_path, num_microbatches=1)[0].items():
        assert REFUSED[name][2] in told
