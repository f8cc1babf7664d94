"""What the strategy costs where there is nothing to parallelise: one process with it, against plain Lightning."""

from model import VisionLanguage, loader
from turns import WARMUP, Side, Turns, fit, median_ratio, milliseconds, race, row

from lightning_mm5d import MultimodalStrategy

STEPS, BATCH = 60 + WARMUP, 4


def train(turns: Turns, with_strategy: bool) -> list[float]:
    """Returns the losses."""
    module = VisionLanguage(vision_layers=3, language_layers=3)
    fit(module, loader(STEPS, BATCH), MultimodalStrategy() if with_strategy else "auto", 1, turns)
    return module.losses


def main() -> None:
    with_strategy, plain = race(
        Side(1, lambda turns, rank: train(turns, True)), Side(1, lambda turns, rank: train(turns, False)), STEPS
    )
    assert with_strategy.results == plain.results, "both sides compute the same"
    times = f"{milliseconds(with_strategy)} / {milliseconds(plain)}"
    row("one process: time of a step, strategy / plain Lightning", median_ratio(with_strategy, plain), "1.02", times)
    ours, theirs = with_strategy.peak_bytes[0], plain.peak_bytes[0]
    memory = f"{ours / 2**20:.0f} MiB / {theirs / 2**20:.0f} MiB"
    row("one process: peak resident memory, strategy / plain Lightning", ours / theirs, "1.02", memory)


if __name__ == "__main__":
    main()
