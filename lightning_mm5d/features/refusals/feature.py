"""Refuses code of users that ranks cannot run as one process does, before it would compute something else.

Modules: manual optimization where ranks of a replica cannot run a step together, steps that take batches themselves,
synced batch norms, routers whose outputs cross stages, prefix tuning, parameters that share memory with other tensors
(weights tied by `.data`). Callbacks that work on full parameters.

Refuses a `backward`, and a manual step, that make numbers of gradients (norms) where ranks hold parts of the module.

Hooks see the gradients of all ranks. An overridden `LightningModule.backward` sees those of its rank, before ranks sum
them: with another norm on each rank weights drift from those of one process. What the method does is read from its
source and from that of the methods that it calls.

Refuses an `on_fit_start` that changes the parameters of a module, which ranks have shared out before.

Lightning calls it after `Strategy.setup`. A module that resizes embeddings there, or adds tokens or adapters, has then
parameters that no rank holds.

Refuses optimizers whose update of a value depends on others, where ranks hold parts of these, and optimizers with steps
of another name that take norms of gradients (SAM).

**Optimizers** are tried out. Whether an optimizer's update of a value depends on other values: tried out on small
parameters of the same class. Ranks hold parts of the parameters, with stages, or parts of each, with tensor
parallelism. An optimizer that looks at others, such as a norm over all gradients, would do something else on each rank
without a word. A new optimizer of the same class takes a few steps on two matrices, then again with other gradients for
one part; what moves elsewhere shows. Where its constructor takes other arguments, a copy of the optimizer takes these
steps. An optimizer around others (lookahead, averaging) depends on what any of them depends on.

It does not try one that needs a closure, or keeps tensors or modules outside of its groups and state.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import io
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from types import FunctionType
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_mm5d.checkpoint.optimizer_state import names_of
from lightning_mm5d.config.errors import ConfigError, RemoteParameterError
from lightning_mm5d.config.groups import path_of, value_of
from lightning_mm5d.data.random_state import CPU, kept_random_state, seed_all
from lightning_mm5d.plan.holdings import DataShards
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.remote_value import is_remote
from lightning_mm5d.source.trees import decorated, method_of, names, tree_of
from lightning_mm5d.trainer.feature import Attached, Feature, Running
from lightning_mm5d.trainer.kept_values import memory_kept

_SIZE, _STEPS = 72, 4  # optimizers of 8 bits leave tensors of up to 4096 elements as they are
_OURS = ("params", "param_names")


class Dependence(NamedTuple):
    """What an update depends on.

    Attributes:
        on_parameters: whether on gradients of other parameters.
        on_elements: whether on gradients of other elements of the same parameter.
    """

    on_parameters: bool
    on_elements: bool


def dependence(optimizer: Optimizer) -> Dependence | None:
    """Return what the updates of an optimizer of this class and settings depend on; None where it cannot be tried."""
    inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer) and value is not optimizer]
    tried = [_tried(part) for part in (optimizer, *inner)]
    known = [trial for trial in tried if trial is not None]
    # what one part is found to depend on holds, whatever the others do
    if not known or (len(known) < len(tried) and not any(map(any, known))):
        return None
    return Dependence(any(trial.on_parameters for trial in known), any(trial.on_elements for trial in known))


def remade(optimizer: Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]) -> Optimizer | None:
    """Return an optimizer of the same class with other parameters and the settings of `group`, without state.

    None where neither its constructor nor a copy of it takes them.
    """
    for make in (_new, _copied):
        try:
            with redirect_stdout(io.StringIO()):
                return make(optimizer, group, parameters)
        except Exception:  # whatever a class of somebody else's does with what it did not expect
            continue
    return None


def _tried(optimizer: Optimizer) -> Dependence | None:
    groups: list[Mapping[str, Any]] = []
    for group in optimizer.param_groups:
        if not any(_same_settings(group, other) for other in groups):
            groups.append(group)
    for make in (_new, _copied):
        try:
            with kept_random_state(CPU), redirect_stdout(io.StringIO()):
                tries = [_of_group(make, optimizer, group) for group in groups]
        except Exception:  # whatever a class of somebody else's does with what it did not expect
            continue
        return Dependence(any(trial.on_parameters for trial in tries), any(trial.on_elements for trial in tries))
    return None


def _same_settings(group: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    keys = (group.keys() | other.keys()) - set(_OURS)
    return all(key in group and key in other and group[key] is other[key] for key in keys)


def _of_group(make: Callable[..., Optimizer], optimizer: Optimizer, group: Mapping[str, Any]) -> Dependence:
    half = _SIZE // 2

    def updated(change: Callable[[list[Tensor]], Any]) -> list[Tensor]:
        return _updated(lambda parameters: make(optimizer, group, parameters), change)

    before = updated(lambda grads: grads)
    other = updated(lambda grads: grads[1].mul_(1000).add_(1))
    right = updated(lambda grads: grads[0][:, half:].mul_(1000).add_(1))
    below = updated(lambda grads: grads[0][half:].mul_(1000).add_(1))
    return Dependence(
        on_parameters=not torch.equal(before[0], other[0]),
        on_elements=not torch.equal(before[0][:, :half], right[0][:, :half])
        or not torch.equal(before[0][:half], below[0][:half]),
    )


def _updated(make: Callable[[list[nn.Parameter]], Optimizer], change: Callable[[list[Tensor]], Any]) -> list[Tensor]:
    """Return two matrices after some steps of a new optimizer with gradients as `change` leaves them."""
    generator = torch.Generator().manual_seed(0)

    def matrices() -> list[Tensor]:
        return [torch.randn(_SIZE, _SIZE, generator=generator) for _ in range(2)]

    parameters = [nn.Parameter(matrix) for matrix in matrices()]
    seed_all(0)
    probe = make(parameters)
    if callable(train := getattr(probe, "train", None)):  # those without a schedule of their own step in this mode only
        train()
    with torch.enable_grad():
        for _ in range(_STEPS):
            grads = matrices()
            change(grads)
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            probe.step()
    return [parameter.detach() for parameter in parameters]


def _new(optimizer: Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """Return a new optimizer of the same class, with the settings of `group`, on the CPU."""
    known = inspect.signature(type(optimizer).__init__).parameters
    settings = _settings(group)
    defaults = {key: settings.get(key, value) for key, value in optimizer.defaults.items() if key in known}
    return type(optimizer)([{**settings, "params": parameters}], **defaults)


def _copied(optimizer: Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """Return a copy of an optimizer with other parameters, without state and hooks."""
    probe = copy.copy(optimizer)  # of what torch's own state holds
    attrs = {name: value for name, value in vars(optimizer).items() if name not in vars(probe)}
    # a scheduler puts a `step` in front that belongs to the original
    attrs = {name: value for name, value in attrs.items() if not (callable(value) and hasattr(type(optimizer), name))}
    _check_plain(attrs)
    group = {**_settings(group), "params": parameters}
    vars(probe).update(copy.deepcopy(attrs), state=defaultdict(dict), param_groups=[group])
    return probe


def _check_plain(value: Any) -> None:
    """Refuse values that may hold a part of the model, whose copy would be large or would change it.

    Raises:
        TypeError: it holds something other than plain values in containers, functions and classes.
    """
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        for element in value:
            _check_plain(element)
    elif not isinstance(value, bool | int | float | str | FunctionType | type | torch.dtype | torch.device | None):
        raise TypeError


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    settings = {key: value for key, value in group.items() if key not in _OURS}
    # implementations for a device or a graph update the same, and a warm-up may begin with nothing
    settings |= {key: False for key in ("fused", "capturable") if settings.get(key)}
    if "lr" in settings and (isinstance(settings["lr"], Tensor) or settings["lr"] == 0):
        settings["lr"] = 0.1
    return settings


class Refusals(Feature):
    """Looks at the module, the callbacks and the optimizers."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._is_split = fields["microbatch_size"] is not None or fields["num_microbatches"] not in (None, 0, 1)

    def check(self, module: pl.LightningModule, plan: Plan, device: torch.device) -> None:
        """Refuse modules that cannot run in stages or shards.

        Raises:
            ConfigError: it optimizes manually, its batch norms are synced, its loss needs routers of sharded layers, it
                takes norms of gradients by itself, it is tuned by prefixes, or tensors of other ranks share memory.
        """
        if not module.automatic_optimization:
            _check_manual(plan)
        if not plan.topology.is_replicated or self._is_split:
            _check_steps(module)
        _check_synced_norms(module, plan)
        _check_norms(module, plan)
        _check_routers(module, plan)
        _check_prefix_tuning(module, plan)
        _check_memory(module, plan, device)

    def check_callbacks(self, callbacks: Sequence[pl.Callback], plan: Plan) -> None:
        """Refuse callbacks that keep a mask of the module's parameters, where ranks hold parts of it."""
        for callback in callbacks:
            if isinstance(callback, ModelPruning) and (plan.division.shards or DataShards(plan).exist):
                rule = "It works on full parameters, and ranks that share them have parts of each"
                fix = "Leave it out, or use tp_size=1 and zero_stage=0"
                raise ConfigError("callbacks", type(callback).__name__, rule, fix)
            if isinstance(callback, ModelPruning) and not plan.topology.is_replicated:
                rule = "It reads all parameters on every rank, and ranks hold parts of them"
                fix = "Leave it out, or use one stage (colocate all modalities, pp_size=1) and zero_stage=0"
                raise ConfigError("callbacks", type(callback).__name__, rule, fix)

    def attach(self, running: Running) -> Attached | None:
        """Refuse optimizers of a fit, and have its `on_fit_start` watched."""
        if running.trainer.state.fn != TrainerFn.FITTING:
            return None
        check_optimizers(running)
        _check_renormed(running.module, running.plan)
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
_REDUCING = {"norm", "vector_norm", "_foreach_norm", "sum", "mean", "max", "min", "amax", "amin", "any", "all", "prod"}
_REDUCING |= {"dot", "vdot", "inner", "std", "var", "cosine_similarity", "item"}
_ADDING = {"append", "extend"}


