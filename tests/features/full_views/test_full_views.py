"""Hooks of modules and callbacks see full parameters and gradients, whatever code reads them, or a named error."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from features.toys import (
    LANGUAGE,
    PAIR,
    VISION,
    Layout,
    Run,
    Toy,
    assert_same,
    figures,
    outcomes,
    weights,
)
from lightning_mm5d import Modality, TensorParallelPlan, register_tensor_parallel_plan
from lightning_mm5d.features.full_views.full_states import partial_names
from sweeps import SEED

Use = Callable[[Toy], Any]


class Uses(Toy):
    """Does something in one of its hooks, keeps what comes of it, and makes the weights depend on it."""

    def __init__(self, hook: str, use: Use) -> None:
        super().__init__(lr=0.5)
        self.hook, self.use = hook, use
        self.found: list[Any] = []

    def did(self, hook: str) -> None:
        if hook == self.hook:
            result = self.use(self)
            self.found.append(result.detach().clone() if isinstance(result, Tensor) else result)

    def on_after_backward(self) -> None:
        self.did("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.did("on_before_optimizer_step")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.did("on_before_zero_grad")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.did("on_train_batch_end")

    def on_train_start(self) -> None:
        self.did("on_train_start")

    def on_train_epoch_end(self) -> None:
        self.did("on_train_epoch_end")

    def on_validation_epoch_end(self) -> None:
        self.did("on_validation_epoch_end")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.did("on_save_checkpoint")


def grads(module: Toy) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


# --- of gradients ---


def clips_by_hand(module: Toy) -> Tensor:
    norm = torch.stack([p.grad.pow(2).sum() for p in module.parameters() if p.grad is not None]).sum().sqrt()
    for p in module.parameters():
        if p.grad is not None:
            p.grad.mul_(0.05 / norm)
    return norm


def clips_with_torch(module: Toy) -> Tensor:
    return nn.utils.clip_grad_norm_(module.parameters(), 0.05)


def clips_values(module: Toy) -> None:
    nn.utils.clip_grad_value_(module.parameters(), 0.01)


def clips_each(module: Toy) -> None:
    for p in module.parameters():
        nn.utils.clip_grad_norm_([p], 0.01)


def clips_through_data(module: Toy) -> None:
    for p in module.parameters():
        p.grad.data = p.grad.data / p.grad.data.norm().clamp(min=0.1)


def takes_foreach_norms(module: Toy) -> Tensor:
    return torch.stack(torch._foreach_norm(grads(module)))


def takes_lightnings_norms(module: Toy) -> dict[str, float]:
    return {name: float(value) for name, value in grad_norm(module, 2).items()}


def skips_large_ones(module: Toy) -> float:
    largest = max(p.grad.abs().max().item() for p in module.parameters() if p.grad is not None)
    if largest > 0.05:
        module.zero_grad()
    return largest


def counts(module: Toy) -> Any:
    missing = any(p.grad is None or p.grad.isnan().any() for p in module.parameters())
    named = {name: tuple(p.grad.shape) for name, p in module.named_parameters() if p.grad is not None}
    return missing, named, sum(p.numel() for p in module.parameters()), len(grads(module))


def takes_the_mean(module: Toy) -> float:
    found = grads(module)
    return sum(g.norm().item() for g in found) / max(len(found), 1)


def centralizes(module: Toy) -> None:
    for p in module.parameters():
        if p.grad is not None and p.dim() > 1:
            p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.dim())), keepdim=True))


def replaces(module: Toy) -> None:
    for p in module.parameters():
        p.grad = p.grad.sign() * p.abs().mean()


def penalizes(module: Toy) -> None:
    for p in module.parameters():
        p.grad.add_(p.detach(), alpha=0.02)


def drops_the_encoders(module: Toy) -> None:
    for p in module.encoder.parameters():
        p.grad = None


# --- of parameters ---


def renormalizes(module: Toy) -> None:
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() > 1:
                p.div_(p.norm(dim=1, keepdim=True).clamp(min=0.5))


def vectors(module: Toy) -> Tensor:
    return nn.utils.parameters_to_vector(module.parameters())


def norms(module: Toy) -> Any:
    module.log("weights", torch.stack([p.norm() for p in module.parameters()]).norm(), on_epoch=True)
    return float(sum(p.norm() for p in module.parameters()))


def averages(module: Toy) -> dict[str, Tensor]:
    own = vars(module).setdefault("average", {})
    for name, p in module.named_parameters():
        own[name] = p.detach().clone() if name not in own else own[name].lerp_(p.detach(), 0.5)
    return {name: value.clone() for name, value in own.items()}


def saves_a_state(module: Toy) -> dict[str, Tensor]:
    return copy.deepcopy(module.state_dict())


def writes_data(module: Toy) -> None:
    for q, k in zip(module.encoder.layers.parameters(), module.decoder.layers[:2].parameters(), strict=True):
        k.data = k.data * 0.9 + q.data * 0.1


def loads(module: Toy) -> None:
    state = {name: value * 0.5 for name, value in module.encoder.state_dict().items()}
    module.encoder.load_state_dict(state)


def initializes(module: Toy) -> None:
    nn.init.constant_(module.encoder.patch.weight, 0.1)
    nn.init.eye_(module.decoder.layers[3].up.weight)
    nn.init.xavier_uniform_(module.encoder.projector.weight, generator=torch.Generator().manual_seed(3))


def shapes(module: Toy) -> Any:
    return [(name, tuple(p.shape), p.numel(), p.dtype, p.requires_grad) for name, p in module.named_parameters()]


def on_one_rank(module: Toy) -> float:
    return float(vectors(module).norm()) if module.trainer.is_global_zero else -1.0


USES: dict[str, tuple[Use, ...]] = {
    "on_after_backward": (takes_the_mean, centralizes, penalizes),
    "on_before_optimizer_step": (
        clips_by_hand,
        clips_with_torch,
        clips_values,
        clips_each,
        clips_through_data,
        takes_foreach_norms,
        takes_lightnings_norms,
        skips_large_ones,
        counts,
        replaces,
        drops_the_encoders,
    ),
    "on_before_zero_grad": (takes_the_mean,),
    "on_train_batch_end": (renormalizes, norms, averages, writes_data, shapes),
    "on_train_start": (initializes, loads, vectors),
    "on_train_epoch_end": (saves_a_state,),
    "on_validation_epoch_end": (norms, shapes),
    "on_save_checkpoint": (averages,),
}


def used(run: Run, hook: str, use: Use) -> Any:
    module = Uses(hook, use)
    saves = {"callbacks": [ModelCheckpoint(run.folder)], "enable_checkpointing": True}
    trainer = run.trainer(**saves if hook == "on_save_checkpoint" else {})
    trainer.fit(module, run.training(), run.loader(8))
    return {"found": module.found, "weights": weights(module), "figures": figures(trainer)}


CASES = {f"{use.__name__} in {hook}": (hook, use) for hook, uses in USES.items() for use in uses}


def zero(stage: int, **others: Any) -> dict[str, Modality]:
    return {"model": Modality(dp_size=2, sharding={"zero_stage": stage}, **others)}


LAYOUTS = {
    "vision | language": PAIR,
    "pp 2": Layout({"model": Modality(module="decoder", pp_size=2)}, 2),
    "tp 2": Layout({"language": Modality(tp_size=2, module="decoder")}, 2),
    "tp 2, pp 2": Layout({"language": Modality(tp_size=2, pp_size=2, module="decoder")}, 4),
    "zero 1": Layout(zero(1), 2, 2),
    "zero 3": Layout(zero(3), 2, 2),
    "vision | zero 3": Layout(
        {"vision": Modality(**VISION), "language": Modality(dp_size=2, sharding={"zero_stage": 3}, **LANGUAGE)}, 3, 2
    ),
}


SHUFFLED = random.Random(SEED).sample(list(CASES), len(CASES))
IN_CI = {name: SHUFFLED[index :: len(LAYOUTS)] for index, name in enumerate(LAYOUTS)}
"""each use in one layout; `exhaustive` holds all uses in all layouts"""


@pytest.mark.parametrize(
    ("name", "cases"),
    [pytest.param(name, cases, id=name) for name, cases in IN_CI.items()]
    + [pytest.param(name, [*CASES], id=f"{name}, all", marks=pytest.mark.exhaustive) for name in LAYOUTS],
)
def test_what_hooks_do_with_parameters_and_gradients_is_as_on_one_process(
    name: str, cases: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vision: rank 0; language: rank 1, or ranks 1-2 | one modality: ranks 0-1, or ranks 0-3 as stages of two ranks."""
    monkeypatch.setattr("lightning_mm5d.tensor_parallel.plan_lookup._REGISTERED", {})
    register_tensor_parallel_plan("Layer", TensorParallelPlan(column={"up": ("width",)}, row={"down": ("width",)}))

    def uses(run: Run) -> Any:
        return {case: used(run, *CASES[case]) for case in cases}

    layout = LAYOUTS[name]
    assert partial_names(Run(layout).trainer().strategy.plan(Uses("", norms)))
    for folder in ("one", "ranks"):
        (tmp_path / folder).mkdir()
    found = outcomes(layout, uses, folder=tmp_path)["uses"]
    for rank, got in enumerate(found.ranks):
        for case, one in found.one.items():
            assert_same(got[case]["found"], one["found"], where=f"rank {rank}: {case}")
            assert_same(got[case]["figures"], one["figures"], where=f"rank {rank}: {case}")
    for case, one in found.one.items():
        assert_same(found.ranks[0][case]["weights"], one["weights"], where=case)
