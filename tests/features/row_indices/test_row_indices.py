"""Fields that hold positions of samples are refused where the batch is split; labels and indices of tables are not.

vision: rank 0; language: ranks 1-2 as stages.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from features.toys import CLASSES, PIPE, Layout, Run, Toy, assert_same, outcomes, together, weights
from lightning_mm5d import ConfigError, Modality
from lightning_mm5d.data.microbatch import Microbatch
from lightning_mm5d.features.row_indices import RowIndices

TWO_PARTS = Layout({"language": Modality()}, 1)
"""one rank with the whole model"""


class Positions(Toy):
    """Batches of 8 have a field with 8 positions among them, which is used in one of several ways."""

    use = "rows"

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(0.5, 1.5, 8, dtype=torch.float64))
        self.register_buffer("weight", torch.linspace(0.5, 1.5, 8, dtype=torch.float64))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits, at = self(batch), batch["positions"]
        if self.use == "rows":
            logits = logits + logits[at]
        elif self.use == "cast":
            logits = logits + logits.index_select(0, at.long().view(-1))
        elif self.use == "gather":
            logits = logits + logits.gather(0, at[:, None].expand(-1, CLASSES).clone())
        elif self.use == "of the batch":
            logits = logits + batch["images"][at, :CLASSES]
        elif self.use == "written":
            mask = torch.zeros(len(logits), dtype=torch.float64)
            mask[at] = 1.0
            logits = logits * mask[:, None]
        elif self.use == "list":
            logits = logits + logits[batch["list"]]
        elif self.use == "tables":
            rows = torch.arange(len(logits))
            scale = self.table[at] * self.weight[at] * torch.linspace(1, 2, 8, dtype=torch.float64)[at]
            logits = logits * scale[:, None] + logits[rows, batch["label"]][:, None]
            logits = logits + F.one_hot(batch["label"], CLASSES) + logits.gather(1, batch["label"][:, None])
        return F.cross_entropy(logits, batch["label"])


def collated(samples: list[dict[str, Tensor]]) -> dict[str, Any]:
    batch = torch.utils.data.default_collate(samples)
    count = len(batch["label"])
    return {**batch, "positions": torch.arange(count).flip(0), "list": list(range(count))}


def fit(run: Run, use: str) -> Any:
    module = Positions()
    module.use = use
    run.trainer().fit(module, run.training(16, collate_fn=collated))
    return {"weights": weights(module)}


@pytest.mark.parametrize("use", ["rows", "cast", "gather", "of the batch", "written", "list"])
def test_positions_of_samples_are_refused(use: str) -> None:
    def attempt(run: Run) -> str:
        try:
            fit(run, use)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    field = "list" if use == "list" else "positions"
    error = together(TWO_PARTS, attempt)[0]
    assert f"batch['{field}']: got 'an index of rows'" in error


class Seen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))


def test_labels_may_write_into_as_many_classes_as_the_microbatch_has_samples() -> None:
    module, batch = Seen(), {"labels": torch.tensor([0, 1, 3, 3])}
    with RowIndices(module, Microbatch(batch, 4)):
        module.seen[batch["labels"]] = 1.0
    assert module.seen.tolist() == [1, 1, 0, 1]
    with (
        RowIndices(module, Microbatch(batch, 4)),
        pytest.warns(UserWarning, match=r"batch\['labels'\] .*microbatching=function"),
    ):
        found = torch.zeros(4).scatter_(0, batch["labels"], 1.0)
    assert found.tolist() == [1, 1, 0, 1]
    outside = {"positions": torch.tensor([0, 4, 1, 2])}
    with pytest.raises(ConfigError, match="positions"), RowIndices(module, Microbatch(outside, 4)):
        torch.zeros(4)[outside["positions"]] = 1.0


def test_a_table_that_the_module_keeps_is_written_by_numbers_of_samples_in_every_microbatch() -> None:
    module, batch = Seen(), {"sample": torch.tensor([4, 0, 9, 7])}
    module.memory = torch.zeros(10, 2)
    for _ in range(2):
        with RowIndices(module, Microbatch(batch, 4)):
            module.memory[batch["sample"]] = batch["sample"][:, None].float()
            assert module.memory[batch["sample"]][:, 0].tolist() == [4, 0, 9, 7]


def tables(run: Run) -> Any:
    return fit(run, "tables")


def test_indices_of_tables_and_classes_are_split_like_samples() -> None:
    found = outcomes(PIPE, tables)["tables"]
    assert_same(found.ranks[0]["weights"], found.one["weights"])


def test_positions_are_refused_on_all_ranks_of_a_pipeline() -> None:
    def attempt(run: Run) -> str:
        try:
            fit(run, "rows")
        except Exception as error:
            return str(error)
        return "nothing"

    assert all("an index of rows" in text for text in together(PIPE, attempt))
