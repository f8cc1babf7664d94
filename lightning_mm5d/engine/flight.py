"""A microbatch of one stage between its forward and its backward.

What features do around the actions of a step: the door of the engine.

The engine knows no feature. Whoever appends to `Engine.around` is asked at the start of each step, and is then called
around its actions.

**Recorder.** Notes when the actions of a training step run on this rank: for a timeline, and for shares of busy and
idle time. An action begins when everything that it waited for has arrived, and ends when its results are on their way:
waiting shows as idle time. On a GPU moments are events of the stream that computes. Nothing waits for the device while
a step runs: events are read when somebody asks. The clocks of several machines are as equal as their systems keep them.
Only the last step is kept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_mm5d.data.microbatch import Microbatch
from lightning_mm5d.engine.bridge import Bridge
from lightning_mm5d.engine.step import Scope, Step
from lightning_mm5d.engine.transport import Shapes
from lightning_mm5d.schedule import Action
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.stage import Payload, Run

Arrivals = list[tuple[Any, list[Tensor]]]
"""What the later stages sent back: meta and gradients of each."""


@dataclass
class Forward:
    """A forward that has run, and has not sent anything."""

    action: Action
    part: Microbatch
    run: Run
    payloads: list[Payload]
    shapes: Shapes
    loss: Tensor | None


@dataclass
class Flight:
    """A forward that waits for its backward.

    Attributes:
        run: of the forward.
        sent: to each later stage, with the bridge on which gradients come back.
        received: from each earlier stage that wants gradients, with the bridge on which they leave.
        loss: of the last stage.
        place: replica and index of the microbatch.
        is_beside: whether others of its group ran side by side with it.
    """

    run: Run
    sent: list[tuple[Bridge, list[Tensor]]]
    received: list[tuple[Bridge, list[Tensor], frozenset[int]]]
    loss: Tensor | None
    place: tuple[int, int]
    is_beside: bool

    def arrivals(self) -> Arrivals:
        """Return the gradients of what it has sent, waiting until they are there."""
        return [bridge.recv(self.place) for bridge, _ in self.sent]

    def backward(self, arrivals: Arrivals) -> None:
        """Run its backward, inside of what takes the weight gradients that it puts off."""
        outputs: dict[int, Tensor] = {}
        gradients: dict[int, Tensor] = {}
        if self.loss is not None and self.loss.requires_grad:
            outputs[id(self.loss)], gradients[id(self.loss)] = self.loss, torch.ones_like(self.loss)
        for (_, tensors), (meta, arrived) in zip(self.sent, arrivals, strict=True):
            wanted = [tensor for index, tensor in enumerate(tensors) if index not in meta["missing"]]
            for tensor, gradient in zip(wanted, arrived, strict=True):
                key = id(tensor)
                gradients[key] = gradients[key] + gradient if key in gradients else gradient
                outputs[key] = tensor
        if outputs:
            if self.run.draws is not None:
                self.run.draws.backward()
            with self.run.deferred or nullcontext():
                self.run.backward(list(outputs.values()), list(gradients.values()))

    def send_back(self, shapes: Shapes) -> None:
        """Send the gradients of what it has received."""
        for bridge, tensors, local in self.received:
            missing = [index for index, tensor in enumerate(tensors) if tensor.grad is None]
            present = [index for index, tensor in enumerate(tensors) if tensor.grad is not None]
            shards = frozenset(place for place, index in enumerate(present) if index in local)
            # copies: a parameter may have taken the same memory for its gradient, and later microbatches add to that
            grads = [tensors[index].grad.clone() for index in present]  # type: ignore[union-attr]
            bridge.send(shapes.marked({"missing": missing}), grads, shards, shapes, self.place)


def unpacked(meta: Any, tensors: list[Tensor]) -> Payload:
    """Return a payload that has arrived."""
    return Payload(meta, tensors, frozenset(meta.get("local", ())))


def with_grads(payload: Payload) -> tuple[list[Tensor], frozenset[int]]:
    """Return the tensors of a payload that carry a gradient, and which of these are local."""
    wanted = [index for index, has in enumerate(payload.meta["grads"]) if has]
    local = frozenset(place for place, index in enumerate(wanted) if index in payload.local)
    return [payload.tensors[index] for index in wanted], local


class Course(NamedTuple):
    """A step that is about to run on this rank.

    Attributes:
        step: what runs.
        actions: of this rank, in their order.
        trainable: names of the parameters that require a gradient; empty for evaluation.
        num_microbatches: of each replica in this step.
    """

    step: Step
    actions: Sequence[Action]
    trainable: frozenset[str]
    num_microbatches: int


class SideBySide(Protocol):
    """Computes several microbatches of a stage side by side."""

    @property
    def thread(self) -> int | None:
        """Identifier of the thread that computes in place of the main thread now; None where that does."""

    def applies(self, step: Step, stage: StageKey, batches: Sequence[Any], *, known: bool) -> bool:
        """Whether forwards of `batches` run side by side; `known` says whether what their stage promises is."""

    def watching(self, step: Step, stage: StageKey, batch: Any) -> AbstractContextManager[None]:
        """Return what is entered around a forward that runs by itself."""

    def run(self, stage: StageKey, functions: Sequence[Any], scopes: Sequence[Scope], *, backward: bool) -> list[Any]:
        """Return the results of functions of a stage; of `scopes` each has its own."""


class AroundStep:
    """Is called around the actions of one step; what a subclass leaves out does nothing."""

    def before(self, numbers: range) -> None:
        """The actions with these `numbers`, one or several side by side, are about to run."""

    def starts(self) -> None:
        """An action has everything that it waited for; of several that run side by side, each says so."""

    def forward(self, run: Run, action: Action) -> AbstractContextManager[Any]:
        """Return what is entered around the user's step in a forward."""
        return nullcontext()

    def backward(self, run: Run, action: Action) -> AbstractContextManager[Any]:
        """Return what is entered around a backward that computes input gradients."""
        return nullcontext()

    def ran(self, forward: Forward, passed: Sequence[Tensor]) -> None:
        """A forward has run and passed on its results, in which are the tensors `passed`."""

    def after(self, numbers: range) -> None:
        """The actions with these `numbers`, one or several side by side, have run and passed on their results."""

    def end(self) -> None:
        """All actions have run, and everything is sent. Not called where a step fails."""


