"""One call of an encoder for several microbatches: ``Modality.pipeline.microbatches_per_call``.

Small calls are mostly overhead. So the forwards of a stage are taken in groups of that many, in the order of the
schedule. The first of a group finds the inputs of the others: it runs their steps up to the encoder's call, and keeps
nothing else of these runs. Its own call then computes on all inputs. The calls of the others return their own rows.
Their backwards end at these rows, and the last one of the group goes on through the encoder for all of them.
No message changes its place: an encoder of one stage that nothing feeds needs nothing from other ranks.

Calls are joined where their arguments differ
in nothing but the number of items, and where the first joined call of their form gives each microbatch what a call of
its own does. Other calls are made one by one, with a warning that says why: what writes to buffers or attributes, whose
inputs need gradients, the second call of a step. What a call draws, as for dropout, it draws once for the group, from
the random state of the first microbatch.

It refuses encoders in several stages or after other ones, ranks that share sequences or experts, batch norms in
training mode, and steps that write to their batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.microbatch import leaves
from lightning_mm5d.data.random_state import all_states, kept_random_state, pack_states, seed_all, seed_of
from lightning_mm5d.engine.flight import AroundStep, AroundSteps, Course
from lightning_mm5d.features.joined_calls.rows import (
    ApartError,
    Joint,
    RowCall,
    RowUnits,
    joined_rows,
    prove_rows_alone,
    row_units,
    rows_of_call,
)
from lightning_mm5d.partition.compiled import IN_PLACE, is_compiled_in_place
from lightning_mm5d.partition.parts import has_module, is_metric
from lightning_mm5d.partition.step_uses import Boundary
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import Action, Kind
from lightning_mm5d.sharded.removable import Removable, meanwhile
from lightning_mm5d.sharded.torch_internals import version_of
from lightning_mm5d.source.order import used_fields
from lightning_mm5d.stage import Deferred, Run, Runtime
from lightning_mm5d.stage.payload import unsharded
from lightning_mm5d.stage.step_writes import attributes, written
from lightning_mm5d.stage.view import Stop
from lightning_mm5d.trainer.feature import Attached, Feature, Running
from lightning_mm5d.trainer.kept_values import HOOKED, KeptState

Compute = Callable[..., Any]


class _Reached(Stop):
    """Ends a run that looks for the inputs of an encoder; holds what it came to."""

    def __init__(self, name: str = "", call: RowCall | None = None) -> None:
        self.name, self.call = name, call


@dataclass
class _Group:
    """Neighbouring microbatches of one stage.

    Attributes:
        members: their global ids, in the order of their forwards.
        calls: those that were found of microbatches that have not run, with the name of the boundary.
        joints: joined calls that wait for their backward.
        passed: those whose backward has run.
        is_late: whether something else of the stage is called before the encoder in any of them.
    """

    members: Sequence[int]
    calls: dict[int, tuple[str, RowCall]] = field(default_factory=dict)
    joints: list[Joint] = field(default_factory=list)
    passed: set[int] = field(default_factory=set)
    is_late: bool = False


class JoinedCalls(Removable, AroundSteps, AroundStep):
    """The encoders of one rank whose calls are joined, from the making of this object to `remove`.

    Args:
        runtime: the module and its stages.
        sizes: microbatches of a call, by modality.
        device: where this rank computes.
        tells: whether this rank says what is not joined.
    """

    def __init__(self, runtime: Runtime, sizes: Mapping[str, int], device: torch.device, *, tells: bool) -> None:
        self._runtime, self._device, self._tells = runtime, device, tells
        self._sizes = {view.name: (name, sizes[name]) for view in runtime.stages for name in view.cuts if name in sizes}
        self._units_of: dict[Hashable, RowUnits | None] = {}  # by the form of calls; None where these are not joined
        self._told = set[str]()
        self._course: Course | None = None
        self._groups: dict[tuple[Any, int], _Group] = {}
        self._run: Run | None = None  # the forward that runs, or looks for inputs
        self._looks = False
        self._group, self._member, self._called = _Group([]), 0, set[str]()
        here = {name for view in runtime.stages for name in view.cuts}
        self._modules = {name: self._modules_of(name) for name in sizes.keys() & here}
        for name in sorted(here & runtime.partition.encoders.keys()):
            for boundary in runtime.partition.encoders[name].boundaries:
                self._patch(boundary, name, is_joined=name in sizes)
        for name in sorted(here - runtime.partition.encoders.keys()):
            for layer in dict.fromkeys(runtime.lists[name]):
                self.changes.callback(layer.register_forward_pre_hook(self._look_no_further, prepend=True).remove)

    def _modules_of(self, modality: str) -> list[torch.nn.Module]:
        root, paths = self._runtime.root, self._runtime.partition.encoders[modality].owns
        parts = [root.get_submodule(path) for path in paths if has_module(root, path)]
        return list(dict.fromkeys(module for part in parts for module in part.modules()))

    def _look_no_further(self, *_: Any) -> None:
        if self._looks:
            raise _Reached

    def _patch(self, boundary: Boundary, modality: str, *, is_joined: bool) -> None:
        runtime, module = self._runtime, self._runtime.root.get_submodule(boundary.path)
        method = IN_PLACE if boundary.method == "forward" and is_compiled_in_place(module) else boundary.method
        runtime.wanted.setdefault(boundary.name, used_fields(runtime.root, boundary.path, boundary.method))
        original = getattr(module, method)

        @torch.compiler.disable
        @wraps(original, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            run = runtime.active
            if run is None or runtime.guard.is_dry or modality not in run.stage.cuts or run is not self._run:
                return original(*args, **kwargs)
            if is_joined:
                return self._call(boundary.name, modality, original, args, kwargs)
            self._look_no_further()
            return original(*args, **kwargs)

        self.put_attribute(module, method, call)

    # --- around a step ---

    def step(self, course: Course) -> AroundStep | None:
        """Begin a step; only training steps join calls."""
        self._groups, self._course, self._run = {}, None, None
        forwards: dict[Any, list[int]] = {}
        for action in course.actions if course.step.trains else ():
            if action.kind is Kind.F and action.stage in self._sizes:
                forwards.setdefault(action.stage, []).append(action.microbatch)
        for stage, members in forwards.items():
            _, size = self._sizes[stage]
            for first in range(0, len(members), size):
                group = _Group(members[first : first + size])
                self._groups.update({(stage, member): group for member in group.members})
        self._course = course if self._groups else None
        return self if self._groups else None

    @contextmanager
    def forward(self, run: Run, action: Action) -> Iterator[None]:
        """Look for the inputs of a group before its first forward."""
        group = self._groups.get((action.stage, action.microbatch))
        if group is None:
            yield
            return
        if action.microbatch == group.members[0] and len(group.members) > 1:
            saved_state = KeptState(self._runtime.root)
            try:
                for member in group.members[1:]:
                    saved_state.begin()
                    self._look(run, group, member)
            finally:
                saved_state.restore()
        self._run, self._group, self._member, self._called = run, group, action.microbatch, set()
        group.calls.pop(action.microbatch, None)
        try:
            yield
        finally:
            self._run = None

    @contextmanager
    def backward(self, run: Run, action: Action) -> Iterator[None]:
        """Go on through the encoder after the backward of the last microbatch of a joined call."""
        yield
        group = self._groups.get((action.stage, action.microbatch), _Group([]))
        group.passed.add(action.microbatch)
        for joint in [joint for joint in group.joints if group.passed.issuperset(joint.members)]:
            group.joints.remove(joint)
            joint.backward(run)

    def end(self) -> None:
        """Forget the step."""
        assert not any(group.joints and group.passed for group in self._groups.values())
        self._groups, self._course, self._group = {}, None, _Group([])

    def _look(self, run: Run, group: _Group, member: int) -> None:
        """Run the step of a microbatch up to the encoder's call."""
        assert self._course is not None
        step = self._course.step
        replica, index = divmod(member, self._course.num_microbatches)
        part = step.microbatches[replica][index]
        looking = self._run = Run(self._runtime, run.stage, [], step.structure(part.batch), None, trains=True)
        tensors = [tensor for _, tensor in leaves(part.batch) if isinstance(tensor, Tensor)]
        before, self._looks = [version_of(tensor) for tensor in tensors], True
        try:
            with ExitStack() as stack:
                stack.enter_context(kept_random_state(self._device))
                if step.random_key is not None:
                    seed_all(seed_of(*step.random_key, index, replica), self._device)
                for context in (step.context(), step.uncounted(repeats=True), looking):
                    stack.enter_context(context)
                step.run(part, index)
        except Stop as reached:  # of a microbatch without items, its stage's end
            if isinstance(reached, _Reached) and reached.call is not None:
                group.calls[member] = reached.name, reached.call
            group.is_late |= isinstance(reached, _Reached) and not reached.name
        except Exception as error:  # its own forward raises it again, or has what was not there yet
            self._tell(f"the step does not come to its call in a first look ({error})")
        finally:
            looking.give_up()
            self._looks, self._run = False, None
        if [version_of(tensor) for tensor in tensors] != before:
            rule = "The step writes to its batch before it calls the encoder, and would do so twice"
            name, size = self._sizes[run.stage.name]
            field = f"modalities.{name}.pipeline.microbatches_per_call"
            raise ConfigError(field, size, rule, "Write to a copy, or leave it unset")

    # --- calls ---

    def _call(self, name: str, modality: str, original: Compute, args: tuple, kwargs: dict[str, Any]) -> Any:
        def compute(*args: Any, **kwargs: Any) -> Any:
            return unsharded(self._runtime.read_fields(name, original(*args, **kwargs)))

        try:
            row_call = RowCall.of(args, kwargs, self._circumstances(modality))
        except ApartError as error:
            if self._looks:
                raise _Reached(name) from None
            return self._apart(f"{name} is called alone, because {error}", original, args, kwargs)
        if self._looks:
            raise _Reached(name, row_call)
        if name in self._called:
            return self._apart(f"only the first call of {name} in a step is joined", original, args, kwargs)
        self._called.add(name)
        group, member = self._group, self._member
        joint = next((joint for joint in group.joints if joint.name == name and member in joint.members), None)
        if joint is None:
            joint = self._join(name, modality, compute, row_call)
            if joint is None:
                return original(*args, **kwargs)
        elif not joint.has(member, row_call):
            why = "the step does not repeat: it draws from something other than the global random generators"
            return self._apart(f"{name} gets other inputs than in a first look, or {why}", original, args, kwargs)
        rows = joint.rows(member)
        if joint.is_done and joint in group.joints:
            group.joints.remove(joint)
        return rows

    def _join(self, name: str, modality: str, compute: Compute, row_call: RowCall) -> Joint | None:
        """Call an encoder for all microbatches of a group that have not run; None where it is called for one."""
        group, run = self._group, self._run
        assert run is not None
        if group.calls and not any(call.form == row_call.form for _, call in group.calls.values()):
            what = "have unlike shapes, or meet the encoder in another mode or with other attributes"
            self._tell(f"{name} is called alone, because inputs of neighbouring microbatches {what}")
        if group.is_late and not group.calls:
            self._tell(f"{name} is called alone, because other layers of its stage are called before it")
        mates = [at for at, (boundary, call) in group.calls.items() if boundary == name and call.form == row_call.form]
        members, calls = [self._member, *mates], [row_call, *(group.calls[at][1] for at in mates)]
        has_rows = [  # also by chance: what is proved without is no proof
            isinstance(argument, Tensor) and all(len(call.values[key]) == call.items for call in calls)
            for key, argument in row_call.values.items()
        ]
        form = name, row_call.form, row_call.rows is None, tuple(has_rows)
        with_items = sum(call.items > 0 for call in calls)
        if not mates or with_items < 2 or self._units_of.get(form, True) is None:
            return None
        try:
            args, kwargs = joined_rows(calls)
            shape = self._units_of.get(form)
            if shape is None:
                shape = self._units_of[form] = self._proved(modality, compute, calls)
            before = run.deferred
            deferred = None if before is None else Deferred()
            with meanwhile(run, deferred=deferred):
                result = compute(*args, **kwargs)
            joint = Joint(name, members, calls, result, shape)
            joint.deferred = deferred
            try:
                rows_of_call(result, shape, calls, 0, lambda *_: None)
            except ApartError:  # sizes of items tell now what rows follow
                again = self._proved(modality, compute, calls)
                for place, units in again.items():
                    shape[place] = shape.get(place, units) & units
                joint.rows(self._member)
        except ApartError as error:
            self._units_of[form] = None
            self._tell(f"{name} is called alone, because {error}")
            return None
        for mate in mates:
            del group.calls[mate]
        group.joints.append(joint)
        return joint

    def _proved(self, modality: str, compute: Compute, calls: Sequence[RowCall]) -> RowUnits:
        """Compare calls alone and joined; collective over the ranks that share the encoder."""
        modules = self._modules[modality]
        if any(map(is_metric, modules)):
            raise ApartError("it holds a metric, which would count several microbatches as one")
        caches = torch.is_autocast_cache_enabled()
        tensors = [tensor for call in calls for tensor in call.values.values() if isinstance(tensor, Tensor)]
        why: str | None = None
        with ExitStack() as stack:
            stack.enter_context(meanwhile(self._runtime, active=None))
            stack.enter_context(kept_random_state(self._device))
            stack.enter_context(torch.no_grad())
            if all(tensor.dtype in (torch.float32, torch.float64) for tensor in tensors if tensor.is_floating_point()):
                stack.enter_context(torch.autocast(self._device.type, enabled=False))  # less rounding hides less
            torch.set_autocast_cache_enabled(False)  # a cast without gradients must not serve the step
            stack.callback(torch.set_autocast_cache_enabled, caches)
            saved_state = KeptState(self._runtime.root)
            stack.callback(saved_state.restore)
            saved_state.begin()
            self._fill_zeros(modules, stack)
            before = self._state()
            drawn = pack_states(all_states(self._device))
            single_results = [compute(*args, **kwargs) for args, kwargs in [joined_rows([call]) for call in calls[:1]]]
            if not torch.equal(drawn, pack_states(all_states(self._device))):
                for module in modules:
                    if module.training:
                        stack.callback(setattr, module, "training", True)
                        module.training = False
                single_results = []
            for call in calls[len(single_results) :]:
                args, kwargs = joined_rows([call])
                single_results.append(compute(*args, **kwargs))
            units: RowUnits = {}
            try:
                if (written_name := self._written(before)) is not None:
                    raise ApartError(f"it writes {written_name}, which would be that of several microbatches")
                args, kwargs = joined_rows(calls)
                try:
                    joint = compute(*args, **kwargs)
                except Exception as error:
                    raise ApartError(f"it does not compute several microbatches together ({error})") from error
                units = row_units(joint, single_results, calls)
                prove_rows_alone(joint, units, calls, compute)
            except ApartError as error:
                why = str(error)
        group = self._runtime.sharing(modality)
        flag = torch.tensor(float(why is not None), device=self._device)
        if bool(flag if group is None else group.max(flag)):
            raise ApartError(why or "ranks that share it do not agree")
        return units

    @staticmethod
    def _fill_zeros(modules: Sequence[torch.nn.Module], stack: ExitStack) -> None:
        """Give weights that are all zero small random values until `stack` ends.

        A gate that is zero at the start of training multiplies a dependence between rows by zero, and would hide it.
        """
        for weight in dict.fromkeys(weight for module in modules for weight in module.parameters(recurse=False)):
            if weight.is_floating_point() and not weight.detach().any():
                stack.callback(_show, weight, weight.data)
                _show(weight, torch.randn_like(weight.data) * 0.02)

    def _circumstances(self, modality: str) -> Hashable:
        """What a call of an encoder depends on beside its arguments."""
        plain_values = tuple(
            (name, tuple(value) if isinstance(value, list) else value)
            for module in self._modules[modality]
            for name, value in vars(module).items()
            if name != HOOKED and _is_plain(value)  # private ones, too: adapters that are active
        )
        kind = self._device.type
        return torch.is_grad_enabled(), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), plain_values

    def _state(self) -> tuple[dict[Any, Any], dict[str, Any]]:
        """What all modules hold, as hooks of an encoder may write anywhere, and how often buffers have been written."""
        root = self._runtime.root
        return attributes(root, ""), {name: (id(buffer), version_of(buffer)) for name, buffer in root.named_buffers()}

    def _written(self, before: tuple[dict[Any, Any], dict[str, Any]]) -> str | None:
        """Return the name of something that was written since `before`; what transformers keeps for itself is none."""
        held, versions = self._state()
        for name, version in versions.items():
            if before[1].get(name) != version:
                return name
        for path, name, _ in written(before[0], held):
            is_of_transformers = type(self._runtime.root.get_submodule(path)).__module__.startswith("transformers.")
            if not (is_of_transformers and name.startswith("_")):
                return f"{path}.{name}".lstrip(".")
        return None

    def _apart(self, why: str, original: Compute, args: tuple, kwargs: dict[str, Any]) -> Any:
        self._tell(why)
        return original(*args, **kwargs)

    def _tell(self, why: str) -> None:
        """Say once for each reason why a call is not joined."""
        if why not in self._told:
            self._told.add(why)
            if self._tells:
                warnings.warn(f"microbatches_per_call: {why}", stacklevel=2)


