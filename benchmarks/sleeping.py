"""What engine and transport add to a schedule: stages that only sleep, against the simulated ideal of the schedule.

Six to sixteen ranks share two cores, so a stage sleeps instead of computing, and every core is free for engine and
transport. The ideal is the simulation of the actions that ran, with the measured durations of the sleeps. A step is
measured from one batch to the next: data, engine, transport, losses and logs, optimizer.
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
from lightning_mm5d.config.groups import with_fields
from lightning_mm5d.engine import engine
from lightning_mm5d.schedule import SCHEDULES, Graph, build, simulate
from lightning_mm5d.stage import Deferred

SLEEP_S, MICROBATCHES = 0.04, 16  # of a forward, of an input gradient and of a weight gradient
STEPS, WARMUP, WIDTH, TOKENS = 8, 2, 64, 16
SLEPT: dict[str, list[float]] = {"forward": [], "input": [], "weight": []}  # seconds, of the layers of this process


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, full: bool) -> Tensor:
        ctx.full = full
        _sleep("forward")
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, None]:
        _sleep("input")
        if ctx.full:
            _sleep("weight")
        return gradient[0], None


def _sleep(what: str) -> None:
    start = time.perf_counter()
    time.sleep(SLEEP_S)
    SLEPT[what].append(time.perf_counter() - start)


class SleepingLayer(nn.Module):
    """Hidden states [B, S, D] -> the same shape, after a sleep. Its weight gradient sleeps when it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.eye_(self.linear.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.linear(hidden)
        node = hidden.grad_fn.next_functions[0][0] if hidden.grad_fn is not None else None
        return _Sleep.apply(hidden, node is None or not node.name().startswith("_Linear"))


class _SleepingDeferred(Deferred):
    """Defers the sleep of a weight gradient together with the weight gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.sleeps = 0

    def add(self, *args: Any) -> None:
        self.sleeps += 1
        super().add(*args)

    def compute(self) -> None:
        for _ in range(self.sleeps):
            _sleep("weight")
        super().compute()


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
    """A decoder after encoders side by side; `towers` has the number of layers of each by name."""

    def __init__(self, towers: dict[str, int]) -> None:
        super().__init__()
        self.encoders = [name for name in towers if name != "language"]
        for name, layers in towers.items():
            setattr(self, name, Tower(layers))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        features = [getattr(self, name)(batch[0]) for name in self.encoders]
        return self.language(sum(features) if features else batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Clock(Callback):
    """When each batch began."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.starts.append(time.perf_counter())


def measure(
    towers: dict[str, tuple[int, int]], replicas: int, schedule: str, aim: str, chunks: int = 1
) -> tuple[float, float]:
    """Train, print the row and return the measured step and the ideal one in seconds; towers are (layers, ranks)."""
    world = replicas * sum(ranks for _, ranks in towers.values())

    engine.Deferred = _SleepingDeferred  # type: ignore[misc]

    def train(turns: Turns, rank: int) -> tuple[list[float], tuple[float, ...], Graph]:
        modalities = {
            name: Modality(module=name, boundary=None if name == "language" else name, pp_size=ranks)
            for name, (_, ranks) in towers.items()
        }
        modalities["language"] = with_fields(modalities["language"], pp_chunks=chunks)
        strategy = MultimodalStrategy(modalities, schedule=schedule, batching={"num_microbatches": MICROBATCHES})
        module, clock = Sleepers({name: layers for name, (layers, _) in towers.items()}), Clock()
        samples = TensorDataset(torch.randn(STEPS * MICROBATCHES, TOKENS, WIDTH))
        fit(module, DataLoader(samples, batch_size=MICROBATCHES), strategy, world, clock)
        graph = strategy.plan(module).graphs.full_graph(schedule, MICROBATCHES, module)
        # the first steps are left out: a rank sleeps as often in each step
        slept = tuple(statistics.mean(times[len(times) * WARMUP // STEPS :]) for times in SLEPT.values())
        return clock.starts, slept, graph

    results = run(Side(world, train))
    graph = results[0][2]
    nodes = []
    for node in graph.nodes:
        forward, inward, weight = (time * node.forward_cost / WIDTH**2 for time in results[node.rank][1])
        nodes.append(dataclasses.replace(node, forward_cost=forward, backward_cost=inward + weight, weight_cost=weight))
    ideal = simulate(build(schedule, graph), Graph(tuple(nodes), graph.edges)).makespan
    step = statistics.median(end - start for start, end in pairwise(results[-1][0][WARMUP:]))
    shape = ", ".join(f"{name} pp {ranks}" for name, (_, ranks) in towers.items())
    row(
        f"sleeping layers, {schedule}, {world} ranks ({shape}, dp {replicas}): measured step / simulated ideal",
        step / ideal,
        aim,
        f"{step * 1e3:.0f} ms / {ideal * 1e3:.0f} ms",
    )
    return step, ideal


def main() -> None:
    measure({"language": (8, 8)}, 1, "1f1b", "1.03")
    measure({"vision": (2, 2), "audio": (2, 2), "language": (4, 4)}, 1, "1f1b", "1.03")
    measure({"vision": (2, 2), "audio": (2, 2), "language": (4, 4)}, 2, "1f1b", "1.03")
    towers = {"vision": (4, 2), "language": (8, 4)}
    by_schedule = {
        name: measure(towers, 1, name, "1.05", chunks=2 if name == "interleaved" else 1) for name in SCHEDULES
    }
    for which, times in enumerate(zip(*by_schedule.values(), strict=True)):
        order = sorted(zip(times, by_schedule, strict=True))
        print(("measured", "simulated")[which], "order:", ", ".join(f"{name} {time:.3f} s" for time, name in order))


if __name__ == "__main__":
    main()
