"""The CPU time of an epoch whose features are read, over that of an epoch whose features are computed.

A frozen CLIP vision tower of 12 layers with 196 patches, D 384, feeds a Llama of 2 layers. One rank runs both: the time
of a step is the sum of theirs. Epochs of 4 batches of 4 images; the first one computes and writes, later ones read.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from lightning_mm5d import Modality, MultimodalStrategy

EPOCHS, BATCHES, IMAGES, TOKENS, SIZE, PATCH = 4, 4, 4, 32, 224, 16
FEATURES = (SIZE // PATCH) ** 2


class Captions(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        vision = CLIPVisionConfig(
            hidden_size=384, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=6, image_size=SIZE,
            patch_size=PATCH,
        )  # fmt: skip
        text = LlamaConfig(
            hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, vocab_size=512
        )
        config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=1)
        self.model = LlavaForConditionalGeneration(config)
        for part in (self.model.model.vision_tower, self.model.model.multi_modal_projector):
            part.requires_grad_(False).eval()
        self.began, self.times = 0.0, list[float]()

    def on_train_epoch_start(self) -> None:
        self.began = time.process_time()

    def on_train_epoch_end(self) -> None:
        self.times.append(time.process_time() - self.began)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01)


def samples() -> list[dict[str, torch.Tensor]]:
    ids = torch.cat([torch.ones(FEATURES, dtype=torch.long), torch.randint(2, 512, (TOKENS,))])
    return [
        {"pixel_values": torch.randn(3, SIZE, SIZE), "input_ids": ids, "labels": ids.where(ids > 1, -100)}
        for _ in range(BATCHES * IMAGES)
    ]


def times(folder: str | None) -> list[float]:
    """Return the CPU seconds of each epoch."""
    vision = Modality(colocate_with="language", memory={"cache_features": folder})
    module = Captions()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=EPOCHS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        strategy=MultimodalStrategy({"vision": vision, "language": Modality()}, batching={"num_microbatches": 2}),
    )  # fmt: skip
    trainer.fit(module, DataLoader(samples(), batch_size=IMAGES, shuffle=True))  # type: ignore[arg-type]
    return module.times


def main() -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        plain, cached = times(None), times(folder)
    usual = min(plain[1:])
    print("| epoch | CPU seconds | of an epoch without the folder |\n| --- | --- | --- |")
    for number, seconds in enumerate(cached):
        print(f"| {number} | {seconds:.2f} | {seconds / usual:.2f} |")


if __name__ == "__main__":
    main()
