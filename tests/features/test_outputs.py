"""Modalities that run after the language model: several losses on several ranks are one number.

The modules are in `speaking`. Each layout is compared with one process: losses, logs and weights of two steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import lightning as L
import pytest

from features.speaking import Drawing, Speaking
from features.toys import Layout, Run, Toy, alone, assert_same, figures, weights
from lightning_mm5d import Modality
from ranks import call_ranks
from sweeps import swept

VISION = {"module": "model.thinker.visual"}


def trained(run: Run, make: Callable[[], Toy]) -> Any:
    trainer, module = run.trainer(limit_train_batches=2), make()
    trainer.fit(module, run.training())
    return figures(trainer), weights(module)


def on_rank(rank: int, run: Run, make: Callable[[], Toy]) -> Any:
    warnings.simplefilter("ignore")
    return trained(run, make)


@cache
def expected(make: Callable[[], Toy]) -> Any:
    return alone(lambda run: trained(run, make))


def check(
    make: Callable[[], Toy], modalities: dict[str, Modality], world: int, replicas: int = 1, **options: Any
) -> None:
    got = call_ranks(world, on_rank, Run(Layout(modalities, world, replicas), options), make)
    assert_same(got[0][1], expected(make)[1])
    for found, _ in got:
        assert_same(found, expected(make)[0])


LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    # vision: rank 0; language: rank 1; talker: rank 2
    "own ranks": (3, 1, {}),
    # vision: rank 0; language: ranks 1-2 as stages; talker: ranks 3-4 as stages
    "pp 2 each": (5, 1, {"language": {"pp_size": 2}, "talker": {"pp_size": 2}}),
    # vision and language: rank 0; talker: ranks 1-3 as stages
    "pp 3 of the talker": (4, 1, {"language": {"colocate_with": "vision"}, "talker": {"pp_size": 3}}),
    # vision, language and talker: rank 0
    "one rank": (1, 1, {"vision": {"colocate_with": "language"}, "talker": {"colocate_with": "language"}}),
    # vision and talker: rank 0, with language on rank 1 between them
    "around the language model": (2, 1, {"talker": {"colocate_with": "vision"}}),
    # vision: rank 0, language: rank 1, both for the two replicas of the talker on ranks 2-3
    "dp 2 of the talker": (4, 2, {"vision": {"dp_size": 1}, "language": {"dp_size": 1}, "talker": {"dp_size": 2}}),
    # vision: rank 0; language: ranks 1-2, which take turns; talker: rank 3
    "dp 2 of the language model": (
        4,
        1,
        {"vision": {"dp_size": 1}, "language": {"dp_size": 2}, "talker": {"dp_size": 1}},
    ),
}


def modalities_of(changes: dict[str, dict[str, Any]]) -> dict[str, Modality]:
    said: dict[str, dict[str, Any]] = {"vision": VISION, "language": {}, "talker": {}}
    return {name: Modality(**fields, **changes.get(name, {})) for name, fields in said.items()}


@pytest.mark.parametrize("which", swept(LAYOUTS, "pp 3 of the talker", "dp 2 of the language model"))
def test_text_and_speech_equal_one_process(which: str) -> None:
    world, replicas, changes = LAYOUTS[which]
    check(Speaking, modalities_of(changes), world, replicas)


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_text_and_speech_equal_one_process_under_a_schedule(schedule: str) -> None:
    """vision: rank 0; language and talker: both on ranks 1-2, two chunks of each on both under zbv and interleaved."""
    chunks = {"pp_chunks": 2} if schedule == "interleaved" else {}
    changes = {"language": {"pp_size": 2, **chunks}, "talker": {"pp_size": 2, "colocate_with": "language", **chunks}}
    check(Speaking, modalities_of(changes), 3, schedule=schedule)


PAINTER = {"module": "model.painter", "feeds_from": "language"}
DRAWING: dict[str, tuple[dict[str, Modality], int]] = {
    # vision: rank 0; language: rank 1; painter: rank 2; talker: rank 3
    "own ranks": (
        {
            "vision": Modality(**VISION),
            "language": Modality(),
            "painter": Modality(**PAINTER),
            "talker": Modality(),
        },
        4,
    ),
    # vision and language: ranks 0-1 as stages; painter and talker: ranks 2-3 as stages
    "both on ranks 2-3": (
        {
            "vision": Modality(**VISION, colocate_with="language.0"),
            "language": Modality(pp_size=2),
            "painter": Modality(**PAINTER, pp_size=2),
            "talker": Modality(pp_size=2, colocate_with="painter"),
        },
        4,
    ),
    # vision and language: rank 0; talker: rank 1; painter, which computes the loss: ranks 2-3 as stages
    "the painter last": (
        {
            "vision": Modality(**VISION, colocate_with="language"),
            "language": Modality(),
            "talker": Modality(),
            "painter": Modality(**PAINTER, pp_size=2),
        },
        4,
    ),
}


def drawn(rank: int, modalities: dict[str, Modality], world: int, dropout: float) -> tuple[Any, Any, list[float]]:
    warnings.simplefilter("ignore")
    L.seed_everything(3, verbose=False)
    module, run = Drawing(dropout=dropout), Run(Layout(modalities, world))
    trainer = run.trainer(limit_train_batches=2)
    trainer.fit(module, run.training())
    return figures(trainer), weights(module), module.noises


@pytest.mark.parametrize("which", swept(DRAWING, "both on ranks 2-3"))
def test_three_losses_equal_the_rest_of_the_step_on_one_rank(which: str) -> None:
    """The reference has vision on rank 0 and all else on rank 1, so that the step draws the same noise."""
    pair = {"vision": Modality(**VISION), "language": Modality()}
    wanted = call_ranks(2, drawn, pair, 2, 0.0)[0]
    got = call_ranks(DRAWING[which][1], drawn, *DRAWING[which], 0.0)
    assert_same(got[0][1], wanted[1])
    for found, *_ in got:
        assert_same(found, wanted[0])


def test_all_stages_draw_the_same_noise_with_dropout_in_layers() -> None:
    """What the painter is given and what the loss compares it with are drawn on different ranks."""
    got = call_ranks(4, drawn, *DRAWING["both on ranks 2-3"], 0.3)
    seen = [noises for *_, noises in got if noises]
    assert len(seen) >= 2
    assert all(set(noises) == set(seen[0]) for noises in seen)
