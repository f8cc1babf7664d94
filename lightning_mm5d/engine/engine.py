"""Runs a schedule: each action in order, receiving before it and sending after it.

A step has four phases. (1) Every channel is told how many payloads will come, so that receiving goes on beside the
computation. (2) The actions of this rank run: a forward runs the user's step as one stage on one microbatch and keeps
its graph; a backward takes the gradients of what it sent and passes on those of what it received; a split backward
leaves weight gradients to an action of their own. (3) What is still being sent leaves. (4) The results of the last
stage are returned.

Only the receipt of a payload that is needed now waits for a peer. It knows nothing of Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError, RemoteParameterError
from lightning_mm5d.data.microbatch import Microbatch
from lightning_mm5d.data.random_state import StepDraws, kept_random_state, seed_all, seed_of
from lightning_mm5d.engine.bridge import Bridge
from lightning_mm5d.engine.bridges import Bridges
from lightning_mm5d.engine.first_loss import FirstLoss
from lightning_mm5d.engine.offload import Moves, Offload
from lightning_mm5d.engine.ordered_transport import Wire
from lightning_mm5d.engine.preparation import Preparation
from lightning_mm5d.engine.promises import Promises, marked
from lightning_mm5d.engine.ranges import named
from lightning_mm5d.engine.recorder import Recorder
from lightning_mm5d.engine.step import Step
from lightning_mm5d.engine.step_gathers import StepGathers
from lightning_mm5d.engine.transport import UNKNOWN, Shapes
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import Action, Graph, Kind, Schedule
from lightning_mm5d.schedule.stage_key import StageKey
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.stage import Deferred, DeferredProducts, Payload, Run, Runtime, SharedBuffers, StageError, StageView
from lightning_mm5d.stage.payload import tensors_in

Ending = Callable[[StageKey, Sequence[nn.Parameter] | None], AbstractContextManager[None]]
_NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient"}


@dataclass
class _Flight:
    """A forward that waits for its backward."""

    run: Run
    sent: list[tuple[Bridge, list[Tensor]]]
    received: list[tuple[Bridge, list[Tensor], frozenset[int]]]
    loss: Tensor | None
    place: tuple[int, int]


_Flights = dict[tuple[StageKey, int], _Flight]
_Due = dict[tuple[StageKey, int], Deferred]


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
        offload: what this rank keeps in host memory between uses.

    Attributes:
        gathers: those of parameters in training steps; None where ranks share none.
        recorder: notes when actions run; None notes nothing.
        action: that runs, or that failed; None between steps.
        offload: what this rank keeps in host memory between uses.
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
        offload: Offload,
    ) -> None:
        self.gathers: StepGathers | None = None
        self.recorder: Recorder | None = None
        self.action: Action | None = None
        self.count = self._most = num_microbatches or 1
        self._plan, self._runtime, self._views, self._transport = plan, runtime, views, transport
        self._device = device
        self.offload = offload
        self._bridges = Bridges(plan, transport, rank, instances)
        is_ordered = transport is not None and transport.is_ordered
        self._preparation = Preparation(plan, self._bridges, schedule, num_microbatches, rank, is_ordered=is_ordered)
        self._promises = Promises(hosts) if is_ordered else None
        self._first_loss = FirstLoss(plan, runtime, views)
        order = plan.topology.order
        self._last = max(views, key=lambda key: (order.index(key.modality), key.number))  # of this rank
        names = () if len(views) == 1 else plan.ownership.written_by_all
        self._shared_buffers = SharedBuffers(runtime.root, names)

    def execute(self, step: Step, trainable: frozenset[str], ending: Ending | None = None) -> None:
        """Run all microbatches of a step; results of the last stage go to ``step.finish``.

        Args:
            step: what to run.
            trainable: names of the parameters that require a gradient; empty for evaluation.
            ending: entered around the last action of each stage that gives gradients.
        """
        count = _count(step)
        self.count = count
        prepared = self._preparation.of(count, trainable, frozenset(step.microbatches), not step.trains)
        graph, actions, arrivals, receipts, split_stages, last_actions = prepared
        for bridge, number in arrivals.items():
            bridge.expect(number)
        if self._promises is not None:
            self._promises.begin(step, trainable)
        flights: _Flights = {}
        due: _Due = {}
        recorder = self.recorder if step.trains else None
        if recorder is not None and count < self._most:
            recorder.skip()
            recorder = None
        elif recorder is not None:
            self._most = count
            recorder.begin(trainable, count)
        gathers = self.gathers if step.trains else None
        if gathers is not None:
            gathers.begin(step, self._preparation.schedule_of(count), count, trainable)
        discards = len(self._views) > 1 and any(view.is_last for view in self._views.values())
        with kept_random_state(self._device) if step.random_key is not None else nullcontext():
            moves = self.offload.step(graph, actions)
            for number, action in enumerate(actions):
                self.action = action
                for bridge, place in receipts[number] if receipts else ():
                    assert self._promises is not None
                    bridge.post(self._promises.key(place))
                moves.before(number)
                stage, key = action.stage, (action.stage, action.microbatch)
                deferred = Deferred() if stage in split_stages and action.kind is Kind.F else None
                gathered: AbstractContextManager[None] = nullcontext()
                if gathers is not None:
                    products = nullcontext if deferred is None else partial(DeferredProducts, deferred)
                    gathered = gathers.during(key, forward=action.kind is Kind.F, products=products)
                if action.kind is Kind.F:
                    uncounted = discards and not self._views[stage].is_last
                    with named(action), step.uncounted() if uncounted else nullcontext():
                        flight = self._forward(step, graph, action, moves, gathered, deferred)
                    if step.trains and graph.has_backward(stage):
                        flights[key] = flight
                    del flight
                else:
                    ends = ending if last_actions[stage] == action else None
                    with named(action):
                        self._run_backward(action, flights, due, gathered, ends)
                moves.after(number, due.get(key))
                if recorder is not None:
                    recorder.end(action)
        if gathers is not None:
            gathers.end()
        if self._transport is not None:
            self._transport.flush()
        if recorder is not None:
            recorder.finish()
        self.action = None

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

    def _starts(self) -> None:
        """Note that an action has everything that it waited for."""
        if self.recorder is not None:
            self.recorder.start()

    def _forward(
        self,
        step: Step,
        graph: Graph,
        action: Action,
        moves: Moves,
        gathered: AbstractContextManager[None],
        deferred: Deferred | None,
    ) -> _Flight:
        stage = action.stage
        view = self._views[stage]
        place = replica, index = divmod(action.microbatch, self.count)
        bridges = [self._bridges.between(other, stage, place) for other in graph.predecessors(stage)]
        part = step.microbatches[replica][index]
        draws = None
        training = step.trains and graph.has_backward(stage)
        loss = None
        with torch.set_grad_enabled(training):
            with gathered:  # until replicas have met, and before anything is sent
                payloads = [_unpacked(*bridge.recv(place)) for bridge in bridges]
                self._starts()
                if step.random_key is not None:
                    seed_all(seed_of(*step.random_key, index, replica), self._device)
                    draws = StepDraws((*step.random_key, index, replica), stage, self._device)
                structure = step.structure(part.batch)
                run = Run(self._runtime, view, payloads, structure, draws, deferred, trains=step.trains)
                saved = moves.saving(run, action)
                with saved or nullcontext(), self._watching(step, stage, place, payloads) as shapes:
                    result, ended = self._executed(run, step, part, index, stage)
            if view.is_last and ended:
                loss = step.finish(result, index)
                if loss is not None:
                    self._first_loss.check(loss, stage)
            passed: list[Tensor] = []  # which its receivers on this rank may hold, too
            sent = [self._send(run, other, place, shapes, step.fails, passed) for other in graph.successors(stage)]
        received = [
            (self._bridges.between(other, stage, place, back=True), *_with_grads(payload))
            for other, payload in zip(graph.predecessors(stage), payloads, strict=True)
            if graph.has_backward(other)
        ]
        stays = tensors_in([part.batch, passed, *(payload.tensors for payload in payloads)])
        moves.ran(run, stage, saved, [tensor for _, tensor in stays])
        return _Flight(run, sent, received, loss, place)

    def _watching(
        self, step: Step, stage: StageKey, place: tuple[int, int], received: Sequence[Payload]
    ) -> AbstractContextManager[Shapes]:
        return nullcontext(UNKNOWN) if self._promises is None else self._promises.watching(step, stage, place, received)

    def _executed(self, run: Run, step: Step, part: Microbatch, index: int, stage: StageKey) -> tuple[Any, bool]:
        """Return the result of a run, and whether it came to its end.

        An evaluation that a pipeline cannot run has no end, here and in all later stages.
        """
        step.fails = step.fails or any(payload.meta.get("fails") for payload in run.received)
        if step.fails:
            return None, False
        try:
            uncounted = nullcontext() if self._views[stage].is_last or not run.is_traced else step.uncounted()
            with step.context(), uncounted, nullcontext() if stage == self._last else self._shared_buffers.spared():
                return run.execute(lambda: step.run(part, index)), True
        except (StageError, RemoteParameterError):
            if step.trains or not self._plan.topology.edges:
                raise
            step.fails = True
            return None, False

    def _send(
        self, run: Run, other: StageKey, place: tuple[int, int], shapes: Shapes, fails: bool, passed: list[Tensor]
    ) -> tuple[Bridge, list[Tensor]]:
        stage = run.stage.name
        if fails:
            payload = Payload({"boundaries": [], "calls": [], "taps": [], "grads": [], "remote": [], "fails": True})
            self._bridges.between(stage, other, place).send(payload.meta, [], payload.local, place=place)
            return self._bridges.between(stage, other, place, back=True), []
        consumed = self._plan.topology.consumes.get(other, frozenset())
        modality, target = stage.modality, other.modality
        payload = run.payload(consumed, modality if modality == target else None)
        shapes = shapes._replace(promised=shapes.promised and not payload.has_values)
        meta = {**payload.meta, "local": sorted(payload.local)} if payload.local else payload.meta
        bridge = self._bridges.between(stage, other, place)
        bridge.send(marked(meta, shapes), payload.tensors, payload.local, shapes, place)
        passed += payload.tensors
        return self._bridges.between(stage, other, place, back=True), _with_grads(payload)[0]

    def _run_backward(
        self,
        action: Action,
        flights: _Flights,
        due: _Due,
        gathered: AbstractContextManager[None],
        ending: Ending | None,
    ) -> None:
        """Run an action that gives gradients, inside of `ending` where it is the last one of its stage."""
        stage, key = action.stage, (action.stage, action.microbatch)
        if action.kind is Kind.W:
            self._starts()
            deferred: Deferred | None = due.pop(key)
        else:
            flight = flights.pop(key)
            deferred = flight.run.deferred
            ends = ending(stage, None) if ending and deferred is None else nullcontext()
            with deferred or nullcontext():
                self._backward(flight, gathered, ends)
            del flight
            if deferred is not None and action.kind is Kind.I:
                due[key] = deferred
                return
        if deferred is not None:
            with ending(stage, deferred.weights) if ending else nullcontext():
                deferred.compute()

    def _backward(
        self, flight: _Flight, gathered: AbstractContextManager[None], ends: AbstractContextManager[None]
    ) -> None:
        """Run a backward, inside of what takes the weight gradients that it puts off.

        It runs inside of `ends`, so that sums of gradients leave after what this rank receives and before what it sends
        on all ranks, whatever their batches are: else devices with one order for messages could wait in a circle. What
        replicas gather or exchange within the backward comes before these sums, too.
        """
        outputs: dict[int, Tensor] = {}
        gradients: dict[int, Tensor] = {}
        if flight.loss is not None and flight.loss.requires_grad:
            outputs[id(flight.loss)], gradients[id(flight.loss)] = flight.loss, torch.ones_like(flight.loss)
        with ends, gathered:
            arrivals = [bridge.recv(flight.place) for bridge, _ in flight.sent]
            self._starts()
            for (_, tensors), (meta, arrived) in zip(flight.sent, arrivals, strict=True):
                wanted = [tensor for index, tensor in enumerate(tensors) if index not in meta["missing"]]
                for tensor, gradient in zip(wanted, arrived, strict=True):
                    key = id(tensor)
                    gradients[key] = gradients[key] + gradient if key in gradients else gradient
                    outputs[key] = tensor
            if outputs:
                flight.run.backward(list(outputs.values()), list(gradients.values()))
        shapes, metas, stage = UNKNOWN, [meta for meta, _ in arrivals], flight.run.stage.name
        if self._promises is not None:
            shapes = self._promises.shapes_back(stage, flight.place, metas)
        for bridge, tensors, local in flight.received:
            missing = [index for index, tensor in enumerate(tensors) if tensor.grad is None]
            present = [index for index, tensor in enumerate(tensors) if tensor.grad is not None]
            own = frozenset(place for place, index in enumerate(present) if index in local)
            # copies: a parameter may have taken the same memory for its gradient, and later microbatches add to that
            grads = [tensors[index].grad.clone() for index in present]  # type: ignore[union-attr]
            bridge.send(marked({"missing": missing}, shapes), grads, own, shapes, flight.place)


def _count(step: Step) -> int:
    """Return how many microbatches each replica has, which must be equal on replicas that share this rank."""
    counts = {replica: len(parts) for replica, parts in step.microbatches.items()}
    if len(set(counts.values())) > 1:
        each = ", ".join(f"{count} of replica {replica}" for replica, count in sorted(counts.items()))
        raise ConfigError(
            "num_microbatches",
            each,
            "Replicas that share ranks have equal numbers of microbatches in a step",
            "Give them batches of equal sizes, or with num_microbatches of that many samples and more",
        )
    return max(counts.values())


def _unpacked(meta: Any, tensors: list[Tensor]) -> Payload:
    return Payload(meta, tensors, frozenset(meta.get("local", ())))


def _with_grads(payload: Payload) -> tuple[list[Tensor], frozenset[int]]:
    """The tensors of a payload that carry a gradient, and which of these are local."""
    wanted = [index for index, has in enumerate(payload.meta["grads"]) if has]
    local = frozenset(place for place, index in enumerate(wanted) if index in payload.local)
    return [payload.tensors[index] for index in wanted], local
