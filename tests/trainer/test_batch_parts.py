"""Label tokens are counted wherever it is certain which tensor holds them; functions split and weigh any batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mm5d import ConfigError, MultimodalStrategy
from lightning_mm5d.data.loader import LoaderBatches
from lightning_mm5d.trainer.batch_parts import BatchParts
from source.test_passed import Masked, Unpacked, Unsaid
from zoo import CASES

IDS = torch.arange(12).reshape(4, 3)
LABELS = torch.tensor([[5, -100, 6], [5, 6, 7], [-100, -100, 5], [5, 5, -100]])
SHIFTED = (3.0, 2.0)
"""label tokens of the first two samples and of the last two, without the first of each"""


def parts_of(module: L.LightningModule, **options: Any) -> BatchParts:
    given = {
        "num_microbatches": 2,
        "microbatch_size": None,
        "microbatching": "split",
        "loss_weight": "tokens",
    } | options
    return BatchParts(module, SimpleNamespace(**given))


def weights(module: L.LightningModule, batch: Any, **options: Any) -> tuple[float, ...]:
    made = parts_of(module, **options)
    parts = made.split(batch)
    tokens = made.has_labels(parts) if made.is_auto else not made.counts_samples
    made.check(parts, tokens=tokens)
    return made.weights(parts, tokens=tokens)


@pytest.mark.parametrize(
    ("module", "batch"),
    [
        (Unpacked(), (IDS, IDS, IDS, LABELS)),
        (Unsaid(), {"ids": IDS, "labels": LABELS}),
        (Unsaid(), (IDS, {"ids": IDS, "labels": LABELS})),
        (Unsaid(), {"text": {"labels": LABELS}, "again": [{"labels": LABELS[:, :2], "x": IDS}][0]["x"]}),
    ],
)
def test_labels_are_counted_wherever_they_are(module: L.LightningModule, batch: Any) -> None:
    assert weights(module, batch) == SHIFTED


@pytest.mark.parametrize(
    ("module", "batch", "reason"),
    [
        (Unsaid(), (IDS, LABELS), "no tensor named labels"),
        (Masked(), (IDS, LABELS), "makes the labels"),
        (Unsaid(), {"a": {"labels": LABELS}, "b": {"labels": IDS}}, r"batch\['a'\].* or in batch\['b'\]"),
        (Unsaid(), {"ids": IDS, "labels": [1, 2, 3, 4]}, "no tensor named labels"),
    ],
)
def test_labels_that_are_not_certain_are_refused_with_what_to_do(
    module: L.LightningModule, batch: Any, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){reason}.*Leave loss_weight out.*loss_weight=function.*import path"):
        weights(module, batch)


def test_functions_of_the_strategy_split_and_weigh_before_methods_of_the_module() -> None:
    class Own(Unsaid):
        def split_batch(self, batch: Tensor, count: int) -> list[Tensor]:
            raise AssertionError

        def loss_weight(self, batch: Tensor) -> int:
            raise AssertionError

    halves = {"microbatching": lambda batch, count: list(batch.chunk(count, dim=1)), "loss_weight": lambda b: b.sum()}
    assert weights(Own(), torch.arange(8).reshape(2, 4), **halves) == (0 + 1 + 4 + 5, 2 + 3 + 6 + 7)


@pytest.mark.parametrize("found", [None, [], [IDS] * 3, {"a": IDS}])
def test_what_is_no_list_of_microbatches_is_refused(found: Any) -> None:
    with pytest.raises(ConfigError, match=r"microbatching: got .* returns a list of at most as many"):
        parts_of(Unsaid(), microbatching=lambda batch, count: found).split(IDS)


def test_samples_of_parts_are_those_of_what_a_function_cut() -> None:
    """5 samples are 3 and 2; 11 patches are repeated, or each part gets some of them."""

    def repeating(batch: Any, count: int) -> list[Any]:
        ids, images, patches = batch
        return [(ids[at], images[at], patches) for at in (slice(3), slice(3, 5))]

    def sharing(batch: Any, count: int) -> list[Any]:
        shared = zip(repeating(batch, count), batch[2].split(6), strict=True)
        return [(ids, images, patches) for (ids, images, _), patches in shared]

    batch = torch.arange(5), [torch.zeros(size, 3) for size in (8, 7, 9, 8, 5)], torch.zeros(11, 2)
    assert weights(Unsaid(), batch, microbatching=repeating, loss_weight="samples") == (3.0, 2.0)
    with pytest.raises(ConfigError, match=r"microbatching: got '2 parts of unknown.*loss_weight=function"):
        weights(Unsaid(), batch, microbatching=sharing, loss_weight="samples")
    assert weights(Unsaid(), batch, microbatching=sharing, loss_weight=lambda part: len(part[0])) == (3.0, 2.0)


def test_loader_batches_of_unknown_numbers_of_samples_are_refused_with_what_to_do() -> None:
    batch = LoaderBatches([(IDS, torch.zeros(7, 2)), (IDS[:2], torch.zeros(4, 2))])
    with pytest.raises(ConfigError, match=r"microbatching: got '2 parts of unknown.*loss_weight=function"):
        weights(Unsaid(), batch, microbatching="loader", loss_weight="samples")
    assert weights(Unsaid(), batch, microbatching="loader", loss_weight=lambda part: len(part[0])) == (4.0, 2.0)


def test_a_single_part_needs_a_number_of_samples_only_where_replicas_weigh_by_it() -> None:
    made = parts_of(Unsaid(), num_microbatches=1, loss_weight="samples")
    parts = made.split((IDS, torch.zeros(7, 2)))
    made.check(parts, tokens=False)
    with pytest.raises(ConfigError, match="1 parts of unknown"):
        made.check(parts, tokens=False, deals=True)


@pytest.mark.parametrize("field", ["microbatching", "loss_weight"])
def test_the_strategy_takes_functions(field: str) -> None:
    assert getattr(MultimodalStrategy(**{field: len}), field) is len
    with pytest.raises(ConfigError, match=f"{field}: got 3.* or a function"):
        MultimodalStrategy(**{field: 3})  # type: ignore[arg-type]


def test_a_size_of_microbatches_gives_a_function_their_number() -> None:
    counts = []

    def halves(batch: Tensor, count: int) -> list[Tensor]:
        counts.append(count)
        return list(batch.split(2))

    sized = parts_of(Unsaid(), num_microbatches=None, microbatch_size=2, microbatching=halves, loss_weight="samples")
    assert [[part.samples for part in sized.split(IDS[:size], is_first=True)] for size in (4, 3, 1)] == [
        [2, 2],
        [2, 1],
        [1],
    ]
    assert counts == [2, 2, 1]
    with pytest.raises(ConfigError, match=r"microbatch_size: got 2.*do not agree.*num_microbatches"):
        sized.split((IDS, IDS[:1]))


class Criterion(nn.Module):
    def forward(self, logits: Tensor, wanted: Tensor) -> Tensor:
        return logits.log_softmax(-1).flatten(0, 1)[wanted].mean()


class Judged(L.LightningModule):
    """Steps around a causal language model that takes labels."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.score = CASES["llama"].build().model, nn.Linear(32, 1)
        self.criterion = Criterion()


