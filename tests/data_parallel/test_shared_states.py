"""What ranks share is born, saved, loaded, kept and lost as on one process."""

from __future__ import annotations

import atexit
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint

from data_parallel.test_sharing import Adagrad, Trained, shared
from features.built_in_parts import Late
from features.toys import LANGUAGE, PIPE, VISION, Layout, Run, Toy, assert_same, figures, outcomes, together, weights
from layouts import build
from lightning_mm5d import Modality, RemoteParameterError
from lightning_mm5d.features.sharded_checkpoints.sharded_load import ShardedCheckpoint
from lightning_mm5d.plan.holdings import DataShards, Holdings
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.trainer import guard


def at(run: Run, name: str) -> Path:
    run.folder.mkdir(parents=True, exist_ok=True)
    return run.folder / name


def contents(path: Path) -> dict[str, Any]:
    """Return weights and optimizer states of a checkpoint of any kind."""
    state = ShardedCheckpoint(path).state if path.is_dir() else torch.load(path, weights_only=False)
    optimizers = [{**one, "state": dict(one["state"])} for one in state["optimizer_states"]]
    return {"weights": dict(state["state_dict"]), "optimizers": optimizers, "schedulers": state["lr_schedulers"]}


class Saving(Callback):
    """Saves in hooks in which parameters show one face and the other."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(at(self.run, "own.ckpt"))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(at(self.run, "rest.ckpt"))


class Scheduled(Trained):
    """Two groups, of which each has its own schedule."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1 / (1 + step), lambda step: 0.9**step])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def saved(run: Run) -> Any:
    """Train and save; go on in the midst of an epoch; save after the run."""
    trainer = run.trainer(max_epochs=2, callbacks=[Saving(run)])
    trainer.fit(Scheduled(), run.training(32), run.loader(8))
    trainer.save_checkpoint(at(run, "after.ckpt"))
    found = [contents(at(run, name)) for name in ("own.ckpt", "rest.ckpt", "after.ckpt")]
    if run.layout is not None:  # plain Lightning begins the epoch anew
        trainer = run.trainer(max_epochs=2)
        trainer.fit(Scheduled(), run.training(32), run.loader(8), ckpt_path=at(run, "rest.ckpt"))
        trainer.save_checkpoint(at(run, "again.ckpt"))
        assert_same(contents(at(run, "again.ckpt")), found[-1], 0.0)
    return found


def constructed(run: Run) -> Any:
    """Save and load the states of an optimizer that makes them in its constructor."""
    trainer = run.trainer(max_epochs=1)
    trainer.fit(Adagrad(), run.training())
    trainer.save_checkpoint(at(run, "adagrad.ckpt"))
    trainer = run.trainer(max_epochs=2)
    trainer.fit(Adagrad(), run.training(), ckpt_path=at(run, "adagrad.ckpt"))
    trainer.save_checkpoint(at(run, "adagrad.ckpt"))
    return contents(at(run, "adagrad.ckpt"))


ROWS = shared(3, 2, 4, pp_size=2)
"""vision beside language on ranks 0-3; language: two stages of two ranks that share their rows"""


def test_full_checkpoints_are_those_of_one_process(tmp_path: Path) -> None:
    outcome = outcomes(ROWS, saved, folder=tmp_path)["saved"]
    assert_same(outcome.ranks[0], outcome.one)


def test_sharded_checkpoints_hold_what_one_process_saves(tmp_path: Path) -> None:
    found = outcomes(ROWS, saved, constructed, folder=tmp_path, checkpoint="sharded", async_checkpoint=True)
    for scenario, outcome in found.items():
        assert_same(outcome.ranks[0], outcome.one, where=scenario)


class Born(Late):
    """Keeps what its parameters are when optimizers are made."""

    def configure_optimizers(self) -> Any:
        self.born = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
        return super().configure_optimizers()


def born(run: Run) -> Any:
    torch.manual_seed(5)
    module = Born()
    trainer = run.trainer()
    trainer.fit(module, run.training())
    return {"born": module.born, "weights": weights(module)}


def test_a_rank_makes_its_own_rows_alone_bit_by_bit() -> None:
    outcome = outcomes(ROWS, born)["born"]
    assert_same(outcome.ranks[0]["weights"], outcome.one["weights"])
    module = Toy()
    module.offset = torch.nn.Parameter(torch.zeros(3))
    sizes = []
    for rank, found in enumerate(outcome.ranks):
        plan = plan_of(ROWS)
        holdings, shares = Holdings(plan, module), DataShards(plan)
        for name, value in found["born"].items():
            if not bool(value.isnan().all()):
                held = holdings.of(name, rank, value.shape)
                full = outcome.one["born"][name]
                assert all(
                    torch.equal(value[_slices(part.held)], full[_slices(part.full)]) for part in held.parts(value.shape)
                ), name
                sizes.append(value.numel() / full.numel())
                assert (shares.of(name, rank) is None) == (value.shape == full.shape)
    assert min(sizes) <= 0.5


