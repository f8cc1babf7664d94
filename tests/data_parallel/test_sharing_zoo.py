"""Whatever replicas share, models give the losses, states of AdamW and parameters of one process.

A case says the family, what shares (`zero_stage`, or "layers" for 3 with `reshard_after_forward`), ranks of a block,
and the layout: "replicas" (all modalities on all ranks), "tp 2", "pp 2" (encoders beside the first stage, or by
themselves), "cp 2", "apart" (encoders on ranks of their own), or a grid of tensor parallel ranks ("2d", "2.5d", "3d").
The first moments of AdamW hold the gradients of all steps.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor

from compare import tolerance
from lightning_mm5d import Modality
from parity.harness import fit, strategy
from ranks import call_ranks
from zoo import CASES, apply_freeze

FAMILIES = ("llava", "qwen2_vl", "whisper", "t5", "handwritten_flat")
FLOAT64 = ("t5", "whisper", "handwritten_flat")
STEPS, MICROBATCHES = 2, 2
# fields of the language model, of encoders, ranks per replica, replicas for a block of n
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "replicas": ({}, {"colocate_with": "language"}, 1),
    "tp 2": ({"tp_size": 2}, {"colocate_with": "language"}, 2),
    "sequence parallel": ({"tp_size": 2, "sequence_parallel": True}, {"colocate_with": "language"}, 2),
    "pp 2": ({"pp_size": 2}, {"colocate_with": "language"}, 2),
    "cp 2": ({"cp_size": 2}, {"colocate_with": "language"}, 2),
    "apart": ({}, {}, 2),
}
GRIDS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "2d": ({"tp_size": 4, "tp_mode": "2d"}, {"colocate_with": "language"}, 4),
    "3d": ({"tp_size": 8, "tp_mode": "3d"}, {"colocate_with": "language"}, 8),
    "2.5d": ({"tp_size": 8, "tp_mode": "2.5d", "tp_depth": 2}, {"colocate_with": "language"}, 8),
}
VARIANTS = ("none", "encoder", "lora")


class States(Callback):
    """Keeps the optimizer's state at the end of training, full on rank 0."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.state = trainer.strategy.optimizer_state(trainer.optimizers[0])


def build(name: str, variant: str) -> L.LightningModule:
    module = CASES[name].build()
    if variant == "lora":
        module.requires_grad_(False)
        targets = r".*\.(q_proj|v_proj|q|v|qkv|out_proj|up)"
        torch.manual_seed(0)
        inject_adapter_in_model(LoraConfig(r=4, target_modules=targets, init_lora_weights=False), module)
    else:
        apply_freeze(module, CASES[name], variant if variant in CASES[name].frozen else "none")

    def configure_optimizers() -> Any:
        trained = [p for p in module.parameters() if p.requires_grad]
        half = len(trained) // 2
        groups = [{"params": trained[:half], "weight_decay": 0.1}, {"params": trained[half:], "lr": 0.02}]
        return torch.optim.AdamW(groups, lr=0.01, eps=1e-2)

    module.configure_optimizers = configure_optimizers  # type: ignore[method-assign]
    return module


def batches(name: str, replicas: int, accumulated: int, samples: int = 1) -> list[Any]:
    """Batches of so many samples in each microbatch."""
    count = replicas * MICROBATCHES * samples
    return [CASES[name].batch(count, seed=step) for step in range(STEPS * accumulated)]


@lru_cache
def reference(name: str, variant: str, replicas: int, accumulated: int, samples: int) -> tuple[Any, dict[str, Tensor]]:
    module, states = build(name, variant), States()
    options = {"accumulate_grad_batches": accumulated, "callbacks": [states], "gradient_clip_val": 0.5}
    fit(module, batches(name, replicas, accumulated, samples), **options)
    return states.state, module.state_dict()


def layout(
    name: str, shares: int | str, size: int, which: str, **more: Any
) -> tuple[dict[str, dict[str, Any]], int, int]:
    """Fields of each modality, the number of ranks, and replicas of the language model."""
    *encoders, last = CASES[name].modalities
    language, encoder, each = (LAYOUTS | GRIDS)[which]
    if which == "apart" and not encoders:
        each = 1
    replicas = 1 if which == "cp 2" and size == 2 else size
    sharing: dict[str, Any] = {
        "zero_stage": 3 if shares == "layers" else shares,
        "dp_shard_size": size if shares else None,
    }
    if shares == "layers":
        sharing["reshard_after_forward"] = True
    fields = {**dict.fromkeys(encoders, encoder | sharing), last: language | sharing | more}
    paths = CASES[name].modality_paths
    return {key: {**paths.get(key, {}), **value} for key, value in fields.items()}, each * replicas, replicas