def _check_norms(module: pl.LightningModule, plan: Plan) -> None:
    """Refuse a module whose `backward`, or manual step, makes numbers (norms) of gradients of one rank alone.

    Raises:
        ConfigError: where ranks hold several stages, shards or rows.
    """
    parts = plan.division.shards or DataShards(plan).exist
    if plan.topology.is_replicated and not parts:
        return
    if norm := _norm_in(type(module), "backward"):
        rule = "It makes a number of the gradients of one rank, before they are summed over ranks"
        fix = "Do it in on_after_backward or on_before_optimizer_step, which see full gradients"
        raise ConfigError(f"{type(module).__name__}.backward", norm, rule, fix)
    if not module.automatic_optimization and (norm := _norm_in(type(module), "training_step")):
        rule = (
            "A step that optimizes manually has gradients of its rank's own layers or shards, and makes numbers of them"
        )
        fix = "Clip by self.clip_gradients(optimizer, ...), or use automatic optimization, or one stage without tp_size"
        raise ConfigError(f"{type(module).__name__}.training_step", norm, rule, fix)


def _norm_in(cls: type, hook: str) -> str:
    """Return the name of what makes a number of gradients in a hook, "" where nothing does or no source is known."""
    for function in _called(cls, hook):
        named = names(function, variables=False) or frozenset()
        for name in sorted(named):
            if name in _CLIPS or (name == "grad_norm" and "strategy" not in named and _is_lightnings(function)):
                return name
        if "grad" in named and (reduction := _reduction_of_gradients(function)):
            return f"{reduction}() of .grad"
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


