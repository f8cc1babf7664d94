"""The job scripts of examples/clusters are what their schedulers take, and train as one process does.

That they train is `exhaustive`; starts by SLURM and by torchrun are in the default run of tests/launching.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml

from clusters.started import ROOT, start_all
from lightning_mm5d.trainer.process_group import free_port

EXAMPLES = ROOT / "examples" / "clusters"
SBATCH = ("slurm.sbatch", "apptainer.sbatch")
# stands in for Apptainer: runs the command of `exec` here, and fails without a command
APPTAINER = """#!/usr/bin/env bash
test "$1" = exec && shift
while test "$1" != python; do shift; done
exec "$@"
"""


def loss_of(printed: str) -> float:
    """The loss in a line such as "ranks 2: loss 1.25 after 20 steps", of which Ray shows copies."""
    found = set(re.findall(r"ranks 2: loss (\S+) after 8 steps", printed))
    assert len(found) == 1, printed
    return float(found.pop())


@pytest.fixture(scope="session")
def loss_of_one_process() -> float:
    """The last loss of the example's model after an epoch of plain Lightning."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.syspath_prepend(str(ROOT / "examples" / "quickstart"))
        patch.delitem(sys.modules, "module", raising=False)
        import module

        quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        L.seed_everything(1, verbose=False)
        trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, enable_model_summary=False, **quiet)
        trainer.fit(module.Captioner(), module.bars(samples=128, batch_size=16))
        del sys.modules["module"]
    return float(trainer.callback_metrics["loss"])


def manifest() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The Service, the Job, and the only container of its pods."""
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return service, job, container


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.parametrize("script", SBATCH)
def test_the_job_script_for_slurm_trains_as_one_process_does(
    script: str, loss_of_one_process: float, tmp_path: Path
) -> None:
    """Two nodes with a task each; vision: rank 0; language: rank 1."""
    srun = tmp_path / "programs" / "srun"
    srun.parent.mkdir()
    srun.write_text(f"#!{sys.executable}\n" + Path(__file__).with_name("fake_srun.py").read_text())
    srun.with_name("apptainer").write_text(APPTAINER)
    for program in srun.parent.iterdir():
        program.chmod(0o755)
    ports = (port for port in iter(free_port, None) if port < 25_000)
    last_digits = next(ports) - 15_000  # of the job's number, from which Lightning makes the port
    variables = {
        "SLURM_JOB_ID": f"7{last_digits:04}",
        "SLURM_JOB_NAME": "captioner",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NODELIST": "127.0.0.1",
        "FOLDER": str(tmp_path / "run"),
        "LANGUAGE_STAGES": "1",
        "EPOCHS": "1",
        "PATH": f"{srun.parent}:{Path(sys.executable).parent}:/usr/bin:/bin",
    }
    ended = start_all(tmp_path, [(["bash", str(EXAMPLES / script)], variables)])
    assert ended.codes == [0], ended.printed
    assert loss_of(ended.printed) == pytest.approx(loss_of_one_process, rel=1e-5)
    assert (tmp_path / "run" / "last.ckpt").exists()


@pytest.mark.parametrize("script", SBATCH)
def test_the_job_script_for_slurm_is_bash_and_asks_for_as_many_gpus_as_tasks(script: str) -> None:
    assert subprocess.run(["bash", "-n", str(EXAMPLES / script)], check=False).returncode == 0
    text = (EXAMPLES / script).read_text()
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert len(asked) == text.count("#SBATCH")
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]  # Lightning refuses --ntasks without it


@pytest.mark.exhaustive
@pytest.mark.processes
def test_the_command_of_pods_trains_as_one_process_does(loss_of_one_process: float, tmp_path: Path) -> None:
    """Two pods as torchrun's agents on this machine, with a process each instead of four."""
    _, _, container = manifest()
    endpoint = f"127.0.0.1:{free_port()}"
    replaced = {
        "--nnodes": "--nnodes=2",
        "--nproc-per-node": "--nproc-per-node=1",
        "--rdzv-endpoint": f"--rdzv-endpoint={endpoint}",
        "--local-addr": "--local-addr=127.0.0.1",
        "--folder": f"--folder={tmp_path / 'run'}",
        "--language-stages": "--language-stages=1",
    }
    command = [replaced.pop(word.partition("=")[0], word) for word in container["command"]]
    assert not replaced
    ended = start_all(tmp_path, [([*command, "--epochs=1"], {})] * 2)
    assert ended.codes == [0, 0], ended.printed
    assert loss_of(ended.printed) == pytest.approx(loss_of_one_process, rel=1e-5)


def test_pods_find_each_other_under_the_names_of_the_manifest() -> None:
    service, job, container = manifest()
    name, pods = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert (service["kind"], job["kind"], job["spec"]["completionMode"]) == ("Service", "Job", "Indexed")
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert pods["subdomain"] == service["metadata"]["name"]
    options = dict(word.removeprefix("--").split("=", 1) for word in container["command"] if word.startswith("--"))
    (port,) = service["spec"]["ports"]
    assert options["rdzv-endpoint"] == f"{name}-0.{pods['subdomain']}:{port['port']}"
    assert options["nnodes"] == f"1:{job['spec']['completions']}"
    assert int(options["nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pods["volumes"]}
    assert options["folder"].startswith(container["volumeMounts"][0]["mountPath"])


def test_the_job_script_for_ray_gives_the_training_function_all_that_it_takes() -> None:
    """Where Ray is installed, `test_ray` runs it."""
    taken = {
        argument.arg
        for node in ast.walk(ast.parse((EXAMPLES / "train.py").read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "train"
        for argument in (*node.args.args, *node.args.kwonlyargs)
    }
    (settings,) = (
        {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
        for node in ast.walk(ast.parse((EXAMPLES / "ray_job.py").read_text()))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    )
    assert settings - {"path"} == taken - {"plugins"}


def test_every_file_that_the_scripts_and_their_page_name_exists() -> None:
    for path in EXAMPLES.iterdir():
        if path.is_file():
            for named in re.findall(r"examples/[\w/.]+\.\w+", path.read_text()):
                assert (ROOT / named).is_file(), (path.name, named)
