"""The end of a run says how long the tests of each room took."""

from __future__ import annotations

from types import SimpleNamespace

from room_times import room_times


def test_seconds_of_setups_calls_and_teardowns_add_up_by_room() -> None:
    reports = [
        SimpleNamespace(nodeid="tests/engine/test_bridge.py::test_one", duration=1.0),
        SimpleNamespace(nodeid="tests/engine/test_bridge.py::test_one", duration=0.5),
        SimpleNamespace(nodeid="tests/engine/test_groups.py::test_two[tests/x]", duration=0.25),
        SimpleNamespace(nodeid="tests/test_rooms.py::test_three", duration=3.0),
        SimpleNamespace(message="a warning"),
    ]
    assert [line.split() for line in room_times(reports)] == [
        ["3.0", "s", "1", "test_rooms.py"],
        ["1.8", "s", "2", "engine"],
        ["4.8", "s", "3", "all"],
    ]
