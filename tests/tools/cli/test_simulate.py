"""``mm5d simulate``: the papers' cases from sizes alone, real models from their plans, and what it writes and refuses.

A case is written as a person would: a few lines of YAML with the strategy's arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from lightning_mm5d.schedule import SCHEDULES, build, to_csv
from lightning_mm5d.tools.cli.main import main
from lightning_mm5d.tools.planner import outcomes
from schedule.graphs import chain
from sweeps import dealt, swept

EXAMPLES = Path(__file__).parents[3] / "examples"
DIGITS = EXAMPLES / "digits"
SCRIPTED = f"--script={DIGITS / 'train.py'}"
PAPER = {"audio": {}, "vision": {"pp_size": 2}, "language": {"pp_size": 3}}  # six ranks
_PAPERS: dict[str, dict[str, Any]] = {}
FLAT = "zoo.handwritten.FlatModule"  # one encoder; a decoder of four layers


class Simulate:
    """Runs the command on a configuration that it writes into a folder of the test's own."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys

    def run(self, config: object, *options: str) -> tuple[int, str, str]:
        if not isinstance(config, Path):
            path = self.folder / "case.yaml"
            path.write_text(yaml.safe_dump(config, sort_keys=False))
            config = path
        code = main(["simulate", str(config), *options])
        out, err = self._capsys.readouterr()
        return code, out, err

    def text(self, config: object, *options: str) -> str:
        code, out, err = self.run(config, *options)
        assert (code, err) == (0, "")
        return out

    def json(self, config: object, *options: str) -> dict[str, dict[str, Any]]:
        return {entry["schedule"]: entry for entry in json.loads(self.text(config, *options, "--json"))}

    def papers(self) -> dict[str, dict[str, Any]]:
        """What the plain case gives, which many tests compare with."""
        if not _PAPERS:
            _PAPERS.update(self.json(case()))
        return _PAPERS

    def refusal(self, config: object, *options: str) -> str:
        code, out, err = self.run(config, *options)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("mm5d: error: ")
        return err


