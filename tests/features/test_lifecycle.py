"""What may be called before a run, between runs and after one that failed: right, or one error that says what to do."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from features.toys import PAIR, PIPE, TWINS, Layout, Run, Toy, alone, assert_same, figures, outcomes, together, weights
from lightning_mm5d import MultimodalStrategy
from lightning_mm5d.config.errors import ConfigError
from sweeps import dealt


class Adam(Toy):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class FailsOnce(Adam):
    fails = True

    def on_train_batch_end(self, *_: Any) -> None:
        if self.fails:
            raise KeyError("the user's own mistake")


def error(call: Callable[[], Any]) -> str:
    try:
        call()
    except ConfigError as refused:
        return str(refused)
    return "no error"


def after_fit(run: Run) -> Any:
    """Loads its own checkpoint between two fits; `reduced` counts every replica once."""
    module, trainer = Adam(), run.trainer()
    trainer.fit(module, run.training(16))
    path = run.folder / "after.ckpt"
    trainer.save_checkpoint(path)
    trainer.strategy.barrier()
    checkpoint = torch.load(path, weights_only=True)
    trainer.strategy.load_model_state_dict(checkpoint)
    trainer.strategy.load_optimizer_state_dict(checkpoint)
    reduced = trainer.strategy.reduce(torch.tensor(1.0), reduce_op="sum")
    trainer.save_checkpoint(path.with_name("again.ckpt"))
    trainer.strategy.barrier()
    again = torch.load(path.with_name("again.ckpt"), weights_only=True)
    found = {
        "weights": weights(module),
        "states": [dict(saved["optimizer_states"][0]["state"]) for saved in (checkpoint, again)],
    }
    if run.layout is None:
        return found
    return {
        **found,
        "reduced": float(reduced),
        "fewer": error(lambda: trainer.strategy.load_optimizer_state_dict({"optimizer_states": []})),
        "product": error(lambda: trainer.strategy.reduce(torch.ones(1), reduce_op="product")),
        "step": error(lambda: trainer.strategy.validation_step({}, 0)),
    }


def failed(run: Run) -> list[str]:
    module, trainer = FailsOnce(), run.trainer()
    with pytest.raises(KeyError):
        trainer.fit(module, run.training(16))
    saved = error(lambda: trainer.save_checkpoint(run.folder / "failed.ckpt"))
    module.fails = False
    return [saved, error(lambda: run.trainer().fit(module, run.training(16)))]


@pytest.mark.parametrize("layout", dealt(__file__, [PIPE, TWINS]), ids=["pipe", "twins"])
def test_a_trainer_saves_loads_and_reduces_after_fit(layout: Layout, tmp_path: Path) -> None:
    """vision: rank 0; language: ranks 1-2 as stages | as replicas"""
    for found in check_after_fit(layout, tmp_path):
        assert found["reduced"] == layout.replicas
        assert "optimizer_states" in found["fewer"]
        assert "reduce_op" in found["product"]
        assert "strategy.validation_step" in found["step"]


def check_after_fit(layout: Layout, folder: Path) -> list[Any]:
    for name in ("one", "ranks"):
        (folder / name).mkdir()
    one, ranks = alone(after_fit, folder / "one"), together(layout, after_fit, folder / "ranks")
    assert_same(ranks[0]["weights"], one["weights"])
    for states in ranks[0]["states"]:
        assert_same(states, one["states"][0])
    return ranks


def test_weights_that_a_failed_run_has_lost_are_neither_saved_nor_trained(tmp_path: Path) -> None:
    """vision: rank 0; language: rank 1"""
    for saved, trained in together(PAIR, failed, tmp_path):
        assert "ckpt_path" in saved
        assert "ckpt_path" in trained


def test_calls_before_any_run_say_what_to_call_first() -> None:
    chosen = Run(PIPE).trainer().strategy
    for call in (chosen.simulate, chosen.lightning_module_state_dict, chosen.model_to_device):
        assert "trainer.fit" in error(call)
    assert "Call the trainer" in error(lambda: chosen.training_step({}, 0))
    assert chosen.reduce_boolean_decision(True)


class SavesWhenValidated(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "validate":
            trainer.save_checkpoint(self.path)


def saved_after_a_validation(run: Run) -> Any:
    during, after = run.folder / "during.ckpt", run.folder / "after.ckpt"
    module = Adam()
    trainer = run.trainer(callbacks=[SavesWhenValidated(during)])
    trainer.fit(module, run.training())
    trainer.validate(module, run.loader(8), verbose=False)
    trainer.save_checkpoint(after)
    files = [torch.load(path, weights_only=True) for path in (during, after)]
    return [{"weights": file["state_dict"], "states": file["optimizer_states"]} for file in files]


def test_a_run_of_another_kind_leaves_optimizers_the_parameters_of_fit(tmp_path: Path) -> None:
    """vision: rank 0; language: ranks 1-2 as stages"""
    for folder in ("one", "ranks"):
        (tmp_path / folder).mkdir()
    outcome = outcomes(PIPE, saved_after_a_validation, folder=tmp_path)["saved_after_a_validation"]
    assert_same(outcome.ranks[0], outcome.one)


class WithoutOptimizer(Toy):
    def configure_optimizers(self) -> None:
        return None


def without_optimizer(run: Run) -> Any:
    """Saves, goes on from the file, and reads it again after the run."""
    first, second = WithoutOptimizer(), WithoutOptimizer()
    saver = ModelCheckpoint(dirpath=run.folder, every_n_epochs=1, save_last=True)
    run.trainer(callbacks=[saver], enable_checkpointing=True).fit(first, run.training(16), run.loader(8))
    trainer = run.trainer(max_epochs=2)
    trainer.fit(second, run.training(16), run.loader(8), ckpt_path=saver.last_model_path)
    loaded = trainer.strategy.load_checkpoint(saver.last_model_path)
    steps = trainer.global_step
    return {"steps": steps, "states": loaded["optimizer_states"], "weights": weights(second), **figures(trainer)}


@pytest.mark.parametrize("checkpoint", ["full", "sharded"])
def test_modules_without_optimizers_are_saved_and_resumed(checkpoint: str, tmp_path: Path) -> None:
    """vision: rank 0; language: ranks 1-2 as stages"""
    found = outcomes(PIPE, without_optimizer, folder=tmp_path, checkpoint=checkpoint)["without_optimizer"]
    shown = {"steps", "val_loss"} | ({"weights", "states"} if checkpoint == "full" else set())
    assert_same({key: found.ranks[0][key] for key in shown}, {key: found.one[key] for key in shown})


class Built(Toy):
    """Counts how often `configure_model` runs in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = list[int]()

    def configure_model(self) -> None:
        self.calls.append(1)


