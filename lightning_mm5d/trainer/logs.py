"""`self.log` under a pipeline: captured while the schedule runs, merged, shared, replayed on every rank.

Why: a rank runs the user's step once a microbatch and most ranks are cut off somewhere in it, so ranks log
different keys, one of them logs each key several times, and callbacks that monitor a key raise where it is
missing. Phases:

1. capture: `LogCapture.capture` shadows ``module.log`` (`log_dict` goes through it); calls are only
   recorded;
2. merge: `LogCapture.merge`, over the microbatches, into what one call with the whole batch would have
   logged;
3. share: within the `StepResult`, from the rank where the step ends to the ranks of its replica;
4. replay: `replay` calls the real ``module.log`` on every rank, which validates and stores as ever.

What a merged value is, by `reduce_fx`: ``mean`` weighs each microbatch by the call's `batch_size`, or else as the loss
does, by its samples or label tokens. A `batch_size` that is its number of samples, or a constant, says how much the
batch counts in an epoch, as under Lightning, and no more. ``sum``, ``max`` and ``min`` do as they say. Both the step
value and Lightning's epoch value see the merged value, and the merged weight as batch size. So a per-sample mean logged
with ``sum`` grows with the number of microbatches: log it with the default. A key that only some microbatches log is
merged over those. A torchmetrics object is replayed as the object at the same path; its step value is the weighted mean
of its microbatch values, exact for means over samples (accuracy) and an approximation for others (an area under a
curve); its epoch value is exact (see `lightning_mm5d.trainer.metrics`).

`log_metrics` of the trainer's loggers is captured, merged as means and replayed likewise, on rank 0 as Lightning does.

`enable_graph` is ignored: a merged value has no graph. A reference to ``log`` taken before the capture is
not seen.

Refuses what other ranks could not repeat: a `sync_dist_group`, a `reduce_fx` of the user's own, and a
metric object that is no attribute of the module. Refuses reads of ``trainer.callback_metrics`` and its like in a step
that has just logged what it reads: there is no value of the whole batch yet.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from numbers import Number
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.sharded.remote_value import settled
from lightning_mm5d.sharded.removable import meanwhile, put
from lightning_mm5d.trainer.metrics import JoinedMetrics, Key, check_torchmetrics, set_step_value, step_value

_REDUCTIONS: dict[Any, str] = {
    "mean": "mean", "avg": "mean", torch.mean: "mean",
    "sum": "sum", torch.sum: "sum", sum: "sum",
    "max": "max", torch.max: "max", max: "max",
    "min": "min", torch.min: "min", min: "min",
}  # fmt: skip


_SHOWN = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_READS = (
    *("__contains__", "__eq__", "__getitem__", "__iter__", "__len__", "__or__", "__repr__"),
    *("copy", "get", "items", "keys", "pop", "setdefault", "values"),
)


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """The arguments of `LightningModule.log` that travel, as JSON; names and defaults are Lightning's."""

    name: str
    prog_bar: bool = False
    logger: bool | None = None
    on_step: bool | None = None
    on_epoch: bool | None = None
    reduce_fx: str = "mean"
    sync_dist: bool = False
    add_dataloader_idx: bool = True
    metric_attribute: str | None = None
    """path of the metric object in the module, if that is what was logged"""
    rank_zero_only: bool = False
    logger_index: int | None = None
    """of the trainer's logger whose `log_metrics` was called, with the numbers of the call and of the step"""
    logger_call: int = 0
    logger_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class LogCall:
    """One captured call."""

    options: LogOptions
    value: Tensor | None
    """one element; ``None`` for a metric object without a value for its last batch"""
    dtype: torch.dtype
    """what Lightning would store the value in, float32 or float64"""
    weight: float
    """samples that the value stands for"""
    given: int | None = None
    """the call's `batch_size`"""
    microbatch: tuple[float, float] = (0.0, 0.0)
    """what the microbatch weighs, and how many samples it has"""
    is_computed: bool = False
    """whether it was logged as a tensor, and so is equal on ranks that share the last layers"""
    key: Key | None = None
    """of the metric's call whose value it is"""


