"""Which keys each query may see, as a function of indices, and which tiles of queries and keys are empty or full.

Masks are closures, as transformers makes them: valid for any queries and keys, so that a rank can ask for its own. Long
sequences are judged in tiles, never by S x S elements. The session's caches keep results by content: a mask
that comes back in the next step costs a digest. Both are computed on the host, from what it knows of the mask's tables
(sharded/host_copies.py), so neither waits for the device where a batch decides about the mask.

A function that cannot be traced (trace.py) is slow: all its pairs are evaluated, again for each new mask.

**Tiles.** Attention skips EMPTY tiles, computes FULL ones without a mask, and asks for the mask of PARTIAL ones.

Bounds of counts (blocks.py) settle most tiles; the others are evaluated. So the memory goes with the number of tiles,
and the time with the number of mixed ones. Example: of a causal mask over 512 tokens, 6 tiles are EMPTY, 6 FULL and 4
PARTIAL, all by their bounds.

**Caches.** `hooks.layer_attention.Interface` makes a `Caches` for its session and clears it at the end; masks and their
tiles carry it to the kernels. Results that depend on a single object live on that object instead (`Tiles.cached`,
`TokenSplit.cached`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from functools import cached_property
from hashlib import blake2b
from threading import RLock
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_mm5d.context_parallel.masks.blocks import Condition, Every, Function, Judge, Where, judge
from lightning_mm5d.context_parallel.masks.trace import MaskFunction, Untraceable, trace
from lightning_mm5d.data.lazy import on_device
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
        self._results: OrderedDict[Hashable, tuple[Any, tuple[Tensor | None, ...]]] = OrderedDict()
        self._lock = RLock()  # a backward may run in another thread

    def __len__(self) -> int:
        return len(self._results)

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
            stored = self._results.get(place)
            if stored is None:
                with unseen():  # a layer that is computed again finds it here
                    stored = self._results[place] = make(), tensors
                self._trim()
            else:
                self._results.move_to_end(place)
        return stored[0]

    def clear(self) -> None:
        """Drop all results."""
        with self._lock:
            self._results.clear()

    def _trim(self) -> None:
        while self._entries is not None and len(self._results) > self._entries:
            self._results.popitem(last=False)
        if self._nbytes is not None:
            sizes = [result.nbytes for result, _ in self._results.values()]
            held = sum(sizes)
            for size in sizes[:-1]:
                if held <= self._nbytes:
                    break
                self._results.popitem(last=False)
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
        for cache in (self.masks, self.biases, self.tokens, self.functions, self.host):
            cache.clear()


TILE = 128
EMPTY, PARTIAL, FULL = 0, 1, 2
AT_ONCE = 1 << 20  # pairs that are evaluated at once, and four times the tiles whose bounds are
MASK_BYTES = 256 << 20  # bytes of masks of partial tiles that are kept


class Scoring(NamedTuple):
    """How scores follow from products of queries and keys.

    Args:
        scale: factor of the products.
        softcap: scores become ``softcap * tanh(scores / softcap)`` before the mask; None leaves them.
    """

    scale: float
    softcap: float | None = None


class Tiles:
    """Kinds of all tiles of TILE queries x TILE keys, by positions in the two shards.

    Args:
        condition: the mask.
        q: global indices of the queries [Sq], ascending, on CPU.
        k: global indices of the keys [Sk].
        device: of the masks of partial tiles.
        caches: of the session.

    Attributes:
        rows: 1 where all rows of the batch are equal, else their number.
        q_length, k_length: Sq and Sk.
        kinds: EMPTY, PARTIAL or FULL, int8 on CPU [rows, ceil(Sq / TILE), ceil(Sk / TILE)]. PARTIAL tiles have at least
            one pair that is allowed and one that is not.
    """

    def __init__(
        self, condition: Condition, q: Tensor, k: Tensor, *, device: torch.device | str, caches: Caches
    ) -> None:
        self.caches = caches
        self._memo: dict[Hashable, Any] = {}
        self.rows = condition.rows()
        self.q_length, self.k_length = len(q), len(k)
        self._device = torch.device(device)
        pairs = [Where.of(q, k, TILE, row) for row in range(self.rows)]
        self._judges = [judge(condition, where) for where in pairs]
        kinds = torch.stack([_kinds(*each) for each in zip(self._judges, pairs, strict=True)])
        self.kinds = kinds[:, : -(-len(q) // TILE), : -(-len(k) // TILE)]
        # of each row: which tiles are partial, and which of the distinct masks each of these has, -1 where not known
        self._partial = [np.flatnonzero(kinds.numpy() == PARTIAL) for kinds in self.kinds]
        self._which = [np.full(len(partial), -1, dtype=np.int32) for partial in self._partial]
        self._masks: list[Tensor] = []
        self._mask_numbers: dict[bytes, int] = {}

    def cached(self, name: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` made of these tiles the first time, for as long as they live."""
        if name not in self._memo:
            self._memo[name] = make()
        return self._memo[name]

    @property
    def nbytes(self) -> int:
        """Bytes that are held, about."""
        values = 32 * (self.q_length + self.k_length) * self.rows
        return self.kinds.nbytes + values + sum(12 * len(row) for row in self._partial) + len(self._masks) * TILE * TILE

    def allowed(self, row: int, q: slice, k: slice) -> Tensor:
        """Return which pairs are allowed.

        Args:
            row: of the batch.
            q: positions in the shard of queries, m of them, without a step.
            k: positions in the shard of keys, n of them.

        Returns:
            Bool [m, n]; not to be written to.
        """
        row = row if self.rows > 1 else 0
        q_start, q_stop, _ = q.indices(self.q_length)
        k_start, k_stop, _ = k.indices(self.k_length)
        if q_stop <= q_start or k_stop <= k_start:
            return torch.zeros((max(0, q_stop - q_start), max(0, k_stop - k_start)), dtype=torch.bool).to(self._device)
        q_tiles, k_tiles = (range(a // TILE, -(-b // TILE)) for a, b in ((q_start, q_stop), (k_start, k_stop)))
        bands = [_joined([self._tile(row, i, j) for j in k_tiles], 1) for i in q_tiles]
        whole = _joined(bands, 0)
        q_base, k_base = q_tiles[0] * TILE, k_tiles[0] * TILE
        return whole[q_start - q_base : q_stop - q_base, k_start - k_base : k_stop - k_base]

    def _tile(self, row: int, i: int, j: int) -> Tensor:
        """The mask of one tile, filled up with False at the ends of the shards: bool [TILE, TILE]."""
        kind = int(self.kinds[row, i, j])
        if kind != PARTIAL:
            return torch.full((1, 1), kind == FULL, device=self._device).expand(TILE, TILE)
        place = int(np.searchsorted(self._partial[row], i * self.kinds.shape[2] + j))
        if self._which[row][place] < 0:
            if len(self._masks) * TILE * TILE >= MASK_BYTES:
                mask = self._judges[row].exact(torch.tensor([i]), torch.tensor([j]))[0]  # of too many
                return on_device(mask, self._device)
            self._keep(row, place)
        return self._masks[self._which[row][place]]

    def _keep(self, row: int, place: int) -> None:
        """Evaluate the masks of a partial tile and of those that will be asked for next; equal ones are kept once."""
        size = AT_ONCE // (TILE * TILE)
        first = place // size * size
        at = torch.from_numpy(self._partial[row][first : first + size])
        masks = self._judges[row].exact(at // self.kinds.shape[2], at % self.kinds.shape[2])
        packed = np.packbits(masks.flatten(1).numpy(), axis=1)
        for place, (mask, bits) in enumerate(zip(masks, packed, strict=True), first):
            which = self._mask_numbers.setdefault(bits.tobytes(), len(self._masks))
            if which == len(self._masks):
                self._masks.append(on_device(mask, self._device))
            self._which[row][place] = which


def count(condition: Condition, q: Tensor, k: Tensor, block: int) -> Tensor:
    """Return the number of allowed pairs of each block of queries, summed over the rows of `condition`.

    Args:
        condition: the mask.
        q: global indices of the queries [Sq], on CPU.
        k: global indices of the keys [Sk].
        block: queries per block.

    Returns:
        Int64 [ceil(Sq / block)].
    """
    size = TILE if block % TILE == 0 else block  # large blocks are open more often
    pairs = [Where.of(q, k, size, row) for row in range(condition.rows())]
    counts = torch.stack([_counts(judge(condition, where), where) for where in pairs]).sum(0)[: -(-len(q) // size)]
    return torch.stack([part.sum() for part in counts.split(block // size)]) if block > size else counts


def _bands(judge: Judge, where: Where) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield bands of blocks: i [n, 1], j [1, m], bounds [n, m] over all m blocks of keys."""
    j = torch.arange(len(where.k.count))[None, :]
    for i in torch.arange(len(where.q.count))[:, None].split(max(1, AT_ONCE // 4 // j.numel())):
        yield i, j, *judge.bounds(i, j)


def _exact(judge: Judge, i: Tensor, j: Tensor, is_open: Tensor) -> Iterator[tuple[tuple[Tensor, ...], Tensor, Tensor]]:
    """Yield for the blocks that are open: their places in the band, their i, and their numbers of allowed pairs."""
    places = is_open.nonzero()
    size = judge.where.q.seen.shape[1]
    for at in places.split(max(1, AT_ONCE // size**2)) if len(places) else ():
        place = tuple(at.unbind(1))
        at_i, at_j = (index.expand(is_open.shape)[place] for index in (i, j))
        yield place, at_i, _population(judge.exact(at_i, at_j))


def _settled(least: Tensor, most: Tensor, total: Tensor) -> Tensor:
    """EMPTY or FULL where that is certain, PARTIAL elsewhere: int8."""
    kinds = torch.full(most.shape, PARTIAL, dtype=torch.int8)
    kinds[least == total] = FULL
    kinds[most == 0] = EMPTY
    return kinds


def _kinds(judge: Judge, where: Where) -> Tensor:
    """Kinds of all blocks, int8 [blocks of queries, blocks of keys]."""
    bands = []
    for i, j, least, most in _bands(judge, where):
        total = where.total(i, j)
        settled = _settled(least, most, total)
        is_open = (settled == PARTIAL) & ((least == 0) | (most == total))
        for place, _, number in _exact(judge, i, j, is_open):
            settled[place] = _settled(number, number, total[place])
        bands.append(settled)
    return torch.cat(bands)


def _counts(judge: Judge, where: Where) -> Tensor:
    """Number of allowed pairs of each block of queries, int64 [blocks of queries]."""
    counts = torch.zeros(len(where.q.count), dtype=torch.int64)
    for i, j, least, most in _bands(judge, where):
        is_open = least != most
        counts[i[:, 0]] = most.masked_fill(is_open, 0).sum(-1, dtype=torch.int64)
        for _, at_i, number in _exact(judge, i, j, is_open):
            counts.index_add_(0, at_i, number)
    return counts


def _population(pairs: Tensor) -> Tensor:
    """Number of True of each tile [n, t, t], int64 [n]."""
    if pairs.shape[1] % 32 or not pairs.is_contiguous():
        return pairs.sum((1, 2))
    # eight at a time: a byte of an int64 holds the sum of 128 bools
    words = pairs.view(torch.uint8).view(len(pairs), -1).view(torch.int64)
    return words.view(len(pairs), -1, 128).sum(2).view(torch.uint8).sum(1)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


SHARDS = 256  # pairs of shards whose tiles a mask keeps by their tensors


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
        self._unkeyed, self._shards = Cache(SHARDS), Cache(SHARDS)

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

        def remembered() -> Tiles:
            digests = (_digest(self.caches.host.of(indices)) for indices in (q, k))
            return self._remembered(("tiles", str(self.device), *digests), make)

        return self._shards.get("tiles", remembered, (q, k))  # by identity first: every layer asks for the same shards

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
        return (self._unkeyed if self.key is None else self.caches.masks).get((self.key, *what), make)


def _digest(index: Tensor) -> bytes:
    return blake2b(index.to(torch.int64).contiguous().numpy().data, digest_size=16).digest()
