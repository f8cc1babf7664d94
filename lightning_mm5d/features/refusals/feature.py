"""Refuses code of users that ranks cannot run as one process does, before it would compute something else.

Modules: manual optimization where ranks of a replica cannot run a step together, steps that take batches themselves,
synced batch norms, routers whose outputs cross stages, prefix tuning. Callbacks that work on full parameters.

Refuses a `backward` that takes the norm of gradients where ranks hold parts of the module.

Hooks see the gradients of all ranks. An overridden `LightningModule.backward` sees those of its rank, before ranks sum
them: with another norm on each rank weights drift from those of one process. What the method does is read from its
source and from that of the methods that it calls.

Refuses an `on_fit_start` that changes the parameters of a module, which ranks have shared out before.

Lightning calls it after `Strategy.setup`. A module that resizes embeddings there, or adds tokens or adapters, has then
parameters that no rank holds.

Refuses optimizers whose update of a value depends on others, where ranks hold parts of these.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.optim import Optimizer

from lightning_mm5d.checkpoint.optimizer_state import names_of
from lightning_mm5d.config.errors import ConfigError, RemoteParameterError
from lightning_mm5d.config.groups import path_of, value_of
from lightning_mm5d.features.refusals.optimizer_probe import dependence
from lightning_mm5d.plan.data_shards import DataShards
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.source.names import names
from lightning_mm5d.source.trees import decorated, method_of, tree_of
from lightning_mm5d.trainer.feature import Attached, Feature, Running


class Refusals(Feature):
    """Looks at the module, the callbacks and the optimizers."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._is_split = fields["microbatch_size"] is not None or fields["num_microbatches"] not in (None, 0, 1)

    def check(self, module: pl.LightningModule, plan: Plan, device: torch.device) -> None:
        """Refuse modules that cannot run in stages or shards.

        Raises:
            ConfigError: it optimizes manually, its batch norms are synced, its loss needs routers of sharded layers, it
                takes norms of gradients by itself, or it is tuned by prefixes.
        """
        if not module.automatic_optimization:
            _check_manual(plan)
        if not plan.topology.is_replicated or self._is_split:
            _check_steps(module)
        _check_synced_norms(module, plan)
        _check_norms(module, plan)
        _check_routers(module, plan)
        _check_prefix_tuning(module, plan)

    def check_callbacks(self, callbacks: Sequence[pl.Callback], plan: Plan) -> None:
        """Refuse callbacks that keep a mask of the module's parameters, where ranks hold parts of it."""
        for callback in callbacks:
            if isinstance(callback, ModelPruning) and (plan.division.shards or DataShards(plan).exist):
                raise ConfigError(
                    "callbacks",
                    type(callback).__name__,
                    "It works on full parameters, and ranks that share them have parts of each",
                    "Leave it out, or use tp_size=1 and zero_stage=0",
                )
            if isinstance(callback, ModelPruning) and (not plan.topology.is_replicated or DataShards(plan).exist):
                raise ConfigError(
                    "callbacks",
                    type(callback).__name__,
                    "It reads all parameters on every rank, and ranks hold parts of them",
                    "Leave it out, or use one stage (colocate all modalities, pp_size=1) and zero_stage=0",
                )

    def attach(self, running: Running) -> Attached | None:
        """Refuse optimizers of a fit, and have its `on_fit_start` watched."""
        if running.trainer.state.fn != TrainerFn.FITTING:
            return None
        check_optimizers(running)
        if running.is_plain or not is_overridden("on_fit_start", running.module):
            return None
        attached = Attached()
        attached.put_attribute(running.module, "on_fit_start", _watched_fit_start(running.module))
        return attached


def _watched_fit_start(module: pl.LightningModule) -> Callable[[], None]:
    """Return the module's `on_fit_start` with a check of the parameters around it.

    Raises:
        ConfigError: from the hook, when it replaces, adds or removes parameters, or reads those of other ranks.
    """
    hook = module.on_fit_start
    before = _parameters(module)

    @functools.wraps(hook)
    def watched() -> None:
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

    return watched


