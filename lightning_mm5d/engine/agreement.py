"""Ranks compare what they state before they rely on it, through the store that they met at.

A collective between ranks that disagree hangs, or sums the wrong things without a word. A store holds values under
keys, so that a rank reads what others state whatever these do next. Phases of `Agreement.check`:

1. number: the store counts the checks of each rank, so that later runs and other strategies use keys of their own;
2. publish: each rank publishes a digest of its statement, and reads those of all ranks;
3. tell: where digests differ, one rank of each digest publishes its statement, and every rank raises the differences.

Only digests travel where all ranks agree. Statements are JSON: nothing of a peer is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_mm5d.config.errors import RankLostError, RankMismatchError

_LONGEST_PAUSE_S = 0.25  # between two looks at who has come
_GROWTH = 1.25  # of pauses, so that a wait ends a quarter later than it could, at most
_GRACE_S = 5.0  # for all ranks to read a difference
_COMES_S = 8.0  # for further ranks to come after one shows; rank 0 may have waited for the readers of an earlier one
_NOTICE_S = 60.0  # until a rank says whom it waits for
_NAMED = 5  # differences in one message
_NEXT = "next check"


class Agreement:
    """Compares statements over all ranks.

    Args:
        store: the same on all ranks.
        rank: global rank.
        world_size: number of ranks.
        timeout: how long a check waits for a rank.
    """

    def __init__(self, store: dist.Store, *, rank: int, world_size: int, timeout: timedelta) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._timeout = timeout

    def check(self, what: str, statement: Mapping[str, Any]) -> None:
        """Raise on all ranks where statements differ; all ranks call it in the same order.

        Args:
            what: names this check, and shows ranks that are elsewhere.
            statement: JSON values by name.

        Raises:
            RankMismatchError: names which ranks state what.
            RankLostError: a rank does not come to this check within the timeout.
        """
        text = json.dumps({_NEXT: what, **statement}, sort_keys=True)
        number = self._store.add(f"checks of {self._rank}", 1)
        store = dist.PrefixStore(f"check {number}", self._store)
        store.set(f"digest {self._rank}", _digest(text))
        store.add("come", 1)
        digests = self._digests(store, what, text)
        if len(set(digests.values())) == 1:
            return
        self._tell(store, digests, text)
        statements = {digest: self._statement(store, digest) for digest in set(digests.values())}
        store.add("told", 1)
        if self._rank == 0:  # whose process may hold the store
            end = time.monotonic() + _GRACE_S
            while store.add("told", 0) < len(digests) and time.monotonic() < end:
                time.sleep(0.02)
        raise RankMismatchError(differences({rank: statements[digest] for rank, digest in digests.items()}))

    def _tell(self, store: dist.Store, digests: Mapping[int, str], text: str) -> None:
        """Publish this rank's statement where it is the first rank of its digest."""
        own_digest = digests[self._rank]
        if min(rank for rank, digest in digests.items() if digest == own_digest) == self._rank:
            store.set(f"statement {own_digest}", text)

    def _digests(self, store: dist.Store, what: str, text: str) -> dict[int, str]:
        """Return the digest of each rank; where they differ, of the ranks that have come soon after that shows."""
        keys = [f"digest {rank}" for rank in range(self._world_size)]
        begin, noticed = time.monotonic(), False
        end = begin + self._timeout.total_seconds()
        for pause in pauses():
            if store.add("come", 0) >= self._world_size and store.check(keys):
                return dict(enumerate(value.decode() for value in store.multi_get(keys)))
            now = time.monotonic()
            if now - begin < _LONGEST_PAUSE_S and now < end:
                time.sleep(pause)
                continue
            digests = {rank: store.get(key).decode() for rank, key in enumerate(keys) if store.check([key])}
            if len(digests) == self._world_size:  # the last ones have come meanwhile
                return digests
            away = ranks_of(rank for rank in range(self._world_size) if rank not in digests)
            if len(set(digests.values())) > 1:
                self._tell(store, digests, text)  # others may know all ranks already
                end = min(end, now + _COMES_S)
                if now >= end:
                    return digests
            elif now >= end:
                raise RankLostError(f"{away} did not come to the check of {what} within {self._timeout}")
            elif now - begin > _NOTICE_S and not noticed and self._rank == 0:
                noticed = True
                warnings.warn(f"waiting for {away} at the check of {what}", stacklevel=4)
            time.sleep(pause)
        raise AssertionError("pauses never end")

    def _statement(self, store: dist.Store, digest: str) -> dict[str, Any]:
        """Return the statement with this digest; "unknown" where its ranks ended before they published it."""
        key = f"statement {digest}"
        for _ in looks(_GRACE_S):
            if store.check([key]):
                return json.loads(store.get(key))
        return {_NEXT: "unknown"}


def looks(seconds: float) -> Iterator[None]:
    """Yield for each look at something that may come within some seconds, with pauses between."""
    end = time.monotonic() + seconds
    for pause in pauses():
        yield
        if time.monotonic() > end:
            return
        time.sleep(pause)


def pauses() -> Iterator[float]:
    """Yield the seconds between looks at the store; a wait of its own would print a warning whenever it ends."""
    pause = 0.001
    while True:
        yield pause
        pause = min(_LONGEST_PAUSE_S, _GROWTH * pause)


def differences(statements: Mapping[int, Mapping[str, Any]]) -> str:
    """Return which ranks state what, for each name whose values differ.

    For instance ``"ranks disagree: rank 2 has dp_size 4, ranks 0 and 1 have 2"``.

    Args:
        statements: values by name, by rank.
    """
    names = dict.fromkeys(name for statement in statements.values() for name in statement)
    disagreements = []
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, statement in statements.items():
            values.setdefault(_shown(statement.get(name)), []).append(rank)
        if len(values) > 1:
            # fewest ranks first: most likely those to look at
            (value, ranks), *others = sorted(values.items(), key=lambda item: len(item[1]))
            rest = (f"{_have(ranks)} {value}" for value, ranks in others)
            disagreements.append(", ".join([f"{_have(ranks)} {name} {value}", *rest]))
            if name == _NEXT:
                break
    more = [f"{len(disagreements) - _NAMED} more differences"] if len(disagreements) > _NAMED else []
    return "ranks disagree: " + "; ".join([*disagreements[:_NAMED], *more])


def ranks_of(ranks: Iterable[int]) -> str:
    """Return ranks in words: ``"rank 2"``, ``"ranks 0, 1 and 3"``."""
    names = [str(rank) for rank in ranks]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _have(ranks: Sequence[int]) -> str:
    return f"{ranks_of(ranks)} {'has' if len(ranks) == 1 else 'have'}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