def _reduction_of_gradients(function: FunctionType) -> str:
    """Return what makes numbers of `.grad` of something in a function, which may give it names meanwhile; else ""."""
    tree, derived = tree_of(function), set[str]()
    nodes = [*ast.walk(tree)] if tree is not None else []

    def is_derived(node: ast.AST) -> bool:
        reads = (part.value for part in ast.walk(node) if isinstance(part, ast.Attribute) and part.attr == "grad")
        reads_grad = any("autograd" not in (getattr(owner, "attr", ""), getattr(owner, "id", "")) for owner in reads)
        return reads_grad or not derived.isdisjoint(_names_in(node))

    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    assigned = [(node.value or node, node.targets) for node in nodes if isinstance(node, ast.Assign)]
    assigned += [(node.iter, [node.target]) for node in nodes if isinstance(node, ast.For | ast.comprehension)]
    assigned += [(call, [call.func]) for call in calls if getattr(call.func, "attr", "") in _ADDING]
    for _ in assigned:  # a name may be given to what an earlier pass has found
        derived.update(
            name for value, targets in assigned if is_derived(value) for target in targets for name in _names_in(target)
        )
        derived.discard("self")
    return next((call.func.attr for call in calls if call.func.attr in _REDUCING and is_derived(call)), "")  # type: ignore


def _names_in(node: ast.AST) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}


def _is_lightnings(function: FunctionType) -> bool:
    return function.__globals__.get("grad_norm", grad_norm) is grad_norm