def _parameters(module: pl.LightningModule) -> dict[str, int]:
    return {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}


_CLIPS = {"clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm"}
_NORMS = {"norm", "vector_norm", "_foreach_norm"}


def _check_norms(module: pl.LightningModule, plan: Plan) -> None:
    """Refuse a module whose `backward`, or manual step, takes a norm of gradients of one rank alone.

    Raises:
        ConfigError: where ranks hold several stages, shards or rows.
    """
    parts = plan.division.shards or DataShards(plan).exist
    if plan.topology.is_replicated and not parts:
        return
    if found := _norm_in(type(module), "backward"):
        raise ConfigError(
            f"{type(module).__name__}.backward",
            found,
            "It takes the norm of the gradients of one rank, before they are summed over ranks",
            "Do it in on_after_backward or on_before_optimizer_step, which see full gradients",
        )
    if not module.automatic_optimization and (found := _norm_in(type(module), "training_step")):
        raise ConfigError(
            f"{type(module).__name__}.training_step",
            found,
            "A step that optimizes manually has the gradients of its rank's own layers or shards, and takes their norm",
            "Clip by self.clip_gradients(optimizer, ...), or use automatic optimization, or one stage without tp_size",
        )


def _norm_in(cls: type, hook: str) -> str:
    """Return the name of what takes a norm in a hook, "" where nothing does or where its source is unknown."""
    for function in _called(cls, hook):
        named = names(function, variables=False) or frozenset()
        for name in sorted(named):
            if name in _CLIPS or (name == "grad_norm" and "strategy" not in named and _is_lightnings(function)):
                return name
        if "grad" in named and _reads_gradients(function) and _calls_norm(function):
            return "the norm of .grad"
    return ""


def _called(cls: type, hook: str) -> Iterator[FunctionType]:
    """Yield the functions of a hook, and those that it names: methods of the same class, and functions beside it."""
    waiting, seen = [getattr(cls, hook, None)], set[Any]()
    while waiting:
        for function in decorated(waiting.pop()):
            if function in seen or function.__module__.startswith(("lightning.", "torch.")):
                continue
            seen.add(function)
            yield function
            named = names(function, variables=False) or frozenset()
            waiting += [method_of(cls, name) or function.__globals__.get(name) for name in named]


def _calls_norm(function: FunctionType) -> bool:
    tree = tree_of(function)
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)] if tree is not None else []
    return any(isinstance(call, ast.Attribute) and call.attr in _NORMS for call in calls)


def _reads_gradients(function: FunctionType) -> bool:
    """Whether a function reads `.grad` of something, which ``torch.autograd.grad`` is not."""
    tree = tree_of(function)
    reads = (
        [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "grad"]
        if tree
        else []
    )
    return any("autograd" not in (getattr(one, "attr", ""), getattr(one, "id", "")) for one in reads)


def _is_lightnings(function: FunctionType) -> bool:
    return function.__globals__.get("grad_norm", grad_norm) is grad_norm


def _check_manual(plan: Plan) -> None:
    """Refuse manual optimization where ranks of a replica cannot run one step together."""
    layout, said = plan.layout, "automatic_optimization"
    rule = "The ranks of a replica run a step of manual optimization together, and "
    for name, modality in plan.modalities.items():
        splits = modality.cp_size > 1 or modality.tensor.sequence_parallel
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


def _check_steps(module: pl.LightningModule) -> None:
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


