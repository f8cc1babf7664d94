"""The command ``mm5d plan``: what it proposes for the digits example can be laid over its configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mm5d.config.modality import Modality
from lightning_mm5d.features.timeline.feature import about
from lightning_mm5d.tools.cli.cluster_plan import _not_searched
from lightning_mm5d.tools.cli.configuration import prepare
from lightning_mm5d.tools.cli.elastic_layouts import elastic_layout, with_layout
from lightning_mm5d.tools.cli.estimates import first_microbatch, first_samples, tracer
from lightning_mm5d.tools.cli.job import Job, is_elastic, load, settle
from lightning_mm5d.tools.cli.main import main
from lightning_mm5d.tools.planner import search
from parity.harness import strategy

CONFIG = Path(__file__).parents[3] / "examples" / "digits" / "config.yaml"
SCRIPT = CONFIG.with_name("train.py")


class Plan:
    """Runs the command on the example."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *options: str, command: str = "plan") -> tuple[int, str, str]:
        code = main([command, str(CONFIG), f"--script={SCRIPT}", *options])
        out, err = self._capsys.readouterr()
        return code, out, err

    def refusal(self, *options: str) -> str:
        code, out, err = self.run(*options)
        assert (code, out, err.count("\n")) == (2, "", 1)
        return err.removeprefix("mm5d: error: ")


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Iterator[Plan]:
    return Plan(capsys)


def test_it_shows_the_best_five_and_what_keeps_the_configured_layout_from_being_first(plan: Plan) -> None:
    code, out, err = plan.run("--memory", "1GiB")
    assert (code, err) == (0, "")
    head, table, left, own, block = out.rstrip().split("\n\n")
    assert left.startswith("The search ended at its limit")
    assert head.startswith("ranks: 4 on 1 nodes, memory: 1.0 GiB, samples of a step: 32")
    assert "Times are those of devices of 4e+14 flops and 2e+12 bytes a second" in head
    assert [line.split()[0] for line in table.splitlines()[1:]] == ["1", "2", "3", "4", "5"]
    assert "times the step of the best" in own
    said = yaml.safe_load(block)["trainer"]["strategy"]["init_args"]
    assert set(said["modalities"]) == {"vision", "audio", "language"}


def test_what_it_writes_lies_over_the_configuration(plan: Plan, tmp_path: Path) -> None:
    written = tmp_path / "best.yaml"
    assert plan.run("--ranks", "2", "--batch", "16", "--write", str(written))[0] == 0
    said = yaml.safe_load(written.read_text())
    sizes = said["trainer"]["strategy"]["init_args"]
    job = load(prepare([CONFIG, written], SCRIPT, []))
    assert job.strategy.layout.size == 2
    assert job.strategy.num_microbatches == sizes["batching"]["num_microbatches"]
    assert job.data is not None
    assert job.data.batch_size * job.strategy.layout.num_replicas == 16  # type: ignore[attr-defined]


def test_the_configured_ranks_need_not_fit_where_others_are_named(plan: Plan) -> None:
    assert "fill a multiple of 4 ranks" in plan.refusal("--trainer.devices=3")
    code, out, err = plan.run("--trainer.devices=3", "--ranks", "2", "--memory", "1GiB")
    assert (code, err) == (0, "")
    assert "The configured layout cannot run on these ranks" in out


