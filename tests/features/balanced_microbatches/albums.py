"""Texts with unlike numbers of images, and a module that learns from them."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from features.toys import CLASSES, PIXELS, TOKENS, WIDTH, Toy

COUNTS = [0, 7, 0, 1, 0, 1, 6, 0, 5, 0, 0, 2, 1, 0, 0, 4]


class Albums(Dataset):
    """Texts with any number of images."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.items = [
            {
                "images": torch.randn(count, PIXELS, generator=generator, dtype=torch.float64),
                "tokens": torch.randint(16, (TOKENS,), generator=generator),
                "label": torch.randint(CLASSES, (), generator=generator),
                "number": number,
            }
            for number, count in enumerate(COUNTS)
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]


def packed(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Images of all samples lie in a row."""
    return {
        "pixel_values": torch.cat([sample["images"] for sample in samples]),
        "image_items": torch.tensor([len(sample["images"]) for sample in samples]),
        "input_ids": torch.stack([sample["tokens"] for sample in samples]),
        "label": torch.stack([sample["label"] for sample in samples]),
        "names": [f"sample {sample['number']}" for sample in samples],
    }


class Album(Toy):
    """Classifies texts with any number of images, and keeps what hooks may look at."""

    def __init__(self) -> None:
        super().__init__(lr=0.1)
        self.sizes: list[int] = []
        self.seen: list[Any] = []
        self.names: list[str] = []
        self.recent = deque[str](maxlen=100)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        counts, pixels = batch["image_items"], batch["pixel_values"]
        features = torch.zeros(len(counts), WIDTH, dtype=torch.float64)
        if pixels is not None and len(pixels):
            self.sizes.append(len(pixels))
            owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
            features = features.index_add(0, owner, self.encoder(pixels))
        return self.decoder(batch["input_ids"], features)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        logits = self(batch)
        self.last = logits.detach()
        self.seen.append({"names": batch["names"], "logits": logits.detach()})
        self.names.extend(batch["names"])
        self.recent.extend(batch["names"])
        loss = F.cross_entropy(logits, batch["label"])
        self.log("loss", loss, sync_dist=True)
        return {"loss": loss, "logits": logits.detach(), "names": batch["names"], "label": batch["label"].numpy()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kept = [*getattr(self, "kept", []), (outputs["logits"], outputs["names"], outputs["label"], self.last)]

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        return {"names": batch["names"], "logits": self(batch)}
