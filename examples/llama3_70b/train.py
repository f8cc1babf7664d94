"""Llama 3 of 70 billion parameters as MindFormers lays it out on 64 ranks; `config.yaml` has all settings.

mm5d dryrun examples/llama3_70b/config.yaml
"""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM


class Llama3(L.LightningModule):
    """An ordinary module around transformers' model, by default of the published sizes.

    Args:
        layers: of the model.
        width: of its hidden states.
        inner: width inside a MLP.
        heads: of queries.
        key_value_heads: of keys and values.
        vocabulary: number of tokens that it knows.
    """

    def __init__(
        self,
        layers: int = 80,
        width: int = 8192,
        inner: int = 28672,
        heads: int = 64,
        key_value_heads: int = 8,
        vocabulary: int = 128256,
    ) -> None:
        super().__init__()
        self.config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_value_heads,
            rms_norm_eps=1e-5,
            rope_theta=500_000.0,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(self.config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The model's own loss."""
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, whose states replicas would share (`zero_stage: 1`)."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, betas=(0.9, 0.999), eps=1e-8)


class RandomTokens(Dataset):
    """Texts of random tokens, equal for equal numbers; put your own data in their place.

    Args:
        texts: how many.
        length: tokens of each.
        vocabulary: number of different tokens.
    """

    def __init__(self, texts: int, length: int, vocabulary: int) -> None:
        self.texts, self.length, self.vocabulary = texts, length, vocabulary

    def __len__(self) -> int:
        return self.texts

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self.vocabulary, (self.length,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


class Texts(L.LightningDataModule):
    """Batches of texts, of which each microbatch has one.

    Args:
        batch_size: texts of a step.
        length: tokens of each.
        vocabulary: number of different tokens.
    """

    def __init__(self, batch_size: int = 256, length: int = 8192, vocabulary: int = 128256) -> None:
        super().__init__()
        self.batch_size, self.length, self.vocabulary = batch_size, length, vocabulary

    def train_dataloader(self) -> Any:
        """Two batches."""
        texts = RandomTokens(2 * self.batch_size, self.length, self.vocabulary)
        return DataLoader(texts, batch_size=self.batch_size)


if __name__ == "__main__":
    LightningCLI(save_config_callback=None)