class AroundSteps:
    """Is asked for each step, training or evaluation, what goes on around it."""

    def step(self, course: Course) -> AroundStep | None:
        """Return what is called around the actions of a step; None for a step that is of no interest."""

    def unscheduled(self) -> AbstractContextManager[None]:
        """Return what is entered around a step that runs without a schedule, in an order that nothing knows."""
        return nullcontext()


class Recorder(AroundSteps, AroundStep):
    """Keeps one training step, the last one with as many microbatches as any before it.

    Args:
        device: where this rank computes.
        most: microbatches of each replica in a whole step; None where each batch decides.

    Attributes:
        trainable: names of the parameters that were trained in the step; None before there was one.
        count: microbatches per replica of the step.
        number: of the step, among all training steps.
    """

    def __init__(self, device: torch.device, most: int | None = None) -> None:
        self.trainable: frozenset[str] | None = None
        self.count = self.number = self._passed = 0
        self._device, self._most = device, most or 1
        self._actions: Sequence[Action] = ()
        self._times: dict[Action, tuple[Moment, Moment, int, int]] = {}
        self._began: Moment = 0.0
        self._ended: Moment = 0.0
        self._start: Moment | None = None

    def step(self, course: Course) -> AroundStep | None:
        """Forget the last step and record this one, if it trains and is whole; count any that trains."""
        if not course.step.trains:
            return None
        self._passed += 1
        if course.num_microbatches < self._most:
            return None
        self._most = self.count = course.num_microbatches
        self.trainable, self.number, self._actions = course.trainable, self._passed, course.actions
        self._times, self._start = {}, None
        self._began = self._ended = moment(self._device)
        return self

    def starts(self) -> None:
        """Note that an action starts to compute; of several in a group the first one counts."""
        if self._start is None:
            self._start = moment(self._device)

    def after(self, numbers: range) -> None:
        """Note that the actions that started last have ended; several of a group count for equal parts of the time."""
        start, self._start, now = self._start, None, moment(self._device)
        assert start is not None, "no action has started"
        for place, number in enumerate(numbers):
            self._times[self._actions[number]] = start, now, place, len(numbers)

    def end(self) -> None:
        """Note that the step has ended."""
        self._ended = moment(self._device)

    def times(self) -> dict[Action, tuple[float, float]]:
        """Return start and end of each action of the last step, in seconds since the epoch; waits for the device."""
        anchor = moment(self._device)
        _wait(anchor)
        now = time.time()  # at which the device has nothing left to do, so that both clocks meet
        times = {}
        for action, (start, end, place, count) in self._times.items():
            first, whole = now - seconds_between(start, anchor), seconds_between(start, end)
            times[action] = first + whole * place / count, first + whole * (place + 1) / count
        return times

    def shares(self) -> tuple[float, float]:
        """Return which shares of the last step this rank computed and idled; waits for the device."""
        _wait(self._ended)
        whole = seconds_between(self._began, self._ended)
        busy = sum(seconds_between(start, end) / count for start, end, _, count in self._times.values())
        share = min(busy / whole, 1.0) if whole > 0 else 1.0
        return share, 1.0 - share


Moment = float | torch.cuda.Event


def moment(device: torch.device) -> Moment:
    """Return now; on a GPU an event of the stream that computes."""
    if device.type != "cuda":
        return time.time()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _wait(end: Moment) -> None:
    if not isinstance(end, float):
        end.synchronize()


def seconds_between(start: Moment, end: Moment) -> float:
    """Return the seconds between two moments that have passed."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start
    return start.elapsed_time(end) / 1e3
