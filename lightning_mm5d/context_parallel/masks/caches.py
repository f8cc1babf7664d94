"""Caches of context parallelism: one type, and the set of them that a session owns.

`hooks.layer_attention.Interface` makes a `Caches` for its session and clears it at the end; masks and their tiles carry
it to the kernels. Results that depend on a single object live on that object instead (`Tiles.kept`, `TokenSplit.kept`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import RLock
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_mm5d.sharded.host_copies import HostCopies
from lightning_mm5d.sharded.kept_results import unseen
from lightning_mm5d.sharded.torch_internals import version_of

T = TypeVar("T")


class Cache:
    """Results by key; drops the least recently used ones first.

    Args:
        entries: most results that are kept; None: any number.
        nbytes: most bytes that are kept, by each result's ``nbytes``, which may grow; None: any number. The newest
            result is kept whatever its size.
    """

    def __init__(self, entries: int | None = None, nbytes: int | None = None) -> None:
        self._entries, self._nbytes = entries, nbytes
        self._kept: OrderedDict[Hashable, tuple[Any, tuple[Tensor | None, ...]]] = OrderedDict()
        self._lock = RLock()  # a backward may run in another thread

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable, make: Callable[[], T], tensors: tuple[Tensor | None, ...] = ()) -> T:
        """Return the result of `make` with this key, made at the first call.

        Args:
            key: equal keys, equal results.
            make: makes the result.
            tensors: inputs that are part of the key by identity and version: one that was written to is another one.
        """
        # an id is unique while the tensor is kept; a result of inference mode cannot be used to train
        versions = tuple((id(x), 0 if x is None else version_of(x)) for x in tensors)
        place = (key, versions, torch.is_inference_mode_enabled())
        with self._lock:
            found = self._kept.get(place)
            if found is None:
                with unseen():  # a layer that is computed again finds it here
                    found = self._kept[place] = make(), tensors
                self._trim()
            else:
                self._kept.move_to_end(place)
        return found[0]

    def clear(self) -> None:
        """Drop all results."""
        with self._lock:
            self._kept.clear()

    def _trim(self) -> None:
        while self._entries is not None and len(self._kept) > self._entries:
            self._kept.popitem(last=False)
        if self._nbytes is not None:
            sizes = [result.nbytes for result, _ in self._kept.values()]
            held = sum(sizes)
            for size in sizes[:-1]:
                if held <= self._nbytes:
                    break
                self._kept.popitem(last=False)
                held -= size


class Caches:
    """The caches of one session.

    Attributes:
        masks: work and tiles of masks, by the mask's content.
        biases: additive masks of rectangles of tiles.
        tokens: splits of sequences, and indices of their first tokens.
        functions: compiled functions, and those that are compiled into them.
        host: what the host knows of tensors of the device, from which masks are read.
    """

    def __init__(self) -> None:
        self.masks = Cache(512, 512 << 20)
        self.biases = Cache(nbytes=128 << 20)
        self.tokens = Cache(128)
        self.functions = Cache(16)
        self.host = HostCopies()

    def clear(self) -> None:
        """Drop all results."""
        for cache in (self.masks, self.biases, self.tokens, self.functions):
            cache.clear()
        self.host.clear()
