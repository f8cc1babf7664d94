"""However batches are cut, and whatever is missing in a part of them, the result is that of the whole batch."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from features.toys import (
    PIPE,
    TOKENS,
    TWINS,
    Layout,
    Outcome,
    Run,
    Samples,
    Toy,
    alone,
    assert_same,
    figures,
    outcomes,
    together,
    weights,
)
from lightning_mm5d import ConfigError, Modality
from parity.harness import Batches
from sweeps import dealt
from zoo import CASES


def train(run: Run, module: Any, loader: Any, **options: Any) -> dict[str, Any]:
    trainer = run.trainer(max_epochs=2, **options)
    trainer.fit(module, loader)
    return {"weights": weights(module), "metrics": figures(trainer), "steps": trainer.global_step}


def short_last_batch(run: Run) -> Any:
    """Batches of 8, 8 and 6 (or 4, 4 and 3 per replica)."""
    return train(run, Toy(), run.training(22))


def last_batch_smaller_than_microbatches(run: Run) -> Any:
    """Batches of 8, 8 and 2: one sample per replica is left for two microbatches, or two for three."""
    run = Run(run.layout, {"num_microbatches": 3})
    return train(run, Toy(), run.training(18))


class Sideways(Toy):
    """Batches with images [PIXELS, B], which only the module itself knows how to cut, and a loss with weights."""

    def split_batch(self, batch: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
        size = len(batch["label"])
        cuts = [0, 1, *range(2, count), size]
        return [self.rows(batch, start, end) for start, end in pairwise(cuts) if end > start]

    @staticmethod
    def rows(batch: dict[str, Tensor], start: int, end: int) -> dict[str, Tensor]:
        return {k: v[:, start:end] if k == "images" else v[start:end] for k, v in batch.items()}

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        upright = {**batch, "images": batch["images"].T}
        weight = batch["label"] + 1.0
        return (F.cross_entropy(self(upright), batch["label"], reduction="none") * weight).sum() / weight.sum()

    def loss_weight(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["label"] + 1.0).sum()


def sideways(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = torch.utils.data.default_collate(samples)
    return {**batch, "images": batch["images"].T}


def own_split_and_weight(run: Run) -> Any:
    return train(run, Sideways(), run.training(16, collate_fn=sideways))


class Ragged(Samples):
    """Every batch of 4 has texts of another length."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "tokens": self.tokens[index][: TOKENS - (index // 4) % 3]}


def lengths_that_differ_between_steps(run: Run) -> Any:
    samples = Ragged(16)
    size = 4 // (run.layout.replicas if run.layout else 1)

    if run.layout is None:
        return train(run, Toy(), DataLoader(samples, size))
    sampler = torch.utils.data.DistributedSampler(samples, run.layout.replicas, 0, shuffle=False)
    return train(run, Toy(), DataLoader(samples, size, sampler=sampler))


def batches_of_many_sizes(run: Run) -> Any:
    """Batches of 2, 7, 8 and 5 samples: of 8 are kept for the timeline, and never evaluated ones."""
    data = Samples(22)
    rows = torch.utils.data.default_collate([data[index] for index in range(22)])
    cuts = [0, 2, 9, 17, 22]
    batches = [{name: field[start:end] for name, field in rows.items()} for start, end in pairwise(cuts)]
    loader = DataLoader(Batches(batches), batch_size=None)
    return train(run, Toy(), loader, use_distributed_sampler=False)


@pytest.mark.parametrize("layout", [PIPE, TWINS], ids=["pipe", "twins"])
def test_microbatches_of_a_size_train_like_whole_batches(layout: Layout, tmp_path: Any) -> None:
    """vision: rank 0; language: ranks 1-2, as stages or replicas; 8 samples are 3, 3 and 2, 4 are 3 and 1."""
    scenarios = (short_last_batch, *([batches_of_many_sizes] if layout is PIPE else []))
    drawn = tmp_path / "drawn.json"
    said = {"num_microbatches": None, "microbatch_size": 3, "timeline": str(drawn)}
    for name, outcome in outcomes(layout, *scenarios, **said).items():
        assert_same(outcome.ranks[0]["weights"], outcome.one["weights"])
        for rank in outcome.ranks:
            assert_same(rank["metrics"], outcome.one["metrics"])
            assert rank["steps"] == outcome.one["steps"], name
    names = {event["name"] for event in json.loads(drawn.read_text())["traceEvents"]}
    count = 3 if layout is PIPE else 2
    drawn_forwards = {name for name in names if name.startswith("F(language.0,")}
    assert drawn_forwards == {f"F(language.0, {number})" for number in range(count * layout.replicas)}


