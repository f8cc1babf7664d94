"""Encoders whose results are used in several places.

vision: rank 0; language: ranks 1-2 as stages.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from features.toys import PIPE, PIXELS, VISION, WIDTH, Layout, Run, Toy, assert_same, outcomes, weights
from lightning_mm5d import Modality


class Twice(Toy):
    """The encoder is called before the layers, and again after them; the first stage ends between the two."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().loss(batch)
        return loss + self.encoder(2 * batch["images"]).pow(2).mean()


def twice(run: Run) -> Any:
    module = Twice()
    run.trainer(max_epochs=1).fit(module, run.training(16), run.loader(8))
    return {"weights": weights(module)}


class Sometimes(Toy):
    """Halves of a batch, which are its microbatches, whose first label is 0 call no encoder; 1: and do not use it."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        if len(batch["label"]) == 8:
            halves = ({key: value[at : at + 4] for key, value in batch.items()} for at in (0, 4))
            return torch.stack([self.loss(half) for half in halves]).mean()
        features = torch.zeros(len(batch["label"]), WIDTH, dtype=torch.float64)
        if batch["label"][0] != 0:
            encoded = self.encoder(batch["images"])
            features = encoded if batch["label"][0] != 1 else features
        return F.cross_entropy(self.decoder(batch["tokens"], features), batch["label"])


def sometimes(run: Run) -> Any:
    module = Sometimes()
    run.trainer().fit(module, run.training(48))
    return {"weights": weights(module)}


def test_microbatches_may_do_without_an_encoder_or_its_result() -> None:
    found = outcomes(PIPE, sometimes)["sometimes"]
    assert_same(found.ranks[0]["weights"], found.one["weights"])


@pytest.mark.parametrize("feeds", ["all", [0, 1]])
def test_a_result_may_be_used_in_a_later_stage_only(feeds: Any) -> None:
    layout = Layout({**PIPE.modalities, "vision": Modality(feeds=feeds, **VISION)}, 3)
    found = outcomes(layout, twice)["twice"]
    assert_same(found.ranks[0]["weights"], found.one["weights"])


class Translator(L.LightningModule):
    """An `nn.Transformer`, whose own forward, which is torch's, calls the encoder."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.patch = nn.Linear(PIXELS, WIDTH)
            self.embedding = nn.Embedding(16, WIDTH)
            self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 16, 0.0, batch_first=True)
        self.double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        patches = self.patch(batch["images"]).unsqueeze(1).expand(-1, 3, -1)
        return self.transformer(patches, self.embedding(batch["tokens"])).pow(3).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def translation(run: Run) -> Any:
    module = Translator()
    run.trainer().fit(module, run.training(16))
    return {"weights": weights(module)}


def test_parts_of_torchs_own_modules_are_modalities() -> None:
    layout = Layout({"vision": Modality(module=["patch", "transformer.encoder"]), "language": Modality(pp_size=2)}, 3)
    found = outcomes(layout, translation)["translation"]
    assert_same(found.ranks[0]["weights"], found.one["weights"])
