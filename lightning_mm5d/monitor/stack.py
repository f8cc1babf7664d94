"""Reads from the stack of a thread where it is, without any help of the code that runs there.

A thread that waits for other ranks stands in a function of torch.distributed, or in one that the caller names, or it
synchronizes with its device. A read of a value that waits (``item``) is no call of its own in Python, and not seen.

The stacks are those that `faulthandler` prints, which makes no objects of frames. Whoever holds a frame of a running
thread may be the last one to do so: what the frame held, as the iterator of a dataloader, would end in this thread, at
any time, and CPython 3.11 crashes where the thread is leaving the frame just then. Only of a function of
torch.distributed, which has been seen in the same place twice, the frame itself is read: for its group, and for a mark,
by which a later look tells the same call from a later call of the same function.

The place in the user's run is the outermost hook of Lightning on the stack, the call that it made, and the innermost
line outside of installed packages.
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import linecache
import os
import re
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_CUDA = str(Path(torch.cuda.__file__).parent)
_DISTRIBUTED = str(Path(dist.__file__).parent)
_PACKAGE = str(Path(__file__).parents[1])
_IN_FRONT = str(Path(_PACKAGE, "sharded", "host_copies.py"))
"""what collectives of torch are called through, see `HostCopies.watch_collectives`"""
_STDLIB = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
_MARK = "mm5d seen"
_NEAR = 6
"""how many calls below the innermost one a function that waits may be"""
_CALLS = frozenset(
    (
        *("save_checkpoint", "all_gather", "barrier", "broadcast", "reduce", "log", "log_dict", "new_group"),
        *("state_dict", "full_state_dict"),
    )
)
_LOOPS = ("on_advance_start", "on_advance_end", "on_run_start", "on_run_end", "on_iteration_done")
"""methods of Lightning's loops that are named as hooks are"""
_HOOKS = frozenset(
    (
        *("setup", "prepare_data", "configure_model", "configure_optimizers", "train_dataloader"),
        *("val_dataloader", "test_dataloader", "predict_dataloader", "training_step", "validation_step"),
        *("test_step", "predict_step", "batch_to_device", "backward", "optimizer_step"),
        *("optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step"),
    )
)
START_OF_BATCH = "the start of a batch"
AFTER_BATCHES = ("the end of the epoch", "the end of training", "teardown")
PHASES = {
    ("fit_loop.py", "on_advance_end"): AFTER_BATCHES[0],
    ("fit_loop.py", "on_run_end"): AFTER_BATCHES[1],
    ("trainer.py", "_teardown"): AFTER_BATCHES[2],
    ("evaluation_loop.py", "on_run_end"): "the end of evaluation",
    ("evaluation_loop.py", "setup_data"): "setup of evaluation",
    ("fit_loop.py", "setup_data"): "setup of data",
    ("turns.py", "begin_batch"): START_OF_BATCH,
}
"""parts of the loops outside of steps, by files and functions of Lightning and of this package"""


@dataclass(frozen=True)
class Wait:
    """An operation that a thread waits in.

    Attributes:
        operation: name of the function.
        group: name of its process group; empty where it is not one.
        ranks: that must take part in the same operation; empty where that is unknown.
        since: time at which this very call was seen first.
    """

    operation: str
    group: str
    ranks: tuple[int, ...]
    since: float


@dataclass(frozen=True)
class Place:
    """Where code runs.

    Attributes:
        where: the hook, the call that it made, and the user's line.
        phase: the part of Lightning's loop outside of steps; empty within one.
        call: the operation between ranks that the user's line calls; empty where it calls none.
    """

    where: str
    phase: str
    call: str = ""


@dataclass(frozen=True)
class Look:
    """Where a thread is.

    Attributes:
        place: in the run.
        wait: the operation between ranks that it waits in; None where it is not seen to wait.
    """

    place: Place
    wait: Wait | None


class Call(NamedTuple):
    """A call on a stack: the line that runs, and its function."""

    file: str
    line: int
    function: str


_THREAD = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+)")
_CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_states = dict[int, int]()
"""addresses of the states of threads whose frames may be read, by their identifiers"""
_readable = Counter[int]()
"""how often each of them has said so: monitors of two runs may watch one thread"""
_get_state = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThreadState_Get", ctypes.pythonapi))
_get_frame = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p)(("PyThreadState_GetFrame", ctypes.pythonapi))


@contextmanager
def readable() -> Iterator[None]:
    """Let looks read frames of this thread while it waits; enter in the thread, and exit before it ends."""
    thread = threading.get_ident()
    _readable[thread] += 1
    _states[thread] = _get_state()
    try:
        yield
    finally:
        _readable[thread] -= 1
        if not _readable[thread]:
            del _states[thread], _readable[thread]


