"""Checks of a configuration against a module and its data, before any process is started.

Checks that need only the configuration are in `config.checks` and `layout`, and refusals of code that ranks cannot run
in features. This module refuses schedules of the user's that do not fit, and batches that are too small to be split.

**Main parameters.** Which dtype main parameters have, and whether the trainer's precision leaves them a use.

**Two Lightnings.** Where a process has two (`config.one_lightning` says when), objects of the one that is not the
strategy's are refused by what to change. A callback or sampler of the one is not known to the other, which then does
without it in silence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import lightning.pytorch.trainer.trainer as trainer_module
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from torch.utils.data import DataLoader

from lightning_mm5d.config.errors import ConfigError, other_package, private
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.data_parallel.main_parameters import computing_dtypes
from lightning_mm5d.plan.issued import Issued
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import Graph, Schedule, build, is_table

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_TRUE = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}


def main_dtype(main_params: str | None) -> torch.dtype | None:
    """Return the dtype that ``main_params`` names."""
    return None if main_params is None else _DTYPES[main_params]


def check_main_params(main_params: str | None, module: pl.LightningModule, precision: Precision) -> None:
    """Refuse main parameters that would be no wider than what layers compute in, and manual optimization.

    Raises:
        ConfigError: no parameter is narrower; or the module optimizes manually.
    """
    dtype = main_dtype(main_params)
    if dtype is None:
        return
    if not module.automatic_optimization:
        rule = (
            "Manual optimization runs its own backward, and parameters show what layers compute with inside a schedule"
        )
        fix = "Use automatic optimization, or leave main_params unset"
        raise ConfigError("automatic_optimization", False, rule, fix)
    computes = _TRUE.get(str(precision.precision))
    dtypes = {computes or p.dtype for p in module.parameters() if p.is_floating_point()}
    dtypes |= set(computing_dtypes(module).values())
    if not any(held_dtype.itemsize < dtype.itemsize for held_dtype in dtypes):
        held = ", ".join(sorted(str(held_dtype).removeprefix("torch.") for held_dtype in dtypes)) or "no floating-point"
        rule = f"Main parameters are wider than what layers compute in, and the module has {held} parameters"
        fix = 'Use Trainer(precision="bf16-true"), or leave main_params unset'
        raise ConfigError("numerics.main_params", main_params, rule, fix)


def check_computed(modalities: Mapping[str, Modality]) -> None:
    """Refuse configurations that can be laid out, shown and simulated, but not computed in this version.

    Raises:
        ConfigError: costs that are given for some modalities only.
    """
    costs = {name: modality.cost for name, modality in modalities.items()}
    for name, cost in costs.items():
        if cost is None and any(other is not None for other in costs.values()):
            rule = "Costs that are given and costs that are estimated have no common unit"
            raise ConfigError(f"modalities.{name}.cost", cost, rule, "Give a cost for all modalities, or for none")


def check_module(
    module: pl.LightningModule, plan: Plan, num_microbatches: int | None, schedule: str | Callable[[Graph], Schedule]
) -> None:
    """Refuse a user's own schedule that does not fit the module, and a module whose ranks cannot share parameters.

    Raises:
        ConfigError: it needs full gradients, and the layout shares parameters.
        ScheduleError: the schedule is not one of the stages of this module.
    """
    if callable(schedule) or is_table(schedule):
        assert num_microbatches is not None
        build(schedule, plan.graphs.full_graph(schedule, num_microbatches, module))
        named = module.named_parameters(remove_duplicate=False)
        Issued(plan, schedule, num_microbatches, frozenset(name for name, p in named if p.requires_grad)).check()


_BUILT_IN: dict[str, Callable[[], bool]] = {
    "mpi": dist.is_mpi_available,
    "ucc": dist.is_ucc_available,
    "xccl": dist.is_xccl_available,
    "nccl": dist.is_nccl_available,
    "undefined": lambda: False,
}
"""Backends that torch knows by name, and whether it has them."""


def check_backend(backend: str | None, device: torch.device) -> None:
    """Refuse backends that this torch was built without, or that do not carry tensors of the device of ranks.

    Raises:
        ConfigError: the installed torch has no such backend, or it is NCCL and ranks compute on CPUs.
    """
    for part in (backend or "").lower().split(","):
        name = part.rpartition(":")[2]
        if name in _BUILT_IN and not _BUILT_IN[name]():
            rule = f"The installed torch {torch.__version__} was built without {name.upper()}"
            fix = "'nccl'" if device.type == "cuda" and dist.is_nccl_available() else "'gloo'"
            raise ConfigError("launch.process_group_backend", backend, rule, f"Use {fix}, or leave it unset")
    if backend is not None and backend.lower() == "nccl" and device.type == "cpu":
        rule = "NCCL carries tensors of NVIDIA GPUs, and the trainer has CPUs"
        raise ConfigError("launch.process_group_backend", backend, rule, "Use 'gloo', or leave it unset")


def lost_weights() -> ConfigError:
    """Return the error for a module that a failed run has left without the weights of other ranks."""
    rule = (
        "A run that fails leaves each rank with its own part of the module, because nobody is left to send the others"
    )
    fix = "Make a new module, and give trainer.fit the ckpt_path of the last checkpoint"
    return ConfigError("module", "parts of its weights", rule, fix)


def batch_sizes(data: Sequence[Any]) -> list[int]:
    """Return the samples in a batch of each dataloader, and of each datamodule that has a `batch_size`.

    Args:
        data: what the trainer was given beside the module.
    """
    known = (item for item in data if isinstance(item, (DataLoader, pl.LightningDataModule)))
    return [size for item in known if isinstance(size := getattr(item, "batch_size", None), int) and size > 0]


def check_batches(data: Sequence[Any], num_microbatches: int) -> None:
    """Refuse dataloaders whose batches are smaller than the number of microbatches.

    Args:
        data: as for `batch_sizes`.
        num_microbatches: parts that a batch is split into.

    Raises:
        ConfigError: a batch cannot be split into so many.
    """
    for size in batch_sizes(data):
        if size < num_microbatches:
            rule = f"A microbatch has at least one sample, and a batch has {size}"
            fix = f"Use {size}, or larger batches"
            raise ConfigError("batching.num_microbatches", num_microbatches, rule, fix)


_PACKAGES = {"lightning", "pytorch_lightning"}
_UNWRAP = "_maybe_unwrap_optimized"


def is_of_other_package(thing: object) -> bool:
    """Whether a class, or the class of an object, derives from one of the Lightning that is not the strategy's."""
    cls = thing if isinstance(thing, type) else type(thing)
    others = _PACKAGES - {pl.Trainer.__module__.partition(".")[0]}
    return any(base.__module__.partition(".")[0] in others for base in cls.__mro__)


def check_package(field: str, things: Iterable[object]) -> None:
    """Refuse objects of the other package.

    Args:
        field: what they are.
        things: objects or classes.

    Raises:
        ConfigError: at the first one.
    """
    for thing in things:
        if is_of_other_package(thing):
            raise other_package(field, (thing if isinstance(thing, type) else type(thing)).__name__)


def explain_other_modules() -> None:
    """Have Lightning's trainer refuse modules of another package, where both are imported, by what to change.

    The trainer looks at a module before its strategy does, and says only that it is no `LightningModule`.
    """
    original = private(trainer_module, _UNWRAP)  # what a trainer calls first with the module that it is given

    def explained(model: Any) -> Any:
        check_package("module", [model])
        return original(model)

    if sys.modules.keys() >= _PACKAGES and original.__module__ != __name__:
        setattr(trainer_module, _UNWRAP, explained)
