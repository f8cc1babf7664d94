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

While a schedule runs (`MetricSync.local`) the last stages of all replicas sync where each has one microbatch, as
under DDP. With several a sync does nothing: a `compute()` inside a step covers what this replica has seen, as a warning
tells, and so does the batch value of a metric with ``dist_sync_on_step=True``. After it, metrics count the batch as one
(`JoinedMetrics`). A metric that counts updates by a number counts microbatches.

Refuses a metric with a `process_group` of its own: which ranks hold states is the layout's business.

**Joined updates.** Metrics see a batch as one: what the microbatches of a batch called them with is joined and counted
again. Many metrics are no sums over samples within one call: logits become probabilities where any of the batch is
outside of [0, 1], and the value of a step may be a ratio of sums. So a metric counts each microbatch as it comes, as
the step may look at it. After the schedule its states of before are put back, and it is called once with the samples of
all. Calls that cannot be joined (numbers, lists, other counts in each microbatch, a reset in between) stay as they are,
and so do those of a metric whose samples of a batch take more than `MOST_BYTES`: logits over a vocabulary would be in
memory for all microbatches at once.

The state of a torchmetrics object that torchmetrics has no public name for: one guarded place.

Everything here is private to torchmetrics. `check_torchmetrics` raises where a name has moved, before a step runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torchmetrics
from lightning_utilities import apply_to_collection
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torchmetrics import Metric, MetricCollection, MetricTracker
from torchmetrics.utilities.distributed import gather_all_tensors
from torchmetrics.utilities.exceptions import TorchMetricsUserError

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.engine.codec import broadcast_tree
from lightning_mm5d.sharded.collectives import message_device
from lightning_mm5d.sharded.remote_value import Guard, Origin, remote_value
from lightning_mm5d.sharded.removable import Removable, meanwhile
from lightning_mm5d.trainer.kept_values import LONG

_COUNTERS = ("_update_count", "_forward_cache", "_computed")
_CHANGED_BY_FORWARD = ("_to_sync", "_should_unsync", "_enable_grad", "compute_on_cpu")
_OF_COLLECTIONS = ("_enable_compute_groups", "_groups", "_groups_checked")
_RELIED_ON = ("_cache", "_copy_state_dict", "_defaults", "_is_synced", "_sync_dist", *_COUNTERS, *_CHANGED_BY_FORWARD)


def check_torchmetrics(metric: Metric | MetricCollection) -> None:
    """Raise ImportError where `metric` lacks a name that this module relies on."""
    relied_on = _OF_COLLECTIONS if isinstance(metric, MetricCollection) else _RELIED_ON
    missing = [name for name in relied_on if not hasattr(metric, name)]
    if missing:
        raise ImportError(
            f"torchmetrics {torchmetrics.__version__}: {type(metric).__name__} has no {', '.join(missing)} any more. "
            "lightning_mm5d builds on it; install torchmetrics>=1.7,<2"
        )


_HOLDERS = (Metric, MetricCollection, nn.ModuleList, nn.ModuleDict)


def unregistered(owner: object) -> list[Metric | MetricCollection]:
    """Return the metrics and collections in attributes of a module or callback that are no submodules.

    They are attributes themselves, or in lists, tuples and dicts of few entries.
    """
    registered = {id(part) for part in owner.modules()} if isinstance(owner, nn.Module) else set()
    values = [value for name, value in vars(owner).items() if not (registered and name.startswith("_"))]
    few = [value for value in values if isinstance(value, (list, tuple, dict)) and len(value) <= LONG]
    items = [item for value in few for item in (value.values() if isinstance(value, dict) else value)]
    modules = [part for item in (*values, *items) if isinstance(item, _HOLDERS) for part in item.modules()]
    return [part for part in modules if isinstance(part, (Metric, MetricCollection)) and id(part) not in registered]


def count_apart(collection: MetricCollection) -> None:
    """Have each metric of `collection` keep states of its own, unless its maker named those that share theirs.

    torchmetrics lets metrics share states that are equal after the first update. That of a microbatch, or of one
    replica, has few samples: F1 and a top-2 accuracy may have equal counts by chance, and would be one from then on.
    """
    check_torchmetrics(collection)
    if collection._enable_compute_groups is True:
        collection._groups_checked = True  # until an update each metric is a group


def step_value(metric: Metric) -> Any:
    """Return the value of the metric's last forward; None before one."""
    return metric._forward_cache


def set_step_value(metric: Metric, value: Any) -> None:
    """Let `value` be the value of the metric's last forward."""
    metric._forward_cache = value


