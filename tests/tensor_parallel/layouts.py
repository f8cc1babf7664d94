"""Trains a module of the zoo with tensor parallel modalities and compares all of it with one process."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import lightning as L
import torch

from lightning_mm5d import Modality
from parity.harness import Recorder, fit, run_ranks, strategy
from zoo import CASES, apply_freeze

STEPS, SAMPLES = 2, 8
Fields = dict[str, dict[str, Any]]


def build(name: str, variant: str = "none") -> L.LightningModule:
    module = CASES[name].build()
    apply_freeze(module, CASES[name], variant)
    return module


def batches_of(name: str) -> list[Any]:
    return [CASES[name].batch(SAMPLES, seed=step) for step in range(STEPS)]


@lru_cache
def reference(name: str, variant: str, options: tuple[tuple[str, Any], ...]) -> tuple[Recorder, dict[str, torch.Tensor]]:
    module = build(name, variant)
    return fit(module, batches_of(name), **dict(options)), module.state_dict()


def train(
    rank: int, name: str, fields: Fields, world: int, replicas: int, variant: str, options: dict[str, Any]
) -> tuple[list[float], list[Any], dict[str, torch.Tensor], dict[str, Any]]:
    """One rank's run: losses, gradients of each step, parameters at the end, and the part of each that it holds."""
    case, options = CASES[name], dict(options)
    chosen = strategy(
        {key: Modality(**case.modality_paths.get(key, {}), **value) for key, value in fields.items()},
        num_microbatches=options.pop("num_microbatches", 4 if case.mean_of_samples else 1),
        schedule=options.pop("schedule", "1f1b"),
    )
    module = build(name, variant)
    batches = batches_of(name)
    if replicas > 1:
        batches = [part for batch in batches for part in case.split(batch, replicas)]
    recorder = fit(module, batches, chosen, world, **{**options, "use_distributed_sampler": replicas > 1})
    plan = chosen.plan(build(name, variant))
    held = {key: (shard, plan.part_of(key, rank)) for key, shard in plan.division.shards.items() if rank in plan.owners(key)}
    return recorder.losses, recorder.gradients, module.state_dict(), held


def check(
    name: str,
    fields: Fields,
    world: int,
    *,
    replicas: int = 1,
    variant: str = "none",
    exact: bool = False,
    **options: Any,
) -> None:
    """Compare losses, every gradient and the parameters at the end with one process.

    Args:
        name: of the case in the zoo.
        fields: of each modality.
        world: number of ranks.
        replicas: of the modality that computes the loss.
        variant: what is frozen.
        exact: whether the model computes in float64 throughout.
        options: of the trainer, and `num_microbatches` and `schedule`.
    """
    alone = {key: value for key, value in options.items() if key not in ("num_microbatches", "schedule")}
    recorder, parameters = reference(name, variant, tuple(sorted(alone.items())))
    ranks = run_ranks(world, train, name, fields, world, replicas, variant, options)
    close = partial(torch.testing.assert_close, rtol=1e-9 if exact else 1e-6, atol=1e-12 if exact else 1e-7)
    if replicas == 1:
        for losses, *_ in ranks:
            close(torch.tensor(losses), torch.tensor(recorder.losses))
    for step, expected in enumerate(recorder.gradients):
        found: set[str] = set()
        for rank, (_, gradients, _, held) in enumerate(ranks):
            found |= set(gradients[step])
            for key, gradient in gradients[step].items():
                whole = expected[key]
                part = held[key][0].cut(whole, held[key][1]) if key in held else whole
                close(gradient, part, msg=lambda m, key=key, rank=rank: f"rank {rank}, {key}: {m}")
        assert found == set(expected), "some gradient is on no rank, or on one too many"
    for key, value in parameters.items():
        close(ranks[0][2][key], value, msg=lambda m, key=key: f"{key}: {m}")
