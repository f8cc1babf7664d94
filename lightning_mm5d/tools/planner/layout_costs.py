"""Seconds and bytes of a model's layers on the ranks of a cluster, and of the steps of whole layouts.

One microbatch is traced twice: on one rank, and on two tensor parallel ranks. What one rank has of p is ``a + b / p``,
which the two traces give; it is proportional to the samples of a microbatch and to one over `cp_size`. So no other
layout is traced. Time is a roofline by operation: products by flops, all else by bytes.

A forward has the sums of tensor parallel ranks, what context parallel ranks wait for in attentions (nothing under
``items`` with a sample for each rank), and the exchanges of experts; so has its backward. Each `cp_mode` sends and
copies what `context_parallel.exchange` does: gathers of a few key heads or hops of a ring while the block before them
computes, all-to-alls which nothing hides. Messages between stages take their time in the simulated step. Gradients are
summed while the last backward runs, and rows of parameters are gathered before the step or after it, as the engine
does. Each microbatch adds its gradients to those before, of which experts are taken to be most where layers have them.
The update takes as long as the bytes that its operations read and write, or their part of a measured update of all
parameters. The embedding's and the head's sums take no time. Later stages of the language model run the user's step up
to its first layer again.

Ranks of a node compute at once. Where they share memory or cores, all that they compute takes `compute_slowdown` times
as long as on a rank alone, on which layers and updates are measured.

A message of n bytes takes ``alpha + n * beta`` seconds: alpha is the latency of a link, beta one over its bandwidth.
There are two classes of links, inside a node and between nodes; a group that spans nodes goes at the pace of the
latter. A ring for attentions with several ranks of each node sends to other nodes from one of these at a time, with the
bandwidth of all. Collectives are rings of p ranks, and pairwise for all-to-all (R. Thakur, R. Rabenseifner, W. Gropp,
*Optimization of Collective Communication Operations in MPICH*, IJHPCA 19, 2005). A group of one rank takes no time.
Where links have an overhead, each end of a message between stages computes nothing for ``o + n * O`` seconds (T.
Hoefler, T. Schneider, A. Lumsdaine, *LogGOPSim*, HPDC 2010): on CPUs the cores of layers move messages, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from lightning_mm5d.config.modality import Modality
from lightning_mm5d.context_parallel.exchange.attention import STEP_BYTES
from lightning_mm5d.layout.layout import even_ranges
from lightning_mm5d.partition.costs import Unit, costed, step_costs
from lightning_mm5d.plan.holdings import DataShards
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import AnySchedule, simulate
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.tools.planner.activation_trace import Storages, Trace, UnitUse
from lightning_mm5d.tools.planner.profile import Measured, Work
from lightning_mm5d.tools.planner.rank_memory import Step, span_of


@dataclass(frozen=True)
class Link:
    """One class of links.

    Attributes:
        latency: seconds of an empty message, alpha.
        bandwidth: bytes per second of one rank while all ranks of its node send.
        overhead: seconds in which a stage that sends or receives a message computes nothing, o.
        overhead_per_byte: the same for each byte, O.
    """

    latency: float
    bandwidth: float
    overhead: float = 0.0
    overhead_per_byte: float = 0.0

    def message(self, size: float) -> float:
        """Return the seconds of a message of `size` bytes from one rank to another."""
        return self.latency + size / self.bandwidth

    def taken(self, size: float) -> float:
        """Return the seconds that each end of a message of `size` bytes does not compute."""
        return self.overhead + size * self.overhead_per_byte

    def all_gather(self, ranks: int, size: float) -> float:
        """Return the seconds until each of `ranks` has all `size` bytes, of which each had an equal part.

        A reduce-scatter of `size` bytes on each rank takes as long, and so does an all-to-all of which each rank has
        `size` bytes: ``(p - 1) * alpha + (p - 1) / p * n * beta``.
        """
        return (ranks - 1) * (self.latency + size / ranks / self.bandwidth)

    reduce_scatter = all_to_all = all_gather

    def all_reduce(self, ranks: int, size: float) -> float:
        """Return the seconds of a sum of `size` bytes over `ranks`: a reduce-scatter and an all-gather."""
        return self.reduce_scatter(ranks, size) + self.all_gather(ranks, size)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Ranks, their devices and links.

    Attributes:
        nodes: number of nodes.
        ranks: of each node.
        memory: bytes of each rank.
        inside: links within a node.
        between: links between nodes.
        flops: floating-point operations per second of a device.
        efficiency: part of them that matrix products reach, above 0 and at most 1.
        memory_bandwidth: bytes per second that a device reads or writes.
        compute_slowdown: how many times as long a device computes while all ranks of its node do as while it does
            alone; 1 where they share nothing.
    """

    nodes: int
    ranks: int
    memory: int
    inside: Link = Link(5e-6, 300e9)
    between: Link = Link(1e-5, 25e9)
    flops: float = 400e12
    efficiency: float = 1.0
    memory_bandwidth: float = 2e12
    compute_slowdown: float = 1.0

    @property
    def size(self) -> int:
        """Number of all ranks."""
        return self.nodes * self.ranks

    def link(self, ranks: Collection[int]) -> Link:
        """Return the links of a group: those inside a node where all of its ranks are on one."""
        return self.inside if len({rank // self.ranks for rank in ranks}) < 2 else self.between

    def seconds(self, flops: float, moved: float) -> float:
        """Return how long a device computes: products by its flops, all else by the bytes that it reads and writes."""
        seconds = flops / (self.flops * self.efficiency) + moved / self.memory_bandwidth
        return seconds * self.compute_slowdown


_Messages = dict[tuple[StageKey, StageKey], tuple[Link, float]]
"""for stages that send to each other their link, and the bytes that one rank sends of a microbatch"""
_ATTENTION_BACKWARD = 2.5  # products of a fused attention's backward over those of its forward: 5 of 2
_ADDED = 3  # times a gradient's bytes that adding it to those before reads and writes
_LEAST = 1e-15  # seconds of a unit


class StepTime(NamedTuple):
    """One simulated step.

    Attributes:
        seconds: until the last rank has its gradients, and the rows of its parameters.
        bubble: the idle share of the ranks' time.
    """

    seconds: float
    bubble: float


@dataclass(frozen=True)
class LayoutCosts:
    """What layers cost on a cluster.

    Args:
        cluster: its links and devices.
        of_one: the trace of one rank.
        of_two: that of two tensor parallel ranks, where layers can be sharded.
        samples: of the traced microbatch.
        rows: for each modality its units, by their parameters.
        step: what is known of a step beside the plan.
        scales: for each unit of some modalities its measured time over that of the roofline.
        update_scale: the same for the step of the optimizers.
        known: units that were counted.
    """

    cluster: Cluster
    of_one: Trace
    of_two: Trace
    samples: int
    rows: Mapping[str, Sequence[Unit]]
    step: Step
    scales: Mapping[str, Sequence[Measured]] = field(default_factory=dict)
    update_scale: float = 1.0
    known: dict[Any, list[Unit]] = field(default_factory=dict)

    def trace(self, modalities: Mapping[str, Modality], samples: float) -> Trace:
        """Return the trace of a microbatch of so many samples on one rank of a layout."""
        units, exits = {}, {}
        for name, modality in modalities.items():
            factor = samples / self.samples / modality.cp_size

            def size(single: float, of_two: float, tp: int = modality.tp_size, factor: float = factor) -> int:
                return round(_on_ranks(single, of_two, tp) * factor)

            def of_weight(single: float, of_two: float, tp: int = modality.tp_size) -> int:
                return round(_on_ranks(single, of_two, tp))

            units[name] = [_use(*pair, size, of_weight) for pair in self._pairs(name)]
            if name in self.of_one.exits:
                exits[name] = _storages(self.of_one.exits[name], self.of_two.exits[name], size)
        return replace(self.of_one, units=units, exits=exits)

    def units(self, name: str, modality: Modality, samples: float) -> list[Unit]:
        """Return the units of a modality in seconds on a rank, for a microbatch of so many samples."""
        tp, cp, ep = modality.tp_size, modality.cp_size, modality.ep_size
        key = name, tp, cp, ep, modality.context, samples
        if key not in self.known:
            factor = samples / self.samples / cp
            scales = self.scales.get(name, [Measured(1.0, 1.0)] * len(self.rows[name]))
            pairs = zip(self.rows[name], scales, self._pairs(name), strict=True)
            self.known[key] = [self._unit(unit, *pair, modality, factor, scale) for unit, scale, pair in pairs]
        return self.known[key]

    def measured(
        self, told: Mapping[str, Sequence[Measured]], loss_modality: str, update: float | None = None
    ) -> LayoutCosts:
        """Return the costs by what is measured or given; `self` has no scales.

        A backward that was not measured, or that the roofline does not have, gets the scale of its forward.

        Args:
            told: for some modalities seconds of each unit, or of all together, on one rank that computes alone.
            loss_modality: name of the language model.
            update: seconds of the optimizers' step on all parameters there; None where only the roofline is known.
        """
        scales, trainable = {}, self.step.trainable
        solo = replace(self, cluster=replace(self.cluster, compute_slowdown=1.0), known={})
        encoders = [unit for name, row in self.rows.items() if name != loss_modality for unit in row]
        passes_on = any(not trainable.isdisjoint(unit.costs) for unit in encoders)
        for name, seconds in told.items():
            units = solo.units(name, Modality(), self.samples)
            backwards = step_costs(units, trainable, passes_on and name == loss_modality)
            guessed = [Measured(unit.forward, both - unit.forward) for unit, both in zip(units, backwards, strict=True)]
            if len(seconds) == len(guessed):
                is_known = any(each.backward for each in seconds)  # then 0 is a backward that takes no time
                scales[name] = [_scale(*pair, is_known) for pair in zip(seconds, guessed, strict=True)]
            else:
                forward, backward = (sum(part) for part in zip(*guessed, strict=True))
                scales[name] = [_scale(seconds[0], Measured(forward, backward))] * len(guessed)
        moved = sum(self._moved(name, tuple(p.shape), p.dtype) for name, p in self.step.updated.items())
        update_scale = update / solo.cluster.seconds(0.0, moved) if update and moved else 1.0
        return replace(self, scales=scales, update_scale=update_scale, known={})

    def _moved(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes that an optimizer reads and writes where a rank has a part of `shape`; 0 where they are not known."""
        states = None if self.step.states is None else self.step.states.of(name, shape, dtype)
        return 0 if states is None else states.moved

    def _unit(self, unit: Unit, use: UnitUse, two: UnitUse, modality: Modality, factor: float, scale: Measured) -> Unit:
        tp, ep = modality.tp_size, modality.ep_size
        work = _work(use, two, tp, factor)
        within, beyond = (self.cluster.link(range(size)) for size in (tp, tp * ep))
        sums = {p.source: p.input for p in two.products if p.kind == "column" and p.passes}
        results = [p.output for p in two.products if p.kind == "row"]
        waits, waits_back = self._context_waits(modality, work, scale, factor)
        routed = 2 * beyond.all_to_all(ep, work.routed)
        forward = self.cluster.seconds(work.flops + work.attention, work.moved) * scale.forward + waits + routed
        forward = max(forward + sum(within.all_reduce(tp, size * factor) for size in results), _LEAST)
        backward = self.cluster.seconds(work.flops + _ATTENTION_BACKWARD * work.attention, 2 * work.moved)
        backward = (
            backward * scale.backward
            + waits_back
            + routed
            + sum(within.all_reduce(tp, size * factor) for size in sums.values())
        )
        trained = {name: cost for name, cost in unit.costs.items() if name in self.step.trainable}
        added = _ADDED * sum(self.step.parameters[name].nbytes for name in trained) / (tp * ep)
        weight = self.cluster.seconds(work.trained, added) * scale.backward / (sum(trained.values()) or 1)
        costs = {name: cost * weight for name, cost in trained.items()}
        return replace(unit, forward=forward, costs=costs, backward=max(backward, _LEAST) / forward)

    def waits(self, name: str, modality: Modality, samples: float) -> float:
        """Return the seconds that attentions of a modality wait for tokens of other ranks, forward and backward."""
        factor, rows = samples / self.samples / modality.cp_size, self._pairs(name)
        scales = self.scales.get(name, [Measured(1.0, 1.0)] * len(self.rows[name]))
        works = (_work(*pair, modality.tp_size, factor) for pair in rows)
        both = (self._context_waits(modality, *each, factor) for each in zip(works, scales, strict=True))
        return sum(map(sum, both))

    def _context_waits(self, modality: Modality, work: Work, scale: Measured, factor: float) -> tuple[float, float]:
        """Seconds that attentions to tokens of other ranks take longer, of a forward and of a backward."""
        cp, tp, mode, seconds = modality.cp_size, modality.tp_size, modality.context.cp_mode, self.cluster.seconds
        if cp == 1 or not work.keys or (mode == "items" and factor * self.samples >= 1):  # else sequences are split
            return 0.0, 0.0
        forward = seconds(work.attention, 0.0) * scale.forward
        backward = seconds(_ATTENTION_BACKWARD * work.attention, 0.0) * scale.backward
        heads, key_heads = (max(round(number / factor), 1) for number in (work.heads, work.key_heads))
        keys, sums, queries = work.keys, work.key_sums, work.queries
        if mode in ("allgather", "items"):
            return self._gathered_waits(keys, sums, key_heads, self._ring_link(cp, tp), cp, forward, backward)
        inner = {"ulysses": cp, "ring": 1}.get(mode) or modality.context.ulysses_size or 1
        waits = waits_back = 0.0
        if inner > 1:
            ratio, link = max(heads // key_heads, 1), self.cluster.link(range(0, inner * tp, tp))
            ranges = even_ranges(heads, inner)
            read = [-(-stop // ratio) - start // ratio for start, stop in ranges if stop > start]
            again, more = sum(read) > key_heads, -(-heads // inner) * inner / heads
            keys, sums = (size * max(read) * inner / key_heads for size in (keys, sums))  # of the rank with most heads
            queries *= more
            back = keys + (keys if inner == cp else sums) if again else keys  # those of a ring are sums
            moved = queries + keys, queries + back
            waits, waits_back = (
                messages * (inner - 1) * link.latency + (inner - 1) / inner * size / link.bandwidth
                for messages, size in zip((4, 6 if again else 4), moved, strict=True)
            )
            waits, waits_back = waits + seconds(0, 4 * moved[0]), waits_back + seconds(0, 4 * moved[1])
            waits, waits_back = waits + (more - 1) * forward, waits_back + (more - 1) * backward
            forward, backward = more * forward, more * backward
        if inner == cp:
            return waits, waits_back
        ring, narrow = self._ring_waits(keys, sums, cp // inner, inner * tp, mode == "ring", forward, backward)
        summed = queries / 2 * sums / keys  # bytes of results in the type in which they are added up
        hops = cp // inner - 1
        copied = 2 * keys + 3 * hops * summed, 2 * keys + 2 * (hops + 1) * sums + 3 * hops * (sums + summed)
        return waits + ring + seconds(0, copied[0]), waits_back + narrow + seconds(0, copied[1])

    def _gathered_waits(
        self, keys: float, sums: float, heads: int, link: Link, ranks: int, forward: float, backward: float
    ) -> tuple[float, float]:
        """Of an all-gather of keys and values in steps, each while the step before it computes."""
        steps = -(-heads // min(max(int(STEP_BYTES // (keys * ranks / heads)), 1), heads))
        gather, scatter = (
            2 * (ranks - 1) * link.latency + (ranks - 1) * size / steps / link.bandwidth for size in (keys, sums)
        )
        both = gather + scatter
        waits = gather + (steps - 1) * max(gather - forward / steps, 0.0)
        waits_back = both + (steps - 1) * max(both - backward / steps, 0.0)
        copied = self.cluster.seconds(0, 2 * ranks * keys), self.cluster.seconds(0, ranks * (4 * keys + 2 * sums))
        return waits + copied[0], waits_back + copied[1]

    def _ring_waits(
        self, keys: float, sums: float, ranks: int, stride: int, nests: bool, forward: float, backward: float
    ) -> tuple[float, float]:
        """Of blocks that travel around a ring, or around rings in nodes and between them, while others compute."""
        link, here = self._ring_link(ranks, stride), max(self.cluster.ranks // stride, 1)
        nests = nests and 1 < here < ranks and ranks % here == 0
        size, outer = (here, ranks // here) if nests else (ranks, 1)
        waits = []
        for sent, back, whole in ((keys, 0.0, forward), (keys, sums, backward)):
            hops = [
                (each.message(sent), each.message(back) if back else 0.0)
                for each in (self.cluster.inside if nests else link, self.cluster.between)
            ]
            (hop, last), (hop_between, last_between) = hops
            inside = (size - 1) * max(hop + last - whole / ranks, 0.0) + last
            a_round = size * whole / ranks + inside
            between = (outer - 1) * max(hop_between + last_between - a_round, 0.0) + last_between
            waits.append(outer * inside + (between if nests else 0.0))
        return waits[0], waits[1]

    def _ring_link(self, ranks: int, stride: int) -> Link:
        """The links of a ring over nodes, in which of the ranks of a node one sends to another node at a time."""
        link = self.cluster.link(range(0, ranks * stride, stride))
        if link is self.cluster.inside:
            return link
        return replace(
            link, bandwidth=min(self.cluster.inside.bandwidth, link.bandwidth * max(self.cluster.ranks // stride, 1))
        )

    def _pairs(self, name: str) -> zip[tuple[UnitUse, UnitUse]]:
        return zip(self.of_one.units[name], self.of_two.units[name], strict=True)

    # --- a step ---

    def timed(self, plan: Plan, samples: float, messages: _Messages | None = None) -> Plan:
        """Return the plan with its units in seconds; `messages` are those between its stages, where they are known."""
        messages = self._messages(plan, samples) if messages is None else messages
        units: dict[StageKey, tuple[Unit, ...]] = {}
        for name, cuts in plan.partition.stages.items():
            modality = plan.modalities[name]
            width = modality.tp_size * modality.cp_size  # by which graphs divide
            row = [unit.scaled(width) for unit in self.units(name, modality, samples)]
            again = costed(row, plan.partition.kept_operations.get(name, ()))
            for cut in cuts:
                *others, last = again[span_of(cut, cuts)]
                stage = plan.topology.stage_of[cut.name]
                taken = sum(link.taken(size) for edge, (link, size) in messages.items() if stage in edge)
                repeats = cut.index and name == plan.partition.loss_modality  # the step up to its first layer
                units[cut.name] = (*others, _with_more(last, taken * width, row[0].forward if repeats else 0.0))
        modalities = {name: replace(modality, cost=None) for name, modality in plan.modalities.items()}
        return replace(plan, modalities=modalities, partition=replace(plan.partition, units=units))

    def step_time(self, plan: Plan, schedule: AnySchedule, samples: int, count: int, played: int) -> StepTime:
        """Return the time of a step.

        Args:
            plan: which rank runs what.
            schedule: as `build` takes it.
            samples: of each microbatch.
            count: microbatches of each replica, M.
            played: of these, how many are simulated; the busiest rank does the rest at its pace.
        """
        messages, trained = self._messages(plan, samples), self.step.trainable
        timed = self.timed(plan, samples, messages)
        graph, actions = timed.graphs.schedule(schedule, played, trained, rank=0)
        simulation = simulate(actions, graph, transfer_cost=self._transfers(plan, messages))
        ends, gathers = [0.0], [0.0]
        shards = DataShards(plan)
        last = {span.rank: span for span in simulation.spans}
        for rank, span in last.items():
            sums, gather, smallest = self._exchanged(plan, shards, rank)
            node = graph.node_of(span.action.stage, span.action.microbatch)
            ends.append(span.end + max(sums - node.backward_cost, smallest))
            gathers.append(gather)
        rest = (count - played) / played * max(simulation.busy.values(), default=0.0)
        seconds = max(ends) + rest + max(gathers)
        busy = sum(simulation.busy.values()) / max(len(simulation.busy), 1) * count / played
        return StepTime(seconds, 1 - busy / seconds)

    def _exchanged(self, plan: Plan, shards: DataShards, rank: int) -> tuple[float, float, float]:
        """Seconds in which a rank sums gradients, in which it updates and gathers, and of its last bucket's sum."""
        moved = 0
        sums, scattered, gathered = (Counter[tuple[int, ...]]() for _ in range(3))  # bytes of groups
        names = {name for key in plan.topology.stages_of(rank) for name in plan.ownership.parameters[key]}
        for name in names - plan.tied:
            parameter, shard = self.step.parameters[name], shards.of(name, rank)
            dtype, shape = plan.held_dtype(parameter), shards.local_shape(name, rank)
            count = math.prod(shape)
            size, own_shape = count * dtype.itemsize, shape
            ranks = plan.ownership.ranks_by_shard(name)[0]
            if shard is not None:
                own_shape = shard.own_shape(shape)
                ranks = shard.across
                if not shard.of_experts:
                    scattered[shard.block] += size * (name in self.step.trained)
                    gathered[shard.block] += count * parameter.element_size()
                size = math.prod(own_shape) * dtype.itemsize
            if name in self.step.trained:
                sums[ranks] += size
                moved += self._moved(name, own_shape, dtype)
        link, bucket = self.cluster.link, self.step.bucket_bytes
        times = [(size, link(group).all_reduce(len(group), bucket)) for group, size in sums.items()]
        times += [(size, link(group).reduce_scatter(len(group), bucket)) for group, size in scattered.items()]
        smallest = max((min(size / bucket, 1) * each for size, each in times), default=0.0)
        rows = sum(size / bucket * link(group).all_gather(len(group), bucket) for group, size in gathered.items())
        updated = self.cluster.seconds(0.0, moved) * self.update_scale
        return sum(size / bucket * each for size, each in times), updated + rows, smallest

    def sends(self, plan: Plan, samples: float) -> Callable[[StageKey, StageKey], float]:
        """Return the seconds of a message of so many samples between two stages of a plan."""
        return self._transfers(plan, self._messages(plan, samples))

    def _transfers(self, plan: Plan, messages: _Messages) -> Callable[[StageKey, StageKey], float]:
        """Seconds of a message between two stages: ranks of the sender share it, those of the receiver gather it."""
        known: dict[frozenset[StageKey], float] = {}
        for (source, target), (link, size) in messages.items():
            receivers, tp = plan.topology.instances(target)[0], plan.modalities[target.modality].tp_size
            parts = min(plan.modalities[source.modality].tp_size, tp)
            within = self.cluster.link(receivers[:tp]).all_gather(tp, size * parts) if parts > 1 else 0.0
            known[frozenset((source, target))] = link.message(size) + within
        return lambda source, target: known[frozenset((source, target))]

    def _messages(self, plan: Plan, samples: float) -> _Messages:
        trace, topology = self.trace(plan.modalities, samples), plan.topology
        messages: _Messages = {}
        for source, target in topology.edges:
            size = 0
            for name, cuts in plan.partition.stages.items():
                for before, cut in pairwise(cuts):
                    if (topology.stage_of[before.name], topology.stage_of[cut.name]) == (source, target):
                        size += sum(trace.units[name][cut.first + 1].hidden.values())
                if name in topology.consumes.get(target, ()) and topology.stage_of[cuts[-1].name] == source:
                    size += sum(trace.exits[name].values())
            link = self.cluster.link((topology.instances(source)[0][0], topology.instances(target)[0][0]))
            parts = min(plan.modalities[stage.modality].tp_size for stage in (source, target))
            messages[source, target] = link, size / parts
        return messages


def _with_more(unit: Unit, taken: float, repeated: float) -> Unit:
    """The unit of a stage whose messages take so long of its forward and its backward, and which repeats a forward."""
    forward = unit.forward + taken + repeated
    recomputed, backward = unit.recomputed * unit.forward, unit.backward * unit.forward + taken
    return replace(unit, forward=forward, recomputed=recomputed / forward, backward=backward / forward)


def _on_ranks(single: float, of_two: float, ranks: int) -> float:
    """What one of `ranks` tensor parallel ranks has, given what one rank and one of two have."""
    return max(single - 2 * (single - of_two) * (1 - 1 / ranks), 0)  # below 0 of what shared layers do not have


def _work(use: UnitUse, two: UnitUse, tp: int, factor: float) -> Work:
    """What a unit computes on one of `tp` ranks, of `factor` times what was traced."""
    works = zip(vars(use.work).values(), vars(two.work).values(), strict=True)  # astuple copies, and takes long
    return Work(*(_on_ranks(single, of_two, tp) * factor for single, of_two in works))


def _scale(seconds: Measured, guessed: Measured, is_known: bool = False) -> Measured:
    """Measured over guessed time; `is_known` where a backward of 0 was measured."""
    forward = seconds.forward / guessed.forward
    is_known = (is_known or seconds.backward > 0) and guessed.backward > 0
    return Measured(forward, seconds.backward / guessed.backward if is_known else forward)


def _storages(storages: Storages, of_two: Storages, size: Callable[[float, float], int]) -> Storages:
    return {number: size(nbytes, of_two.get(number, nbytes)) for number, nbytes in storages.items()}


def _use(
    use: UnitUse, of_two: UnitUse, size: Callable[[float, float], int], of_weight: Callable[[float, float], int]
) -> UnitUse:
    results = {name: _storages(each, of_two.results.get(name, {}), size) for name, each in use.results.items()}
    return UnitUse(
        _storages(use.saved, of_two.saved, size),
        _storages(use.inputs, of_two.inputs, size),
        _storages(use.hidden, of_two.hidden, size),
        results,
        size(use.working, of_two.working),
        of_two.products,
        use.work,
        _storages(use.put_off, of_two.put_off, size),
        _storages(use.casts, of_two.casts, of_weight),
    )
