"""What a rank states to the others before it relies on them: JSON values by name, equal on all ranks of a sound run.

`Agreement.check` compares them. Rank-dependent values stay out: devices by number, paths, progress bars, loggers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import os
import platform
import re
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Checkpoint,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from lightning_mm5d.config.errors import private
from lightning_mm5d.config.features import FEATURES
from lightning_mm5d.config.groups import OF_STRATEGY, names_of
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.layout import Layout
from lightning_mm5d.plan.holdings import Holdings
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import is_table, table_text
from lightning_mm5d.sharded.remote_value import is_remote

version = cache(metadata.version)
_PACKAGES = ("lightning_mm5d", "torch", "lightning", "transformers", "torchmetrics")
_TRAINER = (
    *("accumulate_grad_batches", "check_val_every_n_epoch", "fast_dev_run"),
    *("gradient_clip_algorithm", "gradient_clip_val", "limit_predict_batches"),
    *("limit_test_batches", "limit_train_batches", "limit_val_batches", "max_epochs"),
    *("max_steps", "min_epochs", "min_steps", "num_nodes", "num_sanity_val_steps"),
    *("overfit_batches", "precision"),
)
_SET_BY_TRAINER = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin")
# those that work together over all ranks; others, such as progress bars, may be those of one rank
_COLLECTIVE = (
    *(BaseFinetuning, Checkpoint, EarlyStopping, GradientAccumulationScheduler, ModelPruning),
    *(StochasticWeightAveraging, Timer, WeightAveraging),
)
_RANK_DEPENDENT = re.compile(r" at 0x[0-9a-f]+|(?<=cuda|.xpu|.npu|.hpu):\d+")
_SET = re.compile(r"\{([^{}:]*)\}")


def configuration(strategy: object, trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
    """Return what a run is configured with: fields of the strategy, trainer, versions, code and seed.

    Args:
        strategy: keeps each argument of its constructor under that name, or that name after an underscore.
        trainer: after its own checks.
        module: before `setup` and `configure_model`.
    """
    settings: dict[str, Any] = {}
    for field in _arguments(type(strategy)):
        for name in (field, f"_{field}"):
            if hasattr(strategy, name):
                settings |= _flat(field, getattr(strategy, name))
                break
    settings |= {f"Trainer.{name}": _plain(getattr(trainer, name)) for name in _TRAINER}
    by_time = private(trainer, "_val_check_time_interval")  # without it `val_check_interval` counts batches
    settings["Trainer.val_check_interval"] = _plain(trainer.val_check_interval if by_time is None else f"{by_time} s")
    callbacks = [callback for callback in vars(trainer)["callbacks"] if isinstance(callback, _COLLECTIVE)]
    settings |= {
        "LightningModule": type(module).__qualname__,
        "Trainer method": trainer.state.fn,
        "Trainer.callbacks": sorted(callback.state_key for callback in callbacks),
        "version of Python": ".".join(platform.python_version_tuple()[:2]),
        "default dtype": str(torch.get_default_dtype()),
        "PL_GLOBAL_SEED": os.environ.get("PL_GLOBAL_SEED"),
        "source of lightning_mm5d": package_digest(),
    }
    settings |= {f"version of {name}": found_version for name in _PACKAGES if (found_version := _version(name))}
    return settings | {f"source of {name}": digest for name, digest in _sources(module).items()}


def structure(module: nn.Module, plan: Plan | None = None) -> dict[str, Any]:
    """Return the classes of all submodules, and full shape, dtype and `requires_grad` of parameters and buffers.

    Args:
        module: as it is on this rank.
        plan: all stages where the module may hold shards; None where it is whole.
    """
    descriptions: dict[str, Any] = {}
    holdings = None if plan is None else Holdings(plan, module)
    for path, part in module.named_modules():
        name = path or "the module"
        descriptions[name] = type(part).__name__
        with suppress(Exception):  # a class of the user's own may not be ready to describe itself
            descriptions[name] = _text(f"{type(part).__name__}({_settings(part, path, holdings)})")
    for name, parameter in module.named_parameters(remove_duplicate=False):
        form = _form(parameter, name, holdings)
        descriptions[name] = f"{form} {'trained' if parameter.requires_grad else 'frozen'}"
    buffers = module.named_buffers(remove_duplicate=False)
    return descriptions | {name: _form(buffer, name, holdings) for name, buffer in buffers}


def layout_fields(
    layout: Layout, modalities: Mapping[str, Modality], schedule: Any, microbatches: int | None, size: int | None
) -> dict[str, Any]:
    """Return a layout as JSON: the number of ranks, the sizes of each modality, and how batches are scheduled."""
    sizes = {name: layout.sizes(name) for name in modalities}
    return {
        "world_size": layout.size,
        "modalities": {
            name: {"dp": axes.dp, "tp": axes.tp, "cp": axes.cp, "pp": axes.pp}
            | ({"pipelines": list(layout.pipelines[name])} if name in layout.pipelines else {})
            for name, axes in sizes.items()
        },
        "schedule": _text(schedule),
        **({"num_microbatches": microbatches} if size is None else {"microbatch_size": size}),
    }


def loader(dataloader: object) -> dict[str, Any]:
    """Return what ranks must agree on in a dataloader: batch size, and how samples are distributed over replicas."""
    fields: dict[str, Any] = {"dataloader": type(dataloader).__name__}
    if isinstance(dataloader, DataLoader):
        fields |= {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
        sampler = dataloader.sampler
        if isinstance(sampler, DistributedSampler):
            fields |= {
                "number of samples": len(dataloader.dataset),  # type: ignore[arg-type]
                "num_replicas": sampler.num_replicas,
                "shuffle": sampler.shuffle,
                "seed of the sampler": sampler.seed,
            }
    return fields


def optimizers(instances: Iterable[Optimizer]) -> dict[str, Any]:
    """Return class and settings of each optimizer's groups."""
    stated: dict[str, Any] = {}
    for number, optimizer in enumerate(instances):
        inner = getattr(optimizer, "optimizer", optimizer)
        stated[f"optimizer {number}"] = type(inner).__name__
        for index, group in enumerate(inner.param_groups):
            name = f"optimizer {number}, group {index}: "
            stated[f"{name}number of parameters"] = len(group["params"])
            stated |= {
                f"{name}{key}": _plain(value) for key, value in group.items() if key not in ("params", "param_names")
            }
    return stated


