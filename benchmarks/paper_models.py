"""Costs of the multimodal models of the comparison, from published shapes alone.

A forward is counted in multiply-adds: every matrix that a token passes, scores and values of attention (half of them
where it is causal), and the head. Norms, embeddings, biases and softmax are left out. The shapes are those that the
paper's authors measure with in their public repository (github.com/cornstarch-org/Cornstarch, `cornstarch/testing`):
the published models, and Whisper's encoder scaled up where none is large enough.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_mm5d.partition import Unit


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A stack of transformer layers.

    Args:
        layers: how many.
        width: of the hidden state.
        mlp: width inside the MLP.
        heads, kv_heads, head: of attention, and the width of one.
        gated: whether the MLP has three matrices instead of two.
        vocabulary: of the embedding, which is not tied to the head; 0 for encoders.
    """

    layers: int
    width: int
    mlp: int
    heads: int
    kv_heads: int
    head: int
    gated: bool = False
    vocabulary: int = 0

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        attention = 2 * self.width * self.head * (self.heads + self.kv_heads)
        return attention + (3 if self.gated else 2) * self.width * self.mlp

    def forward(self, tokens: int) -> float:
        """Multiply-adds of one layer's forward over a sequence."""
        scores = 2 * tokens * tokens * self.heads * self.head
        return float(tokens * self.layer + (scores / 2 if self.vocabulary else scores))


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """An encoder and the number of tokens that it makes of an input.

    Args:
        shape: its layers.
        tokens: of one of the pieces that an input is cut into.
        pieces: how many of them; attention stays within one.
        merged: how many neighbouring tokens become one on the way to the language model.
    """

    shape: Shape
    tokens: int
    pieces: int
    merged: int

    def features(self, inputs: int) -> int:
        """Tokens that the language model gets."""
        return inputs * self.pieces * self.tokens // self.merged


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a microbatch is: one text, with images of 1280 x 720 and clips of 30 s in it."""

    text: int = 1024
    images: int = 1
    clips: int = 1


LANGUAGE = {
    # Llama-3.1-8B, Gemma-2-27B, Qwen2-72B
    "small": Shape(layers=32, width=4096, mlp=14336, heads=32, kv_heads=8, head=128, gated=True, vocabulary=128256),
    "medium": Shape(layers=46, width=4608, mlp=36864, heads=32, kv_heads=16, head=128, gated=True, vocabulary=256000),
    "large": Shape(layers=80, width=8192, mlp=29568, heads=64, kv_heads=8, head=128, gated=True, vocabulary=152064),
}
VISION = {
    # Pixtral's 0.4B: patches of 16, the longer side scaled to 1024; 2 x 2 patches to one, as in all three
    "small": Encoder(
        shape=Shape(layers=24, width=1024, mlp=4096, heads=16, kv_heads=16, head=64, gated=True),
        tokens=2304,
        pieces=1,
        merged=4,
    ),
    # InternViT-6B: tiles of 448, patches of 14
    "medium": Encoder(
        shape=Shape(layers=45, width=3200, mlp=12800, heads=25, kv_heads=25, head=128), tokens=1024, pieces=2, merged=4
    ),
    # ViT-22B: tiles of 384, patches of 16
    "large": Encoder(
        shape=Shape(layers=48, width=6144, mlp=24576, heads=48, kv_heads=48, head=128), tokens=576, pieces=3, merged=4
    ),
}
AUDIO = {
    # Whisper medium (0.3B), and scaled up to 5B and 20B; frames of 20 ms, pairs of which become one
    "small": Encoder(
        shape=Shape(layers=24, width=1024, mlp=4096, heads=16, kv_heads=16, head=64), tokens=1500, pieces=1, merged=2
    ),
    "medium": Encoder(
        shape=Shape(layers=64, width=2560, mlp=10240, heads=32, kv_heads=32, head=80), tokens=1500, pieces=1, merged=2
    ),
    "large": Encoder(
        shape=Shape(layers=64, width=5120, mlp=20480, heads=32, kv_heads=32, head=160), tokens=1500, pieces=1, merged=2
    ),
}
SCALES = tuple(LANGUAGE)


@dataclass(frozen=True)
class Model:
    """A model as rows of units, one row a modality, the language model last.

    Args:
        rows: for each modality the units before the layers, each layer, and the projector or head after them. A unit's
            one parameter stands for all of it, and costs as much as its forward: so a backward takes two forwards.
        sizes: elements of these parameters.
        trained: those that are.
        message: elements of the hidden state that crosses from one stage of the language model to the next.
    """

    rows: dict[str, list[Unit]]
    sizes: dict[str, int]
    trained: frozenset[str]
    message: int

    @property
    def everything(self) -> frozenset[str]:
        """All parameters."""
        return frozenset(self.sizes)


def model(
    encoders: tuple[str, ...],
    scale: str,
    sample: Sample,
    *,
    frozen: bool,
    recomputed: bool = False,
    encoder_scale: str | None = None,
) -> Model:
    """Return a language model with encoders before it.

    Args:
        encoders: of ``vision`` and ``audio``.
        scale: of `SCALES`.
        sample: what a microbatch is.
        frozen: whether only the projectors are trained, else everything.
        recomputed: whether layers run their forward again in backward.
        encoder_scale: of the encoders, where it is another one.
    """
    language = LANGUAGE[scale]
    rows: dict[str, list[Unit]] = {}
    sizes: dict[str, int] = {}
    trained: set[str] = set()
    tokens = sample.text
    for name in encoders:
        table, inputs = {"vision": (VISION, sample.images), "audio": (AUDIO, sample.clips)}[name]
        encoder = table[encoder_scale or scale]
        features = encoder.features(inputs)
        tokens += features
        projector = encoder.merged * encoder.shape.width * language.width + language.width**2
        each = inputs * encoder.pieces * encoder.shape.forward(encoder.tokens)
        rows[name] = _row(name, encoder.shape, each, features * projector, recomputed)
        sizes |= _sizes(name, encoder.shape, projector)
        trained.add(f"{name}.projector")
    head = language.vocabulary * language.width
    rows["language"] = _row("language", language, language.forward(tokens), tokens * head, recomputed)
    sizes |= _sizes("language", language, head)
    return Model(rows, sizes, frozenset(trained) if frozen else frozenset(sizes), tokens * language.width)


def _row(name: str, shape: Shape, layer: float, last: float, recomputed: bool) -> list[Unit]:
    first = Unit(0.0, {f"{name}.embedding": 0.0} if shape.vocabulary else {})
    layers = [Unit(layer, {f"{name}.{index}": layer}, recomputed) for index in range(shape.layers)]
    return [first, *layers, Unit(last, {f"{name}.{'head' if shape.vocabulary else 'projector'}": last})]


def _sizes(name: str, shape: Shape, last: int) -> dict[str, int]:
    layers = {f"{name}.{index}": shape.layer for index in range(shape.layers)}
    if shape.vocabulary:
        return {f"{name}.embedding": last} | layers | {f"{name}.head": last}
    return layers | {f"{name}.projector": last}
