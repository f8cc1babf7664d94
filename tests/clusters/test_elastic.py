"""Ranks of another number than the layout can have go on from a sharded checkpoint, of a YAML file and of a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from clusters.started import ROOT
from lightning_mm5d.trainer.process_group import free_port

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive]


def configuration(folder: Path, **options: Any) -> Path:
    modalities = {"vision": {"module": "encoder"}, "language": {"pp_size": 3}}
    strategy = {"modalities": modalities, "batching": {"num_microbatches": 4}}
    strategy["checkpoint"] = {"checkpoint_format": "sharded"}
    trainer = {"accelerator": "cpu", "devices": 4, "max_steps": 10, "logger": False, "use_distributed_sampler": False}
    trainer |= {"strategy": {"class_path": "lightning_mm5d.MultimodalStrategy", "init_args": strategy}}
    saves = {"dirpath": str(folder / "saved"), "every_n_train_steps": 4, "save_top_k": -1}
    trainer["callbacks"] = [
        {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": saves},
        {"class_path": "clusters.elastic_parts.Losses", "init_args": {"file": str(folder / "losses.jsonl")}},
    ]
    parts = {"model": "features.toys.Toy", "data": "clusters.elastic_parts.Parts"}
    named = {key: {"class_path": path} for key, path in parts.items()}
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({"seed_everything": 1, "elastic": True, "trainer": trainer | options, **named}))
    return file


def fit(folder: Path, ranks: int, *arguments: str, **options: Any) -> str:
    command = ["-m", "lightning_mm5d.tools.cli.main", "fit", "--config", str(configuration(folder, **options))]
    return run(folder, ranks, *command, *arguments)


def run(folder: Path, ranks: int, *command: str) -> str:
    agent = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", *agent, *command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def losses(folder: Path) -> list[tuple[int, float, int]]:
    return [tuple(json.loads(line)) for line in (folder / "losses.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("ranks", [1, 3])
def test_fewer_ranks_go_on_with_the_same_samples_and_losses(ranks: int, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    assert "elastic:" not in fit(whole, 4)
    fit(cut, 4, max_steps=4)
    (saved,) = (cut / "saved").iterdir()
    assert f"elastic: {ranks} ranks train 8 samples a step" in fit(cut, ranks, "--ckpt_path", str(saved))
    before, after = losses(whole), losses(cut)
    assert [world for *_, world in after] == [4] * 4 + [ranks] * 6
    assert [step for step, *_ in after] == [step for step, *_ in before] == [*range(1, 11)]
    assert [loss for _, loss, _ in after] == pytest.approx([loss for _, loss, _ in before], abs=1e-9)


def test_a_script_of_ones_own_goes_on_in_a_layout_of_fewer_ranks(tmp_path: Path) -> None:
    """vision: rank 0; language: ranks 1-3; then both on three ranks, and on four again"""
    job, found = str(Path(__file__).with_name("elastic_job.py")), {}
    for name, attempts in {"whole": [(4, 10)], "cut": [(4, 4), (3, 8), (4, 10)]}.items():
        folder = tmp_path / name
        folder.mkdir()
        for ranks, steps in attempts:
            printed = run(folder, ranks, job, str(folder), str(steps))
            assert ("elastic: 3 ranks train 8 samples a step" in printed) is (ranks == 3)
        found[name] = losses(folder)
    assert [world for *_, world in found["cut"]] == [4] * 4 + [3] * 4 + [4] * 2
    assert [step for step, *_ in found["cut"]] == [*range(1, 11)]
    before, after = ([loss for _, loss, _ in found[name]] for name in ("whole", "cut"))
    assert after == pytest.approx(before, abs=1e-9)
