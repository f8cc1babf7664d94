"""Checkpoints are what one process would have written, and any run goes on from them as if it had not stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback, ModelCheckpoint

from features.toys import (
    PIPE,
    TWINS,
    Layout,
    Outcome,
    Run,
    Toy,
    alone,
    assert_same,
    figures,
    outcomes,
    together,
    weights,
)
from lightning_mm5d import Modality
from sweeps import dealt


class Adaptive(Toy):
    """AdamW in groups, a scheduler per step, and state of its own in the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = int(self.seen)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["mine"]

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.decoder.parameters(), "weight_decay": 0.1},
            {"params": self.encoder.parameters(), "lr": 0.003},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 0.01], total_steps=8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit(run: Run, module: Toy, epochs: int, name: str = "", ckpt_path: Any = None, **options: Any) -> dict[str, Any]:
    saver = ModelCheckpoint(run.folder / (name or "unused"), save_last=True)
    callbacks = [saver, *options.pop("callbacks", [])]
    trainer = run.trainer(max_epochs=epochs, enable_checkpointing=True, callbacks=callbacks, **options)
    trainer.fit(module, run.training(), run.loader(8), ckpt_path=ckpt_path)
    return {"weights": weights(module), "metrics": figures(trainer), "steps": trainer.global_step}


def uninterrupted(run: Run) -> Any:
    return fit(run, Adaptive(), 4)


def resumed(run: Run) -> Any:
    fit(run, Adaptive(), 2, "half")
    module = Adaptive()
    return {**fit(run, module, 4, ckpt_path=run.folder / "half/last.ckpt"), "mine": module.loaded}


def resumed_from_one_process(run: Run) -> Any:
    return fit(run, Adaptive(), 4, ckpt_path=run.folder.parent / "one/half/last.ckpt")


def loaded_for_tests(run: Run) -> Any:
    path = run.folder / "half/last.ckpt"
    plain = Adaptive.load_from_checkpoint(path, weights_only=True)
    results = run.trainer().validate(Adaptive(), run.loader(8), ckpt_path=path, verbose=False)
    return {"plain": weights(plain), "validated": results}


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.encoder)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.encoder, optimizer, lr=0.02)


class TunedLater(Toy):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)


def resumed_after_unfreezing(run: Run) -> Any:
    """The group of the encoder was added between setup and saving."""
    fit(run, TunedLater(), 2, "tuned", callbacks=[Unfreeze()])
    return fit(run, TunedLater(), 4, ckpt_path=run.folder / "tuned/last.ckpt", callbacks=[Unfreeze()])


def refused(run: Run) -> str:
    try:
        run.trainer().validate(Adaptive(), run.loader(8), ckpt_path=run.folder / "changed.ckpt", verbose=False)
    except RuntimeError as error:
        return str(error)
    return "no error"


SCENARIOS = (uninterrupted, resumed, resumed_from_one_process, loaded_for_tests, resumed_after_unfreezing)


@pytest.fixture(scope="module", params=dealt(__file__, [PIPE, TWINS]), ids=["pipe", "twins"])
def found(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Outcome]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, outcomes(request.param, *SCENARIOS, folder=folder)


def test_a_resumed_run_equals_one_that_was_not_stopped(found: Any) -> None:
    outcome = found[1]
    one = outcome["uninterrupted"].one
    for name in ("uninterrupted", "resumed", "resumed_from_one_process"):
        assert_same(outcome[name].ranks[0]["weights"], one["weights"])
        for rank in outcome[name].ranks:
            assert_same(rank["metrics"], one["metrics"])
            assert rank["steps"] == 8
    assert {rank["mine"] for rank in outcome["resumed"].ranks} == {4}


def test_the_file_is_the_one_of_one_process(found: Any) -> None:
    """Keys, weights, optimizer state by the user's own groups, schedulers and loops."""
    folder, _ = found
    one, ranks = (torch.load(folder / name / "half/last.ckpt", weights_only=True) for name in ("one", "ranks"))
    assert list(ranks["state_dict"]) == list(one["state_dict"])
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "mine", "hyper_parameters", "epoch", "global_step"):
        assert_same(ranks[key], one[key])
    assert sorted(ranks) == sorted([*one, "lightning_mm5d"])


def test_one_process_resumes_from_the_file(found: Any) -> None:
    folder, outcome = found

    def resume(run: Run) -> Any:
        return fit(run, Adaptive(), 4, ckpt_path=folder / "ranks/half/last.ckpt")

    assert_same(alone(resume, folder), outcome["uninterrupted"].one)


def test_the_file_loads_into_a_plain_module_and_into_an_evaluation(found: Any) -> None:
    got = found[1]["loaded_for_tests"]
    for rank in got.ranks:
        assert_same(rank, got.one)


