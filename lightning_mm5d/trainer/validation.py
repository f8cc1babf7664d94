"""Checks of a configuration against a module and its data, before any process is started.

Checks that need only the configuration are in `config.checks` and `layout`. This module refuses manual optimization
where a schedule runs, losses that need all layers on one rank, callbacks that save a copy of the module, and batches
that are too small to be split.

Refuses a `backward` that takes the norm of gradients where ranks hold parts of the module.

Hooks see the gradients of all ranks. An overridden `LightningModule.backward` sees those of its rank, before ranks sum
them: with another norm on each rank weights drift from those of one process. What the method does is read from its
source and from that of the methods that it calls.

Refuses an `on_fit_start` that changes the parameters of a module, which ranks have shared out before.

Lightning calls it after `Strategy.setup`. A module that resizes embeddings there, or adds tokens or adapters, has then
parameters that no rank holds.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.utils.data import DataLoader

from lightning_mm5d.config.errors import ConfigError, RemoteParameterError
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.plan.data_shards import DataShards
from lightning_mm5d.plan.issued import check_messages
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import Graph, Schedule, build, is_table
from lightning_mm5d.source.names import names
from lightning_mm5d.source.trees import Source, decorated, method_of
from lightning_mm5d.trainer.sharing_guards import check_shared


def watch_fit_start(module: pl.LightningModule) -> None:
    """Check the module's parameters around its `on_fit_start`, once.

    Raises:
        ConfigError: from the hook, when it replaces, adds or removes parameters, or reads those of other ranks.
    """
    hook = module.on_fit_start
    before = _parameters(module)

    @functools.wraps(hook)
    def watched() -> None:
        vars(module).pop("on_fit_start", None)
        cause: RemoteParameterError | None = None
        try:
            hook()
        except RemoteParameterError as error:
            cause = error
        after = _parameters(module)
        changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        if cause is not None or changed:
            rule = "Ranks share the parameters out before on_fit_start, so it cannot resize, add or replace them"
            got = f"other parameters than before: {', '.join(changed[:4])}" if changed else "parameters of other ranks"
            fix = "Do it in configure_model, or in __init__ (resize_token_embeddings, added tokens and adapters too)"
            raise ConfigError("on_fit_start", got, rule, fix) from cause

    vars(module)["on_fit_start"] = watched


def _parameters(module: pl.LightningModule) -> dict[str, int]:
    return {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}


_CLIPS = {"clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm"}
_NORMS = {"norm", "vector_norm", "_foreach_norm"}


def check_norms(module: pl.LightningModule, plan: Plan) -> None:
    """Refuse a module whose `backward` takes a norm of gradients of one rank alone.

    Raises:
        ConfigError: where ranks hold several stages, shards or rows.
    """
    parts = plan.division.shards or DataShards(plan).exist
    if plan.topology.is_replicated and not parts:
        return
    if found := _norm_in(Source(), type(module), "backward"):
        rule = "It takes the norm of the gradients of one rank, before they are summed over ranks"
        fix = "Do it in on_after_backward or on_before_optimizer_step, which see full gradients"
        raise ConfigError(f"{type(module).__name__}.backward", found, rule, fix)


def _norm_in(source: Source, cls: type, hook: str) -> str:
    """Return the name of what takes a norm in a hook, "" where nothing does or where its source is unknown."""
    for function in _called(source, cls, hook):
        named = names(source, function, variables=False) or frozenset()
        for name in sorted(named):
            if name in _CLIPS or (name == "grad_norm" and "strategy" not in named and _is_lightnings(function)):
                return name
        if "grad" in named and _calls_norm(source, function):
            return "the norm of .grad"
    return ""


def _called(source: Source, cls: type, hook: str) -> Iterator[FunctionType]:
    """Yield the functions of a hook, and those that it names: methods of the same class, and functions beside it."""
    waiting, seen = [getattr(cls, hook, None)], set[Any]()
    while waiting:
        for function in decorated(waiting.pop()):
            if function in seen or function.__module__.startswith(("lightning.", "torch.")):
                continue
            seen.add(function)
            yield function
            named = names(source, function, variables=False) or frozenset()
            waiting += [method_of(cls, name) or function.__globals__.get(name) for name in named]


def _calls_norm(source: Source, function: FunctionType) -> bool:
    tree = source.tree(function)
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)] if tree is not None else []
    return any(isinstance(call, ast.Attribute) and call.attr in _NORMS for call in calls)


def _is_lightnings(function: FunctionType) -> bool:
    return function.__globals__.get("grad_norm", grad_norm) is grad_norm


T = TypeVar("T")


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
    """Refuse modules that cannot run in stages, and a user's own schedule that does not fit them.

    Raises:
        ConfigError: it optimizes manually, its batch norms are synced, its loss needs routers of sharded layers, it
            takes norms of gradients by itself, or it is tuned by prefixes, and the layout has several stages or shards.
        ScheduleError: the schedule is not one of the stages of this module.
    """
    if callable(schedule) or is_table(schedule):
        assert num_microbatches is not None
        build(schedule, plan.graphs.full_graph(schedule, num_microbatches, module))
        named = module.named_parameters(remove_duplicate=False)
        check_messages(plan, schedule, num_microbatches, frozenset(name for name, p in named if p.requires_grad))
    if not module.automatic_optimization:
        _check_manual(plan)
    if not plan.topology.is_replicated or num_microbatches != 1:
        check_steps(module)
    _check_synced_norms(module, plan)
    check_norms(module, plan)
    check_shared(module, plan)
    configs = [getattr(part, "config", None) for part in module.modules()]
    if any(getattr(config, "output_router_logits", False) is True for config in configs):
        for name, axes in plan.layout.axes.items():
            field = "cp_size" if axes.cp > 1 else "sequence_parallel"
            if axes.pp > 1 and getattr(plan.modalities[name], field) not in (1, False):
                rule = (
                    "What the routers of some tokens return does not cross from stage to stage (output_router_logits)"
                )
                fix = f"Leave {field} unset, use pp_size=1, or set output_router_logits to False in the model's config"
                raise ConfigError(f"modalities.{name}.{field}", getattr(plan.modalities[name], field), rule, fix)
    _check_prefix_tuning(module, plan)


def _check_manual(plan: Plan) -> None:
    """Refuse manual optimization where ranks of a replica cannot run one step together."""
    layout, said = plan.layout, "automatic_optimization"
    rule = "The ranks of a replica run a step of manual optimization together, and "
    for name, modality in plan.modalities.items():
        splits = modality.cp_size > 1 or modality.sequence_parallel
        if splits and layout.axes[name].cp * layout.axes[name].tp > 1:
            fix = f"Use automatic optimization, or tp_size alone for {name!r}"
            raise ConfigError(said, False, f"{rule}those of {name!r} have parts of its sequences", fix)
    shared = next((rank for rank in range(layout.size) if len(layout.replicas_of_rank(rank)) > 1), None)
    if shared is not None:
        rule += f"rank {shared} works for the replicas {list(layout.replicas_of_rank(shared))}"
        fix = f"Use automatic optimization, or dp_size={layout.num_replicas} for every modality"
        raise ConfigError(said, False, rule, fix)
    if layout.deals and layout.num_replicas > 1:
        fix = "Use automatic optimization, or neither pipelines nor speeds"
        raise ConfigError(said, False, f"{rule}replicas have unlike numbers of samples", fix)


def check_steps(module: pl.LightningModule) -> None:
    """Refuse steps that take batches from the dataloader by themselves, which a schedule must split first."""
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        if is_param_in_hook_signature(getattr(module, name), "dataloader_iter", explicit=True):
            rule = "Batches are split into microbatches before a step is called, and it would take them unsplit"
            raise ConfigError(name, "dataloader_iter", rule, f"Use {name}(self, batch, batch_idx)")


def _check_synced_norms(module: nn.Module, plan: Plan) -> None:
    """Refuse norms that wait for all ranks in each forward, where ranks run unlike forwards."""
    if plan.topology.is_replicated and not plan.layout.deals:
        return
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            rule = "Each of its forwards waits for all ranks, which run unlike stages or numbers of microbatches"
            raise ConfigError(name, "SyncBatchNorm", rule, "Use BatchNorm, with the statistics of each microbatch")


def _check_prefix_tuning(module: pl.LightningModule, plan: Plan) -> None:
    """Refuse prefix tuning by PEFT, whose one table holds keys and values for the full heads of all layers."""
    found = (getattr(part, "peft_config", None) for part in module.modules())
    adapters = [config for configs in found if isinstance(configs, dict) for config in configs.values()]
    kinds = {str(getattr(config, "peft_type", "")) for config in adapters}
    if not any(kind.rpartition(".")[2] == "PREFIX_TUNING" for kind in kinds):
        return
    axes = plan.layout.axes[plan.partition.loss_modality]
    for field, size in (("pp_size", axes.pp), ("tp_size", axes.tp), ("cp_size", axes.cp)):
        if size > 1:
            rule = (
                "Prefix tuning (peft.PrefixTuningConfig) has keys and values for all heads of all layers in one table"
            )
            fix = "Use 1, or peft.LoraConfig in its place"
            raise ConfigError(f"modalities.{plan.partition.loss_modality}.{field}", size, rule, fix)


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
            raise ConfigError("process_group_backend", backend, rule, f"Use {fix}, or leave it unset")
    if backend is not None and backend.lower() == "nccl" and device.type == "cpu":
        rule = "NCCL carries tensors of NVIDIA GPUs, and the trainer has CPUs"
        raise ConfigError("process_group_backend", backend, rule, "Use 'gloo', or leave it unset")


def check_callbacks(callbacks: Sequence[pl.Callback], plan: Plan) -> None:
    """Refuse callbacks that keep a copy of the module, or a mask of its parameters, where ranks hold parts of it.

    Raises:
        ConfigError: `ModelPruning` with several stages, tensor parallelism or `zero_stage`.
    """
    for callback in callbacks:
        if isinstance(callback, ModelPruning) and (plan.division.shards or DataShards(plan).exist):
            rule = "It works on full parameters, and ranks that share them have parts of each"
            fix = "Leave it out, or use tp_size=1 and zero_stage=0"
            raise ConfigError("callbacks", type(callback).__name__, rule, fix)
        if isinstance(callback, ModelPruning) and (not plan.topology.is_replicated or DataShards(plan).exist):
            rule = "It reads all parameters on every rank, and ranks hold parts of them"
            fix = "Leave it out, or use one stage (colocate all modalities, pp_size=1) and zero_stage=0"
            raise ConfigError("callbacks", type(callback).__name__, rule, fix)


def required(value: T | None, method: str, rule: str, fix: str) -> T:
    """Return `value`, which a method of the strategy needs.

    Raises:
        ConfigError: it is None, because the method is called at another time than it is for.
    """
    if value is None:
        raise ConfigError(f"strategy.{method}", None, rule, fix)
    return value


def lost_weights() -> ConfigError:
    """Return the error for a module that a failed run has left without the weights of other ranks."""
    return ConfigError(
        "module",
        "parts of its weights",
        "A run that fails leaves each rank with its own part of the module, because nobody is left to send the others",
        "Make a new module, and give trainer.fit the ckpt_path of the last checkpoint",
    )


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
            rule = f"A batch of {size} samples cannot be split into more than {size} microbatches"
            raise ConfigError("num_microbatches", num_microbatches, rule, f"Use {size} or fewer, or larger batches")
