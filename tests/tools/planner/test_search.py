"""The search: what it finds is valid, as short as its simulation says, and the shortest of all where all are tried."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from lightning_mm5d.config.checks import check
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.layout.layout import Layout
from lightning_mm5d.partition.costs import Unit
from lightning_mm5d.tools.planner.search import Found, search

SMALL = {"vision": [0.5, *[1.0] * 6, 0.5], "audio": [0.0, *[0.5] * 4, 0.0], "language": [0.0, *[1.0] * 12, 2.0]}


def row(name: str, forwards: Sequence[float]) -> list[Unit]:
    return [Unit.of({f"{name}.{index}": cost}) for index, cost in enumerate(forwards)]


def run(
    costs: Mapping[str, Sequence[float]], num_ranks: int, *, frozen: Sequence[str] = (), count: int = 8, **rest: Any
) -> Found:
    rows = {name: row(name, forwards) for name, forwards in costs.items()}
    modalities = rest.pop("modalities", {name: Modality() for name in costs})
    trainable = {key for name in rows if name not in frozen for unit in rows[name] for key in unit.costs}
    return search(
        rows, modalities, num_ranks, loss_modality="language", trainable=trainable, num_microbatches=count, **rest
    )


def said(found: Found) -> dict[str, tuple[Any, Any]]:
    """For each modality its stages and whose ranks it shares."""
    return {
        name: (modality.pipeline_template and modality.pipeline_template.stages, modality.colocate_with)
        for name, modality in found.modalities.items()
    }


# ------------------------------------------------------------------ what is found


def test_one_rank_runs_everything_as_one_stage() -> None:
    found = run(SMALL, 1)
    assert said(found) == {"vision": (None, "language"), "audio": (None, "language"), "language": (None, None)}
    # a forward of each, and twice that for its backward, of 8 microbatches
    assert found.busiest == found.makespan == 8 * 3 * (7 + 2 + 14)


def test_boundaries_between_modalities_lie_inside_a_rank_where_that_evens_the_load() -> None:
    """vision.0: rank 0; vision.1 and language.0: rank 1; language.1: rank 2."""
    found = run({"vision": [0.0, *[1.0] * 7, 0.0], "language": [0.0, *[1.0] * 11, 0.0]}, 3, count=64)
    assert said(found) == {"vision": ([6, 1], "language.0"), "language": ([5, 6], None)}
    assert found.busiest == 64 * 3 * 6


def test_modalities_that_are_even_already_share_nothing() -> None:
    """vision: ranks 0-1; language: ranks 2-5."""
    found = run({"vision": [0.0, *[1.0] * 6, 0.0], "language": [0.0, *[1.0] * 12, 0.0]}, 6)
    assert said(found) == {"vision": ([3, 3], None), "language": ([3, 3, 3, 3], None)}


def test_small_encoders_share_a_rank() -> None:
    """vision and audio: rank 0; language: ranks 1-6."""
    costs = {"vision": [0.0, 0.5, 0.5, 0.0], "audio": [0.0, 1.0, 0.0], "language": [0.0, *[2.0] * 6, 0.0]}
    found = run(costs, 7, count=32)
    assert said(found)["audio"] == (None, "vision")
    assert found.busiest == 32 * 3 * 2


def test_frozen_encoders_get_fewer_ranks() -> None:
    costs = {"vision": [0.0, *[1.0] * 12, 0.0], "language": [0.0, *[1.0] * 12, 0.0]}
    trained, frozen = run(costs, 4, count=16), run(costs, 4, frozen=["vision"], count=16)
    assert said(trained) == {"vision": ([6, 6], None), "language": ([6, 6], None)}
    # the forward is a quarter of all there is to do, and the language model passes no gradients on
    assert frozen.modalities["vision"].own_ranks_per_replica <= 1
    assert frozen.makespan < trained.makespan


def test_a_model_without_encoders_is_cut_evenly() -> None:
    assert said(run({"language": [0.0, *[1.0] * 8, 0.0]}, 4)) == {"language": ([2, 2, 2, 2], None)}


def test_encoders_that_are_used_late_are_placed_as_such() -> None:
    costs = {"vision": [0.0, *[1.0] * 4, 0.0], "language": [0.0, *[1.0] * 4, 0.0]}
    found = run(costs, 2, late=["vision"], count=4)
    assert found.makespan <= run(costs, 2, count=4).makespan


def test_the_makespan_is_the_shortest_of_all_placements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a search that simulates every placement it has."""
    costs = {"vision": [0.0, 2.0, 3.0, 1.0], "audio": [1.0, 1.0, 0.0], "language": [1.0, 1.0, 2.0, 4.0, 2.0]}
    for num_ranks in (2, 3, 4, 5):
        for frozen in ((), ("vision",), ("vision", "audio")):
            quick = run(costs, num_ranks, frozen=frozen, count=3)
            with monkeypatch.context() as patched:
                patched.setattr("lightning_mm5d.tools.planner.search.lower_bound", lambda graph: 0.0)
                slow = run(costs, num_ranks, frozen=frozen, count=3)
            assert slow.simulated == slow.placed
            assert quick.simulated <= slow.simulated
            assert quick.makespan == pytest.approx(slow.makespan)
            assert quick.modalities == slow.modalities


