"""The digits example trained for 200 steps while its ranks talk in fewer bits: its loss stays near the exact run's."""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_mm5d import Modality, MultimodalStrategy
from ranks import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"
STEPS, LAST, BAND = 200, 50, 0.06
E4M3 = "float8_e4m3fn"

# layouts, with what each modality says: all modalities on all ranks, or encoders on rank 0 and language on ranks 1-4
TOGETHER: dict[str, tuple[int, dict[str, Any]]] = {
    "gradients": (2, {}),
    "parameters": (2, {"zero_stage": 3}),
    "payloads": (2, {"pp_size": 2}),
    "tensor_parallel": (2, {"tp_size": 2}),
}
CASES: dict[str, tuple[str, Any]] = {
    "gradients in float8": ("gradients", {"gradients": E4M3}),
    "gradients in float8, random rounding": ("gradients", {"gradients": E4M3, "stochastic_rounding": True}),
    "parameters in float8": ("parameters", {"parameters": E4M3}),
    "payloads in float8": ("payloads", {"payloads": E4M3}),
    "tensor parallel sums in float8": ("tensor_parallel", {"tensor_parallel": E4M3}),
    "all in bfloat16": ("all", "bfloat16"),
    "all in float8": ("all", E4M3),
}


def modalities(name: str, said: Any) -> tuple[int, dict[str, Modality]]:
    if name == "all":
        language = Modality(
            dp_size=2, tp_size=2, sharding={"zero_stage": 3}, communication={"communication_dtype": said}
        )
        encoder = Modality(dp_size=1, communication={"communication_dtype": said})
        audio = Modality(colocate_with="vision", communication={"communication_dtype": said})
        return 5, {"vision": encoder, "audio": audio, "language": language}
    world, options = TOGETHER[name]
    shared = {"zero_stage": options["zero_stage"]} if "zero_stage" in options else {}
    encoder = Modality(colocate_with="language", communication={"communication_dtype": said}, **shared)
    language = Modality(communication={"communication_dtype": said}, **options)
    return world, {"vision": encoder, "audio": encoder, "language": language}


class Losses(L.Callback):
    def __init__(self) -> None:
        self.all: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.all.append(float(trainer.callback_metrics["train_loss"]))


def train(rank: int, name: str, said: Any, steps: int) -> list[float]:
    warnings.simplefilter("ignore")
    L.seed_everything(1)
    world, layout = modalities(name, said)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        module, data = (importlib.import_module(name) for name in ("model", "data"))
    losses = Losses()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=MultimodalStrategy(modalities=layout, batching={"num_microbatches": 2}),
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[losses],
    )
    digits = module.Digits(encoder_layers=1, language_layers=4, learning_rate=2e-3, warmup_steps=50)
    trainer.fit(digits, DataLoader(data.Pairs(16 * 2 * steps, held_out=False, seed=0), batch_size=16))
    return losses.all


@cache
def losses(name: str, said: Any, steps: int) -> torch.Tensor:
    return torch.tensor(run_ranks(modalities(name, None)[0], train, name, dict(said) or None, steps, limit=900)[0])


def off(case: str, steps: int) -> tuple[float, float, float]:
    """Mean loss of the last steps of the exact run; how far that of the compressed one is off, and any step at most."""
    name, said = CASES[case]
    said = {kind: said for kind in TOGETHER} if isinstance(said, str) else said
    exact, got = losses(name, (), steps), losses(name, tuple(said.items()), steps)
    last = min(LAST, steps)
    level = exact[-last:].mean()
    return float(level), float(got[-last:].mean() - level), float((got - exact).abs().max())


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_two_hundred_steps_stay_in_the_band(case: str) -> None:
    level, mean, largest = off(case, STEPS)
    print(f"{case}: exact {level:.4f}, off by {mean:+.4f} in the mean, {largest:.4f} at most")
    assert abs(mean) <= BAND
