"""Decides which microbatches of a stage are computed side by side, and computes them so.

The first ones of each structure run one after another: skip inputs are traced in them, attributes that layers write are
watched, and so are shapes that a stage promises. Ranks that share layers make equal decisions: they see the same
microbatches, and agree on what they have watched. Ranks that share experts see others, and agree each time.

**Turns.** Each microbatch runs in a thread of its own, the first one in the schedule's, but only one of them at a time:
it hands over to the next one where it has started a collective of its layers and would wait for it, and waits when its
turn comes again. So code of the user's needs no locks, and the order in which collectives start follows from the code
alone: it is the same on all ranks that share the layers.

In a forward microbatches hand over inside of layers only. What a step does around them, such as metrics and logs, runs
in one piece. Ranks that share experts are different replicas, whose layers may communicate unlike numbers of times. So
they hand over where tokens travel, which all of them do together, and nowhere else: a rank whose own microbatch has
ended then serves the others, and hands over as they do.

What is of one microbatch at a time is exchanged at each turn (`Scope`): the run that patched modules obey, random
generators and settings of the process (`ProcessState`), where logs go. An object of the user's that several
microbatches change, such as a list in a closure, is not.

Microbatches run one after another where they would disturb each other: the first ones of each structure, which are
traced and watched; and wherever the step writes attributes or buffers of modules in layers or before them, which
another one would read.

An error ends all of them, and is raised once.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from torch import Tensor, nn, overrides
from torch.autograd.graph import saved_tensors_hooks
from torch.backends import cuda, cudnn, mkldnn
from torch.utils import _python_dispatch

from lightning_mm5d.config.errors import ConfigError, private
from lightning_mm5d.data.random_state import all_states, set_all_states
from lightning_mm5d.engine.step import Scope, Step
from lightning_mm5d.features.interleaving.fields import check_beside
from lightning_mm5d.monitor.stack import readable
from lightning_mm5d.partition.parts import holds_metrics
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import is_table
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.sharded.collectives import TensorGroup, warn_on_first_rank
from lightning_mm5d.sharded.remote_value import is_remote
from lightning_mm5d.sharded.removable import Removable, meanwhile
from lightning_mm5d.stage import Runtime
from lightning_mm5d.stage.step_writes import written
from lightning_mm5d.trainer.feature import Attached, Feature, Running

_function_modes = private(overrides, "_get_current_function_mode_stack")
_operation_modes = private(_python_dispatch, "_get_current_dispatch_mode_stack")
_top_hooks = private(torch._C._autograd, "_top_saved_tensors_default_hooks")


class HandsOver(Protocol):
    """Ranks that communicate, and where turns may change meanwhile."""

    hand_over: Callable[[], None] | None


class _Ended(BaseException):
    """Ends a microbatch because another one has failed."""


class Copies(Removable):
    """Runs functions in turns on one rank.

    Args:
        scopes: what belongs to one microbatch at a time.
        layers: inside of which turns change in a forward.
        device: where this rank computes.
    """

    def __init__(self, scopes: Iterable[Scope], layers: Iterable[nn.Module], device: torch.device) -> None:
        self._scopes, self._device = [ProcessState(device), *scopes], device
        self._turns: _Turns | None = None
        for layer in dict.fromkeys(layers):
            before = layer.register_forward_pre_hook(lambda *_: self._inside(1), prepend=True)
            after = layer.register_forward_hook(lambda *_: self._inside(-1), always_call=True)
            self.changes.callback(before.remove)
            self.changes.callback(after.remove)

    def run(
        self,
        functions: Sequence[Callable[[], Any]],
        groups: Sequence[HandsOver],
        scopes: Sequence[Scope] = (),
        *,
        anywhere: bool = False,
    ) -> list[Any]:
        """Call functions side by side; return their results.

        Args:
            functions: all ranks of `groups` call as many, and each starts the same collectives on all.
            groups: a wait for their collectives is where turns change.
            scopes: what else belongs to one of them at a time.
            anywhere: whether turns change outside of layers too.
        """
        turns = _Turns([*self._scopes, *scopes], functions, always=anywhere)
        others = [
            threading.Thread(target=turns.run, args=(place, ThreadState(self._device)), name="mm5d-copy", daemon=True)
            for place in range(1, len(functions))
        ]
        with ExitStack() as stack, suppress(_Ended):  # an error may leave nobody's turn, so that a thread never ends
            stack.enter_context(meanwhile(self, _turns=turns))
            for group in groups:
                stack.enter_context(meanwhile(group, hand_over=turns.hand_over))
            for thread in others:
                thread.start()
            turns.run(0)
            for thread in others:
                thread.join()
        return turns.results()

    @property
    def thread(self) -> int | None:
        """Identifier of the thread whose turn it is, for the monitor's thread; None where functions do not run."""
        turns = self._turns
        return None if turns is None else turns.thread

    def _inside(self, more: int) -> None:
        if self._turns is not None:
            self._turns.inside(more)


