"""How a run builds modules without memory, and gives each rank its own weights.

`Recording` records how modules are built, in one record for all contexts, until a rank knows what it holds. After a
context and before the run, `load_state_dict` is recorded too, so that its values count. Other writes would be lost,
because there is no memory to write to: `LaterWrites` finds them by the version of each tensor, and refuses them.

How the module on each rank comes to the weights that this rank holds, where it was built without memory.

Phases, on all ranks: (1) parameters without memory that other ranks hold become placeholders; (2) the others are made
as on one process, one at a time, from rank 0's random state, and cut to this rank's shards, of which it keeps its own
rows with ``zero_stage=3``; what lies in files is read from there.

It refuses tensors of the meta device that nothing says how to initialise.

**Modules on the meta device** are initialised as they would initialise themselves. Nothing was recorded of such
modules. So what gives them their values runs again, without memory, under a recorder that takes the module's tensors
for undefined memory. What it recorded is then made one tensor at a time, as ever. In the order in which constructors
run, children before parents:

1. A transformers model that its configuration describes in full: its constructor, on a second model of which each
   tensor is copied. So all is as in an ordinary construction, computed buffers and random numbers too.
2. Any other module: ``reset_parameters``, or torch's ``_reset_parameters``, and for transformers models that were
   changed since ``initialize_weights``. A tied tensor gets the value of the module that comes first.

A tensor that nobody writes in full is refused by name. So are adapters of peft, whose matrices their constructor sets
together.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_mm5d.checkpoint.module_state import load_local
from lightning_mm5d.config.errors import ConfigError, imported, private
from lightning_mm5d.engine.codec import broadcast_tree
from lightning_mm5d.features.deferred_init.deferred_init import DeferredInit
from lightning_mm5d.features.deferred_init.deferred_weights import DeferredWeights, filling, tensors_of
from lightning_mm5d.features.deferred_init.pretrained import PretrainedSource
from lightning_mm5d.partition.parts import has_module
from lightning_mm5d.plan.holdings import Holding, Holdings
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.remote_value import Guard, is_remote
from lightning_mm5d.stage import drop_parameters
from lightning_mm5d.storage.files import TensorSource
from lightning_mm5d.trainer.construction import Construction


def initialize_meta(module: nn.Module, names: Iterable[str] | None = None) -> DeferredWeights:
    """Record how a module on the meta device initialises itself, for `DeferredWeights.materialize`.

    Args:
        module: it keeps its meta tensors; nothing gets memory here.
        names: the parameters and buffers to initialise, all of the meta device if none are given.

    Raises:
        ConfigError: a tensor is written by no initialiser, or only in part.
    """
    chosen = None if names is None else frozenset(names)
    tensors = [
        (aliases, tensor)
        for aliases, _, tensor in tensors_of(module)
        if tensor.is_meta and (chosen is None or not chosen.isdisjoint(aliases))
    ]
    wanted = {id(tensor) for _, tensor in tensors}
    parts = {id(part): _parts(part) for part in module.modules() if _is_pretrained(part)}
    recorder = DeferredInit()
    with _untied(module) as stand_ins:
        for tensor in [*(tensor for _, tensor in tensors), *stand_ins]:
            recorder.adopt(tensor)
        with recorder, torch.no_grad():
            _initialize(module, "", wanted, parts)
    weights = recorder.weights(module)
    undefined = [name for name in weights.unknown if any(aliases[0] == name for aliases, _ in tensors)]
    if undefined:
        _refuse(module, undefined[0])
    chosen_tensors = [entry for entry in weights.tensors if chosen is None or not chosen.isdisjoint(entry[0])]
    return dataclasses.replace(weights, tensors=chosen_tensors, unknown=())


@contextmanager
def _untied(module: nn.Module) -> Iterator[list[Tensor]]:
    """Give each module a parameter of its own meanwhile, so that the first one's initialiser has the last word."""
    first: set[int] = set()
    ties: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in first:
                first.add(id(parameter))
            elif parameter.is_meta:
                ties.append((private(part, "_parameters"), name, parameter))
    for parameters, name, parameter in ties:
        parameters[name] = nn.Parameter(torch.empty_like(parameter), parameter.requires_grad)
    try:
        yield [p for parameters, name, _ in ties if (p := parameters[name]) is not None]
    finally:
        for parameters, name, parameter in ties:
            parameters[name] = parameter


