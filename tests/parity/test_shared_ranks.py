"""A rank that holds the end of an encoder and a stage of the language model trains as one process does.

Each layout names what its ranks hold, in order: "vision.0 | vision.1+language.0 | language.1" is three ranks, the
second of which runs the encoder's last stage and the language model's first one. The default run holds each layout once
with each model of its kind, and each frozen part once; `exhaustive` holds the rest of the product.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from compare import assert_equal_to_one_process, tolerance
from lightning_mm5d import Modality
from parity.harness import fit, strategy
from parity.test_parity import FLOAT64, MICROBATCHES, SAMPLES, STEPS, build, reference
from ranks import call_ranks
from sweeps import covering
from tools.planner.searches import searching
from zoo import CASES

CPU = torch.device("cpu")
SHARES = {"colocate_with": "language.0"}
LAYOUTS: dict[str, tuple[dict[str, dict[str, Any]], int]] = {
    "vision+language.0 | language.1": ({"vision": SHARES, "language": {"pp_size": 2}}, 2),
    "vision+language": ({"vision": SHARES, "language": {}}, 1),
    "vision.0 | vision.1+language.0 | language.1": (
        {"vision": {"pp_size": 2, **SHARES}, "language": {"pp_size": 2}},
        3,
    ),
    "vision.0 | language.0 | vision.1+language.1": (
        {"vision": {"pp_size": 2, "colocate_with": "language.1"}, "language": {"pp_size": 2}},
        3,
    ),
    "vision+audio+language.0 | language.1": (
        {"vision": SHARES, "audio": SHARES, "language": {"pp_size": 2}},
        2,
    ),
    "vision.0 | vision.1+audio+language.0 | language.1": (
        {"vision": {"pp_size": 2, **SHARES}, "audio": SHARES, "language": {"pp_size": 2}},
        3,
    ),
    "vision.0+audio | vision.1 | language": (
        {"vision": {"pp_size": 2}, "audio": {"colocate_with": "vision.0"}, "language": {}},
        3,
    ),
    "vision+language.0+language.2 | language.1+language.3": (
        {"vision": SHARES, "language": {"pp_size": 2, "pp_chunks": 2}},
        2,
    ),
}
ONE_ENCODER = [which for which, (fields, _) in LAYOUTS.items() if "audio" not in fields]
TWO_ENCODERS = [which for which, (fields, _) in LAYOUTS.items() if "audio" in fields]


def train(
    rank: int, name: str, modalities: dict[str, Modality], world: int, variant: str, schedule: str, replicas: int
) -> tuple[list[float], list[Any], dict[str, torch.Tensor]]:
    """One rank's run: its losses, the gradients of each step, and at the end the parameters that it returns."""
    case = CASES[name]
    batches = [case.batch(SAMPLES, seed=step) for step in range(STEPS)]
    if replicas > 1:
        batches = [part for batch in batches for part in case.split(batch, replicas)]
    module = build(name, variant)
    chosen = strategy(modalities, num_microbatches=MICROBATCHES, schedule=schedule)
    recorder = fit(module, batches, chosen, world, use_distributed_sampler=replicas > 1)
    return recorder.losses, recorder.gradients, module.state_dict()


def laid_out(name: str, which: str) -> tuple[dict[str, Modality], int]:
    """The modalities of a layout, and its ranks."""
    fields, ranks = LAYOUTS[which]
    paths = CASES[name].modality_paths
    return {key: Modality(**paths.get(key, {}), **value) for key, value in fields.items()}, ranks


def check(
    name: str,
    layout: tuple[dict[str, Modality], int],
    *,
    variant: str = "none",
    schedule: str = "1f1b",
    replicas: int = 1,
) -> None:
    recorder, parameters = reference(name, variant)
    modalities, ranks_per_replica = layout
    world = ranks_per_replica * replicas
    ranks = call_ranks(world, train, name, modalities, world, variant, schedule, replicas)
    assert_equal_to_one_process(ranks, recorder, parameters, with_losses=replicas == 1, **tolerance(name in FLOAT64))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("name", "which", "schedule"),
    covering(product(("llava", "handwritten"), ONE_ENCODER, ["1f1b", "gpipe"]), (1,), (0, 2)),
)
def test_an_encoder_on_a_rank_of_the_language_model_equals_one_process(name: str, which: str, schedule: str) -> None:
    check(name, laid_out(name, which), schedule=schedule)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("which", "schedule"), covering(product(TWO_ENCODERS, ["1f1b", "gpipe"]), (0,), (1,)))
def test_two_encoders_that_share_ranks_equal_one_process(which: str, schedule: str) -> None:
    check("handwritten_two", laid_out("handwritten_two", which), schedule=schedule)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("which", "variant"), covering(product(ONE_ENCODER[:3], ["encoder", "projector_only", "language"]), (0,), (1,))
)
def test_frozen_parts_on_shared_ranks_equal_one_process(which: str, variant: str) -> None:
    check("handwritten", laid_out("handwritten", which), variant=variant)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("which", [ONE_ENCODER[0], ONE_ENCODER[2]])
def test_replicas_with_shared_ranks_equal_one_process(which: str) -> None:
    """Two replicas of each layout: dp runs inside a pipeline rank, so a replica has every second rank."""
    check("handwritten", laid_out("handwritten", which), replicas=2)


@pytest.mark.usefixtures("float64")
def test_what_the_planner_proposes_equals_one_process() -> None:
    """The vision encoder shares the language model's first rank, at least."""
    name = "handwritten_two"
    one = searching(name, 3, samples=MICROBATCHES, flops=1e12)  # so that products take most of the time
    sizes = next(each for each in one._choices() if each.modalities["language"].dp_size == 1 == each.samples)
    _, proposed = next(one._placed(sizes))
    assert proposed.modalities["vision"].colocate_with in ("language", "language.0")
    check(name, (dict(proposed.modalities), 3))
