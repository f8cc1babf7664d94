"""Samples with 0 to 30 JPEG images and a WAV file each, on four ranks, which decode what they read, or everything.

Files of 256 x 256 pixels and a second of sound are written once and decoded in each step, with Pillow and the standard
library. The models are small, so that decoding is most of a step. Sides take turns; what each rank has decoded is
counted, with the processor's seconds that its threads took for it, and the highest memory of its process.
"""

from __future__ import annotations

import resource
import tempfile
import time
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from turns import Side, Turns, fit, median_ratio, milliseconds, race, row
from varying_images import TOKENS, WIDTH, Album, image_counts

from lightning_mm5d import LazyTensor, Modality, MultimodalStrategy

STEPS, BATCH, MICROBATCHES, PIXELS, FILES, SOUND = 16, 32, 4, 64, 64, 16000
DECODED = {"images": 0.0, "sounds": 0.0, "seconds": 0.0}


@contextmanager
def counted(kind: str) -> Iterator[None]:
    """Count a file and what this thread computes meanwhile."""
    began = time.thread_time()
    yield
    DECODED[kind] += 1
    DECODED["seconds"] += time.thread_time() - began


def decode_image(path: Path) -> Tensor:
    """[3, PIXELS, PIXELS]"""
    with counted("images"), Image.open(path) as image:
        small = image.convert("RGB").resize((PIXELS, PIXELS))
        return torch.from_numpy(np.array(small)).permute(2, 0, 1).float() / 255


def decode_sound(path: Path) -> Tensor:
    """[SOUND]"""
    with counted("sounds"), wave.open(str(path)) as sound:
        return torch.frombuffer(bytearray(sound.readframes(SOUND)), dtype=torch.int16).float() / 2**15


class Talking(Album):
    """Texts with any number of images and a piece of sound."""

    def __init__(self) -> None:
        vision = nn.Sequential(nn.Flatten(), nn.Linear(3 * PIXELS**2, WIDTH))
        super().__init__(vision, nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))))
        self.audio = nn.Sequential(nn.Linear(SOUND, WIDTH))

    def embedded(self, batch: dict[str, Any]) -> Tensor:
        """[B, S, D], with the sound of each sample."""
        return super().embedded(batch) + self.audio(batch["sounds"])[:, None]


class Albums(Dataset):
    """The same samples in every process."""

    def __init__(self, folder: Path, *, lazy: bool) -> None:
        self.counts, self.folder, self.lazy = image_counts(BATCH * STEPS), folder, lazy

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        images = [
            partial(decode_image, self.folder / f"{(index + offset) % FILES}.jpg")
            for offset in range(self.counts[index])
        ]
        sound = partial(decode_sound, self.folder / f"{index % FILES}.wav")
        if self.lazy:
            return {
                "images": [LazyTensor(image, (3, PIXELS, PIXELS)) for image in images],
                "sound": LazyTensor(sound, (SOUND,)),
            }
        return {"images": [image() for image in images], "sound": sound()}


def _collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    images = [image for sample in samples for image in sample["images"]]
    return {
        "pixel_values": torch.stack(images) if images else torch.empty(0, 3, PIXELS, PIXELS),
        "image_items": torch.tensor([len(sample["images"]) for sample in samples]),
        "sounds": torch.stack([sample["sound"] for sample in samples]),
        "inputs_embeds": torch.ones(len(samples), TOKENS, WIDTH),
    }


def _train(turns: Turns, rank: int, *, folder: Path, layout: str, lazy: bool) -> tuple[int, int, int, int]:
    modalities = {
        "vision": Modality(module="vision", boundary="vision", dp_size=2 if layout == "vision dp 2" else 1),
        "audio": Modality(module="audio", boundary="audio"),
        "language": Modality(module="language", pp_size=1 if layout == "vision dp 2" else 2),
    }
    strategy = MultimodalStrategy(modalities, batching={"num_microbatches": MICROBATCHES, "balance": True})
    fit(Talking(), DataLoader(Albums(folder, lazy=lazy), batch_size=BATCH, collate_fn=_collate), strategy, 4, turns)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return round(DECODED["images"]), round(DECODED["sounds"]), round(DECODED["seconds"] * 1000), memory


def measure(folder: Path, layout: str) -> None:
    """Print the row of one layout, and what each rank has decoded."""
    lazily, plainly = (Side(4, partial(_train, folder=folder, layout=layout, lazy=lazy)) for lazy in (True, False))
    lazy, plain = race(lazily, plainly, STEPS)
    row(
        f"{BATCH} samples with 0 to 30 JPEG images and a WAV file, 4 ranks ({layout}): `LazyTensor` / tensors",
        median_ratio(lazy, plain),
        "0.8",
        f"{milliseconds(lazy)} / {milliseconds(plain)}",
    )
    for name, raced in (("LazyTensor", lazy), ("tensors", plain)):
        print(f"{name}: images, sounds, ms of decoding, peak MiB of each rank:", *raced.results)


def main() -> None:
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for index in range(FILES):
            noise = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(noise).resize((256, 256)).save(folder / f"{index}.jpg")
            with wave.open(str(folder / f"{index}.wav"), "wb") as sound:
                sound.setnchannels(1)
                sound.setsampwidth(2)
                sound.setframerate(SOUND)
                sound.writeframes(random.integers(-9999, 9999, SOUND, dtype=np.int16).tobytes())
        measure(folder, "language pp 2")
        measure(folder, "vision dp 2")


if __name__ == "__main__":
    main()