class _Turns:
    """Whose turn it is, among functions that run in threads.

    Attributes:
        thread: identifier of the thread whose turn it is.
    """

    def __init__(self, scopes: Sequence[Scope], functions: Sequence[Callable[[], Any]], *, always: bool) -> None:
        self._scopes, self._functions, self._always = scopes, functions, always
        count = len(functions)
        self._before = [scope.take() for scope in scopes]
        self._states = [self._before] * count
        self._waiting = deque(range(count))  # the one that runs first, then those that have not ended
        self._may_run = [threading.Semaphore(0) for _ in range(count)]
        self._may_run[0].release()
        self.thread = threading.get_ident()
        self._depth = [0] * count  # of layers
        self._results: list[Any] = [None] * count
        self._error: BaseException | None = None

    def run(self, place: int, state: ThreadState | None = None) -> None:
        """Call a function when it is its turn; the next one goes on when it ends.

        Args:
            place: of the function.
            state: of the schedule's thread, where this is another one.
        """
        try:
            self._wait_for_turn(place)
            if self._error is None:
                if state is None:
                    self._call(place)
                else:
                    with readable():
                        state.call(partial(self._call, place))
        except BaseException as error:
            if self._error is None:
                self._error = error
                self._before = [scope.take() for scope in self._scopes]  # the action that failed, for messages
            if self._waiting[0] != place:  # a signal: this one waits, and nobody may wait for it any more
                for turn in self._may_run:
                    turn.release()
                if place:
                    return
                raise
        self._waiting.popleft()
        if self._waiting:
            self._go_on()

    def _call(self, place: int) -> None:
        with torch.autograd.set_multithreading_enabled(False):  # a backward runs in the thread that calls it
            self._results[place] = self._functions[place]()

    def hand_over(self) -> None:
        """Let the others go on; return when it is this one's turn again."""
        place = self._waiting[0]
        if self._error is not None:
            raise _Ended
        if len(self._waiting) == 1 or not (self._always or self._depth[place]):
            return
        self._states[place] = [scope.take() for scope in self._scopes]
        self._waiting.rotate(-1)
        self._go_on()
        self._wait_for_turn(place)
        if self._error is not None:
            raise _Ended

    def inside(self, more: int) -> None:
        """Note that a layer begins or ends in the function whose turn it is."""
        self._depth[self._waiting[0]] += more

    def results(self) -> list[Any]:
        """Put back what was before all functions, or when one failed; return their results, or raise the error."""
        self._put(self._before)
        if self._error is not None:
            raise self._error
        return self._results

    def _wait_for_turn(self, place: int) -> None:
        self._may_run[place].acquire()
        self.thread = threading.get_ident()

    def _go_on(self) -> None:
        place = self._waiting[0]
        self._put(self._states[place])
        self._may_run[place].release()

    def _put(self, states: Sequence[Any]) -> None:
        for scope, state in zip(self._scopes, states, strict=True):
            scope.put(state)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (lambda: cudnn.set_flags(_fp32_precision=None), lambda flags: cudnn.set_flags(*flags)),
    (lambda: mkldnn.set_flags(_fp32_precision=None), lambda flags: mkldnn.set_flags(*flags)),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (_deterministic, lambda state: torch.use_deterministic_algorithms(state[0], warn_only=state[1])),
]
"""functions that return a setting, and that change it; those of flags return all that `flags` of torch exchanges"""


