"""What hooks do beyond reads and writes of tensors: calls of modules, files, helpers, and uses on some ranks alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import WeightAveraging
from torch import nn
from torch.optim.swa_utils import get_ema_avg_fn

from features.toys import (
    LANGUAGE,
    PIXELS,
    VISION,
    WIDTH,
    Layout,
    Run,
    Toy,
    assert_same,
    figures,
    outcomes,
    together,
    weights,
)
from lightning_mm5d import ConfigError, Modality
from lightning_mm5d.config.errors import RankLostError, RankMismatchError, RemoteParameterError
from sweeps import swept


class Normed(Toy):
    """Has batch statistics in its encoder."""

    def __init__(self) -> None:
        super().__init__(lr=0.3)
        torch.manual_seed(5)
        self.encoder.projector = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))  # type: ignore[assignment]
        self.double()


class Calls(L.Callback):
    """Calls the encoder and the model in hooks, and reads statistics."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def looks(self, module: Any) -> None:
        images = torch.linspace(-1, 1, 4 * PIXELS, dtype=torch.float64).view(4, PIXELS)
        was, _ = module.training, module.eval()
        with torch.no_grad():
            features = module.encoder(images)
            logits = module({"images": images, "tokens": torch.arange(20).view(4, 5) % 16})
        module.train(was)
        state = {name: value.clone() for name, value in module.encoder.state_dict().items() if "running" in name}
        self.found.append([features, logits, state])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.looks(pl_module)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.looks(pl_module)


class Swaps(L.Callback):
    """Averages weights by hand, and validates with the average."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, p in pl_module.named_parameters():
            self.average[name].mul_(0.7).add_(p.data, alpha=0.3)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.own = copy.deepcopy(pl_module.state_dict())
        pl_module.load_state_dict({**self.own, **self.average})

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.load_state_dict(self.own)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["average"] = self.average


class Averages(WeightAveraging):
    """A user's own, derived from Lightning's, which averages what each rank has."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)


class Gradients(Toy):
    """Uses the strategy's helpers, Lightning's clipping within a hook, and gradients of a part that is frozen."""

    def __init__(self) -> None:
        super().__init__(lr=0.5)
        self.encoder.layers[0].requires_grad_(False)
        self.found: list[Any] = []

    def norms(self) -> tuple[float, float, float]:
        strategy, names = self.trainer.strategy, [n for n, _ in self.encoder.named_parameters(prefix="encoder")]
        if hasattr(strategy, "grad_norm"):
            found = strategy.grad_norm(), strategy.grad_norm(float("inf")), strategy.grad_norm(1, names)
        else:
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            own = [p.grad for p in self.encoder.parameters() if p.grad is not None]
            found = (
                torch.nn.utils.get_total_norm(grads),
                torch.nn.utils.get_total_norm(grads, float("inf")),
                torch.nn.utils.get_total_norm(own, 1),
            )
        return tuple(float(one) for one in found)  # type: ignore[return-value]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        first = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        for p in self.parameters():
            if p.grad is not None:
                p.grad.add_(0.01)
        self.found += [float(sum(first)), self.norms(), [p.grad is None for p in self.parameters()]]

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        largest = max(float(p.grad.abs().max()) for p in self.parameters() if p.grad is not None)
        self.clip_gradients(optimizer, gradient_clip_val=largest, gradient_clip_algorithm="norm")
        self.found.append(float(sum(p.grad.norm() for p in self.parameters() if p.grad is not None)))

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx == 0:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        else:  # a closure may run before the step
            optimizer_closure()
            for p in self.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.1 / p.grad.norm().clamp(min=0.1))
            optimizer.step()
        if hasattr(self.trainer.strategy, "full_parameters"):
            with self.trainer.strategy.full_parameters():
                self.decays()
            with self.trainer.strategy.full_gradients():
                self.found.append([None if p.grad is None else p.grad.clone() for p in self.parameters()])
        else:
            self.decays()
            self.found.append([None if p.grad is None else p.grad.clone() for p in self.parameters()])

    def decays(self) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.sub_(p / p.norm().clamp(min=1.0), alpha=0.01)


