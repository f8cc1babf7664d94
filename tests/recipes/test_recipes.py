"""The recipes of the examples run as they stand, on parts that have learned nothing.

sum.yaml: vision: rank 0; audio: rank 1; language: ranks 2 and 3. The others are planned, not run.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_mm5d.tools.cli.main import main

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.yaml"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the recipes find their parts, in ``runs/recipes``."""
    found = tmp_path_factory.mktemp("recipes")
    prepare = runpy.run_path(str(ROOT / "examples" / "recipes" / "prepare.py"))
    prepare["main"](found / "runs" / "recipes", effort=0)
    return found


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_planned(
    folder: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["inspect", str(recipe)]) == 0
    assert "language" in capsys.readouterr().out


def test_a_recipe_trains_and_ends_with_a_number(folder: Path) -> None:
    options = [
        "--trainer.num_sanity_val_steps=0",
        "--trainer.max_steps=2",
        "--trainer.val_check_interval=2",
        "--trainer.limit_val_batches=1",
        "--model.samples=2",
        "--data.batch_size=4",
        "--trainer.strategy.init_args.start_method=fork",  # without imports in each rank
    ]
    command = [sys.executable, "-m", "lightning_mm5d.tools.cli.main", "fit", "--config", str(RECIPES[-1]), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "last validation: accuracy" in done.stdout
    lines = (folder / "runs" / "recipes" / "sum" / "samples.jsonl").read_text().splitlines()
    assert [sorted(json.loads(line)) for line in lines] == [["answer", "right", "step", "target"]] * 2
