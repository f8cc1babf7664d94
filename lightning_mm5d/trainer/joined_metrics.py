"""Metrics see a batch as one: what the microbatches of a batch called them with is joined and counted again.

Many metrics are no sums over samples within one call: logits become probabilities where any of the batch is outside
of [0, 1], and the value of a step may be a ratio of sums. So a metric counts each microbatch as it comes, as the step
may look at it. After the schedule its states of before are put back, and it is called once with the samples of all.
Calls that cannot be joined (numbers, lists, other counts in each microbatch, a reset in between) stay as they are, and
so do those of a metric whose samples of a batch take more than `MOST_BYTES`: logits over a vocabulary would be in
memory for all microbatches at once.

The state of a torchmetrics object that torchmetrics has no public name for: one guarded place.

Everything here is private to torchmetrics. `check_torchmetrics` raises where a name has moved, before a step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torchmetrics
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torchmetrics import Metric

_COUNTERS = ("_update_count", "_forward_cache", "_computed")
_CHANGED_BY_FORWARD = ("_to_sync", "_should_unsync", "_enable_grad", "compute_on_cpu")
_RELIED_ON = ("_cache", "_copy_state_dict", "_defaults", "_is_synced", "_sync_dist", *_COUNTERS, *_CHANGED_BY_FORWARD)


def check_torchmetrics(metric: Metric) -> None:
    """Raise ImportError where `metric` lacks a name that this module relies on."""
    missing = [name for name in _RELIED_ON if not hasattr(metric, name)]
    if missing:
        raise ImportError(
            f"torchmetrics {torchmetrics.__version__}: {type(metric).__name__} has no {', '.join(missing)} any more. "
            "lightning_mm5d builds on it; install torchmetrics>=1.7,<2"
        )


def step_value(metric: Metric) -> Any:
    """Return the value of the metric's last forward; None before one."""
    return metric._forward_cache


def set_step_value(metric: Metric, value: Any) -> None:
    """Let `value` be the value of the metric's last forward."""
    metric._forward_cache = value


def sync_on_compute(metric: Metric) -> None:
    """Let the metric sync when it computes, whatever it was made with."""
    metric.sync_on_compute = metric._to_sync = True


def drop_result(metric: Metric) -> None:
    """Forget a computed result that was kept."""
    metric._computed = None


def count_as_updated(metric: Metric) -> None:
    """Let a metric that was never updated here compute without a warning."""
    metric._update_count = max(metric._update_count, 1)


def update_count(metric: Metric) -> int:
    """Return how often the metric was updated since its last reset."""
    return metric._update_count


class Kept(NamedTuple):
    """The states of a metric while it is used for something that must not count."""

    metric: Metric
    states: dict[str, Any]
    others: dict[str, Any]

    @classmethod
    def take(cls, metric: Metric) -> Kept:
        """Take the states away from `metric`, which starts afresh; nothing is copied."""
        kept = cls(metric, metric.metric_state, _others(metric))
        for name, default in metric._defaults.items():
            setattr(metric, name, default.clone() if isinstance(default, Tensor) else [])
        return kept

    @classmethod
    def copied(cls, metric: Metric) -> Kept:
        """Copy the states of `metric`, which goes on with its own; elements of lists are not copied."""
        states = {
            name: state.clone() if isinstance(state, Tensor) else list(state)
            for name, state in metric.metric_state.items()
        }
        return cls(metric, states, _others(metric))

    def put_back(self) -> None:
        """Give the metric its states again."""
        for name, value in (self.states | self.others).items():
            setattr(self.metric, name, value)


def _others(metric: Metric) -> dict[str, Any]:
    """What the metric holds beside its states, also what a forward changes for its time and an error leaves so."""
    return {name: getattr(metric, name) for name in (*_COUNTERS, *_CHANGED_BY_FORWARD)}


def is_synced(metric: Metric) -> bool:
    """Return whether the metric holds the states of all ranks."""
    return bool(metric._is_synced)


def begin_sync(metric: Metric) -> None:
    """Keep the metric's own states, which `Metric.unsync` puts back."""
    metric._cache = metric._copy_state_dict()


