"""Deals the samples of a batch to microbatches, or those of a step to replicas, so that costs are even.

Stages of a pipeline wait until the first microbatch has passed those before them, and again for the last backward. So
microbatches come in an order: the cheapest at both ends, the costliest in the middle.

Deals the samples of each step over the replicas of the data, by what the data set says that they cost.

A replica whose batch has all the images keeps every other one waiting at the end of the step. A data set that knows how
many images, frames or tokens a sample has, without loading it, says so by ``sample_costs``. Then each step holds the
same samples as before, each replica as many as before, and costs are even. Every rank draws the order of all replicas,
without loading anything, and makes the same plan: a function of the order and of the costs, which all ranks compare.

It leaves alone orders that it cannot draw for other replicas: batch samplers of one's own, streams, and data that every
replica reads in full.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import BatchSampler, Subset
from torch.utils.data.distributed import DistributedSampler

from lightning_mm5d.config.errors import ConfigError

Part = npt.NDArray[np.int64]
Loads = npt.NDArray[np.float64]
"""[B, K]: what each sample costs of each kind, in shares of what a part has on average."""
_ENOUGH = 1.01  # of the mean, for the busiest part
_LEAST = 1e-9
_LONG = 8
"""microbatches from which on the first and the last take the cheapest samples, and others hardly more"""


def in_line(
    costs: Mapping[str, Sequence[float]], sizes: Sequence[int], *, fills: bool, turns: int = 1
) -> list[list[int]] | None:
    """Deal samples to microbatches that pass the stages of a pipeline one after the other.

    Args:
        costs: as for `dealt`.
        sizes: samples of each microbatch; their sum is B.
        fills: whether other stages wait for the first and the last microbatch of each stage.
        turns: replicas of an encoder, of which each takes every k-th microbatch. They get even shares first, which
            each then divides evenly: one with the costliest sample has cheaper microbatches beside it.

    Returns:
        The samples of each microbatch, in rising order; None where none is better than one after the other.
    """
    loads, count = _shares(costs, len(sizes)), len(sizes)
    if loads is None or _sums(loads, np.repeat(np.arange(count), sizes), np.ones((count, 1))).max() <= _ENOUGH:
        return None
    if turns > 1:
        return _by_turns(costs, sizes, turns)
    cheapest = np.argsort(loads.sum(axis=1), kind="stable")
    first, end = (sizes[0], sizes[0] + sizes[-1]) if fills and count >= _LONG else (0, 0)
    parts = _shared_out(np.sort(cheapest[end:]), costs, sizes[1:-1] if end else sizes)
    if fills:
        parts = _cheap_ends(parts, loads)
    if end:
        parts = [np.sort(cheapest[:first]), *parts, np.sort(cheapest[first:end])]
    return [part.tolist() for part in parts]


def _by_turns(costs: Mapping[str, Sequence[float]], sizes: Sequence[int], turns: int) -> list[list[int]]:
    """Deal samples to those that take turns with microbatches, and what each gets to its own ones."""
    takers = [range(turn, len(sizes), turns) for turn in range(min(turns, len(sizes)))]
    shares = _shared_out(np.arange(sum(sizes)), costs, [sum(sizes[number] for number in taker) for taker in takers])
    parts: dict[int, Part] = {}
    for taker, samples in zip(takers, shares, strict=True):
        parts |= zip(taker, _shared_out(samples, costs, [sizes[number] for number in taker]), strict=True)
    return [parts[number].tolist() for number in range(len(sizes))]


def _shared_out(samples: Part, costs: Mapping[str, Sequence[float]], sizes: Sequence[int]) -> list[Part]:
    """Deal some of the samples, in rising order; one after the other where nothing is better."""
    parts = dealt({kind: [column[sample] for sample in samples] for kind, column in costs.items()}, sizes)
    return np.split(samples, np.cumsum(sizes)[:-1]) if parts is None else [samples[part] for part in parts]


def _cheap_ends(parts: Sequence[Part], loads: Loads) -> list[Part]:
    """Let parts of one size change places: the cheapest comes first, the next one last, the costliest in the middle.

    Of two sizes, which follow each other, the first parts rise in cost and the others fall.
    """
    runs = [[*run] for _, run in groupby(parts, len)]
    rising = [sorted(run, key=lambda part: float(loads[part].sum())) for run in runs]
    if len(rising) == 1:
        return [*rising[0][::2], *rising[0][1::2][::-1]]
    return [*rising[0], *(part for run in rising[1:] for part in reversed(run))]


def _shares(costs: Mapping[str, Sequence[float]], count: int) -> Loads | None:
    """Costs in shares of what each of `count` parts has on average; None where nothing costs, or nothing is dealt."""
    kinds = [column for column in costs.values() if sum(column)]
    if not kinds or count < 2:
        return None
    loads = np.array(kinds, dtype=np.float64).T
    return loads * (count / loads.sum(axis=0))


def dealt(
    costs: Mapping[str, Sequence[float]], sizes: Sequence[int], speeds: Sequence[float] | None = None
) -> list[list[int]] | None:
    """Deal samples so that the busiest part has as little as possible of any kind.

    Longest first (R. L. Graham, Bounds on Multiprocessing Timing Anomalies, 1969), for several kinds and with as many
    samples for each part as `sizes` says; then pairs of samples change places while the busiest gains by it.

    Args:
        costs: by kind, what each of the B samples costs, such as how many rows it owns.
        sizes: samples of each part; their sum is B.
        speeds: of the parts, in any unit: one that is twice as fast may cost twice as much; None where they are equal.

    Returns:
        The samples of each part, in rising order; None where none is better than one after the other.
    """
    loads = _shares(costs, len(sizes))
    if loads is None:
        return None
    speed = np.ones((len(sizes), 1)) if speeds is None else np.array(speeds)[:, None] / np.mean(speeds)
    where = np.repeat(np.arange(len(sizes)), sizes)
    given = _sums(loads, where, speed).max()
    if given <= _ENOUGH:
        return None
    where = _longest_first(loads, sizes, speed)
    _exchange(loads, where, speed)
    if _sums(loads, where, speed).max() >= given - _LEAST:
        return None
    return [np.flatnonzero(where == part).tolist() for part in range(len(sizes))]


def _sums(loads: Loads, where: Part, speed: Loads) -> Loads:
    """[M, K]: what the samples of each part cost together, by its speed [M, 1]."""
    sums = np.zeros((len(speed), loads.shape[1]))
    np.add.at(sums, where, loads)
    return sums / speed


def _longest_first(loads: Loads, sizes: Sequence[int], speed: Loads) -> Part:
    """The part of each sample: the costliest goes first to the part that then has the least of any kind."""
    sums, room = np.zeros((len(sizes), loads.shape[1])), np.array(sizes)
    where = np.zeros(len(loads), dtype=np.int64)
    for sample in np.argsort(-loads.max(axis=1), kind="stable"):
        after = sums + loads[sample] / speed
        # of equal ones that with the most room, so that cheap samples are left for full ones
        order = np.lexsort((-room, after.sum(axis=1), after.max(axis=1)))
        part = next(int(part) for part in order if room[part])
        where[sample], sums[part] = part, after[part]
        room[part] -= 1
    return where


def _exchange(loads: Loads, where: Part, speed: Loads) -> None:
    """Let a sample of the busiest part and one of another change places, as long as both are less busy then."""
    sums = _sums(loads, where, speed)
    for _ in range(len(loads)):
        busiest = int(sums.max(axis=1).argmax())
        busy, others = np.flatnonzero(where == busiest), np.flatnonzero(where != busiest)
        moved = loads[busy][:, None] - loads[others][None]  # [busy, others, K]
        less, more = moved / speed[busiest], moved / speed[where[others]]
        after = np.maximum((sums[busiest] - less).max(axis=2), (sums[where[others]] + more).max(axis=2))
        row, column = np.unravel_index(int(after.argmin()), after.shape)
        if after[row, column] >= sums[busiest].max() - _LEAST:
            return
        sums[busiest] -= less[row, column]
        sums[where[others[column]]] += more[row, column]
        where[busy[row]], where[others[column]] = where[others[column]], busiest


Costs = Mapping[str, npt.NDArray[np.float64]]
"""[N] for each kind: what every sample of a data set costs."""
Step = list[list[Any]]
"""the samples of each replica"""


def costs_of(dataset: Any) -> Costs:
    """Return what `dataset` says that its samples cost; nothing where it does not say it.

    Args:
        dataset: with ``sample_costs``, an attribute or a method without arguments: a sequence of one number for each
            sample, or such sequences by kind, ``{"images": [3, 0, 1], "tokens": [120, 80, 95]}``; or a `Subset` of it.

    Raises:
        ConfigError: there is not one finite number of at least 0 for each sample.
    """
    if isinstance(dataset, Subset):
        return {kind: column.take(dataset.indices) for kind, column in costs_of(dataset.dataset).items()}
    costs = getattr(dataset, "sample_costs", None)
    costs = costs() if callable(costs) else costs
    if costs is None:
        return {}
    where = f"{type(dataset).__name__}.sample_costs"
    if not isinstance(costs, Mapping):
        return {"cost": _column(where, costs, len(dataset))}
    return {kind: _column(f"{where}[{kind!r}]", column, len(dataset)) for kind, column in costs.items()}


def _column(where: str, column: Any, count: int) -> npt.NDArray[np.float64]:
    try:
        values = np.asarray(column, dtype=np.float64)
    except (TypeError, ValueError):
        got = f"{type(column).__name__} that is not of numbers"
    else:
        wrong = np.flatnonzero(~np.isfinite(values) | (values < 0))
        if values.shape != (count,):
            got = f"{list(values.shape)} for {count} samples"
        elif len(wrong):
            got = f"{values[wrong[0]]:g} for sample {wrong[0]}"
        else:
            return values
    rule = "It has one finite number of at least 0 a sample"
    raise ConfigError(where, got, rule, 'Give a list by kind, {"images": [3, 0, 1]}, or leave sample_costs out')


def digest_of(costs: Costs) -> str | None:
    """Return what is equal where costs are; None without any."""
    digest = hashlib.blake2b(repr([*costs]).encode(), digest_size=8)
    for column in costs.values():
        digest.update(column.tobytes())
    return digest.hexdigest() if costs else None


@dataclass(frozen=True)
class Exchange:
    """Returns the batches of replicas after an exchange of samples among all, for `ShardOrder.exchange`.

    Args:
        costs: of the data set; of several kinds the one counts of which a replica has the most over the mean.
    """

    costs: Costs

    def __call__(self, samplers: Sequence[Any], skipped: int) -> Sequence[Any]:
        """Return the batches of those replicas that `samplers` are of; steps that are `skipped` stay as they are."""
        first = samplers[0]
        if hasattr(first, "of_all_replicas"):  # which have unlike speeds
            steps, numbers = first.of_all_replicas(), [sampler.shard for sampler in samplers]
        elif type(first) is BatchSampler and isinstance(first.sampler, DistributedSampler):
            steps, numbers = _of_all_replicas(first, first.sampler), [sampler.sampler.rank for sampler in samplers]
        else:
            return samplers
        steps = (step if number < skipped else self.evened(step) for number, step in enumerate(steps))
        copies = itertools.tee(steps, len(numbers))
        return [map(itemgetter(number), replica_steps) for number, replica_steps in zip(numbers, copies, strict=True)]

    def evened(self, step: Step) -> Step:
        """Deal samples so that what each replica has to do is in proportion to how many samples it has."""
        sizes = [*map(len, step)]
        samples = [*itertools.chain.from_iterable(step)]
        costs = {kind: column.take(samples).tolist() for kind, column in self.costs.items()}
        parts = dealt(costs, sizes, speeds=sizes)
        return step if parts is None else [[samples[place] for place in part] for part in parts]


def _of_all_replicas(batches: BatchSampler, sampler: DistributedSampler[Any]) -> Iterator[Step]:
    """Yield the batches of all replicas, step by step: of their common order each takes every k-th sample."""
    replicas, whole = sampler.num_replicas, copy(sampler)
    whole.num_replicas, whole.rank, whole.num_samples = 1, 0, sampler.total_size
    samples, count = iter(whole), batches.batch_size * replicas
    while step := list(itertools.islice(samples, count)):
        if len(step) < count and batches.drop_last:
            return
        yield [step[replica::replicas] for replica in range(replicas)]
