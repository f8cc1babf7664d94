"""Batches with lists that have an element for each sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from features.toys import Samples
from ordinary.rows.data_kinds import SECTION
from ordinary.uses import Ordinary, Run, fitted, row


class Albums(Ordinary):
    """Lists of images, as many as each sample has."""

    def forward(self, batch: Any) -> Tensor:
        albums = batch["inputs"]["images"]
        features = torch.stack([self.encoder(torch.stack(list(album))).mean(0) for album in albums])
        return self.decoder(batch["inputs"]["tokens"], features)


@row(SECTION, "a nested dict with a list of lists of images, beside tensors")
def albums(run: Run) -> dict[str, Any]:
    def collated(samples: list[Any]) -> dict[str, Any]:
        album = [[one["images"] * (1 + place) for place in range(1 + int(one["label"]))] for one in samples]
        tokens, label = (torch.stack([one[name] for one in samples]) for name in ("tokens", "label"))
        return {"inputs": {"images": album, "tokens": tokens}, "label": label, "split": "train"}

    loaders = {"train_dataloaders": run.training(Samples(32), 8, collate_fn=collated), "val_dataloaders": None}
    return fitted(run, Albums(), data=loaders)


class Detects(Ordinary):
    """Images, and a dict of what is seen in each."""

    def loss(self, batch: Any) -> Tensor:
        images, targets = batch
        assert len(images) == len(targets)
        tokens, label = (torch.stack([one[name] for one in targets]) for name in ("tokens", "label"))
        features = self.encoder(torch.stack(list(images)))
        sizes = torch.stack([one["boxes"].prod(1).mean() for one in targets])
        logits = self.decoder(tokens, features)
        return nn.functional.cross_entropy(logits, label) + (sizes * logits.square().mean(1)).mean()


@row(SECTION, "detection: `collate_fn=lambda batch: tuple(zip(*batch))` of images and dicts of boxes")
def detects(run: Run) -> dict[str, Any]:
    def collated(samples: list[Any]) -> tuple[Any, ...]:
        seen = [
            {"boxes": one["images"][:4].repeat(4 if place < 4 else 1 + place % 3, 1)}
            for place, one in enumerate(samples)
        ]
        return tuple(
            zip(*((one["images"], {**box, **one}) for one, box in zip(samples, seen, strict=True)), strict=True)
        )

    loaders = {"train_dataloaders": run.training(Samples(32), 8, collate_fn=collated), "val_dataloaders": None}
    return fitted(run, Detects(), data=loaders)


class Channels(Ordinary):
    """A list of images [C, H, W]."""

    def forward(self, batch: Any) -> Tensor:
        return self.decoder(batch["tokens"], self.encoder(torch.stack(list(batch["images"])).flatten(1)))


@row(
    SECTION,
    "a list of images `[3, H, W]`, and a last batch of 3 samples",
    differs={"replicas": "the sampler repeats a sample, so that replicas have as many, as under DDP"},
)
def channels(run: Run) -> dict[str, Any]:
    def collated(samples: list[Any]) -> dict[str, Any]:
        tensors = default_collate([{name: one[name] for name in ("tokens", "label")} for one in samples])
        return {**tensors, "images": [one["images"].view(3, 1, -1) for one in samples]}

    loaders = {"train_dataloaders": run.training(Samples(11), 8, collate_fn=collated), "val_dataloaders": None}
    return fitted(run, Channels(), data=loaders)
