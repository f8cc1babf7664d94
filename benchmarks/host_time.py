"""What the host does for a microbatch in a stage, against the eager forwards and backwards of the same layers.

A Llama of 24 layers that are so small that Python is most of their time, on two pipeline ranks with 8 microbatches. A
figure is the CPU time of the main threads of both ranks between the start and the end of a batch, over that of one
process that loops over the same microbatches without Lightning; with the optimizer's step on both sides. CPU time
leaves out what a rank waits for.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from turns import Side, Turns, fit, row, run

from lightning_mm5d import Modality, MultimodalStrategy

LAYERS, MICROBATCHES, SAMPLES, TOKENS = 24, 8, 2, 32
STEPS, WARMUP, VOCABULARY = 24, 6, 256


class Llama(L.LightningModule):
    """The ordinary module around an ordinary Hugging Face model."""

    def __init__(self, *, evaluates: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            num_hidden_layers=LAYERS,
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=VOCABULARY,
        )
        self.model, self.evaluates = LlamaForCausalLM(config), evaluates

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch, use_cache=False).loss

    validation_step = training_step

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(STEPS), batch_size=MICROBATCHES * SAMPLES) if self.evaluates else []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Samples(Dataset):
    """Random text, for so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __len__(self) -> int:
        return self.steps * MICROBATCHES * SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class Clock(Callback):
    """The CPU time of the main thread from the start to the end of each batch."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {"train": [], "validation": []}
        self._since = 0.0

    def _start(self, *_: Any) -> None:
        self._since = time.thread_time()

    on_train_batch_start = on_validation_batch_start = _start

    def on_train_batch_end(self, *_: Any) -> None:
        self.spent["train"].append(time.thread_time() - self._since)

    def on_validation_batch_end(self, *_: Any) -> None:
        self.spent["validation"].append(time.thread_time() - self._since)


def eager(trains: bool, batches: int) -> float:
    """The median CPU time of the microbatches of so many batches, and of the optimizer's step after them."""
    module, times = Llama(), []
    optimizer = module.configure_optimizers()
    loader = iter(DataLoader(Samples(STEPS * batches), batch_size=SAMPLES))
    for _ in range(STEPS):
        given = [next(loader) for _ in range(MICROBATCHES * batches)]
        start = time.thread_time()
        with torch.set_grad_enabled(trains):
            for batch in given:
                loss = module.training_step(batch, 0)
                if trains:
                    (loss / len(given)).backward()
        if trains:
            optimizer.step()
            optimizer.zero_grad()
        times.append(time.thread_time() - start)
    return statistics.median(times[WARMUP:])


def piped(turns: Turns, what: str, batches: int, fields: dict[str, Any]) -> float:
    """The median CPU time of this rank for so many batches of 8 microbatches."""
    clock = Clock()
    strategy = MultimodalStrategy(
        {"language": Modality(pp_size=2, **fields)}, schedule="1f1b", batching={"num_microbatches": MICROBATCHES}
    )
    loader = DataLoader(Samples(STEPS * batches), batch_size=MICROBATCHES * SAMPLES)
    options = {} if batches == 1 else {"accumulate_grad_batches": batches}
    fit(Llama(evaluates=what == "validation"), loader, strategy, 2, clock, **options)
    times = clock.spent[what]
    sums = [sum(times[at : at + batches]) for at in range(0, len(times), batches)]
    return statistics.median(sums[WARMUP:])


CASES: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "a step": ("train", 1, {}, "1.10"),
    "accumulate_grad_batches=2": ("train", 2, {}, "1.10"),
    "activation_checkpointing: full": ("train", 1, {"memory": {"activation_checkpointing": "full"}}, "2.0"),
    "validation": ("validation", 1, {}, "1.10"),
}


def main(names: list[str]) -> None:
    for name, (what, batches, fields, aim) in CASES.items():
        if names and not any(part in name for part in names):
            continue
        single = run(Side(1, lambda turns, rank, trains=what == "train", count=batches: eager(trains, count)))[0]
        ranks = run(Side(2, lambda turns, rank, case=(what, batches, fields): piped(turns, *case)))
        times = " + ".join(f"{1e3 * seconds:.1f}" for seconds in ranks)
        row(
            f"host time of pp 2 over eager layers, {name}", sum(ranks) / single, aim, f"{times} / {1e3 * single:.1f} ms"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
