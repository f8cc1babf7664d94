"""What modalities keep in host memory changes no number, and is refused where it cannot work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from features.toys import PIPE, SHARED, TWINS, Layout, Run, Toy, assert_same, figures, outcomes, weights
from lightning_mm5d import Modality
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.groups import with_fields
from lightning_mm5d.features.offload import feature, moves
from lightning_mm5d.features.offload.fields import check
from lightning_mm5d.features.offload.moves import HostMemory, Stored

ALL = ("activations", "optimizer", "parameters")


class Trained(Toy):
    """AdamW; a frozen encoder with a trained projector."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.encoder.patch, self.encoder.layers):
            part.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.encoder.parameters() if p.requires_grad], "lr": 0.02},
            {"params": self.decoder.parameters(), "betas": (0.8, 0.9)},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Frozen(Trained):
    """The encoder has nothing that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.requires_grad_(False)


def clipped(run: Run) -> Any:
    module = Trained()
    trainer = run.trainer(max_epochs=2, gradient_clip_val=0.05)
    trainer.fit(module, run.training(), run.loader(8))
    return {"weights": weights(module), "figures": figures(trainer)}


def accumulated(run: Run) -> Any:
    module = Frozen()
    trainer = run.trainer(max_epochs=2, accumulate_grad_batches=2)
    trainer.fit(module, run.training(24), run.loader(8))
    found = {"weights": weights(module), "figures": figures(trainer)}
    assert trainer.predict(module, run.loader(8)) is not None
    return found


def resumed(run: Run) -> Any:
    """A checkpoint of states that are on the host, and a run that goes on from it."""
    first, module = run.trainer(max_epochs=1), Trained()
    first.fit(module, run.training())
    first.save_checkpoint(run.folder / "one.ckpt")
    module = Trained()
    run.trainer(max_epochs=2).fit(module, run.training(), ckpt_path=run.folder / "one.ckpt")
    return weights(module)


def offloading(layout: Layout, vision: tuple[str, ...] = ALL) -> Layout:
    modalities = {
        name: with_fields(modality, offload=[*(vision if name == "vision" else ALL[:2])])
        for name, modality in layout.modalities.items()
    }
    return Layout(modalities, layout.world, layout.replicas)


class Emptied(HostMemory):
    """Fills what it has copied with NaN, so that a number tells whether anything still reads it."""

    moved = 0

    def store(self, tensor: torch.Tensor) -> Stored:
        stored = super().store(tensor)
        Emptied.moved += 1
        with torch.no_grad():
            tensor.fill_(255 if tensor.dtype is torch.uint8 else float("nan"))
        return stored


def moved(run: Run) -> int:
    return Emptied.moved


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (moves, feature):
        monkeypatch.setattr(module, "SMALLEST", 16)
    monkeypatch.setattr("lightning_mm5d.features.offload.feature.HostMemory", Emptied)


@pytest.mark.usefixtures("emptied")
@pytest.mark.parametrize(
    ("layout", "schedule", "bucket"),
    [
        (PIPE, "zero_bubble", 512),
        pytest.param(TWINS, "gpipe", 2**20, marks=pytest.mark.exhaustive),
        (SHARED, "1f1b", 512),
    ],
    ids=["pipe", "twins", "shared"],
)
def test_offloading_gives_the_weights_of_one_process(layout: Layout, schedule: str, bucket: int, tmp_path: Any) -> None:
    options: Any = {"schedule": schedule, "num_microbatches": 4, "bucket_bytes": bucket}
    found = outcomes(offloading(layout), clipped, accumulated, resumed, moved, folder=tmp_path, **options)
    assert min(found.pop("moved").ranks) > 0
    for scenario, outcome in found.items():
        assert_same(outcome.ranks[0], outcome.one, where=scenario)


def validate(modalities: dict[str, Modality], module: Toy) -> None:
    trainer = Run(Layout(modalities, 3)).trainer()
    trainer.strategy.validate(module)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("modality", "offload", "message"),
    [
        ("vision", ["activation"], r"modalities.vision.memory.offload: .* Did you mean 'activations'"),
        ("vision", 3, r"modalities.vision.memory.offload: got 3"),
        ("vision", "parameters", r"all 16 parameters of vision are trained"),
        ("language", ["parameters"], r"modalities.language.memory.offload: .* used all through a step"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(modality: str, offload: Any, message: str) -> None:
    modalities = {**PIPE.modalities, modality: with_fields(PIPE.modalities[modality], offload=offload)}
    with pytest.raises(ConfigError, match=message):
        validate(modalities, Toy())


def test_microbatches_side_by_side_are_refused_by_name() -> None:
    modalities = {
        "language": Modality(tp_size=2, pipeline={"interleaved_microbatches": 2}, memory={"offload": "activations"})
    }
    with pytest.raises(ConfigError, match=r"interleaved_microbatches: got 2\. With modalities.language.memory.offload"):
        check({"modalities": modalities})


def test_a_frozen_encoder_has_neither_states_nor_activations_to_offload() -> None:
    modalities = offloading(PIPE).modalities
    with pytest.warns(UserWarning, match="optimizer and activations of vision move nothing"):
        validate(modalities, Frozen())


def test_a_host_without_room_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature, "free_memory", lambda: 10**4)
    modalities = offloading(PIPE, ("activations",)).modalities
    with pytest.raises(ConfigError, match=r"Ranks 0 to 2 share a host and would keep .* GiB there, and a host has"):
        validate(modalities, Toy())
