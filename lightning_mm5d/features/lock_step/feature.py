"""Runs a step on all ranks of a replica at once, so that it may pass through the layers as often as it likes.

In a pipeline each rank runs the user's step with its own layers, once, and stops after them. Generation passes through
all layers for each token and looks at the logits in between. So every rank runs the whole step, and each call of a
*unit* (a layer, an embedding, a head, the boundary of an encoder) is answered by its owner:

1. The owner, a stage that holds all parameters of the unit, computes the call.
2. Its first rank broadcasts the result to all ranks of the replica, with the effects of the call on caches, on dicts
   that layers share states in, on tensors that it wrote to, on attributes of its module, and on random generators.
3. The other ranks return the result and repeat the effects. Keys and values stay with their owner: elsewhere a cache
   holds stand-ins of the same length.

All ranks thus see equal logits, draw equal tokens and end after the same number of them. Microbatches run one after the
other, in the same order on all ranks. Parameters of modules whose parts lie on several ranks are broadcast beforehand.

Manual optimization runs so, too: its step has backwards and steps of optimizers in its midst, and is run as a whole,
for the full batch (`answers`). Only there do gradients cross. It refuses objects that a call changes where the other
ranks could not follow.

The source code of an evaluation step says whether it passes several times through the model: it does where it names
something with ``generate`` in its name, or calls a module with parameters in a loop: in its own code, and in methods of
the LightningModule and functions of its Python module that it names. A step of which the source says too little is
found out when it runs: the pipeline cannot run it, what it did is undone, and it runs again.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial, wraps
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError, RankLostError, RankMismatchError, repeated
from lightning_mm5d.data.random_state import kept_random_state, seed_all, seed_of, set_torch_states, torch_states
from lightning_mm5d.engine.codec import TreeChannel
from lightning_mm5d.engine.step import Step
from lightning_mm5d.features.lock_step.answers import Differentiable, Effects
from lightning_mm5d.partition.parts import is_in
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.sharded.collectives import message_device
from lightning_mm5d.sharded.own_backwards import replaced, without_inputs
from lightning_mm5d.sharded.remote_value import settled
from lightning_mm5d.sharded.removable import meanwhile, put
from lightning_mm5d.source.trees import names, reached, tree_of
from lightning_mm5d.stage import StageError
from lightning_mm5d.stage.payload import map_tensors, unsharded
from lightning_mm5d.stage.step_writes import Written, attributes, written
from lightning_mm5d.trainer.feature import Attached, Feature, Running
from lightning_mm5d.trainer.kept_values import KeptValues, OfHooks
from lightning_mm5d.trainer.metrics import MetricSync
from lightning_mm5d.trainer.optimization import AroundUpdates

_MOST = 1 << 18
"""elements of a tensor that travels because a call keeps it in an attribute"""
_WHOLE = "Gradients cross to layers of other ranks, and a backward to some inputs does not reach these"
_ENDS = "Ranks hold parts of the module and answer each other's calls, and gradients of parameters stay at their ranks"
_BACKWARD = (
    "Take the gradient of a value between modules (a feature, logits), or change gradients by element in "
    "on_before_optimizer_step; for gradients of several losses let modalities share ranks (colocate_with, pp_size=1)"
)
_TOGGLE = "Leave out inputs, and let only these require a gradient: self.toggle_optimizer(optimizer)"


@dataclass(frozen=True, eq=False)
class _Unit:
    """A callable that one stage answers for all ranks.

    Attributes:
        module: that it belongs to.
        method: its name there.
        path: of the callable, for messages.
        owner: path of the module.
        stage: that computes it.
        boundary: name of the boundary that it is, None for other callables.
    """

    module: nn.Module
    method: str
    path: str
    owner: str
    stage: StageKey
    boundary: str | None = None


@dataclass
class _Place:
    """A microbatch that runs: which ranks run a stage on it, and how these reach the others."""

    ranks: Mapping[StageKey, tuple[int, ...]]
    group: dist.ProcessGroup | None  # None for a replica of one rank, which reaches nobody
    replica: int
    inside: int = 0  # how many units compute here
    optimizes: bool = False  # whether gradients cross
    differentiates: bool = False  # whether a step is in `torch.autograd.grad`, which leaves parameters alone
    answered: Mapping[int, str] = field(default_factory=dict)  # names of the parameters in calls that are answered

    def computing(self) -> AbstractContextManager[None]:
        """Enter where a unit computes, forward or backward: what it calls runs here, and crosses to nobody."""
        return meanwhile(self, inside=self.inside + 1)

    def gradients(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `torch.autograd.grad` for a step.

        Raises:
            ConfigError: for a parameter of a call that an owner answers: the graph of a step ends at the call.
        """
        asked = kwargs.get("inputs", args[1] if len(args) > 1 else ())
        for tensor in [asked] if isinstance(asked, Tensor) else asked:
            if id(tensor) in self.answered:
                raise ConfigError(
                    "training_step", f"torch.autograd.grad(..., {self.answered[id(tensor)]})", _ENDS, _BACKWARD
                )
        with meanwhile(self, differentiates=True):
            return original(*args, **kwargs)