class ProcessState:
    """The generators and settings of a process, which belong to one microbatch at a time.

    A context around layers sets such a value in one microbatch and puts the former one back at its end. Microbatches
    that are computed side by side begin and end such contexts in turns, so each must see its own values. Not covered
    are the order of kernels of ``sdpa_kernel(set_priority=True)``, numbers of threads, environment variables, and
    globals of the user's own code.

    Args:
        device: whose generators are meant, beside those of the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self) -> Any:
        """Return the states of generators, and the settings."""
        return all_states(self._device), [get() for get, _ in SETTINGS]

    def put(self, state: Any) -> None:
        """Put back what `take` returned; settings that are as they were are not touched."""
        generators, settings = state
        set_all_states(generators, self._device)
        for (get, change), value in zip(SETTINGS, settings, strict=True):
            if get() != value:
                change(value)


class ThreadState:
    """The state of the thread that makes this object.

    Grad mode, autocast, modes that see functions or operations, hooks on what autograd saves, the device, its stream
    and context variables are of one thread. A microbatch that a thread of its own computes must see those of the
    schedule's.

    Args:
        device: where it computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, kinds = device, {"cpu", device.type}
        self._variables = contextvars.copy_context()
        self._grad = torch.is_grad_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted(kinds)
            if torch.amp.is_autocast_available(kind)
        ]
        self._caches = torch.is_autocast_cache_enabled()
        self._function_modes, self._operation_modes = _function_modes(), _operation_modes()
        self._hooks = _top_hooks(True)
        self._threads = torch.get_num_threads()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def call(self, function: Callable[[], None]) -> None:
        """Call `function` in the present thread, a new one, as if it were the other."""
        self._variables.run(self._called, function)

    def _called(self, function: Callable[[], None]) -> None:
        torch.set_num_threads(self._threads)
        if self._stream is not None:
            torch.cuda.set_device(self._device)
        # never decremented: copies of weights are kept until the outermost context of the other thread ends
        torch.autocast_increment_nesting()
        for kind, is_on, dtype in self._autocast:
            torch.set_autocast_enabled(kind, is_on)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._caches)
        with ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            if self._hooks is not None:
                stack.enter_context(saved_tensors_hooks(*self._hooks))
            for modes, room in ((self._function_modes, overrides), (self._operation_modes, _python_dispatch)):
                for mode in modes:
                    private(room, "_push_mode")(mode)
                    stack.callback(private(room, "_pop_mode"))
            function()


_MODULE_NAMES = frozenset(vars(nn.Module())) | {"forward"}


