"""A job whose ranks get fewer goes on with the pipelines for what is left, from its last checkpoint.

The configuration stays the same: ``pipelines={"min": ...}`` gives pipelines for any number of ranks.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, Dataset

from lightning_mm5d import Modality
from lightning_mm5d.tools.cli.job import settle
from parity.harness import strategy
from ranks import run_ranks
from zoo import CASES

COUNT, BATCH, MICROBATCHES = 44, 4, 4
LOST, STEP = 4, 3
"""the rank that is lost, in the step of that number"""
Steps = dict[int, list[int]]
"""samples by the number of the step"""


class Numbered(Dataset):
    """The samples of a batch, and which number a sample has."""

    def __init__(self) -> None:
        self.batch = CASES["gpt2"].batch(COUNT, seed=1)
        self.numbers = {tuple(row.tolist()): number for number, row in enumerate(self.batch["input_ids"])}
        assert len(self.numbers) == COUNT

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: value[index] for key, value in self.batch.items()}


class Watching(Callback):
    """Notes the samples of each finished step, saves after every second one, and may lose its rank."""

    def __init__(self, data: Numbered, path: Path | None, lost: bool) -> None:
        self.data, self.path, self.lost, self.steps = data, path, lost, Steps()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self.lost and trainer.global_step == STEP:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        rows = batch["input_ids"].tolist()
        self.steps[trainer.global_step - 1] = [self.data.numbers[tuple(row)] for row in rows]
        if self.path is not None and trainer.global_step % 2 == 0:
            trainer.save_checkpoint(self.path)


def run(
    rank: int, pipelines: Any, world: int, path: Path, resumes: bool, options: dict[str, Any]
) -> tuple[Steps, Any, bool]:
    """Train an epoch; return the samples of the steps that ended, the parameters, and whether the run was whole."""
    data, module = Numbered(), CASES["gpt2"].build()
    watching = Watching(data, None if resumes else path, not resumes and rank == LOST)
    chosen = strategy({"model": Modality(pipeline={"pipelines": pipelines})}, num_microbatches=MICROBATCHES, **options)
    trainer = trainer_of(chosen, world, watching)
    try:
        trainer.fit(module, DataLoader(data, BATCH, shuffle=True), ckpt_path=path if resumes else None)
    except Exception:
        if torch.distributed.is_initialized():  # as if the process had ended
            torch.distributed.destroy_process_group()
        return watching.steps, None, False
    return watching.steps, dict(module.named_parameters()), True


def trainer_of(chosen: Any, world: int, *callbacks: Callback) -> L.Trainer:
    warnings.simplefilter("ignore")
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return L.Trainer(
        accelerator="cpu", devices=world, strategy=chosen, max_epochs=1, callbacks=list(callbacks), **quiet
    )


def together(pipelines: Any, world: int, ranks: list[Any], options: dict[str, Any]) -> Steps:
    """The samples of each step, of all replicas."""
    made = strategy({"model": Modality(pipeline={"pipelines": pipelines})}, num_microbatches=MICROBATCHES, **options)
    settle(made, world, 1)
    firsts = [made.layout.replica_ranks(replica)[0] for replica in range(made.layout.num_replicas)]
    steps = [ranks[first][0] for first in firsts]
    assert len({tuple(one) for one in steps}) == 1, "replicas ended after unlike numbers of steps"
    return {number: [sample for one in steps for sample in one[number]] for number in steps[0]}


def pairs(steps: Steps) -> Iterator[list[int]]:
    return (steps[number] for number in sorted(steps))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("pipelines", "left", "options"),
    [
        ({"min": 3}, 6, {}),
        pytest.param({"min": 2, "max": 3}, 5, {"checkpoint": "sharded"}),
        pytest.param({"min": 3}, 4, {}, marks=pytest.mark.exhaustive),
    ],
    ids=["4 and 3, then 3 and 3", "3, 2 and 2, then 3 and 2, sharded", "4 and 3, then 4"],
)
def test_a_job_that_loses_a_rank_goes_on_with_the_others(
    tmp_path: Path, pipelines: Any, left: int, options: dict[str, Any]
) -> None:
    """Replicas of 4 and 3 stages on ranks 0-6, of which rank 4 is lost; then what `pipelines` gives for the rest."""
    path = tmp_path / "last.ckpt"
    before = run_ranks(7, run, pipelines, 7, path, False, options, killed=[LOST])
    assert not any(one[2] for one in before if one is not None), "no rank noticed the loss"
    before[LOST] = ({}, None, False)
    after = run_ranks(left, run, pipelines, left, path, True, options)
    assert all(whole for *_, whole in after)
    kept = together(pipelines, 7, before, options)
    assert sorted(kept) == list(range(STEP))
    done = [kept[number] for number in range(STEP - STEP % 2)]  # the third step is lost with its rank
    done += pairs(together(pipelines, left, after, options))
    assert sorted(sample for step in done for sample in step) == list(range(COUNT))

    module = CASES["gpt2"].build()
    trainer_of("auto", 1).fit(module, DataLoader(Numbered(), batch_sampler=done))
    for name, expected in module.named_parameters():
        held = [one[1][name] for one in after if not one[1][name].isnan().any()]
        assert held, f"no rank has {name}"
        for value in held:
            torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")
