"""The command ``mm5d plan``: what it proposes for the digits example can be laid over its configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mm5d.config.modality import Modality
from lightning_mm5d.schedule import build, to_csv
from lightning_mm5d.tools.cli.configuration import prepare
from lightning_mm5d.tools.cli.estimates import tracer
from lightning_mm5d.tools.cli.job import Job, load, settle
from lightning_mm5d.tools.cli.main import main
from parity.harness import strategy

CONFIG = Path(__file__).parents[3] / "examples" / "digits" / "config.yaml"
SCRIPT = CONFIG.with_name("train.py")
MODALITIES = "--trainer.strategy.init_args.modalities"


class Plan:
    """Runs the command on the example."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *options: str, command: str = "plan") -> tuple[int, str, str]:
        code = main([command, str(CONFIG), f"--script={SCRIPT}", *options])
        out, err = self._capsys.readouterr()
        return code, out, err

    def found(self, *options: str, command: str = "plan") -> Any:
        code, out, err = self.run(*options, "--json", command=command)
        assert (code, err) == (0, "")
        return json.loads(out)

    def refusal(self, *options: str) -> str:
        code, out, err = self.run(*options)
        assert (code, out, err.count("\n")) == (2, "", 1)
        return err.removeprefix("mm5d: error: ")


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Iterator[Plan]:
    return Plan(capsys)


def test_it_shows_both_layouts_every_rank_and_what_to_paste(plan: Plan) -> None:
    code, out, err = plan.run("--trainer.devices=3", f"{MODALITIES}.language.pp_size=1")
    assert (code, err) == (0, "")
    head, layouts, ranks, memory, block = out.rstrip().split("\n\n")
    assert head.startswith("ranks: 3, microbatches: 4 per replica")
    assert [line.split()[0] for line in layouts.splitlines()] == ["layout", "configured", "proposed"]
    assert [line.split()[0] for line in ranks.splitlines()] == ["rank", "0", "1", "2"]
    assert [line.split()[0] for line in memory.splitlines()] == ["rank", "0", "1", "2"]
    assert set(yaml.safe_load(block)["modalities"]) == {"vision", "audio", "language"}


def test_what_it_writes_is_read_as_the_modalities_and_takes_as_long_as_it_says(plan: Plan, tmp_path: Path) -> None:
    """The configuration has chunks, offsets and a colocated modality, of which the proposal has none or others."""
    written = tmp_path / "modalities.yaml"
    before = {
        "vision": {"colocate_with": "audio"},
        "audio": {},
        "language": {"pp_size": 2, "pp_chunks": 2, "pipeline_template": {"offsets": [0, 0, 0, 0]}},
    }
    (tmp_path / "before.yaml").write_text(json.dumps(before))
    configured = [f"{MODALITIES}={tmp_path / 'before.yaml'}", "--trainer.devices=3"]
    proposed = plan.found(*configured, "--out", str(written))
    read = [*configured, f"{MODALITIES}={written}"]
    again = plan.found(*read)
    assert again["configured"] == again["proposed"] == proposed["proposed"]
    simulated = {entry["schedule"]: entry for entry in plan.found(*read, command="simulate")}
    assert simulated["1f1b"]["makespan"] == pytest.approx(proposed["proposed"]["makespan"])


def test_a_memory_limit_is_kept_by_recomputation_and_refused_below_the_smallest_need(plan: Plan) -> None:
    limited = plan.found("--memory-limit", "9MiB")
    assert max(rank["peak"] for rank in limited["memory"]) <= 9 * 2**20
    assert any("activation_checkpointing" in said for said in limited["modalities"].values())
    code, _, err = plan.run("--memory-limit", "1MiB")
    assert code == 2
    assert "needs least takes" in err


def test_durations_of_whole_modalities_are_written_down_for_other_commands(plan: Plan, tmp_path: Path) -> None:
    written = tmp_path / "modalities.yaml"
    proposed = plan.found("--cost", "vision=4,audio=1,language=3", "--out", str(written))
    modalities = yaml.safe_load(written.read_text())
    costs = [modality["cost"] for modality in modalities.values()]
    assert [sum(cost) if isinstance(cost, list) else cost for cost in costs] == pytest.approx([4, 1, 3], rel=1e-5)
    simulated = {entry["schedule"]: entry for entry in plan.found(f"{MODALITIES}={written}", command="simulate")}
    assert simulated["1f1b"]["makespan"] == pytest.approx(proposed["proposed"]["makespan"])


def test_it_says_where_the_configured_layout_is_as_good(plan: Plan, tmp_path: Path) -> None:
    written = tmp_path / "modalities.yaml"
    assert "as good" not in plan.run("--out", str(written))[1]
    assert "The configured layout is as good as the best that was found." in plan.run(f"{MODALITIES}={written}")[1]


def test_refuses_what_it_cannot_search(plan: Plan, tmp_path: Path) -> None:
    strategy, module, *_ = load(prepare([CONFIG], SCRIPT, []))
    graph = strategy.plan(module).graphs.full_graph("1f1b", 4, module)
    table = tmp_path / "mine.csv"
    table.write_text(to_csv(build("1f1b", graph), graph))
    assert "is for one layout" in plan.refusal(f"--trainer.strategy.init_args.schedule={table}")
    assert "There are vision, audio, language" in plan.refusal("--cost", "video=1")
    assert "estimated in another unit" in plan.refusal("--cost", "vision=1")
    assert "positive, finite" in plan.refusal("--cost", "vision=fast,audio=1,language=1")
    assert plan.refusal("--out", str(tmp_path / "missing" / "file.yaml")).startswith("--out: got ")
    assert "Nearest that fit: 8 for each replica" in plan.refusal("--trainer.devices=64")


def test_layers_can_be_measured_instead_of_estimated(plan: Plan) -> None:
    measured = plan.found("--measure", "--trainer.strategy.init_args.num_microbatches=8")
    assert measured["unit"] == "milliseconds"
    for name in ("vision", "audio", "language"):  # milliseconds of a small model on any machine
        cost = measured["modalities"][name]["cost"]
        assert all(0 < one < 10_000 for one in (cost if isinstance(cost, list) else [cost])), (name, cost)


def test_durations_are_measured_or_given_but_not_both(plan: Plan) -> None:
    assert "Leave out --cost or --measure" in plan.refusal("--measure", "--cost", "vision=1,audio=1,language=2")


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
