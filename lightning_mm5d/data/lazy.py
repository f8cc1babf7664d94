"""Tensors of a sample whose values are loaded where something reads them.

A data set gives a `LazyTensor` for what is costly to decode (an image, a piece of audio or video) and knows its shape
beforehand. It is collated, cut and moved as any tensor, and decoded by the ranks that read it alone: an encoder's rank
decodes the items of its own microbatches, and a rank of the language model none. What reads it elsewhere after all (a
hook, a metric, one process without the strategy) decodes it there, so that no number depends on who reads.

Workers of a DataLoader decode it as they would any image, unless the rank has told them that it reads a part only
(`StaysLazy`).

Tensors of a batch that stay in host memory until something reads them.

A rank that runs no encoder hands its pixel values to a call that another rank computes, and never reads them. There
such a tensor is a `Waiting`. It tells shape, dtype and the device of the rank, and its slices wait, too. It moves to
the device when any other function takes it. So a wrong guess costs a copy, and no number is wrong. A slice or another
view moves the whole tensor and is a view of it, so that writes are seen as in any other tensor.
"""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import pairwise
from operator import methodcaller
from traceback import format_exception
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.random_state import CPU, all_states, pack_states

_TELLING = {
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device, Tensor.__hash__, Tensor.is_contiguous),
    *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference, Tensor.is_inference),
    *(
        getattr(Tensor, name).__get__
        for name in (
            *("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "is_cpu", "is_meta", "layout"),
            *("is_leaf", "grad_fn", "is_sparse", "is_quantized", "itemsize", "_version"),
        )
    ),
}

_VIEWING = {
    *(Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten, torch.unflatten),
    *(Tensor.unsqueeze, torch.unsqueeze, Tensor.permute, torch.permute, Tensor.transpose, torch.transpose),
    *(Tensor.movedim, torch.movedim, Tensor.expand),
}
"""of a tensor that lies in one piece"""