def _initialize(module: nn.Module, path: str, wanted: set[int], parts: Mapping[int, list[Any]]) -> None:
    """Run the initialisers of a module's children, then its own."""
    if not any(id(tensor) in wanted for tensor in chain(module.parameters(), module.buffers())):
        return
    if hasattr(module, "adapter_layer_names"):
        rule = "The constructor of a peft layer sets its matrices together, and cannot be repeated"
        fix = "Build the adapters in configure_model, outside of torch.device('meta')"
        raise ConfigError(path or type(module).__name__, f"{type(module).__name__} on the meta device", rule, fix)
    if _is_pretrained(module) and _construct_again(module, wanted, parts[id(module)]):
        return
    for name, child in module.named_children():
        _initialize(child, f"{path}.{name}".lstrip("."), wanted, parts)
    reset = _initializer(module)
    if reset is not None:
        _reset(module, reset)
    if _is_pretrained(module):
        module.initialize_weights()  # type: ignore[operator]


def _is_pretrained(module: nn.Module) -> bool:
    model = imported("transformers.modeling_utils", "PreTrainedModel")
    return model is not None and isinstance(module, model)


def _construct_again(module: nn.Module, wanted: set[int], parts: list[Any]) -> bool:
    """Copy the tensors of a second transformers model, if its configuration makes it of the same parts."""
    before = torch.get_default_dtype()
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), before)
    try:
        torch.set_default_dtype(dtype)
        second: nn.Module = type(module)(copy.deepcopy(module.config))
    except TypeError:
        return False  # it takes more than a configuration
    finally:
        torch.set_default_dtype(before)
    if _parts(second) != parts:
        return False
    values = {name: tensor for names, _, tensor in tensors_of(second) for name in names}
    for names, _, tensor in tensors_of(module):
        if id(tensor) in wanted:
            tensor.copy_(values[names[0]])
    for part, other in zip(module.modules(), second.modules(), strict=True):
        if "_is_hf_initialized" in vars(other):
            part._is_hf_initialized = True  # type: ignore[assignment]
    return True


def _parts(module: nn.Module) -> list[Any]:
    """What must be equal for two modules to be of the same parts."""
    modules: list[Any] = [
        (name, parametrize.type_before_parametrizations(part)) for name, part in module.named_modules()
    ]
    return modules + [(names, kind, t.shape, t.dtype) for names, kind, t in tensors_of(module)]


def _initializer(module: nn.Module) -> Callable[[], Any] | None:
    """The module's method that initialises its own tensors, where it has one that needs no arguments."""
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if callable(method) and all(
            p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            for p in inspect.signature(method).parameters.values()
        ):
            return method
    return None


def _reset(module: nn.Module, reset: Callable[[], Any]) -> None:
    """Run an initialiser; what it writes into a parametrized tensor goes into the tensors that it is computed from."""
    if not parametrize.is_parametrized(module):
        reset()
        return
    with parametrize.cached():
        reset()
        values = {name: getattr(module, name) for name in module.parametrizations}  # type: ignore[union-attr]
    for name, value in values.items():
        setattr(module, name, value)


def _refuse(module: nn.Module, name: str) -> NoReturn:
    owner, _, leaf = name.rpartition(".")
    kind = type(module.get_submodule(owner) if has_module(module, owner) else module).__name__
    raise ConfigError(
        name,
        "a tensor of the meta device that no initialiser writes in full",
        "A module that is built on the meta device is initialised by reset_parameters of its parts, and by "
        "initialize_weights of transformers models",
        f"Build it in configure_model, outside of torch.device('meta'), or give {kind} a method reset_parameters that "
        f"writes {leaf}",
    )


