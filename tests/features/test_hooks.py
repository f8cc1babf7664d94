"""Hooks on tensors, modules and parameters act once, where the hooked thing is computed, as on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from features.toys import LANGUAGE, TWINS, VISION, Decoder, Layout, Outcome, Run, Toy, assert_same, outcomes, weights
from lightning_mm5d import Modality
from sweeps import dealt

FOUR = Layout({"vision": Modality(pp_size=2, **VISION), "language": Modality(pp_size=2, **LANGUAGE)}, 4)


def doubled(gradient: Tensor) -> Tensor:
    return gradient * 2


def on_modules(module: Toy) -> None:
    """Hooks of every kind on every layer and on both ends of an encoder."""
    for layer in (*module.encoder.layers, *module.decoder.layers):
        layer.register_forward_pre_hook(lambda _, args: args[0].register_hook(doubled) and None)
        layer.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
        layer.register_forward_hook(lambda _, args, out: args[0].register_hook(doubled) and None)
        layer.register_forward_hook(lambda _, args, out: out.register_hook(doubled) and None)
        layer.register_forward_hook(lambda _, args, out: out * 0.5)
        layer.register_full_backward_pre_hook(lambda _, out: (out[0] * 0.5,))
        layer.register_full_backward_hook(lambda _, inputs, out: (inputs[0] * 0.5,))
    module.encoder.register_forward_hook(lambda _, args, out: out.register_hook(doubled) and None)
    module.encoder.register_forward_hook(lambda _, args, out: out * 0.5)
    module.decoder.embedding.register_forward_hook(lambda _, args, out: out.register_hook(doubled) and None)


class HookedAtTheStart(Toy):
    def __init__(self) -> None:
        super().__init__()
        on_modules(self)


class HookedLater(Toy):
    def on_fit_start(self) -> None:
        on_modules(self)


class HookingDecoder(Decoder):
    """Hooks what it computes, between all its layers."""

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + features.unsqueeze(1)
        hidden.register_hook(doubled)
        for layer in self.layers:
            hidden = layer(hidden)
            hidden.register_hook(doubled)
            hidden = hidden * 0.5
            hidden.register_hook(doubled)
            hidden.retain_grad()
        logits = self.head(self.norm(hidden).mean(dim=1))
        logits.register_hook(doubled)
        return logits


class HookedInTheStep(Toy):
    """And writes to an encoder's result in place."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder.__class__ = HookingDecoder

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = self.encoder(batch["images"])
        if torch.is_grad_enabled():
            features.register_hook(doubled)
        features += 1
        return self.decoder(batch["tokens"], features) if torch.is_grad_enabled() else features

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = self.encoder(batch["images"])
        features *= 3
        return Decoder.forward(self.decoder, batch["tokens"], features)


def clamped(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.004, 0.004)


def on_parameters(module: nn.Module) -> None:
    """What a hook makes of a sum is not the sum of what it makes of the terms."""
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.005, 0.005))
        parameter.register_post_accumulate_grad_hook(clamped)


class HookedParameters(Toy):
    def __init__(self) -> None:
        super().__init__(lr=1.0)
        on_parameters(self.encoder)

    def on_fit_start(self) -> None:
        on_parameters(self.decoder)


def fit(run: Run, module: Toy, **options: Any) -> dict[str, Any]:
    trainer = run.trainer(**options)
    trainer.fit(module, run.training(16))
    return weights(module)


def hooked_at_the_start(run: Run) -> Any:
    return fit(run, HookedAtTheStart())


def hooked_later(run: Run) -> Any:
    return fit(run, HookedLater())


def hooked_in_the_step(run: Run) -> Any:
    return fit(run, HookedInTheStep())


def predicted(run: Run) -> Any:
    return torch.cat(run.trainer().predict(HookedInTheStep(), run.loader(8, shuffle=False)))


def hooked_parameters(run: Run) -> Any:
    return fit(run, HookedParameters())


def hooked_parameters_accumulated(run: Run) -> Any:
    return fit(run, HookedParameters(), accumulate_grad_batches=2)


SCENARIOS: tuple[Callable[[Run], Any], ...] = (
    hooked_at_the_start,
    hooked_later,
    hooked_in_the_step,
    hooked_parameters,
    hooked_parameters_accumulated,
)


@pytest.fixture(scope="module", params=dealt(__file__, [FOUR, TWINS]), ids=["four", "twins"])
def found(request: Any) -> dict[str, Outcome]:
    """vision: ranks 0-1 as stages; language: ranks 2-3 as stages | vision: rank 0; language: ranks 1-2 as replicas"""
    return outcomes(request.param, *SCENARIOS, *([predicted] if request.param is FOUR else []))


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_hooks_act_once_as_on_one_process(found: dict[str, Outcome], name: str) -> None:
    assert_same(found[name].ranks[0], found[name].one)


@pytest.mark.parametrize("found", [FOUR], indirect=True, ids=["four"])
def test_writing_to_an_encoders_result_leaves_what_is_sent_alone(found: dict[str, Outcome]) -> None:
    for rank in found["predicted"].ranks:
        assert_same(rank, found["predicted"].one)