def plan_of(layout: Layout) -> Plan:
    return Plan.of(Toy(), build(layout.world, **layout.modalities), layout.modalities)


def _slices(box: Any) -> tuple[slice, ...]:
    return tuple(slice(*one) for one in box)


def kept(run: Run) -> Any:
    """Fit, use the module, validate and fit again with the shards that are kept."""
    module, errors = Trained(), []
    run.trainer(max_epochs=1).fit(module, run.training(), run.loader(8))
    if run.layout is not None and run.layout.modalities["language"].sharding.zero_stage == 3:
        for use in (module.state_dict, lambda: module(next(iter(run.loader(8))))):
            with pytest.raises(RemoteParameterError) as error:
                use()
            errors.append(str(error.value))
    trainer = run.trainer(max_epochs=1)
    trainer.validate(module, run.loader(8), verbose=False)
    found = figures(trainer)
    trainer = run.trainer(max_epochs=1)
    trainer.fit(module, run.training())
    trainer.save_checkpoint(at(run, "kept.ckpt"))
    held = {name: tuple(value.shape) for name, value in module.named_parameters()}
    return found, contents(at(run, "kept.ckpt")), held


@pytest.mark.parametrize("stage", [1, 3])
def test_a_module_keeps_rows_and_goes_on_with_them(stage: int, tmp_path: Path) -> None:
    """all on ranks 0-1, which share optimizer states, or everything"""
    outcome = outcomes(shared(stage), kept, folder=tmp_path, checkpoint="sharded")["kept"]
    assert_same(outcome.ranks[0][:2], outcome.one[:2])
    assert all((found[2] == outcome.one[2]) == (stage == 1) for found in outcome.ranks)


class Interrupted(Trained):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise LookupError("the second batch")
        return super().training_step(batch, batch_idx)


def failed(run: Run) -> list[str]:
    module, said = Interrupted(), []
    for _ in range(2):
        try:
            run.trainer().fit(module, run.training())
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_a_run_after_a_failed_one_says_that_weights_are_lost() -> None:
    """all on ranks 0-1, which share everything"""
    for first, second in together(shared(3), failed):
        assert "the second batch" in first
        assert "parts of its weights" in second
    for first, second in together(shared(2), failed):  # whose parameters are whole
        assert "the second batch" in first
        assert "the second batch" in second


def interrupted(run: Run) -> Any:
    saving = OnExceptionCheckpoint(at(run, ""), "interrupted")
    with pytest.raises(LookupError, match="the second batch"):
        run.trainer(callbacks=[saving], enable_checkpointing=True).fit(Interrupted(), run.training())
    return contents(at(run, "interrupted.ckpt"))


def test_a_step_that_fails_leaves_the_rows_of_the_last_one(tmp_path: Path) -> None:
    """all on ranks 0-1, which gather parameters for each layer"""
    rows = {"zero_stage": 3, "reshard_after_forward": True}
    layout = Layout(
        {
            "vision": Modality(colocate_with="language", **rows, **VISION),
            "language": Modality(**rows, **LANGUAGE),
        },
        2,
        2,
    )
    outcome = outcomes(layout, interrupted, folder=tmp_path)["interrupted"]
    assert_same(outcome.ranks[0], outcome.one)


class StoppedInAHook(Trained):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.global_rank == 0:
            raise KeyboardInterrupt  # as SIGINT does


def stopped_in_a_hook(run: Run) -> Any:
    saving = OnExceptionCheckpoint(at(run, ""), "stopped")
    handler, hook = signal.getsignal(signal.SIGINT), sys.excepthook
    try:
        with pytest.raises(SystemExit):
            run.trainer(callbacks=[saving], enable_checkpointing=True).fit(StoppedInAHook(), run.training(32))
    finally:  # the process of a test goes on
        signal.signal(signal.SIGINT, handler)
        sys.excepthook = hook
        atexit.unregister(guard._end_interrupted)
    return contents(at(run, "stopped.ckpt"))


@pytest.mark.parametrize("layout", [shared(1), PIPE], ids=["replicas", "stages"])
def test_an_interrupt_of_one_rank_in_a_hook_saves_the_step_before(layout: Layout, tmp_path: Path) -> None:
    """all on ranks 0-1, which share optimizer states; vision: rank 0, language: ranks 1-2 as stages"""
    outcome = outcomes(layout, stopped_in_a_hook, folder=tmp_path)["stopped_in_a_hook"]
    assert_same(outcome.ranks[0], outcome.one)