def test_makespans_are_never_below_what_the_busiest_rank_works() -> None:
    for num_ranks in (2, 3, 7):
        found = run(SMALL, num_ranks)
        assert found.makespan >= found.busiest > 0


def test_equal_searches_find_equal_things() -> None:
    assert run(SMALL, 5) == run(SMALL, 5)


# ------------------------------------------------------------------ what it is as configuration


@pytest.mark.parametrize("replicas", [None, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 9, 22])
def test_what_is_found_is_a_configuration_that_fills_the_world(num_ranks: int, replicas: int | None) -> None:
    modalities = {
        "vision": Modality(module="model.vision", dp_size=4, pp_size=3, pp_chunks=2, cost=2.0),
        "audio": Modality(colocate_with="vision"),
        "language": Modality(dp_size=replicas),
    }
    found = run(SMALL, num_ranks, modalities=modalities).modalities
    check(found, loss_modality="language", num_microbatches=8, schedule="1f1b", schedules=["1f1b"])
    layout = Layout.build(found, world_size=num_ranks * (replicas or 1), loss_modality="language")
    assert layout.num_replicas == (replicas or 1)
    assert found["vision"].module == "model.vision"
    assert (found["vision"].pp_chunks, found["vision"].cost) == (1, None)


def test_tensor_parallel_sizes_are_kept_and_counted() -> None:
    """language: two ranks for each stage, so that an encoder with one shares none of them."""
    modalities = {"vision": Modality(), "audio": Modality(), "language": Modality(tp_size=2)}
    found = run(SMALL, 7, modalities=modalities).modalities
    assert found["language"].tp_size == 2
    assert Layout.build(found, world_size=7, loss_modality="language").num_replicas == 1
    assert not any(str(modality.colocate_with).startswith("language") for modality in found.values())


def test_schedules_are_judged_by_their_own_makespans() -> None:
    split = run(SMALL, 4, schedule="zero_bubble")
    assert split.makespan < run(SMALL, 4).makespan


# ------------------------------------------------------------------ what is refused


def test_refuses_more_ranks_than_layers() -> None:
    with pytest.raises(ConfigError, match="fill up to 22 ranks") as caught:
        run(SMALL, 23)
    assert (caught.value.field, caught.value.got) == ("num_ranks", 23)
    assert caught.value.fix.startswith("Nearest that fit: 22 for each replica")
    wide = {name: Modality(tp_size=2) for name in SMALL}
    with pytest.raises(ConfigError, match="Nearest that fit: 4 or 6 for each replica"):
        run(SMALL, 5, modalities=wide)


def test_refuses_encoders_that_feed_stages_by_number() -> None:
    modalities = {"vision": Modality(feeds=[1]), "audio": Modality(), "language": Modality()}
    with pytest.raises(ConfigError, match=r"modalities\.vision\.feeds") as caught:
        run(SMALL, 4, modalities=modalities)
    assert caught.value.fix == "Use 'first' or 'all'"


def test_stages_that_say_what_they_compute_again_keep_their_number() -> None:
    def listed(*kinds: str) -> Found:
        modalities = {
            "vision": Modality(),
            "audio": Modality(),
            "language": Modality(pp_size=len(kinds), activation_checkpointing={"per_stage": list(kinds)}),
        }
        return run(SMALL, 4, modalities=modalities)

    found, plain = listed("full", "none", "none"), listed("none", "none", "none")
    assert found.modalities["language"].pp_size == plain.modalities["language"].pp_size == 3
    assert found.modalities["language"].activation_checkpointing == {"per_stage": ["full", "none", "none"]}
    assert found.makespan > plain.makespan
    with pytest.raises(ConfigError, match=r"activation_checkpointing.*lists 5 stages, and no layout of 4 ranks"):
        listed(*["full"] * 5)


def test_a_large_search_takes_seconds() -> None:
    costs = {
        "vision": [0.5, *[1.0] * 24, 0.5],
        "audio": [0.0, *[0.5] * 16, 0.0],
        "language": [0.0, *[3.0] * 40, 4.0],
    }
    start = time.process_time()
    found = run(costs, 24, count=16)
    assert time.process_time() - start < 20
    assert found.simulated <= 48
