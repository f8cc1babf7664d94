"""Attributes that an encoder's forward writes on itself: a stage that skips the encoder must not read them.

vision: rank 0; language: rank 1, or both on ranks 0-1 as replicas
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from features.toys import PAIR, SHARED, Encoder, Layout, Run, Toy, alone, assert_same, figures, together
from lightning_mm5d import RemoteParameterError


class Noted(Encoder):
    """Keeps an auxiliary loss, the losses of all calls, and how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary: Any = 0.0
        self.losses: list[Tensor] = []
        self.calls, self.scale = 0, 1.0

    def forward(self, images: Tensor) -> Tensor:
        features = super().forward(images)
        self.auxiliary, self.calls, self.scale = features.pow(2).mean(), self.calls + 1, 1.0
        self.losses.append(self.auxiliary)
        return features


class Reader(Toy):
    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads = reads
        encoder = Noted().double()
        encoder.load_state_dict(self.encoder.state_dict())
        self.encoder: Noted = encoder

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.encoder.losses = []
        loss = super().training_step(batch, batch_idx)
        if self.reads == "scale":
            return loss * self.encoder.scale
        found = getattr(self.encoder, self.reads)
        return loss + (sum(found) if isinstance(found, list) else found)


def reading(*names: str) -> Any:
    def scenario(run: Run) -> Any:
        found: dict[str, Any] = {}
        for name in names:
            module, trainer = Reader(name), run.trainer()
            try:
                trainer.fit(module, run.training(16))
                found[name] = figures(trainer)
            except RemoteParameterError as error:
                return str(error)
            except RuntimeError:  # the other rank failed first
                return None
        return found

    return scenario


@pytest.mark.parametrize("name", ["auxiliary", "losses", "calls"])
def test_a_step_that_reads_what_a_skipped_encoder_writes_is_refused_by_name(name: str) -> None:
    assert f"`encoder.{name}`" in together(PAIR, reading(name))[1]


@pytest.mark.parametrize(("layout", "names"), [(PAIR, ("scale",)), (SHARED, ("auxiliary", "losses"))])
def test_what_is_equal_on_all_ranks_or_computed_on_this_one_is_read(layout: Layout, names: tuple[str, ...]) -> None:
    one = alone(reading(*names))
    for found in together(layout, reading(*names)):
        assert_same(found, one)