@pytest.fixture(scope="module", autouse=True)
def built_once() -> Iterator[None]:
    """Most tests simulate the same graphs, whose schedules are built once for all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outcomes, "build", cache(outcomes.build))
        yield


@pytest.fixture
def simulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Simulate:
    return Simulate(tmp_path, capsys)


def case(modalities: dict[str, Any] = PAPER, microbatches: int = 6, **more: Any) -> dict[str, Any]:
    return {"modalities": modalities, "num_microbatches": microbatches, **more}


def with_model(modalities: dict[str, Any], *, devices: int, model: str = FLAT, **more: Any) -> dict[str, Any]:
    strategy = {"class_path": "lightning_mm5d.MultimodalStrategy", "init_args": case(modalities, **more)}
    return {"trainer": {"devices": devices, "strategy": strategy}, "model": {"class_path": model}}


def flat(pp_size: int = 3, **more: Any) -> dict[str, Any]:
    return with_model({"vision": {"module": "encoder"}, "language": {"pp_size": pp_size}}, devices=1 + pp_size, **more)


def warm_ups(entry: dict[str, Any]) -> list[int]:
    """For each rank, how many forwards it runs before its first backward."""
    found = []
    for rank in entry["ranks"]:
        first = next(i for i, action in enumerate(rank["actions"]) if action.startswith("B"))
        assert all(action.startswith("F") for action in rank["actions"][:first])
        found.append(first)
    return found


@pytest.mark.parametrize("microbatches", swept([6, 12, 24], 6, 24))
def test_the_papers_six_ranks_warm_up_with_4_5_4_3_2_1_forwards(simulate: Simulate, microbatches: int) -> None:
    """audio: rank 0; vision: ranks 1, 2; language: ranks 3 to 5"""
    entry = simulate.json(case(microbatches=microbatches))["1f1b"]
    assert warm_ups(entry) == [4, 5, 4, 3, 2, 1]
    where = [(rank["rank"], rank["modality"], rank["stage"]) for rank in entry["ranks"]]
    assert where == [
        (0, "audio", 0),
        (1, "vision", 0),
        (2, "vision", 1),
        (3, "language", 0),
        (4, "language", 1),
        (5, "language", 2),
    ]
    assert [rank["peak_activations"] for rank in entry["ranks"]] == [4, 5, 4, 3, 2, 1]
    for rank in entry["ranks"]:
        assert sorted(rank["actions"]) == sorted(f"{kind}{m}" for kind in "FB" for m in range(microbatches))


def test_the_example_of_a_case_is_the_papers(simulate: Simulate) -> None:
    assert simulate.json(EXAMPLES / "cases" / "six_ranks.yaml") == simulate.json(case(microbatches=12))


@pytest.mark.parametrize("microbatches", swept([6, 12, 24], 12, 24))
def test_one_encoder_before_three_stages_runs_four_minus_rank_forwards_first(
    simulate: Simulate, microbatches: int
) -> None:
    entry = simulate.json(case({"vision": {}, "language": {"pp_size": 3}}, microbatches))["1f1b"]
    assert warm_ups(entry) == [4, 3, 2, 1]


@pytest.mark.parametrize(("ranks", "microbatches", "cost"), [(1, 4, 1.0), (4, 8, 1.0), (5, 5, 2.5)])
def test_a_uniform_chain_takes_the_known_time(simulate: Simulate, ranks: int, microbatches: int, cost: float) -> None:
    """On P ranks with M microbatches: (M + P - 1)(f + b) under 1F1B and GPipe; ramps of f under V-shaped ones."""
    found = simulate.json(case({"language": {"pp_size": ranks}}, microbatches), f"--cost=language={cost}")
    ideal, ramps = microbatches * 3 * cost, ranks - 1
    for name in ("1f1b", "gpipe"):
        assert found[name]["makespan"] == pytest.approx(ideal + ramps * 3 * cost)
        assert found[name]["bubble"] == pytest.approx(ramps / (microbatches + ramps))
    assert found["zero_bubble"]["makespan"] == pytest.approx(ideal + ramps * cost)
    if ranks > 1:
        assert found["zbv"]["makespan"] == pytest.approx(ideal + ramps * cost / 2)


def test_json_holds_every_schedule_and_table_marks_the_configured_one(simulate: Simulate) -> None:
    entries = simulate.json(case(schedule="gpipe"))
    assert tuple(entries) == SCHEDULES
    for entry in entries.values():
        assert set(entry) == {"schedule", "makespan", "bubble", "ranks"}
        for rank in entry["ranks"]:
            assert set(rank) == {"rank", "modality", "stage", "peak_activations", "actions"}
    lines = simulate.text(case(schedule="gpipe")).splitlines()
    rows = [line.split() for line in lines[2:9]]
    assert rows[0][:3] == ["schedule", "makespan", "(units)"]
    assert [row[0] for row in rows[1:]] == list(SCHEDULES)
    assert [row for row in rows if "*" in row] == [["gpipe", "*", "30", "40.0%", "6", "3"]]
    assert lines[-1].split() == ["5", "language.2", "18", "40.0%", "6"]


@pytest.mark.parametrize("schedule", dealt(__file__, SCHEDULES, 2))
def test_the_schedule_can_be_set_on_the_command_line(simulate: Simulate, schedule: str) -> None:
    short = simulate.text(case(), f"--schedule={schedule}")
    assert f"\n* {schedule}: makespan" in short
    full = simulate.text(case(), "--trainer.strategy.init_args.schedule", schedule)
    assert full == short == simulate.text(case(schedule=schedule))


def test_only_the_two_schedules_of_chunks_cut_the_language_model_further(simulate: Simulate) -> None:
    entries = simulate.papers()
    chunked = {name for name, entry in entries.items() if "F0.1" in entry["ranks"][5]["actions"]}
    assert chunked - {"auto"} == {"interleaved", "zbv"}
    assert all("F0" in entry["ranks"][1]["actions"] for entry in entries.values())
    # whatever is configured, and what the user says about chunks holds for all
    assert simulate.json(case(schedule="zbv")) == entries
    given = simulate.json(case({**PAPER, "language": {"pp_size": 3, "pp_chunks": 3}}))
    assert all("F0.2" in entry["ranks"][5]["actions"] for entry in given.values())


def test_split_backwards_are_named_i_and_w(simulate: Simulate) -> None:
    actions = simulate.json(case(microbatches=2))["zero_bubble"]["ranks"][5]["actions"]
    assert sorted(actions) == ["F0", "F1", "I0", "I1", "W0", "W1"]


def test_costs_come_from_the_configuration_and_the_command_line(simulate: Simulate) -> None:
    uneven = {"vision": {"cost": 2}, "language": {"pp_size": 2, "cost": [1, 3]}}
    assert simulate.json(case(uneven, 4))["1f1b"]["makespan"] == 4 * 9 + 3 + 6
    doubled = simulate.json(case(uneven, 4), "--cost", "vision=4,language=2")
    plain = simulate.json(case({"vision": {}, "language": {"pp_size": 2}}, 4), "--cost=vision=2")
    assert doubled["1f1b"]["makespan"] == 2 * plain["1f1b"]["makespan"]
    # a number for each rank, on the command line too
    option = "--modalities.language.cost=[1, 3]"
    given = {"vision": {"cost": 2}, "language": {"pp_size": 2}}
    assert simulate.json(case(given, 4), option) == simulate.json(case(uneven, 4))


def test_frozen_modalities_run_no_backward_or_half_of_it(simulate: Simulate) -> None:
    entry = simulate.json(case(), "--frozen", "vision,language")["1f1b"]
    kinds = [{action[0] for action in rank["actions"]} for rank in entry["ranks"]]
    assert kinds == [set("FB"), {"F"}, {"F"}, *[set("FB")] * 3]
    # input gradients for the audio encoder take as long as a forward
    assert "  12  " in simulate.text(case(), "--frozen=vision,language").splitlines()[-1]
    assert simulate.json(case(), "--frozen=language,vision,audio")["1f1b"]["makespan"] == 6 + 4


def test_replicas_feeds_and_shared_ranks_are_those_of_a_run(simulate: Simulate) -> None:
    """vision: ranks 0, 1, each every other microbatch; language: ranks 2, 3, with audio on both of them"""
    made = {
        "vision": {"dp_size": 2, "feeds": [1]},
        "audio": {"colocate_with": "language", "cost": 0.5},
        "language": {"pp_size": 2},
    }
    ranks = simulate.json(case(made, 4))["gpipe"]["ranks"]
    assert [rank["modality"] for rank in ranks] == ["vision", "vision", "audio+language", "audio+language"]
    forwards = [[action for action in rank["actions"] if action[0] == "F"] for rank in ranks]
    assert forwards[:2] == [["F0", "F2"], ["F1", "F3"]]
    assert sorted(forwards[2]) == ["F0.0", "F0.1", "F1.1", "F2.0", "F2.1", "F3.1"]
    # what vision makes is needed a stage later, so that it may come a stage later
    first = simulate.json(case({"vision": {"cost": 2}, "language": {"pp_size": 2}}, 1))
    later = simulate.json(case({"vision": {"cost": 2, "feeds": [1]}, "language": {"pp_size": 2}}, 1))
    assert first["1f1b"]["makespan"] - later["1f1b"]["makespan"] == 2 + 4 - 1 - 2 + 0
    # in one stage on the same ranks they take turns
    shared = {"vision": {"colocate_with": "language"}, "language": {"cost": 2}}
    assert simulate.json(case(shared, 4))["1f1b"]["makespan"] == 4 * (1 + 2) * 3


def test_ranks_are_as_many_as_the_sizes_need_or_as_said(simulate: Simulate) -> None:
    assert len(simulate.json(case({"vision": {"dp_size": 2}, "language": {"pp_size": 2}}))["1f1b"]["ranks"]) == 4
    colocated = {"vision": {"pp_size": 2, "colocate_with": "language.0"}, "language": {"pp_size": 2, "dp_size": 2}}
    assert len(simulate.json(case(colocated))["1f1b"]["ranks"]) == 6
    whole = {"trainer": {"strategy": case(), "devices": 6, "num_nodes": 2}, "seed_everything": 1}
    entry = simulate.json(whole)["1f1b"]
    assert len(entry["ranks"]) == 12
    assert {action for rank in entry["ranks"] for action in rank["actions"] if action[0] == "F"} == {
        f"F{m}" for m in range(12)
    }
    assert "12 or 18 ranks" in simulate.refusal(whole, "--trainer.devices=7")


@pytest.mark.parametrize(
    "strategy",
    [
        {"class_path": "lightning_mm5d.MultimodalStrategy", "init_args": case()},
        {"class_path": "MultimodalStrategy", "init_args": case()},
        {"init_args": case()},
        case(),
    ],
    ids=["full name", "name", "arguments", "flat"],
)
def test_a_configuration_without_a_model_is_simulated_from_its_sizes(simulate: Simulate, strategy: Any) -> None:
    settings = {"strategy": strategy, "precision": "bf16-mixed", "accelerator": "gpu"}
    # the data's classes need not be here
    config = {"trainer": settings, "data": {"class_path": "nothing.Here"}}
    assert simulate.json(config) == simulate.papers()


def test_a_script_beside_is_not_run(simulate: Simulate) -> None:
    (simulate.folder / "train.py").write_text("# LightningCLI\nraise SystemError('run')")
    config = {"trainer": {"strategy": case()}}
    assert simulate.json(config) == simulate.papers()
    config["trainer"] |= {"devices": 6}
    assert simulate.json(config) == simulate.papers()
    with pytest.raises(SystemError, match="run"):
        simulate.run(config, f"--script={simulate.folder / 'train.py'}")


def test_simulates_the_digits_example_with_the_model_of_its_script(simulate: Simulate) -> None:
    entries = simulate.json(DIGITS / "config.yaml", SCRIPTED)
    assert warm_ups(entries["1f1b"]) == [3, 3, 2, 1]
    assert "F0.1" in entries["zbv"]["ranks"][3]["actions"]
    text = simulate.text(DIGITS / "config.yaml", SCRIPTED)
    assert "microbatches: 4 per replica, ranks: 4, times in thousand units of work (multiply-adds per token)" in text


def test_costs_replace_the_estimates_of_a_model(simulate: Simulate) -> None:
    costed = simulate.json(flat(), "--cost=vision=1,language=1")
    assert costed["1f1b"] == simulate.json(case({"vision": {}, "language": {"pp_size": 3}}))["1f1b"]
    assert costed["1f1b"]["makespan"] != simulate.json(flat())["1f1b"]["makespan"]


def test_a_model_is_cut_into_chunks_where_it_has_layers_for_them(simulate: Simulate) -> None:
    three, two = simulate.json(flat(3)), simulate.json(flat(2))  # of four layers
    assert "F0" in three["zbv"]["ranks"][3]["actions"]
    assert {"F0.0", "F0.1"} <= set(two["zbv"]["ranks"][2]["actions"])
    assert "F0" in two["1f1b"]["ranks"][2]["actions"]
    # configured or not, zbv is the same
    assert simulate.json(flat(2, schedule="zbv")) == two


def test_says_where_training_would_have_fewer_chunks(simulate: Simulate) -> None:
    code, _, err = simulate.run(flat(2, schedule="interleaved"))
    assert code == 0
    assert err == (
        "mm5d: warning: interleaved is shown with 2 stages of language on a rank, and training would have 1: "
        "set modalities.language.pipeline.pp_chunks to 2\n"
    )
    assert simulate.run(flat(2, schedule="zbv"))[2] == ""
    chunks = "--trainer.strategy.modalities.language.pipeline.pp_chunks=2"
    assert simulate.run(flat(2, schedule="interleaved"), chunks)[2] == ""


def test_auto_of_a_model_keeps_the_placement_that_training_has(simulate: Simulate) -> None:
    entries = simulate.json(flat(2, schedule="auto"))
    assert "F0" in entries["auto"]["ranks"][2]["actions"]
    elsewhere = simulate.json(flat(2))["auto"]
    assert elsewhere["makespan"] <= entries["auto"]["makespan"] <= entries["zero_bubble"]["makespan"]


def test_less_idling_with_more_microbatches(simulate: Simulate) -> None:
    bubbles = [simulate.json(flat(microbatches=count))["1f1b"]["bubble"] for count in (1, 4, 16)]
    assert sorted(bubbles, reverse=True) == bubbles
    assert bubbles[-1] > 0


def test_draws_pictures_and_traces_in_one_run(simulate: Simulate) -> None:
    trace, svg, png = (simulate.folder / name for name in ("trace.json", "timeline.svg", "timeline.png"))
    out = [f"--out={trace}", "--out", str(svg), f"--out={png}"]
    assert simulate.json(case(schedule="zbv"), *out) == simulate.papers()
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["tid"] for event in events} == set(range(6))
    counts = {word: sum(event["cat"] == word for event in events) for word in ("forward", "weight gradient")}
    assert counts == {"forward": 9 * 6, "weight gradient": 7 * 6}  # audio.0 and vision.0 pass nothing on
    assert png.read_bytes().startswith(b"\x89PNG")
    root = ElementTree.parse(svg, ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True)))
    texts = "".join(e.text or "" for e in root.iter() if e.tag is ElementTree.Comment)
    assert "zbv: makespan 22 units, ranks idle 18.2% of a step" in texts


def test_plays_a_table_of_ones_own(simulate: Simulate) -> None:
    graph = chain(2, 3)
    path = simulate.folder / "mine.csv"
    path.write_text(to_csv(build("gpipe", graph), graph))
    config = case({"language": {"pp_size": 2}}, 3, schedule=str(path))
    entries = simulate.json(config)
    assert tuple(entries) == (*SCHEDULES, str(path))
    assert entries[str(path)]["ranks"] == entries["gpipe"]["ranks"]
    assert f"* {path}: makespan" in simulate.text(config)
    assert "F(language.0, 3) is missing" in simulate.refusal(config, "--num_microbatches=4")
    assert "cannot be read: No such file" in simulate.refusal(config, "--schedule=nowhere.csv")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--cost=visoin=1"], ["--cost: got 'visoin'", "audio, vision, language"]),
        (["--cost=vision=fast"], ["--cost: got 'vision=fast'", "--cost vision=1.5"]),
        (["--cost=vision=0"], ["--cost: got 'vision=0'", "positive"]),
        (["--cost=vision=inf"], ["--cost: got 'vision=inf'", "finite"]),
        (["--cost", "vision"], ["--cost: got 'vision'"]),
        (["--cost="], ["--cost: got ''"]),
        (["--frozen=vision,text"], ["--frozen: got 'text'", "audio, vision, language"]),
        (["--schedule=2f2b"], ["schedule: got '2f2b'", "gpipe"]),
        (["--modalities.vision.cost=-1"], ["modalities.vision.cost: got -1.0", "positive"]),
        (["--modalities.vision.cost=[1, 2, 3]"], ["modalities.vision.cost: got [1.0, 2.0, 3.0]", "2 pipeline ranks"]),
        (["--modalities.vision.cost=fast"], ["modalities.vision.cost: got 'fast'", "positive"]),
        (["--modalities.vision.pp=2"], ["modalities.vision.pp: got 2", "There is no such field"]),
        (["--trainer.devices=7"], ["got 7", "6 or 12"]),
        (["--num_microbatches=1000000"], ["got 1000000", "6000000 forwards", "Use 16666"]),
        (["--modalities.language.dp_size=20000"], ["got 6", "on 60003 ranks", "Name fewer replicas"]),
        (["--scheduel=x"], ["scheduel"]),
        (["--script=nowhere.py"], ["--script: got 'nowhere.py'", "no such file"]),
        (["--out=timeline.what"], ["--out", "what"]),
        (["--out=nowhere/timeline.json"], ["--out", "cannot be written: No such file"]),
    ],
)
def test_refuses_in_one_line_what_cannot_work(simulate: Simulate, options: list[str], words: list[str]) -> None:
    message = simulate.refusal(case(), *options)
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"modalities": {"vision": {"size": 2}}}, "modalities.vision.size: got 2. There is no such field"),
        ({**case(), "microbatches": 3}, "microbatches"),
        ({"trainer": {"max_epochs": 1}}, "trainer.strategy: got 'auto'"),
        ({"trainer": {"strategy": "ddp"}}, "trainer.strategy: got 'ddp'"),
        ({"modalities": {"vision": {"dp_size": 2}, "language": {"dp_size": 3}}}, "modalities.vision.dp_size: got 2"),
    ],
)
def test_refuses_configurations_without_a_model_that_are_none(simulate: Simulate, config: Any, words: str) -> None:
    assert words in simulate.refusal(config)


def test_refuses_to_freeze_or_to_cost_a_part_of_a_model(simulate: Simulate) -> None:
    assert "says by requires_grad what is frozen" in simulate.refusal(flat(), "--frozen=vision")
    message = simulate.refusal(flat(), "--cost=language=2")
    assert "cost: got {'language': 2.0}. Those of vision would be estimated in another unit" in message


def test_on_a_cluster_times_are_seconds_of_layers_and_messages(simulate: Simulate) -> None:
    """vision: rank 0; audio: rank 1; language: ranks 2-3"""
    spans = {}
    for name, latency in (("near", 1e-6), ("far", 1.0)):
        file = simulate.folder / f"{name}.yaml"
        link = {"latency": latency, "bandwidth": 1e11}
        file.write_text(yaml.safe_dump({"nodes": 1, "ranks": 4, "memory": "8GiB", "links": {"inside": link}}))
        spans[name] = simulate.json(DIGITS / "config.yaml", SCRIPTED, "--cluster", str(file))["gpipe"]["makespan"]
    assert spans["far"] - spans["near"] == pytest.approx(4.0, abs=1e-3), "there and back between three stages"
    text = simulate.text(DIGITS / "config.yaml", SCRIPTED, "--cluster", str(file))
    assert "times in milliseconds" in text


def test_a_cluster_is_refused_without_a_model_beside_costs_and_with_other_ranks(simulate: Simulate) -> None:
    file = simulate.folder / "cluster.yaml"
    file.write_text("{nodes: 1, ranks: 4, memory: 8GiB}")
    assert "Seconds are those of a model's layers" in simulate.refusal(case(), "--cluster", str(file))
    given = ("--cost", "vision=1,audio=1,language=1")
    assert "Leave out --cost" in simulate.refusal(DIGITS / "config.yaml", SCRIPTED, "--cluster", str(file), *given)
    file.write_text("{nodes: 1, ranks: 1, memory: 8GiB}")
    assert "1" in simulate.refusal(DIGITS / "config.yaml", SCRIPTED, "--cluster", str(file))
