"""Searches the layouts of a cluster: sizes, placements, schedules, microbatches, recomputation and ZeRO, all together.

Best first: layouts are tried in the order of a bound that no step of them is below, until no other can be faster than
the last of those to be shown. The bound is first that of their work, spread over all ranks without idle time, then that
of each placement of stages (`placements`, `lower_bound`). What would be shown is then held against the memory of a rank
and against the checks of the strategy, so that none is proposed that a run refuses.

Memory is brought down only where it must be: sizes with more recomputation or ZeRO are tried after a placement of them
does not fit with less, and optimizers with offloaded states where no layout fits without. The loss modality and the
encoders that train have a recomputation each; ZeRO is the same for all. What a modality says of these stays. Of layouts
that differ in nothing else the fastest is returned.

A step has the same samples in all layouts. `tp_size` stays within a node. Encoders have the replicas of the loss
modality, or share ranks. Their `cp_size` is 1 or that of the loss modality; then each rank takes whole items, where a
run accepts that and the configuration names no other `cp_mode`. The loss modality has the `cp_mode` whose waits are
shortest, of those that a run accepts, or what the configuration names: layouts that differ in it differ in nothing
else, memory included. What it says of paths stays. Modalities after the language model and replicas that are unlike are
refused.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import chain, count, islice, product
from operator import le
from typing import Any, NamedTuple

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.groups import path_of, value_of, with_fields
from lightning_mm5d.config.modality import Modality, decoders_of
from lightning_mm5d.config.tables import memory_text
from lightning_mm5d.features.auto_schedule import lower_bound
from lightning_mm5d.partition.costs import costed, kept_of, step_costs
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.tools.planner.inspect import options
from lightning_mm5d.tools.planner.layout_costs import LayoutCosts, Link, StepTime
from lightning_mm5d.tools.planner.placements import Space, configured, layer_costs, plain, recomputing, replica_graph
from lightning_mm5d.tools.planner.rank_memory import RankMemory, Step, memory_of

_SHOWN = 5
_PLACEMENTS = 12  # of each choice of sizes
_TRIED = 150  # layouts whose step is simulated
_TOO_LARGE = 2  # times as many whose memory is counted
_DEEPEST = 32  # pipeline ranks
_SCHEDULES, _OF_CHUNKS = ("1f1b", "zero_bubble"), ("interleaved", "zbv")
_RECOMPUTATION = ("none", "selective", "full")
_STAGES = (None, 1, 2, 3)  # of ZeRO

_Levels = tuple[int, ...]
"""how far memory is brought down: indices of recomputation in the loss modality and in encoders, and of ZeRO's stage"""


class Candidate(NamedTuple):
    """One layout.

    Attributes:
        modalities: as they would be configured.
        schedule: its name.
        samples: of a microbatch.
        microbatches: of each replica, M.
    """

    modalities: Mapping[str, Modality]
    schedule: str
    samples: int
    microbatches: int


@dataclass(frozen=True)
class Judged:
    """A layout and its step.

    Attributes:
        candidate: the layout.
        time: its step.
        memory: of the rank that needs most.
        exposed: seconds of the step in which ranks wait for links, where they are asked for.
    """

    candidate: Candidate
    time: StepTime
    memory: RankMemory
    exposed: float = 0.0


class _Waiting(NamedTuple):
    """A layout that was not tried yet, in the order of its bound.

    Attributes:
        bound: seconds that no step of it is below.
        number: of those that waited before.
        candidate: the layout; without a schedule where its stages are not placed.
        sizes: index of its sizes.
        levels: of its memory.
    """

    bound: float
    number: int
    candidate: Candidate
    sizes: int
    levels: _Levels


