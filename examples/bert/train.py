"""BERT learns whether reviews praise, as in GLUE's SST-2, on two tensor parallel ranks; `config.yaml` has all settings.

    python examples/bert/train.py fit --config examples/bert/config.yaml

Nothing is downloaded: reviews are made here, and the weights begin random. What counts is a review's last clause, and a
"not" or "hardly" turns it around. It ends with the F1 of reviews that it has not seen, which is to be 0.9 or more.
"""

import random
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics.classification import BinaryF1Score
from transformers import BertConfig, BertForSequenceClassification

TARGET = 0.9
THINGS = ("plot", "cast", "score", "ending", "script", "pace")
PRAISE = ("good", "bright", "moving", "clever", "fresh")
BLAME = ("bad", "dull", "slow", "clumsy", "stale")
TURNS = ("not", "hardly")
WORDS = ("[PAD]", "[CLS]", "[SEP]", "the", "is", "but", *THINGS, *PRAISE, *BLAME, *TURNS)
LENGTH = 16


def review(draw: random.Random) -> dict[str, Tensor]:
    """Return one review as tokens (LENGTH,), their mask and whether it praises."""
    words, praises = ["[CLS]"], False
    for clause in range(draw.randint(1, 2)):
        praises = draw.random() < 0.5
        turns = draw.random() < 0.4
        chosen = draw.choice(PRAISE if praises != turns else BLAME)
        turn = [draw.choice(TURNS)] if turns else []
        words += ["but"] * clause + ["the", draw.choice(THINGS), "is", *turn, chosen]
    tokens = torch.tensor([WORDS.index(word) for word in [*words, "[SEP]"]])
    ids = torch.zeros(LENGTH, dtype=torch.long)
    ids[: len(tokens)] = tokens
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor(int(praises))}


class Reviews(L.LightningDataModule):
    """Reviews that are drawn, others for validation.

    Args:
        texts: for training.
        held_out: for validation.
        batch_size: reviews of a step.
    """

    def __init__(self, texts: int = 2048, held_out: int = 256, batch_size: int = 32) -> None:
        super().__init__()
        self.texts, self.held_out, self.batch_size = texts, held_out, batch_size

    def train_dataloader(self) -> Any:
        """The same reviews on every process."""
        draw = random.Random(0)
        return DataLoader([review(draw) for _ in range(self.texts)], batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        """Reviews of another draw."""
        draw = random.Random(1)
        return DataLoader([review(draw) for _ in range(self.held_out)], batch_size=self.batch_size)


class Judge(L.LightningModule):
    """An ordinary module around transformers' BERT.

    Args:
        width: of hidden states.
        layers: number of layers.
        heads: in each attention.
        learning_rate: of AdamW.
    """

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4, learning_rate: float = 1e-3) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=len(WORDS),
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=LENGTH,
            pad_token_id=0,
            num_labels=2,
        )
        self.model, self.learning_rate = BertForSequenceClassification(config), learning_rate
        self.f1 = BinaryF1Score()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The model's own loss."""
        return self.model(**batch).loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Count what is right among the held-out reviews."""
        self.f1(self.model(**batch).logits.argmax(-1), batch["labels"])
        self.log("val_f1", self.f1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW with one learning rate."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)

    def on_fit_end(self) -> None:
        """Say how it went."""
        if self.trainer.is_global_zero:
            f1 = float(self.trainer.callback_metrics["val_f1"])
            print(f"ranks {self.trainer.world_size}: F1 {f1:.3f} of held-out reviews, target {TARGET}")


if __name__ == "__main__":
    LightningCLI(save_config_callback=None)
