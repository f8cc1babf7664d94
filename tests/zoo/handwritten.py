"""Models written by hand in plain PyTorch: what a strategy must handle without knowing any family.

`handwritten` has one image encoder, `handwritten_two` an image and an audio encoder behind methods,
`handwritten_dual` two towers under a contrastive loss (text first), and `handwritten_flat` keeps its parts
on the LightningModule itself. They refuse nothing: inputs come from this folder.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import FIRST_TEXT_ID, LABELS, VOCABULARY, Batch, Case, Items, TinyModule, text_batch

WIDTH = 32
PATCHES, PATCH_WIDTH = 4, 12  # an image is [PATCHES, PATCH_WIDTH], and so is an audio clip
IMAGE = Items(placeholder=1, length=PATCHES, rows={"images": 1})
AUDIO = Items(placeholder=2, length=PATCHES, rows={"audio": 1})


class Layer(nn.Module):
    """Pre-norm transformer layer on hidden states [B, S, D]."""

    def __init__(self, *, causal: bool, heads: int = 4) -> None:
        super().__init__()
        self.causal, self.heads = causal, heads
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(hidden)).unflatten(-1, (3, self.heads, -1)).unbind(dim=-3)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=self.causal
        )
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(-2))
        return hidden + self.down(F.gelu(self.up(self.mlp_norm(hidden))))


class Encoder(nn.Module):
    """Patches [I, PATCHES, PATCH_WIDTH] -> features [I, PATCHES, D]."""

    def __init__(self, *, layers: int = 3) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH_WIDTH, WIDTH)
        self.layers = nn.ModuleList([Layer(causal=False) for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.projector = nn.Linear(WIDTH, WIDTH)

    def forward(self, patches: Tensor) -> Tensor:
        hidden = self.patches(patches)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.projector(self.norm(hidden))


class Decoder(nn.Module):
    """Tokens [B, S], and the features that replace each placeholder id -> logits [B, S, VOCABULARY]."""

    def __init__(self, *, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(causal=True) for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, features: dict[int, Tensor]) -> Tensor:
        hidden = self.embedding(tokens)
        for placeholder, values in features.items():
            hidden = hidden.masked_scatter((tokens == placeholder).unsqueeze(-1), values)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class OneEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.decoder = Decoder()

    def forward(self, tokens: Tensor, labels: Tensor, images: Tensor | None = None) -> SimpleNamespace:
        features = {} if images is None else {IMAGE.placeholder: self.encoder(images)}
        return SimpleNamespace(loss=next_token_loss(self.decoder(tokens, features), labels))


class TwoEncoders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image_encoder = Encoder(layers=2)
        self.image_scale = nn.Linear(WIDTH, WIDTH, bias=False)
        self.audio_encoder = Encoder(layers=2)
        self.decoder = Decoder()

    def encode_images(self, images: Tensor) -> Tensor:
        return self.image_scale(self.image_encoder(images))

    def forward(self, images: Tensor, audio: Tensor, tokens: Tensor, labels: Tensor) -> SimpleNamespace:
        features = {
            IMAGE.placeholder: self.encode_images(images),
            AUDIO.placeholder: self.audio_encoder(audio),
        }
        return SimpleNamespace(loss=next_token_loss(self.decoder(tokens, features), labels))


class TextTower(nn.Module):
    """Tokens [B, S] -> one feature per sample [B, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(causal=True) for _ in range(4)])
        self.projector = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.projector(hidden[:, -1])