SCENARIOS = (
    short_last_batch,
    last_batch_smaller_than_microbatches,
    own_split_and_weight,
    lengths_that_differ_between_steps,
)


@pytest.fixture(scope="module", params=dealt(__file__, [PIPE, TWINS]), ids=["pipe", "twins"])
def found(request: Any) -> dict[str, Outcome]:
    return outcomes(request.param, *SCENARIOS)


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_cut_batches_train_like_whole_ones(found: dict[str, Outcome], name: str) -> None:
    one, ranks = found[name].one, found[name].ranks
    assert_same(ranks[0]["weights"], one["weights"])
    for rank in ranks:
        assert rank["steps"] == one["steps"]
        assert_same(rank["metrics"], one["metrics"])


def a_batch_per_microbatch(run: Run) -> Any:
    """20 samples: steps of 2 loader batches of 4, the last step of one; on one process batches of 8, 8 and 4."""
    size = 8 if run.layout is None else 4
    return train(run, Toy(), run.training(20, batch_size=size))


def unlike_batches_per_microbatch(run: Run) -> Any:
    """Loader batches of other lengths in one step; on one process two batches are accumulated."""
    samples = Ragged(16)
    batches = [torch.utils.data.default_collate([samples[i] for i in range(at, at + 4)]) for at in range(0, 16, 4)]
    options = {"accumulate_grad_batches": 2} if run.layout is None else {}
    loader = DataLoader(Batches(batches), batch_size=None)
    return train(run, Toy(), loader, use_distributed_sampler=False, **options)


def test_loader_batches_can_be_the_microbatches() -> None:
    """vision: rank 0; language: ranks 1-2 as stages."""
    found = outcomes(PIPE, a_batch_per_microbatch, unlike_batches_per_microbatch, microbatching="loader")
    for name, outcome in found.items():
        assert_same(outcome.ranks[0]["weights"], outcome.one["weights"])
        assert outcome.ranks[0]["steps"] == outcome.one["steps"], name
    whole = found["a_batch_per_microbatch"]
    for rank in whole.ranks:
        assert_same(rank["metrics"], whole.one["metrics"])


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        samples = Samples(20)
        return (samples[index] for index in range(20))


def trainer_flags(run: Run) -> Any:
    """A stream without a length, stopped and validated in the middle of an epoch."""
    module = Toy()
    flags = {"max_steps": 5, "limit_train_batches": 3, "val_check_interval": 2, "limit_val_batches": 1}
    trainer = run.trainer(max_epochs=-1, log_every_n_steps=1, **flags)
    trainer.fit(module, run.loader(Stream()), run.loader(16))
    return {"weights": weights(module), "metrics": figures(trainer), "steps": trainer.global_step}


def test_a_stream_and_limits_of_the_trainer_work_as_on_one_process() -> None:
    """vision: rank 0; language: ranks 1-2 as stages."""
    outcome = outcomes(PIPE, trainer_flags)["trainer_flags"]
    assert_same(outcome.ranks[0], outcome.one)
    assert outcome.one["steps"] == 5


class Growing(torch.utils.data.IterableDataset):
    """One batch an epoch, of the next one of some sizes."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes, self.epoch = sizes, 0

    def __iter__(self) -> Any:
        samples, size = Samples(8), self.sizes[self.epoch % len(self.sizes)]
        self.epoch += 1
        yield torch.utils.data.default_collate([samples[index] for index in range(size)])


def small_later(run: Run) -> Any:
    return train(run, Toy(), DataLoader(Growing((8, 2)), batch_size=None))


def small_first(run: Run) -> Any:
    class WithoutIndex(Toy):
        def training_step(self, batch: Any) -> Any:  # type: ignore[override]
            return self.loss(batch)

    for module in (Toy(), WithoutIndex()):
        with pytest.raises(ConfigError, match=r"gives at most 2 \(samples: \d+\).*microbatch_size"):
            train(run, module, DataLoader(Growing((2, 8)), batch_size=None))


ALONE = Layout({"language": Modality()}, 1)


def test_only_the_first_batch_of_a_run_must_give_all_microbatches() -> None:
    outcome = outcomes(ALONE, small_later, num_microbatches=4)["small_later"]
    assert_same(outcome.ranks[0]["weights"], outcome.one["weights"])
    together(ALONE, small_first, num_microbatches=4)


def with_patches(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch to predict, without labels; its tensors do not agree on the number of samples."""
    batch = torch.utils.data.default_collate(samples)
    del batch["label"]
    return {**batch, "patches": torch.zeros(11, 2)}


