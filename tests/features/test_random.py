"""Random draws agree on all ranks of a replica, differ between steps and replicas, and leave the state alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from lightning import seed_everything
from lightning.pytorch.callbacks import Callback
from torch.utils.checkpoint import checkpoint

from features.toys import PAIR, PIPE, TWINS, Run, Samples, Toy, assert_same, together, weights


class Augmented(Toy):
    """Draws in its step, in every library, and drops hidden units."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        # of an attribute of its own, ranks of a replica would be given those of the rank where the step ends
        self.encoder._drawn = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images = batch["images"] * (1 + 0.1 * torch.rand_like(batch["images"])) + float(np.random.rand())
        self.encoder._drawn.append(float(images.sum()) + random.random())
        loss = self.loss({**batch, "images": images})
        self.log("draw", torch.rand(()), sync_dist=False)
        return loss + 0.01 * torch.rand(())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Recomputed(Augmented):
    """The same with every layer of the decoder computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.decoder.layers:
            inner = layer.forward
            layer.forward = lambda hidden, inner=inner: checkpoint(inner, hidden, use_reentrant=False)


class Watch(Callback):
    """The generators' states around each batch."""

    def __init__(self) -> None:
        self.kept = True

    def states(self) -> Any:
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    def on_train_batch_start(self, *_: Any) -> None:
        self.before = self.states()

    def on_train_batch_end(self, *_: Any) -> None:
        self.kept = self.kept and self.before == self.states()


def train(run: Run, module: Augmented, seed: int) -> dict[str, Any]:
    seed_everything(seed, verbose=False)
    watch = Watch()
    trainer = run.trainer(callbacks=[watch])
    trainer.fit(module, run.training(8, batch_size=4))
    draw = float(trainer.callback_metrics["draw"])
    return {"drawn": module.encoder._drawn, "kept": watch.kept, "draw": draw, "weights": weights(module)}


def four_times(run: Run) -> list[Any]:
    return [
        train(run, Augmented(), 1),
        train(run, Augmented(), 1),
        train(run, Augmented(), 2),
        train(run, Recomputed(), 1),
    ]


@pytest.fixture(scope="module")
def pipe() -> list[list[dict[str, Any]]]:
    """vision: rank 0; language: ranks 1-2 as stages"""
    return together(PIPE, four_times)


def test_all_stages_see_the_same_augmentation(pipe: list[Any]) -> None:
    drawn = [rank[0]["drawn"] for rank in pipe]
    assert drawn[0] == drawn[1] == drawn[2]
    assert len(set(drawn[0])) == 4  # two steps of two microbatches
    assert pipe[0][0]["draw"] == pipe[1][0]["draw"] == pipe[2][0]["draw"]


def test_a_seed_repeats_a_run_and_another_does_not(pipe: list[Any]) -> None:
    first, again, other, _ = pipe[0]
    assert first["drawn"] == again["drawn"]
    assert_same(first["weights"], again["weights"], 0.0)
    assert first["drawn"] != other["drawn"]


def test_recomputed_layers_drop_the_same_units(pipe: list[Any]) -> None:
    first, _, _, recomputed = pipe[0]
    assert_same(recomputed["weights"], first["weights"], 1e-12)


def test_the_state_around_a_step_is_left_alone(pipe: list[Any]) -> None:
    assert all(result["kept"] for rank in pipe for result in rank)


def test_replicas_draw_for_themselves() -> None:
    """vision: rank 0, for both replicas of language: ranks 1-2."""
    both, first, second = [ranks[0]["drawn"] for ranks in together(TWINS, four_times)]
    assert set(first).isdisjoint(second)
    assert set(both) == {*first, *second}


class Unnumbered(Augmented):
    """A step without the index of its batch, which decodes twice, as R-Drop does."""

    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        features = self.encoder(batch["images"])
        first, second = (self.decoder(batch["tokens"], features) for _ in range(2))
        self.log("apart", (first - second).abs().min())
        self.log("dropped", first.sum(), on_step=True)
        return first.square().mean() + 0.0 * second.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Drawn(Callback):
    def __init__(self) -> None:
        self.rows: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.rows.append((float(trainer.callback_metrics["dropped"]), float(trainer.callback_metrics["apart"])))


class Same(torch.utils.data.Dataset[Any]):
    """One sample again and again."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return Samples(1)[0]


def accumulated(run: Run) -> Any:
    seed_everything(1, verbose=False)
    drawn = Drawn()
    trainer = run.trainer(callbacks=[drawn], accumulate_grad_batches=4, max_epochs=2)
    trainer.fit(Unnumbered(), run.loader(Same(), batch_size=4))
    return drawn.rows


def test_batches_of_one_accumulation_and_passes_of_one_step_draw_anew() -> None:
    """vision: rank 0; language: rank 1. All batches are equal, and so is what is computed but for dropout."""
    found = together(PAIR, accumulated)
    assert found[0] == found[1]
    sums, differences = zip(*found[0], strict=True)
    assert len(set(sums)) == 8, "four batches of one accumulation in each of two epochs"
    assert min(differences) > 0, "the second pass drops other units"
