"""Runs with a `ModalityThroughput`, and what they count by sample; and what torch's ``FlopCounterMode`` counts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_mm5d import ModalityThroughput
from parity.harness import fit


class Kept(ModalityThroughput):
    """Keeps what it logs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(available_flops=1e12, **options)
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *rest)
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def by_sample(figures: dict[str, float]) -> dict[str, float]:
    """Flops, flops with recomputation and tokens of a sample, by modality; no time is left in them."""
    samples, found = figures["samples_per_sec"], {}
    for name, value in figures.items():
        prefix, _, figure = name.rpartition("/")
        if figure in ("flops_per_sec", "tokens_per_sec") and not prefix.endswith("device"):
            found[name.removesuffix("_per_sec")] = value / samples
        if figure == "hfu" and figures[f"{prefix}/mfu"]:
            whole = prefix.removesuffix("device")
            found[f"{whole}hardware"] = figures[f"{whole}flops_per_sec"] / samples * value / figures[f"{prefix}/mfu"]
    return found


def counted(module: Any, batches: Sequence[Any], strategy: Any, world: int, **options: Any) -> list[dict[str, float]]:
    """Train, and return what each batch after the first took of a sample."""
    kept = Kept()
    fit(module, [*batches], strategy, world, callbacks=[kept], log_every_n_steps=1, **options)
    return [by_sample(one) for one in kept.logged if "samples_per_sec" in one]


def one_process(module: Any, batch: Any, loss: Callable[[], Tensor] | None = None) -> tuple[float, float]:
    """Flops of a forward and a backward, without and with scores of attention that a kernel computes again."""
    attention = {"again": 0.0}

    def pairs(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
        if is_causal:
            allowed = allowed.tril()
        if mask is not None:
            allowed = mask if mask.dtype == torch.bool else mask == 0
        return allowed.expand(*q.shape[:2], q.shape[-2], k.shape[-2]).sum()

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, attn_mask: Any = None, **_: Any) -> int:
        return int(2 * pairs(q, k, attn_mask, bool(rest[1:2] and rest[1])) * (q.shape[-1] + v.shape[-1]))

    def backward(_: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, attn_mask: Any = None, **__: Any) -> int:
        count = int(pairs(q, k, attn_mask, rest[3]))
        attention["again"] += 2 * count * q.shape[-1]
        return 2 * count * (3 * q.shape[-1] + 2 * v.shape[-1])

    forward._get_raw = backward._get_raw = True  # type: ignore[attr-defined]
    aten = torch.ops.aten
    formulas = {
        aten._scaled_dot_product_flash_attention_for_cpu: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    module.log = lambda *_, **__: None
    with warnings.catch_warnings(), FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        warnings.simplefilter("ignore")
        (loss() if loss else module.training_step(batch, 0)).backward()
    return counter.get_total_flops() - attention["again"], float(counter.get_total_flops())