def test_a_cluster_of_other_ranks_and_memory_that_nothing_fits_are_refused(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("{nodes: 1, ranks: 2, memory: 10KiB}")
    assert "--ranks: got 4" in plan.refusal("--cluster", str(file), "--ranks", "4")
    assert "the smallest needs" in plan.refusal("--cluster", str(file))
    assert "nodes have 8 ranks" in plan.refusal("--ranks", "12")
    assert "There are vision, audio, language" in plan.refusal("--cost", "video=1")
    assert "Leave out --cost or --measure" in plan.refusal("--measure", "--cost", "vision=1")
    assert plan.refusal("--memory", "-3GiB").startswith("--memory: got '-3GiB'. It is a number of bytes")
    assert plan.refusal("--write", str(tmp_path / "missing" / "file.yaml")).startswith("--write: got ")
    assert "It is a folder" in plan.refusal("--write", str(tmp_path))


def test_the_memory_that_a_refusal_proposes_is_enough(plan: Plan) -> None:
    refusal = plan.refusal("--ranks", "2", "--memory", "1KiB")
    proposed = re.search(r"Allow ([\d.]+ \wiB)", refusal)
    assert proposed is not None
    assert "offload optimizer" in refusal
    code, out, _ = plan.run("--ranks", "2", "--memory", proposed[1])
    assert code == 0
    said = yaml.safe_load(out.rstrip().split("\n\n")[-1])["trainer"]["strategy"]["init_args"]["modalities"]
    assert said["language"]["memory"]["offload"] == ["optimizer"], "nothing fits without"


def test_a_refusal_names_the_option_that_saves_most(plan: Plan) -> None:
    """Of those that the search does not choose, on the layout that needs least."""
    refusal = plan.refusal("--ranks", "4", "--memory", "1KiB")
    saves = re.search(r"needs ([\d.]+) MiB .*; with (.+) in all modalities that layout needs ([\d.]+) MiB", refusal)
    assert saves is not None
    assert float(saves[3]) < float(saves[1])


def test_json_has_the_configured_layout_and_what_keeps_it_from_being_first(plan: Plan) -> None:
    code, out, err = plan.run("--json")
    assert (code, err) == (0, "")
    best, *others = json.loads(out)
    assert len(others) == 4
    assert best["configured"]["seconds"] > best["seconds"]
    assert "times the step of the best" in best["why_not"]
    assert best["left"] is None or best["left"] < others[-1]["seconds"]
    code, out, _ = plan.run("--json", "--ranks", "2")
    assert code == 0
    assert json.loads(out)[0]["configured"] is None
    assert "cannot run on these ranks" in json.loads(out)[0]["why_not"]


def test_a_search_that_left_layouts_says_so(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_TRIED", 5)
    code, out, err = plan.run()
    assert (code, err) == (0, "")
    assert re.search(r"steps of layouts that it left take at least [\d.]+ ms, [\d.]+ times the step of the best", out)


def test_settings_that_the_search_leaves_out_are_named() -> None:
    contexts = {"cp_mode": "ring", "inner_ring_size": 2}
    modalities = {"vision": Modality(), "language": Modality(cp_size=4, context=contexts)}
    (line,) = _not_searched(modalities)
    assert line.endswith("left out of the layouts above: modalities.language.context.inner_ring_size: 2")
    hybrid = {"cp_mode": "hybrid", "ulysses_size": 2}
    assert _not_searched({"language": Modality(cp_size=4, context=hybrid)}) == []
    assert _not_searched({"language": Modality(tp_size=2)}) == []


def timeline(path: Path, stages: dict[str, float], microbatches: int, *, simulated: bool = True, **told: Any) -> str:
    """Write what `timeline` writes of a run of the example; return its path.

    Args:
        path: of the file.
        stages: seconds of a forward, by stage; backwards take twice that.
        microbatches: of the step.
        simulated: with the rows of a simulation, which take ten times as long.
        told: of the run, where it was another one.
    """
    events: list[dict[str, Any]] = []
    for rank, (stage, seconds) in enumerate(stages.items()):
        for row, factor, label in ((2 * rank, 1e6, stage), (2 * rank + 1, 1e7, "simulated"))[: 1 + simulated]:
            events.append({"name": "thread_name", "ph": "M", "tid": row, "args": {"name": f"{rank}  {label}"}})
            for number, (kind, part) in product(range(microbatches), (("forward", 1), ("backward", 2))):
                start, took = 3 * number + part - 1, part * seconds * factor
                at = {"ph": "X", "tid": row, "ts": start * seconds * factor, "dur": took, "cat": kind, "name": kind}
                events.append({**at, "args": {"stage": stage, "microbatch": number}})
    plan = load(prepare([CONFIG], SCRIPT, [])).plan
    assert plan is not None
    told = {**about(plan, microbatches), "samples": 8.0, **told}
    path.write_text(json.dumps({"traceEvents": events, "otherData": told}))
    return str(path)


STAGES = {"vision.0": 0.01, "audio.0": 0.02, "language.0": 0.03, "language.1": 0.04}


def test_it_plans_with_the_costs_of_a_run(plan: Plan, tmp_path: Path) -> None:
    run = timeline(tmp_path / "run.json", STAGES, 4)
    code, out, err = plan.run("--from", run)
    assert (code, err) == (0, "")
    assert f"The step that {run} shows took 480 ms" in out
    # the busiest rank works 4 x 0.12 s, and waits for a forward of each stage before it, and their backwards after it
    own = re.search(r"The configured layout .* takes (\S+) ms", out)
    assert own is not None
    assert float(own[1]) == pytest.approx(1e3 * (4 * 0.12 + 0.03 * 3 + 0.02 * 3), rel=1e-3)
    # one rank does a microbatch of 8 samples in 0.3 s, less what comes before the layers, which the second stage of the
    # language model ran again; and each of four ranks has those of one; then it updates
    assert 297 < float(out.split("\n\n")[1].splitlines()[1].split()[1]) < 300


def test_what_it_writes_keeps_the_timeline_of_the_run_that_it_was_planned_from(plan: Plan, tmp_path: Path) -> None:
    run = timeline(tmp_path / "run.json", STAGES, 4)
    code, out, _ = plan.run("--from", run, f"--trainer.strategy.init_args.timeline={run}")
    assert code == 0
    said = yaml.safe_load(out.rstrip().split("\n\n")[-1])["trainer"]["strategy"]["init_args"]
    assert said["batching"] == {"num_microbatches": 1}, "so there is no timeline in it, which would be refused"
    assert said["timeline"] is None


def test_a_run_with_larger_microbatches_has_layers_that_take_less_for_a_sample(plan: Plan, tmp_path: Path) -> None:
    took = []
    for samples in (8.0, 16.0):
        code, out, err = plan.run("--from", timeline(tmp_path / "run.json", STAGES, 4, samples=samples))
        assert (code, err) == (0, "")
        own = re.search(r"The configured layout .* takes (\S+) ms", out)
        assert own is not None
        took.append(float(own[1]))
    assert took[0] / 2 <= took[1] <= 0.55 * took[0], "messages take what they took"


@pytest.mark.parametrize(
    ("told", "rule"),
    [
        ({"parameters": 12}, "There parameters is 12, and in the configuration "),
        ({"modalities.vision.tp_size": 2}, "There modalities.vision.tp_size is 2, and in the configuration 1"),
        ({"modalities.audio.memory.activation_checkpointing": "full"}, "activation_checkpointing is full"),
        ({"samples": "many"}, "no timeline of a run"),
        ({"samples": float("nan")}, "no timeline of a run"),
    ],
)
def test_a_file_of_another_layout_or_model_is_refused(
    plan: Plan, tmp_path: Path, told: dict[str, Any], rule: str
) -> None:
    assert rule in plan.refusal("--from", timeline(tmp_path / "run.json", STAGES, 4, **told))


@pytest.mark.parametrize(
    ("stages", "microbatches", "simulated", "rule"),
    [
        (STAGES, 4, False, "no timeline of a run"),
        ({}, 4, True, "no timeline of a run"),
        (STAGES, 3, True, "num_microbatches is 3, and in the configuration 4"),
        (STAGES, 8, True, "num_microbatches is 8, and in the configuration 4"),
        ({**STAGES, "language.2": 0.1}, 4, True, "'language.2', 'vision.0'], and in the configuration"),
        ({**STAGES, "vision.0": float("nan")}, 4, True, "no timeline of a run"),
    ],
)
def test_a_file_of_another_run_is_refused(
    plan: Plan, tmp_path: Path, stages: dict[str, float], microbatches: int, simulated: bool, rule: str
) -> None:
    assert rule in plan.refusal("--from", timeline(tmp_path / "run.json", stages, microbatches, simulated=simulated))


def test_what_is_no_timeline_and_two_sources_of_durations_are_refused(plan: Plan, tmp_path: Path) -> None:
    assert "no timeline of a run" in plan.refusal("--from", str(CONFIG))
    assert "cannot be read" in plan.refusal("--from", str(tmp_path / "missing.json"))
    (tmp_path / "list.json").write_text("[1, 2]")
    assert "no timeline of a run" in plan.refusal("--from", str(tmp_path / "list.json"))
    assert "Leave out --measure or --from" in plan.refusal("--measure", "--from", str(CONFIG))


class Takes(L.LightningModule):
    """Takes the labels out of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        labels = batch.pop("labels")
        return (self.layers(batch["x"]) - labels).square().mean()

    def train_dataloader(self) -> Any:
        return DataLoader([{"x": torch.ones(4), "labels": torch.zeros(4)}] * 2, batch_size=2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_each_trace_of_a_step_has_the_whole_batch() -> None:
    modalities = {"model": Modality()}
    made = strategy(modalities, num_microbatches=1)
    settle(made, 1, 1)
    job = Job(made, Takes(), modalities)
    traced, plan = tracer(job), made.plan(Takes())
    assert traced(plan).reached == traced(plan).reached == {name for name, _ in Takes().named_parameters()}


class Unlike(Takes):
    """Its samples have unlike numbers of images, the first two none."""

    def train_dataloader(self) -> Any:
        counts = torch.tensor([0, 0, 1, 1, 2, 0, 4, 4])
        batch = {"images": torch.ones(int(counts.sum()), 3, 2, 2), "num_images": counts, "labels": torch.ones(8)}
        return DataLoader([batch], batch_size=None)


def test_times_are_those_of_a_usual_microbatch_and_memory_that_of_the_fullest() -> None:
    modalities = {"model": Modality()}
    made = strategy(modalities, num_microbatches=4)
    settle(made, 1, 1)
    job = Job(made, Unlike(), modalities)
    usual, fullest = first_microbatch(job), first_microbatch(job, fullest=True)
    assert usual["num_images"].tolist() == [1, 1]
    assert fullest["num_images"].tolist() == [4, 4]
    assert first_samples(job) == (8, 2)


def test_other_ranks_than_the_configured_ones_get_a_layout_with_as_many_samples_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = prepare([CONFIG], SCRIPT, [])
    assert elastic_layout(source, 1, 4) == ""
    written = tmp_path / "layout.yaml"
    written.write_text(elastic_layout(source, 1, 3))
    assert "elastic: 3 ranks train 32 samples a step" in capsys.readouterr().err
    job = load(prepare([CONFIG, written], SCRIPT, []))
    assert job.strategy.layout.size == 3
    assert job.data is not None
    assert job.data.batch_size * job.strategy.num_replicas == 32  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fit"], False),
        (["fit", "--config", "yes.yaml"], True),
        (["fit", "--config=yes.yaml", "--elastic=false"], False),
        (["fit", "--elastic", "true", "--trainer.devices=2"], True),
        (["test", "--config=yes.yaml"], False),
    ],
)
def test_a_configuration_says_that_it_is_elastic(
    arguments: list[str], said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("yes.yaml").write_text("elastic: true\ntrainer: {devices: 4}\n")
    assert is_elastic(arguments) is said


def test_without_torchrun_the_configured_layout_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    arguments = ["fit", "--config", str(CONFIG), "--elastic=true"]
    assert with_layout(arguments, tmp_path / "layout.yaml") == arguments
    assert not list(tmp_path.iterdir())
