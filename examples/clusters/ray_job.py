"""Train the captioner of the quickstart on a Ray cluster, by Ray's trainer of PyTorch.

    ray job submit --working-dir . -- python examples/clusters/ray_job.py --folder /shared/captioner --workers 8 --gpu

Ray creates the processes and says which rank each of them is; `RayLightningEnvironment` tells Lightning. Ray's
`prepare_trainer` is not called, because it takes Ray's own strategies only. After a failure Ray starts all workers
again, and they go on from the last checkpoint.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

HERE = Path(__file__).resolve().parent


def worker(options: dict[str, Any]) -> None:
    """Train on one rank; Ray calls it in a process of its own."""
    from ray.train.lightning import RayLightningEnvironment

    sys.path[:0] = [options.pop("path")]
    from train import train

    train(**options, plugins=[RayLightningEnvironment()])


def main() -> None:
    """Read the options, and wait for the workers."""
    parser = argparse.ArgumentParser(description="Train a captioner on a Ray cluster.")
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints; seen by all nodes")
    parser.add_argument("--workers", type=int, default=4, help="ranks in all")
    parser.add_argument("--devices", type=int, default=4, help="ranks on a node")
    parser.add_argument("--language-stages", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--max-failures", type=int, default=3)
    parser.add_argument("--gpu", action="store_true", help="give every rank a GPU")
    options = parser.parse_args()
    settings = {
        "path": str(HERE),
        "folder": options.folder,
        "devices": options.devices,
        "nodes": options.workers // options.devices,
        "language_stages": options.language_stages,
        "epochs": options.epochs,
    }
    trainer = TorchTrainer(
        worker,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(
            name="captioner",
            storage_path=str(options.folder.resolve() / "ray"),
            failure_config=FailureConfig(max_failures=options.max_failures),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