@dataclass
class LayoutSearch:
    """A search.

    Args:
        plan: of any layout on all ranks.
        costs: of its layers.
        batch: samples of a step.
        memory: bytes of each rank.
        accepted: returns the plan of a layout as a run makes it, after all checks.
        plan_of: makes the plan of a layout without checks.
        batches: whether a replica's batch may have so many samples.
        samples: of a microbatch, where the data say so.
        shares: whether ranks may share what optimizers work on.
        experts: number of experts of a layer, of the modalities that have any.

    Attributes:
        tried: number of layouts whose step was simulated.
        left: seconds that no step of a layout which was left is below, where a search ended before all were tried.
        least: what the fullest rank needs in the layout of those tried that needs least, and that layout.
    """

    plan: Plan
    costs: LayoutCosts
    batch: int
    memory: int
    accepted: Callable[[Candidate], Plan]
    plan_of: Callable[[Mapping[str, Modality]], Plan]
    batches: Callable[[int], bool] = lambda _: True
    samples: int | None = None
    shares: bool = False
    experts: Mapping[str, int] = field(default_factory=dict)
    tried: int = field(default=0, init=False)
    left: float | None = field(default=None, init=False)
    least: tuple[int, Candidate] | None = field(default=None, init=False)
    _known: dict[Any, Any] = field(default_factory=dict, init=False)

    def best(self) -> list[Judged]:
        """Return the fastest layouts that fit, at most five, the fastest first.

        Of layouts that differ in nothing but recomputation, ZeRO and offloading only the fastest is there.
        """
        fastest = self._fastest(offloads=False) or self._fastest(offloads=True) or self._fitting()
        return [replace(layout, exposed=self.exposed(layout)) for layout in fastest]

    def _fitting(self) -> list[Judged]:
        """Of the layouts that seem to need least those that fit, which a search with a limit may not come to."""
        fitting = list[Judged]()
        for candidate in self._smallest():
            with suppress(ConfigError):
                fitting.append(self.judged(candidate))
        fitting = sorted((each for each in fitting if each.memory.peak <= self.memory), key=_rank, reverse=True)
        return sorted({_family(each.candidate): each for each in fitting}.values(), key=_rank)[:_SHOWN]

    def _smallest(self) -> Iterator[Candidate]:
        """Placements of the sizes that seem to need least, with all that brings memory down."""
        choices = sorted(self._choices(), key=lambda sizes: self._least(self._small(sizes)))
        smallest = (self._small(sizes, less) for sizes in choices for less in range(2))  # ZeRO 2 or 3 may need less
        bounds = ([*islice(self._placed(sizes), 4)] for sizes in smallest)
        placed = ([candidate for bound, candidate in each if bound < math.inf] for each in bounds)
        return chain.from_iterable(islice(filter(None, placed), 6))

    def _fastest(self, *, offloads: bool) -> list[Judged]:
        """The fastest layouts that fit, with states of optimizers on the device or, with `offloads`, on the host."""
        if offloads and not self._offloaded:
            return []
        choices, numbers, most = list(self._choices()), count(), self.tried + _TRIED
        more = _TOO_LARGE * _TRIED  # layouts to be tried, at most
        waiting, known = list[_Waiting](), set[tuple[int, _Levels]]()
        fits, best = defaultdict[str, list[_Levels]](list), dict[str, Judged]()
        fastest, slowest = list[Judged](), math.inf

        def wait(index: int, levels: _Levels, above: float = 0.0) -> None:
            if (index, levels) not in known and all(map(le, levels, self._most_levels(choices[index]))):
                known.add((index, levels))
                candidate = self._saving(choices[index], levels, offloads=offloads)
                bound = max(above, self._work(candidate))
                heappush(waiting, _Waiting(bound, next(numbers), candidate, index, levels))

        for index in range(len(choices)):
            wait(index, (0, 0, 0))
        while waiting and self.tried < most and more and waiting[0].bound < slowest:
            bound, _, candidate, index, levels = heappop(waiting)
            family, is_too_large = _family(candidate), False
            if not candidate.schedule:
                is_too_large = self._least(candidate) > self.memory
                for above, placed in self._placed(candidate) if not is_too_large else ():
                    if above < math.inf:
                        heappush(waiting, _Waiting(max(above, bound), next(numbers), placed, index, levels))
                    else:
                        is_too_large = True
            elif not any(all(map(le, less, levels)) for less in fits[family]):  # else it is slower than that
                more -= 1
                with suppress(ConfigError):  # no run would accept it
                    planned = self._planned(candidate)
                    memory = self._fullest(candidate, *planned)
                    is_too_large = memory.peak > self.memory
                    if not is_too_large and (time := self._time(candidate, *planned)).seconds < slowest:
                        self.accepted(candidate)
                        judged = Judged(candidate, time, memory)
                        fits[family].append(levels)
                        best[family] = min(best.get(family, judged), judged, key=_rank)
                        fastest = sorted(best.values(), key=_rank)[:_SHOWN]
                        slowest = fastest[-1].time.seconds if len(fastest) == _SHOWN else math.inf
            for axis in range(len(levels)) if is_too_large else ():
                wait(index, (*levels[:axis], levels[axis] + 1, *levels[axis + 1 :]), bound)
        if waiting and waiting[0].bound < slowest:
            self.left = min(self.left or math.inf, waiting[0].bound)
        return fastest

    def judged(self, candidate: Candidate) -> Judged:
        """Return a layout with its step.

        Raises:
            ConfigError: no run would accept it.
        """
        planned = self._planned(candidate)
        judged = Judged(candidate, self._time(candidate, *planned), self._fullest(candidate, *planned))
        if judged.memory.peak <= self.memory:
            self.accepted(candidate)
        return judged

    def _time(self, candidate: Candidate, plan: Plan, played: int) -> StepTime:
        self.tried += 1
        return self.costs.step_time(plan, candidate.schedule, candidate.samples, candidate.microbatches, played)

    def _fullest(self, candidate: Candidate, plan: Plan, played: int) -> RankMemory:
        """The memory of the rank that needs most."""
        memory = max(memory_of(plan, self._step(candidate, played)), key=lambda estimate: estimate.peak)
        self.least = min(self.least or (memory.peak, candidate), (memory.peak, candidate), key=lambda need: need[0])
        return memory

    def exposed(self, judged: Judged) -> float:
        """Return the seconds of a step in which ranks wait for links: what is gained where these take no time."""
        _, schedule, samples, count = judged.candidate
        plan, played = self._planned(judged.candidate)
        at_once = Link(0.0, math.inf)
        cluster = replace(self.costs.cluster, inside=at_once, between=at_once)
        without_links = replace(self.costs, cluster=cluster, known={}).step_time(plan, schedule, samples, count, played)
        return judged.time.seconds - without_links.seconds

    def _planned(self, candidate: Candidate) -> tuple[Plan, int]:
        """The plan of a layout, and how many of its microbatches are simulated."""
        plan = replace(self.plan_of(candidate.modalities), v_shaped=candidate.schedule == "zbv")
        pipeline = plan.layout.sizes(plan.partition.loss_modality).pp
        return plan, min(candidate.microbatches, _most(len(plan.topology.members), pipeline))

    def _step(self, candidate: Candidate, played: int) -> Step:
        """What is known of a step of a layout beside its plan."""
        trace = self.costs.trace(candidate.modalities, candidate.samples)
        return replace(self.costs.step, schedule=candidate.schedule, num_microbatches=played, trace=trace)

    def refusal(self) -> ConfigError:
        """Return the error where no layout fits, with the smallest need of the layouts that seem smallest."""
        limit, self.memory, reason = self.memory, sys.maxsize, ""
        for candidate in self._smallest():
            try:
                self.judged(candidate)
            except ConfigError as error:
                reason = f", for instance {words(candidate)}: {error.rule}"
        if self.least is None:
            rule = f"No layout of these ranks can run{reason}"
            return ConfigError("--ranks", self.plan.layout.size, rule, "Take another number of ranks, or of samples")
        size, least = self.least
        rule = f"Of the layouts that were tried the smallest needs {memory_text(size)} ({words(least)})"
        fix = f"Allow {memory_text(size + size // 10)}, or take more ranks or shorter samples"
        return ConfigError("--memory", memory_text(limit), rule, f"{fix}{self._saves_most(size, least)}")

    def _saves_most(self, size: int, candidate: Candidate) -> str:
        """Which option that the search does not choose brings a layout's memory down most, and to what."""
        plan, played = self._planned(candidate)
        for option in sorted(options(plan, self._step(candidate, played)), key=lambda option: option.peak):
            with suppress(ConfigError):
                if option.peak < 0.99 * size and self.accepted(candidate._replace(modalities=option.modalities)):
                    return f"; with {option.name} in all modalities that layout needs {memory_text(option.peak)}"
        return ""

    # --- sizes ---

    def _choices(self) -> Iterator[Candidate]:
        """All sizes, without pipelines and with nothing that brings memory down but what is configured."""
        world, loss = self.plan.layout.size, self.plan.partition.loss_modality
        if "sizes" not in self._known:
            self._known["sizes"] = list(product(*map(self._sizes, self.plan.modalities)))
        options = self._known["sizes"]
        for replicas in filter(lambda count: self.batches(self.batch // count), divisors(math.gcd(world, self.batch))):
            batch = self.batch // replicas
            for samples, chosen in product(divisors(batch), options):
                sizes = dict(zip(self.plan.modalities, chosen, strict=True))
                sizes[loss] = replace(sizes[loss], dp_size=replicas)
                cp, width = sizes[loss].cp_size, sizes[loss].cp_size * sizes[loss].tp_size
                fits = replicas * width <= world <= replicas * width * _DEEPEST and not world // replicas % width
                if fits and self.samples in (None, samples) and all(option.cp_size in (1, cp) for option in chosen):
                    sizes[loss] = self._fastest_mode(sizes[loss], samples)
                    copies = replicas * min(modality.cp_size for modality in sizes.values())
                    for ep in divisors(math.gcd(copies, *self.experts.values())) if self.experts else [1]:
                        shared = {name: replace(sizes[name], ep_size=ep) for name in self.experts}
                        yield Candidate({**sizes, **shared}, "", samples, batch // samples)

    def _sizes(self, name: str) -> list[Modality]:
        """A modality with each `tp_size` and `cp_size` that a run accepts for it; encoders share items if they can."""
        layout, now, sized = self.plan.layout, self.plan.modalities[name], list[Modality]()
        by_items = name != self.plan.partition.loss_modality and now.context.cp_mode == "allgather"
        if not self.plan.partition.parts[name].paths:
            return [now]
        tps = [tp for tp in divisors(layout.ranks_per_node) if tp == 1 or self._works(name, replace(now, tp_size=tp))]
        for cp in (cp for cp in divisors(layout.size) if cp <= 2 * layout.ranks_per_node):
            ways = self._modes(replace(now, cp_size=cp))
            if by_items and cp > 1:  # nothing travels
                ways.insert(0, with_fields(now, cp_size=cp, cp_mode="items"))
            if shared := next((way for way in ways if cp == 1 or self._works(name, way)), None):
                sized += [replace(shared, tp_size=tp) for tp in tps if layout.size % (tp * cp) == 0]
        return sized

    def _modes(self, modality: Modality) -> list[Modality]:
        """A modality with each `cp_mode` that it may have: any where it names none, hybrids of all sizes."""
        cp, named = modality.cp_size, modality.context.cp_mode
        modes = ("allgather", "ring", "ulysses", "hybrid") if named == "allgather" else (named,)
        sizes = divisors(cp)[1:-1] if "hybrid" in modes else []
        simple = [with_fields(modality, cp_mode=mode) for mode in modes if mode != "hybrid"]
        hybrids = [with_fields(modality, cp_mode="hybrid", ulysses_size=size) for size in sizes]
        return simple + hybrids if cp > 1 else [modality]

    def _fastest_mode(self, modality: Modality, samples: int) -> Modality:
        """The loss modality with the fastest `cp_mode` that a run accepts: layouts differ in nothing else by it."""
        loss = self.plan.partition.loss_modality
        key = "mode", modality.tp_size, modality.cp_size, samples
        if key not in self._known:
            now = replace(self.plan.modalities[loss], cp_size=modality.cp_size)
            modes = [replace(modality, context=mode.context) for mode in self._modes(now)]
            modes.sort(key=lambda mode: self.costs.waits(loss, mode, samples))
            accepted = (mode.context for mode in modes if self._works(loss, replace(now, context=mode.context)))
            self._known[key] = next(accepted, modality.context)
        return replace(modality, context=self._known[key])

    def _works(self, name: str, tried: Modality) -> bool:
        """Whether a run accepts a size of a modality, with layers that are not whole on all ranks."""
        key = "works", name, tried.tp_size, tried.cp_size, tried.context
        if key not in self._known:
            self._known[key] = False
            with suppress(ConfigError):
                plan = self.accepted(Candidate({**self.plan.modalities, name: tried}, "1f1b", self.costs.samples, 1))
                inside = f"{plan.partition.layers[name]}."
                self._known[key] = not any(path.startswith(inside) for path in plan.division.whole)
        return bool(self._known[key])

    def _saving(self, sizes: Candidate, levels: _Levels, *, offloads: bool) -> Candidate:
        """Sizes with memory brought down so far, and with states of optimizers on the host where `offloads`."""
        variant = dict(sizes.modalities)
        for level, names in zip(levels, self._recomputed, strict=False):
            for name in names if level else ():
                variant[name] = with_fields(variant[name], activation_checkpointing=_RECOMPUTATION[level])
        for name in self._shared if levels[-1] else ():
            variant[name] = with_fields(variant[name], zero_stage=_STAGES[levels[-1]])
        for name in self._offloaded if offloads else ():
            variant[name] = with_fields(variant[name], offload=[*variant[name].offloads, "optimizer"])
        return sizes._replace(modalities=variant)

    def _small(self, sizes: Candidate, less: int = 0) -> Candidate:
        """Sizes with all that brings memory down, and with a stage of ZeRO that is `less` below the last."""
        *again, stage = self._most_levels(sizes)
        return self._saving(sizes, (*again, max(stage - less, 0)), offloads=True)

    def _most_levels(self, sizes: Candidate) -> _Levels:
        """The last level of each of `_saving`; 0 where there is nothing to choose."""
        copies = self.plan.layout.size // self._ranks(sizes) * min(each.cp_size for each in sizes.modalities.values())
        shares = self.shares and copies > 1 and bool(self._shared)
        again = (len(_RECOMPUTATION) - 1 if names else 0 for names in self._recomputed)
        return *again, len(_STAGES) - 1 if shares else 0

    @cached_property
    def _recomputed(self) -> tuple[list[str], list[str]]:
        """The loss modality, and the encoders that train, where they have layers and say nothing of recomputation."""
        names = [
            name
            for name, modality in self.plan.modalities.items()
            if modality.memory.activation_checkpointing == "none" and self.plan.partition.parts[name].paths
        ]
        loss = self.plan.partition.loss_modality
        return [name for name in names if name == loss], [name for name in names if name != loss and self._trains(name)]

    @cached_property
    def _shared(self) -> list[str]:
        """Modalities that say nothing of ZeRO."""
        sharding = {name: modality.sharding for name, modality in self.plan.modalities.items()}
        unset = [name for name, each in sharding.items() if each.zero_stage is None and each.dp_shard_size is None]
        return [name for name in unset if "parameters" not in self.plan.modalities[name].offloads]

    @cached_property
    def _offloaded(self) -> list[str]:
        """Modalities that train with states of optimizers on the device."""
        modalities = self.plan.modalities
        return [name for name in modalities if self._trains(name) and "optimizer" not in modalities[name].offloads]

    def _trains(self, name: str) -> bool:
        return any(not self.costs.step.trained.isdisjoint(unit.costs) for unit in self.costs.rows[name])

    def _ranks(self, candidate: Candidate) -> int:
        """Of a replica."""
        return self.plan.layout.size // (candidate.modalities[self.plan.partition.loss_modality].dp_size or 1)

    def _work(self, candidate: Candidate) -> float:
        """The step if ranks worked all the time, but for sums of gradients that one backward cannot hide; a mean."""
        ranks, cluster, sums, work = self._ranks(candidate), self.costs.cluster, 0.0, 0.0
        for name, modality in candidate.modalities.items():
            copies = self.plan.layout.size // ranks * modality.cp_size
            link = cluster.link(range(min(copies * modality.tp_size, cluster.size)))
            size = self._bytes[name][2] * modality.cp_size / ranks / (modality.ep_size if name in self.experts else 1)
            sums += replace(link, latency=0.0).all_reduce(copies, size)
            work += sum(self._row(name, candidate)) * modality.tp_size * modality.cp_size / ranks
        return candidate.microbatches * work + max(sums - work, 0.0)

    def _row(self, name: str, candidate: Candidate) -> list[float]:
        """Seconds of the forward and backward of each unit."""
        modality = candidate.modalities[name]
        again = str(modality.memory.activation_checkpointing)
        sizes = modality.tp_size, modality.cp_size, modality.context, modality.ep_size
        key = name, *sizes, again, candidate.samples
        if key not in self._known:
            row = self.costs.units(name, modality, candidate.samples)
            kept_of_layers = kept_of(name, modality, [len(row) - 2]) if len(row) > 2 else ()
            passes_on = name == self.plan.partition.loss_modality and self._encoders_train
            self._known[key] = step_costs(costed(row, kept_of_layers), self.costs.step.trainable, passes_on)
        return self._known[key]

    @cached_property
    def _late(self) -> set[str]:
        """Encoders whose result the loss modality uses after its last layer."""
        return {name for name, encoder in self.plan.partition.encoders.items() if encoder.used_late}

    @cached_property
    def _encoders_train(self) -> bool:
        loss, trainable = self.plan.partition.loss_modality, self.costs.step.trainable
        early = {name for name, cfg in self.plan.modalities.items() if cfg.feeds != "first" or name not in self._late}
        rows = (self.costs.rows[name] for name in early - {loss})
        return any(not trainable.isdisjoint(unit.costs) for row in rows for unit in row)

    # --- memory that is needed at least ---

    def _held(self, candidate: Candidate) -> float:
        """Bytes without activations that the fullest rank has at least: its share of those of a replica."""
        total, replicas = 0.0, self.plan.layout.size // self._ranks(candidate)
        for name, modality in candidate.modalities.items():
            parameters, states, _ = self._bytes[name]
            copies = replicas * modality.cp_size if modality.shared_stage else 1
            ep = modality.ep_size if name in self.experts else 1
            gathered = max(copies, ep) if modality.sharding.reshard_after_forward else ep
            total += parameters / gathered + states / max(copies, ep) * ("optimizer" not in modality.offloads)
        return total / self._ranks(candidate)

    @cached_property
    def _bytes(self) -> dict[str, tuple[int, int, int]]:
        """Of each modality: of parameters and gradients, of the states of optimizers, and of gradients alone."""
        step, sizes = self.costs.step, dict[str, tuple[int, int, int]]()
        optimizers = step.states
        for name, row in self.costs.rows.items():
            held = {path: step.parameters[path] for unit in row for path in unit.costs if path in step.parameters}
            trained = [(path, p) for path, p in held.items() if path in step.trained]
            gradients = sum(p.nbytes for _, p in trained)
            states = [optimizers.of(path, tuple(p.shape), p.dtype) for path, p in trained if optimizers is not None]
            parameters = sum(p.nbytes for p in held.values())
            sizes[name] = gradients + parameters, sum(state.persistent for state in states if state), gradients
        return sizes

    def _least(self, candidate: Candidate, sizes: Sequence[int] = ()) -> float:
        """Bytes that the fullest rank needs at least: of what is held, and kept by the first stage of most layers.

        Args:
            candidate: a layout.
            sizes: layers of each stage of the loss modality; as many stages as can be where they are not known.
        """
        loss = self.plan.partition.loss_modality
        modality = candidate.modalities[loss]
        is_whole = modality.memory.activation_checkpointing == "none"
        key = "kept", modality.tp_size, modality.cp_size, is_whole, candidate.samples
        if key not in self._known:
            units = self.costs.trace({loss: modality}, candidate.samples).units[loss][1:-1]
            self._known[key] = sum(sum((unit.saved if is_whole else unit.hidden).values()) for unit in units)
        layers = max(len(self.costs.rows[loss]) - 2, 1)
        stages = len(sizes) or min(layers, self._ranks(candidate) // (modality.tp_size * modality.cp_size))
        part = sizes[0] / layers if sizes else 1 / stages
        return self._held(candidate) + 0.6 * self._known[key] * part * min(candidate.microbatches, stages)

    # --- placements ---

    def _placed(self, candidate: Candidate) -> Iterator[tuple[float, Candidate]]:
        """The placements of some sizes under each schedule, each with a bound of its step; inf where it cannot fit."""
        loss, (modalities, _, samples, count) = self.plan.partition.loss_modality, candidate
        trainable, rows, layers = self.costs.step.trainable, {}, {}
        for name, modality in modalities.items():
            rows[name] = plain(name, self.costs.units(name, modality, samples), trainable)
            layers[name] = layer_costs(self._row(name, candidate))
        ranks = self._ranks(candidate)
        space = Space(layers, modalities, ranks, loss_modality=loss, num_microbatches=count)
        for number, placement in enumerate(space.best(_PLACEMENTS)):
            if self._least(candidate, placement.sizes[loss]) > self.memory:
                yield math.inf, candidate
                continue
            stages = len(placement.sizes[loss])
            played = min(count, _most(sum(map(len, placement.sizes.values())), stages))
            graph = replica_graph(
                recomputing(rows, modalities, placement), modalities, placement, loss, played, self._late
            )
            bound = lower_bound(graph) + (1 - played / count) * max(placement.loads) / space.scale
            placed = configured(modalities, placement, loss)
            for schedule in _SCHEDULES if len(placement.loads) > 1 else _SCHEDULES[:1]:
                yield bound, Candidate(placed, schedule, samples, count)
            if number == 0 and 1 < stages <= sum(placement.sizes[loss]) // 2:
                chunks = with_fields(placed[loss], pp_chunks=2, pipeline_template=None)
                nodes = [n for n in graph.nodes if n.stage.modality == loss]  # one microbatch passes all of them
                path = sum(node.forward_cost + node.backward_cost - graph.weight_cost(node) for node in nodes)
                for schedule in _OF_CHUNKS:
                    yield path, Candidate({**placed, loss: chunks}, schedule, samples, count)


def _most(stages: int, ranks: int) -> int:
    """Microbatches after which a step goes on at the pace of its busiest rank, a multiple of the pipeline's ranks."""
    return -(-(3 * stages + 4) // ranks) * ranks


def _rank(judged: Judged) -> tuple[float, int]:
    """By time; of equal times that of fewer microbatches, each of which has a cost that is not counted."""
    return float(f"{judged.time.seconds:.4g}"), judged.candidate.microbatches


def _family(candidate: Candidate) -> str:
    """What layouts have in common that differ in nothing but what brings memory down."""
    nothing: dict[str, Any] = {"activation_checkpointing": "none", "zero_stage": None, "offload": None}
    bare = {name: with_fields(modality, **nothing) for name, modality in candidate.modalities.items()}
    return words(candidate._replace(modalities=bare))


def divisors(number: int) -> list[int]:
    """Return all divisors, ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def words(candidate: Candidate) -> str:
    """Return a layout in one line: ``vision: tp 2 with language, language: dp 4 tp 2 pp 4; 1f1b, 8 x 1 samples``."""
    parts = []
    for name, cfg in candidate.modalities.items():
        sizes = {"dp": cfg.dp_size or 1, "tp": cfg.tp_size, "cp": cfg.cp_size, "ep": cfg.ep_size, "pp": cfg.stages}
        terms = [f"{key} {size}" for key, size in (sizes | {"chunks": cfg.pipeline.pp_chunks}).items() if size > 1]
        terms += [f"cp_mode {cfg.context.cp_mode}"] * (cfg.cp_size > 1 and cfg.context.cp_mode != "allgather")
        terms += [f"of {cfg.context.ulysses_size}"] * (cfg.context.ulysses_size is not None)
        terms += [f"zero {cfg.sharding.zero_stage}"] * bool(cfg.sharding.zero_stage)
        terms += [f"recompute {cfg.memory.activation_checkpointing}"] * (cfg.memory.activation_checkpointing != "none")
        terms += [f"offload {' and '.join(cfg.offloads)}"] * bool(cfg.offloads)
        terms += [f"with {cfg.colocate_with}"] * (cfg.colocate_with is not None)
        parts.append(f"{name}: {' '.join(terms) or 'unsplit'}")
    return f"{', '.join(parts)}; {candidate.schedule}, {candidate.microbatches} x {candidate.samples} samples"


def check_searched(modalities: Mapping[str, Modality]) -> None:
    """Refuse modalities that no search lays out.

    Raises:
        ConfigError: a modality runs after the language model, or replicas are unlike.
    """
    if decoders := decoders_of(modalities):
        rule = f"The search places encoders before one modality, and {', '.join(decoders)} runs after that"
        raise ConfigError("modalities", list(modalities), rule, "Choose sizes by hand; mm5d simulate compares them")
    for name, modality in modalities.items():
        kind = modality.memory.activation_checkpointing
        stages = "It lists stages, and the search chooses their number"
        replicas = "The search lays out replicas that are equal"
        refused = {
            "feeds": (isinstance(modality.feeds, list), stages, "Use 'first' or 'all'"),
            "activation_checkpointing": ("per_stage" in kind, stages, "Use a fraction, such as {fraction: 0.5}"),
            "pipelines": (bool(modality.lengths), replicas, "Leave it unset for the search"),
            "speeds": (modality.pipeline.speeds is not None, replicas, "Leave it unset for the search"),
        }
        for path, (cannot, rule, fix) in refused.items():
            if cannot:
                raise ConfigError(f"modalities.{name}.{path_of(path)}", value_of(modality, path), rule, fix)
