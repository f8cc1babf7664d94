"""Trains families of experts with AdamW on ranks that share them, and compares losses, states and parameters.

One process gets the same microbatches, since routers' losses and capacities are of a microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_mm5d import (
    ExpertParallelPlan,
    Modality,
    TensorParallelPlan,
    register_expert_parallel_plan,
    register_tensor_parallel_plan,
)
from parity.harness import fit, strategy
from ranks import call_ranks

from .expert_case import ExpertCase
from .expert_forms import FORMS, PLANS
from .families import FAMILIES, handwritten
from .handwritten_experts import MixtureLayer, StackedExperts

STEPS = 2
CASES = FAMILIES | {name: handwritten(name, layer, 4) for name, layer in FORMS.items()}
Outcome = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A family whose experts ranks share.

    Args:
        name: of the family.
        ep: ranks that share the experts.
        fields: of the language modality, beside `ep_size`.
        microbatches: of each replica.
        samples: of each microbatch.
        router_loss: whether the loss of routers is added.
        images: of each sample, in turn.
        schedule: on several ranks.
        prepare: changes the module on several ranks.
    """

    name: str
    ep: int
    fields: dict[str, Any] = field(default_factory=dict)
    microbatches: int = 1
    samples: int = 2
    router_loss: bool = False
    images: tuple[int, ...] = (1,)
    schedule: str = "1f1b"
    prepare: Callable[[L.LightningModule], None] | None = None

    def replicas(self, world: int) -> int:
        """Replicas of the language modality on `world` ranks."""
        return world // math.prod(self.fields.get(f"{axis}_size", 1) for axis in ("tp", "pp", "cp"))

    @property
    def case(self) -> ExpertCase:
        case = CASES[self.name]
        return case.router_loss() if self.router_loss else case

    def build(self) -> L.LightningModule:
        for cls, plan in PLANS.items():
            register_expert_parallel_plan(cls, plan)
        register_expert_parallel_plan(StackedExperts, ExpertParallelPlan(number="count"))
        dense = TensorParallelPlan(column={"dense.up": ("width",)}, row={"dense.down": ("width",)})
        register_tensor_parallel_plan(MixtureLayer, dense)
        module = self.case.build()
        module.configure_optimizers = lambda: torch.optim.AdamW(  # type: ignore[method-assign]
            module.parameters(), lr=0.01, eps=1e-2, weight_decay=0.1
        )
        return module

    def batches(self, replicas: int) -> list[Any]:
        samples = self.samples * self.microbatches * replicas
        images = [self.images[place % len(self.images)] for place in range(samples)]
        return [self.case.batch(samples, seed=step, images=images) for step in range(STEPS)]


class _States(Callback):
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        found: Any = trainer.strategy.optimizer_state(trainer.optimizers[0])
        names = [name for name, _ in pl_module.named_parameters()]
        self.states = {
            f"{names[number]} {key}": value
            for number, state in found["state"].items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }


def _alone(rank: int, cases: Sequence[Shared], world: int) -> list[Outcome]:
    replicas = [one.replicas(world) for one in cases]
    return [
        _train(one, {}, one.batches(count), 1, one.microbatches * count)
        for one, count in zip(cases, replicas, strict=True)
    ]


def _together(rank: int, cases: Sequence[Shared], world: int) -> list[Outcome]:
    found = []
    for one in cases:
        replicas = one.replicas(world)
        batches = [part for batch in one.batches(replicas) for part in one.case.split(batch, replicas)]
        fields = {"ep_size": one.ep, **one.fields}
        losses, states, parameters = _train(one, fields, batches, world, one.microbatches)
        found.append((losses, states if rank == 0 else {}, parameters if rank == 0 else {}))
    return found


def _train(one: Shared, fields: dict[str, Any], batches: list[Any], world: int, microbatches: int) -> Outcome:
    *encoders, last = one.case.modalities
    modalities = {name: Modality(colocate_with=last, **one.case.modality_paths.get(name, {})) for name in encoders}
    modalities[last] = Modality(**one.case.modality_paths.get(last, {}), **fields)
    module, states = one.build(), _States()
    if world > 1 and one.prepare is not None:
        one.prepare(module)
    schedule = one.schedule if world > 1 else "1f1b"
    chosen = strategy(modalities, num_microbatches=microbatches, schedule=schedule)
    recorder = fit(module, batches, chosen, world, in_order=True, callbacks=[states])
    return recorder.losses, states.states, module.state_dict()


def compare(world: int, *cases: Shared, limit: float = 120) -> None:
    """Compare each case on `world` data parallel ranks with one process."""
    (expected,) = call_ranks(1, _alone, list(cases), world, limit=limit)
    ranks = call_ranks(world, _together, list(cases), world, limit=limit)
    wrong = []
    for place, (one, (losses, states, parameters)) in enumerate(zip(cases, expected, strict=True)):
        most = 1e-9 if one.case.exact else 1e-6
        _, got_states, got = ranks[0][place]
        assert states.keys() == got_states.keys(), one
        mean = torch.tensor([found[place][0] for found in ranks]).mean(0)  # each replica has the loss of its batch
        pairs = [("losses", torch.tensor(losses), mean)]
        pairs += [(key, states[key], got_states[key]) for key in states]
        pairs += [(key, parameters[key], got[key]) for key in parameters]
        assert all(a.shape == b.shape for _, a, b in pairs), one
        off = [(float((a.double() - b.double()).abs().max()), key) for key, a, b in pairs if a.numel()]
        if not max(off)[0] <= most:
            wrong.append((one, sorted(off)[-4:]))
    assert not wrong, wrong
