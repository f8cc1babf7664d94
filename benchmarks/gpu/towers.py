"""A model of two towers for the checks: images and tokens in, next-token loss out, plain PyTorch of any size.

Nothing in it depends on data, so that it never makes the host wait for a GPU.

Shapes: B samples, P patches of an image, C values of a patch, S tokens, D width.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

TIMEOUT = timedelta(seconds=90)
"""of an operation between ranks: one that hangs ends within the limit of its check"""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of the towers; `vision` and `language` are their layers."""

    width: int
    heads: int
    vision: int
    language: int
    patches: int
    tokens: int
    vocabulary: int
    values: int = 48


SMALL = Size(width=64, heads=4, vision=2, language=2, patches=16, tokens=32, vocabulary=128)


class Layer(nn.Module):
    """Pre-norm transformer layer on hidden states [B, P or S, D]."""

    def __init__(self, size: Size, causal: bool) -> None:
        super().__init__()
        width = size.width
        self.causal, self.heads = causal, size.heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(hidden)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(-2))
        return hidden + self.down(F.gelu(self.up(self.mlp_norm(hidden))))


class Encoder(nn.Module):
    """Patches [B, P, C] -> features [B, P, D]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.patches = nn.Linear(size.values, size.width)
        self.layers = nn.ModuleList([Layer(size, causal=False) for _ in range(size.vision)])
        self.projector = nn.Linear(size.width, size.width)

    def forward(self, patches: Tensor) -> Tensor:
        hidden = self.patches(patches)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.projector(hidden)


class Decoder(nn.Module):
    """Features [B, P, D] in front of tokens [B, S] -> logits of the tokens [B, S, vocabulary]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.patches = size.patches
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList([Layer(size, causal=True) for _ in range(size.language)])
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        hidden = torch.cat([features, self.embedding(tokens)], dim=1)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden[:, self.patches :]))


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean over all tokens but the first of each sample."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Towers(L.LightningModule):
    """The ordinary module around encoder and decoder; the same weights in every process."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = Encoder(size), Decoder(size)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return next_token_loss(self.decoder(self.encoder(batch["images"]), batch["tokens"]), batch["tokens"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def batches(size: Size, steps: int, samples: int) -> list[dict[str, Tensor]]:
    """Return a batch of random samples for each step."""
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "images": torch.randn(samples, size.patches, size.values, generator=generator),
            "tokens": torch.randint(size.vocabulary, (samples, size.tokens), generator=generator),
        }
        for _ in range(steps)
    ]


QUIET = {
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}


class Losses(Callback):
    """Keeps the loss of every step, on the device until the end."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(outputs["loss"].detach())


def fit(
    module: L.LightningModule,
    data: list[Any],
    strategy: Any,
    accelerator: Any,
    *callbacks: Callback,
    devices: int = 1,
    **options: Any,
) -> list[float]:
    """Train `module` on batches given whole, with nothing else switched on; return the losses.

    Args:
        module: to train.
        data: its batches, one a step.
        strategy: of the trainer.
        accelerator: of the trainer.
        callbacks: of the trainer.
        devices: of the trainer.
        options: more of the trainer, instead of `QUIET`.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    losses = Losses()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            accelerator=accelerator,
            devices=devices,
            strategy=strategy,
            callbacks=[losses, *callbacks],
            **{**QUIET, **options},
        )
        trainer.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return [float(value) for value in losses.values]
