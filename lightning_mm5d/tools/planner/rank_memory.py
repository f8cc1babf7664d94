"""Estimates the memory of each rank in a training step: a function of a plan, a schedule and shapes.

A step has three phases, and a rank's peak is the largest of theirs:

1. the *schedule*: parameters, gradients as they come, activations of the microbatches in flight, and what one forward
   or backward needs for a moment;
2. the *reduction* of gradients over ranks, as the last backward ends: gradients, the buckets that carry them, and
   activations that are left;
3. the *update*: parameters, gradients, states of optimizers, and what the optimizer needs for a moment.

With main parameters, parameters and gradients have their precision, and what layers compute with is there beside them
in the first two phases.

States of optimizers are there in all three. What is offloaded is on the device only while it is used, and on the host
else. Left out are the libraries themselves, batches that the dataloader prepares, and buffers of gloo or NCCL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_mm5d.partition import StageCut
from lightning_mm5d.partition.costs import KeptOperations
from lightning_mm5d.plan.holdings import DataShard, DataShards
from lightning_mm5d.plan.issued import why_apart
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.plan.sums import summed_by
from lightning_mm5d.schedule import AnySchedule, Graph
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.sharded.kept_results import operations_named
from lightning_mm5d.tools.planner.activation_trace import Storages, Trace, UnitUse
from lightning_mm5d.tools.planner.flights import Flight, Reduced, StageFlight, UnitFlight, flown, reduced
from lightning_mm5d.tools.planner.hollow_tensors import OptimizerStates, StateBytes

BUCKET_BYTES = 25 * 2**20


class RankMemory(NamedTuple):
    """Bytes on one rank.

    Attributes:
        rank: global rank.
        parameters: between steps.
        gradients: when the optimizer steps.
        optimizer: states of optimizers; None where they are not known.
        activations: of the microbatches in flight, at most; None where they are not known.
        buffers: gathered parameters, gradients that are not reduced yet, buckets, and what an operation needs for a
            moment: all that the peak has beside the other columns.
        peak: at most at a time on the device, of what is known.
        host: in host memory, at most.
        together: at most at a time on the device and in host memory, which on a CPU are one memory; with the copies of
            gathered rows that gloo keeps while they are under way.
    """

    rank: int
    parameters: int
    gradients: int
    optimizer: int | None
    activations: int | None
    buffers: int
    peak: int
    host: int
    together: int


@dataclass(frozen=True)
class Step:
    """What is known of a training step beside the plan.

    Attributes:
        module: full; the meta device will do.
        schedule: as `build` takes it.
        num_microbatches: M.
        states: of its optimizers; None where they are not known.
        trace: of one microbatch; None where it is not known.
        bucket_bytes: how much is summed or exchanged at once.
        accumulates: whether gradients of several batches are added up.
    """

    module: nn.Module
    schedule: AnySchedule
    num_microbatches: int
    states: OptimizerStates | None = None
    trace: Trace | None = None
    bucket_bytes: int = BUCKET_BYTES
    accumulates: bool = False

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Of the module, under all their names."""
        return dict(self.module.named_parameters(remove_duplicate=False))

    @cached_property
    def trainable(self) -> frozenset[str]:
        """Names of those that require a gradient."""
        return frozenset(name for name, parameter in self.parameters.items() if parameter.requires_grad)

    @cached_property
    def trained(self) -> frozenset[str]:
        """Of these, the ones that get a gradient: a step may leave some out, as the last layer of a vision tower."""
        return self.trainable if self.trace is None else self.trainable & self.trace.reached

    @cached_property
    def updated(self) -> dict[str, nn.Parameter]:
        """The parameters that get a gradient, each under its first name."""
        return {name: parameter for name, parameter in self.module.named_parameters() if name in self.trained}