class ModuleWeights:
    """The weights of one module on one rank.

    Args:
        module: the LightningModule, before it is cut.
        plan: all stages.
        rank: global rank.
        device: where this rank computes.
        wire: where messages of the default group live.
    """

    def __init__(
        self, module: pl.LightningModule, plan: Plan, rank: int, *, device: torch.device, wire: torch.device
    ) -> None:
        self._module, self._plan, self._rank = module, plan, rank
        self._device, self._wire = device, wire
        stages = (plan.ownership.parameters[key] for key in plan.topology.stages_of(rank))
        self._held = frozenset[str]().union(*stages)
        self._fill, self._holdings = filling(module), Holdings(plan, module)

    def drop_remote(self) -> None:
        """Replace parameters without memory that other ranks hold by placeholders; phase 1."""
        empty = {name for name, parameter in self._module.named_parameters(remove_duplicate=False) if parameter.is_meta}
        guard = Guard(self._plan.ownership.holders)
        drop_parameters(self._module, sorted(empty - self._held), self._device, guard)

    def make(self, weights: DeferredWeights) -> None:
        """Initialise what this rank holds of the recorded weights, and read what lies in files; phase 2, collective.

        Generators are where one process would have them afterwards, unless this process has drawn from them since the
        weights were recorded, or recorded with another state than rank 0.
        """
        states, before = weights.random_state, [generator.get_state() for generator in weights.generators]
        # generators take states in host memory alone, and messages may live on a device
        first = [state.cpu() for state in broadcast_tree([*states], 0, self._wire)] if dist.is_initialized() else states
        weights.materialize(self._module, self._put, random_state=first)
        goes_on = all(map(torch.equal, states, first)) and all(map(torch.equal, states, before))
        for generator, state in zip(weights.generators, () if goes_on else before, strict=False):
            generator.set_state(state)
        if weights.stored:
            self._read(PretrainedSource(weights.stored))

    def _read(self, source: TensorSource) -> None:
        """Give memory to what `source` has, and read what this rank holds of it."""
        there = {*source.names()} & self._module.state_dict(keep_vars=True).keys()
        for names, _, tensor in tensors_of(self._module):
            if tensor.is_meta and not there.isdisjoint(names):
                shape = _local_shape(self._holding(names, tensor))
                self._fill(names, torch.empty(shape, dtype=tensor.dtype, device=self._device))
        load_local(self._module, source, self._plan, self._rank)

    def _put(self, names: tuple[str, ...], value: Tensor) -> None:
        """Give a tensor without memory what this rank holds of its full value."""
        tensor = attrgetter(names[0])(self._module)
        if is_remote(tensor):
            return
        value = value.to(tensor.dtype)
        holding = self._holding(names, value)
        if (shape := _local_shape(holding)) != holding.full:
            value = holding.cut(value, value.new_empty(shape))
        self._fill(names, value.to(self._device))

    def _holding(self, names: Sequence[str], full: Tensor) -> Holding:
        """What this rank holds of a tensor that it has under any of `names`."""
        name = next((name for name in names if name in self._held), None)
        if name is None:  # every rank has it in full
            shape = tuple(full.shape)
            return Holding(shape, shape, shape, None, 0, None)
        return self._holdings.of(name, self._rank, full.shape)


def _local_shape(holding: Holding) -> tuple[int, ...]:
    """Return the shape that a rank keeps between steps."""
    return holding.owned if holding.rows is not None and holding.rows.stage == 3 else holding.local


def with_unrecorded(root: nn.Module, recorded: Sequence[DeferredWeights]) -> list[DeferredWeights]:
    """Return `recorded`, and how tensors of the meta device are initialised that nobody recorded.

    Raises:
        ConfigError: nothing initialises one of them.
    """
    known = {name for weights in recorded for name in weights.names}
    unknown = [
        names[0]
        for names, kind, tensor in tensors_of(root)
        if kind != "attribute" and tensor.is_meta and known.isdisjoint(names)
    ]
    return [*recorded, *([initialize_meta(root, unknown)] if unknown else [])]


