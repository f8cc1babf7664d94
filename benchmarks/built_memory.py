"""A LLaVA of random weights, at least 1 GB, that four ranks build: memory of each rank, against its own share.

From the start of `configure_model` to the end of setup each rank's highest resident memory is taken, less what it was
before, and divided by the rank's own share: the bytes of the parameters and buffers that it holds. One tensor is taken
off, because a rank makes one tensor at a time beside its share. The same model built in `__init__` stands beside it.
"""

from __future__ import annotations

import sys

from pretrained_memory import LAYOUTS, WORLD, Measured, config, validate
from transformers import LlavaForConditionalGeneration
from turns import Side, row, run


class Built(Measured):
    """A model that is built in `configure_model`, or in `__init__`."""

    def __init__(self, layers: int, *, at_once: bool) -> None:
        super().__init__()
        self._layers = layers
        if at_once:
            self._build()

    def configure_model(self) -> None:
        if self.model is None:
            self._build()

    def _build(self) -> None:
        self.begin()
        self.model = LlavaForConditionalGeneration(config(self._layers))


def main(layers: int) -> None:
    largest = 4 * 32_000 * 1024
    for layout, modalities in LAYOUTS.items():
        for at_once in (False, True):
            side = Side(
                WORLD,
                lambda turns, rank, at_once=at_once, modalities=modalities: validate(
                    Built(layers, at_once=at_once), modalities
                ),
            )
            ranks = run(side)
            ratio = max((rank["memory"] - largest) / rank["share"] for rank in ranks)
            where = "__init__" if at_once else "configure_model"
            values = ", ".join(f"{rank['memory'] / 1e6:.0f} / {rank['share'] / 1e6:.0f}" for rank in ranks)
            row(
                f"built in {where}, {layout}: memory less one tensor of {largest / 1e6:.0f} MB / own share, worst rank",
                ratio,
                "none" if at_once else "1.15",
                f"{values} MB",
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 16)