def train(
    rank: int, name: str, shares: int | str, size: int, which: str, variant: str, accumulated: int, options: Any
) -> Any:
    """One rank's run: the state of its optimizer and its parameters at the end."""
    fields, world, replicas = layout(name, shares, size, which, **options.get("language", {}))
    chosen = strategy(
        {key: Modality(**value) for key, value in fields.items()},
        num_microbatches=options.get("microbatches", MICROBATCHES),
        schedule=options.get("schedule", "1f1b"),
    )
    module, states, samples = build(name, variant), States(), options.get("samples", 1)
    parts = [part for one in batches(name, replicas, accumulated, samples) for part in CASES[name].split(one, replicas)]
    fit(
        module,
        parts,
        chosen,
        world,
        accumulate_grad_batches=accumulated,
        callbacks=[states],
        gradient_clip_val=0.5,
        in_order=True,
    )
    return (states.state, module.state_dict()) if rank == 0 else None


def check(
    name: str,
    shares: int | str,
    size: int,
    which: str = "replicas",
    variant: str = "none",
    accumulated: int = 1,
    **options: Any,
) -> None:
    _, world, replicas = layout(name, shares, size, which)
    found, *_ = call_ranks(world, train, name, shares, size, which, variant, accumulated, options)
    state, parameters = reference(name, variant, replicas, accumulated, options.get("samples", 1))
    bounds = tolerance(name in FLOAT64)
    for key, value in parameters.items():
        torch.testing.assert_close(found[1][key], value, **bounds, msg=lambda m, key=key: f"{key}: {m}")
    assert found[0]["state"].keys() == state["state"].keys()
    for key, values in state["state"].items():
        for kind, value in values.items():
            torch.testing.assert_close(
                found[0]["state"][key][kind], value, **bounds, msg=lambda m, key=key, kind=kind: f"{key}, {kind}: {m}"
            )


COMPACT = [
    ("llava", "layers", 2, "pp 2", "encoder", 2),
    ("qwen2_vl", 3, 2, "tp 2", "none", 1),
    ("whisper", "layers", 2, "apart", "none", 1),
    ("t5", "layers", 3, "replicas", "none", 2),
    ("handwritten_flat", 1, 2, "replicas", "encoder", 2),
    ("llava", 2, 2, "cp 2", "lora", 1),
]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("case", COMPACT, ids=lambda case: " ".join(map(str, case)))
def test_models_that_share_equal_one_process(case: tuple[Any, ...]) -> None:
    check(*case)


@pytest.mark.usefixtures("float64")
def test_weight_gradients_that_are_put_off_need_no_weights() -> None:
    check("t5", "layers", 2, "pp 2", schedule="zero_bubble")


ON_GRIDS = [
    pytest.param(("gpt2", 2, 2, "2d", "none", 2), marks=pytest.mark.exhaustive),
    ("llama_tied", "layers", 2, "2d", "lower", 1),
]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("case", ON_GRIDS, ids=lambda case: " ".join(map(str, case)))
def test_models_on_grids_that_share_equal_one_process(case: tuple[Any, ...]) -> None:
    """language: ranks 0-3 and 4-7, two replicas on a grid each."""
    check(*case, samples=3)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("shares", [1, 2, 3, "layers"])
@pytest.mark.parametrize("which", GRIDS)
def test_all_grids_that_share_equal_one_process(which: str, shares: int | str) -> None:
    for name, variant in (("llava", "encoder"), ("bert", "none")) if which == "2d" else (("llama", "lower"),):
        check(name, shares, 2, which, variant, samples=3)
        check(name, shares, 2, which, variant, 2)


def _possible(name: str, size: int, which: str) -> bool:
    return not (
        (name == "handwritten_flat" and which in ("tp 2", "sequence parallel", "cp 2"))
        or (which == "cp 2" and size != 2)
        or (name in ("t5", "whisper") and which in ("cp 2", "sequence parallel"))
    )


EVERY = [
    (name, shares, size, which, variant, accumulated)
    for name, shares, size, which, variant, accumulated in product(
        FAMILIES, (1, 2, 3, "layers"), (2, 3, 4), LAYOUTS, VARIANTS, (1, 2)
    )
    if _possible(name, size, which)
]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("case", EVERY, ids=lambda case: " ".join(map(str, case)))
def test_all_models_that_share_equal_one_process(case: tuple[Any, ...]) -> None:
    check(*case)


SCHEDULES = {
    "gpipe": {},
    "1f1b": {},
    "interleaved": {"pp_chunks": 2},
    "zero_bubble": {},
    "zbv": {},
}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("shares", [2, 3, "layers"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["llava", "t5"])
def test_all_schedules_of_models_that_share_equal_one_process(name: str, schedule: str, shares: int | str) -> None:
    check(name, shares, 2, "pp 2", language=SCHEDULES[schedule], schedule=schedule)
