"""A captioner as somebody wrote it for one device: plain PyTorch layers in an ordinary LightningModule.

An image shows four bars of various heights, the caption spells the heights from left to right. Nothing here
knows of ranks: `train.py` runs this file on 1, 2, 4 and 8 of them. The projections carry customary names (`q_proj`,
`fc1`, ...), which is all that tensor parallelism needs to know of them.

Shapes: B batch, S tokens (queries), P patches, D width, H heads.
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, HEADS, VOCABULARY, PIXELS, PATCH, LENGTH = 64, 4, 12, 16, 4, 5  # tokens: 10 heights, begin, end
BEGIN, END = 10, 11


class Attention(nn.Module):
    """Self-attention (B, S, D) -> (B, S, D)."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal, self.num_heads = is_causal, HEADS
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        q, k, v = (
            projection(hidden).view(batch, length, self.num_heads, -1).transpose(1, 2)  # (B, H, S, D / H)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """(B, S, D) -> (B, S, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(hidden)))


class Layer(nn.Module):
    """A transformer layer (B, S, D) -> (B, S, D)."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention(is_causal)
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm1(hidden))
        return hidden + self.mlp(self.norm2(hidden))


class ImageEncoder(nn.Module):
    """Images (B, 1, PIXELS, PIXELS) -> one feature a patch (B, P, D)."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.positions = nn.Parameter(torch.randn((PIXELS // PATCH) ** 2, WIDTH) * 0.02)
        self.layers = nn.ModuleList(Layer(is_causal=False) for _ in range(layers))

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class TextDecoder(nn.Module):
    """Patches (B, P, D) and tokens (B, S) -> logits (B, S, VOCABULARY) of the tokens that follow."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.layers = nn.ModuleList(Layer(is_causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, patches: Tensor, tokens: Tensor) -> Tensor:
        hidden = torch.cat([patches, self.embedding(tokens) + self.positions], dim=1)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden[:, patches.shape[1] :]))


class Captioner(L.LightningModule):
    """Trains the encoder and the decoder to caption bars; logs the loss of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = ImageEncoder(layers=2)
        self.decoder = TextDecoder(layers=6)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The mean cross entropy of images and captions (B, LENGTH + 1)."""
        images, captions = batch
        logits = self.decoder(self.encoder(images), captions[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), captions[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over everything."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def bars(samples: int, batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    """Images (B, 1, PIXELS, PIXELS) of four bars with their captions (B, LENGTH + 1): begin, four heights, end."""
    generator = torch.Generator().manual_seed(0)
    heights = torch.randint(10, (samples, 4), generator=generator)
    rows = torch.arange(PIXELS).view(1, PIXELS, 1)
    images = (rows < heights.repeat_interleave(PIXELS // 4, dim=1).unsqueeze(1)).float().unsqueeze(1)
    ends = torch.full((samples, 1), BEGIN), torch.full((samples, 1), END)
    return DataLoader(TensorDataset(images, torch.cat([ends[0], heights, ends[1]], dim=1)), batch_size=batch_size)
