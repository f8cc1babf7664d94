"""Reads from the stack of a thread where it is, without any help of the code that runs there.

A thread that waits for other ranks stands in a function of torch.distributed, or in one that the caller names, or it
synchronizes with its device. A read of a value that waits (``item``) is no call of its own in Python, and not seen. The
operation, its group and the ranks that must take part are read from that function's frame. The frame is marked, so that
a later look tells the same call from a later call of the same function.

The place in the user's run is the outermost hook of Lightning on the stack, the call that it made, and the innermost
line outside of installed packages.
"""

from __future__ import annotations

import linecache
import sys
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

_CUDA = str(Path(torch.cuda.__file__).parent)
_DISTRIBUTED = str(Path(dist.__file__).parent)
_PACKAGE = str(Path(__file__).parents[1])
_STDLIB = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
_MARK = "mm5d seen"
_GLANCE_S = 0.002
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
        "setup",
        "prepare_data",
        "configure_model",
        "configure_optimizers",
        "train_dataloader",
        "val_dataloader",
        "test_dataloader",
        "predict_dataloader",
        "training_step",
        "validation_step",
        "test_step",
        "predict_step",
        "batch_to_device",
        "backward",
        "optimizer_step",
        "optimizer_zero_grad",
        "configure_gradient_clipping",
        "lr_scheduler_step",
    )
)
START_OF_BATCH = "the start of a batch"
AFTER_BATCHES = ("the end of the epoch", "the end of training", "teardown")
PHASES = {
    "_FitLoop.on_advance_end": AFTER_BATCHES[0],
    "_FitLoop.on_run_end": AFTER_BATCHES[1],
    "Trainer._teardown": AFTER_BATCHES[2],
    "_EvaluationLoop.on_run_end": "the end of evaluation",
    "_EvaluationLoop.setup_data": "setup of evaluation",
    "_FitLoop.setup_data": "setup of data",
    "Turns.begin_batch": START_OF_BATCH,
}
"""parts of the loops outside of steps, by the qualified names of their functions"""


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


def runs(thread: int) -> bool:
    """Whether a thread takes the time of a processor at the moment, and does not wait."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return False
    clock = time.pthread_getcpuclockid(thread)
    before = time.clock_gettime(clock)
    time.sleep(_GLANCE_S)
    return time.clock_gettime(clock) - before > _GLANCE_S / 10


def look(thread: int, blocking: Mapping[CodeType, str], computing: int | None = None) -> Look:
    """Return where the thread with the identifier `thread` is.

    Args:
        thread: of `threading.get_ident`.
        blocking: functions that wait for other ranks beside those of torch.distributed, with what to call them.
        computing: another thread, that `thread` waits for: where it is counts, as if `thread` had called it.
    """
    current = sys._current_frames()
    frames = []
    for one in dict.fromkeys((thread if computing is None else computing, thread)):
        frame = current.get(one)
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
    return Look(_place([(one, one.f_lineno) for one in frames]), _wait(frames, blocking))


def failed_in_communication(traceback: TracebackType | None) -> bool:
    """Return whether an error was raised by an operation of torch.distributed."""
    frames = _of(traceback)
    return bool(frames) and frames[0][0].f_code.co_filename.startswith(_DISTRIBUTED)


def place_of(traceback: TracebackType | None) -> Place:
    """Return where an error was raised."""
    return _place(_of(traceback))


def _place(frames: list[tuple[FrameType, int]]) -> Place:
    """Describe the place of frames with their lines, the innermost first."""
    hook = call = phase = user = ""
    by_user = False  # whether the frame around this one is the user's
    for frame, line in reversed(frames):
        code = frame.f_code
        name = code.co_name
        if name == "run_guarded":  # what called the trainer may have functions of any name
            hook = call = phase = user = ""
        is_hook = name in _HOOKS or (name.startswith("on_") and name not in _LOOPS)
        direct = by_user and code.co_filename.startswith(_DISTRIBUTED)
        if is_hook and hook in ("", "optimizer_step"):  # whose closure runs the step
            hook, call, user = name, "", ""
        elif not call and (name in _CALLS or (direct and name != "wrapper")):
            call = name
        elif not hook and name in ("_next_data", "__next__") and "data" in code.co_filename:
            hook = "the dataloader"
        phase = PHASES.get(code.co_qualname, phase) if phase not in AFTER_BATCHES else phase
        by_user = not is_installed(code.co_filename) or (direct and name == "wrapper")
        if hook and not is_installed(code.co_filename):
            user = f"{Path(code.co_filename).name}:{line}"
    named = f"{call} in {hook}" if call and hook else call or hook
    return Place(f"{named} at {user}" if user else named, phase, call if user else "")


def _of(traceback: TracebackType | None) -> list[tuple[FrameType, int]]:
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return frames[::-1]


def is_installed(file: str) -> bool:
    """Return whether a file of Python code belongs to a package or to Python, and not to the user."""
    return "site-packages" in file or file.startswith((_PACKAGE, "<", *_STDLIB))


def _wait(frames: list[FrameType], blocking: Mapping[CodeType, str]) -> Wait | None:
    for frame in frames[:6]:
        if frame.f_code in blocking:
            return _marked(frame, blocking[frame.f_code], "", ())
    found = None
    for frame in frames:
        code = frame.f_code
        if code.co_filename.startswith(_DISTRIBUTED):
            found = frame if code.co_name != "wrapper" else found
        elif not code.co_filename.startswith(_STDLIB) and "_contextlib" not in code.co_filename:
            break
    if found is not None:
        group = _group(found.f_locals)
        if group is None:
            return _marked(found, found.f_code.co_name, "", ())
        return _marked(found, found.f_code.co_name, group.group_name, tuple(dist.get_process_group_ranks(group)))
    top = frames[0] if frames else None
    device = next((frame for frame in frames[:2] if _synchronizes(frame.f_code)), None)
    if device is not None:  # which may wait for other ranks; a call of its own, so the mark is that of this wait
        return _marked(device, "synchronize", "", ())
    if top is not None and ".wait()" in linecache.getline(top.f_code.co_filename, top.f_lineno):
        return _marked(top, "wait", "", ())
    return None


def _synchronizes(code: CodeType) -> bool:
    return code.co_name == "synchronize" and code.co_filename.startswith(_CUDA)


def _group(names: Mapping[str, Any]) -> dist.ProcessGroup | None:
    """Return the group of a collective, from the local names of its function; None for other operations."""
    is_collective = "group" in names and "tag" not in names  # a tag belongs to a message between two ranks
    makes_groups = "use_local_synchronization" in names or "split_ranks" in names
    if not dist.is_initialized() or not (is_collective or makes_groups):
        return None
    group = names.get("parent_pg" if makes_groups else "group")
    return group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD


def _marked(frame: FrameType, operation: str, group: str, ranks: tuple[int, ...]) -> Wait:
    since = frame.f_locals.setdefault(_MARK, time.monotonic())
    return Wait(operation, group, ranks, since)
