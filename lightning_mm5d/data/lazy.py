"""Tensors of a sample whose values are loaded where something reads them.

A data set gives a `LazyTensor` for what is costly to decode (an image, a piece of audio or video) and knows its shape
beforehand. It is collated, cut and moved as any tensor, and decoded by the ranks that read it alone: an encoder's rank
decodes the items of its own microbatches, and a rank of the language model none. What reads it elsewhere after all (a
hook, a metric, one process without the strategy) decodes it there, so that no number depends on who reads.

Workers of a DataLoader decode it as they would any image, unless the rank has told them that it reads a part only
(`Kept`).
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.waiting import Waiting

_CPU = torch.device("cpu")
_CASTS = {
    Tensor.float: torch.float32,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
    Tensor.double: torch.float64,
}


class Kept:
    """Whether workers leave lazy tensors as they are; the main process of a rank says so, while they run."""

    def __init__(self) -> None:
        self._flag = torch.ones(1, dtype=torch.uint8).share_memory_()

    def set(self, is_kept: bool) -> None:
        """Say it to the workers that have this object."""
        self._flag.fill_(is_kept)

    def __bool__(self) -> bool:
        return bool(self._flag)


_kept: Kept | bool = False
"""in this process, which is a worker's"""


def keep_in_worker(kept: Kept) -> None:
    """Let this worker ask `kept` from now on."""
    global _kept
    _kept = kept


