"""Composed models of tiny parts, their batches, and their runs on ranks beside one process.

Layouts: "modality parallel" is encoder: rank 0; language: rank 1. "pp 2" is encoder: rank 0; language: ranks 1-2.
"encoder pp 2" is encoder: ranks 0-1; language: rank 2.
"tp 2" is encoder: ranks 0-1; language: ranks 2-3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor

from compare import State, assert_equal_to_one_process, tolerance
from lightning_mm5d import Modality, ModalityEncoder, MultimodalModel
from lightning_mm5d.models.encoder_kinds import count_rows
from models.tiny_encoders import ENCODERS, MELS, inputs_of
from models.tiny_language_models import FIRST_TEXT_ID, LANGUAGE_MODELS, PAD, PLACEHOLDER, VOCABULARY
from parity.harness import Recorder, fit, strategy
from ranks import call_ranks

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "modality parallel": ({}, {}, 2),
    "pp 2": ({}, {"pp_size": 2}, 3),
    "encoder pp 2": ({"pp_size": 2}, {}, 3),
    "tp 2": ({"tp_size": 2}, {"tp_size": 2}, 4),
}
ITEMS = (1, 2, 0, 1)
"""of each sample of a batch, which is split into two microbatches"""
LABELS, STEPS = 6, 2
ROUNDED = ("siglip2", "dinov2", "dinov2_registers", "gemma", "gemma2", "gemma3", "mixtral")
"""what drops to float32: resized positions of these encoders, norms of Gemma, routing of Mixtral"""


@dataclass(frozen=True)
class Pair:
    """An encoder and a language model, by their names, and the layer whose features are taken."""

    encoder: str
    language: str
    layer: int = -1

    def __str__(self) -> str:
        return f"{self.encoder} with {self.language}"

    @property
    def modality(self) -> str:
        if self.encoder.endswith("_video"):
            return "video"
        return "audio" if self.encoder in (*MELS, "wav2vec2", "wav2vec2_adapter", "hubert") else "vision"


class Composed(L.LightningModule):
    """Trains a composed model by a loss in its own dtype; transformers' own drops to float32."""

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            encoder = ModalityEncoder(ENCODERS[pair.encoder]().double(), "mlp", feature_layer=pair.layer)
            language = LANGUAGE_MODELS[pair.language]().double()
            tokens = {pair.modality: PLACEHOLDER}
            self.model = MultimodalModel(
                encoders={pair.modality: encoder}, language_model=language, token_ids=tokens
            ).double()
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        labels = batch["labels"]
        logits = self.model(**{key: value for key, value in batch.items() if key != "labels"}, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def batch_of(pair: Pair, config: Any, seed: int) -> dict[str, Tensor]:
    """A batch whose samples have `ITEMS` items, with as many placeholders as their features, padded on the right."""
    inputs = inputs_of(pair.encoder, seed, sum(ITEMS))
    sizes = iter(count_rows(config, inputs))
    random = torch.Generator().manual_seed(seed)

    def text(count: int) -> list[int]:
        return torch.randint(FIRST_TEXT_ID, VOCABULARY, (max(count, 0),), generator=random).tolist()

    samples = []
    for count in ITEMS:
        sample = text(2)
        for _ in range(count):
            sample += [PLACEHOLDER] * next(sizes).length + text(1)
        samples.append(sample + text(LABELS + 1))
    length = max(len(sample) for sample in samples)
    # padding stays within the sliding windows: transformers gives NaN where a window holds nothing else
    samples = [text(length - at - len(sample)) + sample for at, sample in enumerate(samples)]
    tokens, mask = torch.full((len(samples), length), PAD), torch.zeros(len(samples), length, dtype=torch.long)
    labels = torch.full_like(tokens, -100)
    for row, sample in enumerate(samples):
        end = len(sample)
        tokens[row, :end], mask[row, :end] = torch.tensor(sample), 1
        labels[row, end - LABELS : end] = tokens[row, end - LABELS : end]
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": labels,
        f"{pair.modality}_items": torch.tensor(ITEMS),
        **inputs,
    }


def batches_of(pair: Pair, module: Composed) -> list[Any]:
    encoder = module.model.encoders[pair.modality].model
    names = module.model.encoder_inputs[pair.modality]
    batches = [batch_of(pair, encoder.config, seed) for seed in range(STEPS)]
    return [{names.get(key, key): value for key, value in batch.items()} for batch in batches]


@lru_cache
def reference(pair: Pair) -> tuple[Recorder, State]:
    """What one process records, and its parameters at the end."""
    module = Composed(pair)
    return fit(module, batches_of(pair, module)), module.state_dict()


def train(rank: int, pair: Pair, which: str) -> tuple[list[float], list[State], State]:
    """One rank's run: losses, gradients of each step, and parameters at the end."""
    encoder, language, world = LAYOUTS[which]
    chosen = strategy({pair.modality: Modality(**encoder), "language": Modality(**language)}, num_microbatches=2)
    module = Composed(pair)
    recorder = fit(module, batches_of(pair, module), chosen, world)
    return recorder.losses, recorder.gradients, module.state_dict()


def assert_equal(pair: Pair, which: str) -> None:
    """Compare a layout with one process: losses, every gradient, and the parameters at the end."""
    assert_close(pair, which, **tolerance(pair.encoder not in ROUNDED and pair.language not in ROUNDED))


def assert_close(pair: Pair, which: str, rtol: float, atol: float) -> None:
    """The same with tolerances of one's own."""
    recorder, parameters = reference(pair)
    ranks = call_ranks(LAYOUTS[which][2], train, pair, which)

    where = f"{pair}, {which}"
    assert_equal_to_one_process(ranks, recorder, parameters, where=where, rtol=rtol, atol=atol)
