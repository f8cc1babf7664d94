"""What engine and transport add to a schedule: stages that only sleep, against the simulated ideal of the schedule.

Eight to sixteen ranks share two cores, so a stage takes its time by sleeping and every core is free for what is to be
measured. The ideal is the simulation of the very action lists that ran, with the durations that the sleeps had. The
step is the whole one, from one batch to the next: data, engine, transport, losses and logs, optimizer.
"""

import dataclasses
import statistics
import time
from itertools import pairwise
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from turns import Side, Turns, fit, row, run

from lightning_mm5d import Modality, MultimodalStrategy
from lightning_mm5d.schedule import build, simulate

FORWARD_S, BACKWARD_S, MICROBATCHES = 0.04, 0.08, 16
STEPS, WARMUP, WIDTH, TOKENS = 8, 2, 64, 16
SCHEDULE = "1f1b"
SLEPT: dict[str, list[float]] = {"forward": [], "backward": []}  # seconds, of the one layer that this process holds


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.gradient = weight.detach()
        SLEPT["forward"].append(_sleep(FORWARD_S))
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, Tensor]:
        SLEPT["backward"].append(_sleep(BACKWARD_S))
        return gradient[0], ctx.gradient


def _sleep(seconds: float) -> float:
    start = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - start


class SleepingLayer(nn.Module):
    """Hidden states [B, S, D] -> the same shape, later."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, hidden: Tensor) -> Tensor:
        return _Sleep.apply(hidden, self.weight)


class Tower(nn.Module):
    """[B, S, D] -> [B, S, D] through layers that sleep."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(SleepingLayer()) for _ in range(layers)])

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Sleepers(L.LightningModule):
    """A decoder, and two encoders side by side in front of it where `towers` names their layers too."""

    def __init__(self, towers: dict[str, int]) -> None:
        super().__init__()
        self.language = Tower(towers["language"])
        self.has_encoders = "vision" in towers
        if self.has_encoders:
            self.vision, self.audio = Tower(towers["vision"]), Tower(towers["audio"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.vision(batch[0]) + self.audio(batch[0]) if self.has_encoders else batch[0]
        return self.language(hidden).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Clock(Callback):
    """When each batch began."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.starts.append(time.perf_counter())


def measure(towers: dict[str, int], replicas: int) -> None:
    """Train with one stage a layer and one rank a stage, and print the row."""
    world = replicas * sum(towers.values())

    def train(turns: Turns, rank: int) -> tuple[list[float], float, float, Any]:
        modalities = {
            name: Modality(module=name, boundary=None if name == "language" else name, pp_size=layers)
            for name, layers in towers.items()
        }
        strategy = MultimodalStrategy(modalities, schedule=SCHEDULE, num_microbatches=MICROBATCHES)
        module, clock = Sleepers(towers), Clock()
        samples = TensorDataset(torch.randn(STEPS * MICROBATCHES, TOKENS, WIDTH))
        fit(module, DataLoader(samples, batch_size=MICROBATCHES), strategy, world, clock)
        names = frozenset(name for name, _ in module.named_parameters())
        graph = strategy.plan(module).graph(range(replicas), MICROBATCHES, names)
        skipped = WARMUP * MICROBATCHES
        forward, backward = (statistics.mean(SLEPT[key][skipped:]) for key in ("forward", "backward"))
        return clock.starts, forward, backward, graph

    results = run(Side(world, train))
    graph = results[0][3]
    slept = dataclasses.replace(
        graph,
        nodes=tuple(
            dataclasses.replace(
                node, forward_cost=results[node.worker][1], backward_cost=results[node.worker][2], weight_cost=None
            )
            for node in graph.nodes
        ),
    )
    ideal = simulate(build(SCHEDULE, graph), slept).makespan
    starts = results[-1][0][WARMUP:]
    step = statistics.median(end - start for start, end in pairwise(starts))
    # the longest way through a 1F1B schedule: all microbatches on one rank, and one through the others and back
    actions = 2 * (MICROBATCHES + max(graph.distance_to_end(stage) for stage in graph.stages))
    shape = ", ".join(f"{name} pp {layers}" for name, layers in towers.items())
    row(
        f"sleeping layers, {world} ranks ({shape}, dp {replicas}): measured step / simulated ideal",
        step / ideal,
        "1.03",
        f"{step * 1e3:.0f} ms / {ideal * 1e3:.0f} ms, {(step - ideal) / actions * 1e3:.2f} ms an action",
    )


def main() -> None:
    measure({"language": 8}, replicas=1)
    measure({"vision": 2, "audio": 2, "language": 4}, replicas=1)
    measure({"vision": 2, "audio": 2, "language": 4}, replicas=2)


if __name__ == "__main__":
    main()