class Waiting(Tensor):
    """Stands for a tensor that is still in host memory.

    Args:
        host: the tensor, or one of its form.
        device: where its values move when they are read.
        move: moves them, and returns the tensor on the device.
    """

    _host: Tensor
    _moved: Tensor | None = None
    _move: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, host: Tensor, device: torch.device, move: Callable[[], Tensor]) -> Waiting:
        waiting: Waiting = Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), dtype=host.dtype, device=device
        )
        waiting._host, waiting._moved, waiting._move = host, None, move
        return waiting

    def moved(self) -> Tensor:
        """Return the values on the device; the same tensor each time."""
        if self._moved is None:
            self._moved = self._move()
        return self._moved

    def chosen(self, index: Tensor, dim: int) -> Waiting:
        """Return the rows at the host's numbers `index` along `dim`, which wait, too.

        Nobody may write to the tensor since.
        """
        form = self._host.to("meta").index_select(dim, index.to("meta"))
        return Waiting(form, self.device, lambda: self.moved().index_select(dim, on_device(index, self.device)))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Waiting) and first._moved is None:
            if func in _TELLING:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func is Tensor.__getitem__ and _is_plain(args[1]):
                return Waiting(first._host[args[1]], first.device, lambda: first.moved()[args[1]])
            if func in _VIEWING and first._host.is_contiguous() and _are_sizes(args[1:], kwargs):
                form = func(first._host.to("meta"), *args[1:], **kwargs)
                return Waiting(form, first.device, lambda: func(first.moved(), *args[1:], **kwargs))
            if func is Tensor.to and _form_of(first, *args[1:], **kwargs) == (first.dtype, first.device):
                return first
        args, kwargs = tree_map_only(Waiting, methodcaller("moved"), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(Waiting, methodcaller("moved"), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def on_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Return a copy of the host's `x` on `device`, which the host does not wait for."""
    if torch.device(device).type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)  # torch keeps pinned memory until it is read
    return x.to(device, copy=True)


def _are_sizes(args: Any, kwargs: Any) -> bool:
    """Whether arguments are dims and sizes, and no tensors or dtypes."""
    leaves = tree_leaves((args, kwargs))
    return all(type(leaf) is int for leaf in leaves)


def _is_plain(index: Any) -> bool:
    """Whether an index makes a view, and needs no values."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or type(part) is int or isinstance(part, slice) for part in parts)


_CASTS = {
    Tensor.float: torch.float32,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
    Tensor.double: torch.float64,
}


class StaysLazy:
    """Whether workers leave lazy tensors as they are; the main process of a rank says so, while they run."""

    def __init__(self) -> None:
        self._flag = torch.ones(1, dtype=torch.uint8).share_memory_()

    def set(self, is_kept: bool) -> None:
        """Say it to the workers that have this object."""
        self._flag.fill_(is_kept)

    def __bool__(self) -> bool:
        return bool(self._flag)


_stay_lazy: StaysLazy | bool = False
"""in this process, which is a worker's"""


def keep_in_worker(flag: StaysLazy) -> None:
    """Let this worker ask `flag` from now on."""
    global _stay_lazy
    _stay_lazy = flag


class _Source:
    """What one call of `load` gives: rows of one or several samples, decoded once.

    Args:
        load: gives it.
        shape: of it.
        dtype: of it.
        default: torch's default dtype where the sample was made, with which it is loaded; a step may have another one.
    """

    def __init__(
        self, load: Callable[[], Any], shape: tuple[int, ...], dtype: torch.dtype, default: torch.dtype | None = None
    ) -> None:
        self.load, self.shape, self.dtype = load, shape, dtype
        self._default = default or torch.get_default_dtype()
        self._future: Future[Tensor] | None = None
        self._values: Tensor | None = None

    def __reduce__(self) -> Any:
        return _Source, (self.load, self.shape, self.dtype, self._default)

    def start(self, pool: ThreadPoolExecutor) -> None:
        if self._values is None and self._future is None:
            self._future = pool.submit(self._loaded)

    def values(self) -> Tensor:
        if self._values is None:
            is_loading = self._future is not None and not self._future.cancelled()  # as at the end of a run
            self._values = self._future.result() if self._future is not None and is_loading else self._loaded()
            self._future = None
        return self._values

    def again(self) -> _Source:
        """Return one that is loaded for itself, unless this is there: a data set may hold this for all epochs."""
        return self if self._values is not None else _Source(self.load, self.shape, self.dtype, self._default)

    def row(self) -> _Source:
        """Return this as one row of a batch."""
        row = _Source(_OneRow(self.load), (1, *self.shape), self.dtype, self._default)
        row._values = None if self._values is None else self._values[None]
        return row

    def _loaded(self) -> Tensor:
        is_alone = threading.current_thread() is threading.main_thread()
        states = pack_states(all_states(CPU)) if is_alone else None
        with _outside_of_steps(self._default) if is_alone else nullcontext():
            values = torch.as_tensor(self.load())
        if states is not None and not torch.equal(states, pack_states(all_states(CPU))):
            rule = (
                "It runs in threads, while steps draw from the generators of Python, numpy or torch that it draws from"
            )
            fix = "Draw in __getitem__, and give load the numbers, or a seed for a generator of its own"
            raise ConfigError("LazyTensor.load", self.load, rule, fix)
        if tuple(values.shape) != self.shape or values.dtype != self.dtype:
            got = f"{_form(values.dtype, values.shape)} from {self.load!r}"
            rule = f"It was said to give {_form(self.dtype, self.shape)}, and its sample was collated as that"
            raise ConfigError("LazyTensor.load", got, rule, "Give LazyTensor the shape and dtype that load returns")
        return values


@contextmanager
def _outside_of_steps(default: torch.dtype) -> Iterator[None]:
    """Compute as outside of a step: with the default dtype `default`, and without autocast."""
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(default)
        for kind in {"cpu", *((device.type,) if (device := torch.accelerator.current_accelerator()) else ())}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _loads_in_worker(sources: Sequence[_Source]) -> bool:
    """Whether this process is a worker that loads these: where the main process wants it, or could not."""
    if get_worker_info() is None:
        return False
    if not _stay_lazy:
        return True
    try:
        pickle.dumps([source.load for source in sources])
    except Exception:  # a function within a function, an open file
        return True
    return False


class _ByValue(pickle.Pickler):
    """Pickles tensors by their values, and not by where they lie in memory."""

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout is not torch.strided:
            return None
        return str(value.dtype), tuple(value.shape), value.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def _by_value(load: Any) -> bytes:
    """Return what is equal for equal functions in all processes."""
    file = io.BytesIO()
    _ByValue(file).dump(load)
    return file.getvalue()


class _OneRow:
    """Loads a tensor as one row of a batch."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self.load = load

    def __call__(self) -> Tensor:
        return torch.as_tensor(self.load())[None]

    def __repr__(self) -> str:
        return repr(self.load)


class _Read:
    """Whether something has read a tensor, or a copy of it."""

    is_set = False


class _Piece(NamedTuple):
    """The rows ``[start, end)`` of a source, cast to one dtype after the other, as each of them rounds."""

    source: _Source
    start: int
    end: int
    casts: tuple[torch.dtype, ...] = ()

    def values(self) -> Tensor:
        values = self.source.values()[self.start : self.end]
        for dtype in self.casts:
            values = values.to(dtype)
        return values


class LazyTensor(Waiting):
    """A tensor that is loaded where something reads its values; its shape, dtype and device are known before.

    `torch.stack` and `torch.cat` of lazy tensors along dim 0, `to`, `clone`, casts and `pin_memory` give lazy tensors.

    Args:
        load: returns the values, as a tensor or an array on the CPU; where the DataLoader has workers, it can be
            pickled. Called once, in any thread, so that it draws from no global generator. Where it has a method
            `identity`, the bytes of that tell what it loads; else what pickle makes of it.
        shape: of the values, with at least one dim.
        dtype: of the values.

    Raises:
        ConfigError: when it is read, and `load` gives another shape or dtype.
    """

    _pieces: tuple[_Piece, ...]
    _key: bytes | None
    _read: _Read

    @staticmethod
    def __new__(cls, load: Callable[[], Any], shape: Sequence[int], dtype: torch.dtype = torch.float32) -> LazyTensor:
        if not callable(load) or not shape:
            got, rule = (load, "load is a function without arguments") if shape else (shape, "shape has a dim or more")
            raise ConfigError("LazyTensor", got, rule, "Use LazyTensor(functools.partial(decode, path), (3, 224, 224))")
        source = _Source(load, tuple(shape), dtype)
        if _loads_in_worker([source]):
            source.values()  # here, where a worker is seeded and can raise
        return _lazy((_Piece(source, 0, shape[0]),), tuple(shape), dtype, CPU)

    def rows(self, start: int, end: int) -> Tensor:
        """Return the rows ``[start, end)``: of what was read, or which are loaded by themselves and not seen here."""
        return self._of(self._cut(start, end)) if self._moved is None else self._moved[start:end]

    def chosen(self, index: Tensor, dim: int) -> Waiting:
        """Return the rows at the host's numbers `index` along `dim`."""
        if dim or self._moved is not None:  # what was read may have been written to
            return super().chosen(index, dim)
        numbers = index.tolist()
        ends = [0, *(i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1] + 1), len(numbers)]
        runs = [(numbers[start], numbers[end - 1] + 1) for start, end in pairwise(ends) if start < end]
        return self._of(piece for run in runs for piece in self._cut(*run))

    def start(self, pool: ThreadPoolExecutor) -> None:
        """Begin to load it in threads of `pool`."""
        if self._moved is None:
            for piece in self._pieces:
                piece.source.start(pool)

    def form(self) -> Tensor:
        """Return a tensor of its shape, dtype and device, for what looks at these alone: zeros, unless it was read."""
        return torch.zeros_like(self._host, device=self.device) if self._moved is None else self._moved

    @property
    def is_read(self) -> bool:
        """Whether its values were needed here, or those of a copy."""
        return self._read.is_set

    @property
    def is_whole(self) -> bool:
        """Whether it is all of one source, as that is loaded."""
        if len(self._pieces) != 1:
            return False
        source, start, end, casts = self._pieces[0]
        return (start, end, casts) == (0, source.shape[0], ())

    def key(self) -> bytes:
        """Return what is equal for equal sources in all processes; of sources that cannot be pickled their shapes."""
        if self._key is None:
            digest = hashlib.blake2b(digest_size=8)
            for source, start, end, _ in self._pieces:
                digest.update(f"{source.shape} {source.dtype} {start} {end}".encode())
                with suppress(Exception):  # a function within a function, an open file
                    tells = getattr(source.load, "identity", None)
                    digest.update(_by_value(source.load) if tells is None else tells())
            self._key = digest.digest()
        return self._key

    def _of(self, pieces: Any) -> LazyTensor:
        new_pieces = tuple(pieces)
        rows = sum(piece.end - piece.start for piece in new_pieces)
        return _lazy(new_pieces, (rows, *self.shape[1:]), self.dtype, self.device)

    def _cut(self, start: int, end: int) -> Iterator[_Piece]:
        """Yield the pieces of the rows ``[start, end)``."""
        first = 0
        for piece in self._pieces:
            begin, stop = piece.start, piece.end
            last = first + stop - begin
            if first < end and last > start and begin < stop:
                yield piece._replace(start=begin + max(start - first, 0), end=begin + min(end, last) - first)
            first = last

    def _move(self) -> Tensor:
        self._read.is_set = True
        parts = [piece.values() for piece in self._pieces]
        # always a copy: others read the same sources
        values = torch.cat(parts) if parts else torch.empty(self.shape)
        return values.to(self.device, self.dtype, non_blocking=True)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first, options = args[0] if args else None, kwargs or {}
        if func in (torch.stack, torch.cat, torch.concat) and first and not options.keys() - {"dim"}:
            dim = options.get("dim", [*args, 0][1])
            if dim == 0 and _can_be_joined(first, func is torch.stack):
                return _joined(first, is_stack=func is torch.stack)
        if isinstance(first, LazyTensor) and first._moved is None:
            if func is Tensor.pin_memory:
                return first
            if func is Tensor.clone and not options:  # which reads the same sources for itself
                return first._as(first.dtype, first.device)
            if func in _CASTS:
                return first.to(_CASTS[func])
            is_cast = func is Tensor.type and any(isinstance(dtype, torch.dtype) for dtype in args[1:])
            if (func is Tensor.to or is_cast) and (form := _form_of(first, *args[1:], **options)) is not None:
                return first if form == (first.dtype, first.device) else first._as(*form)
        return super().__torch_function__(func, types, args, kwargs)

    def _as(self, dtype: torch.dtype, device: torch.device) -> LazyTensor:
        casts = () if dtype == self.dtype else (dtype,)
        pieces = tuple(piece._replace(casts=piece.casts + casts) for piece in self._pieces)
        tensor = _lazy(pieces, tuple(self.shape), dtype, device)
        tensor._key, tensor._read = self._key, self._read
        return tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        values: Tensor | Exception | None = self._moved
        if values is None and _loads_in_worker([piece.source for piece in self._pieces]):
            try:
                values = self.moved()
            except Exception as error:  # a queue would drop the batch, for which the main process waits
                values = _sent(error)
        pieces = self._pieces if values is None else None
        key = self.key() if pieces is None else self._key  # of pieces it can be made there, where something asks for it
        return _rebuilt, (pieces, tuple(self.shape), self.dtype, key, values)


