"""The one place that makes process groups, on all ranks, in one order.

`torch.distributed.new_group` is collective over all ranks, members or not: a rank that calls it in another order hangs
the others for longer than any timeout. So the ranks compare their wishes before they make groups, by a digest of 8
bytes. The hang becomes an immediate error that shows which rank asked for which group.

Groups of NCCL are split from the communicator of the default group, which is collective over the world as well. Groups
that share no rank are therefore made by one split, see `disjoint`: the number of splits grows with the groups of a
rank, and not with the ranks. A group of another backend splits nothing, see `_unbound`.

It refuses ranks that do not ascend: `new_group` would sort them silently, and a mesh over such a group would
compute wrong results.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.config.errors import RankMismatchError
from lightning_mm5d.sharded.backends import backend_of

_SHOWN_BYTES = 512  # of a text, in an error
_LINK_CTAS = 4
"""Blocks of the device that an operation of a link may occupy: a posted receive keeps them until its sender comes."""


class Wish(NamedTuple):
    """A group that is to be made.

    Attributes:
        ranks: global, ascending.
        tag: what it is for.
        backend: None for that of the registry.
        is_link: whether it carries payloads from one rank to another, for which few blocks of a device will do.
    """

    ranks: tuple[int, ...]
    tag: str = ""
    backend: str | None = None
    is_link: bool = False

    def __str__(self) -> str:
        return f"ranks {list(self.ranks)}, tag {self.tag!r}"


class Wishes:
    """Notes the groups that are asked of it, in place of `Groups`, which makes them; this rank is in none."""

    def __init__(self) -> None:
        self.wanted: dict[Wish, None] = {}
        self.plan = ""

    def get(
        self, ranks: Sequence[int], tag: str = "", backend: str | None = None, *, is_link: bool = False
    ) -> dist.ProcessGroup | None:
        self.wanted[Wish(tuple(ranks), tag, backend, is_link)] = None
        return None

    def host(self, size: int) -> dist.ProcessGroup | None:
        return None

    def verify(self, plan: str = "") -> None:
        self.plan = plan


class Groups:
    """Registry of process groups, equal on all ranks.

    Args:
        timeout: how long an operation on one of the groups may wait for its peers.
        backend: for instance ``"gloo"``; None takes the default group's.
        device: where messages of the default group live; None is host memory.
    """

    def __init__(self, timeout: timedelta, backend: str | None = None, device: torch.device | None = None) -> None:
        self._device = device
        self._timeout = timeout
        self._backend = backend
        self._made: dict[tuple[tuple[int, ...], str], dist.ProcessGroup | None] = {}

    def get(
        self, ranks: Sequence[int], tag: str = "", backend: str | None = None, *, is_link: bool = False
    ) -> dist.ProcessGroup | None:
        """Return the group of ``ranks`` (global, ascending), or None where this rank is not in it.

        Every rank of the world calls this in the same order with the same arguments. The same ranks under the
        same ``tag`` give the same group; another tag gives another communicator.

        Args:
            ranks: of the group.
            tag: what it is for.
            backend: None takes that of this registry; one tag has one backend.
            is_link: see `Wish`.

        Raises:
            RankMismatchError: on all ranks, when they do not agree on what to make.
        """
        wish = Wish(tuple(ranks), tag, backend, is_link)
        if (wish.ranks, tag) not in self._made:
            self.make([wish])
        return self._made[wish.ranks, tag]

    def make(self, wishes: Iterable[Wish]) -> None:
        """Make groups together, for `get` to return; collective over the world.

        Args:
            wishes: equal on all ranks.

        Raises:
            RankMismatchError: on all ranks, when they do not agree on what to make.
        """
        new = [wish for wish in dict.fromkeys(wishes) if (wish.ranks, wish.tag) not in self._made]
        for wish in new:
            ascend = list(wish.ranks) == sorted(set(wish.ranks))
            assert ascend, f"ranks of group {wish.tag!r} must ascend, got {list(wish.ranks)}"
        self._agree([f"group {number}: {wish}" for number, wish in enumerate(new, len(self._made))])
        split = [wish for wish in new if self._splits(wish)]
        for together in disjoint(split):
            self._split(together)
        for wish in new:
            if wish in split:
                continue
            backend = wish.backend or self._backend
            with _unbound() if backend == "gloo" else nullcontext():
                group = dist.new_group(list(wish.ranks), self._timeout, backend, group_desc=wish.tag or None)
            self._made[wish.ranks, wish.tag] = group if dist.get_rank() in wish.ranks else None

    def _splits(self, wish: Wish) -> bool:
        """Whether a group is split from the default group's communicator: both are of NCCL alone, and that one lives.

        A default group with several backends makes its groups one by one, which torch splits as well.
        """
        default = dist.group.WORLD
        if default is None or default.bound_device_id is None:
            return False
        backends = {pair.split(":")[1] for pair in dist.get_backend_config().split(",")}
        return backends == {"nccl"} and (wish.backend or self._backend or "nccl") == "nccl"

    def _split(self, together: Sequence[Wish]) -> None:
        """Make groups that share no rank; collective over the world."""
        own = next((wish for wish in together if dist.get_rank() in wish.ranks), None)
        options: Any = None
        if own is not None and own.is_link:
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = _LINK_CTAS
        group = dist.split_group(
            split_ranks=[list(wish.ranks) for wish in together],
            timeout=self._timeout,
            pg_options=options,
            group_desc=None if own is None else own.tag or None,
        )
        self._made |= {(wish.ranks, wish.tag): group if wish is own else None for wish in together}

    def host(self, size: int) -> dist.ProcessGroup | None:
        """Return a group of all `size` ranks with messages in host memory; None where there is one rank.

        Every rank of the world calls this, in the order in which it makes groups.
        """
        if size == 1:
            return None
        if backend_of(torch.device("cpu")) == "gloo":
            return dist.group.WORLD
        return self.get(range(size), "agreement", "gloo")

    def verify(self, plan: str = "") -> None:
        """Check, after the last `get`, that no rank makes more groups than another, or for another plan. Collective.

        Args:
            plan: what all ranks must agree on beside the number of groups; only its digest travels.

        Raises:
            RankMismatchError: on all ranks, when some are still making groups, or plan otherwise.
        """
        digest = hashlib.blake2b(plan.encode(), digest_size=8).hexdigest()
        self._agree([f"no more than {len(self._made)} groups" + (f" and the plan {digest}" if plan else "")])

    def destroy(self) -> None:
        """Destroy the groups that this rank is in. No operation may be under way on them."""
        for group in reversed(self._made.values()):
            if group is not None:
                dist.destroy_process_group(group)
        self._made.clear()

    def _agree(self, plans: Sequence[str]) -> None:
        """Raise on all ranks unless all want the same next; collective."""
        if len(set(self._column(_digest("\n".join(plans))))) == 1:
            return
        most = max(self._column(len(plans)))
        digests = torch.tensor([*map(_digest, plans), *[0] * (most - len(plans))])
        columns = _gathered(digests, self._device).T.tolist()
        first = next(index for index, column in enumerate(columns) if len(set(column)) > 1)
        texts = gather_texts(plans[first] if first < len(plans) else "no more groups", self._device)
        asked = {text: [rank for rank, other in enumerate(texts) if other == text] for text in texts}
        raise RankMismatchError(
            "ranks disagree on the next process group: "
            + "; ".join(f"ranks {ranks} want {text}" for text, ranks in asked.items())
        )

    def _column(self, number: int) -> list[int]:
        """Return the numbers of all ranks; collective."""
        return _gathered(torch.tensor([number]), self._device)[:, 0].tolist()


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def disjoint(wishes: Iterable[Wish]) -> list[list[Wish]]:
    """Return groups in lists in which no two share a rank: each goes to the first list with room for it.

    Equal on all ranks. A rank that is in n groups at most makes about n lists necessary, and there are seldom more.
    """
    lists: list[tuple[set[int], list[Wish]]] = []
    for wish in wishes:
        taken, together = next((each for each in lists if each[0].isdisjoint(wish.ranks)), (set[int](), []))
        if not together:
            lists.append((taken, together))
        taken.update(wish.ranks)
        together.append(wish)
    return [together for _, together in lists]


def communicators(wishes: Iterable[Wish]) -> tuple[int, int]:
    """Return on NCCL the most communicators of a rank, and the splits that make them; that of all ranks is in neither.

    Args:
        wishes: all groups of a run.
    """
    split = [wish for wish in wishes if wish.backend != "gloo"]
    return max(Counter(rank for wish in split for rank in wish.ranks).values(), default=0), len(disjoint(split))


@contextmanager
def _unbound() -> Iterator[None]:
    """Enter around the making of groups that split nothing; the default group has no device of its own inside.

    With one, torch (2.13, `_new_process_group_helper`) has every rank outside of a new group take part in a split of
    NCCL's communicator, a collective, also where the group is gloo's, whose members split nothing. The next collective
    of NCCL would never end. (With ``use_local_synchronization=True`` the others return early, but the group's name then
    depends on how many groups a rank is in, and members with unequal numbers wait for each other under two names.)
    """
    default = dist.group.WORLD
    assert default is not None
    device, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = device


def gather_texts(text: str, device: torch.device | None) -> list[str]:
    """Return the texts of all ranks, cut off at 512 bytes; collective.

    Args:
        text: of this rank.
        device: where messages of the default group live; None is host memory.
    """
    data = text.encode()[:_SHOWN_BYTES]
    rows = _gathered(torch.tensor([*data, *bytes(_SHOWN_BYTES - len(data))], dtype=torch.uint8), device)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in rows]


def _gathered(row: Tensor, device: torch.device | None) -> Tensor:
    """Return the rows of all ranks ``[ranks, length]``, in host memory."""
    row = row.to(device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows).cpu()
