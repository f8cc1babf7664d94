"""Peak memory of a GPU where copies of a whole model could hide: sums of gradients, casts, and the end of a run.

The model is a stack of wide layers with few samples, so that parameters, gradients and states are nearly all there is.
Ranks share one GPU over gloo, whose own buffers are in host memory.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.rows import Row
from benchmarks.gpu.shared_gpu import run_ranks
from benchmarks.gpu.towers import TIMEOUT, fit
from lightning_mm5d import Modality, MultimodalStrategy

LIMIT_S = 120
MIB = 2**20


class Layer(nn.Module):
    """Hidden states [B, D] -> the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(hidden).tanh()


class Stack(nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(width) for _ in range(layers)])

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Wide(L.LightningModule):
    """512 MiB of float32 parameters on a GPU."""

    def __init__(self, machine: Machine, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.width = machine.pick(2048, 32)
        self.decoder = Stack(machine.pick(32, 4), self.width)
        self._optimizer = optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.decoder(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer(self.parameters(), lr=1e-4, foreach=False)  # type: ignore[call-arg]

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return self.width**2 * len(self.decoder.layers)


class Peak(Callback):
    """Measures the peak of the last step."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.bytes = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self._machine.reset_peak()

    def on_train_batch_end(self, *_: Any) -> None:
        self.bytes = self._machine.peak_bytes()


def _batches(module: Wide, samples: int = 16) -> list[Tensor]:
    return [torch.randn(samples, module.width)] * 3


# --- sums of gradients ---


def sums(machine: Machine) -> Iterator[Row]:
    """Yield the peak of a step of two replicas over their parameters and gradients."""
    for count in (1, 4):

        def train(rank: int, count: int = count) -> float:
            module, peak = Wide(machine), Peak(machine)
            needed = 2 * 4 * module.numel
            strategy = MultimodalStrategy(
                batching={"num_microbatches": count}, launch={"process_group_backend": "gloo", "timeout": TIMEOUT}
            )
            fit(module, _batches(module), strategy, machine.shared, peak, devices=2)
            return peak.bytes / needed

        ratios = run_ranks(2, train, limit=LIMIT_S)
        name = f"dp 2, {count} microbatch{'es' * (count > 1)}: peak / parameters and gradients"
        yield Row(name=name, value=max(ratios), at_most=1.15)


# --- casts ---


def casts(machine: Machine) -> Iterator[Row]:
    """Yield the bytes of a parameter at the peak of a step with AdamW, for each precision."""
    mixed = [_bytes(machine, "bf16-mixed", count) for count in (2, 8)]
    for count, value in zip((2, 8), mixed, strict=True):
        yield Row(name=f"bf16-mixed, {count} microbatches in flight", value=value, unit="bytes a parameter")
    grown = (mixed[1] - mixed[0]) / 6
    yield Row(name="bf16-mixed: growth with a microbatch", value=grown, unit="bytes a parameter", at_most=0.25)
    yield Row(name="bf16-true", value=_bytes(machine, "bf16-true", 8), unit="bytes a parameter", at_most=8.5)
    value = _bytes(machine, "bf16-true", 8, numerics={"main_params": "float32"})
    yield Row(name="bf16-true with main_params", value=value, unit="bytes a parameter", at_most=18.5)


def _bytes(machine: Machine, precision: str, count: int, **options: Any) -> float:
    def train(rank: int) -> float:
        module, peak = Wide(machine, torch.optim.AdamW), Peak(machine)
        numel, data = module.numel, _batches(module)
        strategy = MultimodalStrategy(
            schedule="gpipe", batching={"num_microbatches": count}, **options, launch={"timeout": TIMEOUT}
        )
        fit(module, data, strategy, machine.accelerator, peak, precision=precision)
        return peak.bytes / numel

    return run_ranks(1, train, limit=LIMIT_S)[0]


# --- the end of a run ---


class Ends(Callback):
    """Saves a checkpoint at the end, and marks where the trainer begins to tear down."""

    def __init__(self, machine: Machine, folder: str) -> None:
        self._machine, self._folder = machine, folder
        self.saved = self.alive = self.host = 0

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        before = self._begin()
        trainer.save_checkpoint(Path(self._folder, "last.ckpt"))
        self.saved = self._machine.peak_bytes() - before

    def on_fit_end(self, *_: Any) -> None:
        self.alive, self.host = self._begin(), _resident()

    def _begin(self) -> int:
        self._machine.reset_peak()
        return self._machine.allocated_bytes()


def ends(machine: Machine) -> Iterator[Row]:
    """Yield what a checkpoint and the end of a run add on the GPU, and on the host of a rank that gathers nothing."""
    with TemporaryDirectory() as folder:

        def train(rank: int) -> tuple[float, float, float]:
            module, mark = Wide(machine), Ends(machine, folder)
            largest, whole = 4 * module.width**2, 4 * module.numel
            modalities = {"language": Modality(module="decoder", pp_size=2)}
            strategy = MultimodalStrategy(
                modalities,
                batching={"num_microbatches": 4},
                launch={"process_group_backend": "gloo", "timeout": TIMEOUT},
            )
            fit(module, _batches(module), strategy, machine.shared, mark, devices=2)
            added = machine.peak_bytes() - mark.alive
            return mark.saved / largest, added / largest, (_resident() - mark.host) / whole

        saved, added, host = zip(*run_ranks(2, train, limit=LIMIT_S), strict=True)
    yield Row(name="pp 2, a full checkpoint: bytes added on the GPU / largest tensor", value=max(saved), at_most=1.1)
    yield Row(name="pp 2, the end of fit: the same", value=max(added), at_most=1.1)
    name = "pp 2, the end of fit: host memory that rank 1 adds / all parameters"
    yield Row(name=name, value=host[1], at_most=0.7, note="it holds half of the layers")


def _resident() -> int:
    """Return the resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
