"""The search of layouts: as fast as the fastest of all, within memory, and accepted by the strategy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from typing import Any

import pytest

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.groups import with_fields
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.tools.planner import search
from lightning_mm5d.tools.planner.layout_costs import Link
from lightning_mm5d.tools.planner.search import Candidate, Judged, LayoutSearch, words
from tools.planner.searches import searching


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_TRIED", 30)


SLOW: dict[str, Any] = {"inside": Link(1e-6, 1e9), "flops": 1e9, "memory_bandwidth": 1e10}


def brute_force(one: LayoutSearch) -> float:
    """The shortest step of all candidates, each simulated, without bounds."""
    best = math.inf
    ways = [
        one._saving(sizes, levels, offloads=False)
        for sizes in one._choices()
        for levels in product(*(range(most + 1) for most in one._most_levels(sizes)))
    ]
    for choice in ways:
        for _, candidate in one._placed(choice):
            try:
                judged = one.judged(candidate)
            except ConfigError:
                continue
            if judged.memory.peak <= one.memory:
                best = min(best, judged.time.seconds)
    return best


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "ranks"), [("handwritten", 2), ("handwritten", 3), ("llama", 4)])
def test_the_first_is_as_fast_as_the_fastest_of_all(name: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for field, value in {"_TRIED": 10**6, "_RECOMPUTATION": ("none", "full"), "_OF_CHUNKS": ()}.items():
        monkeypatch.setattr(search, field, value)
    one = searching(name, ranks, samples=2, **SLOW)
    one.shares = False
    found = one.best()
    quick = one.tried
    shortest = brute_force(one)
    assert found[0].time.seconds == pytest.approx(shortest)
    assert quick < one.tried - quick
    assert [each.time.seconds for each in found] == sorted(each.time.seconds for each in found)
    for each in found:
        assert one.accepted(each.candidate).layout.size == ranks


@pytest.mark.filterwarnings("ignore")
def test_what_is_found_fits_into_memory_and_takes_longer() -> None:
    free = searching("llama", 2, **SLOW)
    fastest = free.best()[0]
    limited = searching("llama", 2, memory=fastest.memory.peak - 1, **SLOW).best()
    assert all(one.memory.peak < fastest.memory.peak for one in limited)
    assert (
        limited[0].time.seconds >= fastest.time.seconds * 0.99
    )  # ranks that share states are tried where they must, and share the update


@pytest.mark.filterwarnings("ignore")
def test_where_nothing_fits_the_smallest_need_is_named() -> None:
    one = searching("llama", 2, memory=100, **SLOW)
    assert one.best() == []
    refusal = one.refusal()
    assert "Of the layouts that were tried the smallest needs" in refusal.rule
    assert one.least is not None
    allowed = searching("llama", 2, memory=one.least[0], **SLOW)
    assert allowed.best()


@pytest.mark.filterwarnings("ignore")
def test_slow_links_keep_layers_whole() -> None:
    found = searching("handwritten", 2, inside=Link(1.0, 1e6), flops=1e9).best()[0].candidate
    assert all(one.tp_size == one.cp_size == 1 for one in found.modalities.values())


def test_given_seconds_are_those_of_a_forward() -> None:
    given = {"vision": [9.0], "language": [1.0]}
    costs = searching("handwritten", 2, costs=given).costs
    for name, (seconds,) in given.items():
        assert sum(one.forward for one in costs.units(name, Modality(), costs.samples)) == pytest.approx(seconds)


@pytest.mark.filterwarnings("ignore")
def test_sizes_that_a_run_refuses_are_not_tried() -> None:
    """No tensor parallel plan is known for its layers."""
    one = searching("handwritten", 2)
    assert {modality.tp_size for modality in one._sizes("language")} == {1}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"vision": {"feeds": [0]}}, "modalities.vision.feeds: got [0]. It lists stages"),
        ({"language": {"activation_checkpointing": {"per_stage": ["full"]}}}, "Use a fraction"),
    ],
)
def test_refuses_what_lists_stages(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        searching("handwritten", 2, fields=fields)
    assert words in str(raised.value)


@pytest.mark.filterwarnings("ignore")
def test_a_search_that_ends_early_says_what_the_layouts_that_it_left_take_at_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "_TRIED", 1)
    ended = searching("handwritten", 2, **SLOW)
    assert len(ended.best()) == 1
    monkeypatch.setattr(search, "_TRIED", 10**6)
    whole = searching("handwritten", 2, **SLOW)
    shortest = whole.best()[-1].time.seconds
    assert whole.left is None
    assert ended.left is not None
    assert 0 < ended.left < shortest


def bare(one: Judged) -> str:
    """A layout without what brings memory down."""
    nothing: dict[str, Any] = {"activation_checkpointing": "none", "zero_stage": None, "offload": None}
    modalities = {name: with_fields(each, **nothing) for name, each in one.candidate.modalities.items()}
    return words(one.candidate._replace(modalities=modalities))


@pytest.mark.filterwarnings("ignore")
def test_the_best_five_differ_in_more_than_what_brings_memory_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_TRIED", 200)
    free = searching("handwritten", 2, **SLOW).best()
    tight = searching("handwritten", 2, memory=free[0].memory.peak - 1, **SLOW).best()
    for rows in (free, tight):
        assert len({bare(each) for each in rows}) == len(rows) > 1


@pytest.mark.filterwarnings("ignore")
def test_encoders_have_a_recomputation_of_their_own_and_none_where_they_are_frozen() -> None:
    one = searching("handwritten", 2, **SLOW)
    assert one._recomputed == (["language"], ["vision"])
    sizes = next(one._choices())
    chosen = one._saving(sizes, (2, 1, 0), offloads=False).modalities
    assert {name: each.memory.activation_checkpointing for name, each in chosen.items()} == {
        "vision": "selective",
        "language": "full",
    }
    parameters = one.costs.step.parameters
    for path in {path for unit in one.costs.rows["vision"] for path in unit.costs} & parameters.keys():
        parameters[path].requires_grad = False
    frozen = replace(one, costs=replace(one.costs, step=replace(one.costs.step)))
    assert frozen._recomputed == (["language"], [])
    assert frozen._most_levels(sizes)[1] == 0


@pytest.mark.filterwarnings("ignore")
def test_encoders_on_ranks_that_share_sequences_take_whole_items_which_is_faster() -> None:
    """vision and language on ranks 0-1."""
    one = searching("llava", 2, **SLOW)
    (chosen,) = (each for each in one._sizes("vision") if (each.cp_size, each.tp_size) == (2, 1))
    assert chosen.context.cp_mode == "items"
    assert {each.context.cp_mode for each in one._sizes("language")} == {"allgather"}

    def candidate(mode: str, samples: int) -> Candidate:
        language = replace(one.plan.modalities["language"], cp_size=2)
        modalities = {"vision": with_fields(chosen, cp_mode=mode), "language": language}
        return Candidate(modalities, "1f1b", samples, 4 // samples)

    def seconds(mode: str, samples: int) -> float:
        return one.judged(candidate(mode, samples)).time.seconds

    assert seconds("items", 2) < seconds("allgather", 2)
    assert seconds("items", 1) == seconds("allgather", 1), "sequences of a single item are split"
    assert one.accepted(candidate("items", 2)).modalities["vision"].context.cp_mode == "items"
    assert words(candidate("items", 2)).startswith("vision: cp 2 cp_mode items with language, language: cp 2;")
    configured = searching("llava", 2, fields={"vision": {"context": {"cp_mode": "ring"}}}, **SLOW)
    assert {each.context.cp_mode for each in configured._sizes("vision")} == {"ring"}


def modes(one: LayoutSearch, cp: int = 4, tp: int = 1) -> set[tuple[str, int | None]]:
    """How the language model's ranks reach each other's tokens in the choices of a search."""
    chosen = (sizes.modalities["language"] for sizes in one._choices())
    fitting = (each.context for each in chosen if (each.cp_size, each.tp_size) == (cp, tp))
    return {(each.cp_mode, each.ulysses_size) for each in fitting}


@pytest.mark.filterwarnings("ignore")
def test_ranks_of_the_language_model_reach_tokens_in_the_fastest_way_that_a_run_accepts() -> None:
    """A Llama with four heads, two of them of keys.

    Under slow flops a ring waits for nothing but its last gradients. With fast flops four ranks send, of their keys and
    values, 3 and 6 parts in an all-gather, 3 and 7 in a ring, 3 and 4.5 in an exchange for heads, which repeats those
    of keys, and 2.5 and 4.5 in a hybrid of two. Two ranks with two heads each, which read the same keys, send 1 and 2
    in an all-gather, 1 and 3 in a ring, and 2 and 3 in an exchange. With slow messages a ring has fewest.
    """
    first = searching("llama", 4, memory_bandwidth=1e300)

    def of(link: Link, flops: float) -> LayoutSearch:
        cluster = replace(first.costs.cluster, inside=link, flops=flops)
        return replace(first, costs=replace(first.costs, cluster=cluster, known={}))

    assert modes(of(Link(0.0, 1e9), 1e6)) == modes(of(Link(1.0, 1e9), 1e15)) == {("ring", None)}
    heads = of(Link(0.0, 1e9), 1e15)
    assert modes(heads) == {("hybrid", 2)}
    assert modes(heads, 2, 2) == {("allgather", None)}
    found = heads.judged(next(each for _, each in placed(heads) if each.modalities["language"].cp_size == 4))
    assert "cp 4 cp_mode hybrid of 2" in words(found.candidate)
    assert heads.accepted(found.candidate).modalities["language"].context.cp_mode == "hybrid"
    for mode in ("allgather", "ring", "ulysses"):
        language = with_fields(found.candidate.modalities["language"], cp_mode=mode, ulysses_size=None)
        slower = heads.judged(found.candidate._replace(modalities={"language": language}))
        assert slower.time.seconds > found.time.seconds
        assert slower.memory == found.memory, "the search compares their seconds alone"


def placed(one: LayoutSearch) -> Iterator[tuple[float, Candidate]]:
    return chain.from_iterable(map(one._placed, one._choices()))


@pytest.mark.filterwarnings("ignore")
def test_a_way_to_reach_tokens_that_is_configured_stays_and_a_hybrid_has_groups_of_any_size() -> None:
    for mode in ("ring", "ulysses"):
        assert modes(searching("llama", 4, fields={"language": {"cp_mode": mode}}, **SLOW)) == {(mode, None)}
    hybrid = searching("llama", 8, fields={"language": {"cp_size": 4, "cp_mode": "hybrid", "ulysses_size": 2}}, **SLOW)
    assert modes(hybrid) == {("hybrid", 2)}
    assert modes(hybrid, 8) <= {("hybrid", 2), ("hybrid", 4)}
    assert modes(hybrid, 2) == set(), "two ranks have no groups of several ranks"
    eight = replace(hybrid.plan.modalities["language"], cp_size=8)
    assert {each.context.ulysses_size for each in hybrid._modes(eight)} == {2, 4}
