"""Any layout gives the losses, gradients and parameters of the same module on one process.

Each test trains a tiny model for two steps of SGD in float64 on the layout that its name says, and once on one
process. In the layouts ``{e}`` stands for every encoder: "{e} | language pp 2" with vision and audio encoders is
"vision: rank 0; audio: rank 1; language: ranks 2-3". The default run holds each model and each layout, each frozen
part in each layout, and what `--quick` runs (`sweeps.covering`); `exhaustive` holds the rest of the product.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any

import lightning as L
import pytest
import torch

from compare import assert_equal_to_one_process, tolerance
from lightning_mm5d import Modality
from parity.harness import Recorder, fit, strategy
from ranks import call_ranks
from sweeps import covering
from zoo import CASES, apply_freeze

MICROBATCHES = 4
SAMPLES = 8
STEPS = 2
# layout of every encoder, layout of the language model, ranks per encoder, ranks of the language model
ENCODER_LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    "{e} | language": ({}, {}, 1, 1),
    "{e} | language pp 2": ({}, {"pp_size": 2}, 1, 2),
    "{e} | language pp 3": ({}, {"pp_size": 3}, 1, 3),
    "{e} pp 2 | language": ({"pp_size": 2}, {}, 2, 1),
    "{e} pp 2 | language pp 2": ({"pp_size": 2}, {"pp_size": 2}, 2, 2),
    "dp 2": ({}, {}, 2, 2),
    "{e} dp 2 | language dp 1": ({"dp_size": 2}, {"dp_size": 1}, 2, 1),
    "{e} dp 1 | language dp 2": ({"dp_size": 1}, {"dp_size": 2}, 1, 2),
    "all on all": ({"colocate_with": "language"}, {}, 0, 2),
    "{e} with language pp 2": ({"colocate_with": "language"}, {"pp_size": 2}, 0, 2),
}
SINGLE_LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "pp 2": ({"pp_size": 2}, 2),
    "pp 3": ({"pp_size": 3}, 3),
    "pp 2 in 2 chunks each": ({"pp_size": 2, "pp_chunks": 2}, 2),
    "dp 2": ({}, 2),
    "pp 2 dp 2": ({"pp_size": 2}, 4),
}
FROZEN_LAYOUTS = ("{e} pp 2 | language pp 2", "{e} with language pp 2")
WITH_ENCODERS = (
    "llava",
    "qwen2_vl",
    "gemma3",
    "qwen2_audio",
    "whisper",
    "clip",
    "blip_2",
    "handwritten",
    "handwritten_flat",
    "handwritten_two",
    "handwritten_dual",
    "qwen2_5_omni_thinker",
)
# transformers' causal loss drops to float32; these do not use it
FLOAT64 = ("bert", "t5", "whisper", "clip", "qwen2_audio", *(name for name in WITH_ENCODERS if "handwritten" in name))
SINGLE = ("t5", "llama_tied", "gpt2", "bert")


def layout(name: str, which: str) -> tuple[dict[str, dict[str, Any]], int, int]:
    """Return the fields of each modality, the number of ranks and of replicas of the language model."""
    case = CASES[name]
    *encoders, loss_modality = case.modalities
    if which in ENCODER_LAYOUTS and encoders:
        encoder, language, each, ranks = ENCODER_LAYOUTS[which]
        fields = {**dict.fromkeys(encoders, encoder), loss_modality: language}
        world = each * len(encoders) + ranks
        replicas = 2 if which in ("dp 2", "{e} dp 1 | language dp 2", "all on all") else 1
    else:
        language, world = SINGLE_LAYOUTS[which]
        fields, replicas = {loss_modality: language}, 2 if "dp 2" in which else 1
    return {key: {**case.modality_paths.get(key, {}), **value} for key, value in fields.items()}, world, replicas


def build(name: str, variant: str) -> L.LightningModule:
    module = CASES[name].build()
    apply_freeze(module, CASES[name], variant)
    return module


def frozen_variants(name: str) -> list[str]:
    return [variant for variant in CASES[name].frozen if variant != "none"]


@lru_cache
def reference(name: str, variant: str) -> tuple[Recorder, dict[str, torch.Tensor]]:
    module = build(name, variant)
    recorder = fit(module, [CASES[name].batch(SAMPLES, seed=step) for step in range(STEPS)])
    return recorder, module.state_dict()


def train(rank: int, name: str, which: str, variant: str) -> tuple[list[float], list[Any], dict[str, torch.Tensor]]:
    """One rank's run: its losses, the gradients of each step, and at the end the parameters that it returns."""
    case = CASES[name]
    fields, world, replicas = layout(name, which)
    # a loss over pairs of samples is no mean over microbatches
    count = MICROBATCHES if case.mean_of_samples else 1
    batches = [case.batch(SAMPLES, seed=step) for step in range(STEPS)]
    chosen = strategy({key: Modality(**value) for key, value in fields.items()}, num_microbatches=count)
    module = build(name, variant)
    if replicas > 1:
        parts = [part for batch in batches for part in case.split(batch, replicas)]
        recorder = fit(module, parts, chosen, world, use_distributed_sampler=True)
    else:
        recorder = fit(module, batches, chosen, world)
    return recorder.losses, recorder.gradients, module.state_dict()


def check(name: str, which: str, variant: str) -> None:
    recorder, parameters = reference(name, variant)
    _, world, replicas = layout(name, which)
    ranks = call_ranks(world, train, name, which, variant)
    assert_equal_to_one_process(
        ranks, recorder, parameters, with_losses=replicas == 1, where=which, **tolerance(name in FLOAT64)
    )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("name", "which"),
    covering(
        product(WITH_ENCODERS, ENCODER_LAYOUTS),
        *((0,), (1,)),
        kept=[("llava", "{e} pp 2 | language pp 2"), ("qwen2_5_omni_thinker", "{e} with language pp 2")],
    ),
)
def test_layouts_with_encoders_equal_one_process(name: str, which: str) -> None:
    if layout(name, which)[2] > 1 and not CASES[name].mean_of_samples:
        # two replicas of a contrastive loss are another loss; that they train is what there is to see
        assert len(call_ranks(layout(name, which)[1], train, name, which, "none")[0][0]) == STEPS
        return
    check(name, which, "none")


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("name", "which"), covering(product(SINGLE, SINGLE_LAYOUTS), (0,), (1,), kept=[("gpt2", "pp 2 dp 2")])
)
def test_layouts_of_one_modality_equal_one_process(name: str, which: str) -> None:
    check(name, which, "none")


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("name", "variant", "which"),
    covering(
        [
            *((name, *case) for name in WITH_ENCODERS for case in product(frozen_variants(name), FROZEN_LAYOUTS)),
            *((name, variant, "pp 2") for name in SINGLE for variant in frozen_variants(name)),
        ],
        (1, 2),
    ),
)
def test_frozen_parts_equal_one_process(name: str, variant: str, which: str) -> None:
    check(name, which, variant)
