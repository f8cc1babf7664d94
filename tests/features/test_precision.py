"""Every precision trains as on one process; a step that overflows anywhere is skipped everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from features.toys import PIPE, TWINS, Outcome, Run, Samples, Toy, assert_same, outcomes, weights
from lightning_mm5d.stage import is_placeholder
from sweeps import dealt


class Singles(Samples):
    """The images in the precision that modules usually get."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.images = self.images.float()


class Precise(Toy):
    """Starts in float32 and notes what it was run in."""

    def __init__(self, bad_step: int = -1) -> None:
        super().__init__(lr=0.1)
        self.float()
        self.bad_step = bad_step
        self.dtypes: set[str] = set()
        self.scales: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch)
        self.dtypes.add(f"{logits.dtype} {self.decoder.head.weight.dtype}")
        loss = torch.nn.functional.cross_entropy(logits.float(), batch["label"])
        # the gradient of the encoder alone overflows
        return loss * (1e9 if self.global_step == self.bad_step else 1.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch).float(), sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            self.scales.append(float(scaler.get_scale()))


def train(run: Run, module: Precise, **options: Any) -> dict[str, Any]:
    trainer = run.trainer(max_epochs=2, gradient_clip_val=1.0, **options)
    trainer.fit(module, run.training(Singles(16)), run.loader(Singles(8)))
    return {"weights": weights(module), "dtypes": sorted(module.dtypes), "scales": module.scales}


def single(run: Run) -> Any:
    return train(run, Precise(), precision="32-true")


def double(run: Run) -> Any:
    return train(run, Precise(), precision="64-true")


def brain(run: Run) -> Any:
    return train(run, Precise(), precision="bf16-true")


class HalfLoss(Precise):
    """Its loss and its logs are in half precision too."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx).bfloat16()
        self.log("train_loss", loss)
        return {"loss": loss, "twice": 2 * loss.detach()}


def brain_loss(run: Run) -> Any:
    return train(run, HalfLoss(), precision="bf16-true")


def brain_mixed(run: Run) -> Any:
    return train(run, Precise(), precision="bf16-mixed")


def half_mixed(run: Run) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    return train(run, Precise(), plugins=[MixedPrecision("16-mixed", "cpu", scaler)])


class EncoderOverflows(Precise):
    """In the second step a gradient that only the vision rank has becomes infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.encoder.patch.bias.register_hook(self.overflow)

    def overflow(self, gradient: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradient, torch.inf) if self.steps == 1 else gradient

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before = {name: p.detach().clone() for name, p in self.named_parameters()}

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        changed = [
            name
            for name, p in self.named_parameters()
            if not is_placeholder(p) and not torch.equal(p, self.before[name])
        ]
        self.dtypes.add(f"step {self.steps} changed {bool(changed)}")
        self.steps += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.encoder.parameters(), lr=0.01)


def overflow(run: Run) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    return train(run, EncoderOverflows(), plugins=[MixedPrecision("16-mixed", "cpu", scaler)])


TOLERANCES = {
    single: 1e-5,
    double: 1e-9,
    brain: 0.02,
    brain_loss: 0.02,
    brain_mixed: 0.01,
    half_mixed: 2e-3,
    overflow: 3e-3,
}


@pytest.fixture(scope="module", params=dealt(__file__, [PIPE, TWINS]), ids=["pipe", "twins"])
def found(request: Any) -> dict[str, Outcome]:
    return outcomes(request.param, *TOLERANCES)


@pytest.mark.parametrize(("name", "tolerance"), [(s.__name__, t) for s, t in TOLERANCES.items()])
def test_a_precision_gives_the_weights_of_one_process(found: dict[str, Outcome], name: str, tolerance: float) -> None:
    one, ranks = found[name].one, found[name].ranks
    assert_same(ranks[0]["weights"], one["weights"], tolerance)
    for rank in ranks:
        assert rank["scales"] == one["scales"]


def test_the_model_runs_in_the_precision_asked_for(found: dict[str, Outcome]) -> None:
    """The last rank computes the loss."""
    expected = {
        "single": "torch.float32 torch.float32",
        "double": "torch.float64 torch.float64",
        "brain": "torch.bfloat16 torch.bfloat16",
        "brain_mixed": "torch.bfloat16 torch.float32",
        "half_mixed": "torch.float16 torch.float32",
    }
    for name, dtypes in expected.items():
        assert found[name].ranks[-1]["dtypes"] == [dtypes], name


def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(found: dict[str, Outcome]) -> None:
    """Ranks that the optimizer has nothing for agree on the scale too."""
    one, ranks = found["overflow"].one, found["overflow"].ranks
    assert one["scales"] == [1024.0, 512.0, 512.0, 512.0]
    assert "step 1 changed False" in one["dtypes"]
    assert "step 1 changed False" in ranks[0]["dtypes"]
    assert {"step 0 changed True", "step 2 changed True"} <= set(ranks[0]["dtypes"])
