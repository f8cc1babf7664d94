"""The labels of a batch are found where the step's own code says which part of the batch they are, and only there."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_mm5d.source.passed import OF_ROWS, TARGET, passed


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
    assert passed(module(), "training_step", "labels") == expected


class Entropies(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(2, 2)
        self.criterion, self.summed = nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum")
        self.mse = nn.MSELoss()


class Functional(Entropies):
    def training_step(self, batch: Any, index: int) -> Any:
        pixels, _, labels = batch
        return F.cross_entropy(self.model(pixels), labels.flatten(), ignore_index=-100)


class ByItsModule(Entropies):
    def training_step(self, batch: Any, index: int) -> Any:
        return self.shared(batch["pixels"], batch["classes"])

    def shared(self, pixels: Any, classes: Any) -> Any:
        return self.criterion(self.model(pixels), target=classes.view(-1))


class Summed(Entropies):
    def training_step(self, batch: Any, index: int) -> Any:
        return self.summed(self.model(batch[0]), batch[1])


class WithAnotherLoss(Entropies):
    def training_step(self, batch: Any, index: int) -> Any:
        pixels, labels = batch
        return self.criterion(self.model(pixels), labels) + self.mse(pixels, pixels)


class OtherClassesLeftOut(Entropies):
    def training_step(self, batch: Any, index: int) -> Any:
        return F.cross_entropy(self.model(batch[0]), batch[1], ignore_index=0)


class ByTheirNumber(Entropies):
    def training_step(self, batch: Any, index: int) -> Any:
        counts = (batch["labels"] != -100).sum(1)
        return F.cross_entropy(self.model(batch["ids"]), counts.clamp(max=4) % 3)


class ByTheLongest(Entropies):
    def training_step(self, batch: Any, index: int) -> Any:
        longest, _ = torch.max(batch["labels"], dim=1)
        return self.criterion(self.model(batch["ids"]), (longest > 2).long())


class LessTheSmallest(Entropies):
    def training_step(self, batch: Any, index: int) -> Any:
        labels = batch["labels"]
        return F.cross_entropy(self.model(batch["ids"]), labels - labels.min(1, keepdim=True).values)


class AtMost(Entropies):
    def training_step(self, batch: Any, index: int) -> Any:
        return F.cross_entropy(self.model(batch["ids"]), batch["labels"].min(batch["most"]))


class ArgumentsBoundAgain(Entropies):
    def judge(self, logits: Any, targets: Any) -> Any:
        if targets.dim() == 3:
            targets = targets.argmax(-1)
        return F.cross_entropy(logits, targets)

    def training_step(self, batch: Any, index: int) -> Any:
        return self.judge(self.model(batch["ids"]), batch["labels"])


class LessTheMean(Entropies):
    def training_step(self, batch: Any, index: int) -> Any:
        labels = batch["labels"]
        return F.cross_entropy(self.model(batch["ids"]), labels - labels.sum(1).view(-1, 1))


class ByTheirNumberOfClasses(Entropies):
    def __init__(self) -> None:
        super().__init__()
        self.classes = 3

    def training_step(self, batch: Any, index: int) -> Any:
        return F.cross_entropy(self.model(batch["ids"]), (batch["labels"] != -100).sum(1) % self.classes)


CLASSES = 3


class ByAGlobalNumber(Entropies):
    def training_step(self, batch: Any, index: int) -> Any:
        return F.cross_entropy(self.model(batch["ids"]), (batch["labels"] != -100).sum(1) % CLASSES)


class ByTheSizeOfLogits(Entropies):
    def training_step(self, batch: Any, index: int) -> Any:
        logits = self.model(batch["ids"])
        return F.cross_entropy(logits, (batch["labels"] != -100).sum(1) % logits.shape[1])


class ByAHyperparameter(Entropies):
    def training_step(self, batch: Any, index: int) -> Any:
        return F.cross_entropy(self.model(batch["ids"]), (batch["labels"] != -100).sum(1) % self.hparams.classes)


class ComparedWithTokens(Entropies):
    def training_step(self, batch: Any, index: int) -> Any:
        labels = batch["labels"]
        return F.cross_entropy(self.model(batch["ids"]), labels.amax(1).view(-1, 1).eq(labels).long())


class LeftOutByRows(Entropies):
    def training_step(self, batch: Any, index: int) -> Any:
        labels = batch["labels"]
        return F.cross_entropy(self.model(batch["ids"]), labels.masked_fill((labels < 0).any(1)[:, None], -100))


class OfRowsAndTokens(Entropies):
    def training_step(self, batch: Any, index: int) -> Any:
        labels = batch["labels"]
        return F.cross_entropy(self.model(batch["ids"]), labels) + self.criterion(
            self.model(batch["ids"]), labels.sum(1)
        )


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (ByTheirNumber, {(OF_ROWS,)}),
        (ByTheLongest, {(OF_ROWS,)}),
        (ByTheirNumberOfClasses, {(OF_ROWS,)}),
        (ByAGlobalNumber, {(OF_ROWS,)}),
        (ByTheSizeOfLogits, {(OF_ROWS,)}),
        (ByAHyperparameter, {(OF_ROWS,)}),
        (ComparedWithTokens, {None}),
        (LessTheSmallest, {None}),
        (LessTheMean, {None}),
        (AtMost, {None}),
        (ArgumentsBoundAgain, {None}),
        (LeftOutByRows, {None}),
        (OfRowsAndTokens, {("labels",), None}),
        (Functional, {(2,)}),
        (ByItsModule, {("classes",)}),
        (Summed, {None}),
        (WithAnotherLoss, {(1,), None}),
        (OtherClassesLeftOut, {None}),
        (Unsaid, set()),
    ],
)
def test_the_classes_of_a_cross_entropy_of_the_step_are_read_from_it(module: Any, expected: Any) -> None:
    assert passed(module(), "training_step", TARGET) == expected
