"""The search of layouts: as fast as the fastest of all, within memory, and accepted by the strategy."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.tools.planner import search
from lightning_mm5d.tools.planner.layout_costs import Link
from lightning_mm5d.tools.planner.search import LayoutSearch
from tools.planner.searches import searching


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_TRIED", 30)


SLOW: dict[str, Any] = {"inside": Link(1e-6, 1e9), "flops": 1e9, "memory_bandwidth": 1e10}


def brute_force(one: LayoutSearch) -> float:
    """The shortest step of all candidates, each simulated, without bounds."""
    best = math.inf
    for choice in one._choices():
        for _, candidate in one._placed(choice):
            try:
                judged = one.judged(candidate)
            except ConfigError:
                continue
            assert judged is not None
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
