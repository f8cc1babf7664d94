"""A job from YAML alone: `mm5d fit` shows its throughput, and `mm5d plan --from` plans with what it measured."""

from __future__ import annotations

import io
import json
import os
import re
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

from lightning_mm5d.features.throughput import feature
from lightning_mm5d.tools.cli.main import main
from ranks import run_ranks

DATA = """
import lightning as L
import torch
from torch.utils.data import DataLoader
from features.toys import Samples, Toy

class OnFridays(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("It steps on fridays only")

class Friday(Toy):
    def configure_optimizers(self):
        return OnFridays(self.parameters(), lr=0.1)

class Data(L.LightningDataModule):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(Samples(48), batch_size=self.batch_size)
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """vision: rank 0; language: rank 1"""
    (tmp_path / "toy_data.py").write_text(DATA)
    modalities = {"vision": {"module": "encoder", "boundary": "encoder"}, "language": {"module": "decoder"}}
    settings = {
        "modalities": modalities,
        "batching": {"num_microbatches": 4},
        "timeline": str(tmp_path / "run.json"),
    }
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary"), False)
    strategy = {"class_path": "lightning_mm5d.MultimodalStrategy", "init_args": settings}
    folder = {"default_root_dir": str(tmp_path / "runs")}  # the configuration is saved there
    trainer = {"accelerator": "cpu", "devices": 2, "max_epochs": 1, "log_every_n_steps": 1, **folder, **quiet}
    content = {
        "trainer": {**trainer, "strategy": strategy},
        "model": {"class_path": "features.toys.Toy"},
        "data": {"class_path": "toy_data.Data"},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def fits(rank: int, config: Path) -> tuple[int, str]:
    """Return the exit code of `mm5d fit` and what it prints; the peak of a CPU is not known, and is said here."""
    printed, wide = io.StringIO(), patch.dict(os.environ, COLUMNS="300")  # of the terminal
    with redirect_stdout(printed), wide, patch.object(feature, "_peak", lambda *_: 1e3):
        code = main(["fit", "--config", str(config)])
    return code, printed.getvalue()


@pytest.mark.filterwarnings("ignore")
def test_a_run_shows_its_throughput_and_its_timeline_is_planned_with(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vision: rank 0; language: rank 1"""
    (code, shown), (other, _) = run_ranks(2, fits, config)
    assert (code, other) == (0, 0)
    for name in ("tokens_per_sec", "device/mfu"):
        value = re.search(rf" {name}[:=]\s*([\d.e+-]+)", shown)
        assert value is not None, shown
        assert float(value[1]) > 0
    run = config.with_name("run.json")
    events = [event for event in json.loads(run.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["args"]["stage"] for event in events} == {"vision.0", "language.0"}
    assert main(["plan", str(config), "--from", str(run)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert re.search(rf"The step that {run} shows took [\d.]+ ms", out)
    assert re.search(r"The configured layout \(language.*\) takes [\d.]+ ms.*: [\d.]+ times the step of the best", out)
    other_sizes = ["--trainer.strategy.init_args.modalities.language.pp_size=2", "--trainer.devices=3"]
    assert main(["plan", str(config), "--from", str(run), *other_sizes]) == 2
    assert f"--from: got '{run}'. There stages is" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
def test_a_step_of_optimizers_that_cannot_be_timed_is_told_of(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = yaml.safe_load(config.read_text()) | {"model": {"class_path": "toy_data.Friday"}}
    config.write_text(yaml.safe_dump(content))
    assert main(["plan", str(config), "--measure"]) == 0
    out, err = capsys.readouterr()
    assert "samples of a step: 8" in out
    assert err.endswith(
        "The step of the optimizers is estimated, since it could not be measured: "
        "RuntimeError: It steps on fridays only\n"
    )
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "options", "told"),
    [
        ({}, ["--ranks", "4"], r"--ranks: got 4\. .* has 1 nodes of 2 ranks\. Use --ranks 2, or change nodes"),
        ({}, [], r"--memory: got '1\.0 KiB'\. .* the smallest needs [\d.]+ .iB .*\. Allow [\d.]+ .iB, or take more"),
        ({"data": None}, [], r"data: got None\. Tokens and images are counted in the first batch of the training data"),
    ],
    ids=["ranks that the cluster does not have", "memory that nothing fits", "no data"],
)
def test_each_bad_input_is_one_error(
    changes: dict[str, None], options: list[str], told: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = {key: value for key, value in yaml.safe_load(config.read_text()).items() if key not in changes}
    config.write_text(yaml.safe_dump(content))
    cluster = config.with_name("cluster.yaml")
    cluster.write_text("{nodes: 1, ranks: 2, memory: 1KiB}")
    assert main(["plan", str(config), "--cluster", str(cluster), *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert re.match(f"mm5d: error: {told}", err), err
