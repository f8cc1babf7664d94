"""Deals the samples of each step over the replicas of the data, by what the data set says that they cost.

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
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import BatchSampler, Subset
from torch.utils.data.distributed import DistributedSampler

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.features.balanced_microbatches.longest_first import dealt

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
    said = getattr(dataset, "sample_costs", None)
    said = said() if callable(said) else said
    if said is None:
        return {}
    where = f"{type(dataset).__name__}.sample_costs"
    if not isinstance(said, Mapping):
        return {"cost": _column(where, said, len(dataset))}
    return {kind: _column(f"{where}[{kind!r}]", column, len(dataset)) for kind, column in said.items()}


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
            steps, numbers = first.of_all_replicas(), [one.shard for one in samplers]
        elif type(first) is BatchSampler and isinstance(first.sampler, DistributedSampler):
            steps, numbers = _of_all_replicas(first, first.sampler), [one.sampler.rank for one in samplers]
        else:
            return samplers
        steps = (step if number < skipped else self.evened(step) for number, step in enumerate(steps))
        copies = itertools.tee(steps, len(numbers))
        return [map(itemgetter(number), own) for number, own in zip(numbers, copies, strict=True)]

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