def calls(run: Run) -> Any:
    module, calls = Normed(), Calls()
    run.trainer(callbacks=[calls]).fit(module, run.training(), run.loader(8))
    return calls.found, weights(module)


def swaps(run: Run) -> Any:
    module, swaps = Toy(), Swaps()
    trainer = run.trainer(callbacks=[swaps], val_check_interval=1)
    trainer.fit(module, run.training(), run.loader(8))
    return swaps.average, figures(trainer), weights(module)


def averages(run: Run) -> Any:
    module = Toy()
    trainer = run.trainer(callbacks=[Averages(avg_fn=get_ema_avg_fn(0.5))])
    trainer.fit(module, run.training(), run.loader(8))
    return figures(trainer), weights(module)


def gradients(run: Run) -> Any:
    module = Gradients()
    run.trainer().fit(module, run.training())
    return module.found, weights(module)


SCENARIOS = (calls, swaps, averages, gradients)
LAYOUTS = {
    "vision | pp 2": Layout({"vision": Modality(**VISION), "language": Modality(pp_size=2, **LANGUAGE)}, 3),
    "zero 3": Layout({"model": Modality(dp_size=2, sharding={"zero_stage": 3})}, 2, 2),
    "zero 1": Layout({"model": Modality(dp_size=2, sharding={"zero_stage": 1})}, 2, 2),
}


@pytest.mark.parametrize("name", swept(LAYOUTS, "zero 1"))
def test_calls_swaps_and_helpers_in_hooks_are_those_of_one_process(name: str) -> None:
    """vision: rank 0; language: ranks 1-2 as stages | two replicas that share parameters: ranks 0-1."""
    scenarios = [one for one in SCENARIOS if one is not calls or "zero" not in name]  # replicas' own statistics
    found = outcomes(LAYOUTS[name], *scenarios, num_microbatches=1)
    for scenario, outcome in found.items():
        for rank, got in enumerate(outcome.ranks):
            assert_same(got[:-1], outcome.one[:-1], where=f"{scenario} on rank {rank}")
        assert_same(outcome.ranks[0][-1], outcome.one[-1], where=scenario)


