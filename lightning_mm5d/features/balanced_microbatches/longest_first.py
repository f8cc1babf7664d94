"""Deals the samples of a batch to microbatches, or those of a step to replicas, so that costs are even."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Loads = npt.NDArray[np.float64]
"""[B, K]: what each sample costs of each kind, in shares of what a part has on average."""
_ENOUGH = 1.01  # of the mean, for the busiest part
_LEAST = 1e-9


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
    kinds = [own for own in costs.values() if sum(own)]
    if not kinds or len(sizes) < 2:
        return None
    loads = np.array(kinds, dtype=np.float64).T
    loads *= len(sizes) / loads.sum(axis=0)
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


def _sums(loads: Loads, where: npt.NDArray[np.int64], speed: Loads) -> Loads:
    """[M, K]: what the samples of each part cost together, by its speed [M, 1]."""
    sums = np.zeros((len(speed), loads.shape[1]))
    np.add.at(sums, where, loads)
    return sums / speed


def _longest_first(loads: Loads, sizes: Sequence[int], speed: Loads) -> npt.NDArray[np.int64]:
    """The part of each sample: the costliest goes first to the part that then has the least of any kind."""
    sums, room = np.zeros((len(sizes), loads.shape[1])), np.array(sizes)
    where = np.zeros(len(loads), dtype=np.int64)
    for sample in np.argsort(-loads.max(axis=1), kind="stable"):
        after = sums + loads[sample] / speed
        # of equal ones that with the most room, so that cheap samples are left for full ones
        key = np.lexsort((-room, after.sum(axis=1), after.max(axis=1)))
        part = next(int(one) for one in key if room[one])
        where[sample], sums[part] = part, after[part]
        room[part] -= 1
    return where


def _exchange(loads: Loads, where: npt.NDArray[np.int64], speed: Loads) -> None:
    """Let a sample of the busiest part and one of another change places, as long as both are less busy then."""
    sums = _sums(loads, where, speed)
    for _ in range(len(loads)):
        busiest = int(sums.max(axis=1).argmax())
        own, others = np.flatnonzero(where == busiest), np.flatnonzero(where != busiest)
        moved = loads[own][:, None] - loads[others][None]  # [own, others, K]
        less, more = moved / speed[busiest], moved / speed[where[others]]
        after = np.maximum((sums[busiest] - less).max(axis=2), (sums[where[others]] + more).max(axis=2))
        mine, other = np.unravel_index(int(after.argmin()), after.shape)
        if after[mine, other] >= sums[busiest].max() - _LEAST:
            return
        sums[busiest] -= less[mine, other]
        sums[where[others[other]]] += more[mine, other]
        where[own[mine]], where[others[other]] = where[others[other]], busiest
