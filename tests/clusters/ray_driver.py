"""Trains `cluster_job` by Ray's trainer on a Ray of this machine, which ends with this script.

Arguments: a folder for each run, and one for what Ray itself writes. A worker is killed in each: in the first run all
start again; in the second Ray is told not to start them again, and the error is printed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

WORLD = 2


def worker(options: dict[str, Any]) -> None:
    """Train on one rank."""
    from ray.train.lightning import RayLightningEnvironment

    from clusters.cluster_job import train

    train(options["folder"], devices=WORLD, nodes=1, kills=[(1, 5, False)], plugins=[RayLightningEnvironment()])


def fit(folder: Path, max_failures: int) -> None:
    """Train in a folder, and start all workers again after at most `max_failures` failures."""
    TorchTrainer(
        worker,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=WORLD),
        run_config=RunConfig(storage_path=str(folder), failure_config=FailureConfig(max_failures=max_failures)),
    ).fit()


def main() -> None:
    again, once, own = (Path(argument) for argument in sys.argv[1:])
    ray.init(
        num_cpus=WORLD,
        include_dashboard=False,
        object_store_memory=80_000_000,
        _temp_dir=str(own),
        runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"], "OMP_NUM_THREADS": "1"}},
    )
    try:
        fit(again, 1)
        print("trained again")
        try:
            fit(once, 0)
        except Exception as error:
            print(f"failed once: {error}")
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
