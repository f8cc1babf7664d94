"""Norms of gradients in an overridden `backward` are found in its source, however they are taken."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.utilities import grad_norm

from features.toys import PIPE, SHARED, Run, Toy
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.features.refusals.feature import Refusals

REFUSALS = Refusals({"microbatch_size": None, "num_microbatches": 1})
CPU = torch.device("cpu")


def plan_of(layout: Any) -> Any:
    trainer = Run(layout).trainer()
    return trainer.strategy.plan(Toy())


@pytest.fixture(scope="module")
def stages() -> Any:
    return plan_of(PIPE)


class Clips(Toy):
    def backward(self, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class ClipsLater(Toy):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        self.shorten()

    def shorten(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class LogsLightnings(Toy):
    def backward(self, *args: Any, **kwargs: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


def total(module: L.LightningModule) -> Any:
    return torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm()


class LogsItsOwn(Toy):
    def backward(self, *args: Any, **kwargs: Any) -> None:
        self.log("total", total(self))


class Harmless(Toy):
    """Asks the strategy for a norm, and clips in a hook."""

    def backward(self, *args: Any, **kwargs: Any) -> None:
        super().backward(*args, **kwargs)
        grad_norm = self.trainer.strategy.grad_norm()
        self.log("grad_norm", grad_norm)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


@pytest.mark.parametrize("owner", [Clips(), ClipsLater(), LogsLightnings(), LogsItsOwn()])
def test_norms_of_one_ranks_gradients_are_refused(stages: Any, owner: Any) -> None:
    with pytest.raises(ConfigError, match="on_after_backward"):
        REFUSALS.check(owner, stages, CPU)


def test_a_module_that_takes_no_norm_itself_runs(stages: Any) -> None:
    REFUSALS.check(Harmless(), stages, CPU)
    REFUSALS.check_callbacks([L.Callback()], stages)


class ClipsByHand(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.optimizers().step()


class Projects(ClipsByHand):
    """Multiplies gradients of two losses, which have names and lie in a list."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        kept = []
        for weight in (1.0, 2.0):
            self.manual_backward(weight * self.loss(batch))
            grads = [p.grad.clone() for p in self.parameters()]
            kept.append(grads)
        self.log("product", sum((one * other).sum() for one, other in zip(*kept, strict=True)))


class Clamps(ClipsByHand):
    """Changes gradients element by element, and takes a mean of something else."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self(batch).mean()
        self.manual_backward(loss)
        for p in self.parameters():
            if p.grad is not None:
                p.grad = p.grad.clamp(-1, 1)
        self.log("mean", loss.mean())


class Penalizes(ClipsByHand):
    """Takes the norm of a gradient that is no parameter's."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        features = self.encoder(batch["images"])
        loss = F.cross_entropy(self.decoder(batch["tokens"], features), batch["label"])
        (gradient,) = torch.autograd.grad(loss, features, retain_graph=True)
        self.manual_backward(loss + gradient.norm())
        self.optimizers().step()


def test_a_manual_step_may_take_norms_of_gradients_of_values_and_not_of_parameters(stages: Any) -> None:
    REFUSALS.check(Penalizes(), stages, CPU)
    REFUSALS.check(Clamps(), stages, CPU)
    for module in (ClipsByHand(), Projects()):
        with pytest.raises(ConfigError, match=r"self\.clip_gradients"):
            REFUSALS.check(module, stages, CPU)
    REFUSALS.check(ClipsByHand(), plan_of(SHARED), CPU)


def test_replicas_may_take_norms() -> None:
    REFUSALS.check(Clips(), plan_of(SHARED), CPU)


@pytest.mark.parametrize("together", [True, False])
def test_pruning_is_refused_over_stages(together: bool, stages: Any) -> None:
    with pytest.raises(ConfigError, match="ModelPruning"):
        REFUSALS.check_callbacks([ModelPruning("l1_unstructured", use_global_unstructured=together)], stages)
