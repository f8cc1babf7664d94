"""A mixture of experts on two ranks that share its experts: bytes that travel and rest, and time against tp 2.

Bytes: what ranks send to each other, counted where torch.distributed is called, against the rows whose expert is on
another rank, there and back, forward and backward, counted from what the routers chose. Collectives are counted there
too: of rows, and of the rounds in host memory that precede them.

Memory: what a rank holds of experts after the second step in parameters, gradients and AdamW's moments, counted in
whole storages, against the whole over the ranks; with five experts the mean of both ranks, of which one holds three.

Time: the same model, weights and batches. On one side each rank takes half of a batch and half of the experts
(`ep_size=2`), on the other both take the whole batch and half of each layer (`tp_size=2`).
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from turns import WARMUP, Side, fit, median_ratio, milliseconds, race, row, run

from lightning_mm5d import Modality, MultimodalStrategy

STEPS, RANKS, FLOAT_BYTES = 20 + WARMUP, 2, 4


@dataclass(frozen=True)
class Size:
    """What is trained; a token passes as many elements of experts whatever their number is."""

    experts: int
    chosen: int = 2
    hidden: int = 512
    width: int = 256
    layers: int = 2
    vocabulary: int = 4096
    batch: int = 8
    tokens: int = 128


FEW = Size(experts=8)
MANY = Size(experts=64, chosen=8, hidden=128)
UNEVEN = replace(FEW, experts=5)


class Mixture(L.LightningModule):
    """The ordinary module around an ordinary Hugging Face model; the same weights in every process."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            moe_intermediate_size=size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=size.width // 8,
            num_experts=size.experts,
            num_experts_per_tok=size.chosen,
            tie_word_embeddings=False,
        )
        self.model = Qwen3MoeForCausalLM(config)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch, use_cache=False).loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, foreach=True)

    @property
    def experts(self) -> list[Any]:
        return [p for name, p in self.named_parameters() if ".experts." in name]


class Texts(Dataset):
    """Random tokens: all of them, or every second sample of each batch from that of `rank` on."""

    def __init__(self, count: int, size: Size, rank: int | None) -> None:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(size.vocabulary, (count, size.tokens), generator=generator)
        self._tokens = tokens if rank is None else tokens[rank::RANKS]

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


def train(size: Size, rank: int, steps: int, fields: dict[str, int], *callbacks: Callback) -> Mixture:
    """Train on the whole batch, or where ranks share experts on this rank's half of it."""
    module, halves = Mixture(size), "ep_size" in fields
    texts = Texts(steps * size.batch, size, rank if halves else None)
    loader = DataLoader(texts, batch_size=size.batch // RANKS if halves else size.batch)
    fit(module, loader, MultimodalStrategy({"language": Modality(**fields)}), RANKS, *callbacks)
    return module


# --- time ---


def times() -> None:
    for size in (FEW, MANY):
        ours, theirs = race(
            Side(RANKS, lambda turns, rank, s=size: train(s, rank, STEPS, {"ep_size": RANKS}, turns).losses),
            Side(RANKS, lambda turns, rank, s=size: train(s, rank, STEPS, {"tp_size": RANKS}, turns).losses),
            STEPS,
        )
        mean = [statistics.fmean(losses) for losses in zip(*ours.results, strict=True)]
        torch.testing.assert_close(torch.tensor(mean), torch.tensor(theirs.results[0]), rtol=1e-4, atol=0)
        measured = f"{milliseconds(ours)} / {milliseconds(theirs)}"
        row(f"{_name(size)}: time of a step, ep 2 / tp 2", median_ratio(ours, theirs), "", measured)


# --- memory ---


class Held(Callback):
    """Counts what is held of experts: gradients as the optimizer steps, the rest after it."""

    def __init__(self) -> None:
        self.gradients = self.rest = 0

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        self.gradients = _storage_bytes([p.grad for p in module.experts])

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        state = trainer.optimizers[0].state
        self.rest = _storage_bytes(
            [*module.experts, *(value for p in module.experts for value in state[p].values() if value.dim())]
        )


def _storage_bytes(tensors: list[Any]) -> int:
    """Each storage once and as long as it is: a view keeps all of it alive."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def hold(size: Size, rank: int) -> tuple[int, int]:
    """Returns the bytes that this rank holds of experts, and those of all of them in one process."""
    held = Held()
    whole = 4 * _storage_bytes(Mixture(size).experts)
    train(size, rank, 2, {"ep_size": RANKS}, held)
    return held.gradients + held.rest, whole


def memory() -> None:
    for size in (FEW, MANY, UNEVEN):
        parts = run(Side(RANKS, lambda turns, rank, s=size: hold(s, rank)))
        mean, half = statistics.fmean(held for held, _ in parts), parts[0][1] / RANKS
        measured = f"{mean / 2**20:.2f} / {half / 2**20:.2f} MiB, largest {max(parts)[0] / 2**20:.2f} MiB"
        row(f"{_name(size)}: bytes of experts a rank / half", mean / half, "1.02", measured)


# --- bytes ---


class Traffic(Callback):
    """Counts collectives and bytes of rows for other ranks, and the choices of routers by layer."""

    def __init__(self, rank: int) -> None:
        self.rank, self.sent = rank, 0
        self.calls: Counter[str] = Counter()
        self.away = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for module in pl_module.modules():
            if type(module).__name__ == "Qwen3MoeExperts":
                module.register_forward_pre_hook(self._routed)

    def _routed(self, module: Any, args: tuple[Tensor, ...]) -> None:
        half = -(-module.num_experts // RANKS)
        self.away += int(((args[1] >= half) != bool(self.rank)).sum())

    def counting(self) -> Any:
        exchange, gather = dist.all_to_all_single, dist.all_gather_single

        def exchanged(out: Tensor, rows: Tensor, came: list[int], sent: list[int], **rest: Any) -> Any:
            self.calls["exchanges"] += 1
            self.sent += sent[1 - self.rank] * rows[:1].nbytes
            return exchange(out, rows, came, sent, **rest)

        def gathered(*args: Any, **rest: Any) -> Any:
            self.calls["rounds"] += 1
            return gather(*args, **rest)

        return patch.multiple(dist, all_to_all_single=exchanged, all_gather_single=gathered)


def send(size: Size, rank: int) -> tuple[int, int, dict[str, int]]:
    """Returns bytes sent, bytes of rows that must move to and from this rank's tokens, and counts of collectives."""
    traffic = Traffic(rank)
    with traffic.counting():
        train(size, rank, 2, {"ep_size": RANKS}, traffic)
    return traffic.sent, 4 * traffic.away * size.width * FLOAT_BYTES, dict(traffic.calls)


def exchanges() -> None:
    for size in (FEW, MANY, UNEVEN):
        per_rank = run(Side(RANKS, lambda turns, rank, s=size: send(s, rank)))
        sent, needed = (sum(amounts[which] for amounts in per_rank) for which in (0, 1))
        counts = ", ".join(f"{count / 2 / size.layers:g} {name}" for name, count in sorted(per_rank[0][2].items()))
        measured = f"{sent / 2**20:.3f} / {needed / 2**20:.3f} MiB in 2 steps; {counts} a layer and step"
        row(f"{_name(size)}: bytes sent / bytes of rows that must move", sent / needed, "1.00", measured)


def _name(size: Size) -> str:
    return f"{size.experts} experts of {size.hidden}, {size.chosen} for a token"


if __name__ == "__main__":
    figures = {"time": times, "memory": memory, "bytes": exchanges}
    for name in sys.argv[1:] or figures:
        figures[name]()
