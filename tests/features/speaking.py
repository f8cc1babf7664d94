"""Modules that speak or draw after their language model, for the tests of outputs as modalities."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from features.toys import CLASSES, WIDTH, Encoder, Layer, Toy

CODES = 7


class Thinker(nn.Module):
    """Tokens [B, S] and images [B, PIXELS] -> a text loss, logits [B, CLASSES] and hidden states [B, S, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = Encoder()
        self.embedding = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, images: Tensor, label: Tensor) -> dict[str, Any]:
        hidden = self.embedding(tokens) + self.visual(images).unsqueeze(1)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.norm(hidden)
        logits = self.lm_head(hidden.mean(dim=1))
        return {"loss": F.cross_entropy(logits, label), "logits": logits, "hidden": hidden, "cache": object()}


class Talker(nn.Module):
    """Hidden states [B, S, D] -> logits of codes [B, S, CODES]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.codec_head = nn.Linear(WIDTH, CODES)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.codec_head(hidden)


class Omni(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.thinker = Thinker()
        self.talker = Talker()


class Speaking(Toy):
    """Two losses that are one number, with a projection of the step's own between the two models."""

    def __init__(self, lr: float = 0.1, dropout: float = 0.0) -> None:
        super().__init__(lr, dropout)
        del self.encoder, self.decoder
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.model = Omni()
            self.bridge = nn.Linear(WIDTH, WIDTH)
        self.double()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        out = self.model.thinker(batch["tokens"], batch["images"], batch["label"])
        codes = self.model.talker(self.bridge(out["hidden"]))
        spoken = F.cross_entropy(codes.flatten(0, 1), batch["tokens"].flatten() % CODES)
        self.log("text_loss", out["loss"], sync_dist=True)
        return out["loss"] + 0.5 * spoken

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss


class Drawing(Speaking):
    """A third loss: a diffusion head tells the noise that the step drew, of hidden states and a time."""

    def __init__(self, lr: float = 0.1, dropout: float = 0.0) -> None:
        super().__init__(lr, dropout)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.model.painter = Talker()
            self.time = nn.Embedding(4, WIDTH)
        for part in self.model.modules():
            if isinstance(part, nn.Dropout):
                part.p = dropout
        self.double()
        self.noises: list[float] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        out = self.model.thinker(batch["tokens"], batch["images"], batch["label"])
        codes = self.model.talker(self.bridge(out["hidden"]))
        spoken = F.cross_entropy(codes.flatten(0, 1), batch["tokens"].flatten() % CODES)
        device = out["hidden"].device
        noise = torch.randn(out["hidden"].shape, dtype=torch.float64, device=device)
        time = torch.randint(4, (len(noise),), device=device)
        self.noises.append(float(noise.sum()))
        drawn = self.model.painter(out["hidden"] + noise * (1 + time[:, None, None]) + self.time(time)[:, None])
        return out["loss"] + 0.5 * spoken + 0.25 * (drawn - noise[..., :CODES]).square().mean()
