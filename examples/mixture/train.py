"""A small mixture of experts learns to count, on two ranks that share its experts; `config.yaml` has all settings.

python examples/mixture/train.py fit --config examples/mixture/config.yaml
"""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

WORDS, LENGTH = 32, 16


class Mixture(L.LightningModule):
    """An ordinary module around an ordinary transformers model: nothing in it knows of ranks.

    Args:
        experts: of each of its two layers.
        chosen: experts of a token.
    """

    def __init__(self, experts: int = 8, chosen: int = 2) -> None:
        super().__init__()
        config = Qwen3MoeConfig(
            vocab_size=WORDS,
            hidden_size=64,
            moe_intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=experts,
            num_experts_per_tok=chosen,
            output_router_logits=True,  # the loss that evens out the load of experts
        )
        self.model = Qwen3MoeForCausalLM(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The model's own loss."""
        loss = self.model(**batch, use_cache=False).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, which keeps states of a rank's own experts alone."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def on_train_end(self) -> None:
        """Say how it went."""
        if self.trainer.is_global_zero:
            loss = float(self.trainer.callback_metrics["loss"])
            print(f"ranks {self.trainer.world_size}: loss {loss:.4f} after {self.trainer.global_step} steps")


class Counting(L.LightningDataModule):
    """Numbers in a row, each text from another one on.

    Args:
        steps: of a run.
        batch_size: texts of a rank in a step.
    """

    def __init__(self, steps: int = 20, batch_size: int = 16) -> None:
        super().__init__()
        self.texts, self.batch_size = steps * batch_size * 2, batch_size

    def train_dataloader(self) -> Any:
        """Texts with themselves as labels."""
        starts = torch.randperm(self.texts).unsqueeze(1)
        words = (starts + torch.arange(LENGTH)) % WORDS
        return DataLoader([{"input_ids": text, "labels": text} for text in words], batch_size=self.batch_size)


if __name__ == "__main__":
    LightningCLI(save_config_callback=None)
