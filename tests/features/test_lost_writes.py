"""A warning names what a step writes on rank 0 and loses, because the step ends on another rank.

Others name lines that compute with the number of ranks, or sum over all, where ranks are no replicas.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only

from features.toys import Toy
from lightning_mm5d.features.lost_writes import tell_of_counts, tell_of_ranks


class Writes(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.logger is not None and self.trainer.is_global_zero:
            self.helper(batch)
        return self.loss(batch)

    def helper(self, batch: Any) -> None:
        self.logger.experiment.add_scalar("x", 1.0)
        if self.global_rank == 0:
            self.keep(batch)

    @rank_zero_only
    def keep(self, batch: Any) -> None:
        self.kept = batch

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        rank = self.global_rank
        rank_zero_info(f"rank {rank}")
        self.log("rank", float(rank))
        self.on_validation_end()

    def on_validation_end(self) -> None:
        assert self.logger is not None
        if isinstance(self.logger, type) or len(self.loggers) > 3:
            self.logger.log_metrics({"x": 1.0})
        for index, logger in enumerate(self.loggers):
            logger.log_metrics({"x": float(index)})

    def test_step(self, batch: Any, batch_idx: int) -> None:
        for logger in self.loggers:
            logger.experiment.add_scalar("x", 1.0)
        if (kept := self.trainer.logger) is not None:
            print(kept.save_dir)
            kept.log_image("x", [batch])
        _draw(self.logger, images=batch)
        self.loggers[0].log_table("x", [])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        rank, features = self.global_rank, self.all_gather(batch)
        features[rank] = batch
        labels = batch + len(batch) * self.trainer.global_rank
        loss = self.loss(labels)
        loss *= torch.distributed.get_world_size()
        print(f"{rank} of {self.trainer.world_size}", rank == 1)
        return loss


def _draw(logger: Any, images: Any) -> None:
    raise NotImplementedError


def _told(step: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tell_of_ranks(Writes(), step, 3, 1, 4)
    return [str(one.message) for one in caught]


def test_loggers_and_what_is_for_rank_0_in_a_step_are_named() -> None:
    said = _told("training_step")
    assert len(said) == 3
    lines = ("self.logger.experiment", "self.global_rank == 0", "self.keep(batch)")
    for line in lines:
        assert sum(f"ends on rank 3, and {line} in Writes.helper" in text for text in said) == 1
    source = Path(__file__).read_text().splitlines()
    for text in said:
        line, place = text.split(", and ")[1].split(" in ")[0], re.search(r"\(test_lost_writes\.py:(\d+)\)", text)
        assert place is not None
        assert line in source[int(place[1]) - 1]


def test_loggers_under_another_name_or_handed_to_a_function_are_named() -> None:
    said = _told("test_step")
    lines = ("logger.experiment", "kept.log_image", "_draw(self.logger, images=batch)", "self.loggers[0].log_table")
    assert len(said) == len(lines)
    for line in lines:
        assert sum(f"ends on rank 3, and {line} in Writes.test_step" in text for text in said) == 1


def test_code_that_loses_nothing_is_left_alone() -> None:
    assert not _told("validation_step")


def test_numbers_of_ranks_in_indices_and_arithmetic_are_named() -> None:
    said = _told("predict_step")
    lines = ("features[rank]", "len(batch) * self.trainer.global_rank", "loss *= torch.distributed.get_world_size()")
    assert len(said) == len(lines)
    for line in lines:
        assert sum(text.startswith(f"{line} in Writes.predict_step") for text in said) == 1
        assert all("counts all 4 ranks, and the replicas of the data are 1" in text for text in said)


class Counts(Toy):
    def setup(self, stage: str) -> None:
        devices = max(1, self.trainer.num_devices)
        self.steps = 64 // (8 * devices)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1 * self.trainer.world_size)

    def on_validation_epoch_end(self) -> None:
        total = torch.zeros(())
        dist.all_reduce(total)
        rows: list[Any] = [None, None]
        dist.all_gather_object(rows, [1])
        dist.all_reduce(total, dist.ReduceOp.MAX)
        dist.all_reduce(total, group=dist.group.WORLD)

    def on_train_epoch_end(self) -> None:
        self.mean(torch.zeros(()))
        name = f"rank {self.global_rank} of {self.trainer.world_size}"
        self.all_gather(torch.zeros(len(name)))

    def mean(self, value: torch.Tensor) -> Any:
        dist.all_reduce(value)
        return value / dist.get_world_size()

    def train_dataloader(self) -> Any:
        return [self.trainer.world_size * 2]

    def on_test_epoch_end(self) -> None:
        sums = torch.zeros(2)
        dist.all_reduce(sums)
        self.log("accuracy", float(sums[0].item()) / sums[1].clamp(min=1))

    def on_test_end(self) -> None:
        right, total = torch.zeros(()), 4
        dist.all_reduce(right)
        print(right / total)


def test_hooks_that_compute_with_the_number_of_ranks_or_sum_over_all_are_named_and_means_are_not() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tell_of_counts([Counts(), None], replicas=1, world=2)
    lines = [str(one.message).partition(" in Counts.")[0] for one in caught]
    assert lines == [
        *("0.1 * self.trainer.world_size", "dist.all_reduce(right)", "dist.all_reduce(total)"),
        *("dist.all_gather_object(rows, [1])", "8 * devices"),
    ]
    assert "counts all 2 ranks, and the replicas of the data are 1" in str(caught[0].message)
    assert "goes over all 2 ranks, and the replicas of the data are 1" in str(caught[1].message)