def _check_routers(module: nn.Module, plan: Plan) -> None:
    """Refuse a loss that needs what routers return in other stages."""
    configs = [getattr(part, "config", None) for part in module.modules()]
    if any(getattr(config, "output_router_logits", False) is True for config in configs):
        for name, axes in plan.layout.axes.items():
            field = "cp_size" if axes.cp > 1 else "sequence_parallel"
            said = value_of(plan.modalities[name], field)
            if axes.pp > 1 and said not in (1, False):
                raise ConfigError(
                    f"modalities.{name}.{path_of(field)}",
                    said,
                    "What the routers of some tokens return does not cross from stage to stage (output_router_logits)",
                    f"Leave {field} unset, use pp_size=1, or set output_router_logits to False in the model's config",
                )


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
            raise ConfigError(
                f"modalities.{plan.partition.loss_modality}.{field}",
                size,
                "Prefix tuning (peft.PrefixTuningConfig) has keys and values for all heads of all layers in one table",
                "Use 1, or peft.LoraConfig in its place",
            )


# by name, where one cannot be tried
_OVER_FULL_MATRICES = {
    "Adafactor",
    "LBFGS",
    "Muon",
    "Lamb",
    "LAMB",
    "Lars",
    "LARS",
    "Shampoo",
    "SOAP",
    "Adalomo",
    "LOMO",
}
_TORCH = {
    cls.__module__ for cls in (torch.optim.LBFGS, torch.optim.SparseAdam)
}  # which need a closure, or sparse values


def check_optimizers(running: Running) -> None:
    """Refuse optimizers that would do something else on parts of parameters.

    Raises:
        ConfigError: one whose update of a parameter depends on others, with several stages; one whose update of an
            element depends on others, with sharded parameters.
    """
    plan, optimizers = running.plan, running.trainer.optimizers
    edges, shards = plan.topology.edges, plan.division.shards
    shares = bool(running.shared.all)
    for optimizer in optimizers:
        inner = getattr(optimizer, "optimizer", optimizer)
        _check_sparse(inner, running.module, plan)
        tried = dependence(inner) if edges or shards or shares else None
        names = {cls.__name__ for cls in type(inner).__mro__}
        mixes = tried.on_parameters if tried else "LBFGS" in names
        is_known = tried or not names.isdisjoint(_OVER_FULL_MATRICES) or type(inner).__module__ in _TORCH
        if (edges or shards or shares) and not is_known:
            rank_zero_warn(
                f"{type(inner).__name__} could not be tried on small parameters: where ranks hold parts of the "
                "module, it is right only if its update of a parameter depends on no other, and with tp_size or "
                "zero_stage its update of an element on no other. Compare its losses with those of one process",
                stacklevel=7,
            )
        if edges and mixes:
            raise ConfigError(
                "configure_optimizers",
                type(inner).__name__,
                "Its update of a parameter depends on all others, and ranks of several stages hold parts of them",
                "Use an optimizer that works by parameter, such as AdamW, or one stage (colocate all, pp_size=1)",
            )
        mixes = mixes or (tried.on_elements if tried else not names.isdisjoint(_OVER_FULL_MATRICES))
        if (shards or shares) and mixes:
            ranks = "tensor parallel ranks" if shards else "ranks that share a copy"
            raise ConfigError(
                "configure_optimizers",
                type(inner).__name__,
                f"Its update of an element depends on the full matrix, and {ranks} have parts of it",
                f"Use an optimizer that works by element, such as AdamW, or {'tp_size=1' if shards else ''}"
                f"{' and ' if shards and shares else ''}{'zero_stage=0' if shares else ''}",
            )


def _check_sparse(optimizer: Optimizer, module: pl.LightningModule, plan: Plan) -> None:
    """Refuse an optimizer of sparse gradients where ranks sum gradients, which makes them dense."""
    if not isinstance(optimizer, torch.optim.SparseAdam):
        return
    known = names_of(module)
    names = (known.get(id(one), "") for group in optimizer.param_groups for one in group["params"])
    names = (name for name in names if name in plan.partition.owners and len(plan.ownership.ranks_holding(name)) > 1)
    if name := next(names, None):
        raise ConfigError(
            "configure_optimizers",
            type(optimizer).__name__,
            f"It takes sparse gradients alone, and ranks sum dense gradients of {name}",
            "Use an optimizer of dense gradients, such as AdamW, or one replica and one tensor parallel rank",
        )


FEATURE = Refusals
