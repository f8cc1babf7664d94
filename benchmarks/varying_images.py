"""A step whose samples have 0 to 30 images, log-normal: dealt by their number to microbatches and replicas, or not.

Layers sleep instead of computing, so that more ranks than cores show what they wait for: an encoder for each of its
images, the language model for each microbatch. Sides take turns. Of replicas also the images are counted. Orders of
microbatches are simulated: an encoder before four stages under `1f1b`, over many batches. So is what encoder replicas
have to do with images of unlike sizes and videos of unlike lengths, in floating point operations of their layers: dealt
by rows, by what items cost, and by routing single items to encoders, which bounds them.

usage: python benchmarks/varying_images.py [microbatches] [replicas] [orders] [items]
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from functools import partial
from itertools import pairwise
from typing import Any

import lightning as L
import numpy as np
import torch
from sleeping import WIDTH
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from turns import Side, Turns, fit, median_ratio, milliseconds, race, row

from lightning_mm5d import Modality, MultimodalStrategy
from lightning_mm5d.features.balanced_microbatches.longest_first import Exchange, costs_of, in_line
from lightning_mm5d.schedule import Graph, Kind, Node, build, dependencies
from lightning_mm5d.schedule.graph import StageKey

IMAGE_S, LANGUAGE_S = 0.0006, 0.02  # of a forward on one rank, so that all have as much to do; a backward takes twice
STEPS, BATCH, MICROBATCHES, TOKENS = 20, 64, 8, 8
REPLICAS, COUNTED = 4, 50  # steps whose images are counted
BATCHES, DEEP, MANY, SIMULATED_SAMPLES = 200, 4, 16, 128  # simulated: stages of the language model, microbatches
ENCODER_WIDTH, ROUTED_STEPS, PER_MICROBATCH = 1024, 50, 4  # of the encoders whose replicas are compared
WAYS = ("as they come", "even microbatches", "by rows", "by cost", "items")
DRAWN = 100  # orders of the microbatches of each eighth batch


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Layer(nn.Module):
    """[N, ...] -> the same shape; takes `seconds`, for each row if `per_row`."""

    def __init__(self, seconds: float, *, per_row: bool) -> None:
        super().__init__()
        self.linear, self.seconds, self.per_row = nn.Linear(WIDTH, WIDTH), seconds, per_row

    def forward(self, hidden: Tensor) -> Tensor:
        return _Slow.apply(self.linear(hidden), self.seconds * (len(hidden) if self.per_row else 1))


class Tower(nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: int, seconds: float, *, per_row: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(seconds / layers, per_row=per_row) for _ in range(layers)])

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Album(L.LightningModule):
    """Texts with any number of images."""

    def __init__(self, vision: nn.Module, language: nn.Module) -> None:
        super().__init__()
        self.vision, self.language = vision, language

    def embedded(self, batch: dict[str, Any]) -> Tensor:
        """[B, S, D], before images are added."""
        return batch["inputs_embeds"]

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        pixels, counts = batch["pixel_values"], batch["image_items"]
        hidden = self.embedded(batch)
        if pixels is not None:
            owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
            hidden = hidden.index_add(0, owner, self.vision(pixels)[:, None].expand(-1, TOKENS, -1))
        return self.language(hidden).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def image_counts(samples: int) -> list[int]:
    """Return how many images each sample has, the same in every process."""
    numbers = torch.empty(samples).log_normal_(1, 1, generator=torch.Generator().manual_seed(0))
    return numbers.int().clamp(max=30).tolist()


class Albums(Dataset):
    """Samples with 0 to 30 images, of which it says how many they are if `tells`."""

    def __init__(self, steps: int = STEPS, *, tells: bool = False) -> None:
        self.counts = image_counts(BATCH * steps)
        self.sample_costs = {"images": self.counts} if tells else None

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, index: int) -> int:
        return self.counts[index]


def _collate(counts: list[int]) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.ones(sum(counts), WIDTH),
        "image_items": torch.tensor(counts),
        "inputs_embeds": torch.ones(len(counts), TOKENS, WIDTH),
    }


def _train(turns: Turns, rank: int, *, encoders: int, stages: int, balance: bool) -> None:
    modalities = {
        "vision": Modality(module="vision", boundary="vision", dp_size=encoders),
        "language": Modality(module="language", pp_size=stages),
    }
    batching = {"num_microbatches": MICROBATCHES, "balance": balance}
    strategy = MultimodalStrategy(modalities, batching=batching)
    loader = DataLoader(Albums(), batch_size=BATCH, collate_fn=_collate)
    vision = Tower(2, encoders * IMAGE_S, per_row=True)
    language = Tower(4, stages * LANGUAGE_S, per_row=False)
    fit(Album(vision, language), loader, strategy, encoders + stages, turns)


def measure(encoders: int, stages: int) -> None:
    """Print the row of one layout."""
    sides = [
        Side(encoders + stages, partial(_train, encoders=encoders, stages=stages, balance=on)) for on in (True, False)
    ]
    on, off = race(sides[0], sides[1], STEPS)
    row(
        f"sleeping layers, {BATCH} samples of 0 to 30 images in {MICROBATCHES} microbatches, vision dp {encoders}, "
        f"language pp {stages}: `balance: true` / one after the other",
        median_ratio(on, off),
        "0.8",
        f"{milliseconds(on)} / {milliseconds(off)}",
    )


def _train_replicas(turns: Turns, rank: int, *, tells: bool) -> None:
    modalities = {
        "vision": Modality(module="vision", boundary="vision", colocate_with="language"),
        "language": Modality(module="language", dp_size=REPLICAS),
    }
    strategy = MultimodalStrategy(modalities, batching={"num_microbatches": 1, "balance": True})
    albums = Albums(tells=tells)
    sampler = DistributedSampler(albums, REPLICAS, rank, shuffle=False)
    loader = DataLoader(albums, batch_size=BATCH // REPLICAS, sampler=sampler, collate_fn=_collate)
    vision, language = Tower(2, IMAGE_S, per_row=True), Tower(4, LANGUAGE_S, per_row=False)
    fit(Album(vision, language), loader, strategy, REPLICAS, turns)


def measure_microbatches() -> None:
    """Print rows of a replica that deals samples to microbatches."""
    measure(1, 2)
    measure(2, 2)


def measure_replicas() -> None:
    """Print how busy the busiest replica is, and how long a step takes."""
    costs = costs_of(Albums(COUNTED, tells=True))
    given, evened, seconds = [], [], []
    for start in range(0, BATCH * COUNTED, BATCH):
        step = [[*range(start + replica, start + BATCH, REPLICAS)] for replica in range(REPLICAS)]
        began = time.perf_counter()
        after = Exchange(costs).evened(step)
        seconds.append(time.perf_counter() - began)
        for replicas, ratios in ((step, given), (after, evened)):
            images = [costs["images"][batch].sum() for batch in replicas]
            ratios.append(max(images) / statistics.mean(images))
    row(
        f"images of the busiest of {REPLICAS} replicas / their mean, {BATCH} samples a step, mean of {COUNTED} steps",
        statistics.mean(evened),
        "1.05",
        f"worst step {max(evened):.3f}; without costs {statistics.mean(given):.3f}, {max(given):.3f}; "
        f"{statistics.median(seconds) * 1e3:.1f} ms to deal a step",
    )
    sides = [Side(REPLICAS, partial(_train_replicas, tells=tells)) for tells in (True, False)]
    on, off = race(sides[0], sides[1], STEPS)
    row(
        f"sleeping layers, {REPLICAS} replicas: a step with `sample_costs` / without",
        median_ratio(on, off),
        "0.8",
        f"{milliseconds(on)} / {milliseconds(off)}",
    )


def simulate_orders() -> None:
    """Print how long steps take with samples dealt and microbatches in line, over samples as they come."""
    names = [StageKey("vision", 0), *(StageKey("language", stage) for stage in range(DEEP))]
    microbatches = tuple(range(MANY))
    nodes = tuple(Node(stage=name, rank=rank, microbatches=microbatches) for rank, name in enumerate(names))
    graph = Graph(nodes, tuple(pairwise(names)))
    schedule = build("1f1b", graph)
    numbers = image_counts(SIMULATED_SAMPLES * BATCHES)
    size, usual = SIMULATED_SAMPLES // MANY, statistics.mean(numbers) * SIMULATED_SAMPLES / MANY
    draws = random.Random(0)

    def step(parts: list[list[int]], counts: list[int], constant: float) -> float:
        """Seconds of a step; the language model's forward takes 1 in the mean, the encoder's too."""
        images = [sum(counts[sample] for sample in part) / usual for part in parts]
        language = [constant + (1 - constant) * number for number in images]
        ends, free = dict[Any, float](), [0.0] * len(names)
        left = {rank: list(actions) for rank, actions in schedule.items()}
        while any(left.values()):
            for rank, actions in left.items():
                while actions and all(before in ends for before in dependencies(actions[0], graph)):
                    action = actions.pop(0)
                    cost = (language if rank else images)[action.microbatch] * (1 if action.kind is Kind.F else 2)
                    begin = max([free[rank], *(ends[before] for before in dependencies(action, graph))])
                    ends[action] = free[rank] = begin + cost
        return max(free)

    for constant, name in ((1.0, "constant"), (0.3, "0.3 + 0.7 x images")):
        dealt, drawn, dealt_there = [], [], []
        for batch in range(BATCHES):
            counts = numbers[batch * SIMULATED_SAMPLES :][:SIMULATED_SAMPLES]
            given = [[*range(start, start + size)] for start in range(0, SIMULATED_SAMPLES, size)]
            line = in_line({"images": counts}, [size] * MANY, fills=True) or given
            before = step(given, counts, constant)
            dealt.append(step(line, counts, constant) / before)
            if batch % 8 == 0:
                drawn.append(min(step(draws.sample(line, MANY), counts, constant) for _ in range(DRAWN)) / before)
                dealt_there.append(dealt[-1])
        row(
            f"simulated, {BATCHES} batches of {SIMULATED_SAMPLES} samples in {MANY} microbatches, encoder before "
            f"{DEEP} stages, 1f1b, language model {name}: a step with `balance: true` / as they come",
            statistics.mean(dealt),
            "0.85",
            f"best of {DRAWN} orders {statistics.mean(drawn):.3f}, of the same batches dealt "
            f"{statistics.mean(dealt_there):.3f}",
        )


def drawn_items(kind: str, samples: int, generator: np.random.Generator) -> list[list[tuple[float, float]]]:
    """The items of each sample: how many patches attend to each other, and how often (the frames of a video)."""
    counts = np.minimum(30, generator.lognormal(1, 1, samples)).astype(int)
    if kind == "images of one size":
        return [[(576.0, 1.0)] * count for count in counts]
    if kind == "images of unlike sizes":
        drawn = (np.clip(generator.lognormal(np.log(1024), 1, count), 64, 16384) for count in counts)
        return [[(float(patches), 1.0) for patches in sizes] for sizes in drawn]
    frames = np.clip(generator.lognormal(np.log(16), 1, samples), 1, 128).round()
    return [[(256.0, float(count))] for count in frames]


def busiest(kind: str, encoders: int, replicas: int, microbatches: int, way: str) -> tuple[float, float, float]:
    """Work of the busiest encoder in a step: over the mean, over the mean or the costliest sample, and of microbatches.

    Args:
        kind: of items.
        encoders: replicas of the encoder.
        replicas: of the language model.
        microbatches: of each of these.
        way: ``"as they come"``; ``"even microbatches"``, by rows, whichever encoder takes them; ``"by rows"`` and
            ``"by cost"``, as `balance` deals whole samples; ``"items"``, each to any encoder, longest first.
    """
    generator, turns = np.random.default_rng(0), max(1, encoders // replicas)
    dealt_to, ratios = 1 if way == "even microbatches" else turns, []
    for _ in range(ROUTED_STEPS):
        drawn = drawn_items(kind, replicas * microbatches * PER_MICROBATCH, generator)
        items = [[times * length * (1 + length / (6 * ENCODER_WIDTH)) for length, times in own] for own in drawn]
        work = np.array([sum(own) for own in items])
        rows = np.array([sum(length * times for length, times in own) for own in drawn])
        busy, parts = np.zeros(encoders), np.zeros(replicas * microbatches)
        if way == "items":
            for sums in (busy, parts):
                for cost in sorted((cost for own in items for cost in own), reverse=True):
                    sums[sums.argmin()] += cost
        else:
            costs = work if way == "by cost" else rows
            step = [[*range(replica, len(work), replicas)] for replica in range(replicas)]
            if replicas > 1 and way != "as they come":
                step = Exchange({"items": costs}).evened(step)
            sizes = [PER_MICROBATCH] * microbatches
            for replica, batch in enumerate(step):
                line = in_line({"items": costs[batch].tolist()}, sizes, fills=turns == 1, turns=dealt_to)
                if line is None or way == "as they come":
                    line = np.arange(len(batch)).reshape(microbatches, -1).tolist()
                for number, part in enumerate(line):
                    cost = work[batch][part].sum()
                    parts[replica * microbatches + number] = cost
                    encoder = replica * encoders // replicas + (number % turns if encoders > replicas else 0)
                    busy[encoder] += cost
        ratios.append((busy.max() / busy.mean(), busy.max() / max(busy.mean(), work.max()), parts.max() / parts.mean()))
    return tuple(float(value) for value in np.mean(ratios, axis=0))  # type: ignore[return-value]


def measure_items() -> None:
    """Print how busy the busiest encoder replica is, by the way in which its items are dealt."""
    for kind in ("images of one size", "images of unlike sizes", "videos"):
        for encoders, replicas in ((2, 1), (4, 1), (2, 2), (4, 2)):
            for microbatches in (4, 8, 16):
                found = {way: busiest(kind, encoders, replicas, microbatches, way) for way in WAYS}
                row(
                    f"{kind}, encoder dp {encoders}, language dp {replicas}, {microbatches} microbatches of "
                    f"{PER_MICROBATCH}: busiest encoder / mean or costliest sample, by cost",
                    found["by cost"][1],
                    "1.05",
                    "; ".join(f"{way} {mean:.3f} ({of_bound:.3f})" for way, (mean, of_bound, _) in found.items())
                    + f"; microbatches {found['by cost'][2]:.2f}",
                )


def main(names: list[str]) -> None:
    figures = {
        "microbatches": measure_microbatches,
        "replicas": measure_replicas,
        "orders": simulate_orders,
        "items": measure_items,
    }
    for name in names or figures:
        figures[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
