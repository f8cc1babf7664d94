"""The layout of Llama 3 70B is what its file of MindFormers converts to, and runs dry on a rank of the last stage.

language: ranks 0-63, of which rank 63 is the last stage's. The dry run has the layout and a small model.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import yaml

from lightning_mm5d.tools.cli.main import main
from lightning_mm5d.tools.convert.conversion import read_configuration

FOLDER = Path(__file__).parents[2] / "examples" / "llama3_70b"
SMALL = {"layers": 16, "width": 64, "inner": 96, "heads": 16, "key_value_heads": 8, "vocabulary": 512}


def test_the_configuration_is_what_mindformers_file_says() -> None:
    strategy = yaml.safe_load((FOLDER / "config.yaml").read_text())["trainer"]["strategy"]["init_args"]
    converted = read_configuration(FOLDER / "mindformers.yaml").strategy
    assert strategy["modalities"]["language"] == converted["modalities"]["model"]
    assert strategy["batching"] == converted["batching"]


def test_a_rank_of_its_last_stage_runs_dry(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"--model.init_args.{name}={size}" for name, size in SMALL.items()]
    arguments += ["--data.init_args.batch_size=4", "--data.init_args.length=32", "--data.init_args.vocabulary=512"]
    prefix = "--trainer.strategy.init_args"
    arguments += [f"{prefix}.batching.num_microbatches=4"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["dryrun", str(FOLDER / "config.yaml"), "--rank", "63", "--json", *arguments]) == 0
    printed = capsys.readouterr().out
    found, _ = json.JSONDecoder().raw_decode(printed[printed.index("{") :])
    assert found["rank"] == 63
    assert found["memory"]["peak"] > found["memory"]["parameters"]
