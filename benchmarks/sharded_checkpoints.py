"""What a sharded checkpoint costs: milliseconds that training waits, and bytes that a rank reads over those it holds.

    python benchmarks/sharded_checkpoints.py [--megabytes 240] [--folder FOLDER]

Two ranks train a model of linear layers, as two stages and with tensor parallelism. The times are those that
`trainer.save_checkpoint` takes on rank 0, with ``async_checkpoint`` and without, the smallest of three. The bytes are
those that rank 0 reads of weights and optimizer states, with all headers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

from lightning_mm5d import Modality, MultimodalStrategy
from lightning_mm5d.sharded.remote_value import is_remote
from lightning_mm5d.storage.tensor_file import TensorFile

LAYERS = 8
LAYOUTS = {"pp 2": {"pp_size": 2}, "tp 2": {"tp_size": 2}}


class Layer(nn.Module):
    """Two linear layers, which tensor parallelism shards by columns and by rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down_proj(torch.relu(self.up_proj(hidden)))


class Model(L.LightningModule):
    """Layers whose weights have a number of megabytes in float32."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        width = int((megabytes * 1e6 / 4 / 2 / LAYERS) ** 0.5) // 64 * 64
        self.layers = nn.ModuleList(Layer(width) for _ in range(LAYERS))
        self.width, self.held = width, 0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if not self.held:  # hooks see the parameters of all ranks
            held = [parameter for parameter in self.parameters() if not is_remote(parameter)]
            state = [
                value for parameter in held for value in self.trainer.optimizers[0].state.get(parameter, {}).values()
            ]
            self.held = sum(tensor.numel() * tensor.itemsize for tensor in (*held, *state))
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


class Measure(Callback):
    """Saves three times, two steps apart."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ms = folder, list[float]()
        self.read = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.read = sum(file.bytes_read for file in OPENED)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step % 2 == 0:
            begin = time.perf_counter()
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")
            self.ms.append(1e3 * (time.perf_counter() - begin))


OPENED: list[TensorFile] = []


def job(arguments: argparse.Namespace) -> None:
    """One run of one rank; rank 0 prints what it measured."""
    original = TensorFile.__init__

    def noted(self: TensorFile, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        OPENED.append(self)

    TensorFile.__init__ = noted  # type: ignore[method-assign]
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, measure = Model(arguments.megabytes), Measure(Path(arguments.folder))
    strategy = MultimodalStrategy(
        {"model": Modality(**LAYOUTS[arguments.layout])},
        checkpoint={"checkpoint_format": "sharded", "async_checkpoint": arguments.asynchronous},
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=8 if arguments.load else 6,
        callbacks=[measure],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(torch.randn(64, model.width), batch_size=4)
    trainer.fit(model, data, ckpt_path=arguments.load or None)
    if trainer.is_global_zero:
        print(json.dumps({"ms": measure.ms, "read": measure.read, "held": model.held}), flush=True)


def main() -> None:
    """Run all cases and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=240)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--layout", default="")
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--load", default="")
    arguments = parser.parse_args()
    if arguments.layout:
        job(arguments)
        return
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))

    def run(layout: str, to: str, *more: str) -> dict[str, Any]:
        command = [sys.executable, __file__, "--layout", layout, "--megabytes", str(arguments.megabytes)]
        done = subprocess.run(
            [*command, "--folder", str(folder / to), *more],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return figures

    try:
        for layout in LAYOUTS:
            blocking = run(layout, layout)["ms"]
            shutil.rmtree(folder / "again", ignore_errors=True)
            asynchronous = run(layout, "again", "--asynchronous")["ms"]
            ratio = min(asynchronous) / min(blocking)
            print(f"{layout}: blocking {min(blocking):.0f} ms, asynchronous {min(asynchronous):.0f} ms, {ratio:.2f}")
        for source in LAYOUTS:
            for target in LAYOUTS:
                shutil.rmtree(folder / "again", ignore_errors=True)
                figures = run(target, "again", "--load", str(folder / source / "6.ckpt"))
                print(f"{source} into {target}: {figures['read'] / figures['held']:.3f} bytes read per byte held")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
