"""How many bytes the microbatches in flight take on one rank, action by action.

A forward keeps what its units save. A backward goes through the units from the last to the first: it frees what each
has kept, and in a stage's first backward gradients take memory as they come. One that puts weight gradients off keeps
what these are made of. Gradients that ranks sum whole have memory from the start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lightning_mm5d.schedule import Action, Kind
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.tools.planner.activation_trace import Storages

_CASTS = -1  # in place of a microbatch
FAR = 3
"""actions from a forward to its backward from which on offloaded activations leave"""


class Ending(NamedTuple):
    """Bytes in the last backward of a rank, at one unit.

    Attributes:
        before: of gradients that have come before it.
        came: of gradients that have come after it.
        moment: of activations that are left meanwhile, and of what the unit needs for a moment.
        left: of activations that are left after it.
    """

    before: int
    came: int
    moment: int
    left: int


class Flight(NamedTuple):
    """Bytes of one rank's step.

    Attributes:
        activations: on the device, at most.
        peak: of activations, gradients and working memory together.
        host: of activations in host memory, at most.
        together: `peak`, with what is in host memory at that moment.
        ending: of the units of the last backward, in its order.
    """

    activations: int
    peak: int
    host: int
    together: int = 0
    ending: Sequence[Ending] = ()


class Reduced(NamedTuple):
    """A gradient that is summed over ranks, in bytes.

    Attributes:
        whole: of all of it.
        owned: of the rows that this rank gets; None where it gets all.
    """

    whole: int
    owned: int | None


class UnitFlight(NamedTuple):
    """One unit of a stage on one rank.

    Attributes:
        saved: what it keeps of a microbatch.
        working: bytes that it needs for a moment.
        gradients: bytes of those of its trained parameters.
        laid: of these, the ones that have memory from the start.
        away: whether what it keeps leaves for the host.
        put_off: what it keeps of a microbatch whose weight gradients are put off, beside what it passed.
        joins: whether it is of an encoder whose calls are joined.
    """

    saved: Storages
    working: int
    gradients: int
    laid: int
    away: bool
    put_off: Storages
    joins: bool


@dataclass(frozen=True)
class StageFlight:
    """One stage on one rank.

    Attributes:
        units: in the order in which they run.
        passed: what the stage receives and sends.
        has_backward: whether anything is kept at all.
        per_call: microbatches that units of joined calls compute in one call, in the first forward and the last
            backward.
        casts: bytes of autocast's copies of weights, which the first forward makes and the end of a step frees.
    """

    units: Sequence[UnitFlight]
    passed: Storages
    has_backward: bool
    per_call: int = 1
    casts: int = 0

    @cached_property
    def remaining(self) -> list[int]:
        """Bytes of a microbatch when a backward has freed all units, all but the first, and so on."""
        if not self.has_backward:
            return [0] * (len(self.units) + 1)
        return _sums([self.passed, *(unit.saved for unit in self.units)])[1:]

    @cached_property
    def remaining_put_off(self) -> list[int]:
        """As `remaining`, of a backward that puts weight gradients off."""
        sums = []
        for done in range(len(self.units) + 1):
            held: Storages = dict(self.passed) if done else {}
            for number, unit in enumerate(self.units):
                held |= unit.saved if number < done else unit.put_off
            sums.append(sum(held.values()))
        return sums

    @cached_property
    def joint(self) -> list[int]:
        """Of `remaining`, what units of joined calls hold, beside what is passed."""
        return _sums([unit.saved if self.has_backward and unit.joins else {} for unit in self.units], self.passed)

    def working(self, size: int) -> list[int]:
        """Return what units need in a call of `size` microbatches; 0 of joined units where these are not called."""
        return [unit.working * size if unit.joins else unit.working for unit in self.units]

    def left_by_call(self, left: Sequence[int], size: int) -> Sequence[int]:
        """Return what a backward leaves after each unit, which goes on through joined units for `size` microbatches."""
        if not size:
            return [max(rest, left[0] + self.joint[-1]) for rest in left]
        return [rest + (size - 1) * more for rest, more in zip(left, self.joint, strict=True)]

    @cached_property
    def on_host(self) -> list[int]:
        """Bytes of a microbatch that left for the host, of no unit, the first one, the first two and so on."""
        return _sums([unit.saved if self.has_backward and unit.away else {} for unit in self.units], self.passed)

    @cached_property
    def leaves(self) -> int:
        """Bytes of a microbatch that leave for the host."""
        return self.on_host[-1]


def _sums(storages: Iterable[Storages], besides: Collection[int] = ()) -> list[int]:
    """Return the bytes of no storages, the first ones, the first two and so on, but for those of `besides`."""
    held: Storages = {}
    sums = [0]
    for more in storages:
        held |= more
        sums.append(sum(size for number, size in held.items() if number not in besides))
    return sums


def flown(actions: Sequence[Action], stages: Mapping[StageKey, StageFlight]) -> Flight:
    """Return what the actions of one rank take at most.

    Args:
        actions: in their order.
        stages: of the rank.
    """
    backs = {(action.stage, action.microbatch): at for at, action in enumerate(actions) if action.passes_gradients}
    held: dict[tuple[StageKey, int], int] = {}
    host: dict[tuple[StageKey, int], int] = {}
    most = peak = most_host = together = 0
    gradients = sum(unit.laid for stage in stages.values() for unit in stage.units)
    begun: set[tuple[StageKey, bool]] = set()
    calls = _calls(actions, stages)
    groups: dict[tuple[StageKey, int], int] = {}  # bytes of joined calls beside those of `held`
    for number, action in enumerate(actions):
        stage, key = stages[action.stage], (action.stage, action.microbatch)
        for other in host.keys() & held.keys():
            if backs[other] == number + 1:  # it is fetched
                held[other] = stages[other[0]].remaining[-1]
        if action.kind is Kind.F:
            size, (group, called) = stage.remaining[-1], calls[number]
            held[action.stage, _CASTS] = stage.casts
            groups[group] = groups.get(group, called * stage.joint[-1]) - stage.joint[-1]
            working = max(stage.working(called), default=0)
            now = sum(held.values()) + sum(groups.values()) + gradients + size + working
            peak, together = max(peak, now), max(together, now + sum(host.values()))
            if key in backs:
                held[key] = size
                most = max(most, sum(held.values()) + sum(groups.values()))
                if stage.leaves and backs[key] - number >= FAR:
                    held[key], host[key] = size - stage.leaves, stage.leaves
                    most_host = max(most_host, sum(host.values()))
            continue
        if action.passes_gradients:
            left, (group, called) = stage.remaining if action.frees else stage.remaining_put_off, calls[number]
            others = sum(held.values()) - held[key] + sum(groups.values()) - (groups[group] if called else 0)
            come = {joins for joins in {False, called > 0} if action.frees and (action.stage, joins) not in begun}
            coming = [unit.gradients - unit.laid if unit.joins in come else 0 for unit in stage.units]
            left_units = stage.left_by_call(left, called)
            if host:  # a fetched storage is on the host too, until its unit is freed
                away = stage.on_host if key in host else [0] * len(left_units)
                on_both = [size + more for size, more in zip(left_units, away, strict=True)]
                elsewhere = sum(host.values()) - host.get(key, 0)
                together = max(together, _back(stage, on_both, others + elsewhere, gradients, coming, called)[0])
            top, gradients = _back(stage, left_units, others, gradients, coming, called)
            peak, together = max(peak, top), max(together, top)
            held[key] = left[0]
            groups[group] = 0 if called else groups[group] + stage.joint[-1]
            begun |= {(action.stage, joins) for joins in come}
        elif (action.stage, True) not in begun:
            begun |= {(action.stage, True)}
            gradients += sum(unit.gradients - unit.laid for unit in stage.units)
            now = sum(held.values()) + sum(groups.values()) + gradients
            peak, together = max(peak, now), max(together, now + sum(host.values()))
        if action.frees:
            del held[key]
            host.pop(key, None)
    last = next((stages[action.stage] for action in reversed(actions) if action.passes_gradients), None)
    return Flight(
        most, peak, most_host, together, _ending(last, sum(stage.casts for stage in stages.values())) if last else ()
    )


def _calls(actions: Sequence[Action], stages: Mapping[StageKey, StageFlight]) -> list[tuple[tuple[StageKey, int], int]]:
    """Return for each action which group its microbatch is in, and how many of it the joined units compute then."""
    forwards: dict[StageKey, list[int]] = {}
    for action in actions:
        if action.kind is Kind.F:
            forwards.setdefault(action.stage, []).append(action.microbatch)
    came, calls = Counter[tuple[StageKey, int, bool]](), list[tuple[tuple[StageKey, int], int]]()
    for action in actions:
        size, is_forward = stages[action.stage].per_call, action.kind is Kind.F
        group = action.stage, forwards[action.stage].index(action.microbatch) // size
        count = min(size, len(forwards[action.stage]) - size * group[1])
        came[(*group, is_forward)] += is_forward or action.passes_gradients
        calls.append((group, count if came[(*group, is_forward)] == (1 if is_forward else count) else 0))
    return calls


def _back(
    stage: StageFlight, left: Sequence[int], others: int, gradients: int, coming: Sequence[int], called: int
) -> tuple[int, int]:
    """Return the peak of one backward, which leaves `left` after each unit, and the gradients after it."""
    peak, working = 0, stage.working(called)
    for number in reversed(range(len(stage.units))):
        peak = max(peak, others + left[number + 1] + gradients + working[number])
        gradients += coming[number]
        peak = max(peak, others + left[number] + gradients)
    return peak, gradients


def _ending(stage: StageFlight, casts: int) -> list[Ending]:
    ending, came, remaining = list[Ending](), 0, stage.remaining
    for number, unit in reversed([*enumerate(stage.units)]):
        before, came = came, came + unit.gradients
        moment, left = remaining[number + 1] + unit.working, remaining[number]
        ending.append(Ending(before, came, moment + casts, left + casts))
    return ending


def reduced(gradients: Sequence[Reduced], bucket_bytes: int, ending: Sequence[Ending]) -> int:
    """Return what the reduction of gradients takes at most, with the activations of the last backward.

    A bucket that is summed is the memory of its gradients. One whose rows are scattered is packed into a copy, and its
    gradients are freed; that copy and what arrives live until the next one is sent, while the backward goes on.

    Args:
        gradients: of one rank, in the order of their parameters.
        bucket_bytes: of a message, at most.
        ending: as in a `Flight`.
    """
    shared = [number for number, gradient in enumerate(gradients) if gradient.owned is not None]
    whole = [number for number, gradient in enumerate(gradients) if gradient.owned is None]
    buckets = [*_buckets(gradients, shared, bucket_bytes), *_buckets(gradients, whole, bucket_bytes)]
    now = peak = sum(gradient.whole for gradient in gradients)
    came = carried = rows = 0
    for bucket in sorted(buckets, key=min, reverse=True):
        size = sum(gradients[number].whole for number in bucket)
        if carried:
            moments = (unit.moment for unit in ending if unit.before < came + size and came < unit.came)
            peak = max(peak, now + carried + max(moments, default=0))
        came += size
        left = next((unit.left for unit in ending if unit.came >= came), 0)
        if gradients[bucket[0]].owned is None:
            peak = max(peak, now + carried + max(gradients[number].whole for number in bucket) + left)
            continue
        peak = max(peak, now + carried + size + left)
        now += rows - size  # the sum of the bucket before is there
        carried, rows = 2 * size, sum(gradients[number].owned or 0 for number in bucket)
        peak = max(peak, now + carried + left)
    return max(peak, now + rows)


def _buckets(gradients: Sequence[Reduced], numbers: Sequence[int], most_bytes: int) -> list[list[int]]:
    """The numbers of gradients that travel together: at most a quarter of all, from the last to the first."""
    buckets: list[list[int]] = []
    size = 0
    for number in reversed(numbers):
        add = gradients[number].whole
        if not buckets or size + add > most_bytes or len(buckets[-1]) == -(-len(numbers) // 4):
            buckets.append([])
            size = 0
        buckets[-1].append(number)
        size += add
    return buckets
