"""Data modules."""

from __future__ import annotations

from typing import Any

import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader

from features.toys import Samples
from ordinary.rows.data_kinds import ORDER, SECTION
from ordinary.uses import Ordinary, Run, observed, row


class Module(LightningDataModule):
    """An ordinary data module."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.seen = run, []

    def prepare_data(self) -> None:
        self.prepared = True

    def setup(self, stage: str) -> None:
        self.seen.append(stage)
        self.samples, self.held_out = Samples(32), Samples(16, seed=1)

    def train_dataloader(self) -> DataLoader:
        return self.run.training(self.samples)

    def val_dataloader(self) -> DataLoader:
        return self.run.loader(self.held_out)

    def test_dataloader(self) -> DataLoader:
        return self.run.loader(self.held_out)

    def predict_dataloader(self) -> DataLoader:
        return self.run.loader(self.held_out)


class Tested(Ordinary):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)


def with_module(run: Run, made: Module, module: Ordinary | None = None, **flags: Any) -> dict[str, Any]:
    module, trainer = module or Tested(), run.trainer(**flags)
    trainer.fit(module, datamodule=made)
    return observed(trainer, module) | {"seen": [*module.seen, *made.seen]}


@row(SECTION, "a `LightningDataModule`")
def datamodule(run: Run) -> dict[str, Any]:
    return with_module(run, Module(run))


@row(SECTION, "a `LightningDataModule` for fit, validation, test and prediction", over="mean")
def datamodule_all(run: Run) -> dict[str, Any]:
    module, made, trainer = Tested(), Module(run), run.trainer()
    trainer.fit(module, datamodule=made)
    found = trainer.validate(module, datamodule=made, verbose=False)
    found += trainer.test(module, datamodule=made, verbose=False)
    outs = trainer.predict(module, datamodule=made)
    return {"seen": [*found, [float(out.mean()) for out in outs]]}


@row(SECTION, "`on_before_batch_transfer` and `on_after_batch_transfer` of a `LightningDataModule`")
def datamodule_transfer(run: Run) -> dict[str, Any]:
    class Changing(Module):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return {**batch, "images": batch["images"] * 0.5}

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return {**batch, "images": batch["images"] + 0.1}

    return with_module(run, Changing(run))


@row(SECTION, "`transfer_batch_to_device` of a `LightningDataModule`")
def datamodule_device(run: Run) -> dict[str, Any]:
    class Moving(Module):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return {name: value.to(device) for name, value in batch.items()}

    return with_module(run, Moving(run))


@row(SECTION, "`teardown` and `on_exception` of a `LightningDataModule`")
def datamodule_teardown(run: Run) -> dict[str, Any]:
    class Ending(Module):
        def teardown(self, stage: str) -> None:
            self.seen.append(f"end of {stage}")

    return with_module(run, Ending(run))


@row(SECTION, "`state_dict` and `load_state_dict` of a `LightningDataModule`")
def datamodule_state(run: Run) -> dict[str, Any]:
    class Kept(Module):
        def state_dict(self) -> dict[str, Any]:
            return {"where": 5}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.seen.append(state_dict["where"])

    module, trainer = Tested(), run.trainer()
    trainer.fit(module, datamodule=Kept(run))
    trainer.save_checkpoint(run.folder / "data.ckpt")
    second, made = run.trainer(max_epochs=2), Kept(run)
    second.fit(module, datamodule=made, ckpt_path=run.folder / "data.ckpt")
    return observed(second, module) | {"seen": made.seen}


@row(SECTION, "`save_hyperparameters` of a `LightningDataModule`")
def datamodule_hyperparameters(run: Run) -> dict[str, Any]:
    class Configured(Module):
        def __init__(self, run: Run, size: int = 3) -> None:
            super().__init__(run)
            self.save_hyperparameters("size")

    made = Configured(run)
    return with_module(run, made) | {"seen": [dict(made.hparams)]}


@row(SECTION, "a `LightningDataModule` reloaded every epoch")
def datamodule_reloaded(run: Run) -> dict[str, Any]:
    class Reloaded(Module):
        def train_dataloader(self) -> DataLoader:
            self.seen.append(self.trainer.current_epoch)
            return self.run.training(Samples(32, seed=self.trainer.current_epoch))

    return with_module(run, Reloaded(run), reload_dataloaders_every_n_epochs=1, max_epochs=3)


@row(SECTION, "`LightningDataModule.from_datasets`", differs=ORDER)
def from_datasets(run: Run) -> dict[str, Any]:
    size = 8 if run.plain else 8 // run.replicas
    made = LightningDataModule.from_datasets(Samples(32), Samples(16), batch_size=size)
    module, trainer = Ordinary(), run.trainer(use_distributed_sampler=False)
    trainer.fit(module, datamodule=made)
    return observed(trainer, module)
