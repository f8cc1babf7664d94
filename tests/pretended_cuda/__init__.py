"""A device of type ``cuda`` in host memory, for a torch without CUDA, so that what only runs on GPUs runs on a CPU.

`enter` builds the C++ extension beside this file, which takes half a minute once, and puts it in the place of CUDA in
this process. Tensors are really of ``cuda``: a function that gets tensors of both devices raises as on a GPU, memory
is NaN until it is written to, backwards run in a thread of the device, and random numbers come from generators of the
device. What the host copies without waiting is garbage until it has waited for the copy's stream. Waits of the host are
counted: for copies, and for sizes and answers that a kernel gives. Kernels are those of the CPU, and streams hide no
other race than those of copies.

``nccl`` is a backend that orders as NCCL does (`nccl_order`), takes contiguous tensors of the device alone, and
carries them over gloo.

A process cannot leave. Ranks are forked for a call (`ranks.run_ranks`), and call `enter` first.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import warnings
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils import cpp_extension
from torch.utils._pytree import tree_leaves, tree_map

from nccl_order import Communicator, _Device

GIB = 1024**3


def enter() -> None:
    """Let this process have GPUs, as many as the environment variable ``CUDA_VISIBLE_DEVICES`` names, by default 8."""
    if hasattr(torch._C, "_cuda_getDeviceCount"):
        return
    device = built()
    _put_in_place(device)
    _put_nccl_in_place(device)
    try:
        torch.ones(1, requires_grad=True, device="cuda").backward()
    except RuntimeError:  # autograd has no thread of the device where the forking process has differentiated
        torch.autograd.set_multithreading_enabled(False)


def enter_with_trainers() -> None:
    """As `enter`, and let trainers that say no accelerator, or the CPU, train on the device."""
    enter()
    made = L.Trainer.__init__

    @wraps(made)
    def on_gpu(self: L.Trainer, *args: Any, **options: Any) -> None:
        if options.get("accelerator", "cpu") == "cpu":
            options["accelerator"] = "gpu"
        made(self, *args, **options)

    L.Trainer.__init__ = on_gpu  # type: ignore[method-assign]


def built() -> Any:
    """Return the extension, built by one process at a time; one that is killed meanwhile leaves no lock behind.

    Each checkout has a build of its own.
    """
    source, name = Path(__file__).with_name("device.cpp"), "pretended_cuda_device"
    place = hashlib.blake2b(str(source).encode(), digest_size=8).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"pretended_cuda-{os.getuid()}-{place}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "turn").open("w") as turn, warnings.catch_warnings():
        fcntl.flock(turn, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)  # torch's own, of a process that is gone: the turn is ours
        warnings.simplefilter("ignore")
        return cpp_extension.load(name, [str(source)], extra_cflags=["-O1"], build_directory=str(folder))


def _count() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return 8 if visible is None else len([name for name in visible.split(",") if name])


def _index(device: Any) -> int:
    if isinstance(device, int):
        return torch.cuda.current_device() if device < 0 else device
    index = None if device is None else torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def _put_in_place(device: Any) -> None:
    def exchange(index: int) -> int:
        before = device.current_device()
        if index >= 0:
            device.set_device(index)
        return before

    properties = SimpleNamespace(
        name="Pretended A100", major=8, minor=0, total_memory=80 * GIB, multi_processor_count=108, gcnArchName=""
    )
    functions = {
        "init": lambda: None,
        "getDeviceCount": _count,
        "getDevice": device.current_device,
        "setDevice": device.set_device,
        "exchangeDevice": exchange,
        "maybeExchangeDevice": lambda index: exchange(index),
        "isInBadFork": lambda: False,
        "emptyCache": lambda: None,
        "clearCublasWorkspaces": lambda: None,
        "synchronize": lambda: torch.accelerator.synchronize(),
        "memoryStats": lambda index: {"allocated_bytes": {"all": {"current": 1, "peak": 2}}},
        "resetPeakMemoryStats": lambda index: None,
        "resetAccumulatedMemoryStats": lambda index: None,
        "getCompiledVersion": lambda: 12080,
        "isCurrentStreamCapturing": lambda: False,
    }
    for name, function in functions.items():
        setattr(torch._C, f"_cuda_{name}", function)
    cuda: Any = torch.cuda
    cuda._exchange_device, cuda._maybe_exchange_device = exchange, lambda index: exchange(index)
    cuda.nccl.version = lambda: (2, 27, 5)
    cuda._cudart = SimpleNamespace(cudaMemGetInfo=lambda index: (79 * GIB, 80 * GIB))
    cuda._get_device_properties = lambda index: properties
    cuda.get_device_properties = lambda device=None: properties
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.default_generators = tuple(device.default_generator(index) for index in range(device.DEVICES))
    cuda.Stream, cuda.Event, cuda.stream = _Stream, _Event, _InStream
    cuda.current_stream = lambda place=None: _stream(device, _index(place), device.stream(_index(place)))
    cuda.default_stream = lambda place=None: _stream(device, _index(place), 0)
    cuda.set_stream = lambda stream: device.set_stream(stream.stream_id, stream.device_index)
    _InStream.set = device.set_stream
    torch.backends.cuda.is_built = lambda: True
    resize, clone = torch.UntypedStorage.resize_, torch.UntypedStorage.clone

    def bytes_of(storage: Any) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def cloned(self: Any) -> Any:
        return bytes_of(self).clone().untyped_storage() if self.device.type == "cuda" else clone(self)

    def resized(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        device.resize_storage(bytes_of(self), size)
        return self

    def moved(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        return bytes_of(self).to(device, non_blocking=non_blocking).untyped_storage()

    storage: Any = torch.UntypedStorage
    storage.resize_, storage.clone, storage.to = resized, cloned, moved


class _Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **named: Any) -> Any:
        if named:
            return super().__new__(cls, **named)
        return super().__new__(cls, device=f"cuda:{_index(device)}", priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def record_event(self, event: Any = None) -> Any:
        event = _Event() if event is None else event
        event.record(self)
        return event


def _stream(device: Any, index: int, stream_id: int) -> _Stream:
    return _Stream(stream_id=stream_id, device_index=index, device_type=1)


class _Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        return super().__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: Any = None) -> None:
        super().record(torch.cuda.current_stream() if stream is None else stream)

    def elapsed_time(self, end: Any) -> float:
        return 1.0

    def wait(self, stream: Any = None) -> None:
        super().wait(torch.cuda.current_stream() if stream is None else stream)


class _InStream:
    """What ``torch.cuda.stream`` is."""

    set: Any

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self._device = torch._C._cuda_exchangeDevice(self.stream.device_index)
            self._before = type(self).set(self.stream.stream_id, self.stream.device_index)

    def __exit__(self, *exception: Any) -> None:
        if self.stream is not None:
            type(self).set(self._before, self.stream.device_index)
            torch._C._cuda_exchangeDevice(self._device)


def _put_nccl_in_place(device: Any) -> None:
    ordered = _Device(serial=False)

    class ProcessGroupNCCL(Communicator):
        class Options:
            def __init__(self, is_high_priority_stream: bool = False) -> None:
                self.is_high_priority_stream = is_high_priority_stream
                self.config = SimpleNamespace()

            def __deepcopy__(self, memo: Any) -> Any:
                return type(self)(self.is_high_priority_stream)

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            named = {"group_rank": rank, "group_size": size, "store": store}
            ranks = options.global_ranks_in_group
            super().__init__(ordered, SimpleNamespace(**named, global_ranks_in_group=ranks))
            self.options, self._store, self._splits = options, store, 0

        def getBackendName(self) -> str:  # noqa: N802
            return "nccl"

        @property
        def _device_types(self) -> list[torch.device]:
            return [torch.device("cuda")]

        supports_splitting = True

        def eager_connect_single_device(self, place: Any) -> None:
            """Make the communicator: all ranks of the group, or of the one that it is split from, take part."""
            self.bound_device_id = place
            (getattr(self.options, "split_from", None) or self)._gloo.barrier().wait()

        def perform_nocolor_split(self, place: Any) -> None:
            self._gloo.barrier().wait()

        def split_group(
            self, ranks: list[int], timeout: Any = None, opts: Any = None, group_name: str = "", *_: Any, **named: Any
        ) -> Any:
            self._gloo.barrier().wait()
            self._splits += 1  # a later group of these ranks finds no addresses of an earlier one
            if self.rank() not in ranks:
                return None
            options = opts or self.Options()
            options.global_ranks_in_group = [self.ranks[rank] for rank in ranks]
            store = dist.PrefixStore(f"split {self._splits}: {ranks}/", self._store)
            group = type(self)(store, ranks.index(self.rank()), len(ranks), options)
            group._set_group_name(group_name)
            group._set_group_desc(named.get("group_desc", "") or "")
            return group

        def get_group_store(self) -> Any:
            return self._store

        def _set_sequence_number_for_group(self) -> None: ...

        def _get_backend(self, place: Any) -> Any:
            return self

        def _transfer(self, tensor: Any, peer: int, number: int, *, sends: bool) -> None:
            super()._transfer(device.on_host(tensor), peer, number, sends=sends)

        def _pass(self, tensor: Any, peer: int, *, sends: bool) -> Any:
            _check(tensor)
            return super()._pass(tensor, peer, sends=sends)

    def collective(name: str) -> Any:
        def issue(self: Any, *args: Any, **options: Any) -> Any:
            for x in tree_leaves((args, options)):
                if isinstance(x, torch.Tensor):
                    _check(x)

            def run() -> None:
                on_host = tree_map(lambda x: device.on_host(x.detach()) if isinstance(x, torch.Tensor) else x, args)
                getattr(self._gloo, name)(*on_host, **options).wait()

            return self._issue(name, run)

        return issue

    for name in [name for name in vars(Communicator) if getattr(vars(Communicator)[name], "__name__", "") == "issue"]:
        setattr(ProcessGroupNCCL, name, collective(name))
    ProcessGroupNCCL.barrier = lambda self, *_, **__: Communicator.barrier(self)
    distributed_c10d._NCCL_AVAILABLE = True
    distributed_c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL


_CARRIED = {
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}


def _check(x: torch.Tensor) -> None:
    if x.device.type != "cuda":
        raise RuntimeError(f"No backend type associated with device type {x.device.type}")
    if x.device.index != torch.cuda.current_device():
        raise RuntimeError(f"A tensor of {x.device} on a communicator of cuda:{torch.cuda.current_device()}")
    if not x.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    if x.dtype not in _CARRIED:
        raise TypeError(f"Input tensor data type is not supported for NCCL process group: {x.dtype}")
