"""Two replicas of a Llama that share optimizer states, gradients and parameters: time of a step.

Sides: `zero_stage` 3, gathered once for a step or for each layer, against plain replicas; and against torch's FSDP2
(`fully_shard` on each layer and on the model, under Lightning's ModelParallelStrategy), which reshards likewise.
Every side trains the same model on the same data, float32, AdamW.
"""

from __future__ import annotations

import sys
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from turns import WARMUP, Side, Turns, fit, median_ratio, milliseconds, race, row

from lightning_mm5d import Modality, MultimodalStrategy

STEPS, BATCH, TOKENS, WORLD = 40 + WARMUP, 4, 96, 2
CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
}


class Llama(L.LightningModule):
    """The ordinary module around an ordinary Hugging Face model; the same weights in every process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(LlamaConfig(**CONFIG))
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch, use_cache=False).loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class FullyShardedLlama(Llama):
    """The same with FSDP2.

    Args:
        reshards: whether each layer is gathered again for its backward.
    """

    def __init__(self, reshards: bool) -> None:
        super().__init__()
        self.reshards = reshards

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=self.reshards)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=False)


class Samples(Dataset):
    """Random text; equal seeds and indices give equal samples."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index + self.seed * len(self))
        ids = torch.randint(0, CONFIG["vocab_size"], (TOKENS,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def train(turns: Turns, rank: int, module: Llama, strategy: Any) -> list[float]:
    """Returns this rank's losses."""
    fit(module, DataLoader(Samples(rank), batch_size=BATCH), strategy, WORLD, turns)
    return module.losses


def ours(**sharing: Any) -> Side:
    """A side under the strategy."""
    modalities = {"language": Modality(sharding=sharing)}
    return Side(WORLD, lambda turns, rank: train(turns, rank, Llama(), MultimodalStrategy(modalities)))


def theirs(reshards: bool) -> Side:
    """A side under FSDP2."""
    strategy = {"data_parallel_size": WORLD, "tensor_parallel_size": 1}
    return Side(
        WORLD,
        lambda turns, rank: train(turns, rank, FullyShardedLlama(reshards), ModelParallelStrategy(**strategy)),
    )


PAIRS = {
    "zero 3 / plain replicas": (ours(zero_stage=3), ours(), ""),
    "zero 3 by layer / plain replicas": (ours(zero_stage=3, reshard_after_forward=True), ours(), ""),
    "zero 2 / plain replicas": (ours(zero_stage=2), ours(), ""),
    "zero 3 / FSDP2": (ours(zero_stage=3), theirs(False), "1.00"),
    "zero 3 by layer / FSDP2 by layer": (ours(zero_stage=3, reshard_after_forward=True), theirs(True), "1.00"),
}


def main(names: list[str]) -> None:
    for name, (first, second, aim) in PAIRS.items():
        if names and not any(part in name for part in names):
            continue
        a, b = race(first, second, STEPS)
        for losses, expected in zip(a.results, b.results, strict=True):
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-3, atol=1e-3)
        row(f"two replicas, time of a step: {name}", median_ratio(a, b), aim, f"{milliseconds(a)} / {milliseconds(b)}")


if __name__ == "__main__":
    main(sys.argv[1:])
