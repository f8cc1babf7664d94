"""The labels of a batch are found where the step's own code says which part of the batch they are, and only there."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from torch import nn

from lightning_mm5d.source.passed import passed
from lightning_mm5d.source.trees import Source


class Model(nn.Module):
    def forward(self, input_ids: Any, attention_mask: Any = None, pixel_values: Any = None, labels: Any = None) -> Any:
        return input_ids


class Base(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()


class Unpacked(Base):
    def training_step(self, batch: Any, index: int) -> Any:
        ids, mask, pixels, labels = batch
        return self.model(input_ids=ids, attention_mask=mask, pixel_values=pixels, labels=labels)


class Starred(Base):
    def training_step(self, batch: Any, index: int) -> Any:
        return self.model(*batch)


class ByPosition(Base):
    def training_step(self, batch: Any, index: int) -> Any:
        ids, targets = batch["ids"], batch.get("targets").to(self.device)
        return self.model(ids, None, None, targets)


class InHelpers(Base):
    def training_step(self, batch: Any, index: int) -> Any:
        return self.shared(batch, "train")

    def shared(self, rows: Any, stage: str) -> Any:
        inputs, targets = rows
        return self(inputs["ids"], targets)

    def forward(self, ids: Any, y: Any) -> Any:
        return self.model(ids, labels=y.long())


class Nested(Base):
    def training_step(self, batch: Any, index: int) -> Any:
        return self.model(**batch["text"])


class CountedByAStaticMethod(Base):
    def training_step(self, batch: Any, index: int) -> Any:
        self.count(self.model(**batch), batch["labels"])

    @staticmethod
    def count(output: Any, labels: Any) -> None:
        pass


class Masked(Base):
    def training_step(self, batch: Any, index: int) -> Any:
        ids, labels = batch
        labels[labels == 0] = -100
        return self.model(ids, labels=labels)


class Prepared(Base):
    def training_step(self, batch: Any, index: int) -> Any:
        batch = self.prepare(batch)
        return self.model(batch[0], labels=batch[1])


class Unsaid(Base):
    def training_step(self, batch: Any, index: int) -> Any:
        ids, labels = batch
        return (self.model(ids) - labels).sum()


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Unpacked, {(3,)}),
        (Starred, {(3,)}),
        (ByPosition, {("targets",)}),
        (InHelpers, {(1,)}),
        (Nested, {("text", "labels")}),
        (CountedByAStaticMethod, {("labels",)}),
        (Masked, {None}),
        (Prepared, {None}),
        (Unsaid, set()),
    ],
)
def test_the_part_of_the_batch_that_is_passed_as_labels_is_read_from_the_step(module: Any, expected: Any) -> None:
    assert passed(Source(), module(), "training_step", "labels") == expected
