"""Train the captioner of the quickstart on a Ray cluster, by Ray's trainer of PyTorch.

    ray job submit --working-dir . -- python examples/clusters/ray_job.py --folder /shared/captioner --workers 8 --gpu

Tasks of Ray prepare the samples first, each a part of them, on whatever nodes have a core free. Then Ray creates the
processes and says which rank each of them is; `RayLightningEnvironment` tells Lightning. Ray's `prepare_trainer` is not
called, because it takes Ray's own strategies only. After a failure Ray starts all workers again, and they go on from
the last checkpoint.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

HERE = Path(__file__).resolve().parent


@ray.remote
def prepare(examples: str, folder: Path, part: int, parts: int) -> None:
    """Write one of several parts of the samples, in a process of its own; a part that is there stays."""
    sys.path[:0] = [f"{examples}/quickstart"]
    from module import bars

    path = folder / f"{part:03}.pt"
    if not path.exists():
        unfinished = folder / f"{part:03}.unfinished"
        samples = bars(samples=128, batch_size=16).dataset.tensors
        torch.save([tensor.tensor_split(parts)[part].clone() for tensor in samples], unfinished)
        unfinished.replace(path)


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
    parser.add_argument("--parts", type=int, default=4, help="tasks that prepare samples")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--max-failures", type=int, default=3)
    parser.add_argument("--gpu", action="store_true", help="give every rank a GPU")
    options = parser.parse_args()
    prepared = options.folder.resolve() / "prepared"
    prepared.mkdir(parents=True, exist_ok=True)
    ray.get([prepare.remote(str(HERE.parent), prepared, part, options.parts) for part in range(options.parts)])
    settings = {
        "path": str(HERE),
        "folder": options.folder,
        "devices": options.devices,
        "nodes": options.workers // options.devices,
        "language_stages": options.language_stages,
        "epochs": options.epochs,
        "prepared": prepared,
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
