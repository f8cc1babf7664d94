"""The state of a torchmetrics object that torchmetrics has no public name for: one guarded place.

Everything here is private to torchmetrics. `check_torchmetrics` raises where a name has moved, before a step runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torchmetrics
from torch import Tensor
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