class TwoTowers(nn.Module):
    """Contrastive: the loss of a sample depends on all samples of the microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.text = TextTower()
        self.vision = Encoder()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor, tokens: Tensor) -> SimpleNamespace:
        text = F.normalize(self.text(tokens), dim=-1)
        vision = F.normalize(self.vision(images).mean(dim=1), dim=-1)
        logits = self.scale.exp() * text @ vision.T
        pairs = torch.arange(len(tokens), device=tokens.device)
        return SimpleNamespace(loss=(F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2)


class FlatModule(L.LightningModule):
    """No inner model: the LightningModule owns the parts and its step calls them one by one."""

    def __init__(self, *, lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr
        self.encoder = Encoder()
        self.decoder = Decoder()

    def loss(self, batch: Batch) -> Tensor:
        features = {IMAGE.placeholder: self.encoder(batch["images"])} if "images" in batch else {}
        return next_token_loss(self.decoder(batch["tokens"], features), batch["labels"])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def image_batch(counts: list[int]) -> Batch:
    text = text_batch(counts, length=20, items=IMAGE)
    batch = {"tokens": text["input_ids"], "labels": text["labels"]}
    if sum(counts):
        batch["images"] = torch.randn(sum(counts), PATCHES, PATCH_WIDTH)
    return batch


def image_and_audio_batch(counts: list[int]) -> Batch:
    batch = image_batch(counts)
    clip = slice(PATCHES + 3, 2 * PATCHES + 3)
    assert clip.stop <= batch["tokens"].shape[1] - LABELS
    batch["tokens"][:, clip] = AUDIO.placeholder
    return batch | {"audio": torch.randn(len(counts), PATCHES, PATCH_WIDTH)}


def pair_batch(counts: list[int]) -> Batch:
    return {
        "tokens": torch.randint(FIRST_TEXT_ID, VOCABULARY, (len(counts), 10)),
        "images": torch.randn(len(counts), PATCHES, PATCH_WIDTH),
    }


def one_encoder_case(name: str, prefix: str) -> dict[str, Any]:
    encoder, decoder = f"{prefix}encoder", f"{prefix}decoder"
    tower = tuple(f"{encoder}.{part}" for part in ("patches", "layers", "norm"))
    return {
        "name": name,
        "make_batch": image_batch,
        "modalities": ("vision", "language"),
        "layers": {"vision": (f"{encoder}.layers",), "language": (f"{decoder}.layers",)},
        "boundaries": {"vision": encoder},
        "modality_paths": {
            "vision": {"module": encoder, "boundary": encoder},
            "language": {"module": decoder},
        },
        "frozen": {
            "none": (),
            "encoder": tower,
            "projector_only": (*tower, decoder),
            "language": (decoder,),
        },
        "items": (IMAGE,),
        "image_counts": (0, 1, 2),
        "tokens_key": "tokens",
    }


CASES = [
    Case(make_module=lambda: TinyModule(OneEncoder()), **one_encoder_case("handwritten", "model.")),
    Case(make_module=FlatModule, **one_encoder_case("handwritten_flat", "")),
    Case(
        name="handwritten_two",
        make_module=lambda: TinyModule(TwoEncoders()),
        make_batch=image_and_audio_batch,
        modalities=("vision", "audio", "language"),
        layers={
            "vision": ("model.image_encoder.layers",),
            "audio": ("model.audio_encoder.layers",),
            "language": ("model.decoder.layers",),
        },
        boundaries={"vision": "model.encode_images", "audio": "model.audio_encoder"},
        modality_paths={
            "vision": {
                "module": ["model.image_encoder", "model.image_scale"],
                "boundary": "model.encode_images",
            },
            "audio": {"module": "model.audio_encoder", "boundary": "model.audio_encoder"},
            "language": {"module": "model.decoder"},
        },
        frozen={
            "none": (),
            "encoder": ("model.image_encoder", "model.audio_encoder"),
            "projector_only": ("model.image_encoder", "model.audio_encoder", "model.decoder"),
            "language": ("model.decoder",),
        },
        tokens_key="tokens",
    ),
    Case(
        name="handwritten_dual",
        make_module=lambda: TinyModule(TwoTowers()),
        make_batch=pair_batch,
        modalities=("vision", "language"),
        layers={"vision": ("model.vision.layers",), "language": ("model.text.layers",)},
        boundaries={"vision": "model.vision", "language": "model.text"},
        modality_paths={
            "vision": {"module": "model.vision", "boundary": "model.vision"},
            "language": {"module": "model.text", "boundary": "model.text"},
        },
        frozen={
            "none": (),
            "encoder": ("model.vision",),
            "projector_only": (
                *(f"model.vision.{part}" for part in ("patches", "layers", "norm")),
                *(f"model.text.{part}" for part in ("embedding", "layers")),
                "model.scale",
            ),
            "language": ("model.text",),
        },
        tokens_key="tokens",
        mean_of_samples=False,
    ),
]


class OwnLayers(L.LightningModule):
    """A language model around two layers of one's own."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.layers = nn.ModuleList([make() for _ in range(2)])
            self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        hidden = self.embedding(batch["input_ids"])
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)