class MetricStates(NamedTuple):
    """The states of a metric while it is used for something that must not count."""

    metric: Metric
    states: dict[str, Any]
    others: dict[str, Any]

    @classmethod
    def take(cls, metric: Metric) -> MetricStates:
        """Take the states away from `metric`, which starts afresh; nothing is copied."""
        states = cls(metric, metric.metric_state, _others(metric))
        for name, default in metric._defaults.items():
            setattr(metric, name, default.clone() if isinstance(default, Tensor) else [])
        return states

    @classmethod
    def copied(cls, metric: Metric) -> MetricStates:
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
    """What the metric holds beside its states: numbers, what a forward changes for its time, and an error leaves so."""
    attributes = {name: value for name, value in vars(metric).items() if name not in metric._defaults}
    kinds = (int, float, bool, Tensor)  # of a wrapper, as `Running` and `MinMaxMetric` have
    numbers = {name: value for name, value in attributes.items() if type(value) in kinds}
    return numbers | {name: getattr(metric, name) for name in (*_COUNTERS, *_CHANGED_BY_FORWARD)}


def _with_inner(metric: Metric) -> list[MetricStates]:
    """Copies of the states of a metric and of those that it wraps."""
    return [MetricStates.copied(part) for part in metric.modules() if isinstance(part, Metric)]


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
    before: list[MetricStates]
    is_joined: bool = True
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
            self._calls[id(metric)] = _Calls(metric, _with_inner(metric))
        with self.left_out():
            value = original(*args, **kwargs)
        calls = self._calls[id(metric)]
        calls.nbytes += sum(leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        if calls.nbytes > MOST_BYTES:
            self._leave(calls)
        if calls.is_joined:
            call = _Call(original, tree_map_only(Tensor, Tensor.detach, (args, kwargs)), value)
            calls.by_microbatch.setdefault(index, []).append(call)
        return value

    def left_out(self) -> AbstractContextManager[None]:
        """Enter around calls that do not count."""
        return meanwhile(self, _is_inside=True)

    def reset(self, metric: Metric) -> None:
        """The step resets `metric`."""
        if not self._is_inside and id(metric) in self._calls:
            self._leave(self._calls[id(metric)])

    def _leave(self, calls: _Calls) -> None:
        calls.is_joined = False
        calls.by_microbatch.clear()

    def covers_a_part(self, metric: Metric) -> bool:
        """Whether `metric` has seen some microbatches of the batch, perhaps not all, and no call of it is running."""
        return not self._is_inside and id(metric) in self._calls

    def key(self, value: Any) -> Key | None:
        """Return the call of this microbatch that gave `value`, or the last one of a metric; None without one."""
        for number, calls in self._calls.items():
            microbatch_calls = calls.by_microbatch.get(self._microbatch() or 0, [])
            for place in reversed(range(len(microbatch_calls))):
                if calls.metric is value or (isinstance(value, Tensor) and microbatch_calls[place].value is value):
                    return number, place
        return None

    def join(self) -> None:
        """Count each metric's calls again, with the samples of all microbatches."""
        self._is_inside = True
        for number, calls in self._calls.items():
            microbatches = [calls.by_microbatch[index] for index in sorted(calls.by_microbatch)]
            together = [_joined([call.given for call in same]) for same in zip(*microbatches, strict=False)]
            is_whole = len({*map(len, microbatches)}) == 1 and None not in together
            inner = {id(states.metric) for states in calls.before} - {number}
            if len(microbatches) < 2 or not is_whole or not calls.is_joined or not inner.isdisjoint(self._calls):
                continue
            after = _with_inner(calls.metric)
            for states in calls.before:
                states.put_back()
            try:
                for place, (args, kwargs) in enumerate(together):
                    value = microbatches[0][place].original(*args, **kwargs)
                    if isinstance(value, Tensor):
                        self.values[number, place] = value
            except Exception:  # it counts by microbatches, as it did without an error
                for states in after:
                    states.put_back()


def _joined(calls: Sequence[Any]) -> Any:
    """The arguments of calls with the samples of all; None where something of them is not by sample."""
    flat = [tree_flatten(call) for call in calls]
    leaves = [_cat(same) for same in zip(*(leaves for leaves, _ in flat), strict=False)]
    same = all(spec == flat[0][1] for _, spec in flat) and not any(leaf is None for leaf in leaves)
    return tree_unflatten(leaves, flat[0][1]) if same else None


def _cat(parts: Sequence[Any]) -> Tensor | None:
    if not all(isinstance(part, Tensor) and part.dim() for part in parts):
        return None
    return torch.cat([*parts]) if len({(part.shape[1:], part.dtype) for part in parts}) == 1 else None


class MetricSync(Removable):
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
        self._owners: Sequence[object] = ()
        self._guard, self._thrown_away = guard, set[int]()  # ids of the metrics in a forward that changes nothing
        self._is_local = self._meets = False
        self._joined: JoinedMetrics | None = None
        self._told = set[int]()  # ids of metrics of which `_tell_of_a_part` has warned

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
                metric.sync_on_compute = metric._to_sync = True
            if metric.dist_sync_on_step:
                warnings.warn(
                    f"{name}(dist_sync_on_step=True): with several microbatches nothing can be synced inside a step, so"
                    " its step value covers this replica only.",
                    stacklevel=2,
                )
            self.put_attribute(metric, "sync", partial(self._sync, metric))
            if self._guard is not None:
                self.put_attribute(metric, "forward", partial(self._forward, metric))
                self.put_attribute(metric, "update", partial(self._update, metric, metric.update))
                self.put_attribute(metric, "reset", partial(self._reset, metric))
            self._metrics.append(metric)

    def attach_new(self, owners: Sequence[object] = ()) -> None:
        """Attach what trackers, and callbacks and other `owners` of metrics in attributes, have got since.

        Metrics of owners that are not synced (``sync_on_compute=False``) stay so: one rank alone may compute them.
        """
        self._owners = owners or self._owners
        known = {id(metric) for metric in self._metrics}
        copies = [part for tracker in self._trackers for part in tracker.modules() if isinstance(part, Metric)]
        theirs = [part for owner in self._owners for part in unregistered(owner)]
        theirs = [part for part in theirs if isinstance(part, MetricCollection) or part.sync_on_compute]
        for part in (*copies, *theirs):
            if isinstance(part, MetricCollection):
                count_apart(part)
            elif id(part) not in known:
                for name in ("sync", "forward", "reset"):  # of what it is a copy of
                    vars(part).pop(name, None)
                known.add(id(part))
                self.attach([part])

    def detach(self) -> None:
        """Give the attached metrics their stock sync back (a process group cannot be pickled)."""
        self.remove()
        self._metrics.clear()
        self._trackers.clear()
        self._owners = ()

    def _update(self, metric: Metric, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        counts = self._guard is None or self._guard.ends_here is not False
        if id(metric) in self._thrown_away:
            original(*args, **kwargs)
        elif counts:
            self._call(metric, original, args, kwargs)

    def _reset(self, metric: Metric) -> None:
        type(metric).reset(metric)
        if self._joined is not None:
            self._joined.reset(metric)

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
        taken = [MetricStates.take(part) for part in metric.modules() if isinstance(part, Metric)]
        metric_ids = {id(states.metric) for states in taken}
        self._thrown_away |= metric_ids
        try:
            return original(*args, **kwargs)
        except Exception:  # the stage that keeps the value raises what is an error there
            origin = Origin(type(metric).__name__, guard)
            return remote_value((), torch.get_default_dtype(), metric.device, origin, requires_grad=False)
        finally:
            self._thrown_away -= metric_ids
            for states in reversed(taken):  # a wrapper's states may be those of the metric inside
                states.put_back()

    @contextmanager
    def local(self, joined: JoinedMetrics | None = None, *, meets: bool = False) -> Iterator[None]:
        """Around a schedule, on every rank: nothing in it communicates, and `joined` joins the calls in it.

        With `meets`, all replicas run one microbatch each, and those of the last stage sync in it.

        Afterwards cached results are dropped on all ranks: only ranks of the last stage have updated, and they would
        be alone in the next sync. The other ranks count as updated, or `compute` would warn there.
        """
        self.attach_new()
        self._is_local, self._joined, self._meets = True, joined, meets
        try:
            yield
            if joined is not None:
                joined.join()
        finally:
            self._is_local, self._joined = False, None
            for metric in self._metrics:
                metric._computed = None
                if not self._is_last:
                    metric._update_count = max(metric._update_count, 1)

    @contextmanager
    def discarded(self) -> Iterator[None]:
        """Enter around a run of the user's step whose metric updates are dropped.

        A rank with several stages runs the step of one microbatch once for each; only one of these runs counts.
        """
        taken = [MetricStates.take(metric) for metric in self._metrics]
        try:
            yield
        finally:
            for states in reversed(taken):  # a wrapper's states may be those of the metric inside
                states.put_back()

    def restart(self) -> None:
        """Let all metrics start afresh, within `discarded`."""
        for metric in self._metrics:
            MetricStates.take(metric)
            metric._computed = None

    def copied_states(self) -> list[MetricStates]:
        """Return copies of the metrics' states, to be put back where a step must run again."""
        return [MetricStates.copied(metric) for metric in self._metrics]

    def _sync(
        self,
        metric: Metric,
        dist_sync_fn: Callable[..., list[Tensor]] | None = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Callable[[], bool] | None = None,
    ) -> None:
        """`Metric.sync` over the ranks of the layout, which `process_group` does not change."""
        meets = self._meets and self._group is not None and self._guard is not None and self._guard.ends_here
        if not should_sync or (self._is_local and not meets):
            if should_sync and self._joined is not None and self._joined.covers_a_part(metric):
                self._tell_of_a_part(metric)
            return
        if metric._is_synced:
            raise TorchMetricsUserError("The Metric has already been synced.")
        metric._cache = metric._copy_state_dict()  # of this rank, which `Metric.unsync` puts back
        if self._group is not None:
            metric._sync_dist(dist_sync_fn or gather_all_tensors, process_group=self._group)
        if self._has_others and not self._is_local:
            self._publish(metric)
        metric._is_synced = True

    def _tell_of_a_part(self, metric: Metric) -> None:
        """Warn once of a `compute` of `metric` in a step."""
        if id(metric) not in self._told:
            self._told.add(id(metric))
            warnings.warn(
                f"{type(metric).__name__}.compute() in a step covers the microbatches so far, and gives another value "
                "for each. Log the metric itself, call compute() and reset() in a hook, or set num_microbatches: 1.",
                stacklevel=2,
            )

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