def _lazy(pieces: tuple[_Piece, ...], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> LazyTensor:
    form = torch.empty(shape, dtype=dtype, device="meta")
    tensor: LazyTensor = Tensor._make_wrapper_subclass(LazyTensor, form.shape, dtype=dtype, device=device)
    tensor._host, tensor._moved, tensor._pieces, tensor._key, tensor._read = form, None, pieces, None, _Read()
    return tensor


def _rebuilt(
    pieces: tuple[_Piece, ...] | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    key: bytes | None,
    values: Tensor | Exception | None,
) -> LazyTensor:
    """Undo `LazyTensor.__reduce_ex__`: without pieces its values were read before."""
    if pieces is None:
        assert values is not None
        source = _Source(_Loaded(values), shape, dtype)
        pieces = (_Piece(source, 0, shape[0]),)
    tensor = _lazy(pieces, shape, dtype, CPU)
    tensor._key = key
    return tensor


def _sent(error: Exception) -> Exception:
    """Return an error that can cross to another process, with its traceback: itself, or one that says it."""
    text = f"in a worker: {''.join(format_exception(error))}"
    try:
        pickle.dumps(error)
        sent = copy.copy(error)  # is made as the other process makes it
    except Exception:  # an error of a class with arguments of its own
        return RuntimeError(text)
    sent.add_note(text)
    return sent


class _Loaded:
    """Gives a tensor that is there, or raises what a worker has raised for it."""

    def __init__(self, values: Tensor | Exception) -> None:
        self.values = values

    def __call__(self) -> Tensor:
        if isinstance(self.values, Exception):
            raise self.values
        return self.values


def _form_of(tensor: Tensor, *args: Any, **options: Any) -> tuple[torch.dtype, torch.device] | None:
    """The dtype and device that `to` with these arguments gives a tensor; None where it does more."""
    dtype, device = tensor.dtype, tensor.device
    copies = sum(isinstance(value, bool) for value in args) > 1  # the second one asks for it
    if options.keys() - {"dtype", "device", "non_blocking"} or copies:
        return None
    for value in (*args, options.get("dtype"), options.get("device")):
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, (str, torch.device)):
            device = torch.device(value)
        elif isinstance(value, Tensor):
            dtype, device = value.dtype, value.device
        elif value is not None and not isinstance(value, bool):
            return None
    return dtype, device


