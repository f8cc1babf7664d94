"""The one place that makes process groups, on all ranks, in one order.

`torch.distributed.new_group` is collective over all ranks, members or not: a rank that calls it in another order hangs
the others for longer than any timeout. So the ranks compare their wishes before each creation, by a digest of 8 bytes.
The hang becomes an immediate error that shows which rank asked for which group.

It refuses ranks that do not ascend: `new_group` would sort them silently, and a mesh over such a group would
compute wrong results.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.config.errors import RankMismatchError
from lightning_mm5d.sharded.backends import backend_of

_SHOWN_BYTES = 512  # of a text, in an error


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

    def get(self, ranks: Sequence[int], tag: str = "", backend: str | None = None) -> dist.ProcessGroup | None:
        """Return the group of ``ranks`` (global, ascending), or None where this rank is not in it.

        Every rank of the world calls this in the same order with the same arguments. The same ranks under the
        same ``tag`` give the same group; another tag gives another communicator.

        Args:
            ranks: of the group.
            tag: what it is for.
            backend: None takes that of this registry; one tag has one backend.

        Raises:
            RankMismatchError: on all ranks, when they do not agree on what to make.
        """
        key = (tuple(ranks), tag)
        assert key[0] == tuple(sorted(set(key[0]))), f"ranks of group {tag!r} must ascend, got {list(ranks)}"
        if key not in self._made:
            self._agree(f"group {len(self._made)}: ranks {list(ranks)}, tag {tag!r}")
            group = dist.new_group(list(ranks), self._timeout, backend or self._backend, group_desc=tag or None)
            self._made[key] = group if dist.get_rank() in key[0] else None
        return self._made[key]

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
        self._agree(f"no more than {len(self._made)} groups" + (f" and the plan {digest}" if plan else ""))

    def destroy(self) -> None:
        """Destroy the groups that this rank is in. No operation may be under way on them."""
        for group in reversed(self._made.values()):
            if group is not None:
                dist.destroy_process_group(group)
        self._made.clear()

    def _agree(self, plan: str) -> None:
        digest = int.from_bytes(hashlib.blake2b(plan.encode(), digest_size=8).digest(), "big", signed=True)
        if len(set(_gathered(torch.tensor([digest]), self._device)[:, 0].tolist())) == 1:
            return
        plans = gather_texts(plan, self._device)
        asked = {p: [r for r, other in enumerate(plans) if other == p] for p in plans}
        raise RankMismatchError(
            "ranks disagree on the next process group: "
            + "; ".join(f"ranks {ranks} want {plan}" for plan, ranks in asked.items())
        )


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
