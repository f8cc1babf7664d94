"""Where payloads depend on more than the shapes of a batch, headers go with them on backends that order operations.

vision: rank 0; language: ranks 1-2 as stages; on a device that runs one operation at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from features.toys import PIPE, WIDTH, Encoder, Run, Samples, Toy, assert_same, outcomes, weights
from nccl_order import NAMES
from parity.harness import Batches, Recorder

Batch = dict[str, Any]


class Annealed(Encoder):
    """Returns a number beside features, which changes with each step."""

    scale = 1.0

    def forward(self, images: Tensor) -> Any:
        return super().forward(images), self.scale


class Penalised(Encoder):
    """Keeps a penalty on its weights, which is the same for all samples; none in every other step."""

    def forward(self, images: Tensor) -> Tensor:
        self.penalty = self.projector.weight.abs().mean() if self.counts else None
        return super().forward(images)


class Changed(Toy):
    def __init__(self, way: Callable[[Changed, Batch], Tensor]) -> None:
        super().__init__()
        self.way = way

    def forward(self, batch: Batch) -> Tensor:
        return self.way(self, batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        Annealed.scale = 1 / (1 + batch_idx)


def trained(run: Run, way: Callable[[Changed, Batch], Tensor], kind: type = Encoder, **options: Any) -> Any:
    recorder, batches = Recorder(), []
    for step in range(4):
        samples = Samples(8, seed=step)
        batches.append({"images": samples.images, "tokens": samples.tokens, "label": samples.labels})
        batches[-1]["step"] = step % 2
    trainer = run.trainer(callbacks=[recorder], use_distributed_sampler=False, **options)
    module = Changed(way)
    module.encoder.__class__ = kind
    trainer.fit(module, DataLoader(Batches(batches), batch_size=None))
    return {"losses": recorder.losses, "weights": weights(module)}


def numbers_that_differ_over_steps(run: Run) -> Any:
    """`step` in the batch; no rank may wait for a header that another does not send."""
    return trained(run, lambda module, batch: module.decoder(batch["tokens"], module.encoder(batch["images"])))


def a_number_beside_features(run: Run) -> Any:
    def way(module: Changed, batch: Batch) -> Tensor:
        features, scale = module.encoder(batch["images"])
        return module.decoder(batch["tokens"], features * scale)

    return trained(run, way, Annealed)


def longer_texts_with_each_step(run: Run) -> Any:
    def way(module: Changed, batch: Batch) -> Tensor:
        return module.decoder(batch["tokens"][:, : 2 + module.global_step], module.encoder(batch["images"]))

    return trained(run, way)


def gradients_of_every_other_step(run: Run) -> Any:
    """Only the last stage reads which step it is; the others pass on that there is no gradient."""

    def way(module: Changed, batch: Batch) -> Tensor:
        logits = module.decoder(batch["tokens"], module.encoder(batch["images"]))
        return logits.detach() + module.decoder.head.bias if module.global_step % 2 else logits

    return trained(run, way)


def images_from_the_second_epoch_on(run: Run) -> Any:
    def way(module: Changed, batch: Batch) -> Tensor:
        features = module.encoder(batch["images"])
        return module.decoder(batch["tokens"], features if module.current_epoch else torch.zeros_like(features))

    return trained(run, way, max_epochs=2)


def a_penalty_that_some_steps_leave_out(run: Run) -> Any:
    """It goes on from the first stage of the language model, which does not read it, to the last one."""

    def way(module: Changed, batch: Batch) -> Tensor:
        module.encoder.counts = module.global_step % 2 == 0
        logits = module.decoder(batch["tokens"], module.encoder(batch["images"]))
        return logits * (1 + module.encoder.penalty) if module.encoder.counts else logits

    return trained(run, way, Penalised)


def features_of_some_samples(run: Run) -> Any:
    def way(module: Changed, batch: Batch) -> Tensor:
        has = batch["label"] == 0
        rows, features = batch["images"][has], torch.zeros(len(has), WIDTH, dtype=torch.float64)
        if len(rows):
            features = features.index_put((has,), module.encoder(rows))
        return module.decoder(batch["tokens"], features)

    return trained(run, way)


def test_payloads_that_shapes_do_not_tell_equal_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_BACKEND", NAMES[1])
    found = outcomes(
        PIPE,
        numbers_that_differ_over_steps,
        a_number_beside_features,
        longer_texts_with_each_step,
        gradients_of_every_other_step,
        images_from_the_second_epoch_on,
        a_penalty_that_some_steps_leave_out,
        features_of_some_samples,
    )
    for name, outcome in found.items():
        assert_same(outcome.ranks[0]["weights"], outcome.one["weights"], where=name)
        for rank in outcome.ranks:
            assert_same(rank["losses"], outcome.one["losses"], where=name)
