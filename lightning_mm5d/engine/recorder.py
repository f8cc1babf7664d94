"""Notes when the actions of a training step run on this rank: for a timeline, and for shares of busy and idle time.

An action begins when everything that it waited for has arrived, and ends when its results are on their way: waiting
shows as idle time. On a GPU moments are events of the stream that computes. Nothing waits for the device while a step
runs: events are read when somebody asks. The clocks of several machines are as equal as their systems keep them. Only
the last step is kept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from lightning_mm5d.engine.flight import AroundStep, AroundSteps, Course
from lightning_mm5d.schedule import Action


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
        found = {}
        for action, (start, end, place, count) in self._times.items():
            first, whole = now - seconds_between(start, anchor), seconds_between(start, end)
            found[action] = first + whole * place / count, first + whole * (place + 1) / count
        return found

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
