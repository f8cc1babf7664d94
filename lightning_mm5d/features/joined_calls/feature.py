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

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.microbatch import leaves
from lightning_mm5d.data.random_state import all_states, kept_random_state, pack_states, seed_all, seed_of
from lightning_mm5d.engine.flight import AroundStep, AroundSteps, Course
from lightning_mm5d.features.joined_calls.rows import (
    ApartError,
    RowCall,
    RowUnits,
    is_same_argument,
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
from lightning_mm5d.sharded.collectives import warn_on_first_rank
from lightning_mm5d.sharded.removable import Removable, meanwhile
from lightning_mm5d.sharded.torch_internals import version_of
from lightning_mm5d.source.order import used_fields
from lightning_mm5d.stage import Deferred, Run, Runtime
from lightning_mm5d.stage.payload import unsharded
from lightning_mm5d.stage.taps import mark_dependent
from lightning_mm5d.stage.view import Stop
from lightning_mm5d.stage.written import attributes, written
from lightning_mm5d.trainer.feature import Attached, Feature, Running

Compute = Callable[..., Any]


class _Reached(Stop):
    """Ends a run that looks for the inputs of an encoder; holds what it came to."""

    def __init__(self, name: str = "", call: RowCall | None = None) -> None:
        self.name, self.call = name, call


@dataclass
class _Source:
    """A tensor of a joined result, whose rows are leaves of the graphs of microbatches."""

    tensor: Tensor
    ends: Sequence[int]
    leaves: dict[int, Tensor] = field(default_factory=dict)

    def gradient(self) -> Tensor | None:
        """Return the gradient of all rows, zero where none came; None where none came at all."""
        if all(leaf.grad is None for leaf in self.leaves.values()):
            return None
        parts = list[Tensor]()
        for number, (start, end) in enumerate(pairwise(self.ends)):
            leaf = self.leaves.get(number)
            own = None if leaf is None else leaf.grad
            parts.append(self.tensor.new_zeros((end - start, *self.tensor.shape[1:])) if own is None else own)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Joint:
    """A joined call, from its forward to its backward."""

    def __init__(
        self, name: str, members: Sequence[int], calls: Sequence[RowCall], result: Any, units: RowUnits
    ) -> None:
        self.name, self.members, self.calls, self._result, self._units = name, members, calls, result, units
        self._versions = [_versions(call) for call in calls]
        self.deferred: Deferred | None = None
        self.sources: dict[int, _Source] = {}

    def has(self, member: int, call: RowCall) -> bool:
        """Whether a microbatch calls the encoder with what it was called with for it."""
        number = self.members.index(member)
        there = self.calls[number]
        if there.form != call.form or self._versions[number] != _versions(there):
            return False
        return all(map(is_same_argument, call.values.values(), there.values.values()))

    def rows(self, member: int) -> Any:
        """Return the result of one microbatch."""
        return rows_of_call(self._result, self._units, self.calls, self.members.index(member), self._taken)

    def _taken(self, number: int, tensor: Tensor, ends: Sequence[int]) -> Tensor:
        rows = tensor[ends[number] : ends[number + 1]]
        if tensor.requires_grad:
            source = self.sources.setdefault(id(tensor), _Source(tensor, ends))
            rows = source.leaves.setdefault(number, rows.detach().requires_grad_())  # of one at two places
        own = rows.clone()  # a step may write to it
        mark_dependent(own)
        return own

    def backward(self, run: Run) -> None:
        """Go on through the encoder, in the backward of the last microbatch."""
        found = [(get_gradient_edge(one.tensor), one.gradient()) for one in self.sources.values()]
        self.sources, self._result = {}, None
        edges, gradients = (
            [edge for edge, one in found if one is not None],
            [one for _, one in found if one is not None],
        )
        if edges:
            with self.deferred or nullcontext(), meanwhile(run, deferred=self.deferred):
                run.backward(edges, gradients)  # type: ignore[arg-type]
        if self.deferred is not None and run.deferred is not None:
            run.deferred.take(self.deferred)


def _versions(call: RowCall) -> list[int]:
    """How often each tensor among the arguments of a call has been written."""
    return [version_of(one) for one in call.values.values() if isinstance(one, Tensor)]


@dataclass
class _Group:
    """Neighbouring microbatches of one stage.

    Attributes:
        members: their global ids, in the order of their forwards.
        found: the calls that were found of those that have not run, with the name of the boundary.
        joints: joined calls that wait for their backward.
        passed: those whose backward has run.
    """

    members: Sequence[int]
    found: dict[int, tuple[str, RowCall]] = field(default_factory=dict)
    joints: list[_Joint] = field(default_factory=list)
    passed: set[int] = field(default_factory=set)


class JoinedCalls(Removable, AroundSteps, AroundStep):
    """The encoders of one rank whose calls are joined, from the making of this object to `remove`.

    Args:
        runtime: the module and its stages.
        sizes: microbatches of a call, by modality.
        device: where this rank computes.
    """

    def __init__(self, runtime: Runtime, sizes: Mapping[str, int], device: torch.device) -> None:
        self._runtime, self._device = runtime, device
        self._sizes = {view.name: sizes[name] for view in runtime.stages for name in view.cuts if name in sizes}
        self._units_of: dict[Hashable, RowUnits | None] = {}  # by the form of calls; None where these are not joined
        self._told = set[str]()
        self._course: Course | None = None
        self._groups: dict[tuple[Any, int], _Group] = {}
        self._run: Run | None = None  # the forward that runs, or looks for inputs
        self._looks = False
        self._group, self._member, self._called = _Group([]), 0, set[str]()
        here = {name for view in runtime.stages for name in view.cuts}
        for name in sorted(here & runtime.partition.encoders.keys()):
            for boundary in runtime.partition.encoders[name].boundaries:
                self._patch(boundary, name, is_joined=name in sizes)
        for name in sorted(here - runtime.partition.encoders.keys()):
            for layer in dict.fromkeys(runtime.lists[name]):
                self.changes.callback(layer.register_forward_pre_hook(self._look_no_further, prepend=True).remove)

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
            if self._looks:
                raise _Reached
            return original(*args, **kwargs)

        self.put_attribute(module, method, call)

    # --- around a step ---

    def step(self, course: Course) -> AroundStep | None:
        """Begin a step; only training steps join calls."""
        self._groups, self._course, self._run = {}, course, None
        forwards: dict[Any, list[int]] = {}
        for action in course.actions if course.step.trains else ():
            if action.kind is Kind.F and action.stage in self._sizes:
                forwards.setdefault(action.stage, []).append(action.microbatch)
        for stage, members in forwards.items():
            size = self._sizes[stage]
            for first in range(0, len(members), size):
                group = _Group(members[first : first + size])
                self._groups.update({(stage, member): group for member in group.members})
        return self if self._groups else None

    @contextmanager
    def forward(self, run: Run, action: Action) -> Iterator[None]:
        """Look for the inputs of a group before its first forward."""
        group = self._groups.get((action.stage, action.microbatch))
        if group is None:
            yield
            return
        if action.microbatch == group.members[0]:
            for member in group.members[1:]:
                self._look(run, group, member)
        self._run, self._group, self._member, self._called = run, group, action.microbatch, set()
        group.found.pop(action.microbatch, None)
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
        for joint in [one for one in group.joints if group.passed.issuperset(one.members)]:
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
        tensors = [one for _, one in leaves(part.batch) if isinstance(one, Tensor)]
        before, self._looks = [version_of(one) for one in tensors], True
        try:
            with ExitStack() as stack:
                stack.enter_context(kept_random_state(self._device))
                if step.random_key is not None:
                    seed_all(seed_of(*step.random_key, index, replica), self._device)
                for context in (step.context(), step.uncounted(), looking):
                    stack.enter_context(context)
                step.run(part, index)
        except _Reached as reached:
            if reached.call is not None:
                group.found[member] = reached.name, reached.call
        except Exception as error:  # its own forward raises it again, or has what was not there yet
            self._tell(f"the step does not come to its call in a first look ({error})")
        finally:
            self._looks, self._run = False, None
        if [version_of(one) for one in tensors] != before:
            rule = "The step writes to its batch before it calls the encoder, and would do so twice"
            field = f"modalities.{run.stage.name.modality}.pipeline.microbatches_per_call"
            raise ConfigError(field, self._sizes[run.stage.name], rule, "Write to a copy, or leave it unset")

    # --- calls ---

    def _call(self, name: str, modality: str, original: Compute, args: tuple, kwargs: dict[str, Any]) -> Any:
        def compute(*args: Any, **kwargs: Any) -> Any:
            return unsharded(self._runtime.read_fields(name, original(*args, **kwargs)))

        try:
            own = RowCall.of(args, kwargs)
        except ApartError as error:
            if self._looks:
                raise _Reached from None
            return self._apart(f"{name} is called alone, because {error}", original, args, kwargs)
        if self._looks:
            raise _Reached(name, own)
        if name in self._called:
            return self._apart(f"only the first call of {name} in a step is joined", original, args, kwargs)
        self._called.add(name)
        group, member = self._group, self._member
        joint = next((one for one in group.joints if one.name == name and member in one.members), None)
        if joint is None:
            joint = self._join(name, modality, compute, own)
            if joint is None:
                return original(*args, **kwargs)
        elif not joint.has(member, own):
            return self._apart(f"{name} gets other inputs than in a first look", original, args, kwargs)
        return joint.rows(member)

    def _join(self, name: str, modality: str, compute: Compute, own: RowCall) -> _Joint | None:
        """Call an encoder for all microbatches of a group that have not run; None where it is called for one."""
        group, run = self._group, self._run
        assert run is not None
        if group.found and not any(call.form == own.form for _, call in group.found.values()):
            self._tell(f"{name} is called alone, because inputs of neighbouring microbatches have unlike shapes")
        mates = [at for at, (other, call) in group.found.items() if other == name and call.form == own.form]
        members, calls = [self._member, *mates], [own, *(group.found[at][1] for at in mates)]
        has_rows = [  # also by chance: what is proved without is no proof
            isinstance(one, Tensor) and all(len(call.values[key]) == call.items for call in calls)
            for key, one in own.values.items()
        ]
        is_training = any(one.training for _, one in self._parts(modality))
        form = name, own.form, own.rows is None, tuple(has_rows), is_training
        if not mates or self._units_of.get(form, True) is None:
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
            joint = _Joint(name, members, calls, result, shape)
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
            del group.found[mate]
        group.joints.append(joint)
        return joint

    def _parts(self, modality: str) -> Iterator[tuple[str, torch.nn.Module]]:
        for path in self._runtime.partition.encoders[modality].owns:
            if has_module(self._runtime.root, path):
                yield path, self._runtime.root.get_submodule(path)

    def _proved(self, modality: str, compute: Compute, calls: Sequence[RowCall]) -> RowUnits:
        """Compare calls alone and joined; collective over the ranks that share the encoder."""
        modules = list(dict.fromkeys(module for _, part in self._parts(modality) for module in part.modules()))
        caches = torch.is_autocast_cache_enabled()
        why: str | None = None
        with ExitStack() as stack:
            stack.enter_context(meanwhile(self._runtime, active=None))
            stack.enter_context(kept_random_state(self._device))
            stack.enter_context(torch.no_grad())
            torch.set_autocast_cache_enabled(False)  # a cast without gradients must not serve the step
            stack.callback(torch.set_autocast_cache_enabled, caches)
            drawn = pack_states(all_states(self._device))
            alone = [compute(*args, **kwargs) for args, kwargs in [joined_rows([call]) for call in calls[:1]]]
            if not torch.equal(drawn, pack_states(all_states(self._device))):
                for module in modules:
                    if module.training:
                        stack.callback(setattr, module, "training", True)
                        module.training = False
                alone = []
            before = self._state(modality)
            for call in calls[len(alone) :]:
                args, kwargs = joined_rows([call])
                alone.append(compute(*args, **kwargs))
            units: RowUnits = {}
            try:
                if (found := self._written(modality, before)) is not None:
                    raise ApartError(f"it writes {found}, which would be that of several microbatches")
                args, kwargs = joined_rows(calls)
                try:
                    joint = compute(*args, **kwargs)
                except Exception as error:
                    raise ApartError(f"it does not compute several microbatches together ({error})") from error
                units = row_units(joint, alone, calls)
                prove_rows_alone(joint, units, calls, compute)
            except ApartError as error:
                why = str(error)
        group = self._runtime.sharing(modality)
        flag = torch.tensor(float(why is not None), device=self._device)
        if bool(flag if group is None else group.max(flag)):
            raise ApartError(why or "ranks that share it do not agree")
        return units

    def _state(self, modality: str) -> tuple[dict[Any, Any], dict[str, Any]]:
        """What an encoder's modules hold, and how often each buffer and metric has been written."""
        held, versions = dict[Any, Any](), dict[str, Any]()
        for path, part in self._parts(modality):
            held |= attributes(part, path)
            versions |= {name: (id(one), version_of(one)) for name, one in part.named_buffers(prefix=path)}
            versions |= {name: one.update_count for name, one in part.named_modules(prefix=path) if is_metric(one)}
        return held, versions

    def _written(self, modality: str, before: tuple[dict[Any, Any], dict[str, Any]]) -> str | None:
        """Return the name of something that was written since `before`; what transformers keeps for itself is none."""
        held, versions = self._state(modality)
        for name, version in versions.items():
            if before[1].get(name) != version:
                return name
        for path, name, _ in written(before[0], held):
            is_of_transformers = type(self._runtime.root.get_submodule(path)).__module__.startswith("transformers.")
            if not (is_of_transformers and name.startswith("_")):
                return f"{path}.{name}"
        return None

    def _apart(self, why: str, original: Compute, args: tuple, kwargs: dict[str, Any]) -> Any:
        self._tell(why)
        return original(*args, **kwargs)

    def _tell(self, why: str) -> None:
        """Say once for each reason why a call is not joined."""
        if why not in self._told:
            self._told.add(why)
            warn_on_first_rank(f"microbatches_per_call: {why}")


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
                for where, one in part.named_modules(prefix=path):
                    has_statistics = isinstance(one, _BatchNorm) or getattr(one, "track_running_stats", False)
                    if isinstance(one, _NormBase) and has_statistics and one.training:
                        rule = f"{where} ({type(one).__name__}) in training mode computes with all items of a call"
                        fix = f"Call eval() on {where} in __init__ or configure_model, or leave it unset"
                        raise ConfigError(field, size, rule, fix)

    def _check_fields(self, field: str, size: int, name: str, plan: Plan) -> None:
        """Refuse other fields of the modality, and of those that run in its stages."""
        held = {name}
        for members in plan.topology.members.values():
            found = {one.modality for one in members}
            held |= found if name in found else set()
        for other in sorted(held):
            modality = plan.modalities[other]
            alone: dict[str, tuple[object, object]] = {
                "sharding.reshard_after_forward": (modality.sharding.reshard_after_forward, False),
                "pipeline.interleaved_microbatches": (modality.pipeline.interleaved_microbatches, 1),
                "memory.offload": ("activations" in modality.offloads, False),
                "ep_size": (modality.ep_size, 1),
            }
            if other == name:
                alone |= {
                    "pp_size": (modality.num_cuts, 1),
                    "cp_size": (modality.cp_size, 1),
                    "tensor.tp_mode": (modality.tensor.tp_mode, "1d"),
                    "memory.cache_features": (modality.memory.cache_features, None),
                }
            for path, (got, usual) in alone.items():
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
        self._calls.append(JoinedCalls(runtime, sizes, device))
        return self._calls[0].remove

    def attach(self, running: Running) -> Attached | None:
        """Look at the actions of steps."""
        running.engine.around += self._calls
        return None


def _sizes(plan: Plan) -> dict[str, int]:
    """The microbatches of a call, of modalities that join them."""
    found = {name: one.pipeline.microbatches_per_call for name, one in plan.modalities.items()}
    return {name: size for name, size in found.items() if size > 1}


FEATURE = MicrobatchesPerCall
