"""What is said of ranks that wait for each other in different places, and which call the user's code made there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_mm5d.monitor.stack import AFTER_BATCHES, START_OF_BATCH, Looker, Place, Wait, place_of, readable
from lightning_mm5d.monitor.verdict import deadlock, place_text


def entry(operation: str = "barrier", **fields: Any) -> dict[str, Any]:
    """An entry of a rank that waits for all ranks in training batch 3 of epoch 0."""
    wait = {"operation": operation, "group": operation, "ranks": [0, 1], "seconds": 9.0}
    usual = {"run": 1, "state": "running", "loop": "training", "epoch": 0, "batch": 3, "unsent": 0, "due": 0}
    return {**usual, "where": "", "phase": "", "call": "", "wait": wait, **fields}


def alone(call: str, hook: str, **fields: Any) -> dict[str, Any]:
    return entry(call, call=call, where=f"{call} in {hook} at mine.py:7", **fields)


BEGINS = entry("all_reduce", phase=START_OF_BATCH)
END, TRAINED, _ = AFTER_BATCHES
EQUAL_LENGTHS = "All ranks must run equal numbers of batches"
ON_ALL = "Only rank 0 called {0}. All ranks must call it: take {0} out of `if trainer.is_global_zero`"
CASES = {
    "a barrier in a batch": (alone("barrier", "on_train_batch_end"), BEGINS, ON_ALL.format("barrier")),
    "a save at the end of an epoch": (
        alone("save_checkpoint", "on_train_epoch_end", phase=END),
        {**BEGINS, "epoch": 1, "batch": 0},
        ON_ALL.format("save_checkpoint"),
    ),
    "a save at the end of the last epoch": (
        alone("save_checkpoint", "on_train_epoch_end", phase=END),
        entry("all_reduce", phase=TRAINED, epoch=1),
        ON_ALL.format("save_checkpoint"),
    ),
    "a collective of torch": (alone("all_reduce", "on_validation_end"), entry("recv"), ON_ALL.format("all_reduce")),
    "a collective of torch in a step": (
        alone("all_reduce", "validation_step", action="vision.0, forward of microbatch 0"),
        entry("recv"),
        "use self.log(..., sync_dist=True), or take all_reduce to a hook",
    ),
    "a shorter loader": (entry("recv", phase=END), BEGINS, EQUAL_LENGTHS),
    "a shorter loader, and a save of all ranks": (
        alone("save_checkpoint", "on_train_epoch_end", phase=END),
        BEGINS,
        EQUAL_LENGTHS,
    ),
    "a rank that has ended": (BEGINS, entry(state="ended", loop=None, phase=""), EQUAL_LENGTHS),
    "two calls": (
        alone("barrier", "on_fit_end"),
        alone("all_gather", "on_fit_end"),
        "the same calls in the same order",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_in_different_places_are_told_what_to_change(name: str) -> None:
    first, second, advice = CASES[name]
    line = deadlock({0: first, 1: second}, 3.0)
    assert line is not None
    assert advice in line
    assert "mine.py:7" in line or not first["call"]


def test_a_place_has_the_stages_of_its_rank() -> None:
    stages = ["vision.0", "language.0"]
    assert place_text({"loop": "training", "batch": -1, "stages": stages}) == "vision.0, language.0: training"
    many = place_text({"where": "setup", "stages": [f"language.{number}" for number in range(6)]})
    assert many == "language.0, language.1, language.2, language.3 and 2 more: setup"
    assert place_text({"action": "language.1, forward of microbatch 0", "stages": stages}).startswith(
        "language.1, forward"
    )


def barrier() -> None:
    raise RuntimeError("a strategy's")


def on_run_start(hook: Callable[[], None]) -> None:
    """A method of Lightning's loops."""
    hook()


def on_train_start() -> None:
    barrier()


def on_train_end() -> None:
    dist.all_reduce(torch.ones(1))


def on_fit_end() -> None:
    raise RuntimeError


@pytest.mark.parametrize(
    ("hook", "call"), [(on_train_start, "barrier"), (on_train_end, "all_reduce"), (on_fit_end, "")]
)
def test_a_place_has_the_operation_that_the_users_line_calls(hook: Callable[[], None], call: str) -> None:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        on_run_start(hook)
    place: Place = place_of(caught.value.__traceback__)
    assert place.call == call
    assert f"{hook.__name__} at test_verdict.py:" in place.where


def seen(file: str, function: str, definition: str) -> Wait | None:
    """How a thread is seen that waits in a function of a file of torch."""
    names: dict[str, Any] = {"event": threading.Event(), "begun": threading.Event()}
    exec(compile(definition, file, "exec"), names)
    thread = threading.Thread(target=readable()(names[function]))
    thread.start()
    try:
        assert names["begun"].wait(10)
        assert thread.ident is not None
        looker = Looker({})
        # the innermost functions are those of Python's events, as nothing here blocks in compiled code
        assert looker.look(thread.ident).wait is None
        return looker.look(thread.ident).wait
    finally:
        names["event"].set()
        thread.join()


BLOCK = "begun.set(); event.wait(timeout=10)"


def test_a_split_of_communicators_waits_for_all_ranks() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        file = str(Path(dist.__file__).parent / "distributed_c10d.py")
        found = seen(file, "split_group", f"def split_group(parent_pg=None, split_ranks=None): {BLOCK}")
        assert found is not None
        assert (found.operation, found.ranks) == ("split_group", (0,))
    finally:
        dist.destroy_process_group()


def test_a_wait_for_the_device_is_seen() -> None:
    file = str(Path(torch.cuda.__file__).parent / "streams.py")
    found = seen(file, "synchronize", "def synchronize():\n begun.set()\n while not event.is_set(): pass")
    assert found is not None
    assert (found.operation, found.ranks) == ("synchronize", ())


class _Noting:
    """Notes in which thread it ends."""

    def __init__(self, ends: list[int]) -> None:
        self._ends = ends

    def __del__(self) -> None:
        self._ends.append(threading.get_ident())


def test_what_a_thread_leaves_ends_in_that_thread_however_often_it_is_looked_at() -> None:
    ends, closing = list[int](), threading.Event()

    def leave() -> None:
        kept = _Noting(ends)
        time.sleep(0)  # another thread may look
        assert kept

    def run() -> None:
        while not closing.is_set():
            leave()

    thread = threading.Thread(target=readable()(run))
    thread.start()
    assert thread.ident is not None
    looker = Looker({})
    while len(ends) < 100:
        looker.look(thread.ident)
    closing.set()
    thread.join()
    assert set(ends) == {thread.ident}
