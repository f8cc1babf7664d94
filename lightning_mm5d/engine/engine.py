"""Runs a schedule: each action in order, receiving before it and sending after it.

A step has four phases. (1) Every channel is told how many payloads will come, so that receiving goes on beside the
computation. (2) The actions of this rank run: a forward runs the user's step as one stage on one microbatch and keeps
its graph; a backward takes the gradients of what it sent and passes on those of what it received; a split backward
leaves weight gradients to an action of their own. (3) What is still being sent leaves. (4) The results of the last
stage are returned.

Only the receipt of a payload that is needed now waits for a peer. It knows nothing of Lightning.

Each action has a name in a profile of PyTorch or, through ``emit_nvtx``, of Nsight. The first loss is looked at: it may
be NaN where parts of the model are remote, or unequal on ranks that share layers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError, private
from lightning_mm5d.data.microbatch import Microbatch
from lightning_mm5d.data.random_state import StepDraws, kept_random_state, seed_all, seed_of
from lightning_mm5d.engine.bridge import Bridge, Bridges
from lightning_mm5d.engine.flight import (
    AroundStep,
    AroundSteps,
    Arrivals,
    Course,
    Flight,
    Forward,
    SideBySide,
    unpacked,
    with_grads,
)
from lightning_mm5d.engine.ordered_transport import Wire
from lightning_mm5d.engine.preparation import Exchange, Preparation
from lightning_mm5d.engine.promises import Promises
from lightning_mm5d.engine.step import Step, StepGathers
from lightning_mm5d.engine.transport import UNKNOWN, Shapes
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import Action, Graph, Kind, Schedule
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.stage import Deferred, GraphEndError, Payload, Run, Runtime, StageError, StageView
from lightning_mm5d.stage.payload import PARTS
from lightning_mm5d.stage.remote import copied_buffers

_is_profiled = private(torch.autograd, "_profiler_enabled")
Ending = Callable[[StageKey, Sequence[nn.Parameter] | None, int], AbstractContextManager[None]]
_NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient"}
_Flights = dict[tuple[StageKey, int], Flight]
_Due = dict[tuple[StageKey, int], Deferred]
_Exchanges = Mapping[tuple[StageKey, int], Exchange]

_UNUSED = "appears to not have been used in the graph"  # torch, of an input of `torch.autograd.grad`
_ACROSS = (
    "the step asks `torch.autograd.grad` or `backward` for the gradient of something that other ranks compute with, as "
    "a saliency map or an adversarial step does for the inputs of an encoder: within a step a graph ends at the "
    "boundaries of stages. Give the modalities the same ranks (colocate_with) and pp_size=1, or take the gradient "
    "within one stage"
)

READS_SHARDS = (
    "The step reads the values of a sharded parameter itself (`lm_head.weight`, or a penalty over "
    "`self.parameters()`), or depends on the rank: call the module instead, use the optimizer's weight_decay, or set "
    "tp_size and cp_size to 1"
)
"""why ranks that share layers have unequal values, and what to do"""


def named(action: Action) -> AbstractContextManager[Any]:
    """Enter around an action: its range has the name that a timeline shows, such as ``F(language.1, 3)``.

    Without a profiler this costs one call.
    """
    return torch.profiler.record_function(str(action)) if _is_profiled() else nullcontext()


def count_of(step: Step) -> int:
    """Return how many microbatches each replica has, which must be equal on replicas that share this rank."""
    counts = {replica: len(parts) for replica, parts in step.microbatches.items()}
    if len(set(counts.values())) > 1:
        each = ", ".join(f"{count} of replica {replica}" for replica, count in sorted(counts.items()))
        rule = "Replicas that share ranks have equal numbers of microbatches in a step"
        fix = "Give them batches of equal sizes, or with num_microbatches of that many samples and more"
        raise ConfigError("batching.num_microbatches", each, rule, fix)
    return max(counts.values())


def _payloads(exchange: Exchange) -> list[Payload]:
    """Return what a stage receives for a microbatch, waiting until it is there."""
    return [unpacked(*bridge.recv(exchange.place)) for bridge, _ in exchange.sources]


class Engine:
    """Executes steps on one rank.

    Args:
        plan: all stages.
        runtime: the patched module.
        views: this rank's stages.
        transport: how payloads travel.
        schedule: its name, a table or a function; for steps with fewer microbatches than a table has it is ``1f1b``.
        num_microbatches: M; None where each batch decides.
        rank: global rank.
        device: where this rank computes.
        instances: groups of the ranks that share layers with this one, by their ranks.
        hosts: of each replica, a group of its ranks that carries host memory.

    Attributes:
        gathers: those of parameters in training steps; None where ranks share none.
        around: is asked before each step what goes on around its actions.
        preparation: knows the actions of steps.
        beside: computes microbatches side by side; None where nothing does.
        action: that runs, or that failed; None between steps.
        count: microbatches of each replica in the step of `action`.
    """

    def __init__(
        self,
        plan: Plan,
        runtime: Runtime,
        views: Mapping[StageKey, StageView],
        transport: Wire | None,
        *,
        schedule: str | Callable[[Graph], Schedule],
        num_microbatches: int | None,
        rank: int,
        device: torch.device,
        instances: Mapping[tuple[int, ...], TensorGroup],
        hosts: Mapping[int, dist.ProcessGroup | None],
    ) -> None:
        self.gathers: StepGathers | None = None
        self._meets: StepGathers | None = None  # in the step that runs
        self.around: list[AroundSteps] = []
        self.beside: SideBySide | None = None
        self._around_step: list[AroundStep] = []
        self.action: Action | None = None
        self.count = num_microbatches or 1
        self._plan, self._runtime, self._views, self._transport = plan, runtime, views, transport
        self._device = device
        bridges = Bridges(plan, transport, rank, instances)
        is_ordered = transport is not None and transport.is_ordered
        self.preparation = Preparation(plan, bridges, schedule, num_microbatches, rank, is_ordered=is_ordered)
        self._promises = Promises(hosts) if is_ordered else None
        self._has_checked_loss = False
        order = plan.topology.order
        self._last = max(views, key=lambda key: (order.index(key.modality), key.number))  # of this rank
        writers = {name: keys & views.keys() or {self._last} for name, keys in plan.ownership.buffer_stages.items()}
        places = {
            name: (runtime.root.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in writers
        }
        # where a rank runs several stages, the last one writes to buffers, because it runs most of the step; to those
        # of layers, the stage that has these. A counter in the step would count once for each stage
        self._spared_buffers = {
            stage: [places[name] for name, keys in writers.items() if stage not in keys]
            for stage in (views if len(views) > 1 else ())
        }
        for name in plan.ownership.written_by_all if len(views) > 1 else ():
            modality = plan.partition.owners[name][0].modality
            stages = [key for key, view in views.items() if modality in view.cuts]
            writer = max(stages, key=lambda key: key.number, default=None)
            runtime.call_buffers.setdefault(modality, (writer, []))[1].append(places[name])

    def execute(self, step: Step, trainable: frozenset[str], ending: Ending | None = None) -> None:
        """Run all microbatches of a step; results of the last stage go to ``step.finish``.

        Args:
            step: what to run.
            trainable: names of the parameters that require a gradient; empty for evaluation.
            ending: entered around the last action of each stage that gives gradients.
        """
        count = count_of(step)
        self.count = count
        prepared = self.preparation.of(count, trainable, frozenset(step.microbatches), not step.trains)
        actions, exchanges, groups, arrivals, receipts, split_stages, last_actions = prepared
        for bridge, number in arrivals.items():
            bridge.expect(number)
        if self._promises is not None:
            self._promises.begin(step, trainable)
        flights: _Flights = {}
        due: _Due = {}
        course = Course(step, actions, trainable, count)
        around = self._around_step = [hook for feature in self.around if (hook := feature.step(course)) is not None]
        gathers = self._meets = self.gathers if step.trains else None
        if gathers is not None:
            gathers.begin(step, self.preparation.schedule_of(count), count, trainable)
        discards = len(self._views) > 1 and any(view.is_last for view in self._views.values())
        with kept_random_state(self._device) if step.random_key is not None else nullcontext():
            for numbers in groups:
                group = actions[numbers.start : numbers.stop]
                self.action = group[0]
                for bridge, place in (pair for number in numbers for pair in (receipts[number] if receipts else ())):
                    assert self._promises is not None
                    bridge.post(self._promises.key(place))
                for hook in around:
                    hook.before(numbers)
                stage, kind = group[0].stage, group[0].kind
                if kind is Kind.F:
                    deferred = [Deferred() if stage in split_stages else None for _ in group]
                    uncounted = discards and not self._views[stage].is_last
                    with step.uncounted() if uncounted else nullcontext():
                        begun = self._forwards(step, exchanges, group, deferred)
                    if step.trains and exchanges[stage, group[0].microbatch].has_backward:
                        flights.update(
                            ((stage, action.microbatch), flight) for action, flight in zip(group, begun, strict=True)
                        )
                    del begun
                else:
                    ends = ending if last_actions[stage] in group else None
                    self._run_backwards(group, flights, due, ends)
                for hook in around:
                    hook.after(numbers)
        if gathers is not None:
            gathers.end()
        if self._transport is not None:
            self._transport.flush()
        for hook in around:
            hook.end()
        self.action = None

    @contextmanager
    def unscheduled(self) -> Generator[None, None, None]:
        """Enter around a step that runs without a schedule."""
        with ExitStack() as stack:
            for feature in self.around:
                stack.enter_context(feature.unscheduled())
            yield

    def stage(self) -> StageKey | None:
        """Return the stage of the action that runs."""
        return None if self.action is None else self.action.stage

    def doing(self) -> str:
        """Return the action that runs or that failed, for messages: ``"language.1, forward of microbatch 3"``."""
        action = self.action
        if action is None:
            return ""
        replica, index = divmod(action.microbatch, self.count)
        whose = f" of replica {replica}" if self._plan.layout.num_replicas > 1 else ""
        return f"{action.stage}, {_NAMES[action.kind]} of microbatch {index}{whose}"

    def thread(self) -> int | None:
        """Return which thread computes for the main thread now; None where that does."""
        return None if self.beside is None else self.beside.thread

    def _starts(self) -> None:
        """Note that an action has everything that it waited for."""
        for hook in self._around_step:
            hook.starts()

    def _meeting(self, action: Action, deferred: Deferred | None = None) -> AbstractContextManager[None]:
        return nullcontext() if self._meets is None else self._meets.during(action, deferred)

    def _met(self, function: Callable[[], Any], action: Action, deferred: Deferred | None = None) -> Callable[[], Any]:
        """Return a function that computes an action, with replicas that meet in it."""
        return function if self._meets is None else self._meets.during(action, deferred)(function)

    def take(self) -> Action | None:
        """Return the action that runs, which is of one microbatch at a time."""
        return self.action

    def put(self, state: Action | None) -> None:
        """Go on with an action that `take` returned."""
        self.action = state

    # --- forwards ---

    def _forwards(
        self, step: Step, exchanges: _Exchanges, actions: Sequence[Action], deferred: Sequence[Deferred | None]
    ) -> list[Flight]:
        """Run the forwards of a group, side by side or one after another; what they send leaves after all of them."""
        stage = actions[0].stage
        group = [exchanges[stage, action.microbatch] for action in actions]
        given = [
            (action, exchange, step.microbatches[exchange.place[0]][exchange.place[1]])
            for action, exchange in zip(actions, group, strict=True)
        ]
        forwards: list[Forward] = []
        with torch.set_grad_enabled(step.trains and group[0].has_backward):
            beside, batches = self.beside, [part.batch for *_, part in given]
            # whether it is known of all microbatches if their stage makes shapes of values
            known = self._promises is None or all(
                not self._promises.watches(stage, exchange.place) for exchange in group
            )
            if len(actions) > 1 and beside is not None and beside.applies(step, stage, batches, known=known):
                payloads = [_payloads(exchange) for exchange in group]
                calls = [
                    self._met(partial(self._forward, step, *each, received, due), each[0], due)
                    for each, received, due in zip(given, payloads, deferred, strict=True)
                ]
                self._starts()
                with copied_buffers(self._spared_buffers.get(stage, ())):
                    forwards = beside.run(stage, calls, [self, *step.scopes], backward=False)
            are_beside = bool(forwards)
            for (action, exchange, part), due in zip(given, deferred, strict=True) if not are_beside else ():
                self.action = action
                with self._meeting(action, due):  # until replicas have met, and before anything is sent
                    received = _payloads(exchange)
                    self._starts()
                    watching = nullcontext() if beside is None else beside.watching(step, stage, part.batch)
                    with copied_buffers(self._spared_buffers.get(stage, ())), watching:
                        forwards.append(self._forward(step, action, exchange, part, received, due))
            return [
                self._flight(step, exchange, forward, are_beside)
                for exchange, forward in zip(group, forwards, strict=True)
            ]

    def _forward(
        self,
        step: Step,
        action: Action,
        exchange: Exchange,
        part: Microbatch,
        payloads: list[Payload],
        deferred: Deferred | None,
    ) -> Forward:
        """Run the user's step as one stage on one microbatch."""
        self.action = action
        stage, (replica, index), loss = action.stage, exchange.place, None
        if step.random_key is not None:
            seed_all(seed_of(*step.random_key, index, replica), self._device)
        draws = None if step.random_key is None else StepDraws((*step.random_key, index, replica), stage, self._device)
        structure = step.structure(part.batch)
        run = Run(self._runtime, self._views[stage], payloads, structure, draws, deferred, trains=step.trains)
        with ExitStack() as stack:
            stack.enter_context(named(action))
            for hook in self._around_step:
                stack.enter_context(hook.forward(run, action))
            shapes = UNKNOWN
            if self._promises is not None:
                shapes = stack.enter_context(self._promises.watching(step, stage, (replica, index), payloads))
            result, ended = self._executed(run, step, part, replica, index, stage)
        if self._views[stage].is_last and ended:
            loss = step.finish(result, index)
            if loss is not None:
                self._check_first_loss(loss, stage)
        return Forward(action, part, run, payloads, shapes, loss)

    def _flight(self, step: Step, exchange: Exchange, forward: Forward, is_beside: bool) -> Flight:
        """Send what a forward passes on; return what its backward needs."""
        place, run = exchange.place, forward.run
        passed: list[Tensor] = []  # which its receivers on this rank may hold, too
        sent = [
            (back, self._send(run, other, bridge, place, forward.shapes, step.fails, passed))
            for other, bridge, back in exchange.targets
        ]
        received = [
            (back, *with_grads(payload))
            for (_, back), payload in zip(exchange.sources, forward.payloads, strict=True)
            if back is not None
        ]
        for hook in self._around_step:
            hook.ran(forward, passed)
        return Flight(run, sent, received, forward.loss, place, is_beside)

    def _executed(
        self, run: Run, step: Step, part: Microbatch, replica: int, index: int, stage: StageKey
    ) -> tuple[Any, bool]:
        """Return the result of a run, and whether it came to its end.

        An evaluation that a pipeline cannot run has no end, here and in all later stages.
        """
        step.fails = step.fails or any(payload.meta.get("fails") for payload in run.received)
        if step.fails:
            return None, False
        try:
            uncounted = nullcontext() if self._views[stage].is_last or not run.is_traced else step.uncounted()
            with step.context(), uncounted:
                return run.execute(lambda: step.run(part, index, (stage, replica))), True
        except step.forgives:
            step.fails = True
            return None, False
        except RuntimeError as error:
            if isinstance(error, GraphEndError) or (_UNUSED in str(error) and self._plan.topology.edges):
                raise StageError(_ACROSS) from error
            raise

    def _send(
        self,
        run: Run,
        other: StageKey,
        bridge: Bridge,
        place: tuple[int, int],
        shapes: Shapes,
        fails: bool,
        passed: list[Tensor],
    ) -> list[Tensor]:
        """Send what a run passes on to another stage; return the tensors of it that want gradients."""
        if fails:
            payload = Payload({**{part: [] for part in PARTS}, "fails": True})
            bridge.send(payload.meta, [], payload.local, place=place)
            return []
        consumed = self._plan.topology.consumes.get(other, frozenset())
        modality, target = run.stage.name.modality, other.modality
        payload = run.payload(consumed, modality if modality == target else None)
        shapes = shapes._replace(promised=shapes.promised and not payload.has_values)
        meta = {**payload.meta, "local": sorted(payload.local)} if payload.local else payload.meta
        bridge.send(shapes.marked(meta), payload.tensors, payload.local, shapes, place)
        passed += payload.tensors
        return with_grads(payload)[0]

    # --- backwards ---

    def _backward(self, action: Action, flight: Flight, arrivals: Arrivals) -> None:
        self.action = action
        with named(action), ExitStack() as stack:
            for hook in self._around_step:
                stack.enter_context(hook.backward(flight.run, action))
            flight.backward(arrivals)

    def _run_backwards(self, actions: Sequence[Action], flights: _Flights, due: _Due, ending: Ending | None) -> None:
        """Run actions of a group that give gradients, inside of `ending` where the stage's last one is among them."""
        stage, kind = actions[0].stage, actions[0].kind
        keys = [(stage, action.microbatch) for action in actions]
        if kind is Kind.W:
            self._starts()
            deferred: list[Deferred | None] = [due.pop(key) for key in keys]
        else:
            group_flights = [flights.pop(key) for key in keys]
            deferred = [flight.run.deferred for flight in group_flights]
            self._backwards(actions, group_flights, ending if deferred[0] is None else None)
            del group_flights
        for key, action, put_off in zip(keys, actions, deferred, strict=True):
            if put_off is not None and kind is Kind.I:
                due[key] = put_off
            elif put_off is not None:
                is_last = ending is not None and action is actions[-1]
                with named(action), ending(stage, put_off.weights, 1) if ending and is_last else nullcontext():
                    put_off.compute()

    def _backwards(self, actions: Sequence[Action], flights: Sequence[Flight], ending: Ending | None) -> None:
        """Run the backwards of a group, side by side where their forwards were; what they send leaves after all.

        The last ones run inside of `ending`, so that sums of gradients leave after what this rank receives and before
        what it sends on all ranks, whatever their batches are: else devices with one order for messages could wait in a
        circle. What replicas gather or exchange within a backward comes before these sums, too.
        """
        stage, arrivals = actions[0].stage, list[Arrivals]()
        if self.beside is not None and len(actions) > 1 and all(flight.is_beside for flight in flights):
            with ending(stage, None, len(actions)) if ending else nullcontext():
                arrivals = [flight.arrivals() for flight in flights]
                self._starts()
                given = zip(actions, flights, arrivals, strict=True)
                calls = [self._met(partial(self._backward, *each), each[0]) for each in given]
                self.beside.run(stage, calls, [self], backward=True)
        else:
            for action, flight in zip(actions, flights, strict=True):
                self.action = action
                ends = ending(stage, None, 1) if ending and action is actions[-1] else nullcontext()
                with ends, self._meeting(action):
                    arrivals.append(flight.arrivals())
                    self._starts()
                    self._backward(action, flight, arrivals[-1])
        for flight, arrived in zip(flights, arrivals, strict=True):
            shapes = UNKNOWN
            if self._promises is not None:
                shapes = self._promises.shapes_back(stage, flight.place, [meta for meta, _ in arrived])
            flight.send_back(shapes)

    # --- the first loss ---

    def _check_first_loss(self, loss: Tensor, stage: StageKey) -> None:
        """Warn of a loss that is NaN, and refuse unequal losses of the ranks that share the last layers; only once."""
        if self._has_checked_loss:
            return
        self._has_checked_loss = True
        self._check_equal(loss, stage)
        if self._plan.topology.edges and bool(loss.detach().isnan()):
            remote = sorted(set(self._plan.partition.layers) - set(self._views[stage].cuts)) or ["earlier layers"]
            warnings.warn(
                f"The loss of the first step is NaN in stage {stage}. If it is not NaN on one process, the step uses "
                f"something there that only other ranks compute ({', '.join(remote)}, embeddings, earlier layers) and "
                "that neither passes through a boundary nor is seen by torch's functions",
                stacklevel=2,
            )

    def _check_equal(self, loss: Tensor, stage: StageKey) -> None:
        """Refuse unequal losses of the ranks that share the last layers: their weights would drift apart."""
        group = self._runtime.sharing(self._plan.partition.loss_modality)
        if group is None:
            return
        value = loss.detach().double()
        highest, lowest = float(group.max(value)), -float(group.max(-value))
        if highest - lowest > 1e-4 * max(abs(highest), abs(lowest)):
            raise StageError(
                f"the ranks that share stage {stage} have unequal losses in the first step, from {lowest:.6g} to "
                f"{highest:.6g}. {READS_SHARDS}"
            )