def test_groups_that_a_callback_added_are_saved_and_resumed(found: Any) -> None:
    folder, outcome = found
    one, ranks = (torch.load(folder / name / "tuned/last.ckpt", weights_only=True) for name in ("one", "ranks"))
    assert_same(ranks["optimizer_states"], one["optimizer_states"])
    assert_same(ranks["callbacks"]["Unfreeze"], one["callbacks"]["Unfreeze"])
    got = outcome["resumed_after_unfreezing"]
    assert_same(got.ranks[0]["weights"], got.one["weights"])


class Buffered(Toy):
    """Buffers that steps write: of a remote encoder's norm, of a layer, and one made of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.projector = torch.nn.Sequential(self.encoder.projector, torch.nn.BatchNorm1d(8)).double()
        self.register_buffer("average", torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.average.mul_(0.9).add_(0.1 * loss.detach())
        return loss


def with_buffers(run: Run) -> Any:
    return fit(run, Buffered(), 2, "buffered")


def test_buffers_come_from_the_stage_that_computes_them(tmp_path: Path) -> None:
    """vision: rank 0; language: ranks 1-2 as stages; a norm over the batch needs it whole."""
    got = outcomes(PIPE, with_buffers, folder=tmp_path, num_microbatches=1)["with_buffers"]
    assert_same(got.ranks[0]["weights"], got.one["weights"])
    one, ranks = (torch.load(tmp_path / name / "buffered/last.ckpt", weights_only=True) for name in ("one", "ranks"))
    assert_same(ranks["state_dict"], one["state_dict"])
    assert one["state_dict"]["average"] > 0
    assert bool(one["state_dict"]["encoder.projector.1.running_mean"].any())


def saved_after_training(run: Run) -> Any:
    """Not by a callback, but when the trainer has ended."""
    module = Adaptive()
    trainer = run.trainer(max_epochs=1)
    trainer.fit(module, run.training())
    trainer.save_checkpoint(run.folder / "after.ckpt")


def test_a_trainer_that_has_ended_saves_the_whole_of_it(tmp_path: Path) -> None:
    """vision: rank 0; language: ranks 1-2 as stages."""
    outcomes(PIPE, saved_after_training, folder=tmp_path)
    one, ranks = (torch.load(tmp_path / name / "after.ckpt", weights_only=True) for name in ("one", "ranks"))
    assert_same(ranks["state_dict"], one["state_dict"])
    assert_same(ranks["optimizer_states"], one["optimizer_states"])


class Measured(Toy):
    """Reads weights of all parts when it is saved."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["norm"] = sum(parameter.norm().item() for parameter in self.parameters())
        checkpoint["copy"] = {name: value.clone() for name, value in self.state_dict().items()}


class Largest(Callback):
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["largest"] = float(pl_module.decoder.head.weight.abs().max())


def measured(run: Run) -> Any:
    module, trainer = Measured(), run.trainer(callbacks=[Largest()])
    trainer.fit(module, run.training())
    trainer.save_checkpoint(run.folder / "a", weights_only=False)
    assert "on_save_checkpoint" not in vars(module), "hooks are as they were"
    trainer.strategy.barrier()
    saved = torch.load(run.folder / "a", weights_only=False)
    return {name: saved[name] for name in ("norm", "copy", "largest", "state_dict")}


@pytest.mark.parametrize(
    "layout",
    [
        PIPE,
        Layout({"model": Modality(tp_size=2)}, 2),
        Layout({"model": Modality(dp_size=2, sharding={"zero_stage": 3})}, 2, 2),
    ],
    ids=["pipe", "tp", "zero 3"],
)
def test_hooks_of_a_save_after_a_run_read_weights_for_the_file(layout: Layout, tmp_path: Path) -> None:
    """vision: rank 0; language: ranks 1-2 | all: ranks 0-1"""
    found = outcomes(layout, measured, folder=tmp_path)["measured"]
    for got in found.ranks:
        assert_same(got, found.one)


@pytest.mark.parametrize("kind", ["missing", "unexpected"])
def test_every_rank_refuses_a_file_with_other_keys(found: Any, tmp_path: Path, kind: str) -> None:
    checkpoint = torch.load(found[0] / "ranks/half/last.ckpt", weights_only=True)
    weight = checkpoint["state_dict"].pop("encoder.patch.weight")
    if kind == "unexpected":
        checkpoint["state_dict"] |= {"encoder.patch.weight": weight, "encoder.patch.more": weight}
    torch.save(checkpoint, tmp_path / "changed.ckpt")
    for error in together(PIPE, refused, tmp_path):
        assert kind in error.lower()
        assert ("encoder.patch.weight" if kind == "missing" else "encoder.patch.more") in error