class _Held(NamedTuple):
    """A parameter on one rank, in bytes.

    Attributes:
        name: one of its names.
        whole: of the local tensor.
        owned: of the rows that the rank owns.
        shard: who owns which rows; None where it is not shared.
        trained: whether it has a gradient.
        states: of optimizers.
        computes: of the local tensor that layers compute with, where it is another one than `whole`; else 0.
        offloads: what leaves for the host, of the modalities that use it.
    """

    name: str
    whole: int
    owned: int
    shard: DataShard | None
    trained: bool
    states: StateBytes | None
    computes: int
    offloads: frozenset[str]

    @property
    def rest(self) -> int:
        """Of what is there between steps."""
        rows = self.shard is not None and (self.shard.stage == 3 or self.computes)
        return self.owned if rows else self.whole


def memory_of(plan: Plan, step: Step) -> list[RankMemory]:
    """Return the memory of each rank, in their order."""
    return _Estimate(plan, step).ranks()


class _Estimate:
    def __init__(self, plan: Plan, step: Step) -> None:
        self._plan, self._step = plan, step
        self._shards = DataShards(plan)
        self._schedules: dict[tuple[int, ...], tuple[Graph, Any]] = {}
        self._stages: dict[StageKey, StageFlight] = {}

    def ranks(self) -> list[RankMemory]:
        known: dict[Any, RankMemory] = {}
        uneven: dict[Any, list[str]] = {}
        memory = []
        for rank in range(self._plan.layout.size):
            role = self._role(rank)
            if role not in uneven:
                uneven[role] = self._uneven(rank)
            shares = self._shards.owned_by(rank, uneven[role]).values()
            key = role, tuple(stop - start for start, stop in (shard.ranges[shard.place] for shard in shares))
            if key not in known:
                known[key] = self._rank(rank)
            memory.append(known[key]._replace(rank=rank))
        return memory

    def _role(self, rank: int) -> Any:
        """What ranks have in common whose memory differs by the lengths of their rows alone; often few of thousands."""
        plan = self._plan
        replicas = plan.topology.connected_replicas(rank)
        if len(replicas) > 1 or plan.layout.pipelines or callable(self._step.schedule):
            return rank
        places = [(key, plan.topology.places[key][rank]) for key in plan.topology.stages_of(rank)]
        return *places, plan.layout.microbatches(self._step.num_microbatches)[replicas[0]]

    def _uneven(self, rank: int) -> list[str]:
        """The parameters of a rank whose owners have rows of unlike lengths."""
        shards = self._shards.owned_by(rank, self._names(rank))
        return [name for name, shard in shards.items() if len({stop - start for start, stop in shard.ranges}) > 1]

    # --- parameters ---

    def _names(self, rank: int) -> tuple[str, ...]:
        """The parameters of a rank, each under the first of its names."""
        names: dict[int, str] = {}
        for stage in self._plan.topology.stages_of(rank):
            for name in sorted(self._plan.ownership.parameters[stage], key=self._numbers.__getitem__):
                names.setdefault(id(self._step.parameters[name]), name)
        return tuple(names.values())

    def _parameter(self, name: str, rank: int) -> _Held:
        plan, step = self._plan, self._step
        parameter, shape = step.parameters[name], self._shards.local_shape(name, rank)
        shard = self._shards.of(name, rank)
        own_shape = shape if shard is None else shard.own_shape(shape)
        shape = self._shape_in_step(name, rank)
        dtype = plan.held_dtype(parameter)
        size, low = dtype.itemsize, parameter.element_size()
        states: StateBytes | None = StateBytes(0, 0, False)
        if name in step.trained:
            states = None if step.states is None else step.states.of(name, own_shape, dtype)
        users = plan.partition.users(name)
        offloads = frozenset(kind for user in users for kind in plan.modalities[user].offloads)
        if len(users) > 1 or parameter.requires_grad:
            offloads -= {"parameters"}
        return _Held(
            name,
            torch.Size(shape).numel() * size,
            torch.Size(own_shape).numel() * size,
            shard,
            name in step.trained,
            states,
            torch.Size(shape).numel() * low if low != size else 0,
            offloads,
        )

    def _shape_in_step(self, name: str, rank: int) -> tuple[int, ...]:
        """The shape of a parameter as layers compute with it: tokens travel to experts, which stay where they are."""
        shape = self._shards.local_shape(name, rank)
        shard = self._shards.of(name, rank) if self._tokens_travel else None
        return shard.own_shape(shape) if shard is not None and shard.of_experts else shape

    @cached_property
    def _tokens_travel(self) -> bool:
        plan, step = self._plan, self._step
        if not plan.experts:
            return False
        return why_apart(plan, step.schedule, step.num_microbatches, step.trainable) is None

    # --- a rank ---

    def _rank(self, rank: int) -> RankMemory:
        held = [self._parameter(name, rank) for name in self._names(rank)]
        trained = [p for p in held if p.trained]
        rests = [p for p in held if "parameters" not in p.offloads]
        away = sum(p.whole for p in held if "parameters" in p.offloads)
        parameters = sum(p.rest for p in rests)
        gathered, carried = self._gathered(rests)
        gradients = sum(p.owned for p in trained)
        states = sum(p.states.persistent for p in trained if p.states)
        states_away = sum(map(_moved, trained))
        flight = self._flight(rank)
        older = gradients if self._step.accumulates else 0
        base = parameters + states - states_away
        arriving, on_both = self._arriving(trained)
        phases = {
            "schedule": base + gathered + away + older + flight.peak,
            "reduction": base + gathered + older + self._reduction(trained, flight),
            "update": base + arriving + gradients + max(_update(trained), self._exchange(trained)),
        }
        in_schedule = phases["schedule"] - flight.peak + flight.together
        together = max(
            max(in_schedule, phases["reduction"]) + carried,
            base + gradients + max(on_both, self._exchange(trained, copies=1)),
        )
        known = all(p.states for p in trained) if self._step.states is not None else not trained
        peak = max(phases.values())
        shown = parameters + gradients + states - states_away + (flight.activations or 0)
        return RankMemory(
            rank,
            parameters,
            gradients,
            states - states_away if known else None,
            None if self._step.trace is None else flight.activations,
            max(peak - shown, 0),
            peak,
            away + states_away + flight.host,
            together + away + states_away,
        )

    def _gathered(self, rests: Sequence[_Held]) -> tuple[int, int]:
        """Local tensors that are there in a step only; with `reshard_after_forward`, of two layers.

        Also what the messages of one of these layers hold beside them over gloo: the rows that are sent, and a copy of
        all that arrive.
        """
        shared = [p for p in rests if p.rest != p.whole or p.computes]
        layers: dict[tuple[str, int], tuple[int, int]] = {}
        other = 0
        for parameter in shared:
            place, size = self._layer(parameter.name), parameter.computes or parameter.whole
            if place is None or parameter.shard is None:
                other += size
            else:
                whole, carried = layers.get(place, (0, 0))
                layers[place] = whole + size, carried + size + parameter.owned
        wholes = sorted(whole for whole, _ in layers.values())
        return other + sum(wholes[-2:]), max((carried for _, carried in layers.values()), default=0)

    def _layer(self, name: str) -> tuple[str, int] | None:
        """The layer of a parameter that is gathered with its layer."""
        for modality, parts in self._plan.partition.parts.items():
            if (
                self._plan.modalities[modality].sharding.reshard_after_forward
                and (index := parts.index(name)) is not None
            ):
                return modality, index
        return None

    def _reduction(self, trained: Sequence[_Held], flight: Flight) -> int:
        """Gradients, what carries them, and activations that are left meanwhile."""
        if self._plan.layout.size == 1:
            return sum(p.whole for p in trained)
        gradients = [Reduced(p.whole, None if p.shard is None else p.owned) for p in self._in_order(trained)]
        return reduced(gradients, self._step.bucket_bytes, flight.ending)

    def _in_order(self, trained: Sequence[_Held]) -> list[_Held]:
        """Parameters in the order of the module, as optimizers have them."""
        return sorted(trained, key=lambda p: self._numbers[p.name])

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self._step.parameters)}

    def _arriving(self, trained: Sequence[_Held]) -> tuple[int, int]:
        """Offloaded states that are on the device at a time, and what else an update takes on a CPU.

        On the device they are those of two buckets of parameters, of which the second is on its way, or all. What is on
        its way is on the host, too, while the optimizer works on the first.
        """
        if self._step.states is None:
            return 0, _update(trained)
        torchs = all(type(optimizer).__module__.startswith("torch.optim") for optimizer in self._step.states.optimizers)
        if not torchs or any(p.states.together for p in trained if p.states):
            return sum(map(_moved, trained)), sum(map(_moved, trained)) + _update(trained)
        buckets = _buckets([(p.owned, p) for p in self._in_order(trained)], self._step.bucket_bytes)
        arriving = [sum(map(_moved, bucket)) for bucket in buckets]
        working = [_update(bucket) for bucket in buckets]
        on_both = max(map(sum, zip([0, *working], [*arriving, 0], strict=True)))
        return _two_in_a_row(arriving), on_both

    def _exchange(self, trained: Sequence[_Held], copies: int = 0) -> int:
        """The buckets in which rows of parameters that stay whole are exchanged after the update, two at a time.

        Args:
            trained: the parameters.
            copies: that a message makes of what arrives, while it is under way.
        """
        exchanged = [p for p in self._in_order(trained) if p.shard is not None and p.shard.stage < 3 and not p.computes]
        buckets = _buckets([(p.whole, p) for p in exchanged], self._step.bucket_bytes)
        carried = _two_in_a_row([sum(p.whole + p.owned for p in bucket) for bucket in buckets])
        return carried + copies * max(sum(p.whole for p in bucket) for bucket in buckets)

    # --- activations ---

    def _flight(self, rank: int) -> Flight:
        plan, step = self._plan, self._step
        replicas = plan.topology.connected_replicas(rank)
        count = plan.layout.microbatches(step.num_microbatches)[replicas[0]]
        if replicas not in self._schedules:
            self._schedules[replicas] = plan.graphs.schedule(step.schedule, count, step.trainable, rank=rank)
        graph, schedule = self._schedules[replicas]
        actions = plan.topology.actions_of(rank, schedule, count)
        stages = plan.topology.stages_of(rank)
        for key in stages:
            if key not in self._stages:
                self._stages[key] = self._stage(key, rank, graph.has_backward(key))
        return flown(actions, {key: self._stages[key] for key in stages})

    def _stage(self, key: StageKey, rank: int, has_backward: bool) -> StageFlight:
        plan, step = self._plan, self._step
        cuts = {cut.name: cut for cuts in plan.partition.stages.values() for cut in cuts}
        members = plan.topology.members[key]
        order = sorted(members, key=lambda member: plan.topology.order.index(member.modality))
        flights: list[UnitFlight] = []
        casts: Storages = {}
        calls = {member: plan.modalities[member.modality].pipeline.microbatches_per_call for member in order}
        counted: set[int] = set()  # one that several units use gets its gradient in the backward of the first of them
        for member in order:
            units, span = plan.partition.units[member], span_of(cuts[member], plan.partition.stages[member.modality])
            uses = [UnitUse()] * len(units) if step.trace is None else step.trace.units[member.modality][span]
            layers = plan.partition.kept_operations.get(member.modality, ())
            for number, (unit, use) in enumerate(zip(units, uses, strict=True), span.start):
                operations = layers[number - 1] if 0 < number <= len(layers) else None
                again = 0 if operations is None else sum(use.saved.values())
                sizes = self._gradients(unit.costs, rank, counted)
                flight = UnitFlight(
                    saved=_storages(use, operations),
                    working=use.working + again,
                    gradients=sum(sizes.values()),
                    laid=sum(size for name, size in sizes.items() if self._is_laid(name, rank)),
                    away="activations" in plan.modalities[member.modality].offloads,
                    put_off=use.put_off,
                    joins=calls[member] > 1,
                )
                flights.append(flight)
                casts |= use.casts
        passed = self._passed(key, members, cuts)
        return StageFlight(flights, passed, has_backward, max(calls.values()), sum(casts.values()))

    def _is_laid(self, name: str, rank: int) -> bool:
        """Whether a gradient has memory from the start of a step: ranks sum all of it."""
        if self._shards.of(name, rank) is not None:
            return False
        return any(len(summed.ranks) > 1 and summed.rows is None for summed in summed_by(self._plan, name, rank))

    def _gradients(self, names: Iterable[str], rank: int, counted: set[int]) -> dict[str, int]:
        """Bytes of the gradients of parameters that are not counted yet."""
        every = {id(self._step.parameters[name]): name for name in names if name in self._step.trained}
        uncounted = {key: name for key, name in every.items() if key not in counted}
        counted.update(uncounted)
        return {
            name: torch.Size(self._shape_in_step(name, rank)).numel()
            * self._plan.held_dtype(self._step.parameters[name]).itemsize
            for name in uncounted.values()
        }

    def _passed(self, key: StageKey, members: Sequence[StageKey], cuts: Mapping[StageKey, StageCut]) -> Storages:
        """What a stage receives and sends: hidden states between layers, and results of encoders."""
        plan, trace = self._plan, self._step.trace
        passed: Storages = {}
        if trace is None:
            return passed
        for member in members:
            cut, stages = cuts[member], plan.partition.stages[member.modality]
            if cut.index > 0:
                passed |= trace.units[member.modality][cut.first + 1].hidden
            if cut is not stages[-1]:
                passed |= trace.units[member.modality][cut.last + 1].hidden
            elif any(member.modality in names for names in plan.topology.consumes.values()):
                passed |= trace.exits[member.modality]
        for name in plan.topology.consumes.get(key, ()):
            passed |= trace.exits[name]
        return passed