@dataclass(frozen=True, kw_only=True)
class MergedLog:
    """One call to replay."""

    options: LogOptions
    value: Tensor | None
    """0-dim, float32 or float64"""
    batch_size: float
    """samples that the value stands for"""
    is_computed: bool = False
    """whether it was logged as a tensor; False where it was received"""

    def weighted(self, samples: float, factor: float, everywhere: float | None = None) -> MergedLog:
        """Return the log of a batch of `samples`, whose value counts `factor` times in a mean over replicas.

        Lightning's mean over an epoch counts replicas by their samples again. So where these are unlike, a value that
        has the factor stands for the samples of all replicas.

        Args:
            samples: of this replica.
            factor: 1 where all replicas count as much.
            everywhere: samples of all replicas, where these have unlike numbers.
        """
        value = self.value
        is_mean = self.options.sync_dist and self.options.reduce_fx == "mean" and self.options.metric_attribute is None
        if value is not None and is_mean and factor != 1.0:
            value = value * factor if factor else torch.zeros_like(value)  # a mean over no tokens is NaN
        return replace(self, value=value, batch_size=everywhere if is_mean and everywhere is not None else samples)


@dataclass
class _Constant:
    """The `batch_size` that all calls of a place have given, with what is known of the first batch; None of a count."""

    given: int | None
    sizes: list[float]
    is_known: bool = False
    """whether it has been the same for microbatches of unlike sizes, or the number of all samples"""


def _common(values: Iterable[Any]) -> Any:
    """The value that all `values` are; None where they differ."""
    different = {*values}
    return different.pop() if len(different) == 1 else None


def _is_constant(given: int | None, sizes: Sequence[float]) -> bool:
    """Whether a `batch_size` that all microbatches of these sizes gave is no count of what each has."""
    return len({*sizes}) > 1 or given == sum(sizes) != sizes[0]


