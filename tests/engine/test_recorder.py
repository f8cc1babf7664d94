"""Times of actions: no moment is waited for while a step runs, and what is read afterwards is right.

A device of CUDA is doubled by a clock that runs behind the host's: its events get their times when the host waits.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightning_mm5d.engine.engine import named
from lightning_mm5d.engine.flight import Course, Recorder
from lightning_mm5d.engine.step import Step
from lightning_mm5d.schedule import Action, Kind
from lightning_mm5d.schedule.graph import StageKey

FORWARD = Action(Kind.F, StageKey.parse("language.1"), 3)
BACKWARD = Action(Kind.B, StageKey.parse("language.1"), 3)


class Device:
    """A stream with work of `takes` milliseconds between any two events."""

    def __init__(self, takes: list[float]) -> None:
        self.takes, self.now, self.waits = takes, 0.0, 0

    def event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at, self.is_past = device, 0.0, False

    def record(self, stream: Any) -> None:
        assert stream == "stream"
        self.device.now += self.device.takes.pop(0)
        self.at = self.device.now

    def synchronize(self) -> None:
        self.device.waits += 1
        self.is_past = True

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    def refuse(*_: Any) -> None:
        raise AssertionError("a step waits for the device")

    #      begin  forward   idle  backward  idle, and the event that reads
    double = Device([0.0, 5.0, 20.0, 15.0, 40.0, 20.0, 30.0])
    monkeypatch.setattr(torch.cuda, "Event", double.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "stream")
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    return double


def course(actions: list[Action], count: int = 1, *, trains: bool = True) -> Course:
    return Course(cast(Step, SimpleNamespace(trains=trains)), actions, frozenset(), count)


def record(recorder: Recorder) -> None:
    assert recorder.step(course([FORWARD, BACKWARD])) is recorder
    for number in range(2):
        recorder.starts()
        recorder.after(range(number, number + 1))
    recorder.end()


def test_evaluations_are_not_recorded_and_shorter_steps_only_counted() -> None:
    recorder = Recorder(torch.device("cpu"), 2)
    assert recorder.step(course([FORWARD], 2, trains=False)) is None
    assert recorder.step(course([FORWARD], 1)) is None
    assert recorder.trainable is None
    assert recorder.step(course([FORWARD], 2)) is recorder
    assert recorder.step(course([FORWARD], 1)) is None
    assert (recorder.count, recorder.number) == (2, 2)


def test_a_step_on_a_gpu_records_events_and_waits_for_none(device: Device) -> None:
    recorder = Recorder(torch.device("cuda"))
    record(recorder)
    assert device.waits == 0
    assert recorder.shares() == (pytest.approx(0.6), pytest.approx(0.4))  # 20 + 40 of 100 ms
    assert device.waits == 1
    before = time.time()
    times = recorder.times()
    assert device.waits == 2
    # the event that reads comes 30 ms after the step's end, which is 20 ms after the backward's
    starts, ends = zip(*(times[action] for action in (FORWARD, BACKWARD)), strict=True)
    assert ends[1] == pytest.approx(before - 0.05, abs=0.02)
    assert [ends[0] - starts[0], starts[1] - ends[0], ends[1] - starts[1]] == pytest.approx(
        [0.02, 0.015, 0.04], abs=1e-5
    )


def test_shares_without_a_recorded_step_are_those_of_a_rank_that_never_idles() -> None:
    assert Recorder(torch.device("cpu")).shares() == (1.0, 0.0)


def test_shares_on_a_cpu_are_those_of_its_clock() -> None:
    recorder = Recorder(torch.device("cpu"))
    recorder.step(course([FORWARD]))
    time.sleep(0.02)
    recorder.starts()
    time.sleep(0.02)
    recorder.after(range(1))
    recorder.end()
    busy, idle = recorder.shares()
    assert 0.0 < busy < 1.0
    assert busy + idle == 1.0


def test_a_profile_names_actions_as_a_timeline_does() -> None:
    with named(FORWARD):
        torch.ones(())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, named(BACKWARD):
        torch.ones(())
    names = {event.name for event in profile.events()}
    assert "B(language.1, 3)" in names
    assert "F(language.1, 3)" not in names


def test_actions_of_a_group_share_the_time_since_the_first_of_them_started(device: Device) -> None:
    device.takes = [0.0, 5.0, 40.0, 0.0, 10.0]  # begin, first, end of both, end of the step, and the event that reads
    recorder = Recorder(torch.device("cuda"))
    later = Action(Kind.F, StageKey.parse("language.1"), 4)
    recorder.step(course([FORWARD, later], 2))
    for _ in (FORWARD, later):
        recorder.starts()
    recorder.after(range(2))
    recorder.end()
    spans = recorder.times()
    assert [end - start for start, end in spans.values()] == pytest.approx([0.02, 0.02], abs=1e-5)
    assert spans[later][0] == pytest.approx(spans[FORWARD][1], abs=1e-5)
