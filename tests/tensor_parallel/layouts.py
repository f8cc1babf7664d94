"""Trains a module of the zoo with tensor parallel modalities and compares all of it with one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import lightning as L
import torch

from compare import State, assert_equal_to_one_process, tolerance
from lightning_mm5d import Modality
from parity.harness import Recorder, fit, strategy
from ranks import LIMIT_S, call_ranks
from zoo import CASES, apply_freeze

STEPS, SAMPLES = 2, 8
Fields = dict[str, dict[str, Any]]
Prepare = Callable[[L.LightningModule], None]
OF_STRATEGY = ("num_microbatches", "schedule", "placement", "process_group_backend")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A run on ranks that is compared with one process.

    Args:
        name: of the case in the zoo.
        fields: of each modality.
        replicas: of the modality that computes the loss.
        variant: what is frozen.
        prepare: changes the module in place, equally on every process and each time; adapters, for instance.
        steps: number of optimizer steps, or more batches where they are accumulated.
        exact: whether the model computes in float64 throughout.
        off: absolute tolerance where it does not; gradients are of the order of 0.1.
        options: of the trainer, and those in `OF_STRATEGY`.
        accelerator: of the ranks; the one process of `alone` computes on the CPU.
    """

    name: str
    fields: Fields
    replicas: int = 1
    variant: str = "none"
    prepare: Prepare | None = None
    steps: int = STEPS
    exact: bool = False
    off: float = 1e-7
    options: dict[str, Any] = field(default_factory=dict)
    accelerator: Any = "cpu"

    def build(self) -> L.LightningModule:
        return build(self.name, self.variant, self.prepare)


def build(name: str, variant: str = "none", prepare: Prepare | None = None) -> L.LightningModule:
    module = CASES[name].build()
    apply_freeze(module, CASES[name], variant)
    if prepare is not None:
        prepare(module)
    return module


def batches_of(name: str, steps: int = STEPS) -> list[Any]:
    return [CASES[name].batch(SAMPLES, seed=step) for step in range(steps)]


@lru_cache
def reference(
    name: str,
    variant: str,
    prepare: Prepare | None,
    steps: int,
    options: tuple[tuple[str, Any], ...],
    dtype: torch.dtype,
) -> tuple[Recorder, State]:
    """Train on one process; kept for equal arguments and, since a module is built in the default one, equal `dtype`."""
    module = build(name, variant, prepare)
    return fit(module, batches_of(name, steps), **dict(options)), module.state_dict()


def train(rank: int, runs: list[Compared], world: int) -> list[tuple[list[float], list[State], State]]:
    """One rank's runs: losses, gradients of each step, parameters at the end."""
    return [_train(rank, run, world) for run in runs]


def _train(rank: int, run: Compared, world: int) -> tuple[list[float], list[State], State]:
    case, options = CASES[run.name], dict(run.options)
    chosen = strategy(
        {key: Modality(**case.modality_paths.get(key, {}), **value) for key, value in run.fields.items()},
        num_microbatches=options.pop("num_microbatches", 4 if case.mean_of_samples else 1),
        schedule=options.pop("schedule", "1f1b"),
        **{key: options.pop(key) for key in ("placement", "process_group_backend") if key in options},
    )
    module = run.build()
    batches = batches_of(run.name, run.steps)
    if run.replicas > 1:
        batches = [part for batch in batches for part in case.split(batch, run.replicas)]
    options["in_order"] = run.replicas > 1
    recorder = fit(module, batches, chosen, world, run.accelerator, **options)
    return recorder.losses, recorder.gradients, module.state_dict()


def check(name: str, fields: Fields, world: int, **options: Any) -> None:
    """Compare losses, every gradient and the parameters at the end with one process.

    Args:
        name: of the case in the zoo.
        fields: of each modality.
        world: number of ranks.
        options: those of `Compared`, of the trainer and of the strategy.
    """
    names = ("replicas", "variant", "prepare", "steps", "exact", "off")
    known = {key: options.pop(key) for key in names if key in options}
    check_all(world, Compared(name=name, fields=fields, options=options, **known))


def alone(run: Compared) -> tuple[Recorder, State]:
    """Return what one process records of a run, and its parameters at the end."""
    options = tuple(sorted((key, value) for key, value in run.options.items() if key not in OF_STRATEGY))
    return reference(run.name, run.variant, run.prepare, run.steps, options, torch.get_default_dtype())


def check_all(
    world: int,
    *runs: Compared,
    limit: float = LIMIT_S,
    one_process: Callable[[Compared], tuple[Recorder, State]] = alone,
    trains: Callable[..., Any] = train,
) -> None:
    """The same of several runs, one after the other in the same processes.

    `one_process` gives what to compare with; `trains` is called on each rank as `train` is.
    """
    expected = [one_process(run) for run in runs]
    ranks = call_ranks(world, trains, list(runs), world, limit=limit)
    for index, (run, (recorder, parameters)) in enumerate(zip(runs, expected, strict=True)):
        _compare(run, recorder, parameters, [results[index] for results in ranks])


def _compare(run: Compared, recorder: Recorder, parameters: State, ranks: list[Any]) -> None:

    assert_equal_to_one_process(
        ranks,
        recorder,
        parameters,
        with_losses=run.replicas == 1,
        where=f"{run.name}, {run.fields}, {run.options}",
        **tolerance(run.exact, run.off),
    )
