"""The one place that makes process groups, on all ranks, in one order.

`torch.distributed.new_group` is collective over all ranks, members or not: a rank that calls it in another order hangs
the others for longer than any timeout. So the ranks compare their wishes before each creation (one `all_gather_object`,
little beside the creation itself). The hang becomes an immediate error that shows which rank asked for which group.

It refuses ranks that do not ascend: `new_group` would sort them silently, and a mesh over such a group would
compute wrong results.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist


class Groups:
    """Registry of process groups, equal on all ranks.

    Args:
        timeout: how long an operation on one of the groups may wait for its peers.
        backend: for instance ``"gloo"``; None takes the default group's.
    """

    def __init__(self, timeout: timedelta, backend: str | None = None) -> None:
        self._timeout = timeout
        self._backend = backend
        self._made: dict[tuple[tuple[int, ...], str], dist.ProcessGroup | None] = {}

    def get(self, ranks: Sequence[int], tag: str = "") -> dist.ProcessGroup | None:
        """Return the group of ``ranks`` (global, ascending), or None where this rank is not in it.

        Every rank of the world calls this in the same order with the same arguments. The same ranks under the
        same ``tag`` give the same group; another tag gives another communicator.

        Raises:
            RuntimeError: on all ranks, when they do not agree on what to make.
        """
        key = (tuple(ranks), tag)
        assert key[0] == tuple(sorted(set(key[0]))), f"ranks of group {tag!r} must ascend, got {list(ranks)}"
        if key not in self._made:
            self._agree(f"group {len(self._made)}: ranks {list(ranks)}, tag {tag!r}")
            group = dist.new_group(list(ranks), self._timeout, self._backend, group_desc=tag or None)
            self._made[key] = group if dist.get_rank() in key[0] else None
        return self._made[key]

    def verify(self, plan: str = "") -> None:
        """Check, after the last `get`, that no rank makes more groups than another, or for another plan. Collective.

        Args:
            plan: what all ranks must agree on beside the number of groups; only its digest travels.

        Raises:
            RuntimeError: on all ranks, when some are still making groups, or plan otherwise.
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
        plans: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(plans, plan)
        if len(set(plans)) > 1:
            asked = {p: [r for r, other in enumerate(plans) if other == p] for p in plans}
            raise RuntimeError(
                "ranks disagree on the next process group: "
                + "; ".join(f"ranks {ranks} want {plan}" for plan, ranks in asked.items())
            )
