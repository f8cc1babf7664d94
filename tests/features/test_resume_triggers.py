"""Whatever saves a checkpoint, and at whichever moment, the resumed run is the uninterrupted one to the last bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from features.resuming import Drawn, Losses, StoppedError, Watched, loader
from features.toys import TWINS, Layout, Run, together, weights
from lightning_mm5d import Modality

TWO = Layout({"model": Modality()}, 2, 2)
"""two replicas: ranks 0-1"""
ONE = Layout({"model": Modality()}, 1)
"""rank 0"""
RARELY = {"every_n_train_steps": 50, "save_on_exception": True}


class End(Callback):
    """Ends the run in a hook, when `batch` batches of all epochs have begun: by an error, or by SIGTERM to one rank."""

    def __init__(self, hook: str, batch: int, by_signal: bool) -> None:
        self.batch, self.by_signal = batch, by_signal
        setattr(self, hook, self.act)

    def act(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 != self.batch:
            return
        if not self.by_signal:
            raise StoppedError
        if trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)


# hook in which the run ends, batches that have begun by then, options of ModelCheckpoint, resumed after
ENDS: dict[str, tuple[str, int, dict[str, Any], int]] = {
    "every two steps": ("on_train_batch_start", 4, {"every_n_train_steps": 2}, 2),
    "an error inside of a step": ("on_before_optimizer_step", 2, RARELY, 1),
    "SIGTERM": ("on_train_batch_start", 2, RARELY, 2),
    "validation at the end": ("on_train_batch_start", 4, {}, 3),
    "the end of an epoch": ("on_train_batch_start", 5, {"save_on_train_epoch_end": True}, 3),
    "an error before an epoch": ("on_train_epoch_start", 3, RARELY, 3),
    "the last step of an epoch": ("on_train_batch_start", 5, {"every_n_train_steps": 3}, 3),
}
HALF = {"every half epoch": ("on_train_batch_start", 6, {}, 4)}


def fit(run: Run, folder: Path, options: dict[str, Any], end: End | None = None, **more: Any) -> dict[str, Any]:
    seed_everything(more.pop("seed", 5), verbose=False)
    module, losses = Watched(), Losses()
    saver = ModelCheckpoint(folder, save_last=True, save_top_k=-1, filename="{epoch}-{step}", **options)
    callbacks = [losses, saver, *([] if end is None else [end])]
    ckpt_path = more.pop("ckpt_path", None)
    trainer = run.trainer(max_epochs=2, callbacks=callbacks, enable_checkpointing=True, **more)
    try:
        trainer.fit(module, loader(24, 4, shuffle=True)(run), DataLoader(Drawn(8), 4), ckpt_path=ckpt_path)
    except (StoppedError, SIGTERMException):
        assert end is not None
    return {
        "steps": module.steps,
        "losses": losses.values,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "places": (trainer.global_step, trainer.current_epoch, trainer.fit_loop.total_batch_idx),
        "weights": weights(module),
    }


def exact(layout: Layout, ends: Any, folder: Path, options: dict[str, Any], **more: Any) -> None:
    def everything(run: Run) -> dict[str, Any]:
        found = {}
        for name, (hook, batch, saver, _) in ends.items():
            place = run.folder / name
            whole = fit(run, place / "whole", saver, **more)
            fit(run, place / "half", saver, End(hook, batch, name == "SIGTERM"), **more)
            found[name] = whole, fit(run, place / "half", saver, ckpt_path="last", seed=9, **more)
        return found

    for number, rank in enumerate(together(layout, everything, folder, **options)):
        for name, (whole, resumed) in rank.items():
            after = ends[name][3]
            assert resumed["steps"] == whole["steps"][after:], name
            assert resumed["losses"] == whole["losses"][after:], name
            assert (resumed["metrics"], resumed["places"]) == (whole["metrics"], whole["places"]), name
            if number == 0 and options.get("checkpoint") != "sharded":
                assert all(torch.equal(resumed["weights"][key], value) for key, value in whole["weights"].items()), name


def test_replicas_resume_from_whatever_was_saved(tmp_path: Path) -> None:
    exact(TWO, ENDS, tmp_path, {"num_microbatches": 1})


def test_one_process_resumes_between_validations_and_after_sigterm(tmp_path: Path) -> None:
    exact(ONE, {"SIGTERM": ENDS["SIGTERM"]}, tmp_path / "term", {"num_microbatches": 1})
    exact(ONE, HALF, tmp_path / "half", {"num_microbatches": 1}, val_check_interval=2)


def test_a_last_batch_that_has_begun_is_taken_again_with_its_window(tmp_path: Path) -> None:
    """A validation came before it, which Lightning leaves out in the resumed run."""
    ends = {hook: (hook, 6, RARELY, 5) for hook in ("on_train_batch_start", "on_before_optimizer_step")}
    exact(ONE, ends, tmp_path / "last", {"num_microbatches": 1}, val_check_interval=5)
    window = {"of three": ("on_train_batch_start", 6, RARELY, 3)}
    exact(ONE, window, tmp_path / "window", {"num_microbatches": 1}, accumulate_grad_batches=3)


def test_a_validation_inside_of_a_window_that_is_taken_again_draws_again(tmp_path: Path) -> None:
    """The order of the next epoch depends on what validations have drawn."""
    ends = {name: ("on_train_batch_start", 5, saver, 3) for name, saver in (("validation", {}), ("error", RARELY))}
    exact(ONE, ends, tmp_path, {"num_microbatches": 1}, val_check_interval=4, accumulate_grad_batches=3)


@pytest.mark.parametrize("checkpoint", [pytest.param("full", marks=pytest.mark.exhaustive), "sharded"])
def test_modalities_resume_from_full_and_sharded_checkpoints(checkpoint: str, tmp_path: Path) -> None:
    names = ("every two steps", "an error inside of a step")
    exact(TWINS, {name: ENDS[name] for name in names}, tmp_path, {"checkpoint": checkpoint})


@pytest.mark.exhaustive
@pytest.mark.parametrize("checkpoint", ["full", "sharded"])
@pytest.mark.parametrize("layout", [ONE, TWO, TWINS], ids=["one", "two", "twins"])
def test_all_layouts_resume_from_whatever_was_saved(layout: Layout, checkpoint: str, tmp_path: Path) -> None:
    ends = {name: ENDS[name] for name in ("every two steps", "an error inside of a step", "SIGTERM")}
    exact(layout, ends if layout is ONE else ENDS, tmp_path, {"checkpoint": checkpoint})