def _check_manual(plan: Plan) -> None:
    """Refuse manual optimization where ranks of a replica cannot run one step together."""
    layout, field = plan.layout, "automatic_optimization"
    rule = "The ranks of a replica run a step of manual optimization together, and "
    for name, modality in plan.modalities.items():
        splits = modality.cp_size > 1 or modality.tensor.sequence_parallel
        if splits and layout.axes[name].cp * layout.axes[name].tp > 1:
            fix = f"Use automatic optimization, or tp_size alone for {name!r}"
            raise ConfigError(field, False, f"{rule}those of {name!r} have parts of its sequences", fix)
    shared = next((rank for rank in range(layout.size) if len(layout.replicas_of_rank(rank)) > 1), None)
    if shared is not None:
        rule += f"rank {shared} works for the replicas {list(layout.replicas_of_rank(shared))}"
        fix = f"Use automatic optimization, or dp_size={layout.num_replicas} for every modality"
        raise ConfigError(field, False, rule, fix)
    if layout.deals and layout.num_replicas > 1:
        fix = "Use automatic optimization, or neither pipelines nor speeds"
        raise ConfigError(field, False, f"{rule}replicas have unlike numbers of samples", fix)


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


def _check_renormed(module: nn.Module, plan: Plan) -> None:
    """Refuse trained embeddings that change the rows that a batch reads, where ranks with copies read unlike rows."""
    tables = {name: part for name, part in module.named_modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag))}
    for name, table in tables.items():
        stages = {plan.topology.stage_of[key] for key in plan.partition.owners.get(f"{name}.weight", ())}
        copies = [len(plan.topology.instances(key)) * plan.layout.axes[key.modality].cp for key in stages]
        if table.max_norm is not None and table.weight.requires_grad and max(copies, default=1) > 1:
            rule = "A replica renormalises the rows that it reads alone, so that weights of replicas drift apart"
            fix = "Leave it out and call embedding.weight.renorm_(2, 0, max_norm) under no_grad in a hook"
            raise ConfigError(f"{name}.max_norm", table.max_norm, rule, fix)


def _check_routers(module: nn.Module, plan: Plan) -> None:
    """Refuse a loss that needs what routers return in other stages."""
    configs = [getattr(part, "config", None) for part in module.modules()]
    if any(getattr(config, "output_router_logits", False) is True for config in configs):
        for name, axes in plan.layout.axes.items():
            field = "cp_size" if axes.cp > 1 else "sequence_parallel"
            setting = value_of(plan.modalities[name], field)
            if axes.pp > 1 and setting not in (1, False):
                rule = (
                    "What the routers of some tokens return does not cross from stage to stage (output_router_logits)"
                )
                fix = f"Leave {field} unset, use pp_size=1, or set output_router_logits to False in the model's config"
                raise ConfigError(f"modalities.{name}.{path_of(field)}", setting, rule, fix)


def _check_prefix_tuning(module: pl.LightningModule, plan: Plan) -> None:
    """Refuse prefix tuning by PEFT, whose one table holds keys and values for the full heads of all layers."""
    peft_configs = (getattr(part, "peft_config", None) for part in module.modules())
    adapters = [config for configs in peft_configs if isinstance(configs, dict) for config in configs.values()]
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


