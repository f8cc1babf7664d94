"""Which way does the square move? Clips as MP4 files, an encoder of frames on one rank, what reads them on another.

    pip install -e ".[video]"
    python examples/video/train.py runs/video
    python examples/video/train.py runs/video --devices 1

The first lines write clips of a square that moves left, right, up or down, in noise. A clip is decoded where its frames
are encoded, while the step before runs; the encoder computes 16 frames at a time and again in its backward, so that
longer clips take no more memory. The last line says how many of the held-out clips are answered right. A clip that runs
backwards is another answer, and chance is 25 %.

Shapes: B clips, F frames of a clip, T patches of a frame, D width.
"""

import argparse
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import av
import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import SiglipVisionConfig, SiglipVisionModel

from lightning_mm5d import LazyTensor, Modality, MultimodalStrategy

TRAINED, HELD_OUT, FRAMES, PIXELS, PATCH, SIDE, WIDTH = 256, 128, 8, 32, 8, 8, 32
WAYS = ((-1, 0), (1, 0), (0, -1), (0, 1))


def write_clip(path: Path, number: int) -> None:
    """A clip whose way is the rest of its number by four."""
    generator, step = np.random.default_rng(number), 2 * np.array(WAYS[number % 4])
    start = generator.integers(0, PIXELS - SIDE - 2 * FRAMES, 2) - FRAMES * step * (step < 0)
    with av.open(str(path), "w") as file:
        stream: Any = file.add_stream("mpeg4", rate=FRAMES)
        stream.width, stream.height, stream.pix_fmt = PIXELS, PIXELS, "yuv420p"
        for index in range(FRAMES):
            image = generator.integers(0, 60, (PIXELS, PIXELS, 3), np.uint8)
            left, top = start + index * step
            image[top : top + SIDE, left : left + SIDE] = 220
            file.mux(stream.encode(av.VideoFrame.from_ndarray(image, "rgb24")))
        file.mux(stream.encode())


def decode(path: Path) -> Tensor:
    """The frames of a clip, (F, 3, PIXELS, PIXELS), -1 to 1."""
    with av.open(str(path)) as file:
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).float() / 127.5 - 1


class Clips(Dataset):
    """The clips of some numbers; each is decoded by the ranks that read it."""

    def __init__(self, folder: Path, numbers: range) -> None:
        self.folder, self.numbers = folder, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = self.numbers[index]
        load = partial(decode, self.folder / f"{number}.mp4")
        return {"clips": LazyTensor(load, (FRAMES, 3, PIXELS, PIXELS)), "labels": number % 4}


class Reader(nn.Module):
    """Features of frames, (B, F, T, D), to ways, (B, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.frame = nn.Sequential(nn.Flatten(2), nn.Linear((PIXELS // PATCH) ** 2 * WIDTH, WIDTH), nn.GELU())
        self.head = nn.Sequential(nn.Flatten(1), nn.Linear(FRAMES * WIDTH, len(WAYS)))

    def forward(self, frames: Tensor) -> Tensor:
        return self.head(self.frame(frames))


class Directions(L.LightningModule):
    """An ordinary classifier of clips."""

    def __init__(self) -> None:
        super().__init__()
        config = SiglipVisionConfig(
            hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2, num_attention_heads=2,
            image_size=PIXELS, patch_size=PATCH, vision_use_head=False,
        )  # fmt: skip
        self.tower, self.reader = SiglipVisionModel(config), Reader()

    def forward(self, clips: Tensor) -> Tensor:
        """Ways, (B, 4), of clips, (B, F, 3, PIXELS, PIXELS)."""
        frames = self.tower(pixel_values=clips.flatten(0, 1)).last_hidden_state
        return self.reader(frames.unflatten(0, (-1, FRAMES)))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch["clips"]), batch["labels"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        right = (self(batch["clips"]).argmax(dim=1) == batch["labels"]).float().mean()
        self.log("right", right, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn from clips which way a square moves.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, choices=(1, 2), default=2)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for number in range(TRAINED + HELD_OUT):
        if not (path := options.folder / f"{number}.mp4").exists():
            write_clip(path, number)

    warnings.filterwarnings("ignore", ".*does not have many workers")
    L.seed_everything(1)
    vision = Modality(module="tower", boundary="tower", memory={"activation_checkpointing": {"items": 16}})
    strategy = MultimodalStrategy({"vision": vision, "language": Modality()}, batching={"num_microbatches": 2})
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy="auto" if options.devices == 1 else strategy,
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    loaders = (
        DataLoader(Clips(options.folder, range(TRAINED)), batch_size=32, shuffle=True),
        DataLoader(Clips(options.folder, range(TRAINED, TRAINED + HELD_OUT)), batch_size=32),
    )
    trainer.fit(Directions(), *loaders)
    if trainer.is_global_zero:
        print(
            f"ranks {trainer.world_size}: {float(trainer.callback_metrics['right']):.1%} of {HELD_OUT} clips are right"
        )


if __name__ == "__main__":
    main()