class _Source:
    """What one call of `load` gives: rows of one or several samples, decoded once."""

    def __init__(self, load: Callable[[], Any], shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.load, self.shape, self.dtype = load, shape, dtype
        self._future: Future[Tensor] | None = None
        self._values: Tensor | None = None

    def __reduce__(self) -> Any:
        return _Source, (self.load, self.shape, self.dtype)

    def start(self, pool: ThreadPoolExecutor) -> None:
        if self._values is None and self._future is None:
            self._future = pool.submit(self._loaded)

    def values(self) -> Tensor:
        if self._values is None:
            self._values = self._loaded() if self._future is None else self._future.result()
            self._future = None
        return self._values

    def _loaded(self) -> Tensor:
        values = torch.as_tensor(self.load())
        if tuple(values.shape) != self.shape or values.dtype != self.dtype:
            got = f"{_form(values.dtype, values.shape)} from {self.load!r}"
            rule = f"It was said to give {_form(self.dtype, self.shape)}, and its sample was collated as that"
            raise ConfigError("LazyTensor.load", got, rule, "Give LazyTensor the shape and dtype that load returns")
        return values


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
    """The rows ``[start, end)`` of a source."""

    source: _Source
    start: int
    end: int


class LazyTensor(Waiting):
    """A tensor that is loaded where something reads its values; its shape, dtype and device are known before.

    `torch.stack` and `torch.cat` of lazy tensors along dim 0, `to`, `clone`, casts and `pin_memory` give lazy tensors.

    Args:
        load: returns the values, as a tensor or an array on the CPU; where the DataLoader has workers, it can be
            pickled. Called once, in any thread.
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
        return _made((_Piece(_Source(load, tuple(shape), dtype), 0, shape[0]),), tuple(shape), dtype, _CPU)

    def rows(self, start: int, end: int) -> LazyTensor:
        """Return the rows ``[start, end)``, which are loaded by themselves; writes to them are not seen here."""
        return self._of(self._cut(start, end))

    def chosen(self, index: Tensor, dim: int) -> Waiting:
        """Return the rows at the numbers `index` along `dim`."""
        if dim:
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

    @property
    def is_read(self) -> bool:
        """Whether its values were needed here, or those of a copy."""
        return self._read.is_set

    @property
    def is_whole(self) -> bool:
        """Whether it is all of one source, as that is loaded."""
        (source, start, end), *others = self._pieces or [(None, 0, 0)]
        return source is not None and not others and (start, end, source.dtype) == (0, source.shape[0], self.dtype)

    def key(self) -> bytes:
        """Return what is equal for equal sources in all processes; of sources that cannot be pickled their shapes."""
        if self._key is None:
            digest = hashlib.blake2b(digest_size=8)
            for source, start, end in self._pieces:
                digest.update(f"{source.shape} {source.dtype} {start} {end}".encode())
                with suppress(Exception):  # a function within a function, an open file
                    digest.update(pickle.dumps(source.load))
            self._key = digest.digest()
        return self._key

    def _of(self, pieces: Any) -> LazyTensor:
        found = tuple(pieces)
        rows = sum(piece.end - piece.start for piece in found)
        return _made(found, (rows, *self.shape[1:]), self.dtype, self.device)

    def _cut(self, start: int, end: int) -> Iterator[_Piece]:
        """Yield the pieces of the rows ``[start, end)``."""
        first = 0
        for source, begin, stop in self._pieces:
            last = first + stop - begin
            if first < end and last > start and begin < stop:
                yield _Piece(source, begin + max(start - first, 0), begin + min(end, last) - first)
            first = last

    def moved(self) -> Tensor:
        """Return the values on the device, loaded at the first call; the same tensor each time."""
        if self._moved is None:
            self._read.is_set = True
            parts = [source.values()[start:end] for source, start, end in self._pieces]
            # always a copy: others read the same sources
            values = torch.cat(parts) if parts else torch.empty(self.shape)
            self._moved = values.to(self.device, self.dtype, non_blocking=True)
        return self._moved

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first, options = args[0] if args else None, kwargs or {}
        if func in (torch.stack, torch.cat, torch.concat) and options.get("dim", [*args, 0][1]) == 0:
            tensors = [*first] if isinstance(first, (list, tuple)) else []
            if tensors and "out" not in options and _are_alike(tensors, func is torch.stack):
                return _joined(tensors, is_stack=func is torch.stack)
        if isinstance(first, LazyTensor) and first._moved is None:
            if func is Tensor.pin_memory:
                return first
            if func is Tensor.clone and not options:  # which reads the same sources for itself
                return first._as(first.dtype, first.device)
            if func in _CASTS:
                return first.to(_CASTS[func])
            if func is Tensor.to and (form := _form_of(first, *args[1:], **options)) is not None:
                return first if form == (first.dtype, first.device) else first._as(*form)
        return super().__torch_function__(func, types, args, kwargs)

    def _as(self, dtype: torch.dtype, device: torch.device) -> LazyTensor:
        made = _made(self._pieces, tuple(self.shape), dtype, device)
        made._key, made._read = self._key, self._read
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        loads = get_worker_info() is not None and not _kept
        values = self.moved() if loads else self._moved
        return _rebuilt, (None if loads else self._pieces, tuple(self.shape), self.dtype, self.key(), values)


def _made(pieces: tuple[_Piece, ...], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> LazyTensor:
    form = torch.empty(shape, dtype=dtype, device="meta")
    made: LazyTensor = Tensor._make_wrapper_subclass(LazyTensor, form.shape, dtype=dtype, device=device)
    made._host, made._moved, made._pieces, made._key, made._read = form, None, pieces, None, _Read()
    return made


def _rebuilt(
    pieces: tuple[_Piece, ...] | None, shape: tuple[int, ...], dtype: torch.dtype, key: bytes, values: Tensor | None
) -> LazyTensor:
    """Undo `LazyTensor.__reduce_ex__`: without pieces it was loaded in a worker."""
    if pieces is None:
        assert values is not None
        source = _Source(_Loaded(values), shape, dtype)
        pieces = (_Piece(source, 0, shape[0]),)
    made = _made(pieces, shape, dtype, _CPU)
    made._key = key
    return made


class _Loaded:
    """Gives a tensor that is there."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __call__(self) -> Tensor:
        return self.values


def _form_of(tensor: Tensor, *args: Any, **options: Any) -> tuple[torch.dtype, torch.device] | None:
    """The dtype and device that `to` with these arguments gives a tensor; None where it does more."""
    dtype, device = tensor.dtype, tensor.device
    if options.keys() - {"dtype", "device", "non_blocking"} or len(args) > 3:
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


def _are_alike(tensors: Sequence[Any], is_stack: bool) -> bool:
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
        rows = [_Source(_OneRow(tensor._pieces[0].source.load), (1, *shape), tensor.dtype) for tensor in tensors]
        return _made(tuple(_Piece(one, 0, 1) for one in rows), (len(rows), *shape), first.dtype, first.device)
    pieces = tuple(piece for tensor in tensors for piece in tensor._pieces)
    return _made(pieces, (sum(len(tensor) for tensor in tensors), *shape[1:]), first.dtype, first.device)


def _collated(batch: list[Tensor], *, collate_fn_map: Any = None) -> Tensor:
    return torch.stack(batch)


default_collate_fn_map[LazyTensor] = _collated
