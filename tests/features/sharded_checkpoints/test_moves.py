"""A sharded checkpoint of any layout loads into any other: the same bits, and the same losses afterwards.

The default run holds moves in a circle of a few layouts for each model; `exhaustive` holds all pairs of all layouts.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from checkpoint.moves import AFTER, BEFORE, GRIDS, LAYOUTS, MODELS, SHARING, assert_same_bits, run, saved, tensors
from lightning_mm5d.features.sharded_checkpoints.sharded_load import ShardedCheckpoint
from ranks import call_ranks

BESIDE_SHARING = {
    "one",
    "e | l pp 2",
    "all tp 2",
    "e | l cp 2",
}
FEW = {
    "llava": ["e with l pp 2", "e | l tp 2"],
    "qwen2_vl": ["e | l", "e with l pp 2", "e dp 2 | l dp 1"],
    "whisper": ["z3, tp 2", "one"],
}


def _run(rank: int, *arguments: Any) -> list[float]:
    return run(*arguments)


def train(name: str, which: str, folder: Path) -> list[float]:
    """Train, and save under `folder`; return the losses."""
    return call_ranks(LAYOUTS[which][2], _run, name, which, folder)[0]


def check_move(name: str, source: Path, losses: list[float], target: str, folder: Path) -> None:
    """Load the checkpoint of a run that had these losses under another layout."""
    got = call_ranks(LAYOUTS[target][2], _run, name, target, None, source, folder)[0]
    assert_same_bits(source, folder)
    torch.testing.assert_close(got, losses[BEFORE:], rtol=1e-6, atol=1e-6)
    assert len(got) == AFTER


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", FEW)
def test_some_layouts_go_on_from_the_checkpoints_of_others(name: str, tmp_path: Path) -> None:
    layouts = FEW[name]
    losses = {which: train(name, which, tmp_path / which) for which in layouts}
    for source in layouts:
        target = layouts[layouts.index(source) - 1]
        check_move(name, saved(tmp_path / source), losses[source], target, tmp_path / f"{source} to {target}.ckpt")
    check_dcp(saved(tmp_path / layouts[0]))


def check_dcp(path: Path) -> None:
    """Read the directory by the public reader of torch.distributed.checkpoint, too."""
    checkpoint, stored = ShardedCheckpoint(path), tensors(path)
    state = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in stored.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process loads
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert all(torch.equal(state[name], value) for name, value in stored.items())
    assert len(checkpoint.names()) > 10


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", MODELS)
def test_all_layouts_go_on_from_the_checkpoints_of_all_others(name: str, tmp_path: Path) -> None:
    layouts = [which for which in LAYOUTS if which not in GRIDS or name == "llava"]
    losses = {which: train(name, which, tmp_path / which) for which in layouts}
    wrong = []
    for source in layouts:
        for target in layouts:
            if (source in SHARING) != (target in SHARING) and not {source, target} & BESIDE_SHARING:
                continue
            folder = tmp_path / f"{source} to {target}.ckpt"
            try:
                check_move(name, saved(tmp_path / source), losses[source], target, folder)
            except AssertionError as error:
                wrong.append(f"{source} to {target}: {error}")
    assert not wrong, "\n".join(wrong)
