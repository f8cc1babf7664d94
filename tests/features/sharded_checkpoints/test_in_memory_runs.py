"""A fit that fails goes on from the memory of the host to the last bit, whatever its layout, data and moment."""

from __future__ import annotations

import itertools
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from lightning import seed_everything
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint

from features.resuming import Case, Losses, Watched, loader
from features.test_resume import LOADERS, SAMPLERS
from features.toys import LANGUAGE, PAIR, PIPE, TWINS, VISION, Layout, Run, together, weights
from lightning_mm5d import Modality
from lightning_mm5d.features.sharded_checkpoints import in_memory

ZERO = Layout({"vision": Modality(zero_stage=1, **VISION), "language": Modality(zero_stage=3, **LANGUAGE)}, 4, 2)
"""vision: ranks 0-1, language: ranks 2-3; both are replicas that share states"""


class BrokenError(Exception):
    pass


class Break(Callback):
    """Fails in a hook when it is called for a number of times."""

    def __init__(self, hook: str, time: int) -> None:
        calls = itertools.count(1)

        def called(*_: Any, **__: Any) -> None:
            if next(calls) == time:
                raise BrokenError

        setattr(self, hook, called)


def fit(run: Run, case: Case, folder: Path, broken: Callback | None = None, seed: int = 5) -> dict[str, Any]:
    """The first fit of a process, as far as it comes."""
    in_memory._FITS = itertools.count(1)
    in_memory.SHARED_MEMORY = folder  # of a machine of its own
    folder.mkdir(exist_ok=True)
    seed_everything(seed, verbose=False)
    module, losses = Watched(), Losses()
    saver = ModelCheckpoint(folder / "saved", monitor="val_loss", filename="{epoch}", save_top_k=1)
    callbacks = [losses, saver, EarlyStopping("val_loss", patience=9), *([] if broken is None else [broken])]
    options = {"num_sanity_val_steps": 1, "enable_checkpointing": True, **case.trainer}
    trainer = run.trainer(max_epochs=case.epochs, callbacks=callbacks, **options)
    with suppress(BrokenError):
        trainer.fit(module, case.loader(run), run.loader(8))
        left = {} if trainer.global_rank else weights(module)
        return {"steps": module.steps, "losses": losses.values, "weights": left, "best": float(saver.best_model_score)}
    return {"steps": module.steps, "losses": losses.values}


def broken_and_begun_again(run: Run, case: Case, name: str, hook: str, time: int) -> dict[str, Any]:
    own = run.folder / name
    whole = fit(run, case, run.folder / f"{name} whole")
    first = fit(run, case, own, Break(hook, time))
    return {"whole": whole, "first": first, "second": fit(run, case, own, seed=99)}


def check(layout: Layout, cases: dict[str, Case], moments: list[tuple[str, int]], folder: Path, **options: Any) -> None:
    """Break each case at each moment, on all ranks."""
    options["checkpoint"] = {"in_memory_every_n_steps": 1, **options.pop("checkpoint", {})}

    def everything(run: Run) -> list[Any]:
        return [
            (name, hook, broken_and_begun_again(run, case, f"{name} {hook} {time}", hook, time))
            for name, case in cases.items()
            for hook, time in moments
        ]

    for rank, found in enumerate(together(layout, everything, folder, **options)):
        for name, hook, one in found:
            whole, first, second = one["whole"], one["first"], one["second"]
            taken = len(first["losses"])
            assert "weights" not in first, (name, hook)
            assert first["losses"] == whole["losses"][:taken], (name, hook)
            again = len(whole["losses"]) - len(second["losses"])  # the step from which it went on
            window = cases[name].trainer.get("accumulate_grad_batches", 1)
            assert taken - window <= again <= taken, (name, hook, taken, again)
            assert second["losses"] == whole["losses"][again:], (name, hook)
            assert second["steps"] == whole["steps"][again:], (name, hook)
            if rank == 0:
                there = {key: value for key, value in whole["weights"].items() if not value.isnan().any()}
                unlike = [key for key, value in there.items() if not value.equal(second["weights"][key])]
                assert there
                assert not unlike, (name, hook, unlike)
            assert second["best"] == whole["best"], (name, hook)


STEP = [("on_before_optimizer_step", 4), ("on_train_batch_end", 8)]
EPOCH = [("on_train_epoch_end", 1), ("on_train_epoch_start", 2), ("on_validation_start", 3)]


@pytest.mark.parametrize(
    "layout",
    [PAIR, pytest.param(PIPE, marks=pytest.mark.exhaustive), pytest.param(TWINS, marks=pytest.mark.exhaustive), ZERO],
    ids=["pair", "pipe", "twins", "zero"],
)
def test_a_fit_that_breaks_in_a_step_goes_on_to_the_last_bit(layout: Layout, tmp_path: Path) -> None:
    cases = {"shuffled": SAMPLERS["shuffled"], "workers": LOADERS["workers"]}
    check(layout, cases, [("on_before_optimizer_step", 4)] if layout.replicas > 1 else STEP, tmp_path)


def test_a_fit_that_breaks_between_epochs_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    check(PAIR, {"shuffled": SAMPLERS["shuffled"]}, EPOCH, tmp_path)


def test_windows_streams_and_sharded_checkpoints_beside_it(tmp_path: Path) -> None:
    cases = {name: LOADERS[name] for name in ("window", "stateful", "stream")}
    sharded = {"checkpoint_format": "sharded", "async_checkpoint": True}
    check(PAIR, cases, [("on_train_batch_start", 7)], tmp_path, checkpoint=sharded)


def test_steps_between_two_checkpoints_are_taken_again(tmp_path: Path) -> None:
    def both(run: Run) -> Any:
        case = Case(loader(shuffle=True))
        return broken_and_begun_again(run, case, "five", "on_before_optimizer_step", 5)

    for found in together(PAIR, both, tmp_path, checkpoint={"in_memory_every_n_steps": 3}):
        assert [len(found[key]["losses"]) for key in ("whole", "first", "second")] == [12, 4, 9]
        assert found["second"]["losses"] == found["whole"]["losses"][3:]