class Teaches(Toy):
    """Moves a frozen teacher in `hook`, which an optimizer's step follows or has just followed."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.encoder).requires_grad_(False)
        vars(self)[hook] = self.move

    def move(self, *_: Any) -> None:
        with torch.no_grad():
            for one, other in zip(self.teacher.parameters(), self.encoder.parameters(), strict=True):
                one.lerp_(other, 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + F.mse_loss(self.encoder(batch["images"]), self.teacher(batch["images"] * 1.1))


def taught(run: Run) -> list[Any]:
    found = []
    for hook in ("on_before_zero_grad", "on_after_backward", "on_before_optimizer_step"):
        module = Teaches(hook)
        run.trainer().fit(module, run.training())
        found.append(weights(module))
    return found


def test_what_hooks_around_an_optimizers_step_write_to_frozen_parameters_stays() -> None:
    """two replicas that share optimizer states: ranks 0-1"""
    outcome = outcomes(LAYOUTS["zero 1"], taught, num_microbatches=1)["taught"]
    assert_same(outcome.ranks[0], outcome.one)


# --- what is refused, and who waits for whom ---


class Hooked(Toy):
    """Runs a function in `hook`."""

    def __init__(self, hook: str, use: Callable[[Any], Any]) -> None:
        super().__init__()
        self.use = use
        vars(self)[hook] = lambda *_: use(self)


def only_rank_0(use: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda module: use(module) if module.trainer.is_global_zero else None


def writes_another_shape(module: Any) -> None:
    module.decoder.head.weight.data = torch.zeros(5, WIDTH, dtype=torch.float64)


def keeps_values(module: Any) -> None:
    module.before = {"head": module.decoder.head.weight.data}


def reads_early(module: Any) -> None:
    module.decoder.head.weight.grad.norm()


def resets_early(module: Any) -> None:
    module.zero_grad(set_to_none=False)
    module.zero_grad()


def error_of(run: Run, module: L.LightningModule, *, predicts: bool = False, **options: Any) -> str:
    trainer = run.trainer(**options)
    try:
        if predicts:
            trainer.predict(module, run.loader(8))
        else:
            trainer.fit(module, run.training())
    except (ConfigError, RankMismatchError, RemoteParameterError, RankLostError) as error:  # or hears of another's
        return f"{type(error).__name__}: {error}"
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return ""


REFUSED: dict[str, tuple[Callable[[Run], str], tuple[str, ...]]] = {
    "a norm on one rank": (
        lambda run: error_of(
            run, Hooked("on_train_batch_end", only_rank_0(lambda m: m.trainer.strategy.full_state_dict()))
        ),
        ("RankMismatchError", "rank 0 at strategy.full_state_dict()", "the end of Hooked.on_train_batch_end"),
    ),
    "another shape": (
        lambda run: error_of(run, Hooked("on_train_batch_end", writes_another_shape)),
        ("ConfigError: decoder.head.weight", "(3, 8)"),
    ),
    "values that would follow the weight": (
        lambda run: error_of(run, Hooked("on_train_batch_end", keeps_values)),
        ("ConfigError: Hooked.before", "decoder.head.weight", ".detach().clone()"),
    ),
    "a gradient before it is summed": (
        lambda run: error_of(run, Hooked("on_after_backward", reads_early), accumulate_grad_batches=2),
        ("ConfigError: decoder.head.weight.grad", "on_before_optimizer_step"),
    ),
    "a norm before it is summed": (
        lambda run: error_of(
            run, Hooked("on_after_backward", lambda m: m.trainer.strategy.grad_norm()), accumulate_grad_batches=2
        ),
        ("ConfigError: strategy.grad_norm", "on_before_optimizer_step"),
    ),
    "an unknown name": (
        lambda run: error_of(run, Hooked("on_after_backward", lambda m: m.trainer.strategy.grad_norm(names=["head"]))),
        ("ConfigError: grad_norm.names", "encoder.patch.weight"),
    ),
    "a value in a prediction": (
        lambda run: error_of(
            run, Hooked("on_predict_batch_end", lambda m: m.encoder.patch.weight.sum()), predicts=True
        ),
        ("RemoteParameterError", "encoder.patch.weight"),
    ),
}
ALLOWED: dict[str, Callable[[Run], str]] = {
    "a value on one rank": lambda run: error_of(
        run, Hooked("on_train_batch_end", only_rank_0(lambda m: float(m.encoder.patch.weight.norm())))
    ),
    "gradients on one rank, then a checkpoint": lambda run: error_of(
        run,
        Hooked(
            "on_train_batch_end",
            lambda m: (only_rank_0(lambda _: m.decoder.head.weight.grad)(m), m.trainer.strategy.full_state_dict()),
        ),
    ),
    "zeros before gradients are summed": lambda run: error_of(
        run, Hooked("on_after_backward", resets_early), accumulate_grad_batches=2
    ),
    "shapes in a prediction": lambda run: error_of(
        run, Hooked("on_predict_batch_end", lambda m: [p.shape for p in m.parameters()]), predicts=True
    ),
}


def refusals(run: Run) -> Any:
    return {name: use(run) for name, (use, _) in REFUSED.items()}, {name: use(run) for name, use in ALLOWED.items()}


def test_what_cannot_be_shown_is_refused_and_ranks_may_look_alone() -> None:
    """vision: rank 0, for both replicas of language: ranks 1-2, which share parameters in stage 1"""
    layout = Layout({"vision": Modality(**VISION), "language": Modality(dp_size=2, **LANGUAGE)}, 3, 2)
    for refused, allowed in together(layout, refusals):
        assert allowed == dict.fromkeys(ALLOWED, "")
        for name, (_, words) in REFUSED.items():
            for word in words:
                assert word in refused[name], (name, refused[name])