class Recording(Construction):
    """Builds modules without memory, and makes on each rank what it holds."""

    def __init__(self) -> None:
        self._recorder: DeferredInit | None = None
        self._written: LaterWrites | None = None
        self._recorded: list[DeferredWeights] = []  # also what other processes have recorded

    @override
    @contextmanager
    def building(self) -> Iterator[None]:
        self._recorder = self._recorder or DeferredInit()
        self._written = self._written or LaterWrites(self._recorder)
        with self._written, self._recorder:
            yield

    @override
    def without_memory(self) -> DeferredInit:
        return DeferredInit()

    @override
    def end(self, module: pl.LightningModule) -> None:
        if self._written is not None:
            self._written.end()
        self._recorded, self._recorder, self._written = self._deferred(module), None, None

    @override
    def make(
        self, module: pl.LightningModule, plan: Plan, rank: int, *, device: torch.device, wire: torch.device
    ) -> None:
        recorded = with_unrecorded(module, self._recorded)  # all, so that ranks draw the same numbers
        weights = ModuleWeights(module, plan, rank, device=device, wire=wire)
        weights.drop_remote()
        for record in recorded:
            weights.make(record)

    @override
    def make_in_full(self, module: pl.LightningModule) -> None:
        fill = filling(module)

        def put(names: tuple[str, ...], value: Tensor) -> None:
            fill(names, value.to(attrgetter(names[0])(module).dtype))

        for weights in with_unrecorded(module, self._deferred(module)):
            weights.materialize(module, put)
            stored = weights.stored
            for names, _ in weights.tensors:
                if names[0] in stored:
                    put(names, stored[names[0]].read())

    @override
    def forget(self) -> None:
        self._recorded, self._recorder, self._written = [], None, None

    def _deferred(self, module: pl.LightningModule) -> list[DeferredWeights]:
        return [*self._recorded, *([] if self._recorder is None else [self._recorder.weights(module)])]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_recorder": None, "_written": None}


CONSTRUCTION = Recording


class LaterWrites:
    """A context beside that of a recorder, which watches the modules that are built in it.

    Args:
        recorder: goes on recording where a state dict is loaded later.
    """

    def __init__(self, recorder: DeferredInit) -> None:
        self._recorder = recorder
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._versions: dict[tuple[int, str], int] = {}
        self._hooks: dict[int, RemovableHandle] = {}

    def __enter__(self) -> None:
        self._check()
        hooks = (register_module_parameter_registration_hook, register_module_buffer_registration_hook)
        self._watching = [register(self._note) for register in hooks]

    def __exit__(self, *_: object) -> None:
        for hook in self._watching:
            hook.remove()
        for module in filter(None, (ref() for ref in self._modules.values())):
            self._versions |= {(id(module), name): tensor._version for name, tensor in _without_memory(module)}
            if id(module) not in self._hooks:
                self._hooks[id(module)] = module.register_load_state_dict_pre_hook(_Load(self))

    def end(self) -> None:
        """Stop recording; raise ConfigError where a tensor without memory was written to since."""
        for hook in self._hooks.values():
            hook.remove()
        self._check()

    def _check(self) -> None:
        for key, ref in self._modules.items():
            module = ref()
            for name, tensor in _without_memory(module) if module is not None else ():
                if tensor._version != self._versions.get((key, name), tensor._version):
                    got = "a weight that was written to after the context in which it was built"
                    rule = "It has no memory before a run, so the write is lost"
                    fix = "Write to it in configure_model or inside of the context, or in on_fit_start"
                    raise ConfigError(f"{type(module).__name__}.{name}", got, rule, fix)

    def load(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Record that a module's own tensors without memory get the values of a state dict."""
        for name, tensor in _without_memory(module):
            value = state.get(f"{prefix}{name}")
            if not isinstance(value, Tensor) or value.shape != tensor.shape:
                continue
            with self._recorder, torch.no_grad():
                tensor.copy_(value)
            state[f"{prefix}{name}"] = tensor.detach()  # torch would warn of a copy into no memory
            self._versions.pop((id(module), name), None)

    def _note(self, module: nn.Module, name: str, tensor: Tensor | None) -> None:
        known = self._modules.get(id(module))
        if known is None or known() is None:  # an id is taken again when its module is gone
            self._modules[id(module)] = weakref.ref(module)
            self._hooks.pop(id(module), None)


def _without_memory(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of `module` itself that have no memory."""
    pairs = [*module._parameters.items(), *module._buffers.items()]
    return [(name, tensor) for name, tensor in pairs if tensor is not None and tensor.is_meta]


class _Load:
    """A hook before a module loads a state dict; in another process it does nothing.

    Args:
        writes: records what is loaded.
    """

    def __init__(self, writes: LaterWrites | None) -> None:
        self._writes = writes

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if self._writes is not None:
            self._writes.load(module, state, prefix)

    def __getstate__(self) -> dict[str, Any]:
        return {"_writes": None}
