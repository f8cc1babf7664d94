"""A run draws what its last step did beside what the simulator says of the same actions.

vision: rank 0; language: ranks 1-2.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lightning_mm5d import ConfigError, Modality, MultimodalStrategy
from parity.harness import fit, strategy
from ranks import run_ranks
from zoo import CASES

M = 4
PIPELINE = Modality(pp_size=2)


def train(rank: int, schedule: str, path: str, language: Modality = PIPELINE) -> None:
    case = CASES["llava"]
    modalities = {"vision": Modality(), "language": language}
    batches = [case.batch(8, seed=1), case.batch(8, seed=2), case.batch(5, seed=3)]  # the last one is not whole
    fit(case.build(), batches, strategy(modalities, schedule=schedule, num_microbatches=M, timeline=path), 3)


def events(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Spans by the name of their thread, in order."""
    found = json.loads(path.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    spans = sorted((event for event in found if event["ph"] == "X"), key=lambda event: event["ts"])
    return {name: [event for event in spans if event["tid"] == tid] for tid, name in names.items()}


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_measured_and_simulated_run_the_same_actions_in_the_same_order(schedule: str, tmp_path: Path) -> None:
    run_ranks(3, train, schedule, str(tmp_path / "run.json"))
    found = events(tmp_path / "run.json")
    assert sorted(name.split()[0] for name in found) == ["0", "0", "1", "1", "2", "2"]
    for name, spans in found.items():
        if "simulated" in name:
            continue
        beside = found[f"{name.split()[0]}  simulated"]
        assert [span["name"] for span in spans] == [span["name"] for span in beside]
        assert all(first["ts"] + first["dur"] <= then["ts"] + 1 for first, then in pairwise(spans))
    assert all(span["dur"] > 0 for spans in found.values() for span in spans)
    forwards = [span for spans in found.values() for span in spans if span["cat"] == "forward"]
    stages = 5 if schedule == "zbv" else 3
    assert len(forwards) == 2 * stages * M
    told = json.loads((tmp_path / "run.json").read_text())["otherData"]
    assert (told["num_microbatches"], told["samples"]) == (M, 2)
    assert {told[f"modalities.{name}.tp_size"] for name in ("vision", "language")} == {1}
    assert told["parameters"] == sum(p.numel() for p in CASES["llava"].build().parameters())
    assert any(span["cat"] == "weight gradient" for spans in found.values() for span in spans) == (schedule == "zbv")


def test_ranks_that_share_layers_are_drawn_once(tmp_path: Path) -> None:
    """vision: rank 0; language: ranks 1-2, with tp_size=2."""
    run_ranks(3, train, "1f1b", str(tmp_path / "run.json"), Modality(tp_size=2))
    found = events(tmp_path / "run.json")
    assert sorted(name.split()[0] for name in found) == ["0", "0", "1", "1"]
    assert all(len(spans) == 2 * M and all(span["dur"] > 0 for span in spans) for spans in found.values())


def test_a_run_draws_a_picture(tmp_path: Path) -> None:
    run_ranks(3, train, "1f1b", str(tmp_path / "run.png"))
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_that_is_no_timeline_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"timeline: got 'run.txt'.*Use 'run.json'"):
        MultimodalStrategy(timeline="run.txt")


def test_a_run_in_one_piece_has_nothing_to_draw(tmp_path: Path) -> None:
    case = CASES["llava"]
    with pytest.raises(ConfigError, match="no schedule to draw"):
        fit(case.build(), [case.batch(2, seed=1)], MultimodalStrategy(timeline=str(tmp_path / "run.json")))
