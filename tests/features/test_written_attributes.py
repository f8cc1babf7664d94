"""Attributes that an encoder's or a layer's forward writes on itself: a stage that skips the call reads numbers alone.

vision: rank 0; language: rank 1, ranks 1-2 as stages, or both on ranks 0-1 as replicas
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from features.toys import (
    LANGUAGE,
    PAIR,
    PIPE,
    SHARED,
    VISION,
    Encoder,
    Layer,
    Layout,
    Run,
    Toy,
    alone,
    assert_same,
    figures,
    together,
)
from lightning_mm5d import Modality, RemoteParameterError


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


class NotedLayer(Layer):
    """Keeps an auxiliary loss of its last call, and one of the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary: Any = 0.0
        self.losses: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        result = super().forward(hidden)
        self.auxiliary = result.pow(2).mean()
        self.losses.append(self.auxiliary)
        return result


class LayerReader(Toy):
    """Adds up what layers of `part` wrote, from the one with number `first` on; ``resets`` it before each step."""

    def __init__(self, part: str, reads: str, first: int = 0, resets: bool = True) -> None:
        super().__init__()
        self.part, self.reads, self.first, self.resets = part, reads, first, resets
        layers = getattr(self, part).layers
        for index, layer in enumerate(layers):
            layers[index] = NotedLayer().double()
            layers[index].load_state_dict(layer.state_dict())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        layers = getattr(self, self.part).layers
        for layer in layers if self.resets else ():
            layer.auxiliary, layer.losses = 0.0, []
        loss = super().training_step(batch, batch_idx)
        for layer in layers[self.first :]:
            found = getattr(layer, self.reads, 0.0)
            loss = loss + (sum(found) if isinstance(found, list) else found)
        return loss


def reading(*names: str, make: Callable[[str], Toy] = Reader) -> Any:
    def scenario(run: Run) -> Any:
        found: dict[str, Any] = {}
        for name in names:
            module, trainer = make(name), run.trainer()
            try:
                trainer.fit(module, run.training(16))
                found[name] = figures(trainer)
            except RemoteParameterError as error:
                return str(error)
            except RuntimeError:  # the other rank failed first
                return None
        return found

    return scenario


@pytest.mark.parametrize("name", ["losses", "calls"])
def test_a_step_that_reads_what_a_skipped_encoder_writes_is_refused_by_name(name: str) -> None:
    assert f"`encoder.{name}`" in together(PAIR, reading(name))[1]


@pytest.mark.parametrize(("layout", "names"), [(PAIR, ("scale", "auxiliary")), (SHARED, ("auxiliary", "losses"))])
def test_what_is_equal_on_all_ranks_or_computed_here_or_a_number_is_read(
    layout: Layout, names: tuple[str, ...]
) -> None:
    one = alone(reading(*names))
    for found in together(layout, reading(*names)):
        assert_same(found, one)


ENCODER_STAGES = Layout({"vision": Modality(pp_size=2, **VISION), "language": Modality(**LANGUAGE)}, 3)
"""vision: ranks 0-1 as stages; language: rank 2"""


@pytest.mark.parametrize("resets", [True, False])
@pytest.mark.parametrize(("layout", "part"), [(PIPE, "decoder"), (ENCODER_STAGES, "encoder"), (PAIR, "encoder")])
def test_of_what_a_layer_of_another_stage_writes_a_step_reads_numbers_and_lists_are_refused_by_name(
    layout: Layout, part: str, resets: bool
) -> None:
    make = partial(LayerReader, part, resets=resets)
    numbers, lists = reading("auxiliary", make=make), reading("losses", make=make)
    one = alone(numbers)
    for found in together(layout, numbers):
        assert_same(found, one)
    told = together(layout, lists)[-1]
    assert f"`{part}.layers." in told
    assert ".losses`" in told


def test_what_layers_of_the_last_stage_write_is_read() -> None:
    make = partial(LayerReader, "decoder", first=2)
    one = alone(reading("auxiliary", "losses", make=make))
    for found in together(PIPE, reading("auxiliary", "losses", make=make)):
        assert_same(found, one)


def test_what_layers_write_may_stay_unread() -> None:
    make = partial(LayerReader, "decoder", first=4)
    one = alone(reading("auxiliary", make=make))
    for found in together(PIPE, reading("auxiliary", make=make)):
        assert_same(found, one)
