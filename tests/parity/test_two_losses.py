"""Models that speak or draw after their language model equal one process: losses, gradients and parameters.

Qwen2.5-Omni has a talker with layers of its own, which it splits as any other modality; Janus has a head.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from compare import assert_equal_to_one_process
from lightning_mm5d import Modality
from parity.harness import Recorder, fit, strategy
from ranks import call_ranks
from zoo.outputs import batch_of, build

SAMPLES, STEPS = 8, 2
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}  # transformers' causal loss and the talker's logits are float32

# fields by modality, ranks, options of the strategy, what is frozen
Layout = tuple[dict[str, dict[str, Any]], int, dict[str, Any], tuple[str, ...]]
ON_LANGUAGE = {"colocate_with": "language"}
BESIDE = {"tp_size": 2, "interleaved_microbatches": 2}
OMNI: dict[str, Layout] = {
    "own ranks": ({}, 4, {}, ()),
    "one rank for encoders": ({"audio": {"colocate_with": "vision"}}, 3, {}, ()),
    "pp 2 of language": ({"audio": ON_LANGUAGE, "vision": ON_LANGUAGE, "language": {"pp_size": 2}}, 3, {}, ()),
    "pp 2 of the talker": ({"audio": ON_LANGUAGE, "vision": ON_LANGUAGE, "talker": {"pp_size": 2}}, 3, {}, ()),
    "pp 2 of both, zbv": (
        {
            "audio": ON_LANGUAGE,
            "vision": {"colocate_with": "talker"},
            "language": {"pp_size": 2},
            "talker": {"pp_size": 2},
        },
        4,
        {"schedule": "zbv"},
        (),
    ),
    "interleaved": (
        {
            "audio": ON_LANGUAGE,
            "vision": ON_LANGUAGE,
            "language": {"pp_size": 2, "pp_chunks": 2},
            "talker": {"pp_size": 2, "pp_chunks": 2, **ON_LANGUAGE},
        },
        2,
        {"schedule": "interleaved"},
        (),
    ),
    "zero bubble": (
        {"audio": ON_LANGUAGE, "vision": ON_LANGUAGE, "language": {"pp_size": 2}, "talker": {"pp_size": 2}},
        4,
        {"schedule": "zero_bubble"},
        (),
    ),
    "tp 2 of language": ({"audio": ON_LANGUAGE, "vision": ON_LANGUAGE, "language": {"tp_size": 2}}, 3, {}, ()),
    "tp 2 of the talker": ({"audio": ON_LANGUAGE, "vision": ON_LANGUAGE, "talker": {"tp_size": 2}}, 3, {}, ()),
    "tp 2 of both": (
        {
            "audio": ON_LANGUAGE,
            "vision": ON_LANGUAGE,
            "language": {"tp_size": 2, "sequence_parallel": True},
            "talker": {"tp_size": 2, **ON_LANGUAGE},
        },
        2,
        {},
        (),
    ),
    "tp 2 of both, side by side": (
        {"audio": {"colocate_with": "vision"}, "language": BESIDE, "talker": {**BESIDE, **ON_LANGUAGE}},
        3,
        {},
        (),
    ),
    "tp 2 of both on own ranks, side by side": (
        {"audio": {"colocate_with": "vision"}, "language": BESIDE, "talker": BESIDE},
        5,
        {},
        (),
    ),
    "cp 2 of language": ({"audio": ON_LANGUAGE, "vision": ON_LANGUAGE, "language": {"cp_size": 2}}, 3, {}, ()),
    "cp 2 of the talker": ({"audio": ON_LANGUAGE, "vision": ON_LANGUAGE, "talker": {"cp_size": 2}}, 3, {}, ()),
    "cp 2 of both": (
        {
            "audio": ON_LANGUAGE,
            "vision": ON_LANGUAGE,
            "language": {"cp_size": 2},
            "talker": {"cp_size": 2, **ON_LANGUAGE},
        },
        2,
        {},
        (),
    ),
    "all on one rank": ({"audio": ON_LANGUAGE, "vision": ON_LANGUAGE, "talker": ON_LANGUAGE}, 1, {}, ()),
    "dp 2 of language": (
        {"audio": {"dp_size": 1}, "vision": {"dp_size": 1}, "language": {"dp_size": 2}, "talker": {"dp_size": 1}},
        5,
        {},
        (),
    ),
    "frozen thinker": (
        {"audio": ON_LANGUAGE, "vision": ON_LANGUAGE, "talker": {"pp_size": 2}},
        3,
        {},
        ("model.thinker",),
    ),
    "frozen talker": (
        {"audio": ON_LANGUAGE, "vision": ON_LANGUAGE, "language": {"pp_size": 2}},
        3,
        {},
        ("model.talker",),
    ),
}
JANUS: dict[str, Layout] = {
    "own ranks": ({}, 3, {}, ()),
    "pp 2 of language": ({"vision": ON_LANGUAGE, "language": {"pp_size": 2}}, 3, {}, ()),
    "pp 3 of language, zbv": (
        {"vision": ON_LANGUAGE, "language": {"pp_size": 2}, "image_head": {"colocate_with": "language.1"}},
        2,
        {"schedule": "zbv"},
        (),
    ),
    "zero bubble": ({"vision": {}, "language": {"pp_size": 2}}, 4, {"schedule": "zero_bubble"}, ()),
    "interleaved": (
        {"language": {"pp_size": 2, "pp_chunks": 2}, "image_head": {"colocate_with": "vision"}},
        3,
        {"schedule": "interleaved"},
        (),
    ),
    "tp 2 of language": ({"vision": ON_LANGUAGE, "language": {"tp_size": 2}}, 3, {}, ()),
    "tp 2 of the head": ({"vision": ON_LANGUAGE, "image_head": {"tp_size": 2}}, 3, {}, ()),
    "cp 2 of language": ({"vision": ON_LANGUAGE, "language": {"cp_size": 2}}, 3, {}, ()),
    "all on one rank": ({"vision": ON_LANGUAGE, "image_head": ON_LANGUAGE}, 1, {}, ()),
    "dp 2 of language": (
        {"vision": {"dp_size": 1}, "language": {"dp_size": 2}, "image_head": {"dp_size": 1}},
        4,
        {},
        (),
    ),
    "frozen language": (
        {"vision": ON_LANGUAGE, "language": {"pp_size": 2}},
        3,
        {},
        ("model.model.language_model", "model.model.vision_model", "model.model.aligner", "model.lm_head"),
    ),
    "frozen head": ({"vision": ON_LANGUAGE, "language": {"pp_size": 2}}, 3, {}, ("model.model.generation_head",)),
}
NAMES = {"omni": ("vision", "audio", "language", "talker"), "janus": ("vision", "language", "image_head")}
LAYOUTS = {"omni": OMNI, "janus": JANUS}
QUICK = {("janus", "pp 3 of language, zbv"), ("omni", "cp 2 of language"), ("janus", "tp 2 of language")}
EVERY = [
    pytest.param(name, which, marks=[] if (name, which) in QUICK else pytest.mark.exhaustive)
    for name, layouts in LAYOUTS.items()
    for which in layouts
]


def made(name: str, frozen: tuple[str, ...]) -> Any:
    module = build(name)
    for path in frozen:
        module.get_submodule(path).requires_grad_(False)
    return module


@lru_cache
def reference(name: str, frozen: tuple[str, ...]) -> tuple[Recorder, dict[str, torch.Tensor]]:
    module = made(name, frozen)
    recorder = fit(module, [batch_of(name, SAMPLES, step) for step in range(STEPS)])
    return recorder, module.state_dict()


def train(rank: int, name: str, which: str) -> tuple[list[float], list[Any], dict[str, torch.Tensor]]:
    changes, world, options, frozen = LAYOUTS[name][which]
    fields = {key: Modality(**changes.get(key, {})) for key in NAMES[name]}
    module = made(name, frozen)
    batches = [batch_of(name, SAMPLES, step) for step in range(STEPS)]
    chosen = strategy(fields, **{"num_microbatches": 4, **options})
    recorder = fit(module, batches, chosen, world)
    return recorder.losses, recorder.gradients, module.state_dict()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("name", "which"), EVERY)
def test_two_losses_equal_one_process(name: str, which: str) -> None:
    _, world, _, frozen = LAYOUTS[name][which]
    recorder, parameters = reference(name, frozen)
    ranks = call_ranks(world, train, name, which)

    assert_equal_to_one_process(ranks, recorder, parameters, where=which, **TOLERANCE)