class Looker:
    """Looks at threads of this process, time and again.

    Args:
        blocking: functions that wait for other ranks beside those of torch.distributed, with what to call them.
    """

    def __init__(self, blocking: Mapping[CodeType, str]) -> None:
        self._blocking = {(code.co_filename, code.co_name): name for code, name in blocking.items()}
        self._before: tuple[Hashable, float] = (None, 0.0)  # the wait that was seen last, and when it was seen first

    def look(self, thread: int, computing: int | None = None, position: Hashable = None) -> Look:
        """Return where the thread with the identifier `thread` is; a wait when it is seen for the second time.

        Args:
            thread: of `threading.get_ident`.
            computing: another thread, that `thread` waits for: where it is counts, as if `thread` had called it.
            position: anything that changes while the thread comes forward.
        """
        stacks = _stacks()
        threads = dict.fromkeys((thread if computing is None else computing, thread))
        calls = [call for identifier in threads for call in stacks.get(identifier, ())]
        place, waiting = _place(calls), self._waiting(calls)
        if waiting is None:
            self._before = None, 0.0
            return Look(place, None)
        index, operation = waiting
        function = calls[index].file, calls[index].function
        seen = position, function, tuple(calls[index + 1 :])
        if self._before[0] != seen:
            self._before = seen, time.monotonic()
            return Look(place, None)
        if not operation:
            return Look(place, _collective(next(iter(threads)), function, self._before[1]))
        return Look(place, Wait(operation, "", (), self._before[1]))

    def _waiting(self, calls: Sequence[Call]) -> tuple[int, str] | None:
        """Return which call waits, and in what: "" in a function of torch.distributed; None where none is seen to."""
        for index, call in enumerate(calls[:_NEAR]):
            if (name := self._blocking.get((call.file, call.function))) is not None:
                return index, name
        outer = None
        for index, call in enumerate(calls):
            if call.file.startswith(_DISTRIBUTED):
                outer = index if call.function != "wrapper" else outer
            elif not call.file.startswith((_IN_FRONT, *_STDLIB)) and "_contextlib" not in call.file:
                break
        if outer is not None:
            return outer, ""
        for index, call in enumerate(calls[:2]):
            if call.function == "synchronize" and call.file.startswith(_CUDA):
                return index, "synchronize"  # which may wait for other ranks
        waits = bool(calls) and ".wait()" in linecache.getline(calls[0].file, calls[0].line)
        return (0, "wait") if waits else None


def _stacks() -> dict[int, list[Call]]:
    """Return the calls of each thread of Python, the innermost first."""
    with _unnamed_file() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        text = file.read()
    stacks, calls = dict[int, list[Call]](), list[Call]()
    for line in text.decode(errors="replace").splitlines():
        if (thread := _THREAD.match(line)) is not None:
            calls = stacks[int(thread[1], 16)] = []
        elif (call := _CALL.match(line)) is not None:
            calls.append(Call(call[1], int(call[2]), call[3]))
    return stacks


def _unnamed_file() -> io.FileIO:
    """Return an open file, in memory where the system has such."""
    if hasattr(os, "memfd_create"):
        return io.FileIO(os.memfd_create("mm5d-stacks"), "r+")
    return tempfile.TemporaryFile(buffering=0)


def _collective(thread: int, function: tuple[str, str], since: float) -> Wait | None:
    """Return the wait of a thread in a function of torch.distributed; None where it has left it meanwhile.

    Args:
        thread: its identifier.
        function: its file and name.
        since: when it was seen first.
    """
    if thread not in _states:
        return Wait(function[1], "", (), since)
    frame: FrameType | None = _get_frame(_states[thread])
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != function:
        frame = frame.f_back
    if frame is None:
        return None
    group = _group(frame.f_locals)
    since = frame.f_locals.setdefault(_MARK, since)
    if group is None:
        return Wait(function[1], "", (), since)
    return Wait(function[1], group.group_name, tuple(dist.get_process_group_ranks(group)), since)


def failed_in_communication(traceback: TracebackType | None) -> bool:
    """Return whether an error was raised by an operation of torch.distributed."""
    calls = _of(traceback)
    return bool(calls) and calls[0].file.startswith(_DISTRIBUTED)


def place_of(traceback: TracebackType | None) -> Place:
    """Return where an error was raised."""
    return _place(_of(traceback))


def _place(calls: Sequence[Call]) -> Place:
    """Describe the place of calls, the innermost first."""
    hook = call = phase = user = ""
    by_user = False  # whether the call around this one is the user's
    for file, line, name in reversed(calls):
        if name == "run_guarded":  # what called the trainer may have functions of any name
            hook = call = phase = user = ""
        installed = is_installed(file)
        is_hook = name in _HOOKS or (name.startswith("on_") and name not in _LOOPS)
        direct = by_user and file.startswith(_DISTRIBUTED)
        if is_hook and hook in ("", "optimizer_step"):  # whose closure runs the step
            hook, call, user = name, "", ""
        elif not call and (name in _CALLS or (direct and name != "wrapper")):
            call = name
        elif not hook and name in ("_next_data", "__next__") and "data" in file:
            hook = "the dataloader"
        if installed and phase not in AFTER_BATCHES:
            phase = PHASES.get((os.path.basename(file), name), phase)
        by_user = not installed or (direct and name == "wrapper")
        if hook and not installed:
            user = f"{Path(file).name}:{line}"
    named = f"{call} in {hook}" if call and hook else call or hook
    return Place(f"{named} at {user}" if user else named, phase, call if user else "")


def _of(traceback: TracebackType | None) -> list[Call]:
    codes = [(frame.f_code, line) for frame, line in walk_tb(traceback)]
    return [Call(code.co_filename, line, code.co_name) for code, line in reversed(codes)]


def is_installed(file: str) -> bool:
    """Return whether a file of Python code belongs to a package or to Python, and not to the user."""
    return "site-packages" in file or file.startswith((_PACKAGE, "<", *_STDLIB))


def _group(names: Mapping[str, Any]) -> dist.ProcessGroup | None:
    """Return the group of a collective, from the local names of its function; None for other operations."""
    is_collective = "group" in names and "tag" not in names  # a tag belongs to a message between two ranks
    makes_groups = "use_local_synchronization" in names or "split_ranks" in names
    if not dist.is_initialized() or not (is_collective or makes_groups):
        return None
    group = names.get("parent_pg" if makes_groups else "group")
    return group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
