"""Small composed models with an ordinary LightningModule around each, and batches with unlike numbers of items.

Everything is a function of a name and a seed. The loss is computed in the default dtype, and every sample has as many
labels as any other, so that the mean over microbatches is the mean over the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PixtralVisionConfig,
    PixtralVisionModel,
    WhisperConfig,
    WhisperModel,
)

from lightning_mm5d import ModalityEncoder, MultimodalModel, ProjectorConfig

VOCABULARY, LENGTH, LABELS, WIDTH = 64, 48, 4, 16
IDS = {"vision": 1, "audio": 2, "depth": 3}
FIRST_TEXT_ID = 8
SPECIAL: dict[str, Any] = {"bos_token_id": 4, "eos_token_id": 5, "pad_token_id": 6}
SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def gpt2() -> Any:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=LENGTH + 16, **SPECIAL,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama(**options: Any) -> Any:
    sizes = {**SMALL, "hidden_size": WIDTH, "num_key_value_heads": 1, "max_position_embeddings": 96, **options}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **SPECIAL))


def clip(**options: Any) -> Any:
    return CLIPVisionModel(CLIPVisionConfig(**SMALL, image_size=8, patch_size=4, **options))


def pixtral() -> Any:
    return PixtralVisionModel(PixtralVisionConfig(**SMALL, head_dim=8, image_size=16, patch_size=4))


def whisper() -> Any:
    config = WhisperConfig(
        d_model=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=32, num_mel_bins=8, vocab_size=8,
        max_source_positions=6, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16, dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return WhisperModel(config).get_encoder()


def without_first(items: Sequence[Tensor]) -> list[Tensor]:
    """A callback that changes lengths."""
    return [item[1:] for item in items]


def doubled(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """A callback that changes inputs."""
    return {name: 2 * value if value.is_floating_point() else value for name, value in inputs.items()}


MODELS: dict[str, Callable[[], MultimodalModel]] = {
    "clip mlp": lambda: compose({"vision": ModalityEncoder(clip())}),
    "two": lambda: compose(
        {
            "vision": ModalityEncoder(clip(), ProjectorConfig(kind="pixel_shuffle")),
            "audio": ModalityEncoder(whisper(), ProjectorConfig(kind="query_former", queries=3, heads=2)),
        }
    ),
    "one input name": lambda: compose(
        {
            "vision": ModalityEncoder(clip(), "linear"),
            "depth": ModalityEncoder(clip(num_channels=1), ProjectorConfig(kind="average_pool")),
        }
    ),
    "callbacks": lambda: compose(
        {"vision": ModalityEncoder(clip(), before=doubled, after=without_first, after_projector=without_first)}
    ),
    "former": lambda: compose(
        {"vision": ModalityEncoder(clip(), ProjectorConfig(kind="query_former", queries=3, heads=2))}
    ),
    "unlike lengths": lambda: compose(
        {"vision": ModalityEncoder(pixtral(), ProjectorConfig(kind="average_pool"))}, llama()
    ),
    "llama": lambda: compose({"vision": ModalityEncoder(clip())}, llama()),
}


def compose(encoders: dict[str, ModalityEncoder], language_model: Any = None) -> MultimodalModel:
    ids = {name: IDS[name] for name in encoders}
    return MultimodalModel(encoders=encoders, language_model=language_model or gpt2(), token_ids=ids)


class Composed(L.LightningModule):
    """An ordinary module around a composed model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.generated: list[Tensor] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        labels = batch.pop("labels")
        logits = self.model(**batch, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        prompt = {name: value for name, value in batch.items() if name != "labels"}
        self.generated.append(self.model.generate(**prompt, max_new_tokens=4, do_sample=False))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


def build(name: str, change: Callable[[MultimodalModel], Any] | None = None, seed: int = 0) -> Composed:
    """The module in train mode; equal seeds and default dtypes give equal parameters."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = MODELS[name]()
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return Composed(model if change is None else change(model) or model).train()


def batch(model: MultimodalModel, counts: dict[str, list[int]], seed: int = 0, told: bool = True) -> dict[str, Any]:
    """A batch whose samples have `counts` of items; `told` writes them to the batch."""
    generator = torch.Generator().manual_seed(seed)
    samples = len(next(iter(counts.values())))
    tokens = torch.randint(FIRST_TEXT_ID, VOCABULARY, (samples, LENGTH), generator=generator)
    found: dict[str, Any] = {}
    starts = [1] * samples
    for name, items in counts.items():
        own = inputs(model, name, sum(items), generator)
        lengths = iter(model.num_features(name, **own)) if own else iter(())
        for sample, count in enumerate(items):
            for _ in range(count):
                length = next(lengths)
                tokens[sample, starts[sample] : starts[sample] + length] = IDS[name]
                starts[sample] += length + 1
        found |= {model.encoder_inputs[name][key]: value for key, value in own.items()}
        if told:
            found[f"{name}_items"] = torch.tensor(items)
    assert max(starts) <= LENGTH - LABELS, starts
    labels = tokens.clone()
    labels[:, :-LABELS] = -100
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels, **found}


def inputs(model: MultimodalModel, name: str, items: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Inputs of an encoder for so many items."""
    encoder, dtype = model.encoders[name].model, torch.get_default_dtype()
    if not items:
        return {}
    if isinstance(encoder, PixtralVisionModel):
        sizes = torch.tensor([[8, 8], [16, 8], [8, 16], [16, 16]])[torch.arange(items) % 4]
        return {"pixel_values": torch.randn(items, 3, 16, 16, generator=generator, dtype=dtype), "image_sizes": sizes}
    if name == "audio":
        return {"input_features": torch.randn(items, 8, 12, generator=generator, dtype=dtype)}
    channels = encoder.config.num_channels
    return {"pixel_values": torch.randn(items, channels, 8, 8, generator=generator, dtype=dtype)}
