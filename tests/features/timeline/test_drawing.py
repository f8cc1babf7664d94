"""Pictures and traces of a simulation: vision (rank 0, frozen) -> language (ranks 1 and 2)."""

from __future__ import annotations

import builtins
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lightning_mm5d.features.timeline.drawing import COSTS, SECONDS, WORK, TimeUnit, chrome_trace, draw
from lightning_mm5d.schedule import Graph, Node, Simulation, build, simulate
from schedule.graphs import chain, chunked, tree


@pytest.fixture
def simulation() -> Simulation:
    stages = {"vision.0": 0.0, "language.0": 2.0, "language.1": 2.0}
    nodes = [
        Node(stage=stage, rank=rank, microbatches=(0, 1, 2), backward_cost=cost)
        for rank, (stage, cost) in enumerate(stages.items())
    ]
    graph = Graph(tuple(nodes), (("vision.0", "language.0"), ("language.0", "language.1")))
    return simulate(build("1f1b", graph), graph)


def _texts(svg: Path) -> str:
    """All text of a picture: matplotlib writes it as comments beside the glyphs."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    root = ElementTree.parse(svg, parser).getroot()
    return "\n".join(e.text or "" for e in root.iter() if e.tag is ElementTree.Comment)


def test_picture_names_ranks_modalities_and_bubbles(simulation: Simulation, tmp_path: Path) -> None:
    draw(simulation, tmp_path / "plan.svg", names={2: "the last rank"}, title="A plan")
    texts = _texts(tmp_path / "plan.svg")
    for expected in (
        "A plan",
        "0  vision.0",
        "the last rank",
        "vision forward",
        "language backward",
        "bubble",
    ):
        assert expected in texts
    assert f"{simulation.bubble[0]:.0%}" in texts
    assert "vision backward" not in texts


def test_suffix_decides_on_the_format(simulation: Simulation, tmp_path: Path) -> None:
    draw(simulation, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_boxes_say_which_of_several_stages_they_are(tmp_path: Path) -> None:
    graph = chunked(3, 2, 4, schedule="zbv")
    draw(simulate(build("zbv", graph), graph), tmp_path / "plan.svg")
    texts = _texts(tmp_path / "plan.svg").split()
    # forwards, input and weight gradients of both stages of each of three ranks
    assert all(texts.count(f"{m}.{chunk}") == 9 for m in range(4) for chunk in range(2))


def test_legend_names_each_colour_once_however_many_there_are(tmp_path: Path) -> None:
    graph = tree(4, audio=1, vision=2, language=2)
    draw(simulate(build("zero_bubble", graph), graph), tmp_path / "plan.svg")
    texts = [text.strip() for text in _texts(tmp_path / "plan.svg").splitlines()]
    assert [text for text in texts if text.endswith(("forward", "backward", "gradient"))] == [
        *("audio forward", "audio backward"),
        *("vision forward", "vision backward or input gradient", "vision weight gradient"),
        *("language forward", "language input gradient", "language weight gradient"),
    ]


def test_boxes_too_narrow_for_a_number_stay_empty(tmp_path: Path) -> None:
    nodes = (Node(stage="language.0", rank=0, microbatches=tuple(range(1000, 1400))),)
    graph = Graph(nodes, ())
    draw(simulate(build("1f1b", graph), graph), tmp_path / "dense.svg")
    assert "1399" not in _texts(tmp_path / "dense.svg")


def test_without_matplotlib_the_error_names_the_extra(
    simulation: Simulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def without_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(ImportError, match=r"lightning_mm5d\[plot\]"):
        draw(simulation, tmp_path / "plan.png")
    assert not (tmp_path / "plan.png").exists()


def test_picture_and_trace_name_their_unit(simulation: Simulation, tmp_path: Path) -> None:
    million = replace(WORK, factor=1e6)
    draw(simulation, tmp_path / "plan.svg", unit=million)
    assert "time in million units of work (multiply-adds per token)" in _texts(tmp_path / "plan.svg")
    chrome_trace(simulation, tmp_path / "plan.json", unit=million)
    trace = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    shown = "million units of work (multiply-adds per token), written as ms"
    assert trace["otherData"] == {"unit of time": shown}
    assert trace["traceEvents"][0]["args"]["name"] == f"ranks ({shown})"
    chrome_trace(simulation, tmp_path / "plan.json", unit=SECONDS)
    spans = [event for event in json.loads((tmp_path / "plan.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert max(span["ts"] + span["dur"] for span in spans) == pytest.approx(simulation.makespan * 1e6)


@pytest.mark.parametrize(
    ("duration", "unit", "text"),
    [
        (48.0, COSTS, "48 units"),
        (1_712_345.0, WORK, "1712.3 thousand units"),
        (52_300_000.0, WORK, "52.3 million units"),
        (0.0000123, COSTS, "0.00001 units"),
        (0.25, SECONDS, "250 ms"),
        (2500.0, SECONDS, "2500000 ms"),
    ],
)
def test_durations_have_a_unit_and_no_exponent(duration: float, unit: TimeUnit, text: str) -> None:
    fitted = unit.fitted(duration)
    assert f"{fitted.text(duration)} {fitted.symbol}" == text


def test_trace_has_every_action_on_the_thread_of_its_rank(simulation: Simulation, tmp_path: Path) -> None:
    chrome_trace(simulation, tmp_path / "plan.json")
    events = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads == {0: "0  vision.0", 1: "1  language.0", 2: "2  language.1"}
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(simulation.spans) == 3 + 6 + 6
    last = max(spans, key=lambda event: event["ts"])
    assert last["ts"] + last["dur"] == pytest.approx(simulation.makespan * 1e3)
    assert last["args"] == {"stage": "language.0", "microbatch": 2}


def test_split_backwards_are_named_in_picture_and_trace(tmp_path: Path) -> None:
    graph = chain(3, 4)
    simulation = simulate(build("zero_bubble", graph), graph)
    draw(simulation, tmp_path / "plan.svg")
    chrome_trace(simulation, tmp_path / "plan.json")
    texts = _texts(tmp_path / "plan.svg")
    for words in ("forward", "backward or input gradient", "weight gradient"):
        assert f"language {words}" in texts
    events = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))["traceEvents"]
    counts = Counter(event["cat"] for event in events if event["ph"] == "X")
    assert counts == {"forward": 12, "backward": 4, "input gradient": 8, "weight gradient": 8}
