"""What ranks tell each other about a checkpoint: what it holds, and JSON in the store that they met at.

There is no collective in it, so that a thread may talk while its rank trains, and a rank that failed still can. A rank
that dies meanwhile is the monitor's business: it ends the ranks that wait here.

**Fingerprints** say what a checkpoint holds in few words per value: ranks compare them, so that none goes on from
another file. The bits of a tensor are summed as integers, at the speed of memory, so that one changed element shows.
Values that are neither tensors nor plain count by their class alone.
"""

from __future__ import annotations

import json
import math
import threading
import time
import zlib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.config.errors import RankLostError

_LONG = 200  # characters; longer texts count by their checksum


def fingerprint(tree: Any, path: str = "") -> dict[str, Any]:
    """Return a JSON value for each tensor and plain value in nested dicts, lists and tuples, by path."""
    if isinstance(tree, Mapping):
        items = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list | tuple):
        items = [(str(index), value) for index, value in enumerate(tree)]
    else:
        return {path: _form(tree)}
    by_path: dict[str, Any] = {} if items else {path: type(tree).__name__}
    for key, value in items:
        by_path |= fingerprint(value, f"{path}.{key}" if path else key)
    return by_path


def _form(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _LONG:
        return f"{len(value)} characters with checksum {zlib.crc32(value.encode()):x}"
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} with bits {_sum_of_bits(value):x}"
    return type(value).__name__


def _sum_of_bits(tensor: Tensor) -> int:
    """Return the sum of the tensor's memory in integers of 8 bytes, modulo 2**64."""
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    even = len(data) // 8 * 8
    total = int(data[:even].view(torch.int64).sum()) + int.from_bytes(bytes(data[even:].tolist()), "little")
    return total % 2**64


_LONGEST_PAUSE_S = 0.1
_POLL_S = 0.05
_GRACE_S = 5.0  # for all ranks to hear the end before rank 0, whose process may hold the store, goes on


class RankReports:
    """Messages of one occasion. All ranks open their occasions of a topic in the same order.

    Args:
        store: used by no other thread meanwhile; None for a single rank.
        topic: names the kind of occasion.
        rank: global rank.
        world_size: number of ranks.
        timeout: how long a rank waits for another.
    """

    def __init__(self, store: dist.Store | None, topic: str, *, rank: int, world_size: int, timeout: timedelta) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self._told: dict[str, str] = {}
        self._store: dist.Store | None = None
        if store is not None and world_size > 1:
            number = store.add(f"{topic}s of {rank}", 1)
            self._store = dist.PrefixStore(f"{topic} {number}", store)

    def tell(self, key: str, value: Any) -> None:
        """Publish a JSON value of this rank."""
        self._told[key] = json.dumps(value)
        if self._store is not None:
            self._store.set(f"{key} {self.rank}", self._told[key])

    def hear(self, key: str, rank: int = 0) -> Any:
        """Return what a rank tells under a key, once it does."""
        if self._store is None or rank == self.rank:
            return json.loads(self._told[key])
        return json.loads(self._wait(f"{key} {rank}"))

    def exchange(self, key: str, value: Any) -> list[Any]:
        """Return what all ranks tell under a key, in their order; this one tells `value`."""
        self.tell(key, value)
        reports = [self.hear(key, rank) for rank in range(self.world_size)]
        self.part(key)
        return reports

    def part(self, key: str) -> None:
        """Wait on rank 0 until all ranks come here, but not long."""
        if self._store is None:
            return
        heard = self._store.add(f"{key} heard", 1)
        end = time.monotonic() + _GRACE_S
        while self.rank == 0 and heard < self.world_size and time.monotonic() < end:
            time.sleep(0.002)
            heard = self._store.add(f"{key} heard", 0)

    def _wait(self, key: str) -> str:
        """Return the text under a key; it looks again and again, so that the monitor can end it."""
        assert self._store is not None
        end, pause = time.monotonic() + self.timeout.total_seconds(), 0.001
        while not self._store.check([key]):
            if time.monotonic() > end:
                raise RankLostError(
                    f"{key.rpartition(' ')[0]!r}: rank {key.rpartition(' ')[2]} said nothing for {self.timeout}"
                )
            time.sleep(pause)
            pause = min(1.25 * pause, _LONGEST_PAUSE_S)
        return self._store.get(key).decode()


def joined(thread: threading.Thread | None, limit: float = math.inf) -> None:
    """Wait for a thread that saves, at most `limit` seconds, in small steps, so that the monitor can end the wait."""
    waited = 0.0
    while thread is not None and thread.is_alive() and waited < limit:
        thread.join(_POLL_S)
        waited += _POLL_S


WAITING = RankReports._wait.__code__, joined.__code__
"""The functions that wait, for the monitor."""
