"""What steps return and where it arrives: predictions in order, outputs for hooks, extras of a training step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from features.toys import PIPE, SHARED, TWINS, Layout, Outcome, Run, Toy, assert_same, figures, outcomes
from lightning_mm5d.stage import is_placeholder
from nccl_order import NAMES
from sweeps import dealt


class Talkative(Toy):
    """Every step returns something."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch)
        loss = torch.nn.functional.cross_entropy(logits, batch["label"])
        return {"loss": loss, "logits": logits, "names": ["x"] * len(logits), "mean": logits.mean(), "fixed": "text"}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        logits = self(batch)
        self.log("val_loss", torch.nn.functional.cross_entropy(logits, batch["label"]), sync_dist=True)
        return {"logits": logits, "label": batch["label"]}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch)
        self.accuracy(logits, batch["label"])
        self.log("test_accuracy", self.accuracy)
        self.log("test_grad", float(torch.is_grad_enabled()), sync_dist=True)
        return logits.argmax(-1)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        logits = self(batch)
        return {"class": logits.argmax(-1), "text": [str(int(i)) for i in logits.argmax(-1)], "logits": logits}


class Heard(Callback):
    """Keeps what hooks get."""

    def __init__(self) -> None:
        self.train: list[Any] = []
        self.validation: list[Any] = []
        self.test: list[Any] = []
        self.loaded: list[Any] = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.loaded += [batch for loader in trainer.val_dataloaders for batch in loader]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        kept = {key: value for key, value in outputs.items() if key != "loss"}
        self.train.append({**kept, "loss": float(loss)})

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.validation.append((dataloader_idx, outputs))

    def on_test_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.test.append(outputs)


def hooks(run: Run) -> Any:
    module, heard = Talkative(), Heard()
    trainer = run.trainer(callbacks=[heard], num_sanity_val_steps=0)
    trainer.fit(module, run.training(), [run.loader(8), run.loader(16)])
    return {"train": heard.train, "validation": heard.validation, "loaded": heard.loaded, "metrics": figures(trainer)}


def evaluated(run: Run) -> Any:
    module, heard = Talkative(), Heard()
    trainer = run.trainer(callbacks=[heard])
    results = trainer.test(module, run.loader(16), verbose=False)
    again = trainer.validate(module, [run.loader(8), run.loader(16)], verbose=False)
    return {"test": heard.test, "results": results, "again": again, "whole": not any_placeholder(module)}


def any_placeholder(module: torch.nn.Module) -> bool:
    return any(is_placeholder(p) for p in module.parameters())


def predicted(run: Run) -> Any:
    """20 samples in batches of 8: the last is short."""
    return run.trainer().predict(Talkative(), run.loader(20))


def predicted_unequally(run: Run) -> Any:
    """5 samples in batches of 4: with two replicas, the first has two batches and the second has one."""
    return run.trainer().predict(Talkative(), run.loader(5, 4))


def predicted_of_two(run: Run) -> Any:
    return run.trainer().predict(Talkative(), [run.loader(8), run.loader(12)])


class Inferring(Talkative):
    """Writes to its batch, as steps may."""

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        batch["images"] *= 2
        return {**super().predict_step(batch, batch_idx), "is_inferring": torch.is_inference_mode_enabled()}


def inferred(run: Run) -> Any:
    return run.trainer().predict(Inferring(), run.loader(20))


SCENARIOS = (hooks, evaluated, predicted, predicted_unequally, predicted_of_two)
LAYOUTS = [PIPE, TWINS, SHARED]


@pytest.fixture(scope="module", params=dealt(__file__, LAYOUTS), ids=["pipe", "twins", "shared"])
def found(request: Any) -> tuple[Layout, dict[str, Outcome]]:
    return request.param, outcomes(request.param, *SCENARIOS)


def samples_of(value: Any, shard: int, replicas: int) -> Any:
    """What replica `shard` of `replicas` has of outputs that list samples."""
    if isinstance(value, dict):
        return {key: samples_of(part, shard, replicas) for key, part in value.items()}
    if (isinstance(value, torch.Tensor) and value.dim()) or isinstance(value, list):
        return value[shard::replicas]
    return value


def shard_of(layout: Layout, rank: int) -> int:
    return max(rank - (layout.world - layout.replicas), 0)


def test_hooks_get_what_the_steps_of_the_whole_batch_would_return(found: Any) -> None:
    layout, outcome = found
    one = outcome["hooks"].one
    for rank, got in enumerate(outcome["hooks"].ranks):
        shard = shard_of(layout, rank)
        assert_same(got["metrics"], one["metrics"])
        assert [index for index, _ in got["validation"]] == [index for index, _ in one["validation"]]
        for (_, outputs), (_, expected) in zip(got["validation"], one["validation"], strict=True):
            assert_same(outputs, samples_of(expected, shard, layout.replicas))
        for batch, expected in zip(got["loaded"], one["loaded"], strict=True):
            assert_same(batch, samples_of(expected, shard, layout.replicas))
        for outputs, expected in zip(got["train"], one["train"], strict=True):
            part = samples_of(expected, shard, layout.replicas)
            if layout.replicas == 1:
                assert_same(outputs, expected)
            else:
                assert_same(outputs["logits"], part["logits"])
                assert outputs["fixed"] == "text"


def test_tests_and_validations_without_training_equal_one_process(found: Any) -> None:
    layout, outcome = found
    one = outcome["evaluated"].one
    for rank, got in enumerate(outcome["evaluated"].ranks):
        assert_same(got["results"], one["results"])
        assert got["results"][0]["test_grad"] == 0.0
        assert_same(got["again"], one["again"])
        for outputs, expected in zip(got["test"], one["test"], strict=True):
            assert torch.equal(outputs, samples_of(expected, shard_of(layout, rank), layout.replicas))
    assert outcome["evaluated"].ranks[0]["whole"]


@pytest.mark.parametrize("name", ["predicted", "predicted_unequally", "predicted_of_two"])
def test_predictions_are_those_of_one_process_in_order(found: Any, name: str) -> None:
    """With replicas each has every other sample, as under any strategy, and none twice."""
    layout, outcome = found
    one = outcome[name].one
    for rank, got in enumerate(outcome[name].ranks):
        loaders, expected = ([got], [one]) if name != "predicted_of_two" else (got, one)
        for batches, whole in zip(loaders, expected, strict=True):
            for key in ("class", "logits"):
                everything = torch.cat([batch[key] for batch in whole])
                mine = everything[shard_of(layout, rank) :: layout.replicas]
                assert_same(torch.cat([batch[key] for batch in batches]), mine)
            texts = [text for batch in whole for text in batch["text"]]
            assert [t for b in batches for t in b["text"]] == texts[shard_of(layout, rank) :: layout.replicas]


@pytest.mark.parametrize("layout", [PIPE, SHARED], ids=["pipe", "shared"])
def test_evaluations_in_inference_mode_equal_one_process(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning leaves inference mode out where the backend is gloo, and evaluates in it with NCCL."""
    monkeypatch.setenv("TEST_BACKEND", NAMES[0])
    outcome = outcomes(layout, evaluated, inferred)
    assert all(batch["is_inferring"] for batches in outcome["inferred"].ranks for batch in batches)
    test_tests_and_validations_without_training_equal_one_process((layout, outcome))
    test_predictions_are_those_of_one_process_in_order((layout, outcome), "inferred")
