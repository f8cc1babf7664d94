"""Data parallelism alone: two replicas under the strategy, against Lightning's DDPStrategy."""

from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from model import VisionLanguage, loader
from turns import WARMUP, Side, Turns, fit, median_ratio, milliseconds, race, row

from lightning_mm5d import MultimodalStrategy

STEPS, BATCH, WORLD = 60 + WARMUP, 4, 2


def train(turns: Turns, rank: int, strategy: Any) -> list[float]:
    """Returns this rank's losses."""
    module = VisionLanguage(vision_layers=3, language_layers=3)
    fit(module, loader(STEPS, BATCH, seed=rank), strategy, WORLD, turns)
    return module.losses


def main() -> None:
    ours, theirs = race(
        Side(WORLD, lambda turns, rank: train(turns, rank, MultimodalStrategy())),
        Side(WORLD, lambda turns, rank: train(turns, rank, DDPStrategy())),
        STEPS,
    )
    assert ours.results == theirs.results, "both sides compute the same"
    times = f"{milliseconds(ours)} / {milliseconds(theirs)}"
    row("two replicas: time of a step, strategy / DDPStrategy", median_ratio(ours, theirs), "1.00", times)


if __name__ == "__main__":
    main()
