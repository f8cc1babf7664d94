# Copyright The Lightning AI team.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Lightning's tests of logging, checkpoint callbacks and other callbacks, under their own names.

From tests_pytorch of Lightning 2.6.5: trainer/logging_, checkpointing, callbacks, profilers. Changed: the strategy and
its two layouts; CPU in place of GPU; where a test expects a number for two DDP ranks it expects it for the number of
replicas, and where it takes the rank as the number of a replica it takes that number; annotations.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
    ModelPruning,
    SpikeDetection,
    TQDMProgressBar,
)
from lightning.pytorch.demos.boring_classes import RandomDataset
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_suite.support import REPLICAS, BoringModel, in_both_layouts, trainer


class LoggingSyncDistModel(BoringModel):
    fake_result = 1

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        value = self.fake_result + self.replica
        self.log("foo", value, on_step=True, on_epoch=False, sync_dist=True, reduce_fx="sum")
        self.log("foo_2", 2, on_step=True, on_epoch=False, sync_dist=True, reduce_fx="sum")
        self.log("foo_3", 2, on_step=True, on_epoch=False, sync_dist=True, reduce_fx="mean")
        self.log("foo_4", value, on_step=True, on_epoch=False, sync_dist=True, reduce_fx="mean")
        self.log("foo_5", batch_idx + self.replica, on_step=True, on_epoch=False, sync_dist=True, reduce_fx="max")
        self.log("foo_6", value, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        self.log("foo_7", 2, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        self.log("foo_8", 2, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="mean")
        self.log("foo_9", value, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="mean")
        self.log("foo_10", batch_idx, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max")
        self.log("foo_11", batch_idx + self.replica, on_step=True, on_epoch=True, sync_dist=True, reduce_fx="mean")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("bar", self.fake_result, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        self.log("bar_2", self.fake_result, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="mean")
        self.log("bar_3", batch_idx + self.replica, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max")
        return super().validation_step(batch, batch_idx)


@in_both_layouts
def test_logging_sync_dist_true(tmp_path: Path, layout: str) -> None:
    run = trainer(layout, tmp_path, max_epochs=1, limit_train_batches=3, limit_val_batches=3)
    run.fit(LoggingSyncDistModel())
    two, metrics = REPLICAS[layout] == 2, run.callback_metrics
    expected = {
        "foo": 1 + 2 if two else 1,
        "foo_2": 4 if two else 2,
        "foo_3": 2,
        "foo_4": 1.5 if two else 1,
        "foo_5": 3 if two else 2,
        "foo_6": 3 * (1 + 2) if two else 3,
        "foo_7": 12 if two else 6,
        "foo_8": 2,
        "foo_9": 1.5 if two else 1,
        "foo_10": 2,
        "foo_11_step": 2.5 if two else 2,
        "foo_11": 1.5 if two else 1,
        "bar": 6 if two else 3,
        "bar_2": 1,
        "bar_3": 3 if two else 2,
    }
    assert {name: float(metrics[name]) for name in expected} == expected


class AllRankLogger(Logger):
    """Keeps what is logged on every rank, not on rank 0 only."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[str, float] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logs.update(metrics)

    def version(self) -> int:  # type: ignore[override]
        return 1

    def name(self) -> str:  # type: ignore[override]
        return "AllRank"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class LogsItsRank(BoringModel):
    def on_train_start(self) -> None:
        self.log(f"rank-{self.local_rank}", 0)

    def on_train_end(self) -> None:
        assert f"rank-{self.local_rank}" in self.logger.logs, "Expected rank to be logged"


@in_both_layouts
def test_all_rank_logging_ddp_cpu(tmp_path: Path, layout: str) -> None:
    run = trainer(
        layout,
        tmp_path,
        limit_train_batches=1,
        limit_val_batches=1,
        max_epochs=1,
        logger=AllRankLogger(),
        log_every_n_steps=1,
    )
    run.fit(LogsItsRank())


class TopKModel(BoringModel):
    def __init__(self, expected: int) -> None:
        super().__init__()
        self.expected = expected

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("my_loss", batch_idx * (1 + self.replica), on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_start(self) -> None:
        torch.save = Mock(wraps=torch.save)

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.log("my_loss_2", 1.0, on_epoch=True, rank_zero_only=True)
        data = str(self.global_rank)
        obj = [[data], (data,), set(data)]
        out = self.trainer.strategy.broadcast(obj)
        assert obj == [[data], (data,), set(data)]
        assert out == [["0"], ("0",), set("0")]

    def on_train_end(self) -> None:
        assert torch.save.call_count == (self.expected if self.trainer.is_global_zero else 0)  # type: ignore[attr-defined]


@in_both_layouts
@pytest.mark.parametrize(("k", "epochs", "val_check_interval", "expected"), [(1, 1, 1.0, 1), (2, 2, 0.3, 4)])
def test_top_k_ddp(tmp_path: Path, layout: str, k: int, epochs: int, val_check_interval: float, expected: int) -> None:
    run = trainer(
        layout,
        tmp_path,
        callbacks=[ModelCheckpoint(dirpath=tmp_path, monitor="my_loss_step", save_top_k=k, mode="max")],
        max_epochs=epochs,
        val_check_interval=val_check_interval,
        limit_train_batches=10,
        limit_val_batches=2,
    )
    run.fit(TopKModel(expected))


@in_both_layouts
def test_model_checkpoint_ddp_monitor_none(tmp_path: Path, layout: str) -> None:
    checkpoint = ModelCheckpoint(dirpath=tmp_path, monitor=None, save_top_k=1)
    run = trainer(layout, tmp_path, callbacks=[checkpoint], max_epochs=1, limit_train_batches=2, limit_val_batches=0)
    run.fit(BoringModel())
    assert Path(checkpoint.best_model_path).exists()


class LogInTwoMethods(BoringModel):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        out = super().training_step(batch, batch_idx)
        self.log("early_stop_on", out["loss"])
        return out

    def on_validation_epoch_end(self) -> None:
        self.log("val_acc", torch.tensor(0.5))


class ModelCheckpointTestInvocations(ModelCheckpoint):
    def __init__(self, expected_count: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.expected_count = expected_count
        self.state_dict_count = 0

    def on_train_start(self, *_: Any) -> None:
        torch.save = Mock(wraps=torch.save)

    def state_dict(self) -> dict[str, Any]:
        self.state_dict_count += 1
        return super().state_dict()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        assert self.best_model_path
        assert self.best_model_score
        assert self.state_dict_count == self.expected_count
        assert torch.save.call_count == (self.expected_count if trainer.is_global_zero else 0)  # type: ignore[attr-defined]


@in_both_layouts
def test_model_checkpoint_no_extraneous_invocations(tmp_path: Path, layout: str) -> None:
    model_checkpoint = ModelCheckpointTestInvocations(monitor="early_stop_on", expected_count=4, save_top_k=-1)
    run = trainer(
        layout, tmp_path, callbacks=[model_checkpoint], max_epochs=4, limit_train_batches=4, limit_val_batches=2
    )
    run.fit(LogInTwoMethods())
    assert run.state.finished, f"Training failed with {run.state}"


class EarlyStoppingModel(BoringModel):
    def __init__(self, expected_end_epoch: int, early_stop_on_train: bool, diverges: int | None) -> None:
        super().__init__()
        self.expected_end_epoch, self.early_stop_on_train, self.diverges = (
            expected_end_epoch,
            early_stop_on_train,
            diverges,
        )

    def _epoch_end(self) -> None:
        losses = [8, 4, 2, 3, 4, 5, 8, 10]
        far = self.diverges and self.current_epoch >= self.diverges and self.trainer.global_rank == 0
        self.log("abc", torch.tensor(10 if far else losses[self.current_epoch]))
        self.log("cba", torch.tensor(0))

    def on_train_epoch_end(self) -> None:
        if self.early_stop_on_train:
            self._epoch_end()

    def on_validation_epoch_end(self) -> None:
        if not self.early_stop_on_train:
            self._epoch_end()

    def on_train_end(self) -> None:
        assert self.trainer.current_epoch - 1 == self.expected_end_epoch, "Early Stopping Failed"


@in_both_layouts
@pytest.mark.parametrize(
    ("patience", "expected_stop_epoch", "check_on_train_epoch_end", "diverges"),
    [((1, 3), 2, False, 2), ((3, 3), 3, False, None), ((3, 3), 3, True, None)],
)
def test_multiple_early_stopping_callbacks(
    tmp_path: Path,
    layout: str,
    patience: tuple[int, int],
    expected_stop_epoch: int,
    check_on_train_epoch_end: bool,
    diverges: int | None,
) -> None:
    checks = {"check_on_train_epoch_end": True} if check_on_train_epoch_end else {}
    callbacks = [
        EarlyStopping(monitor, patience=p, **checks) for monitor, p in zip(("abc", "cba"), patience, strict=True)
    ]
    run = trainer(layout, tmp_path, callbacks=callbacks, limit_train_batches=0.1, limit_val_batches=0.1, max_epochs=20)
    run.fit(EarlyStoppingModel(expected_stop_epoch, check_on_train_epoch_end, diverges))


class ThreeLayers(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        layers = [("mlp_1", nn.Linear(32, 32)), ("mlp_2", nn.Linear(32, 32, bias=False)), ("mlp_3", nn.Linear(32, 2))]
        self.layer = nn.Sequential(OrderedDict(layers))  # type: ignore[assignment]


def test_pruning_callback_ddp_cpu(tmp_path: Path) -> None:
    """On replicas; over stages the callback is refused."""
    model = ThreeLayers()
    assert torch.all(model.layer.mlp_2.weight != 0)
    pruning = ModelPruning(
        "l1_unstructured",
        amount=0.3,
        parameters_to_prune=[(model.layer.mlp_1, "weight"), (model.layer.mlp_2, "weight")],
    )
    run = trainer("replicas", tmp_path, callbacks=pruning, limit_train_batches=10, limit_val_batches=2, max_epochs=3)
    run.fit(model)
    run.test(model)
    assert torch.any(model.layer.mlp_2.weight == 0)


class SpikingModel(BoringModel):
    """A loss that jumps, or is no number, in batch 4 of one replica."""

    def __init__(self, spike_replica: int, spike_value: float | None) -> None:
        super().__init__()
        self.spike_replica, self.spike_value = spike_replica, spike_value

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        value: float | None = 1 / (batch_idx + 1)
        if self.replica == self.spike_replica and batch_idx == 4:
            value = self.spike_value
        zero = self(batch).sum() * 0
        return zero + torch.tensor(batch_idx if value is None else value)


class MyTrainerSpikeDetection(SpikeDetection):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            with pytest.raises(TrainingSpikeException):
                super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        else:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


@pytest.mark.parametrize(
    ("layout", "spike_replica", "spike_value"),
    [("replicas", 0, None), ("replicas", 1, float("inf")), ("replicas", 1, float("nan")), ("stages", 0, None)],
)
def test_trainer_spike_detection_integration(
    tmp_path: Path, layout: str, spike_replica: int, spike_value: float | None
) -> None:
    callback = MyTrainerSpikeDetection(exclude_batches_path=tmp_path, finite_only=True)
    run = trainer(layout, tmp_path, callbacks=[callback], max_epochs=1, limit_train_batches=6, limit_val_batches=0)
    run.fit(SpikingModel(spike_replica, spike_value))


@in_both_layouts
def test_simple_profiler_distributed_files(tmp_path: Path, layout: str) -> None:
    profiler = SimpleProfiler(dirpath=tmp_path, filename="profiler")
    model = BoringModel()
    run = trainer(layout, tmp_path, fast_dev_run=2, profiler=profiler)
    run.fit(model)
    run.validate(model)
    run.test(model)
    expected = {f"{stage}-profiler-{rank}.txt" for stage in ("fit", "validate", "test") for rank in (0, 1)}
    assert {name for name in os.listdir(tmp_path) if name.endswith(".txt")} == expected


class ProgressOfEachRank(TQDMProgressBar):
    def __init__(self, batches: int) -> None:
        super().__init__()
        self.batches = batches

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        assert self.is_enabled == trainer.is_global_zero
        if trainer.is_global_zero:
            for bar in (self.train_progress_bar, self.val_progress_bar):
                assert (bar.n, bar.total) == (self.batches, self.batches)


@in_both_layouts
@pytest.mark.parametrize("val_check_interval", [0.2, 0.5])
def test_progress_bar_max_val_check_interval_ddp(tmp_path: Path, layout: str, val_check_interval: float) -> None:
    batches = 2 // REPLICAS[layout]
    run = trainer(
        layout,
        tmp_path,
        num_sanity_val_steps=0,
        max_epochs=1,
        callbacks=[ProgressOfEachRank(batches)],
        enable_progress_bar=True,
        val_check_interval=val_check_interval,
    )
    run.fit(BoringModel(), DataLoader(RandomDataset(32, 8), batch_size=4), DataLoader(RandomDataset(32, 2)))
