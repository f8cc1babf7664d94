"""The columns of the table: layouts that a family trains under, each compared with one process.

Every run takes two steps of SGD with momentum in float64 on two microbatches. Each column says where modalities run:
with two encoders and a language model "apart" is "vision: rank 0; audio: rank 1; language: rank 2", and "together" has
all of them on ranks 0-1. A cell is measured or has a reason; nothing is inferred from another cell.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_mm5d import Modality
from lightning_mm5d.features.shared_experts.experts import find_plans
from lightning_mm5d.partition.find import discover
from parity.harness import Batches, Recorder, strategy

from .family import Family, families
from .feeds import Batch

COLUMNS = ("found", "modality", "pp", "tp", "cp", "ep", "frozen", "generate", "checkpoint", "recompute")
STEPS, SAMPLES = 2, 4
State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run on ranks.

    Attributes:
        modalities: fields of each.
        world: number of ranks.
        frozen: prefixes of parameters that do not train.
        replicas: of the modality that computes the loss; each gets batches of its own.
        resumed: fields of the modalities that go on from a checkpoint of the first step, on as many ranks.
        speaks: whether the run generates instead of training.
        microbatches: of a step.
    """

    modalities: dict[str, dict[str, Any]]
    world: int = 2
    frozen: tuple[str, ...] = ()
    replicas: int = 1
    resumed: dict[str, dict[str, Any]] | None = None
    speaks: bool = False
    microbatches: int = 2


class Stops(Callback):
    """Saves after the first step, and ends the run there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)
        trainer.should_stop = True


@dataclass
class Trained:
    """What a run gave on one rank; `shards` cuts full gradients to what the rank holds."""

    losses: list[float]
    gradients: list[State]
    state: State
    shards: dict[str, tuple[Any, int]] = field(default_factory=dict)


def encoders_of(name: str) -> dict[str, Any]:
    """The encoders that are found in a family without a path, each with the prefixes of what it owns."""
    return discover(families()[name].module())


def has_experts(name: str) -> bool:
    plans, unknown = find_plans(families()[name].module(), lambda path: True)
    return bool(plans or unknown)


def apart(encoders: tuple[str, ...], fields: dict[str, Any], each: dict[str, Any] | None = None) -> Run:
    """Encoders on ranks of their own, with the fields `each`; the language model on as many as `fields` take."""
    size = Modality(**fields).ranks_per_replica
    own = each or {}
    world = size + len(encoders) * Modality(**own).ranks_per_replica
    return Run(modalities={**dict.fromkeys(encoders, own), "language": fields}, world=world)


def together(encoders: tuple[str, ...], fields: dict[str, Any]) -> Run:
    """All modalities on the same ranks, with the same fields."""
    return Run(
        modalities={**{name: {**fields, "colocate_with": "language"} for name in encoders}, "language": fields},
        world=Modality(**fields).ranks_per_replica,
    )


def trained(rank: int, family: Family, run: Run, batches: list[list[Batch]]) -> Any:
    """Train on one rank; `batches` has those of each replica, for each step."""
    flat = [batch for step in batches for batch in step]
    if run.speaks:
        return spoken(family, run.world, chosen(run), flat[:1])
    if run.resumed is not None:
        with shared_folder(rank) as folder:
            fit(family, run, chosen(run), flat, path=folder / "one")
            return fit(family, run, chosen(run, run.resumed), flat, ckpt_path=folder / "one")
    return fit(family, run, chosen(run), flat)


def alone(family: Family, batches: list[list[Batch]], frozen: tuple[str, ...] = (), speaks: bool = False) -> Any:
    """The same on one process, with the batches of all replicas as one."""
    whole = [joined(step) for step in batches]
    run = Run(modalities={}, world=1, frozen=frozen)
    return spoken(family, 1, "auto", batches[0][:1]) if speaks else fit(family, run, "auto", whole)


def joined(batches: list[Batch]) -> Batch:
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


class shared_folder:  # noqa: N801 - used as a function
    """A folder that all ranks know, which rank 0 makes and removes."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __enter__(self) -> Path:
        import os

        self.path = Path(tempfile.gettempdir()) / f"families-{os.environ['MASTER_PORT']}-{os.getppid()}"
        self.path.mkdir(exist_ok=True)
        return self.path

    def __exit__(self, *_: Any) -> None:
        import shutil

        if self.rank == 0:
            shutil.rmtree(self.path, ignore_errors=True)


def chosen(run: Run, fields: dict[str, dict[str, Any]] | None = None) -> Any:
    modalities = {name: Modality(**each) for name, each in (fields or run.modalities).items()}
    return strategy(modalities, num_microbatches=run.microbatches)


def trainer(devices: int, strategy: Any, **options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        max_epochs=1,
        use_distributed_sampler=False,
        **options,
    )


def fit(
    family: Family,
    run: Run,
    strategy: Any,
    batches: list[Batch],
    *,
    path: Path | None = None,
    ckpt_path: Path | None = None,
) -> Trained:
    module, recorder = family.module(), Recorder()
    for name, parameter in module.named_parameters():
        if any(name == prefix or name.startswith(prefix + ".") for prefix in run.frozen):
            parameter.requires_grad_(False)
    data = Batches(batches)
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=False) if run.replicas > 1 else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stops = [] if path is None else [Stops(path)]
        fitting = trainer(run.world, strategy, callbacks=[recorder, *stops])
        fitting.fit(module, DataLoader(data, batch_size=None, sampler=sampler), ckpt_path=ckpt_path, weights_only=False)
    whole = fitting.global_rank == 0  # where all weights are after a run
    found = Trained(recorder.losses, recorder.gradients, dict(module.state_dict()) if whole else {})
    if run.world > 1:
        plan, rank = strategy.plan(family.module()), fitting.global_rank
        found.shards = {
            key: (shard, plan.ownership.shard_index(key, rank))
            for key, shard in plan.division.shards.items()
            if rank in plan.ownership.ranks_holding(key)
        }
    return found


def spoken(family: Family, devices: int, strategy: Any, batches: list[Batch]) -> list[list[int]]:
    module: Any = family.module()
    batches = copy.deepcopy(batches)  # some models write to what they continue
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(devices, strategy).validate(module, DataLoader(Batches(batches), batch_size=None), verbose=False)
    return module.said
