"""Refuses steps that keep a sharded weight, or reduce it to a number or row: each rank would have its own shard's.

``self.norm.copy_(self.layer.weight.norm())`` in a step, or in a forward hook of a module, looks at what this rank
holds. Hooks of Lightning see full weights. Where such a value comes into a loss or a log, ranks have unequal ones and
say so; in a buffer, an attribute or a file nobody would see it. Nor would anybody see that hooks find a shard in an
attribute, after ``self.old = self.layer.weight.clone()`` in a step. What a module itself computes with its shard takes
other tensors along, or leaves the sharded dim as it is, and is not meant.

The first batch of each step is watched. A modality that is sharded over no ranks costs nothing.

Refuses calls by which a step would compute with tensors that do not fit a rank's part of the module, without a word:

- `torch.func.functional_call` of a sharded module with full tensors: each rank would compute all, and ranks would add
  up what is full already;
- transforms of `torch.func` (`vmap`, `grad`, `jacrev`) around modules that other ranks compute, or of which a rank has
  a shard: what such a call hands to another rank or a collective knows nothing of the transform;
- calls and state dicts of modules whose parameters replicas share, while these show rows; hooks on such parameters,
  sparse gradients of them, and manual optimization beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch._functorch import eager_transforms
from torch._functorch import vmap as vectorized
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils import stateless
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_mm5d.config.errors import ConfigError, private
from lightning_mm5d.data_parallel.shared_parameters import Closed, SharedParameter
from lightning_mm5d.engine.flight import AroundStep, AroundSteps, Course
from lightning_mm5d.gradients.gradients import has_hooks
from lightning_mm5d.plan.holdings import DataShards
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import Action
from lightning_mm5d.sharded.remote_value import LIKE, TELLING, is_remote
from lightning_mm5d.sharded.shards import Shard
from lightning_mm5d.stage import Run
from lightning_mm5d.trainer.feature import Attached, Feature, Running
from lightning_mm5d.trainer.hidden_gradients import hooked

_DIM_AT = dict.fromkeys(("sum", "mean", "prod", "std", "var", "amax", "amin", "max", "min", "logsumexp", "median"), 1)
_DIM_AT |= dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm", "vector_norm", "quantile", "normalize"), 2)
"""where the dim is among the arguments of a reduction"""
_APART = {*TELLING, *LIKE, Tensor.new_tensor}
"""whose results do not depend on the values of a weight"""


class ShardReads(Feature):
    """Has no field: it changes no number."""

    def check(self, module: pl.LightningModule, plan: Plan, device: torch.device) -> None:
        """Refuse modules that do with parameters what cannot be done with rows of them."""
        check_shared(module, plan)

    def attach(self, running: Running) -> Attached | None:
        """Guard some calls of torch.func, and watch the first step of each kind, unless modules are compiled."""
        guards = _Guards(running)
        shards = running.plan.division.shards
        named = running.module.named_parameters(remove_duplicate=False)
        weights = {name: parameter for name, parameter in named if name in shards and not is_remote(parameter)}
        compiles = any(modality.compute.compile for modality in running.plan.modalities.values())
        if not weights or compiles or running.steps.batch_parts.is_compiled:
            return guards
        _Watched(running, weights, {name: _dims(shards[name]) for name in weights})
        return guards


_NESTINGS: tuple[tuple[ModuleType, str, bool], ...] = (
    (vectorized, "vmap_increment_nesting", False),
    (eager_transforms, "grad_increment_nesting", True),
    (eager_transforms, "jvp_increment_nesting", True),
)
"""what transforms of `torch.func` enter around a function, and whether they differentiate it"""


def check_shared(module: pl.LightningModule, plan: Plan) -> None:
    """Refuse modules that do with parameters what cannot be done with rows of them.

    Raises:
        ConfigError: manual optimization; hooks on shared parameters; sparse gradients of them.
    """
    shards = DataShards(plan)
    if not shards.exist:
        return
    if not module.automatic_optimization:
        rule = "Manual optimization runs its own backward, and ranks that share parameters gather them for a step"
        fix = f"Use automatic optimization, or {'ep_size=1' if plan.experts else 'zero_stage=0'}"
        raise ConfigError("automatic_optimization", False, rule, fix)
    sparse = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding) and part.sparse}
    for name, parameter in module.named_parameters():
        ranks = plan.ownership.ranks_holding(name) if name in plan.partition.owners else ()
        shard = next(filter(None, (shards.of(name, rank) for rank in ranks)), None)
        if shard is None:
            continue
        if has_hooks(parameter):
            raise hooked(name, shard)
        if id(parameter) in sparse:
            rule = "Ranks that share a parameter sum gradients of its rows, which are dense"
            raise ConfigError(f"{name}.sparse", True, rule, "Use sparse=False, or zero_stage=0")


class _Guards(Attached):
    """Refuses what would compute with parts of modules: transforms of `torch.func`, its `functional_call`, other calls.

    Args:
        running: the run on this rank.
    """

    def __init__(self, running: Running) -> None:
        plan, self._runtime = running.plan, running.runtime
        self._shards, self._root = plan.division.shards, running.module
        axes = plan.layout.axes.values()
        is_cut = (
            bool(plan.topology.edges) or any(max(size.tp, size.cp) > 1 for size in axes) or running.experts is not None
        )
        self._cut = self._modules_cut(running) if is_cut else {}
        self._rows = dict[nn.Module, str]()
        for path, part in self._root.named_modules():
            named = part.named_parameters(path, recurse=False)
            held = [(name, shared) for name, p in named if (shared := running.shared.get(p)) is not None]
            if held:
                self._rows[part] = path
                self._watch(part, held)
        if self._shards:
            self.put_attribute(stateless, "_functional_call", self._called(private(stateless, "_functional_call")))
        for owner, name, differentiates in _NESTINGS if self._cut or self._rows else ():
            watched = self._cut | self._rows if differentiates else self._cut
            self.put_attribute(owner, name, self._watching(private(owner, name), watched))

    def _watch(self, part: nn.Module, held: Sequence[tuple[str, SharedParameter]]) -> None:
        """Refuse calls and state dicts of a module while it shows rows."""

        def refuse_call(_: nn.Module, args: Any) -> None:
            for name, shared in held:
                if not shared.is_whole and not self._runtime.guard.shows_full:
                    raise self._runtime.guard.error(name, "A call outside of a step")

        def refuse_state(_: nn.Module, prefix: str, keep_vars: bool) -> None:
            for name, shared in held:
                is_cut = not shared.is_whole or isinstance(shared.parameter, Closed)
                if not keep_vars and is_cut and not self._runtime.guard.shows_full:
                    raise self._runtime.guard.error(name, "state_dict()")

        self.changes.callback(part.register_forward_pre_hook(refuse_call).remove)
        self.changes.callback(part.register_state_dict_pre_hook(refuse_state).remove)

    def _modules_cut(self, running: Running) -> dict[nn.Module, str]:
        """Modules at which a run goes over to other ranks, and those with a parameter that is sharded or elsewhere."""
        partition, lists = running.plan.partition, running.plan.partition.layers.values()
        ends = {cut.path for encoder in partition.encoders.values() for cut in encoder.boundaries}
        modules = {}
        for path, module in self._root.named_modules():
            named = module.named_parameters(path, recurse=False)
            is_part = any(name in self._shards or is_remote(parameter) for name, parameter in named)
            if path and (is_part or path in ends or path.rpartition(".")[0] in {layers for layers in lists if layers}):
                modules[module] = path
        return modules

    def _watching(
        self, nesting: Callable[..., AbstractContextManager[Any]], watched: Mapping[nn.Module, str]
    ) -> Callable[..., AbstractContextManager[Any]]:
        """Return `nesting`, in which calls of the modules `watched` are refused while a step runs."""

        def check(module: nn.Module, args: tuple[Any, ...]) -> None:
            if module in watched and (self._runtime.active is not None or self._runtime.in_lock_step):
                raise ConfigError(
                    watched[module],
                    "a call within a transform of torch.func (vmap, grad, jacrev, jvp)",
                    "Other ranks hold this module or a part of it, and what they exchange knows nothing of a transform",
                    "Call the module before, and transform what is computed of its result; take gradients by "
                    "torch.autograd.grad within one stage; or let every rank hold all of it (colocate_with, pp_size=1, "
                    "tp_size=1, zero_stage=0)",
                )

        @contextmanager
        def nested(*args: Any, **kwargs: Any) -> Iterator[Any]:
            hook = register_module_forward_pre_hook(check)
            try:
                with nesting(*args, **kwargs) as level:
                    yield level
            finally:
                hook.remove()

        return nested

    def _called(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `original`, which calls a module with other tensors, where these have the shapes of this rank."""

        def checked(module: nn.Module, tensors: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
            parameters = dict(module.named_parameters(remove_duplicate=False))
            for name, given in tensors.items():
                if name in parameters and self._in_shards(parameters[name]) and given.shape != parameters[name].shape:
                    raise ConfigError(
                        "torch.func.functional_call",
                        f"{name!r} of shape {tuple(given.shape)}",
                        f"Ranks share that weight, and this one computes with {tuple(parameters[name].shape)} of it",
                        "Call a copy that is a submodule, whose weights a hook updates (self.average = "
                        "copy.deepcopy(module) in __init__), or use tp_size=1",
                    )
            return original(module, tensors, *args, **kwargs)

        return checked

    def _in_shards(self, parameter: nn.Parameter) -> bool:
        named = self._root.named_parameters(remove_duplicate=False)
        return any(weight is parameter and name in self._shards for name, weight in named)


class _Watched(AroundSteps, AroundStep):
    def __init__(
        self, running: Running, weights: Mapping[str, nn.Parameter], dims: Mapping[str, Sequence[int]]
    ) -> None:
        self._weights, self._dims, self._attributes = weights, dims, vars(running.module)
        self._seen = set[str]()
        self._name = ""
        running.engine.around.append(self)

    def step(self, course: Course) -> AroundStep | None:
        """Watch the first of each kind."""
        self._name = getattr(course.step, "name", "step")
        return None if self._name in self._seen else self

    @contextmanager
    def forward(self, run: Run, action: Action) -> Iterator[None]:
        """Watch one run."""
        with Reads(self._name, self._weights, self._dims) as reads:
            yield
        reads.check_kept(self._attributes)

    def end(self) -> None:
        """Watch no other of its kind."""
        self._seen.add(self._name)


def _dims(shard: Shard) -> tuple[int, ...]:
    return (shard.dim,) if shard.across is None else (shard.dim, shard.across.dim)


class Reads(TorchFunctionMode):
    """Refuses a reduction over the sharded dim of what is made of one sharded weight alone.

    Args:
        step: its name.
        weights: by name.
        dims: the sharded dims of each.
    """

    def __init__(self, step: str, weights: Mapping[str, nn.Parameter], dims: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self._step, self._dims = step, {name: {dim % weights[name].dim() for dim in cut} for name, cut in dims.items()}
        self._shapes = {name: weight.shape for name, weight in weights.items()}
        self._derived: dict[int, tuple[str, Tensor]] = {id(weight): (name, weight) for name, weight in weights.items()}
        self._parts: dict[int, tuple[str, Any]] = {}  # what is made of one with other numbers of elements

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, Tensor)] if func not in _APART else []
        names = {self._derived[id(tensor)][0] if id(tensor) in self._derived else None for tensor in tensors}
        if len(names) != 1 or None in names:
            return self._called(func, tensors, args, kwargs)
        (name,) = names
        self._check(str(name), tensors[0], getattr(func, "__name__", ""), args, kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.numel() == tensors[0].numel():
            self._derived[id(result)] = str(name), result
        elif isinstance(result, (Tensor, np.ndarray)):
            self._parts[id(result)] = str(name), result
        return result

    def _called(self, func: Callable, tensors: Sequence[Tensor], args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Call `func`; refuse the write of a full tensor into a sharded weight by name."""
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            function = getattr(func, "__name__", "")
            name, _ = self._derived.get(id(tensors[0]), (None, None)) if tensors else (None, None)
            if name is None or not function.endswith("_"):
                raise
            raise self._refusal(f"{function}() of {name!r} with a tensor of another size") from error

    def _check(self, name: str, tensor: Tensor, function: str, args: tuple, kwargs: Mapping[str, Any]) -> None:
        if function not in _DIM_AT:
            return
        place = _DIM_AT[function]
        dim = kwargs.get("dim", args[place] if len(args) > place else None)
        if function == "normalize" and dim is None:
            dim = 1
        dims = [dim] if isinstance(dim, int) else dim
        is_full = not isinstance(dims, (list, tuple)) or not dims
        if not is_full and tensor.shape == self._shapes[name]:
            is_full = not self._dims[name].isdisjoint(dim % tensor.dim() for dim in dims)
        if is_full:
            raise self._refusal(f"{function}() of {name!r}")

    def check_kept(self, attributes: Mapping[str, Any]) -> None:
        """Refuse what is made of one sharded weight alone in attributes of the module."""
        for key, value in attributes.items():
            for leaf in tree_leaves(value):
                name, _ = self._derived.get(id(leaf), self._parts.get(id(leaf), (None, None)))
                if name is not None and not isinstance(leaf, nn.Parameter):
                    raise self._refusal(f"what is made of {name!r} in self.{key}")

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(
            self._step,
            what,
            "The weight is sharded over tensor parallel ranks, of which each sees its own shard within a step",
            "Look at it in on_train_batch_start or on_train_batch_end, which see full weights. In place of a penalty, "
            "use the optimizer's weight_decay, or add the penalty's gradient in on_after_backward",
        )


FEATURE = ShardReads