def _check_memory(module: pl.LightningModule, plan: Plan, device: torch.device) -> None:
    """Refuse a parameter in the memory of another tensor, where ranks would have it in memory of its own.

    Such tensors are parameters, buffers, and what attributes of modules hold (``self.old = weight.data``).

    The update of one is the other's too on one process. A move to another device separates them there as well.
    """
    shards, world = DataShards(plan), tuple(range(plan.layout.size))

    def holders(name: str) -> Any:
        """The ranks that have full tensors of a name in the module's own memory; None where no rank has."""
        if name not in plan.partition.owners:
            return world
        ranks = plan.ownership.ranks_holding(name)
        is_cut = name in plan.division.shards or any(shards.of(name, rank) for rank in ranks)
        return None if is_cut else ranks

    named = [*module.named_parameters(), *module.named_buffers()]
    named += [(f"self.{key}", tensor) for key, tensor in memory_kept(module)]
    placed = [(*_span(tensor), name, tensor) for name, tensor in named if tensor.device.type == device.type]
    before: Any = None
    for start, stop, name, tensor in sorted((span for span in placed if span[0]), key=lambda span: span[:3]):
        if before is not None and start < before[1] and (tensor.requires_grad or before[3].requires_grad):
            is_beside = start != before[0] and not (tensor.is_contiguous() or before[3].is_contiguous())
            if not is_beside and (holders(name) is None or holders(name) != holders(before[2])):
                rule = "They are two tensors in one memory, which each rank's part of the module would separate"
                fix = (
                    "Tie weights as one nn.Parameter (self.a.weight = self.b.weight), or give one a copy (.clone()); "
                    "where a tensor is to follow a weight, keep the parameter itself"
                )
                raise ConfigError(name, f"the memory of {before[2]}", rule, fix)
        if before is None or stop > before[1]:
            before = (start, stop, name, tensor)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of a tensor and the one after its last, or zeros where it has no memory here."""
    if is_lazy(tensor) or is_remote(tensor) or tensor.layout != torch.strided or not tensor.numel():
        return 0, 0
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (extent + 1) * tensor.element_size()


# by name, where one cannot be tried
_OVER_FULL_MATRICES = frozenset(
    (*("Adafactor", "LBFGS", "Muon", "Lamb", "LAMB", "Lars", "LARS", "Shampoo", "SOAP", "Adalomo", "LOMO"),)
)
# which need a closure, or sparse values
_TORCH = {cls.__module__ for cls in (torch.optim.LBFGS, torch.optim.SparseAdam)}


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
        if (edges or shards) and not running.module.automatic_optimization:
            _check_own_steps(optimizer)
        _check_own_tensors(optimizer, running)
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
            rule = "Its update of a parameter depends on all others, and ranks of several stages hold parts of them"
            fix = "Use an optimizer that works by parameter, such as AdamW, or one stage (colocate all, pp_size=1)"
            raise ConfigError("configure_optimizers", type(inner).__name__, rule, fix)
        mixes = mixes or (tried.on_elements if tried else not names.isdisjoint(_OVER_FULL_MATRICES))
        if (shards or shares) and mixes:
            ranks = "tensor parallel ranks" if shards else "ranks that share a copy"
            rule = f"Its update of an element depends on the full matrix, and {ranks} have parts of it"
            fix = (
                f"Use an optimizer that works by element, such as AdamW, or {'tp_size=1' if shards else ''}"
                f"{' and ' if shards and shares else ''}{'zero_stage=0' if shares else ''}"
            )
            raise ConfigError("configure_optimizers", type(inner).__name__, rule, fix)


def _check_own_steps(optimizer: Optimizer) -> None:
    """Refuse an optimizer that has a step of another name, for manual optimization, which takes a norm of gradients.

    Sharpness-aware minimization (SAM) scales its `first_step` by the norm of all gradients, of which a rank has a part.
    """
    for name in dir(type(optimizer)):
        if name.startswith("_") or hasattr(Optimizer, name) or not (norm := _norm_in(type(optimizer), name)):
            continue
        rule = "It takes the norm of gradients in a step of its own, and ranks have those of their layers or shards"
        fix = "Use one stage (colocate all, pp_size=1) and tp_size=1"
        raise ConfigError(f"{type(optimizer).__name__}.{name}", norm, rule, fix)


def _check_own_tensors(optimizer: Optimizer, running: Running) -> None:
    """Refuse an optimizer that keeps copies of parameters outside of its state, where its step sees rows of these."""
    groups = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    shapes = {shared.shape for shared in running.shared.all if shared.parameter.dim()}
    for name, value in vars(optimizer).items():
        if name in ("param_groups", "state", "defaults") or not shapes:
            continue
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor) and id(leaf) not in groups and tuple(leaf.shape) in shapes:
                rule = "It keeps full copies of parameters, and ranks that share a parameter step on rows of it"
                fix = "Make them in the first step, in self.state[parameter], or use zero_stage=0"
                where = f"{type(optimizer).__name__}.{name}"
                raise ConfigError(where, f"a tensor of shape {tuple(leaf.shape)}", rule, fix)


def _check_sparse(optimizer: Optimizer, module: pl.LightningModule, plan: Plan) -> None:
    """Refuse an optimizer of sparse gradients where ranks sum gradients, which makes them dense."""
    if not isinstance(optimizer, torch.optim.SparseAdam):
        return
    known = names_of(module)
    names = (known.get(id(parameter), "") for group in optimizer.param_groups for parameter in group["params"])
    names = (name for name in names if name in plan.partition.owners and len(plan.ownership.ranks_holding(name)) > 1)
    if name := next(names, None):
        rule = f"It takes sparse gradients alone, and ranks sum dense gradients of {name}"
        fix = "Use an optimizer of dense gradients, such as AdamW, or one replica and one tensor parallel rank"
        raise ConfigError("configure_optimizers", type(optimizer).__name__, rule, fix)


FEATURE = Refusals