class InLockStep(Feature):
    """Has no field: it runs what nothing else can."""

    def attach(self, running: Running) -> Attached | None:
        """Run such steps from now on, where ranks hold parts of the module or optimize manually."""
        plan = running.plan
        if plan.topology.edges or not (running.is_plain or running.module.automatic_optimization):
            lock_step = running.steps.unscheduled = LockStep(running)
            running.optimization.around.append(lock_step)
            return lock_step
        gathers = any(modality.sharding.reshard_after_forward for modality in plan.modalities.values())
        return _Generating(running.module, compiled=not (running.runtime.groups or running.experts or gathers))


class _Generating(Attached):
    """Has models of transformers generate from microbatches, on ranks that meet in their calls.

    A microbatch holds None for images that none of its samples has. A forward takes that for no images, as where it
    is not told of any; `generate` encodes what it is told of, and so is not told.

    Args:
        root: the LightningModule.
        compiled: whether they may compile themselves on a GPU; not where ranks meet in their calls.
    """

    def __init__(self, root: nn.Module, *, compiled: bool = False) -> None:
        for module in root.modules():
            if not compiled and hasattr(module, "get_compiled_call"):
                self.put_attribute(module, "get_compiled_call", partial(_as_it_is, module))
            if hasattr(module, "generate") and (inputs := _encoder_inputs(module)):
                self.put_attribute(module, "generate", _without_none(module.generate, inputs))