def reads_again(start_method: str, folder: Path) -> int:
    """Reads a checkpoint in the process that has called fit; returns how often it has built the module."""
    module = Built()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=MultimodalStrategy(launch={"start_method": start_method}),  # type: ignore[arg-type]
        max_epochs=1,
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, Run().training(16))
    path = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    assert trainer.strategy.load_checkpoint(path)["global_step"] == 2
    return len(module.calls)


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_are_read_after_a_run_and_one_process_builds_a_module_once(tmp_path: Path) -> None:
    assert reads_again("popen", tmp_path / "popen") == 1
    reads_again("fork", tmp_path / "fork")


class Kept(Toy):
    """Keeps a result with its graph, as for a callback."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.features = self.encoder(batch["images"])
        return super().training_step(batch, batch_idx)


def collected(run: Run) -> Any:
    """Whether modules and engines go with their last name, also where a module has failed or been validated."""
    left = []
    for module in (Toy(), Kept(), FailsOnce()):
        trainer = run.trainer()
        try:
            trainer.fit(module, run.training(16), run.loader(16))
        except KeyError:
            pass
        else:
            trainer.validate(module, run.loader(16), verbose=False)
        left += [weakref.ref(module), weakref.ref(trainer)]
        del module, trainer
    end = time.monotonic() + 10
    while any(one() is not None for one in left) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.1)  # threads of a run that failed end by themselves
    return [type(one()).__name__ for one in left if one() is not None]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", dealt(__file__, [PIPE, TWINS]), ids=["pipe", "twins"])
def test_nothing_of_a_run_is_left_once_its_module_and_trainer_are_dropped(layout: Layout) -> None:
    """A module that is left keeps its weights, and groups of ranks with their threads."""
    assert together(layout, collected) == [[]] * layout.world


class Noisy(Toy):
    """Keeps a number that its step draws, and saves after the first batch where it has a path."""

    def __init__(self, path: Path | None = None) -> None:
        super().__init__()
        self.path, self.seen = path, list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("noise", torch.rand(()), on_step=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(self.trainer.callback_metrics["noise"]))
        if self.path is not None and batch_idx == 0:
            self.trainer.save_checkpoint(self.path)


def fits_after_one_seed(run: Run) -> Any:
    modules = [Noisy(), Noisy(run.folder / "first.ckpt"), Noisy(), Noisy()]
    for index, module in enumerate(modules):
        if index in (0, 3):
            L.seed_everything(3, verbose=False)
        resumed = run.folder / "first.ckpt" if index == 2 else None
        run.trainer(log_every_n_steps=1).fit(module, run.training(), ckpt_path=resumed)
    return [module.seen for module in modules]


def test_a_second_fit_draws_other_numbers_and_goes_on_from_a_checkpoint_with_them(tmp_path: Path) -> None:
    """vision: rank 0, language: rank 1"""
    for first, second, resumed, reseeded in together(PAIR, fits_after_one_seed, tmp_path):
        assert len({*first, *second}) == 4
        assert resumed == second[1:]
        assert reseeded == first