def gather_states(metric: Metric, gather: Callable[..., list[Tensor]], group: Any) -> None:
    """Replace the metric's states by those of all ranks of `group`, with its own reductions; collective."""
    metric._sync_dist(gather, process_group=group)


def end_sync(metric: Metric) -> None:
    """Note that the metric holds the states of all ranks."""
    metric._is_synced = True


MOST_BYTES = 256 << 20
"""of what one metric is called with in a batch, on one rank"""
Key = tuple[int, int]
"""id of a metric, and which of its calls in a microbatch"""


class _Call(NamedTuple):
    original: Callable[..., Any]
    given: tuple[tuple, dict[str, Any]]
    value: Any


@dataclass
class _Calls:
    metric: Metric
    before: Kept
    count: int
    nbytes: int = 0
    by_microbatch: dict[int, list[_Call]] = field(default_factory=dict)


class JoinedMetrics:
    """The calls of metrics in one schedule.

    Args:
        microbatch: returns the index of the one that runs.

    Attributes:
        values: of forwards with the samples of all microbatches, after `join`.
    """

    def __init__(self, microbatch: Callable[[], int | None]) -> None:
        self._microbatch = microbatch
        self._calls: dict[int, _Calls] = {}
        self._is_inside = False
        self.values: dict[Key | None, Tensor] = {}

    def call(self, metric: Metric, original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return ``original(*args, **kwargs)``, an update or a forward of `metric`, and note it."""
        index = self._microbatch()
        if self._is_inside or index is None:
            return original(*args, **kwargs)
        if id(metric) not in self._calls:
            self._calls[id(metric)] = _Calls(metric, Kept.copied(metric), update_count(metric))
        self._is_inside = True
        try:
            value = original(*args, **kwargs)
        finally:
            self._is_inside = False
        calls = self._calls[id(metric)]
        calls.nbytes += sum(leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        if calls.nbytes > MOST_BYTES:
            calls.by_microbatch.clear()
        else:
            call = _Call(original, tree_map_only(Tensor, Tensor.detach, (args, kwargs)), value)
            calls.by_microbatch.setdefault(index, []).append(call)
        return value

    def key(self, value: Any) -> Key | None:
        """Return the call of this microbatch that gave `value`, or the last one of a metric; None without one."""
        for number, calls in self._calls.items():
            made = calls.by_microbatch.get(self._microbatch() or 0, [])
            for place in reversed(range(len(made))):
                if calls.metric is value or (isinstance(value, Tensor) and made[place].value is value):
                    return number, place
        return None

    def join(self) -> None:
        """Count each metric's calls again, with the samples of all microbatches."""
        self._is_inside = True
        for number, calls in self._calls.items():
            made = [calls.by_microbatch[index] for index in sorted(calls.by_microbatch)]
            together = [_joined([call.given for call in same]) for same in zip(*made, strict=False)]
            is_whole = len({*map(len, made)}) == 1 and None not in together
            if len(made) < 2 or not is_whole or update_count(calls.metric) != calls.count + sum(map(len, made)):
                continue
            after = Kept.copied(calls.metric)
            calls.before.put_back()
            try:
                for place, (args, kwargs) in enumerate(together):
                    value = made[0][place].original(*args, **kwargs)
                    if isinstance(value, Tensor):
                        self.values[number, place] = value
            except Exception:  # it counts by microbatches, as it did without an error
                after.put_back()


def _joined(given: Sequence[Any]) -> Any:
    """The arguments of calls with the samples of all; None where something of them is not by sample."""
    flat = [tree_flatten(one) for one in given]
    leaves = [_cat(same) for same in zip(*(leaves for leaves, _ in flat), strict=False)]
    same = all(spec == flat[0][1] for _, spec in flat) and not any(leaf is None for leaf in leaves)
    return tree_unflatten(leaves, flat[0][1]) if same else None


def _cat(parts: Sequence[Any]) -> Tensor | None:
    if not all(isinstance(part, Tensor) and part.dim() for part in parts):
        return None
    return torch.cat([*parts]) if len({(part.shape[1:], part.dtype) for part in parts}) == 1 else None
