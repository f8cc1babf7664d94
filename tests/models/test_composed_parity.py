"""Composed models in any layout train as on one process: losses of each step and parameters at the end.

Every batch has samples with none, one and two items, and some microbatches have none. In the layouts "v", "a" and "l"
are the encoders of vision and audio and the language model.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from lightning_mm5d import Modality
from lightning_mm5d.data.microbatch import split
from lightning_mm5d.data.packed_images import describe
from parity.harness import fit, strategy
from ranks import call_ranks

from .changes import CHANGES
from .composed import batch, build

STEPS, MICROBATCHES = 2, 4
ITEMS = {"vision": [0, 0, 1, 2, 0, 1, 2, 1], "audio": [1, 0, 0, 0, 2, 1, 0, 1], "depth": [0, 2, 1, 0, 1, 1, 0, 0]}
# fields of every encoder, fields of the language model, ranks of each encoder, ranks of the language model, replicas
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], int, int, int]] = {
    "v | l": ({}, {}, 1, 1, 1),
    "v | l pp 2": ({}, {"pp_size": 2}, 1, 2, 1),
    "v pp 2 | l": ({"pp_size": 2}, {}, 2, 1, 1),
    "v pp 2 | l pp 2": ({"pp_size": 2}, {"pp_size": 2}, 2, 2, 1),
    "v tp 2 | l tp 2": ({"tp_size": 2}, {"tp_size": 2}, 2, 2, 1),
    "v tp 2 | l": ({"tp_size": 2}, {}, 2, 1, 1),
    "v | l cp 2": ({}, {"cp_size": 2}, 1, 2, 1),
    "v dp 1 | l dp 2": ({"dp_size": 1}, {"dp_size": 2}, 1, 2, 2),
    "v with l pp 2": ({"colocate_with": "language"}, {"pp_size": 2}, 0, 2, 1),
}
CASES = [  # model, what is done to it, layout
    ("two", "none", "v | l pp 2"),
    ("unlike lengths", "none", "v pp 2 | l"),
    ("callbacks", "none", "v with l pp 2"),
    ("former", "frozen ends", "v tp 2 | l"),
    ("clip mlp", "lora", "v | l pp 2"),
]
MORE = [
    *(("clip mlp", "none", which) for which in LAYOUTS),
    *(("two", "none", which) for which in ("v tp 2 | l tp 2", "v with l pp 2", "v dp 1 | l dp 2")),
    *(("one input name", "none", which) for which in ("v | l pp 2", "v with l pp 2")),
    ("callbacks", "none", "v pp 2 | l"),
    ("former", "frozen ends", "v tp 2 | l tp 2"),
    *(("former", "none", which) for which in ("v tp 2 | l tp 2", "v pp 2 | l pp 2", "v | l cp 2", "v dp 1 | l dp 2")),
    *(("unlike lengths", "none", which) for which in ("v | l pp 2", "v tp 2 | l tp 2", "v | l cp 2")),
    *(("clip mlp", change, "v pp 2 | l pp 2") for change in ("frozen ends", "lora", "recomputed")),
]
FLOAT32 = ("unlike lengths", "llama")  # norms of these drop to float32


def _batches(module: Any, name: str) -> list[dict[str, Any]]:
    model = getattr(module.model, "base_model", module.model)
    model = getattr(model, "model", model)
    counts = {key: ITEMS[key] for key in model.encoders}
    return [batch(model, counts, seed=step, told=step > 0 or name != "unlike lengths") for step in range(STEPS)]


def _module(name: str, change: str) -> Any:
    return build(name, CHANGES[change])


@lru_cache
def reference(name: str, change: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    module = _module(name, change)
    # the microbatches' mean: recomputation and dropout aside, the same number as the batch's
    return fit(module, _batches(module, name)).losses, module.state_dict()


def train(rank: int, name: str, change: str, which: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    encoder, language, _, _, replicas = LAYOUTS[which]
    module = _module(name, change)
    batches, options = _batches(module, name), {}
    if replicas > 1:
        packed = describe(module)
        batches = [part.batch for one in batches for part in split(one, replicas, image_tokens=packed)]
        options = {"use_distributed_sampler": True}
    names = [*dict.fromkeys(key for key in ITEMS if any(f"encoders.{key}." in n for n, _ in module.named_parameters()))]
    modalities = {**{key: Modality(**encoder) for key in names}, "language": Modality(**language)}
    recorder = fit(module, batches, strategy(modalities, num_microbatches=MICROBATCHES), _world(name, which), **options)
    return recorder.losses, module.state_dict()


def _world(name: str, which: str) -> int:
    _, _, each, ranks, _ = LAYOUTS[which]
    return each * (2 if name in ("two", "one input name") else 1) + ranks


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("name", "change", "which"),
    [
        *(pytest.param(*case, id="-".join(case)) for case in CASES),
        *(pytest.param(*case, id="-".join(case), marks=pytest.mark.exhaustive) for case in MORE),
    ],
)
def test_composed_models_train_as_on_one_process(name: str, change: str, which: str) -> None:
    losses, parameters = reference(name, change)
    ranks = call_ranks(_world(name, which), train, name, change, which)
    close = {"rtol": 1e-6, "atol": 1e-7} if name in FLOAT32 else {"rtol": 1e-9, "atol": 1e-11}
    if LAYOUTS[which][4] == 1:
        for found, _ in ranks:
            torch.testing.assert_close(found, losses, **close)
    for key, value in parameters.items():
        torch.testing.assert_close(ranks[0][1][key], value, msg=lambda m, key=key: f"{key}: {m}", **close)
