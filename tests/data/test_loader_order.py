"""Two shards under Lightning's trainer are read in its own order."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_mm5d.data.loader import ReplicaBatches, shard_loader
from loader_cases import Augmented


class TwoShards(pl.strategies.DDPStrategy):
    """vision: rank 0, serving the replicas 0 and 1 of the language model, whose ranks do not exist here."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 2, "rank": 0}

    def process_dataloader(self, dataloader: object) -> object:
        return shard_loader(dataloader, shards=[0, 1], num_shards=2, seed=7)

    def _configure_launcher(self) -> None:
        pass

    def setup_environment(self) -> None:
        pl.strategies.ParallelStrategy.setup_environment(self)

    def setup(self, trainer: pl.Trainer) -> None:
        pl.strategies.ParallelStrategy.setup(self, trainer)

    def _setup_model(self, model: Any) -> Any:
        return model


class Reader(pl.LightningModule):
    """Keeps the indices of every batch that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[list[int]]] = []

    def training_step(self, batch: ReplicaBatches) -> torch.Tensor:
        self.seen.append([one[:, 0].int().tolist() for one in batch])
        return self.layer(torch.ones(1))

    def predict_step(self, batch: ReplicaBatches) -> torch.Tensor:
        return self.training_step(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec:FutureWarning")
def test_under_the_trainer_both_shards_arrive_in_lightnings_own_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=TwoShards(),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Reader()
    trainer.fit(module, DataLoader(Augmented(8), batch_size=2, shuffle=True))
    for epoch, steps in enumerate((module.seen[:2], module.seen[2:])):
        for shard in range(2):
            sampler: DistributedSampler[Any] = DistributedSampler(range(8), 2, shard, shuffle=True, seed=0)
            sampler.set_epoch(epoch)
            assert [index for step in steps for index in step[shard]] == list(sampler)

    module.seen.clear()
    trainer.predict(module, DataLoader(Augmented(5), batch_size=1))
    assert module.seen == [[[0], [1]], [[2], [3]], [[4]]]