class Scored(Judged):
    """A reward of the last token."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = batch.pop("labels")
        hidden = self.model.model(**batch).last_hidden_state
        score = self.score(hidden[torch.arange(hidden.shape[0]), -1]).squeeze(-1)
        return F.binary_cross_entropy_with_logits(score, (labels.max(1).values % 2).to(score))


class Preferred(Judged):
    def log_probability(self, batch: Any, labels: Tensor) -> Tensor:
        logits = self.model(**batch).logits.log_softmax(-1)
        return logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).sum(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = batch.pop("labels")
        return -F.logsigmoid(self.log_probability(batch, labels)).mean()


class Classified(Judged):
    """The model computes a loss, too, which nothing uses."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.model(**batch, output_hidden_states=True).hidden_states[-1]
        return F.cross_entropy(self.score(hidden.mean(1)), batch["input_ids"][:, 0] % 1)


class Counted(Judged):
    """Classes are made of labels, one of each row."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.model(**batch, output_hidden_states=True).hidden_states[-1]
        return F.cross_entropy(self.score(hidden.mean(1)), (batch["labels"] != -100).sum(1) % 1)


class Both(Judged):
    """The model's loss of tokens, and one of rows beside it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = self.model(**batch, output_hidden_states=True)
        counts = (batch["labels"] != -100).sum(1) % 1
        return found.loss + F.cross_entropy(self.score(found.hidden_states[-1].mean(1)), counts)


