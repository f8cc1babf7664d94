"""Notes when the actions of a training step run on this rank, for a timeline beside the simulated one.

An action begins when everything that it waited for has arrived, and ends when its results are on their way: waiting
shows as idle time. On a GPU the times are those of the stream, from events that are read when the timeline is written.
The clocks of several machines are as equal as their systems keep them. Only the last step is kept.
"""

from __future__ import annotations

import time

import torch

from lightning_mm5d.schedule import Action


class Recorder:
    """Keeps one step.

    Args:
        device: where this rank computes.

    Attributes:
        trainable: names of the parameters that were trained in the step; None before there was one.
    """

    def __init__(self, device: torch.device) -> None:
        self.trainable: frozenset[str] | None = None
        self._device = device
        self._times: dict[Action, tuple[_Time, _Time]] = {}
        self._origin: tuple[float, torch.cuda.Event | None] = (0.0, None)
        self._start: _Time = 0.0

    def begin(self, trainable: frozenset[str]) -> None:
        """Forget the last step and begin a new one."""
        self.trainable = trainable
        self._times = {}
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._origin = time.time(), _event(self._device)

    def start(self) -> None:
        """Note that an action starts to compute."""
        self._start = self._now()

    def end(self, action: Action) -> None:
        """Note that the action that started last has ended."""
        self._times[action] = self._start, self._now()

    def times(self) -> dict[Action, tuple[float, float]]:
        """Return start and end of each action of the last step, in seconds since the epoch."""
        return {action: (self._seconds(start), self._seconds(end)) for action, (start, end) in self._times.items()}

    def _now(self) -> _Time:
        return _event(self._device) if self._device.type == "cuda" else time.time()

    def _seconds(self, moment: _Time) -> float:
        if isinstance(moment, float):
            return moment
        moment.synchronize()
        began, origin = self._origin
        assert origin is not None
        return began + origin.elapsed_time(moment) / 1e3


_Time = float | torch.cuda.Event


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