class LogCapture:
    """Records what the user's step logs, per microbatch, instead of logging it.

    Args:
        module: the module whose `log` is captured.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._calls: dict[int, list[LogCall]] = {}
        self._paths: dict[int, str] = {}
        self._microbatch: int | None = None
        self._weight: float = 0
        self._samples: float = 0
        self._direct = 0
        self._constants: dict[tuple[str, LogOptions, int], _Constant] = {}
        self.joined = JoinedMetrics(lambda: self._microbatch)

    @contextmanager
    def capture(self) -> Iterator[JoinedMetrics]:
        """Forget earlier records and record inside the block; then ``module.log`` is what it was.

        Yields what joins the calls of metrics inside, whose values `merge` takes.
        """
        self._calls, self._paths, self._microbatch = {}, {}, None
        self.joined = JoinedMetrics(lambda: self._microbatch)
        with ExitStack() as stack:
            stack.callback(put(self._module, "log", self._record))
            for index, logger in enumerate([] if self._module._trainer is None else self._module._trainer.loggers):
                stack.callback(put(logger, "log_metrics", partial(self._record_direct, index)))
            for shown in _SHOWN:
                stack.enter_context(read_by(shown, partial(self._earlier, shown)))
            yield self.joined

    def begin_microbatch(self, index: int, weight: float, samples: float | None = None) -> None:
        """What follows belongs to microbatch `index`, which weighs `weight` and holds `samples`, as many without them.

        Records of an earlier run of the same microbatch are dropped: a rank with several stages runs the
        step once for each, the last of them being the most complete.
        """
        self._microbatch, self._weight, self._samples = index, weight, weight if samples is None else samples
        self._calls[index] = []
        self._direct = 0

    def take(self) -> Any:
        """Return what belongs to the microbatch that is computed."""
        return self._microbatch, self._weight, self._samples

    def put(self, state: Any) -> None:
        """Go on with the microbatch that `take` returned `state` of."""
        self._microbatch, self._weight, self._samples = state

    def plain(self) -> dict[int, dict[tuple[LogOptions, int], LogCall]]:
        """Return the calls of each microbatch that log a number, and not what metrics count, by options and turn."""
        plain_calls: dict[int, dict[tuple[LogOptions, int], LogCall]] = {}
        for index, calls in self._calls.items():
            plain_calls[index] = {
                place: call
                for place, call in _by_turn(calls)
                if call.options.metric_attribute is None and call.key not in self.joined.values
            }
        return plain_calls

    @contextmanager
    def discarded(self) -> Iterator[None]:
        """Drop what is recorded inside the block."""
        with meanwhile(self, _calls=dict(self._calls)), self.joined.left_out():
            yield

    def merge(self, step: str = "") -> list[MergedLog]:
        """The records merged over microbatches, in the order of first appearance; no communication.

        A key that one run of the step logs more than once stays as many calls.

        Args:
            step: name of the method.
        """
        groups: dict[tuple[LogOptions, int], list[LogCall]] = defaultdict(list)
        for index in sorted(self._calls):
            for place, call in _by_turn(self._calls[index]):
                groups[place].append(call)
        merged = []
        for (options, turn), calls in groups.items():
            constant, whole = self._constant((step, options, turn), calls), self.joined.values.get(calls[0].key)
            log = _merge_calls(options, calls, constant)
            if log.value is not None and whole is not None and whole.numel() == 1:
                log = replace(log, value=whole.detach().reshape(()).to(log.value))
            merged.append(log)
        return merged

    def _constant(self, place: tuple[str, LogOptions, int], calls: Sequence[LogCall]) -> float | None:
        """Return what a batch weighs to whose microbatches one constant `batch_size` was given, as that of the data.

        All batches of an epoch then count equally. None for a count, which is another one in some microbatch. Where
        microbatches have equal sizes, only the number of all samples is known to be a constant.
        """
        given, sizes = _common(call.given for call in calls), [call.microbatch[1] for call in calls]
        constant = self._constants.setdefault(place, _Constant(given, sizes))
        if constant.given != given:
            constant.given = None
        constant.is_known |= _is_constant(given, sizes) or {*sizes} != {*constant.sizes}
        if constant.given is None or not constant.is_known:
            return None
        return float(constant.given * len(constant.sizes))

    def _record(
        self,
        name: str,
        value: Metric | Tensor | Number,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Any], Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Stands in for `LightningModule.log`, with its signature (Lightning 2.6)."""
        assert self._microbatch is not None, "a log call before begin_microbatch"
        call = f"self.log({name!r})"
        reduction = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
        if reduction not in _REDUCTIONS:
            rule = "Reductions are mean, sum, max and min"
            raise ConfigError(f"{call}.reduce_fx", reduce_fx, rule, "Log a torchmetrics.Metric")
        if sync_dist_group is not None:
            rule = "Which ranks a value is averaged over follows from the layout"
            fix = "Leave sync_dist_group unset and keep sync_dist=True"
            raise ConfigError(f"{call}.sync_dist_group", sync_dist_group, rule, fix)
        value = settled(value, call)
        path = self._path_of(value, call) if isinstance(value, Metric) else None
        stored, dtype = _as_tensor(value, call)
        options = LogOptions(
            name=name,
            prog_bar=bool(prog_bar),
            logger=logger,
            on_step=on_step,
            on_epoch=on_epoch,
            reduce_fx=_REDUCTIONS[reduction],
            sync_dist=bool(sync_dist),
            add_dataloader_idx=bool(add_dataloader_idx),
            metric_attribute=path,
            rank_zero_only=bool(rank_zero_only),
        )
        weight = self._weight if batch_size in (None, self._samples) else int(batch_size)
        is_computed = isinstance(value, Tensor)
        key = self.joined.key(value)
        recorded = LogCall(options=options, value=stored, dtype=dtype, weight=weight, is_computed=is_computed, key=key)
        recorded = replace(recorded, given=batch_size, microbatch=(self._weight, self._samples))
        self._calls[self._microbatch].append(recorded)

    def _record_direct(self, logger: int, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Stands in for `log_metrics` of one of the trainer's loggers."""
        assert self._microbatch is not None, "a call of a logger before begin_microbatch"
        for name, value in metrics.items():
            call = f"self.logger.log_metrics({name!r})"
            stored, _ = _as_tensor(settled(value, call), call)
            options = LogOptions(name=name, logger_index=logger, logger_call=self._direct, logger_step=step)
            computed, weight = isinstance(value, Tensor), self._weight
            recorded = LogCall(options=options, value=stored, dtype=torch.float64, weight=weight, is_computed=computed)
            self._calls[self._microbatch].append(recorded)
        self._direct += 1

    def _earlier(self, shown: str, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return what a step reads of the trainer's metrics, without what this run of the step has logged."""
        calls = self._calls.get(self._microbatch, ()) if self._microbatch is not None else ()
        names = tuple(sorted({call.options.name for call in calls if call.options.logger_index is None}))
        return _Earlier(metrics, shown, names) if names else metrics

    def _path_of(self, metric: Metric, call: str) -> str:
        if id(metric) not in self._paths:
            self._paths = {id(m): path for path, m in self._module.named_modules() if isinstance(m, Metric)}
        path = self._paths.get(id(metric))
        if path is None:
            rule = "A metric object is found by its place in the module, so that all ranks can log theirs"
            fix = "Make it an attribute of the LightningModule (a list of metrics: torch.nn.ModuleList)"
            raise ConfigError(call, metric, rule, fix)
        return path


def _by_turn(calls: Sequence[LogCall]) -> Iterator[tuple[tuple[LogOptions, int], LogCall]]:
    """Yield calls of one microbatch, with their options and how many calls of these came before."""
    seen: Counter[LogOptions] = Counter()
    for call in calls:
        yield (call.options, seen[call.options]), call
        seen[call.options] += 1


class _Earlier(dict[str, Any]):
    """Metrics of earlier batches, among which those of some names must not be read."""

    def __init__(self, metrics: dict[str, Any], shown: str, names: tuple[str, ...]) -> None:
        super().__init__(metrics)
        self._metrics, self._shown, self._names = metrics, shown, names

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._metrics[key] = value

    def check(self, key: Any = None) -> None:
        """Refuse a read of `key`, or of all."""
        now = {f"{name}{end}" for name in self._names for end in ("", "_step")}
        if key is None or str(key).partition("/dataloader_idx_")[0] in now:
            got = f"a read of {self._names[0] if key is None else key!r} in the step that has just logged it"
            rule = "Its value for the whole batch is known when all microbatches and stages have run"
            fix = "Use the value that the step logs, or read it in on_train_batch_end or on_validation_batch_end"
            raise ConfigError(f"trainer.{self._shown}", got, rule, fix)


def _checked(name: str) -> Callable[..., Any]:
    read = getattr(dict, name)

    def checked(metrics: _Earlier, *args: Any) -> Any:
        metrics.check(None if name in ("__eq__", "__or__") or not args else args[0])
        return read(metrics, *args)

    return checked


for _name in _READS:
    setattr(_Earlier, _name, _checked(_name))


def read_by(name: str, read: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Let `read` say what users see of a property of trainers."""
    original = getattr(Trainer, name)
    return meanwhile(Trainer, **{name: property(lambda trainer: read(original.__get__(trainer)))})


def replay(module: LightningModule, merged: Sequence[MergedLog]) -> None:
    """Log all of `merged` through ``module.log``; to be called in the trainer hook that the capture was in.

    A metric object is the local one at the recorded path, given the merged value as that of its last batch.
    """
    direct: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    steps: dict[tuple[int, int], int | None] = {}
    for log in merged:
        if log.options.logger_index is not None:
            assert log.value is not None
            key = log.options.logger_index, log.options.logger_call
            direct[key][log.options.name], steps[key] = float(log.value), log.options.logger_step
            continue
        value: Any = None if log.value is None else log.value.to(module.device)
        if log.options.metric_attribute is not None:
            metric: Any = module.get_submodule(log.options.metric_attribute)
            if value is not None:
                set_step_value(metric, value)
            value = metric
        options = {name: option for name, option in asdict(log.options).items() if not name.startswith("logger_")}
        module.log(**options, value=value, batch_size=round(log.batch_size))
    for (index, call), metrics in direct.items():
        module.trainer.loggers[index].log_metrics(metrics, steps[index, call])


def _as_tensor(value: Any, call: str) -> tuple[Tensor | None, torch.dtype]:
    """The value as a tensor of its own, and the dtype that Lightning would store it in."""
    if isinstance(value, Metric):
        check_torchmetrics(value)
        cached = step_value(value)
        # what is no single number is Lightning's to refuse: at replay, and if a step value is asked for
        if not isinstance(cached, Tensor) or cached.numel() != 1:
            return None, torch.float32
        value = cached
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ConfigError(call, tuple(value.shape), "A logged tensor has one element", "Log its mean()")
        return value.detach().clone().reshape(()), _stored_dtype(value.dtype)
    if isinstance(value, Number):
        return torch.tensor(value, dtype=torch.float64), _stored_dtype(torch.get_default_dtype())
    raise ConfigError(call, value, "Logged are numbers, tensors of one element and torchmetrics", "Use self.log_dict")


def _stored_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def merged_value(options: LogOptions, calls: list[LogCall]) -> float | None:
    """Return the number that is logged where microbatches log `calls`; None where these have none."""
    given, sizes = _common(call.given for call in calls), [call.microbatch[1] for call in calls]
    value = _merge_calls(options, calls, 1.0 if given is not None and _is_constant(given, sizes) else None).value
    return None if value is None else float(value)


def _merge_calls(options: LogOptions, calls: list[LogCall], constant: float | None) -> MergedLog:
    """One log of all `calls`, in float64 on the device of the first tensor that is not on the CPU, if any.

    Args:
        options: of the calls.
        calls: of the microbatches.
        constant: what the batch weighs, where its microbatches weigh as in its loss; else they say both.
    """
    batch_size = sum(call.weight for call in calls) if constant is None else constant
    weighed = [(call.value, call.weight if constant is None else call.microbatch[0]) for call in calls]
    valued = [(value, weight) for value, weight in weighed if value is not None]
    if not valued:
        return MergedLog(options=options, value=None, batch_size=batch_size)
    device = next((value.device for value, _ in valued if not value.is_cpu), torch.device("cpu"))
    reduction = "mean" if options.metric_attribute else options.reduce_fx
    if reduction == "mean":
        # a microbatch of weight 0 may well be NaN; if all are, no weight is better than another
        valued = [(value, weight) for value, weight in valued if weight] or [(value, 1) for value, _ in valued]
    values = [value.to(device, torch.float64) for value, _ in valued]
    if reduction == "mean":  # weights stay numbers of Python: a copy of them would wait for the device
        weights = [float(weight) for _, weight in valued]
        merged = torch.stack(torch._foreach_mul(values, weights)).sum() / sum(weights)
    else:
        merged = getattr(torch.stack(values), reduction)()
    dtype = torch.float64 if any(call.dtype == torch.float64 for call in calls) else torch.float32
    is_computed = all(call.is_computed for call in calls)
    return MergedLog(options=options, value=merged.to(dtype), batch_size=batch_size, is_computed=is_computed)