class ByACriterion(Judged):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = batch["labels"]
        logits = self.model(**batch).logits
        return self.criterion(logits[:, :-1], labels[:, 1:].flatten())


class ByTheModels(Judged):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = batch["labels"]
        logits = self.model(**batch).logits
        return self.model.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])


def next_token_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), wanted[:, 1:].flatten())


class ByAFunction(Judged):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = batch.pop("labels")
        return next_token_loss(self.model(**batch).logits, labels)


class Read(Judged):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = self.model(**batch)
        self.log("largest", found.logits.max())
        return found["loss"]


class OneByOne(Judged):
    """A mean over samples of the means of their tokens."""

    def each(self, batch: Any) -> tuple[Tensor, Tensor]:
        labels = batch["labels"][:, 1:]
        logits = self.model(input_ids=batch["input_ids"]).logits
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="none"), labels

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses, labels = self.each(batch)
        counts = (labels != -100).to(losses)
        return ((losses * counts).sum(1) / counts.sum(1)).mean()


class OverElements(OneByOne):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses, _ = self.each(batch)
        return losses.mean()


class DividedOnce(OneByOne):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses, labels = self.each(batch)
        counts = (labels != -100).to(losses)
        return (losses * counts).sum() / counts.sum()


class Masked(OneByOne):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses, labels = self.each(batch)
        return losses[labels != -100].mean()


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (OneByOne, (2, 2)),
        (OverElements, (2, 2)),
        (DividedOnce, SHIFTED),
        (Masked, SHIFTED),
        (Scored, (2, 2)),
        (Preferred, (2, 2)),
        (Classified, (2, 2)),
        (Counted, (2, 2)),
        (Both, SHIFTED),
        (ByACriterion, SHIFTED),
        (ByAFunction, SHIFTED),
        (ByTheModels, SHIFTED),
        (Read, SHIFTED),
    ],
)
def test_label_tokens_count_only_where_a_step_uses_a_loss_of_them(module: Any, expected: tuple[float, ...]) -> None:
    assert weights(module(), {"input_ids": IDS, "labels": LABELS}, loss_weight="auto") == expected


class Compared(Counted):
    """Validated by the model's loss of tokens, which it is not trained by; tested by what it is trained by."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.training_step(batch, batch_idx))


class Written(Counted):
    """Validated by what the model writes: nothing tells of a loss of tokens."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("length", (self.model.generate(batch["input_ids"]) > 0).sum(1).float().mean())


@pytest.mark.parametrize(
    ("module", "step", "expected"),
    [
        (Compared, "training_step", (2, 2)),
        (Compared, "validation_step", SHIFTED),
        (Compared, "test_step", (2, 2)),
        (Written, "validation_step", (2, 2)),
    ],
)
def test_each_step_is_weighed_by_its_own_code(module: Any, step: str, expected: tuple[float, ...]) -> None:
    weighing = parts_of(module(), loss_weight="auto").of_step(step)
    parts = weighing.split({"input_ids": IDS, "labels": LABELS})
    assert weighing.weights(parts, tokens=weighing.is_auto and weighing.has_labels(parts)) == expected
