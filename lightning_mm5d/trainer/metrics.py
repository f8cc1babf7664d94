"""torchmetrics objects under a pipeline: one update a sample, one value on every rank.

Why: only the ranks of the last stage reach the code that updates a metric; the others hold empty or partial states. A
stock sync gathers over all ranks: it would mix those states in, count peers twice, or hang where states differ in
shape. And a sync in the middle of a schedule would wait for ranks that are busy elsewhere. So `MetricSync` puts a sync
of its own on each metric object:

1. gather: the ranks of the last stage sync among themselves, with the metric's own reductions;
2. publish: one rank of the last stage broadcasts the result, and every rank of other stages adopts it.

`Metric.compute` then returns the same number everywhere; `unsync` restores each rank's own state as ever.
All ranks must call `compute`, as under any distributed strategy.

A stage before the last throws away what it makes of a metric. So it skips updates there, and a forward changes nothing:
where it cannot compute with values of other ranks it gives one of these.

While a schedule runs (`MetricSync.local`) a sync does nothing: a `compute()` inside a step covers what this
replica has seen, and so does the batch value of a metric with ``dist_sync_on_step=True``. After it, metrics count the
batch as one (`trainer.joined_metrics`). A metric that counts updates by a number counts microbatches.

Refuses a metric with a `process_group` of its own: which ranks hold states is the layout's business.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities import apply_to_collection
from torch import Tensor
from torchmetrics import Metric, MetricTracker
from torchmetrics.utilities.distributed import gather_all_tensors
from torchmetrics.utilities.exceptions import TorchMetricsUserError

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.engine.codec import broadcast_tree
from lightning_mm5d.sharded.collectives import message_device
from lightning_mm5d.sharded.remote_value import Guard, Origin, remote_value
from lightning_mm5d.trainer.joined_metrics import (
    JoinedMetrics,
    Kept,
    begin_sync,
    check_torchmetrics,
    count_as_updated,
    drop_result,
    end_sync,
    gather_states,
    is_synced,
    sync_on_compute,
)


class MetricSync:
    """How metric states travel between the ranks of one run.

    Args:
        loss_group: the ranks whose states count, with each sample on exactly one of them (one rank of
            each loss replica); ``None`` if there is one such rank. Looked at on ranks of the last stage only.
        is_last: whether this rank is one of them.
        world_src: global rank of a rank of the last stage, the same on all ranks.
        world_group: every rank on which metrics are computed; ``None`` for the default group.
        guard: of the values that other ranks have, which knows the stage that runs.
    """

    def __init__(
        self,
        *,
        loss_group: dist.ProcessGroup | None,
        is_last: bool,
        world_src: int,
        world_group: dist.ProcessGroup | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._group = loss_group if is_last else None
        self._is_last = is_last
        self._src = world_src
        self._world = world_group
        terminal_size = dist.get_world_size(self._group) if self._group is not None else 1
        self._has_others = terminal_size < dist.get_world_size(world_group)
        self._metrics: list[Metric] = []
        self._trackers: list[MetricTracker] = []
        self._undo: list[tuple[Metric, dict[str, Any]]] = []
        self._guard, self._thrown_away = guard, set[int]()  # ids of the metrics in a forward that changes nothing
        self._is_local = False
        self._joined: JoinedMetrics | None = None

    def attach(self, metrics: Iterable[Metric], trackers: Iterable[MetricTracker] = ()) -> None:
        """Replace the sync of each metric, in place and on all ranks; copies made by `deepcopy` keep it.

        Copies that `trackers` make later are found before each step.

        ``sync_on_compute=False`` is overridden with a warning (ranks without states could not compute a
        value); ``dist_sync_on_step=True`` is warned about (it has no effect inside a step).

        Raises:
            ConfigError: a metric has a process group of its own.
        """
        self._trackers += trackers
        for metric in metrics:
            check_torchmetrics(metric)
            name = type(metric).__name__
            if metric.process_group is not None:
                rule = "Which ranks hold the states of a metric follows from the layout"
                raise ConfigError(f"{name}.process_group", metric.process_group, rule, "Leave process_group unset")
            if not metric.sync_on_compute:
                warnings.warn(
                    f"{name}(sync_on_compute=False): most ranks of a pipeline hold no states of their own, so"
                    " it is computed over all replicas on every rank.",
                    stacklevel=2,
                )
                sync_on_compute(metric)
            if metric.dist_sync_on_step:
                warnings.warn(
                    f"{name}(dist_sync_on_step=True): nothing can be synced inside a pipelined step, so its"
                    " step value covers this replica only.",
                    stacklevel=2,
                )
            own = {"sync": partial(self._sync, metric)}
            if self._guard is not None:
                own |= {
                    "forward": partial(self._forward, metric),
                    "update": partial(self._update, metric, metric.update),
                }
            self._undo.append((metric, {name: vars(metric)[name] for name in own if name in vars(metric)}))
            vars(metric).update(own)
            self._metrics.append(metric)

    def detach(self) -> None:
        """Give the attached metrics their stock sync back (a process group cannot be pickled)."""
        for metric, own in self._undo:
            for name in ("sync", "forward", "update"):
                vars(metric).pop(name, None)
            vars(metric).update(own)
        self._undo.clear()
        self._metrics.clear()
        self._trackers.clear()

    def _update(self, metric: Metric, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        counts = self._guard is None or self._guard.ends_here is not False
        if id(metric) in self._thrown_away:
            original(*args, **kwargs)
        elif counts:
            self._call(metric, original, args, kwargs)

    def _call(self, metric: Metric, original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        if self._joined is None or not self._is_last:
            return original(*args, **kwargs)
        return self._joined.call(metric, original, args, kwargs)

    def _forward(self, metric: Metric, *args: Any, **kwargs: Any) -> Any:
        guard = self._guard
        original = partial(type(metric).forward, metric)
        if id(metric) in self._thrown_away:
            return original(*args, **kwargs)
        if guard is None or guard.ends_here is not False:
            return self._call(metric, original, args, kwargs)
        kept = [Kept.take(part) for part in metric.modules() if isinstance(part, Metric)]
        own = {id(one.metric) for one in kept}
        self._thrown_away |= own
        try:
            return original(*args, **kwargs)
        except Exception:  # the stage that keeps the value raises what is an error there
            origin = Origin(type(metric).__name__, guard)
            return remote_value((), torch.get_default_dtype(), metric.device, origin, requires_grad=False)
        finally:
            self._thrown_away -= own
            for one in reversed(kept):  # a wrapper's states may be those of the metric inside
                one.put_back()

    @contextmanager
    def local(self, joined: JoinedMetrics | None = None) -> Iterator[None]:
        """Around a schedule, on every rank: nothing in it communicates, and `joined` joins the calls in it.

        Afterwards cached results are dropped on all ranks: only ranks of the last stage have updated, and they would
        be alone in the next sync. The other ranks count as updated, or `compute` would warn there.
        """
        known = {id(metric) for metric in self._metrics}
        for metric in [part for tracker in self._trackers for part in tracker.modules() if isinstance(part, Metric)]:
            if id(metric) not in known:
                for name in ("sync", "forward"):  # of what it is a copy of
                    vars(metric).pop(name, None)
                self.attach([metric])
        self._is_local, self._joined = True, joined
        try:
            yield
            if joined is not None:
                joined.join()
        finally:
            self._is_local, self._joined = False, None
            for metric in self._metrics:
                drop_result(metric)
                if not self._is_last:
                    count_as_updated(metric)

    @contextmanager
    def discarded(self) -> Iterator[None]:
        """Enter around a run of the user's step whose metric updates are dropped.

        A rank with several stages runs the step of one microbatch once for each; only one of these runs counts.
        """
        kept = [Kept.take(metric) for metric in self._metrics]
        try:
            yield
        finally:
            for one in reversed(kept):  # a wrapper's states may be those of the metric inside
                one.put_back()

    def kept(self) -> list[Kept]:
        """Return copies of the metrics' states, to be put back where a step must run again."""
        return [Kept.copied(metric) for metric in self._metrics]

    def _sync(
        self,
        metric: Metric,
        dist_sync_fn: Callable[..., list[Tensor]] | None = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Callable[[], bool] | None = None,
    ) -> None:
        """`Metric.sync` over the ranks of the layout, which `process_group` does not change."""
        if self._is_local or not should_sync:
            return
        if is_synced(metric):
            raise TorchMetricsUserError("The Metric has already been synced.")
        begin_sync(metric)
        if self._group is not None:
            gather_states(metric, dist_sync_fn or gather_all_tensors, self._group)
        if self._has_others:
            self._publish(metric)
        end_sync(metric)

    def _publish(self, metric: Metric) -> None:
        """Broadcast the states from the source; all but ranks of the last stage adopt them on their own device.

        States may be lists of anything that JSON and tensors hold (the mean average precision keeps run-length masks).
        """
        device = message_device(metric.device, self._world)
        states = apply_to_collection(metric.metric_state, Tensor, Tensor.detach)
        states = broadcast_tree(states, self._src, device, self._world)
        if self._is_last:
            return
        for attr, state in states.items():
            stays = metric.compute_on_cpu and isinstance(state, list)
            goal = torch.device("cpu") if stays else metric.device
            setattr(metric, attr, apply_to_collection(state, Tensor, Tensor.to, goal))

    def __deepcopy__(self, memo: dict[int, Any]) -> MetricSync:
        return self
