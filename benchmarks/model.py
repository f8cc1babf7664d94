"""The model that is trained in the benchmarks: images and tokens in, next-token loss out, plain PyTorch.

Shapes: B batch, P patches of an image, C values of a patch, S tokens, D width.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_mm5d import Modality

VOCABULARY, IMAGE, PATCHES, PATCH_WIDTH, TOKENS, WIDTH, HEADS = 512, 0, 32, 48, 96, 256, 8
VISION = Modality(module="encoder", boundary="encoder")
LANGUAGE = Modality(module="decoder")


class Layer(nn.Module):
    """Pre-norm transformer layer on hidden states [B, P or S, D]."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(hidden)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(-2))
        return hidden + self.down(F.gelu(self.up(self.mlp_norm(hidden))))


class Encoder(nn.Module):
    """Patches [B, P, C] -> features [B, P, D]."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH_WIDTH, WIDTH)
        self.layers = nn.ModuleList([Layer(causal=False) for _ in range(layers)])
        self.projector = nn.Linear(WIDTH, WIDTH)

    def forward(self, patches: Tensor) -> Tensor:
        hidden = self.patches(patches)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.projector(hidden)


class Decoder(nn.Module):
    """Features [B, P, D], in the places where tokens [B, S] are `IMAGE` -> logits [B, S, VOCABULARY]."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(causal=True) for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens).masked_scatter((tokens == IMAGE).unsqueeze(-1), features)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean over all tokens but the first of each sample."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """What all sides train with."""
    return torch.optim.AdamW(parameters, lr=1e-3)


class VisionLanguage(L.LightningModule):
    """The ordinary module around an encoder and a decoder; the same weights in every process."""

    def __init__(self, vision_layers: int, language_layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = Encoder(vision_layers)
        self.decoder = Decoder(language_layers)
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