def one_and_rest(batch: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    cuts = [slice(0, 1), slice(1, None)][: len(batch["tokens"])]
    return [{key: value if key == "patches" else value[at] for key, value in batch.items()} for at in cuts]


def one_and_rest_with_patches(batch: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Parts of which nothing tells the number of samples."""
    parts = one_and_rest(batch, count)
    return [{**part, "patches": patches} for part, patches in zip(parts, batch["patches"].split(7), strict=False)]


def predicted(run: Run) -> Any:
    return run.trainer().predict(Toy(), run.loader(7, batch_size=6, collate_fn=with_patches))


def test_batches_without_labels_are_predicted_also_by_replicas_with_unequal_numbers_of_them() -> None:
    """language: ranks 0-1 as replicas; the first has batches of 3 and 1 samples, the other one of 3."""
    layout = Layout({"language": Modality()}, 2, 2)
    one = torch.cat(alone(predicted))
    for rank, found in enumerate(together(layout, predicted, microbatching=one_and_rest, loss_weight="tokens")):
        assert [len(batch) for batch in found] == [[3, 1], [3]][rank]
        assert_same(torch.cat(found), one[rank::2])
    of_parts = together(layout, predicted, microbatching=one_and_rest_with_patches)[1]
    assert [len(part) for part in of_parts[0]] == [1, 2], "parts of unknown sizes are not joined"


class Guessing(Toy):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        found = self(batch)
        return {"loss": F.cross_entropy(found, batch["tokens"][:, 0] % found.shape[-1]), "guesses": found.detach()}

    def loss_weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(float(len(batch["tokens"])))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen = outputs


def guessed(run: Run) -> Any:
    module = Guessing()
    run.trainer(limit_train_batches=1, use_distributed_sampler=False).fit(
        module, run.loader(3, batch_size=3, collate_fn=with_patches)
    )
    return module.seen["guesses"], module.seen["loss"]


def test_what_steps_return_beside_the_loss_is_a_list_where_parts_cannot_be_joined() -> None:
    (one, loss), layout = alone(guessed), Layout({"language": Modality(pp_size=2)}, 2)
    for guesses, mean in together(layout, guessed, microbatching=one_and_rest_with_patches):
        assert_same(list(guesses), [one[:1], one[1:]])
        assert_same(mean, loss)


LLAVA = Layout({"vision": Modality(), "language": Modality(pp_size=2)}, 3)


def missing_images(run: Run) -> Any:
    """Steps in which the first half of the samples, all of them, or none has an image."""
    case = CASES["llava"]
    batches = [
        case.batch(8, 1, some_without=True),
        case.batch(8, 2, images=[0] * 8),
        case.batch(8, 3, images=[0, 2, 0, 1, 0, 0, 1, 2]),
        case.batch(8, 4),
    ]
    module = case.build()
    trainer = run.trainer(use_distributed_sampler=False)
    trainer.fit(module, DataLoader(Batches(batches), batch_size=None), DataLoader(Batches(batches), batch_size=None))
    return {"weights": weights(module), "metrics": figures(trainer)}


def test_parts_without_images_neither_hang_nor_change_the_result(float64: None) -> None:
    """vision: rank 0; language: ranks 1-2 as stages; four microbatches of two samples."""
    outcome = outcomes(LLAVA, missing_images, num_microbatches=4)["missing_images"]
    assert_same(outcome.ranks[0]["weights"], outcome.one["weights"], 1e-6)
    for rank in outcome.ranks:
        assert_same(rank["metrics"], outcome.one["metrics"], 1e-6)


class Rows(Dataset):
    """Samples of a text batch with label tokens that differ a lot between samples."""

    def __init__(self) -> None:
        self.batch = CASES["llama"].batch(16, 5)
        ids = self.batch["input_ids"]
        kept = torch.rand(len(ids), 1, generator=torch.Generator().manual_seed(0)) * ids.shape[1]
        self.batch["labels"] = torch.where(torch.arange(ids.shape[1]) <= kept.clamp(min=1), ids, -100)

    def __len__(self) -> int:
        return len(self.batch["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: value[index] for key, value in self.batch.items()}


def uneven_tokens(run: Run) -> Any:
    module = CASES["llama"].build()
    rows = Rows()
    trainer = run.trainer(max_epochs=2)
    trainer.fit(module, run.training(rows))
    return {"weights": weights(module), "metrics": figures(trainer)}


TEXT = Layout({"language": Modality(pp_size=2)}, 2)
TEXT_TWINS = Layout({"language": Modality()}, 2, 2)


class Tagger(Toy):
    """A loss of its own over labels [B, S], of which every other sample has none."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.decoder.embedding(batch["tokens"]) + self.encoder(batch["images"]).unsqueeze(1)
        for layer in self.decoder.layers:
            hidden = layer(hidden)
        return self.decoder.head(self.decoder.norm(hidden))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        return {"loss": loss, "shown": loss.detach()}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log_dict({"trained": outputs["loss"], "shown": outputs["shown"]})

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.log("returned", outputs)


class Tagged(Samples):
    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        kept = torch.arange(TOKENS) < (index * 2 % TOKENS if index % 8 > 3 else 0)
        return {**sample, "labels": torch.where(kept, sample["tokens"] % 3, -100)}


def tags_of_some_samples(run: Run) -> Any:
    """The first half of each batch of 8 has no labels."""
    trainer, module = run.trainer(use_distributed_sampler=False, log_every_n_steps=1), Tagger()
    trainer.fit(module, run.loader(Tagged(16)), run.loader(Tagged(8)))
    return {"weights": weights(module), "metrics": figures(trainer)}


@pytest.mark.parametrize("layout", [TEXT, TEXT_TWINS], ids=["language pp 2", "language dp 2"])
def test_a_token_mean_is_that_of_the_whole_batch(layout: Layout, float64: None) -> None:
    """By default, and also in pure replicas with one microbatch each."""
    expected = alone(uneven_tokens)
    got = together(layout, uneven_tokens, **({"num_microbatches": 1} if layout is TEXT_TWINS else {}))
    assert_same(got[0]["weights"], expected["weights"], 1e-6)


def test_microbatches_without_a_label_count_nothing_and_give_no_nan() -> None:
    """vision: rank 0; language: ranks 1-2 as stages; and one process with two microbatches."""
    for layout in (PIPE, ALONE):
        outcome = outcomes(layout, tags_of_some_samples)["tags_of_some_samples"]
        assert all(value == value for value in outcome.one["metrics"].values())
        assert_same(outcome.ranks[0], outcome.one)


class Pairs(Rows):
    """Tuples, as published notebooks yield them."""

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": self.batch["input_ids"][index]}, self.batch["labels"][index]


def uneven_tokens_in_tuples(run: Run) -> Any:
    module = CASES["llama"].build()

    class Unpacks(type(module)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            inputs, labels = batch
            return self.model(**inputs, labels=labels, **self.fixed).loss

    module.__class__ = Unpacks
    trainer = run.trainer(max_epochs=2)
    trainer.fit(module, run.training(Pairs()))
    return {"weights": weights(module)}


def halves_and_rest(batch: Any, count: int) -> list[Any]:
    inputs, labels = batch
    return [({"input_ids": inputs["input_ids"][at]}, labels[at]) for at in (slice(0, 1), slice(1, None))]


def label_tokens(batch: Any) -> Tensor:
    return (batch[1][:, 1:] != -100).sum()


def test_tokens_of_tuples_are_counted_where_the_step_says_so_and_by_functions(float64: None) -> None:
    """language: ranks 0-1 as stages, and twice in full"""
    expected = alone(uneven_tokens)["weights"]
    assert_same(together(TEXT_TWINS, uneven_tokens_in_tuples, loss_weight="tokens")[0]["weights"], expected, 1e-6)
    functions = {"microbatching": halves_and_rest, "loss_weight": label_tokens}
    assert_same(together(TEXT, uneven_tokens_in_tuples, **functions)[0]["weights"], expected, 1e-6)


def test_weights_by_samples_do_not(float64: None) -> None:
    expected = alone(uneven_tokens)
    got = together(TEXT, uneven_tokens, loss_weight="samples")
    changed = max(float((got[0]["weights"][k] - v).abs().max()) for k, v in expected["weights"].items())
    assert changed > 1e-4
