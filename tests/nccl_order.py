"""A backend for CPU that orders operations as NCCL does, so that a deadlock of CUDA shows without a GPU.

Gloo carries the data, and hides these rules of NCCL, which this backend keeps:

- Operations of one communicator run one after the other, in the order of issue, sends and receives and collectives.
- A send ends only with its receive. Messages match by their order; tags mean nothing.
- What one `batch_isend_irecv` or one coalescing block issues runs side by side, and ends together.
- A receive has the size of its send.
- One thread at a time issues on a communicator. Microbatches that are computed side by side count as one: their threads
  take turns.

``nccl_order`` has a stream for each communicator. ``nccl_order_serial`` has one stream for all communicators of a
rank, and one thread that issues on any of them: the worst that one device can do, because NCCL promises nothing about
operations of different communicators.

A rank that waits while nothing moves raises `OrderError` after `SECONDS`, with all that is pending and where all of its
threads are. `wait` blocks the host, which NCCL does not: what passes here may run further ahead there.

Call `register` in each process, before its process group is made.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAMES = ("nccl_order", "nccl_order_serial")
SECONDS = 30.0
"""How long nothing may move; the environment variable ``NCCL_ORDER_SECONDS`` says otherwise."""
_COLLECTIVES = (
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "scatter",
)


class OrderError(RuntimeError):
    """What would hang, or be undefined, on NCCL."""


def register() -> None:
    """Make both backends known to torch.distributed in this process."""
    for name in NAMES:
        if name not in dist.Backend.backend_list:
            made = _Devices(serial=name == NAMES[1])
            dist.Backend.register_backend(name, made, extended_api=True, devices=["cpu"])


class _Devices:
    """Makes the communicators of a process, with a new device after all of them were destroyed."""

    def __init__(self, *, serial: bool) -> None:
        self._serial = serial
        self._device: _Device | None = None

    def __call__(self, options: Any, _: Any) -> dist.ProcessGroup:
        if self._device is None or not self._device.communicators:
            self._device = _Device(serial=self._serial)
        return Communicator(self._device, options)


class _Operation(dist.Work):
    """One operation, which is also the handle that its caller waits for."""

    def __init__(self, communicator: Communicator, what: str, run: Callable[[], None]) -> None:
        super().__init__()
        self.communicator, self.what, self.run = communicator, what, run
        self.thread = threading.current_thread()
        self.place = _caller()
        self.is_inference, self.has_grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self.error: BaseException | None = None
        self.ran = threading.Event()
        self.ended = threading.Event()

    def __str__(self) -> str:
        return f"{self.what} on {self.communicator}, issued by {self.thread.name} at {self.place}"

    def attempt(self) -> None:
        try:
            # modes belong to the thread that issues, and its tensors refuse to be written to under others
            with torch.inference_mode(self.is_inference), torch.set_grad_enabled(self.has_grad):
                self.run()
        except BaseException as error:
            self.error = error
        self.ran.set()

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.communicator.device.wait(self.ended)
        self.communicator.waited(self)
        if self.error is not None:
            raise OrderError(f"{self}: {self.error}") from self.error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        self.wait()
        future.set_result(None)
        return future


class _Together(dist.Work):
    """The handle of what one coalescing block issued."""

    def __init__(self, operations: list[_Operation]) -> None:
        super().__init__()
        self._operations = operations

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all([one.wait() for one in self._operations])

    def is_completed(self) -> bool:
        return all(one.is_completed() for one in self._operations)


class _Entry:
    """Operations that run side by side; all but those of one batch are alone."""

    def __init__(self, batch: object) -> None:
        self.batch = batch
        self.operations: list[_Operation] = []
        self.is_closed = False


class _Stream:
    """Runs entries one after the other, in a thread of its own."""

    def __init__(self, device: _Device) -> None:
        self._device = device
        self._entries: deque[_Entry] = deque()
        self._changed = threading.Condition()
        self._is_open = True
        threading.Thread(target=self._work, name="nccl-order-stream", daemon=True).start()

    def add(self, operation: _Operation, batch: object) -> None:
        with self._changed:
            last = self._entries[-1] if self._entries else None
            if batch is None or last is None or last.batch is not batch or last.is_closed:
                last = _Entry(batch)
                self._entries.append(last)
            last.operations.append(operation)
            self._changed.notify()

    def pending(self) -> list[_Operation]:
        with self._changed:
            return [one for entry in self._entries for one in entry.operations]

    def close(self) -> None:
        with self._changed:
            self._is_open = False
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._entries or not self._is_open)
                if not self._entries:
                    return
                entry = self._entries[0]
            self._run(entry)
            with self._changed:
                self._entries.popleft()
            for one in entry.operations:
                one.ended.set()
            del entry, one
            self._device.moved()

    def _run(self, entry: _Entry) -> None:
        started = 0
        while True:
            with self._changed:
                found = entry.operations[started:]
                if not found and all(one.ran.is_set() for one in entry.operations):
                    entry.is_closed = True
                    return
            started += len(found)
            if entry.batch is None:
                found[0].attempt()
                continue
            for one in found:
                threading.Thread(target=one.attempt, name="nccl-order-batch", daemon=True).start()
            for one in entry.operations[:started]:
                if one.ran.wait(0.001):
                    self._device.moved()


class _Device:
    """All communicators of one rank."""

    def __init__(self, *, serial: bool) -> None:
        self.communicators: list[Communicator] = []
        self.limit = float(os.environ.get("NCCL_ORDER_SECONDS", SECONDS))
        self._stream = _Stream(self) if serial else None
        self._lock = threading.Lock()
        self._moved = time.monotonic()
        self._report = ""

    @property
    def is_serial(self) -> bool:
        return self._stream is not None

    def stream(self) -> _Stream:
        return self._stream or _Stream(self)

    def moved(self) -> None:
        self._moved = time.monotonic()

    def wait(self, ended: threading.Event) -> None:
        """Wait for an operation; raise `OrderError` on all threads once nothing has moved for `limit` seconds."""
        while not ended.wait(0.02 if self._report else min(0.2, self.limit)):
            if self._report or time.monotonic() - self._moved > self.limit:
                with self._lock:
                    self._report = self._report or self._told()
                raise OrderError(self._report)

    def check(self, mine: Communicator) -> None:
        """Refuse to issue while operations that another thread has issued are under way."""
        for one in self.communicators if self.is_serial else [mine]:
            for operation in one.unwaited():
                if not _take_turns(operation.thread, threading.current_thread()):
                    scope = "one device" if self.is_serial else "one communicator"
                    raise OrderError(
                        f"two threads use {scope}: {threading.current_thread().name} issues on {mine} "
                        f"while nobody has waited for {operation}"
                    )

    def close(self, communicator: Communicator) -> None:
        self.communicators.remove(communicator)
        if not self.communicators and self._stream is not None:
            self._stream.close()

    def _told(self) -> str:
        lines = [f"nothing has moved for {self.limit:.0f} s; pending, in the order of issue:"]
        streams = dict.fromkeys(one.stream for one in self.communicators)
        for number, stream in enumerate(streams):
            lines += [f"  stream {number}: {one}" for one in stream.pending()]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if not names.get(ident, "").startswith("nccl-order"):
                stack = "".join(traceback.format_stack(frame)[-6:])
                lines.append(f"thread {names.get(ident, ident)}:\n{stack}")
        report = "\n".join(lines)
        print(report, file=sys.stderr, flush=True)
        return report


class Communicator(dist.ProcessGroup):
    """A process group on a device that orders as NCCL does."""

    def __init__(self, device: _Device, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self.device = device
        self.ranks = list(options.global_ranks_in_group) or list(range(size))
        gloo = dist.ProcessGroupGloo(options.store, rank, size, timeout=timedelta(minutes=10))
        self._gloo = dist.ProcessGroup(options.store, rank, size)
        self._gloo._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._gloo._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self.stream = device.stream()
        self._lock = threading.Lock()
        self._issued: list[_Operation] = []
        self._numbers: defaultdict[tuple[int, bool], itertools.count[int]] = defaultdict(itertools.count)
        self._block: list[_Operation] | None = None
        device.communicators.append(self)

    @property
    def group_name(self) -> str:  # torch keeps it in a backend, of which this group has none
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def __str__(self) -> str:
        named = self.group_desc not in ("", "undefined")
        return f"{self.group_desc if named else 'a group of'} {self.ranks}"

    def getBackendName(self) -> str:  # noqa: N802
        return NAMES[self.device.is_serial]

    def unwaited(self) -> list[_Operation]:
        with self._lock:
            return list(self._issued)

    def waited(self, operation: _Operation) -> None:
        with self._lock:
            if operation in self._issued:
                self._issued.remove(operation)

    def shutdown(self) -> None:
        if self in self.device.communicators:
            self.device.close(self)
            if not self.device.is_serial:
                self.stream.close()

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> _Operation:
        return self._pass(tensors[0], peer, sends=True)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> _Operation:
        return self._pass(tensors[0], peer, sends=False)

    def _start_coalescing(self, device: torch.device) -> None:
        self._block = []

    def _end_coalescing(self, device: torch.device) -> _Together:
        assert self._block is not None
        block, self._block = self._block, None
        return _Together(block)

    def _pass(self, tensor: Tensor, peer: int, *, sends: bool) -> _Operation:
        number = next(self._numbers[peer, sends])
        size = tensor.numel() * tensor.element_size()
        way = f"to {self.ranks[peer]}" if sends else f"from {self.ranks[peer]}"
        what = f"{'send' if sends else 'recv'} number {number} of {size} bytes {way}"
        return self._issue(what, lambda: self._transfer(tensor.detach(), peer, number, sends=sends))

    def _transfer(self, tensor: Tensor, peer: int, number: int, *, sends: bool) -> None:
        """Meet the peer, compare sizes, and carry the data."""
        own = torch.tensor([tensor.numel() * tensor.element_size()])
        other = torch.empty_like(own)
        there, back, data = (3 * number + step for step in range(3))
        meeting = [
            self._gloo.send([own], peer, there if sends else back),
            self._gloo.recv([other], peer, back if sends else there),
        ]
        for one in meeting:
            one.wait()
        if int(own) != int(other):
            sent, received = (own, other) if sends else (other, own)
            raise OrderError(f"{int(sent)} bytes are sent and {int(received)} received")
        if int(own):
            (self._gloo.send if sends else self._gloo.recv)([tensor], peer, data).wait()

    def _issue(self, what: str, run: Callable[[], None]) -> _Operation:
        self.device.check(self)
        operation = _Operation(self, what, run)
        with self._lock:
            self._issued.append(operation)
        self.device.moved()
        if self._block is not None:
            self._block.append(operation)
        self.stream.add(operation, self._block if self._block is not None else _batch())
        return operation


def _take_turns(*threads: threading.Thread) -> bool:
    """Whether threads are one, or those of microbatches side by side, of which one is the schedule's."""
    beside = {"mm5d-copy", threading.main_thread().name}
    return threads[0] is threads[1] or {thread.name for thread in threads} <= beside


def _collective(name: str) -> Callable[..., _Operation]:
    def issue(self: Communicator, *args: Any, **kwargs: Any) -> _Operation:
        return self._issue(name, lambda: getattr(self._gloo, name)(*args, **kwargs).wait())

    return issue


for _name in _COLLECTIVES:
    setattr(Communicator, _name, _collective(_name))


def _caller() -> str:
    """The innermost line that is neither of this file nor of torch."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        path = frame.f_code.co_filename
        if path != __file__ and f"{os.sep}torch{os.sep}" not in path:
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _batch() -> FrameType | None:
    """The call of `batch_isend_irecv` that this operation is a part of: torch tells backends in Python nothing else."""
    frame: FrameType | None = sys._getframe()
    for _ in range(24):  # a mode of torch that watches puts frames between
        if frame is None or frame.f_code.co_name == "batch_isend_irecv":
            return frame
        frame = frame.f_back
    return None
