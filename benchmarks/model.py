"""The model that is trained in the benchmarks: images and tokens in, next-token loss out, plain PyTorch.

Shapes: B batch, P patches of an image, C values of a patch, S tokens, D width.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from gpu.towers import Encoder, Layer, Size, next_token_loss
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_mm5d import Modality

VOCABULARY, IMAGE, PATCHES, PATCH_WIDTH, TOKENS, WIDTH, HEADS = 512, 0, 32, 48, 96, 256, 8
VISION = Modality(module="encoder", boundary="encoder")
LANGUAGE = Modality(module="decoder")


class Decoder(nn.Module):
    """Features [B, P, D], in the places where tokens [B, S] are `IMAGE` -> logits [B, S, VOCABULARY]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(size, causal=True) for _ in range(size.language)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens).masked_scatter((tokens == IMAGE).unsqueeze(-1), features)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """What all sides train with."""
    return torch.optim.AdamW(parameters, lr=1e-3)


class VisionLanguage(L.LightningModule):
    """The ordinary module around an encoder and a decoder; the same weights in every process."""

    def __init__(self, vision_layers: int, language_layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        size = Size(
            width=WIDTH,
            heads=HEADS,
            vision=vision_layers,
            language=language_layers,
            patches=PATCHES,
            tokens=TOKENS,
            vocabulary=VOCABULARY,
            values=PATCH_WIDTH,
        )
        self.encoder, self.decoder = Encoder(size), Decoder(size)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return next_token_loss(self.decoder(self.encoder(batch["images"]), batch["tokens"]), batch["tokens"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.parameters())


class Samples(Dataset):
    """As many random samples as asked for; equal seeds give equal samples."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._images = torch.randn(count, PATCHES, PATCH_WIDTH, generator=generator)
        self._tokens = torch.randint(1, VOCABULARY, (count, TOKENS), generator=generator)
        self._tokens[:, :PATCHES] = IMAGE

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"images": self._images[index], "tokens": self._tokens[index]}


def loader(steps: int, batch_size: int, seed: int = 0) -> DataLoader:
    """`steps` batches of `batch_size` samples."""
    return DataLoader(Samples(steps * batch_size, seed), batch_size=batch_size)
