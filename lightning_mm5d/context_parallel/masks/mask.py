"""Which keys each query may see, as a function of indices.

Masks are closures, as transformers makes them: valid for any queries and keys, so that a rank can ask for its own. Long
sequences are judged in blocks (tiles.py), never by S x S elements. The session's caches keep results by content: a mask
that comes back in the next step costs a digest. Both are computed on the host, from what it knows of the mask's tables
(sharded/host_copies.py), so neither waits for the device where a batch decides about the mask.

A function that cannot be traced (trace.py) is slow: all its pairs are evaluated, again for each new mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from hashlib import blake2b
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_mm5d.context_parallel.masks.blocks import Condition, Every, Function
from lightning_mm5d.context_parallel.masks.caches import Cache, Caches
from lightning_mm5d.context_parallel.masks.tiles import EMPTY, FULL, PARTIAL, TILE, Tiles, count
from lightning_mm5d.context_parallel.masks.trace import MaskFunction, Untraceable, trace

SHARDS = 256  # pairs of shards whose tiles a mask keeps by their tensors

T = TypeVar("T")

__all__ = ["EMPTY", "FULL", "PARTIAL", "TILE", "Mask", "MaskFunction"]


class Mask:
    """Which keys each query may see: a function of indices, never an S x S tensor.

    Args:
        function: takes integer tensors that broadcast (row of the batch, head, query, key) and returns bools; it must
            depend on its indices alone, pair by pair, and is asked for head 0. It is read at the first use of the
            mask, so its tables must not change. None allows everything.
        batch: rows of the batch, B.
        q_length: number of queries.
        k_length: number of keys.
        device: of the function's own tensors.
        caches: of the session, shared by equal masks; by default the mask has its own.
    """

    def __init__(
        self,
        function: MaskFunction | None,
        *,
        batch: int,
        q_length: int,
        k_length: int,
        device: torch.device | str,
        caches: Caches | None = None,
    ) -> None:
        self.function, self.batch, self.q_length, self.k_length = function, batch, q_length, k_length
        self.device = torch.device(device)
        self.caches = Caches() if caches is None else caches
        self._own, self._shards = Cache(SHARDS), Cache(SHARDS)

    @cached_property
    def rows(self) -> int:
        """1 where all rows of the batch are known to be equal, else their number."""
        return self._condition.rows()

    @cached_property
    def key(self) -> bytes | None:
        """Digest of the content: equal keys, equal masks, in any step and process. None where that is unknown."""
        if isinstance(self._condition, Function):
            return None
        digest = blake2b(f"{self.batch} {self.q_length} {self.k_length}".encode(), digest_size=16)
        self._condition.write(digest.update)
        return digest.digest()

    def allowed(self, row: int, q: Tensor, k: Tensor) -> Tensor:
        """Return the keys that each of some queries may see, out of some keys.

        Args:
            row: of the batch.
            q: global indices of the queries [m].
            k: global indices of the keys [n].

        Returns:
            Bool [m, n] on the mask's device.
        """
        if self.function is None:
            return torch.ones((len(q), len(k)), dtype=torch.bool, device=self.device)
        return self._evaluate(row, q[None], k[None])[0]

    def tiles(self, q: Tensor, k: Tensor) -> Tiles:
        """Return the tiles of a shard of queries and a shard of keys.

        Args:
            q: global indices of the queries [Sq], ascending.
            k: global indices of the keys [Sk], ascending.
        """

        def make() -> Tiles:
            own_q, own_k = self.caches.host.of(q), self.caches.host.of(k)
            return Tiles(self._condition, own_q, own_k, device=self.device, caches=self.caches)

        def found() -> Tiles:
            digests = (_digest(self.caches.host.of(one)) for one in (q, k))
            return self._remembered(("tiles", str(self.device), *digests), make)

        return self._shards.get("tiles", found, (q, k))  # by identity first: every layer asks for the same shards

    def work(self, block: int = TILE) -> Tensor:
        """Return the number of allowed pairs of each block of queries, summed over the rows of the batch.

        Args:
            block: queries per block.

        Returns:
            Int64 [ceil(q_length / block)] on CPU; not to be written to.
        """
        q, k = torch.arange(self.q_length), torch.arange(self.k_length)
        times = self.batch if self.rows == 1 else 1
        return self._remembered(("work", block), lambda: count(self._condition, q, k, block) * times)

    def dense(self) -> Tensor:
        """Return the full mask, bool [B, 1, q_length, k_length], for attention that takes no other."""
        q, k = (torch.arange(length, device=self.device) for length in (self.q_length, self.k_length))
        rows = torch.stack([self.allowed(row, q, k) for row in range(self.rows)])
        return rows[:, None].expand(self.batch, 1, -1, -1)

    @cached_property
    def _condition(self) -> Condition:
        if self.function is None:
            return Every()
        try:
            return trace(self.function, self.batch, self.q_length, self.k_length, self.device, self.caches.host)
        except Untraceable:
            return Function(lambda row, q, k: self._evaluate(row, q, k).cpu(), self.batch)

    def _evaluate(self, row: int, q: Tensor, k: Tensor) -> Tensor:
        """Pairs of queries [n, m] and keys [n, l]: bool [n, m, l]."""
        assert self.function is not None
        size = (len(q), 1, q.shape[1], k.shape[1])
        b, h = (torch.full((len(q), 1, 1, 1), number, device=self.device) for number in (row, 0))
        q, k = q.to(self.device)[:, None, :, None], k.to(self.device)[:, None, None, :]
        return self.function(b, h, q, k).to(torch.bool).expand(size)[:, 0]

    def _remembered(self, what: tuple[Any, ...], make: Callable[[], T]) -> T:
        return (self._own if self.key is None else self.caches.masks).get((self.key, *what), make)


def _digest(index: Tensor) -> bytes:
    return blake2b(index.to(torch.int64).contiguous().numpy().data, digest_size=16).digest()
