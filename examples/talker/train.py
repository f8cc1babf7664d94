"""Which of three digits was asked for? A language model on one rank finds it, and a talker on another one says it.

    python examples/talker/train.py
    python examples/talker/train.py --devices 1

The language model learns to write the digit, the talker, which reads its hidden states, to say it in phonemes
(ARPAbet). Both losses are one number. The last line says how many of the held-out digits are said without a wrong
phoneme; chance is 10 %.

Shapes: B questions, S tokens of a question, P phonemes of an answer, D width.
"""

import argparse
import random
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from lightning_mm5d import Modality, MultimodalStrategy

SPOKEN = (
    "Z IH R OW", "W AH N", "T UW", "TH R IY", "F AO R", "F AY V", "S IH K S", "S EH V AH N", "EY T", "N AY N",
)  # fmt: skip
PHONEMES = ("-", *sorted({phoneme for word in SPOKEN for phoneme in word.split()}))
LONGEST, WIDTH, DIGITS, TRAINED, HELD_OUT = 5, 64, 3, 1024, 256


def question(draw: random.Random) -> dict[str, Tensor]:
    """Digits, which of them is asked for, and the answer: tokens and labels (S,), phonemes (P,)."""
    digits, asked = [draw.randrange(10) for _ in range(DIGITS)], draw.randrange(DIGITS)
    answer = digits[asked]
    phonemes = [PHONEMES.index(phoneme) for phoneme in SPOKEN[answer].split()]
    return {
        "input_ids": torch.tensor([*digits, 10 + asked, answer]),
        "labels": torch.tensor([-100] * (DIGITS + 1) + [answer]),
        "phonemes": torch.tensor(phonemes + [0] * (LONGEST - len(phonemes))),
    }


class Talker(nn.Module):
    """Hidden states (B, D) of what is to be said, to phonemes (B, P, number of them)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = LlamaModel(config)
        self.head = nn.Linear(WIDTH, len(PHONEMES))

    def forward(self, hidden: Tensor) -> Tensor:
        places = self.model.embed_tokens(torch.arange(LONGEST, device=hidden.device))
        return self.head(self.model(inputs_embeds=hidden.unsqueeze(1) + places).last_hidden_state)


class SpeakingModel(L.LightningModule):
    """An ordinary module: a language model, and a talker that reads its last hidden state before the answer."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4}
        self.thinker = LlamaForCausalLM(LlamaConfig(vocab_size=10 + DIGITS, num_hidden_layers=4, **sizes))
        self.talker = Talker(LlamaConfig(vocab_size=LONGEST, num_hidden_layers=2, **sizes))

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The loss of the text, and phonemes (B, P, number of them)."""
        out = self.thinker(input_ids=batch["input_ids"], labels=batch["labels"], output_hidden_states=True)
        return out.loss, self.talker(out.hidden_states[-1][:, -2])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        written, spoken = self(batch)
        return written + F.cross_entropy(spoken.flatten(0, 1), batch["phonemes"].flatten())

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        _, spoken = self(batch)
        self.log("right", (spoken.argmax(-1) == batch["phonemes"]).all(dim=1).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to say one of three digits.")
    parser.add_argument("--devices", type=int, choices=(1, 2), default=2)
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    draw = random.Random(0)
    questions = [question(draw) for _ in range(TRAINED + HELD_OUT)]

    warnings.filterwarnings("ignore", ".*does not have many workers")
    L.seed_everything(1)
    strategy = MultimodalStrategy({"language": Modality(), "talker": Modality()}, batching={"num_microbatches": 2})
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy="auto" if options.devices == 1 else strategy,
        max_epochs=options.epochs,
        check_val_every_n_epoch=options.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    loaders = (
        DataLoader(questions[:TRAINED], batch_size=32, shuffle=True),
        DataLoader(questions[TRAINED:], batch_size=64),
    )
    trainer.fit(SpeakingModel(), *loaders)
    if trainer.is_global_zero:
        right = float(trainer.callback_metrics["right"])
        print(f"ranks {trainer.world_size}: {right:.1%} of {HELD_OUT} digits are said right")


if __name__ == "__main__":
    main()