class LockStep(_Generating, AroundUpdates):
    """Runs steps of one rank in lock step with the other ranks of its replicas.

    Args:
        running: the run on this rank.
    """

    def __init__(self, running: Running) -> None:
        super().__init__(running.runtime.root)
        plan, rank = running.plan, running.rank
        self._module, self._plan, self._runtime = running.module, plan, running.runtime
        self._optimizes = not running.module.automatic_optimization
        self._rank, self._device, self._wire = rank, running.device, message_device(running.device)
        # the ranks that work for each replica that this rank serves; hosts carry what is in host memory
        served = plan.layout.replicas_of_rank(rank)
        self._groups = {number: running.groups.replicas.get(number) for number in served}
        self._hosts = running.groups.hosts
        last = plan.topology.instances(plan.topology.last_stage)
        self._replica = next((number for number in served if rank in last[number]), None)  # whose steps end here
        self._channels: dict[tuple[int, int], TreeChannel] = {}
        self._writes: dict[_Unit, list[Written]] = {}
        self._refresh: Callable[[], None] | None = None
        for path, module in self._runtime.root.named_modules():
            if callable(getattr(type(module), "generate", None)):
                self._patch_generate(path, module)

    def walks(self, name: str) -> bool:
        """Whether the evaluation `name` is known to pass several times through the model."""
        return passes_several_times(self._module, name)

    def attempt(self, metrics: MetricSync, values: KeptValues) -> Callable[[], None]:
        """Return what undoes an evaluation that a schedule has tried.

        These are metrics, attributes and buffers of the module, and what forward hooks write to beside modules.

        Args:
            metrics: of the module.
            values: the attributes before the step.
        """
        hooked = OfHooks(self._module.modules())
        undone = [*(metric.put_back for metric in metrics.copied_states()), values.restore, hooked.restore]
        buffers = [(buffer, buffer.detach().clone()) for buffer in self._module.buffers(recurse=False)]

        def undo() -> None:
            for put_back in undone:
                put_back()
            for buffer, copy in buffers:
                buffer.detach().copy_(copy)

        return undo

    def stepped(self) -> None:
        """Let parameters that were broadcast beforehand have the values that an optimizer's step has given them."""
        if self._refresh is not None:
            self._refresh()

    def execute(self, step: Step, *, optimizes: bool = False) -> None:
        """Run all microbatches of a step; results of this rank's own replica go to ``step.finish``.

        Args:
            step: what to run, without a backward after it.
            optimizes: whether the step itself runs backwards and optimizers.
        """
        assert not step.trains
        with kept_random_state(self._device) if step.random_key is not None else nullcontext():
            # one order on all ranks, so that no two of them wait for each other in different replicas
            for replica in sorted(step.microbatches):
                for index, part in enumerate(step.microbatches[replica]):
                    if step.random_key is not None:
                        seed_all(seed_of(*step.random_key, index, replica), self._device)
                    is_own = replica == self._replica
                    counted = nullcontext() if is_own else step.uncounted()
                    with (
                        torch.set_grad_enabled(optimizes),
                        counted,
                        self.during(replica, index, optimizes=optimizes),
                        step.context(),
                    ):
                        result = step.run(part, index, (None, replica))
                    if is_own:
                        step.finish(result, index)

    @contextmanager
    def during(self, replica: int, index: int, *, draws: bool = False, optimizes: bool = False) -> Iterator[None]:
        """Let remote modules be answered by their owners, on all ranks of a replica at once.

        Args:
            replica: of the loss modality.
            index: of the microbatch, on which it depends which instance of an encoder answers.
            draws: whether torch's generators may differ between ranks, which then get the state of the last stage.
            optimizes: whether gradients cross.
        """
        topology, layout = self._plan.topology, self._plan.layout
        ranks = {stage: topology.ranks_at(stage, replica, index) for stage in topology.members}
        place = _Place(ranks, self._groups[replica], replica, optimizes=optimizes)
        with ExitStack() as stack:
            if place.group is not None:
                fetched = self._fetch(place, stack)
                if optimizes and self._loose:
                    self._refresh = partial(self._fetch_again, place, fetched)
                    stack.callback(setattr, self, "_refresh", None)
                if draws:
                    self._share_states(place)
            if optimizes and any(set(members) != set(layout.replica_ranks(replica)) for members in ranks.values()):
                stack.enter_context(without_inputs("manual_backward", _WHOLE, _TOGGLE))
                stack.enter_context(replaced(place.gradients, "grad"))
                place.answered = self._answered(place)
            for unit in self._units:
                self._patch(place, unit, stack)
            self._runtime.in_lock_step = True
            stack.callback(setattr, self._runtime, "in_lock_step", False)
            yield

    def _patch_generate(self, path: str, module: nn.Module) -> None:
        """Let `generate` run in lock step wherever it is called; a pipeline cannot run it."""
        original = module.generate

        @wraps(original)  # type: ignore[arg-type]
        def generate(*args: Any, **kwargs: Any) -> Any:
            active = self._runtime.active
            if active is not None:
                where = "training_step" if active.trains else "a pipelined step"
                raise StageError(
                    f"{path or 'self'}.generate is called in {where}, whose layers lie on several ranks: generate in "
                    "validation_step, test_step, predict_step or in a hook, or use one stage"
                )
            _check_clock(path, module, args, kwargs)
            if self._runtime.in_lock_step:
                return original(*args, **kwargs)  # type: ignore[operator]
            layout = self._plan.layout
            shared = next((rank for rank in range(layout.size) if len(layout.replicas_of_rank(rank)) > 1), None)
            if shared is not None:
                raise StageError(
                    f"{path or 'self'}.generate is called outside of a step, where rank {shared} works for the "
                    f"replicas {list(layout.replicas_of_rank(shared))}, which do not generate together: generate in "
                    "validation_step, test_step or predict_step, or use as many replicas of every modality"
                )
            local = self._runtime.guard.suspended(f"{path or 'self'}.generate()")
            with local, torch.no_grad(), self.during(next(iter(self._groups)), 0, draws=True):
                return original(*args, **kwargs)  # type: ignore[operator]

        self.put_attribute(module, "generate", generate)

    # --- what is answered ---

    @cached_property
    def _units(self) -> list[_Unit]:
        partition, root = self._plan.partition, self._runtime.root
        units = []
        for name, encoder in partition.encoders.items():
            calls_others = any(name in fed for fed in self._plan.topology.consumers.values())
            if len(partition.stages[name]) == 1 and not calls_others:
                stage = self._plan.topology.stage_of[partition.stages[name][0].name]
                for cut in encoder.boundaries:
                    units.append(_Unit(root.get_submodule(cut.path), cut.method, cut.name, cut.path, stage, cut.name))
        taken = {(unit.module, unit.method) for unit in units}
        for path, module in root.named_modules():
            owner = None if self._is_spread(path) else self._owner(path, module)
            is_callable = type(module).forward is not nn.Module.forward
            if owner is not None and is_callable and (module, "forward") not in taken:
                units.append(_Unit(module, "forward", path, path, owner))
        return units

    @cached_property
    def _loose(self) -> list[tuple[nn.Module, str, str, StageKey]]:
        """The parameters of modules whose parts lie on several ranks: module, name, full name, and a stage with it."""
        loose = []
        for path, module in self._runtime.root.named_modules():
            if not self._is_spread(path) and self._owner(path, module) is not None:
                continue
            for name, parameter in module.named_parameters(recurse=False):
                full = f"{path}.{name}" if path else name
                stages = self._holders([full])
                if parameter is not None and stages and full not in self._plan.division.shards:
                    loose.append((module, name, full, stages[0]))
        return loose

    def _is_spread(self, path: str) -> bool:
        """Whether a module is the root, or has a modality's list of layers inside."""
        lists = [layers for layers in self._plan.partition.layers.values() if layers]
        return path == "" or any(is_in(layers, path) for layers in lists)

    def _owner(self, path: str, module: nn.Module) -> StageKey | None:
        """The stage that answers calls of a module; None without one, and where all stages hold it."""
        names = [name for name, _ in module.named_parameters(path, remove_duplicate=False)]
        return next(iter(self._holders(names)), None) if names else None

    def _holders(self, names: list[str]) -> list[StageKey]:
        """The stages that hold all of some parameters; none where all stages do."""
        every = self._plan.ownership.parameters
        stages = [stage for stage, held in every.items() if held.issuperset(names)]
        # what all hold is computed by all, but for gradients, which would count several times
        return stages if len(stages) < len(every) or self._optimizes else []

    # --- how it is answered ---

    def _fetch(self, place: _Place, stack: ExitStack) -> dict[str, nn.Parameter]:
        fetched: dict[str, nn.Parameter] = {}
        for module, name, full, stage in self._loose:
            held = module._parameters[name]
            assert held is not None
            value = self._shared(place, stage, full, held.data)
            if self._rank not in place.ranks[stage]:
                carries = place.optimizes and held.requires_grad  # as where it is held, or graphs would differ
                fetched[full] = nn.Parameter(value.to(self._device), requires_grad=carries)
                module._parameters[name] = fetched[full]
                stack.callback(module._parameters.__setitem__, name, held)
        return fetched

    def _fetch_again(self, place: _Place, fetched: Mapping[str, nn.Parameter]) -> None:
        for module, name, full, stage in self._loose:
            held = module._parameters[name]
            assert held is not None
            value = self._shared(place, stage, full, held.data)
            if full in fetched:
                fetched[full].data.copy_(value)

    def _share_states(self, place: _Place) -> None:
        states = self._shared(place, self._plan.topology.last_stage, "states", torch_states(self._device))
        set_torch_states([state.cpu() for state in states], self._device)

    def _shared(self, place: _Place, stage: StageKey, name: str, local: Any) -> Any:
        """Return what the first rank of a stage has under `name`, where this rank has `local`; collective."""
        channel, src = self._channel(place, stage)
        if self._rank == src:
            channel.send([name, local])
            return local
        sent, received = channel.receive()
        self._check(sent, name)
        return received

    def _is_answered(self, place: _Place, unit: _Unit) -> bool:
        return set(place.ranks[unit.stage]) != set(self._plan.layout.replica_ranks(place.replica))

    def _answered(self, place: _Place) -> dict[int, str]:
        """The names of the parameters of units that are answered, by identity."""
        units = [unit for unit in self._units if self._is_answered(place, unit)]
        return {id(parameter): name for unit in units for name, parameter in unit.module.named_parameters(unit.owner)}

    def _patch(self, place: _Place, unit: _Unit, stack: ExitStack) -> None:
        if not self._is_answered(place, unit):
            return
        original = getattr(unit.module, unit.method)

        @wraps(original)  # generation reads the signature
        def answered(*args: Any, **kwargs: Any) -> Any:
            if place.inside:
                return original(*args, **kwargs)
            return self._answer(place, unit, original, args, kwargs)

        stack.callback(put(unit.module, unit.method, answered))

    def _answer(self, place: _Place, unit: _Unit, original: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        if torch.is_grad_enabled() and not place.optimizes:
            raise StageError(
                f"{unit.path} is called with gradients in an evaluation that passes several times through layers of "
                "several ranks, and gradients do not cross there: call it without torch.enable_grad, or give the "
                "modalities the same ranks (colocate_with) and pp_size=1"
            )
        channel, src = self._channel(place, unit.stage)
        is_owner = self._rank in place.ranks[unit.stage]
        call: Differentiable | None = None
        if torch.is_grad_enabled():
            share = partial(self._shared, place, unit.stage, f"the backward of {unit.path}")
            call = Differentiable(
                unit.path,
                args,
                kwargs,
                share,
                owns=is_owner,
                accumulates=lambda: not place.differentiates,
                computing=place.computing,
            )
        effects = Effects(args if call is None else call.args, kwargs if call is None else call.kwargs, self._device)
        computed = self._computed(place, unit, original, effects, fails=channel if self._rank == src else None)
        flags = [] if call is None or not is_owner else call.flags_of(computed)
        writes = self._writes.get(unit, [])
        if self._rank == src:
            channel.send([unit.path, None, computed, [flags, effects.description(), writes]])
            return self._shown(computed if call is None else call.joined(computed, flags), writes)
        sent, failure, result, told = channel.receive()
        self._check(sent, unit.path)
        if failure is not None:
            raise repeated(RankLostError(f"rank {src} failed in {unit.path}: {failure}"), src, failure)
        flags, description, writes = told
        if not is_owner:
            effects.repeat(description)
        if call is not None and is_owner:
            return self._shown(call.joined(computed, flags), writes)
        result = result if self._wire == self._device else map_tensors(result, lambda x: x.to(self._device))
        return self._shown(result if call is None else call.joined(result, flags), writes)

    def _shown(self, answer: Any, writes: Sequence[Written]) -> Any:
        """Return the result of a call, with what it wrote in attributes in their places."""
        result, values = answer
        for (path, name, _), sent in zip(writes, values, strict=True):
            for value in sent:
                setattr(self._runtime.root.get_submodule(path), name, value)
        return result

    def _computed(
        self, place: _Place, unit: _Unit, original: Callable[..., Any], effects: Effects, fails: TreeChannel | None
    ) -> Any:
        """Compute a call where its owner is; `fails` tells the others of an error."""
        if self._rank not in place.ranks[unit.stage]:
            return None
        before = attributes(unit.module, unit.owner) if unit not in self._writes else None
        try:
            with place.computing():
                with effects.recorded():
                    result = original(*effects.args, **effects.kwargs)
                result = self._runtime.read_fields(unit.boundary or unit.path, result)
                if before is not None:
                    self._writes[unit] = written(before, attributes(unit.module, unit.owner))
                values = [_sent(self._runtime.root, write) for write in self._writes[unit]]
                use = f"the result of {unit.path}, which several passes share,"
                return unsharded(map_tensors([result, values], lambda tensor: settled(tensor, use)))
        except Exception as error:
            if fails is not None:
                fails.send([unit.path, f"{type(error).__name__}: {error}", None, None])
            raise

    def _channel(self, place: _Place, stage: StageKey) -> tuple[TreeChannel, int]:
        """How the first rank of a stage reaches the replica, and that rank."""
        src = place.ranks[stage][0]
        if (place.replica, src) not in self._channels:
            self._channels[place.replica, src] = TreeChannel.within(
                place.group, src, self._wire, self._hosts.get(place.replica)
            )
        return self._channels[place.replica, src], src

    def _check(self, sent: str, expected: str) -> None:
        if sent != expected:
            raise RankMismatchError(
                f"rank {self._rank} calls {expected} where another rank of its replica calls {sent}: what the step "
                "does must not depend on the rank (random numbers of its own, the clock, files)"
            )


def _sent(root: nn.Module, write: Written) -> list[Any]:
    """What an attribute holds; nothing where that stays with its rank: objects, and tensors that would take long.

    Private flags are those of libraries, about the module of this rank: which hooks it has, what it has cached.
    """
    path, name, _ = write
    value = vars(root.get_submodule(path)).get(name)
    if isinstance(value, Tensor):
        return [value] if value.numel() <= _MOST and value.layout == torch.strided else []
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return [value] if is_plain and not name.startswith("_") else []


def _as_it_is(module: nn.Module, *_: Any) -> Callable[..., Any]:
    return module.__call__


def _encoder_inputs(model: nn.Module) -> frozenset[str]:
    """The arguments of a model of transformers that `generate` hands to encoders itself."""
    base: Any = getattr(model, "base_model", model)
    kinds = [name for name in dir(type(base)) if name.startswith("get_") and name.endswith("_features")]
    return frozenset(name for kind in kinds for name in inspect.signature(getattr(base, kind)).parameters)


def _without_none(original: Any, inputs: frozenset[str]) -> Callable[..., Any]:
    """Return `original` that is called without those of `inputs` that are None."""

    @wraps(original)
    def generate(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{name: arg for name, arg in kwargs.items() if name not in inputs or arg is not None})

    return generate


def _check_clock(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse generation that ends by the clock: each rank has one of its own, and would end after other tokens.

    Raises:
        StageError: `max_time` is set, in the call, in a configuration or in a criterion.
    """
    values = (*args, *kwargs.values(), getattr(module, "generation_config", None))
    criteria = [criterion for value in values if isinstance(value, list) for criterion in value]
    times = [kwargs.get("max_time"), *(getattr(value, "max_time", None) for value in (*values, *criteria))]
    time = next((time for time in times if isinstance(time, int | float)), None)
    if time is not None:
        raise StageError(
            f"{path or 'self'}.generate is called with max_time={time}, and the clock of each rank would end it after "
            "other tokens: use max_new_tokens, or one stage"
        )


_LOOPS = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def passes_several_times(module: nn.Module, step: str) -> bool:
    """Whether the method `step` of `module` generates, or calls a module with parameters in a loop."""
    return any(
        any("generate" in name for name in names(function) or ())
        or any(_calls_model(module, call, self_name) for self_name, call in _calls_in_loops(function))
        for function in reached(type(module), step)
    )


def _calls_in_loops(function: FunctionType) -> Iterator[tuple[str, ast.Call]]:
    """Yield calls with the name of the function's first argument."""
    tree = tree_of(function)
    self_name = function.__code__.co_varnames[0] if function.__code__.co_argcount else ""
    for loop in ast.walk(tree) if tree is not None else ():
        if isinstance(loop, _LOOPS):
            yield from ((self_name, node) for node in ast.walk(loop) if isinstance(node, ast.Call))


def _calls_model(module: nn.Module, call: ast.Call, self_name: str) -> bool:
    """Whether a call is one of `module`, or of a module with parameters inside of it: ``self.model(...)``."""
    path: list[str] = []
    node: ast.expr = call.func
    while isinstance(node, ast.Attribute):
        path.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in ("self", self_name):
        return False
    called: object = module
    for name in path:
        called = getattr(called, name, None)
    return isinstance(called, nn.Module) and any(True for _ in called.parameters())


FEATURE = InLockStep
