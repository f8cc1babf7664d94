"""A small LLaVA (CLIP vision, Llama) on two ranks in a balanced layout, against one process without the strategy.

8 microbatches of 2 samples, float32, Adam, fresh data each step, one thread a rank. The one process takes the same
microbatches and accumulates their gradients. Layouts: each language rank runs the encoder for half of the microbatches,
which `mm5d plan --measure` proposes; or encoder and language model have a rank each.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from turns import WARMUP, Side, Turns, fit, milliseconds, race, row

from lightning_mm5d import Modality, MultimodalStrategy

STEPS, MICROBATCHES, BATCH = 24 + WARMUP, 8, 16
VOCABULARY, IMAGE, FEATURES, TEXT = 2048, 2047, 64, 128
SPREAD = {"vision": Modality(colocate_with="language"), "language": Modality(pp_size=2)}
LAYOUTS: dict[str, tuple[dict[str, Modality], str]] = {
    "encoder on both language ranks, zero_bubble": (SPREAD, "zero_bubble"),
    "encoder on both language ranks, zbv": (SPREAD, "zbv"),
    "encoder | language, 1f1b": ({"vision": Modality(), "language": Modality()}, "1f1b"),
}


class Llava(L.LightningModule):
    """The ordinary module around an ordinary Hugging Face model; the same weights in every process."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        torch.manual_seed(0)
        vision = CLIPVisionConfig(
            num_hidden_layers=4, hidden_size=width, intermediate_size=4 * width, num_attention_heads=4, image_size=112
        )
        vision.patch_size = 14
        text = LlamaConfig(
            num_hidden_layers=4,
            hidden_size=width,
            intermediate_size=43 * width // 16,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=VOCABULARY,
        )
        config = LlavaConfig(
            vision_config=vision,
            text_config=text,
            image_token_index=IMAGE,
            image_seq_length=FEATURES,
            vision_feature_layer=-1,
        )
        self.model = LlavaForConditionalGeneration(config)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch, use_cache=False).loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Accumulated(Llava):
    """The same on one process in microbatches: one batch a step, as for the other side."""

    def __init__(self, width: int = 256) -> None:
        super().__init__(width)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        total = torch.zeros(())
        for start in range(0, BATCH, BATCH // MICROBATCHES):
            part = {key: value[start : start + BATCH // MICROBATCHES] for key, value in batch.items()}
            loss = super().training_step(part, batch_idx) / MICROBATCHES
            self.manual_backward(loss)
            total += loss.detach()
        optimizer.step()
        return {"loss": total}


class Samples(Dataset):
    """Random images behind which random text follows; equal indices give equal samples."""

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        text = torch.randint(0, IMAGE, (TEXT,), generator=generator)
        ids = torch.cat([torch.full((FEATURES,), IMAGE), text])
        labels = ids.masked_fill(ids == IMAGE, -100)
        return {"input_ids": ids, "pixel_values": torch.randn(3, 112, 112, generator=generator), "labels": labels}


def train(turns: Turns, rank: int, strategy: Any) -> list[float]:
    """Returns this rank's losses; without a strategy those of the one process."""
    module = Llava() if strategy is not None else Accumulated()
    fit(module, DataLoader(Samples(), batch_size=BATCH), strategy or "auto", 1 if strategy is None else 2, turns)
    return module.losses


def main(names: list[str]) -> None:
    for name, (modalities, schedule) in LAYOUTS.items():
        if names and not any(part in name for part in names):
            continue
        strategy = MultimodalStrategy(modalities, schedule=schedule, batching={"num_microbatches": MICROBATCHES})
        single, pair = race(
            Side(1, lambda turns, rank: train(turns, rank, None)),
            Side(2, lambda turns, rank, strategy=strategy: train(turns, rank, strategy)),
            STEPS,
        )
        torch.testing.assert_close(torch.tensor(single.results[0]), torch.tensor(pair.results[0]), rtol=1e-4, atol=1e-4)
        ratio = statistics.median(a / b for a, b in zip(single.seconds, pair.seconds, strict=True))
        aim = "1.7" if name == next(iter(LAYOUTS)) else ""
        row(f"two ranks over one process, {name}", ratio, aim, f"{milliseconds(single)} / {milliseconds(pair)}")


if __name__ == "__main__":
    main(sys.argv[1:])