def _arguments(cls: type) -> list[str]:
    """Return the arguments of the constructors of `cls` and its bases, but those that the trainer sets; no groups."""
    signatures = (inspect.signature(base.__init__).parameters for base in cls.__mro__ if "__init__" in vars(base))  # type: ignore[misc]
    grouped = [name for group in OF_STRATEGY.values() for name in names_of(group)]
    names = dict.fromkeys([*(name for names in signatures for name in names), *grouped])
    return [name for name in names if name not in {*_SET_BY_TRAINER, *OF_STRATEGY}]


def _settings(part: nn.Module, path: str, holdings: Holdings | None) -> str:
    """Return what a module says of itself, with full parameters: some norms name the shape of what this rank holds."""
    held = {name: tensor for name, tensor in part._parameters.items() if tensor is not None and not is_lazy(tensor)}
    if holdings is None:
        return part.extra_repr()
    full = {name: holdings.full_shape(f"{path}.{name}".lstrip("."), tensor.shape) for name, tensor in held.items()}
    try:
        for name, shape in full.items():
            if shape != held[name].shape:
                part._parameters[name] = nn.Parameter(held[name].new_empty(shape, device="meta"), requires_grad=False)
        return part.extra_repr()
    finally:
        part._parameters.update(held)


def _form(tensor: Tensor, name: str = "", holdings: Holdings | None = None) -> str:
    if is_lazy(tensor):
        return "uninitialized"
    shape = tensor.shape if holdings is None else holdings.full_shape(name, tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(shape)}"


def _flat(name: str, value: Any) -> dict[str, Any]:
    """Return the plain values in a field, by path."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {path: leaf for key, inner in value.items() for path, leaf in _flat(f"{name}.{key}", inner).items()}
    if name == "schedule" and is_table(value):
        digest = hashlib.blake2b(table_text(value).encode(), digest_size=4).hexdigest()
        return {name: f"a table with digest {digest}"}
    if any(name in feature.by_rank for feature in FEATURES):
        return {name: "unset" if value is None else "set"}
    return {name: _plain(value)}


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold, and which is equal where values are."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return repr(value)  # JSON has no infinity
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, set | frozenset):  # in an order of its own in each process
        return sorted(str(_plain(inner)) for inner in value)
    if isinstance(value, Tensor):
        return _plain(value.item()) if value.numel() == 1 and not is_remote(value) else _form(value)
    if isinstance(value, Callable | type):  # type: ignore[arg-type]
        return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else type(value).__name__
    return _text(value)


def _text(value: object) -> str:
    """Return what a value says of itself, without addresses and numbers of devices, and with sets in one order."""
    text = _RANK_DEPENDENT.sub("", str(value))
    return _SET.sub(lambda match: f"{{{', '.join(sorted(match[1].split(', ')))}}}", text)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _sources(module: nn.Module) -> dict[str, str]:
    """Return a digest of each file with classes of the user's own, by the class that was found in it first."""
    installed = tuple(sysconfig.get_paths()[key] for key in ("purelib", "platlib", "stdlib"))
    files: dict[str, str] = {}
    classes = dict.fromkeys(cls for part in module.modules() for cls in type(part).__mro__)
    for cls in classes:
        try:
            file = inspect.getsourcefile(cls)
        except (TypeError, OSError):  # built in, or written in a notebook
            continue
        if file is not None and not file.startswith(installed) and Path(file).is_file():
            files.setdefault(file, cls.__name__)
    return {name: _digest([Path(file)]) for file, name in files.items()}


@cache
def package_digest() -> str:
    """Return a digest of this package's files, which are read once in a process."""
    return _digest(sorted(Path(__file__).parents[1].rglob("*.py")))


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=4)
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()
