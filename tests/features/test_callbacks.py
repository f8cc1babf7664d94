"""Lightning's own callbacks work as on one process, on every rank."""

from __future__ import annotations

import csv
import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger

from features.toys import PIPE, TWINS, Outcome, Run, Toy, assert_same, figures, outcomes, weights
from sweeps import dealt


class Falling(Toy):
    """The validation loss falls, then rises."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def on_validation_epoch_end(self) -> None:
        self.log("score", [3.0, 2.0, 1.0, 4.0, 5.0, 6.0][self.current_epoch])


def checkpoint_and_stop(run: Run) -> Any:
    folder = run.folder / "checkpoints"
    saver = ModelCheckpoint(folder, monitor="score", filename="{epoch}-{score:.0f}", save_top_k=1, save_last=True)
    stopper = EarlyStopping("score", patience=2)
    best = EarlyStopping("val_loss", patience=50)
    trainer = run.trainer(max_epochs=6, enable_checkpointing=True, callbacks=[saver, stopper, best])
    trainer.fit(Falling(), run.training(), run.loader(8))
    found = torch.load(saver.best_model_path, weights_only=True)["state_dict"]
    return {
        "best": Path(saver.best_model_path).name,
        "score": float(saver.best_model_score),
        "files": sorted(path.name for path in folder.iterdir()),
        "stopped": stopper.stopped_epoch,
        "watched": float(best.best_score),
        "state": found,
    }


class FewStats(CPUAccelerator):
    """Lightning's needs a package for what it reports."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {"cpu_percent": 50.0}


def rates_and_devices(run: Run) -> Any:
    folder = run.folder / "logs"
    logger = CSVLogger(folder, name="", version="")
    callbacks = [LearningRateMonitor("step"), DeviceStatsMonitor(cpu_stats=True)]

    class Scheduled(Toy):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    trainer = run.trainer(max_epochs=2, logger=logger, log_every_n_steps=1, callbacks=callbacks, accelerator=FewStats())
    trainer.fit(Scheduled(), run.training(), run.loader(8))
    logger.save()
    if trainer.global_rank:
        return None
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    device = {
        key.split(".", 1)[1]: row[key] for row in rows for key in row if key.startswith("DeviceStats") and row[key]
    }
    return {
        "rates": [float(row["lr-SGD"]) for row in rows if row["lr-SGD"]],
        "losses": [float(row["train_loss"]) for row in rows if row["train_loss"]],
        "device": device,
    }


class Kept(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.summary = next(c for c in trainer.callbacks if isinstance(c, ModelSummary))._summary(trainer, pl_module)


def summary_and_bar(run: Run) -> Any:
    kept = Kept()
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        callbacks = [ModelSummary(max_depth=2), TQDMProgressBar(refresh_rate=1), kept]
        trainer = run.trainer(enable_model_summary=True, enable_progress_bar=True, callbacks=callbacks)
        trainer.fit(Toy(), run.training(), run.loader(8))
        trainer.predict(Toy(), run.loader(8), return_predictions=True)
    numbers = (kept.summary.total_parameters, kept.summary.trainable_parameters, kept.summary.param_nums)
    return {"numbers": numbers, "bar": "100%" in out.getvalue() + err.getvalue(), "rank": trainer.global_rank}


def scheduled_accumulation(run: Run) -> Any:
    module = Toy(lr=0.5)
    trainer = run.trainer(max_epochs=3, callbacks=[GradientAccumulationScheduler({1: 2, 2: 3})])
    trainer.fit(module, run.training(), run.loader(8))
    return {"weights": weights(module), "steps": trainer.global_step}


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.encoder)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.encoder, optimizer, lr=0.2)


class TunedLater(Toy):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.2)


def unfrozen_later(run: Run) -> Any:
    module = TunedLater()
    trainer = run.trainer(max_epochs=3, callbacks=[Unfreeze()])
    trainer.fit(module, run.training(), run.loader(8))
    return {"weights": weights(module), "metrics": figures(trainer)}


SCENARIOS = (
    checkpoint_and_stop,
    rates_and_devices,
    summary_and_bar,
    scheduled_accumulation,
    unfrozen_later,
)


@pytest.fixture(scope="module", params=dealt(__file__, [PIPE, TWINS]), ids=["pipe", "twins"])
def found(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return outcomes(request.param, *SCENARIOS, folder=tmp_path_factory.mktemp("callbacks"))


def test_checkpoints_and_early_stopping_follow_a_logged_metric(found: dict[str, Outcome]) -> None:
    one, ranks = found["checkpoint_and_stop"].one, found["checkpoint_and_stop"].ranks
    assert one["best"] == "epoch=2-score=1.ckpt"
    assert one["stopped"] == 4
    for rank in ranks:
        assert_same(rank, one)


def test_learning_rates_are_logged(found: dict[str, Outcome]) -> None:
    one, rank = found["rates_and_devices"].one, found["rates_and_devices"].ranks[0]
    assert one["rates"] == [0.1, 0.1, 0.05, 0.05]
    assert rank["rates"] == one["rates"]
    assert rank["losses"] == pytest.approx(one["losses"], rel=1e-9)


def test_device_stats_have_figures_of_every_stage(found: dict[str, Outcome]) -> None:
    device = found["rates_and_devices"].ranks[0]["device"]
    for stage in ("rank0/vision.0", "rank2/language"):
        for figure in ("busy_share", "bubble_share", "bytes_sent", "peak_memory_bytes"):
            values = [float(v) for key, v in device.items() if stage in key and key.endswith(figure)]
            assert len(values) >= 1, (stage, figure, sorted(device))
            assert all(value >= 0 for value in values)
    alone = found["rates_and_devices"].one["device"]
    assert alone
    assert all(key.endswith("cpu_percent") for key in alone)


def test_the_summary_counts_the_whole_model_and_the_bar_runs(found: dict[str, Outcome]) -> None:
    one, ranks = found["summary_and_bar"].one, found["summary_and_bar"].ranks
    for rank in ranks:
        assert rank["numbers"] == one["numbers"]
        assert rank["bar"] == (rank["rank"] == 0)
    assert one["numbers"][0] == sum(p.numel() for p in Toy().parameters())


def test_scheduled_accumulation_equals_one_process(found: dict[str, Outcome]) -> None:
    assert found["scheduled_accumulation"].one["steps"] == 4
    assert_same(found["scheduled_accumulation"].ranks[0], found["scheduled_accumulation"].one)


def test_an_encoder_unfrozen_in_a_later_epoch_trains_from_then_on(found: dict[str, Outcome]) -> None:
    one, ranks = found["unfrozen_later"].one, found["unfrozen_later"].ranks
    assert not torch.equal(one["weights"]["encoder.patch.weight"], weights(Toy())["encoder.patch.weight"])
    assert_same(ranks[0], one)
    assert ranks[1]["metrics"] == pytest.approx(one["metrics"], rel=1e-9)