def _buckets(parameters: Iterable[tuple[int, _Held]], most_bytes: int) -> list[list[_Held]]:
    """Return the parameters of each bucket, given the size of each of them."""
    size, buckets = 0, [list[_Held]()]
    for nbytes, parameter in parameters:
        if size >= most_bytes:
            buckets.append([])
            size = 0
        size += nbytes
        buckets[-1].append(parameter)
    return buckets


def _moved(parameter: _Held) -> int:
    """Return the bytes of its states that are on the host between steps."""
    return parameter.states.persistent if parameter.states and "optimizer" in parameter.offloads else 0


def _two_in_a_row(buckets: Sequence[int]) -> int:
    """Return what two buckets in a row cost at most."""
    return max(sum(buckets[number : number + 2]) for number in range(len(buckets)))


def _update(trained: Sequence[_Held]) -> int:
    """What optimizers need for a moment."""
    states = [p.states for p in trained if p.states]
    together = sum(state.working for state in states if state.together)
    return max([together, *(state.working for state in states if not state.together)], default=0)


def span_of(cut: StageCut, cuts: Sequence[StageCut]) -> slice:
    """Return where the units of a stage are in the row of its modality, of which unit 0 runs before the first layer."""
    return slice(cut.first + (cut.index > 0), None if cut is cuts[-1] else cut.last + 1)


def _storages(use: UnitUse, operations: KeptOperations) -> Storages:
    """What a unit keeps, where it runs again but for some operations; None for a unit that does not."""
    if operations is None or not use.saved:
        return use.saved
    storages = dict(use.inputs)
    for operation in operations_named(operations):
        storages |= use.results.get(operation, {})
    return storages
