"""Batches with lists that have an element for each sample, and what goes by the number or the kind of a sample."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from features.toys import WIDTH, Encoder, Samples
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


class Buckets:
    """Batches of a user's own, which only the user could tell the epoch."""

    epoch = 0

    def __iter__(self) -> Any:
        return iter([list(range(start, start + 4)) for start in (self.epoch, 4, 8, 12)])

    def __len__(self) -> int:
        return 4

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@row(SECTION, "a batch sampler with a `set_epoch` that Lightning does not call, over two epochs")
def buckets(run: Run) -> dict[str, Any]:
    loaders = {"train_dataloaders": DataLoader(Samples(16), batch_sampler=Buckets()), "val_dataloaders": None}
    return fitted(run, Ordinary(), data=loaders, max_epochs=2, use_distributed_sampler=False)


class Constant(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=8)
        self.log("one", loss, on_step=False, on_epoch=True, batch_size=1)
        return loss


@row(
    SECTION,
    "`self.log(..., batch_size=8)` and `batch_size=1` with batches of 7 and a smaller last one",
    differs={"replicas": "the sampler repeats samples, and without `sync_dist` a replica logs its own, as under DDP"},
)
def constant_sizes(run: Run) -> dict[str, Any]:
    loader = run.training(Samples(17), 7 if run.replicas == 1 else 8)
    return fitted(run, Constant(), data={"train_dataloaders": loader, "val_dataloaders": None}, max_epochs=2)


class Kind(str, Enum):
    IMAGE = "image"
    NOTHING = "nothing"


class Named(dict):
    """A dict with its entries as attributes."""

    __getattr__ = dict.__getitem__


@dataclass
class Scaled:
    values: Tensor

    def __post_init__(self) -> None:
        self.values = 2 * self.values


class Told(Encoder):
    """Says what it has seen, in a dict of a class of its own."""

    def forward(self, images: Tensor) -> Any:
        return Named(kind=Kind.IMAGE, scaled=Scaled(super().forward(images)))


@row(
    SECTION,
    "an encoder returns a dict of its own class: a member of an `Enum`, a dataclass with `__post_init__`",
)
class Tells(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.encoder = Told().double()

    def forward(self, batch: Any) -> Tensor:
        result = self.encoder(batch["images"])
        features = result.scaled.values if result.kind is Kind.IMAGE else torch.zeros_like(result.scaled.values)
        return self.decoder(batch["tokens"], features)


@row(SECTION, "a memory of features in an attribute, by numbers of samples: `self.memory[numbers] = features`")
def remembers(run: Run) -> dict[str, Any]:
    class Remembers(Ordinary):
        def __init__(self) -> None:
            super().__init__()
            self.memory = torch.ones(40, WIDTH, dtype=torch.float64)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            features = self.encoder(batch["images"])
            near = (features * self.memory[batch["number"]]).mean()
            self.memory[batch["number"]] = 0.5 * self.memory[batch["number"]] + 0.5 * features.detach()
            return nn.functional.cross_entropy(self.decoder(batch["tokens"], features), batch["label"]) + 0.1 * near

    class Numbered(Samples):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {**super().__getitem__(index), "number": index}

    loaders = {"train_dataloaders": run.training(Numbered(32)), "val_dataloaders": None}
    return fitted(run, Remembers(), data=loaders)


class GivesRows(Ordinary):
    """Gives a list of rows in training, and what `squeeze()` leaves of a column in validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch)
        return {"loss": nn.functional.cross_entropy(logits, batch["label"]), "rows": list(logits.detach())}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs["rows"])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.last = self(batch)[:, :1].squeeze()
        return {"column": self.last}

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen.append([outputs["column"], self.last])


@row(
    SECTION,
    "smaller last batches, of lists of rows as long as a microbatch, and of columns squeezed to a number",
    differs={"replicas": "each replica has the rows of its own samples, as under DDP"},
)
def smaller_rows(run: Run) -> dict[str, Any]:
    loaders = {"train_dataloaders": run.training(30), "val_dataloaders": run.loader(11)}
    return fitted(run, GivesRows(), data=loaders)
