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
"""Lightning's tests of the trainer's stages and of data, under their own names.

From tests_pytorch of Lightning 2.6.5: trainer, models, test_cli. Changed: the strategy
and its two layouts; CPU in place of GPU; where a test expects a number for two DDP ranks it expects it for the number
of replicas; what it looks up in the launching process is looked up where it happened; annotations.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import BasePredictionWriter, Callback, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import RandomDataset
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_mm5d import RankLostError
from lightning_suite.support import REPLICAS, BoringModel, in_both_layouts, strategy, trainer


class TrainerGetModel(BoringModel):
    def on_fit_start(self) -> None:
        assert self == self.trainer.lightning_module

    def on_fit_end(self) -> None:
        assert self == self.trainer.lightning_module


@in_both_layouts
def test_get_model_ddp_cpu(tmp_path: Path, layout: str) -> None:
    model = TrainerGetModel()
    run = trainer(layout, tmp_path, limit_train_batches=2, limit_val_batches=2, max_epochs=1)
    run.fit(model)
    assert run.lightning_module is model


class TrainerStagesModel(BoringModel):
    def on_train_start(self) -> None:
        assert self.trainer.model is not None
        assert self.trainer.model.training
        assert self.training

    def _evaluates(self) -> None:
        assert self.trainer.model is not None
        assert not self.trainer.model.training
        assert not self.training

    on_validation_start = on_test_start = on_predict_start = _evaluates


@in_both_layouts
def test_model_in_correct_mode_during_stages(tmp_path: Path, layout: str) -> None:
    model = TrainerStagesModel()
    run = trainer(layout, tmp_path, fast_dev_run=True)
    run.fit(model)
    run.validate(model)
    run.test(model)
    run.predict(model, model.val_dataloader())
    assert run.state.finished


class ValidatedModel(BoringModel):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("x", self.step(batch))


@in_both_layouts
def test_fit_test_synchronization(tmp_path: Path, layout: str) -> None:
    checkpoint = ModelCheckpoint(dirpath=tmp_path, monitor="x", mode="min", save_top_k=1)
    run = trainer(
        layout,
        tmp_path,
        max_epochs=2,
        limit_train_batches=4,
        limit_val_batches=4,
        limit_test_batches=4,
        callbacks=[checkpoint],
    )
    run.fit(ValidatedModel())
    assert os.path.exists(checkpoint.best_model_path), f"Could not find checkpoint at rank {run.global_rank}"
    run.test(ckpt_path="best", weights_only=False)


class TrainerStagesErrorsModel(BoringModel):
    def on_train_start(self) -> None:
        raise Exception("Error during train")

    def on_validation_start(self) -> None:
        raise Exception("Error during validation")

    def on_test_start(self) -> None:
        raise Exception("Error during test")

    def on_predict_start(self) -> None:
        raise Exception("Error during predict")


class ExceptionCounter(Callback):
    exceptions = 0

    def on_exception(self, *_: Any) -> None:
        self.exceptions += 1


@in_both_layouts
def test_error_handling_all_stages(tmp_path: Path, layout: str) -> None:
    model, counter = TrainerStagesErrorsModel(), ExceptionCounter()
    run = trainer(layout, tmp_path, callbacks=counter, fast_dev_run=True)
    with pytest.raises(Exception, match=r"Error during train"):
        run.fit(model)
    assert counter.exceptions == 1
    with pytest.raises(Exception, match=r"Error during validation"):
        run.validate(model)
    assert counter.exceptions == 2
    with pytest.raises(Exception, match=r"Error during test"):
        run.test(model)
    assert counter.exceptions == 3
    with pytest.raises(Exception, match=r"Error during predict"):
        run.predict(model, model.val_dataloader(), return_predictions=False)
    assert counter.exceptions == 4


class CustomPredictionWriter(BasePredictionWriter):
    def __init__(self, folder: Path, replicas: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.folder, self.expected = folder, 2 // replicas

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Tensor, batch_indices: Any, *_: Any) -> None:
        assert prediction.shape == torch.Size([1, 2])
        assert len(batch_indices) == 1
        (self.folder / f"batch-{trainer.global_rank}").touch()

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        assert len(predictions) == 2
        assert len(predictions[0]) == self.expected
        assert len(batch_indices) == 2
        assert len(batch_indices[0]) == self.expected
        (self.folder / f"epoch-{trainer.global_rank}").touch()


@in_both_layouts
def test_trainer_predict_ddp_spawn(tmp_path: Path, layout: str) -> None:
    loaders = [DataLoader(RandomDataset(32, 2)), DataLoader(RandomDataset(32, 2))]
    writers = [
        CustomPredictionWriter(tmp_path, REPLICAS[layout], write_interval=interval) for interval in ("batch", "epoch")
    ]
    run = trainer(layout, tmp_path, callbacks=writers)
    with pytest.raises(RankLostError, match="`return_predictions` should be set to `False`"):
        run.predict(BoringModel(), loaders, return_predictions=True)
    run.predict(BoringModel(), loaders)
    assert {path.name for path in tmp_path.iterdir()} == {"batch-0", "batch-1", "epoch-0", "epoch-1"}


class CustomBatch:
    def __init__(self, data: list[Tensor]) -> None:
        self.samples = data[0]

    def to(self, device: torch.device, **kwargs: Any) -> CustomBatch:
        self.samples = self.samples.to(device, **kwargs)
        return self


class CustomBatchModel(BoringModel):
    def training_step(self, batch: CustomBatch, batch_idx: int) -> Any:
        assert batch.samples.device == self.device
        assert isinstance(batch_idx, int)
        return super().training_step(torch.rand(1, 32, device=self.device), batch_idx)


@in_both_layouts
def test_transfer_batch_hook_ddp(tmp_path: Path, layout: str) -> None:
    run = trainer(layout, tmp_path, limit_train_batches=2, limit_val_batches=0, max_epochs=1)
    run.fit(CustomBatchModel(), DataLoader(RandomDataset(32, 64), collate_fn=CustomBatch))
    assert run.state.finished


class SeesSamples(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        # Lightning's own test notes them here; a schedule runs this once per stage and microbatch
        return super().training_step(torch.rand(1, 32, device=self.device), batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.extend(batch.tolist())

    def on_train_end(self) -> None:
        # The samples should be unique across all replicas
        seen = self.all_gather(torch.tensor(self.seen)).view(-1).tolist()
        assert sorted(seen) == list(range(32))


@in_both_layouts
def test_distributed_sampler_without_global_seed(tmp_path: Path, layout: str) -> None:
    assert "PL_GLOBAL_SEED" not in os.environ
    run = trainer(layout, tmp_path, num_sanity_val_steps=0, limit_val_batches=0, max_epochs=1)
    run.fit(SeesSamples(), DataLoader(range(32), shuffle=True, batch_size=4))  # type: ignore[arg-type]


class RandomNumbers(torch.utils.data.Dataset):
    """What workers that were seeded alike would draw twice."""

    size = 16

    def __getitem__(self, index: int) -> np.ndarray:
        return np.random.randint(0, 10000, 3)

    def __len__(self) -> int:
        return self.size


class MultiProcessModel(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.batches_seen: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return super().training_step(torch.rand(1, 32, device=self.device), batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches_seen.append(batch)

    def on_train_epoch_end(self) -> None:
        batches = self.all_gather(torch.cat(self.batches_seen))
        assert isinstance(batches, Tensor)
        assert batches.shape[0] == self.trainer.strategy.layout.num_replicas  # type: ignore[attr-defined]
        assert len(torch.unique(batches.view(-1, 3), dim=0)) == RandomNumbers.size


@in_both_layouts
def test_auto_add_worker_init_fn_distributed(tmp_path: Path, layout: str) -> None:
    seed_everything(0, workers=True)
    loader = DataLoader(RandomNumbers(), batch_size=2, num_workers=2)
    run = trainer(layout, tmp_path, max_epochs=1, limit_val_batches=0)
    run.fit(MultiProcessModel(), loader)


class OwnSampler(BoringModel):
    def train_dataloader(self) -> DataLoader:
        kwargs = self.trainer.distributed_sampler_kwargs
        sampler: DistributedSampler = DistributedSampler(RandomDataset(32, 64), shuffle=True, seed=11, **kwargs)
        return DataLoader(RandomDataset(32, 64), batch_size=8, drop_last=False, sampler=sampler)

    def on_train_epoch_start(self) -> None:
        loader: Any = self.trainer.train_dataloader
        sampler = loader.sampler
        assert isinstance(sampler, DistributedSampler)
        assert (sampler.shuffle, sampler.seed, sampler.epoch) == (True, 11, self.current_epoch)


@in_both_layouts
def test_dataloader_distributed_sampler_already_attached(tmp_path: Path, layout: str) -> None:
    run = trainer(layout, tmp_path, max_epochs=2, limit_train_batches=2, limit_val_batches=2)
    run.fit(OwnSampler())
    assert run.state.finished, "DDP Training failed"


class EarlyExitTestModel(BoringModel):
    def on_fit_start(self) -> None:
        raise RuntimeError("Error on fit start")


@in_both_layouts
def test_cli_distributed_save_config_callback(tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["any.py", "fit"])
    chosen = {
        "class_path": "lightning_mm5d.MultimodalStrategy",
        "init_args": {"start_method": "fork", "modalities": strategy(layout).modalities},
    }
    defaults = {"logger": False, "max_steps": 1, "strategy": chosen, "accelerator": "cpu", "devices": 2}
    with pytest.raises(RankLostError, match="Error on fit start"):
        LightningCLI(EarlyExitTestModel, trainer_defaults=defaults)
    assert Path("config.yaml").is_file()


class ClockOfOneRank(Callback):
    """The interval ends on rank 1 alone, after the second batch."""

    def __init__(self) -> None:
        self.validated_after: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and batch_idx == 1:
            trainer._last_val_time = -float("inf")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.validated_after.append(trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert self.validated_after == [2]


@in_both_layouts
@pytest.mark.parametrize("interval", ["00:01:00:00", {"hours": 1}])
def test_time_based_val_check_interval(tmp_path: Path, layout: str, interval: Any) -> None:
    run = trainer(
        layout,
        tmp_path,
        max_epochs=1,
        limit_train_batches=4,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        val_check_interval=interval,
        callbacks=[ClockOfOneRank()],
    )
    run.fit(BoringModel())
