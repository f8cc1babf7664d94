"""Deals the samples of a batch to its microbatches so that each has as many images, frames and sounds to encode.

A microbatch of the first samples may have thirty images and the next none: then the encoder's rank works while others
wait, and encoder replicas, which take turns with microbatches, are busy unequally. What a sample costs is seen in the
batch alone: how many rows of each packed kind it owns. So all ranks of a replica deal the same samples without a word,
and weights, losses, outputs and their order are those of the batch (`data.microbatch.Dealer`).

Text is no cost here: its rows are padded to one length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.trainer.feature import Attached, Feature, Running

Loads = npt.NDArray[np.float64]
"""[B, K]: what each sample costs of each kind, in shares of what a microbatch has on average."""
_ENOUGH = 1.01  # of the mean, for the busiest microbatch
_LEAST = 1e-9


class BalancedMicrobatches(Feature):
    """The field `batching.balance`."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._is_on: bool = fields["balance"]

    def check(self, module: Any, plan: Plan, device: Any) -> None:
        """Refuse a module that splits its batches.

        Raises:
            ConfigError: it has `split_batch`.
        """
        if self._is_on and callable(getattr(module, "split_batch", None)):
            rule = f"Samples are dealt where the strategy splits batches, and {type(module).__name__}.split_batch does"
            raise ConfigError("batching.balance", True, rule, "Leave out the method, or balance")

    def attach(self, running: Running) -> Attached | None:
        """Deal the samples of all batches that are split."""
        return _Dealing(running) if self._is_on else None


class _Dealing(Attached):
    def __init__(self, running: Running) -> None:
        self.put_attribute(running.steps.batch_parts, "dealer", dealt)


def dealt(rows: Mapping[str, Sequence[int]], sizes: Sequence[int]) -> list[list[int]] | None:
    """Deal samples so that the busiest microbatch has as little as possible of any kind.

    Longest first (R. L. Graham, Bounds on Multiprocessing Timing Anomalies, 1969), for several kinds and with as many
    samples for each microbatch as `sizes` says; then pairs of samples change places while the busiest gains by it.

    Args:
        rows: by kind, how many of its rows each of the B samples owns.
        sizes: samples of each microbatch; their sum is B.

    Returns:
        The samples of each microbatch, in rising order; None where none is better than one after the other.
    """
    kinds = [own for own in rows.values() if sum(own)]
    if not kinds or len(sizes) < 2:
        return None
    loads = np.array(kinds, dtype=np.float64).T
    loads *= len(sizes) / loads.sum(axis=0)
    where = np.repeat(np.arange(len(sizes)), sizes)
    given = _sums(loads, where, len(sizes)).max()
    if given <= _ENOUGH:
        return None
    where = _longest_first(loads, sizes)
    _exchange(loads, where, len(sizes))
    if _sums(loads, where, len(sizes)).max() >= given - _LEAST:
        return None
    return [np.flatnonzero(where == part).tolist() for part in range(len(sizes))]


def _sums(loads: Loads, where: npt.NDArray[np.int64], parts: int) -> Loads:
    """[M, K]: what the samples of each part cost together."""
    sums = np.zeros((parts, loads.shape[1]))
    np.add.at(sums, where, loads)
    return sums


def _longest_first(loads: Loads, sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    """The part of each sample: the costliest goes first to the part that then has the least of any kind."""
    sums, room = np.zeros((len(sizes), loads.shape[1])), np.array(sizes)
    where = np.zeros(len(loads), dtype=np.int64)
    for sample in np.argsort(-loads.max(axis=1), kind="stable"):
        after = sums + loads[sample]
        # of equal ones that with the most room, so that cheap samples are left for full ones
        key = np.lexsort((-room, after.sum(axis=1), after.max(axis=1)))
        part = next(int(one) for one in key if room[one])
        where[sample], sums[part] = part, after[part]
        room[part] -= 1
    return where


def _exchange(loads: Loads, where: npt.NDArray[np.int64], parts: int) -> None:
    """Let a sample of the busiest part and one of another change places, as long as both are less busy then."""
    sums = _sums(loads, where, parts)
    for _ in range(len(loads)):
        busiest = int(sums.max(axis=1).argmax())
        own, others = np.flatnonzero(where == busiest), np.flatnonzero(where != busiest)
        moved = loads[own][:, None] - loads[others][None]  # [own, others, K]
        after = np.maximum((sums[busiest] - moved).max(axis=2), (sums[where[others]] + moved).max(axis=2))
        mine, other = np.unravel_index(int(after.argmin()), after.shape)
        if after[mine, other] >= sums[busiest].max() - _LEAST:
            return
        sums[busiest] -= moved[mine, other]
        sums[where[others[other]]] += moved[mine, other]
        where[own[mine]], where[others[other]] = where[others[other]], busiest


FEATURE = BalancedMicrobatches