class InterleavedMicrobatches(Feature):
    """The field `Modality.pipeline.interleaved_microbatches`."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._schedule = fields["schedule"]

    def check(self, module: pl.LightningModule, plan: Plan, device: torch.device) -> None:
        """Refuse microbatches side by side where a schedule of one's own, or several replicas, order them.

        It also refuses stages that hold what they cannot wait for in turns.
        """
        for name, modality in plan.modalities.items():
            field = f"modalities.{name}.pipeline.interleaved_microbatches"
            count = modality.pipeline.interleaved_microbatches
            if count == 1:
                continue
            if callable(self._schedule) or is_table(self._schedule):
                rule = "A schedule of your own orders single microbatches"
                raise ConfigError(field, count, rule, "Use a named schedule, or leave it unset")
            for other, axes in plan.layout.axes.items():
                if axes.dp > plan.layout.num_replicas:
                    rule = f"{other!r} has {axes.dp} replicas that take turns with the microbatches of one"
                    raise ConfigError(field, count, rule, f"Use dp_size={plan.layout.num_replicas} for {other!r}")
            stages = [{member.modality for member in members} for members in plan.topology.members.values()]
            beside = set[str]().union(*(held for held in stages if name in held))  # what runs in its stages
            for other in sorted(beside):
                check_beside(name, other, plan.modalities)
            for layer in plan.experts.values():
                paths = plan.partition.parts[layer.modality].paths
                if layer.modality in beside and not any(layer.path.startswith(f"{path}.") for path in paths):
                    rule = f"Microbatches take turns inside of layers, and the experts {layer.path!r} are in none"
                    raise ConfigError(field, count, rule, "Leave it unset here, or use ep_size=1")

    def attach(self, running: Running) -> Attached | None:
        """Compute microbatches of stages side by side."""
        if not any(on(running.plan, name) for name in running.plan.modalities):
            return None
        running.engine.beside = beside = Interleaving(running.plan, running.runtime, running.device)
        return beside


class Interleaving(Attached):
    """The stages of one rank whose microbatches run side by side.

    Args:
        plan: all stages.
        runtime: the patched module.
        device: where this rank computes.
    """

    def __init__(self, plan: Plan, runtime: Runtime, device: torch.device) -> None:
        views = {view.name: view for view in runtime.stages}
        self._runtime, self._device = runtime, device
        self._ran: set[tuple[StageKey, Hashable]] = set()
        self._known: set[tuple[StageKey, Hashable]] = set()
        self._writes: set[StageKey] = set()
        self._sharing = {
            key: [group for name in view.cuts if on(plan, name) and (group := runtime.sharing(name)) is not None]
            for key, view in views.items()
        }
        self._layers = {
            key: [
                layer
                for name, cut in view.cuts.items()
                if on(plan, name)
                for layer in runtime.lists[name][cut.first : cut.last]
            ]
            for key, view in views.items()
        }
        layers = [layer for held in self._layers.values() for layer in held]
        experts = runtime.experts
        self._tokens = {key: experts.token_groups(key) for key in views if self._layers[key]} if experts else {}
        self._turning = _turning(plan, runtime)
        self._copies = Copies(runtime.scopes, layers, device)
        self.changes.callback(self._copies.remove)

    @property
    def thread(self) -> int | None:
        """Identifier of the thread that computes while microbatches run side by side; None while they do not."""
        return self._copies.thread

    def is_on(self, stage: StageKey) -> bool:
        """Whether microbatches of a stage may run side by side."""
        return bool(self._sharing[stage] or self._tokens.get(stage)) and stage not in self._writes

    def applies(self, step: Step, stage: StageKey, batches: Sequence[Any], *, known: bool) -> bool:
        """Whether forwards of microbatches with `batches` run side by side; collective where ranks share experts.

        Args:
            step: that runs.
            stage: of the forwards.
            batches: of the microbatches.
            known: whether it is known of them what their stage promises.
        """
        wish = known and step.random_key is not None and self.is_on(stage)
        wish = wish and all((stage, step.structure(batch)) in self._known for batch in batches)
        if not self._tokens.get(stage):
            return wish
        experts = self._runtime.experts
        assert experts is not None
        return experts.are_apart and experts.agree(stage, wish)  # elsewhere nothing travels in layers

    @contextmanager
    def watching(self, step: Step, stage: StageKey, batch: Any) -> Iterator[None]:
        """Enter around a forward that runs by itself; notes what is written on modules up to the end of its layers.

        It watches the second forward of a structure, because the first one may write what stays, such as a flag that
        hooks are installed. Collective then.
        """
        key = stage, step.structure(batch)
        is_watched = step.trains and self.is_on(stage) and key not in self._known
        if not is_watched or key not in self._ran:
            if is_watched:
                self._ran.add(key)
            yield
            return
        attributes: set[str] = set()
        before = _contents(self._runtime.root)

        def leaves(*_: Any) -> None:  # since the step began: what it writes before its layers, it may read after them
            after = _contents(self._runtime.root)
            attributes.update(f"{path}.{name}".lstrip(".") for path, name, _ in written(before, after))

        with ExitStack() as stack:
            for layer in dict.fromkeys(self._layers[stage]):
                stack.callback(layer.register_forward_hook(leaves, always_call=True).remove)
            yield
        flag = torch.tensor(float(bool(attributes)), device=self._device)
        for group in self._sharing[stage]:
            flag = group.max(flag)
        self._known.add(key)
        if flag:
            self._writes.add(stage)
            what = f"write {min(attributes)!r}" if attributes else "write attributes on another rank"
            warn_on_first_rank(
                f"modalities.{stage.modality}.pipeline.interleaved_microbatches: microbatches of {stage} run one after "
                f"another, because its layers, or the step before them, {what}, which the other microbatches would read"
            )

    def run(self, stage: StageKey, functions: Sequence[Any], scopes: Sequence[Scope], *, backward: bool) -> list[Any]:
        """Call functions of a stage side by side; see `Copies.run`."""
        tokens = self._tokens.get(stage)
        return self._copies.run(functions, tokens or self._turning, scopes, anywhere=backward or bool(tokens))


def _turning(plan: Plan, runtime: Runtime) -> list[TensorGroup]:
    """Return the groups at whose collectives turns change: in one order on all ranks that share any collective.

    Ranks that share a sequence hold other tokens and may communicate with their tensor parallel ranks unlike numbers of
    times (a loop over the experts that got any). So turns change where all of them communicate.
    """
    tensor = {} if runtime.tensor is None else runtime.tensor.groups
    left_out = {
        id(tensor[name]) for name, modality in plan.modalities.items() if modality.cp_size > 1 and name in tensor
    }
    return [group for group in dict.fromkeys(runtime.groups) if id(group) not in left_out]


def on(plan: Plan, modality: str) -> bool:
    """Whether a modality interleaves microbatches."""
    return plan.modalities[modality].pipeline.interleaved_microbatches > 1


def _contents(root: nn.Module) -> dict[tuple[str, str], Any]:
    """What all modules hold beside parameters and submodules, so that `written` shows what has changed.

    Metrics are left out: nothing changes turns within their updates, and these add up in any order. So are remote
    values, which stand for what other stages have written, and which nothing may read.
    """
    contents = {}
    for path, part in root.named_modules():
        if holds_metrics(part):
            continue
        for name, value in vars(part).items():
            inner = value[0] if isinstance(value, list) and len(value) == 1 else value
            if name not in _MODULE_NAMES and not is_remote(inner):
                contents[path, name] = _state(value)
        for name, value in part._buffers.items():
            contents[path, name] = _state(value)
    return contents


def _state(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return (type(value), *map(_state, value))
    if isinstance(value, dict):
        return (dict, *value, *map(_state, value.values()))
    if isinstance(value, Tensor) and not value.is_inference():
        return value, value._version
    return value


FEATURE = InterleavedMicrobatches
