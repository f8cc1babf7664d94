"""Hugging Face in and out: `from_pretrained`, a fit on several ranks, `save_pretrained`, and the same with LoRA.

    python examples/hugging_face/train.py runs/llava
    python examples/hugging_face/train.py runs/llava_lora --lora

Nothing is downloaded: the first lines write a LLaVA with small random weights into the folder, as it would lie in the
Hub's cache. The encoder, its boundary and the layers are found in the model; no path is given.
"""

import argparse
from pathlib import Path

import lightning as L
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel

from lightning_mm5d import Modality, MultimodalStrategy

IMAGE, PATCHES, TEXT = 63, 4, 12  # the image's token, tokens per image, tokens of text


def small_llava() -> LlavaForConditionalGeneration:
    """A LLaVA of two CLIP and four Llama layers with random weights."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    vision = CLIPVisionConfig(**sizes, num_hidden_layers=2, image_size=16, patch_size=8)
    text = LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=64, use_cache=False, pad_token_id=0)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    return LlavaForConditionalGeneration(config)


class FineTuning(L.LightningModule):
    """Trains what requires a gradient in any Hugging Face model whose output has a loss."""

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The model's own loss."""
        loss = self.model(**batch, use_cache=False).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD over what is trained, so that layouts can be compared weight by weight."""
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def sample(index: int) -> dict[str, Tensor]:
    """An image (3, 16, 16) and a text (PATCHES + TEXT,), both random, both a function of the index."""
    generator = torch.Generator().manual_seed(index)
    words = torch.randint(1, IMAGE, (TEXT,), generator=generator)
    return {
        "pixel_values": torch.randn(3, 16, 16, generator=generator),
        "input_ids": torch.cat([torch.full((PATCHES,), IMAGE), words]),
        "attention_mask": torch.ones(PATCHES + TEXT, dtype=torch.long),
        "labels": torch.cat([torch.full((PATCHES,), -100), words]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a small LLaVA on two ranks and save it.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lora", action="store_true", help="train LoRA adapters and save only them")
    parser.add_argument("--devices", type=int, choices=(1, 2), default=2)
    options = parser.parse_args()
    base, tuned = options.folder / "base", options.folder / "tuned"

    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy="auto"
        if options.devices == 1
        else MultimodalStrategy(
            modalities={"vision": Modality(), "language": Modality()}, batching={"num_microbatches": 2}
        ),
        max_steps=4,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    if trainer.is_global_zero:  # the process that starts the others, before it starts them
        small_llava().save_pretrained(base)
    model = LlavaForConditionalGeneration.from_pretrained(base)
    if options.lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    module = FineTuning(model)
    trainer.fit(module, DataLoader([sample(i) for i in range(16)], batch_size=4))

    # after fit rank 0 holds the weights of all stages; during fit it does not
    if trainer.is_global_zero:
        module.model.save_pretrained(tuned)
        loss = float(trainer.callback_metrics["loss"])
        print(f"ranks {trainer.world_size}: loss {loss:.6f}; saved in {tuned}")


if __name__ == "__main__":
    main()