def _is_plain(value: Any) -> bool:
    kinds = (bool, int, float, str)
    return type(value) in kinds or (type(value) in (list, tuple) and all(type(element) in kinds for element in value))


def _show(weight: Tensor, data: Tensor) -> None:
    weight.data = data  # by code of this package, which is no write of the user's step


class MicrobatchesPerCall(Feature):
    """The field `Modality.pipeline.microbatches_per_call`."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._calls = list[JoinedCalls]()

    def check(self, module: pl.LightningModule, plan: Plan, device: torch.device) -> None:
        """Refuse what cannot compute several microbatches in one call."""
        for name, modality in plan.modalities.items():
            field, size = f"modalities.{name}.pipeline.microbatches_per_call", modality.pipeline.microbatches_per_call
            if size == 1:
                continue
            encoder = plan.partition.encoders.get(name)
            if encoder is None or encoder.runs_after:
                rule = "It joins calls of an encoder that nothing feeds, and this modality is none"
                raise ConfigError(field, size, rule, "Leave it unset here")
            self._check_fields(field, size, name, plan)
            for path in encoder.owns:
                part = module.get_submodule(path) if has_module(module, path) else torch.nn.Module()
                for where, layer in part.named_modules(prefix=path):
                    has_statistics = isinstance(layer, _BatchNorm) or getattr(layer, "track_running_stats", False)
                    if isinstance(layer, _NormBase) and has_statistics and layer.training:
                        rule = f"{where} ({type(layer).__name__}) in training mode computes with all items of a call"
                        fix = f"Call eval() on {where} in __init__ or configure_model, or leave it unset"
                        raise ConfigError(field, size, rule, fix)

    def _check_fields(self, field: str, size: int, name: str, plan: Plan) -> None:
        """Refuse other fields of the modality, and of those that run in its stages."""
        held = {name}
        for members in plan.topology.members.values():
            names = {stage.modality for stage in members}
            held |= names if name in names else set()
        for other in sorted(held):
            modality = plan.modalities[other]
            fields: dict[str, tuple[object, object]] = {
                "sharding.reshard_after_forward": (modality.sharding.reshard_after_forward, False),
                "pipeline.interleaved_microbatches": (modality.pipeline.interleaved_microbatches, 1),
                "memory.offload": ("activations" in modality.offloads, False),
                "ep_size": (modality.ep_size, 1),
            }
            if other != name and other in plan.partition.encoders:
                fields["pipeline.microbatches_per_call"] = (modality.pipeline.microbatches_per_call, 1)
            if other == name:
                fields |= {
                    "pp_size": (modality.num_cuts, 1),
                    "cp_size": (modality.cp_size, 1),
                    "tensor.tp_mode": (modality.tensor.tp_mode, "1d"),
                    "memory.cache_features": (modality.memory.cache_features, None),
                }
            for path, (got, usual) in fields.items():
                if got != usual:
                    rule = f"With modalities.{other}.{path} each microbatch is computed by itself"
                    raise ConfigError(field, size, rule, f"Leave it unset here, or modalities.{other}.{path}")

    def needs_schedule(self, plan: Plan) -> bool:
        """Whether any calls are joined, which a step without a schedule does not."""
        return bool(_sizes(plan))

    def cut(self, runtime: Runtime, plan: Plan, device: torch.device) -> Callable[[], None] | None:
        """Stand before the encoders of this rank."""
        self._calls.clear()
        sizes = _sizes(plan)
        if not any(name in view.cuts for view in runtime.stages for name in sizes):
            return None
        (here, *_) = (view.name for view in runtime.stages if sizes.keys() & view.cuts.keys())
        rank = dist.get_rank() if dist.is_initialized() else 0
        tells = rank == min(map(min, plan.topology.instances(here)))
        self._calls.append(JoinedCalls(runtime, sizes, device, tells=tells))
        return self._calls[0].remove

    def attach(self, running: Running) -> Attached | None:
        """Look at the actions of steps."""
        running.engine.around += self._calls
        return None


def _sizes(plan: Plan) -> dict[str, int]:
    """The microbatches of a call, of modalities that join them."""
    sizes = {name: modality.pipeline.microbatches_per_call for name, modality in plan.modalities.items()}
    return {name: size for name, size in sizes.items() if size > 1}


FEATURE = MicrobatchesPerCall
