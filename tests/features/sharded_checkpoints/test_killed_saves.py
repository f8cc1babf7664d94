"""A process that is killed at any moment of a save leaves the last checkpoint whole, and the next save works."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from features.sharded_checkpoints.test_sharded_runs import train
from features.test_checkpoints import Adaptive
from features.toys import LANGUAGE, VISION, Layout, Run
from lightning_mm5d import Modality
from lightning_mm5d.checkpoint.rank_reports import RankReports
from lightning_mm5d.features.sharded_checkpoints.sharded_save import Save
from lightning_mm5d.storage.tensor_file import TensorFileWriter
from ranks import run_ranks

FOUR = Layout({"vision": Modality(**VISION), "language": Modality(pp_size=3, **LANGUAGE)}, 4)
"""vision: rank 0; language: ranks 1-3 as stages"""
KILLED_AT_STEP = 4


def _kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _before(owner: Any, name: str) -> None:
    setattr(owner, name, _kill)


def _after(owner: Any, name: str, when: Callable[..., bool] = lambda *_: True) -> None:
    original = getattr(owner, name)

    def then_kill(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if when(*args):
            _kill()
        return result

    setattr(owner, name, then_kill)


POINTS: dict[str, Callable[[int], None]] = {
    "before it is announced": lambda rank: _before(Save, "announce"),
    "before shards are taken": lambda rank: _before(Save, "take"),
    "in the midst of a file": lambda rank: _after(TensorFileWriter, "write"),
    "before files are told": lambda rank: _after(Save, "_written"),
    "after files are told": lambda rank: _after(RankReports, "tell", lambda _, key, *__: key == "written"),
    "in the midst of the end": lambda rank: (
        _after(os, "rename") if rank == 0 else _before(RankReports, "part")  # rank 0: between two renames
    ),
}


class Doomed(Adaptive):
    def __init__(self, rank: int, point: str) -> None:
        super().__init__()
        self.victim, self.point = rank, point

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == self.victim and self.global_step == KILLED_AT_STEP - 1:
            POINTS[self.point](self.victim)


def doomed(rank: int, run: Run, victim: int, point: str) -> None:
    warnings.simplefilter("ignore")
    with suppress(Exception):
        train(run, Doomed(victim, point), 4)


def goes_on(rank: int, run: Run) -> tuple[int, list[str]]:
    warnings.simplefilter("ignore")
    trainer = train(run, Adaptive(), 4, ckpt_path="last")
    return trainer.global_step, sorted(os.listdir(run.folder))


def check(folder: Path, victim: int, point: str) -> None:
    run = Run(FOUR, {"checkpoint": "sharded"}, folder)
    with suppress(AssertionError):  # of ranks that were ended
        run_ranks(4, doomed, run, victim, point, killed=[victim])
    assert any(entry.name.endswith(".ckpt") for entry in folder.iterdir())
    for steps, there in run_ranks(4, goes_on, run):
        assert steps == 8
        assert {"last.ckpt", "step=8.ckpt"} <= set(there)
        assert not [name for name in there if name.startswith(".")]  # what the killed save left is removed


@pytest.mark.parametrize(("victim", "point"), [(0, "in the midst of the end"), (2, "in the midst of a file")])
def test_a_killed_rank_leaves_the_last_checkpoint(tmp_path: Path, victim: int, point: str) -> None:
    check(tmp_path, victim, point)


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("point", POINTS)
def test_any_rank_killed_at_any_point_leaves_the_last_checkpoint(tmp_path: Path, victim: int, point: str) -> None:
    check(tmp_path, victim, point)
