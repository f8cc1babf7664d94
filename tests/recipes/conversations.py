"""A small file of conversations with its images and sounds, and a module that learns from it."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from models.tiny_composed import composed, image, sound

WORDS = ("what is this", "a cat", "and a dog", "is this a dog", "hello")


def write(folder: Path, rows: int = 12) -> Path:
    """A JSONL file in both formats: rows with none, one and two images, some with a sound."""
    for seed in range(3):
        image(seed).save(folder / f"{seed}.png")
        with wave.open(str(folder / f"{seed}.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes((sound(seed, 0.1 + 0.04 * seed).clip(-1, 1) * 32767).astype("<i2").tobytes())
    lines = []
    for row in range(rows):
        images, words = [f"{(row + at) % 3}.png" for at in range(row % 3)], WORDS[row % 5]
        if row % 2:
            turns = [{"from": "human", "value": "<image>" * len(images) + words}]
            turns.append({"from": "gpt", "value": WORDS[(row + 1) % 5] * (1 + row % 4)})
            lines.append({"image": images, "conversations": turns})
        else:
            content: list[Any] = [{"type": "image", "image": name} for name in images]
            content += [{"type": "audio", "path": f"{row % 3}.wav"}] if row % 4 == 0 else []
            content += [{"type": "text", "text": words}]
            turns = [{"role": "user", "content": content}, {"role": "assistant", "content": WORDS[(row + 2) % 5]}]
            lines.append({"messages": turns})
    path = folder / "train.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


class Learner(L.LightningModule):
    """Learns in float64 with the loss of the language model; keeps the tokens of each batch."""

    def __init__(self, family: str = "llama") -> None:
        super().__init__()
        self.model = composed(family).double()
        self.seen: list[np.ndarray] = []

    def on_after_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
        self.seen.append(batch["input_ids"].numpy(force=True).copy())
        return {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model.generate(**batch, max_new_tokens=3, do_sample=False, pad_token_id=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)