def _can_be_joined(tensors: Sequence[Any], is_stack: bool) -> bool:
    """Whether these are lazy tensors that have not been read, and can be joined along dim 0 without."""
    if any(type(tensor) is not LazyTensor or tensor._moved is not None for tensor in tensors):
        return False
    forms = {(tensor.dtype, tensor.device, tuple(tensor.shape[0 if is_stack else 1 :])) for tensor in tensors}
    return len(forms) == 1 and (not is_stack or all(tensor.is_whole for tensor in tensors))


def _form(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _joined(tensors: Sequence[LazyTensor], *, is_stack: bool) -> LazyTensor:
    first, shape = tensors[0], tuple(tensors[0].shape)
    if is_stack:
        rows = [tensor._pieces[0].source.row() for tensor in tensors]
        return _lazy(tuple(_Piece(source, 0, 1) for source in rows), (len(rows), *shape), first.dtype, first.device)
    old_pieces = [piece for tensor in tensors for piece in tensor._pieces]
    sources = {piece.source: piece.source.again() for piece in old_pieces}
    pieces = tuple(piece._replace(source=sources[piece.source]) for piece in old_pieces)
    return _lazy(pieces, (sum(len(tensor) for tensor in tensors), *shape[1:]), first.dtype, first.device)


def _collated(batch: list[Tensor], *, collate_fn_map: Any = None) -> Tensor:
    return torch.stack(batch)


default_collate_fn_map[LazyTensor] = _collated
