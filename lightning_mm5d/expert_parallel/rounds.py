"""Ranks that share experts agree which layer's tokens travel next.

Replicas run different batches: one has no images, another skips a layer. Each exchange of tokens takes all ranks that
share the experts, so each begins with a *round*: every rank says over host memory what it wants. The first of these
wishes, in the order in which layers run, is what all of them do. A rank that wanted something else *serves*: it has no
tokens of its own, and its experts work for those of the others. A rank at the end of its action serves until all are
there. So nobody waits for a rank that does not come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_mm5d.config.errors import RankMismatchError
from lightning_mm5d.sharded.renamed import all_gather_single

END, FORWARD, BACKWARD = range(3)


class Wish(NamedTuple):
    """What a rank wants to do next, in whole numbers.

    Attributes:
        kind: END, FORWARD or BACKWARD.
        layer: place of the experts among those of the stage.
        number: of the record that a backward is for.
        trains: whether backwards may follow.
        wants: whether tokens want a gradient.
        dtype: of tokens, a number.
        width: of a token.
        expert: one more than the number of the expert that is called by itself, with rows of its own; 0 for none.
        batch: the samples of such rows, where they are ``[B, S, H]``; 0 for ``[P, H]``.
        counts: rows for each expert; none of a backward.
    """

    kind: int = END
    layer: int = 0
    number: int = 0
    trains: int = 0
    wants: int = 0
    dtype: int = 0
    width: int = 0
    expert: int = 0
    batch: int = 0
    counts: tuple[int, ...] = ()


_FIELDS = len(Wish._fields) - 1


class Round(NamedTuple):
    """What ranks do together.

    Attributes:
        chosen: the wish that counts.
        trains: whether backwards may follow on any rank.
        wants: whether tokens of any rank want a gradient.
        counts: rows of each rank for each expert, by place in the group.
        wishing: places of the ranks that wanted it; the others serve.
        calls: what each rank called by itself: `Wish.expert` and `Wish.batch`.
    """

    chosen: Wish
    trains: bool
    wants: bool
    counts: tuple[tuple[int, ...], ...]
    wishing: frozenset[int]
    calls: tuple[tuple[int, int], ...]


class Rounds:
    """The rounds of the ranks that run one stage together.

    Args:
        group: these ranks, with messages in host memory.
        most: the largest number of experts of a layer.
        serve: does what others want.

    Attributes:
        place: of this rank in the group.
    """

    def __init__(self, group: dist.ProcessGroup, most: int, serve: Callable[[Round], None]) -> None:
        self._group, self._most, self._serve = group, most, serve
        self._size, self.place = dist.get_world_size(group), dist.get_rank(group)

    def reach(self, wish: Wish, *, forward: bool) -> Round | None:
        """Serve until it is the turn of `wish`; return what ranks do then, None at the end of an action.

        Args:
            wish: of this rank.
            forward: whether the action is a forward.

        Raises:
            RankMismatchError: on all ranks, when they run different actions.
        """
        while True:
            found = self._exchanged(wish, forward)
            if all(one.kind == END for one in found):
                return None
            chosen = min((one for one in found if one.kind != END), key=_order(forward))
            same = [one for one in found if one[:3] == chosen[:3]]
            counts = tuple(one.counts if one[:3] == chosen[:3] else (0,) * len(chosen.counts) for one in found)
            trains, wants = (any(getattr(one, name) for one in same) for name in ("trains", "wants"))
            wishing = frozenset(place for place, one in enumerate(found) if one[:3] == chosen[:3])
            calls = tuple((one.expert, one.batch) if one[:3] == chosen[:3] else (0, 0) for one in found)
            one_round = Round(chosen, trains, wants, counts, wishing, calls)
            if wish[:3] == chosen[:3]:
                return one_round
            self._serve(one_round)

    def agree(self, wish: bool) -> bool:
        """Whether all ranks wish something; collective, between actions."""
        wishes = torch.tensor([int(wish)])
        dist.all_reduce(wishes, dist.ReduceOp.MIN, group=self._group)
        return bool(wishes)

    def _exchanged(self, wish: Wish, forward: bool) -> list[Wish]:
        counts = [*wish.counts, *[0] * (self._most - len(wish.counts))]
        sent = torch.tensor([int(forward), *wish[:_FIELDS], *counts])
        came = sent.new_empty(self._size * len(sent))
        all_gather_single(came, sent, group=self._group)
        rows: list[list[int]] = came.view(self._size, -1).tolist()
        if len({row[0] for row in rows}) > 1:
            raise RankMismatchError("ranks that share experts run a forward and a backward at the same time")
        return [Wish._make([*row[1 : _FIELDS + 1], tuple(row[_FIELDS + 1 :])]) for row in rows]


def _order(forward: bool) -> Callable[[Wish], tuple[int, ...]]:
    """The order in which layers run: in a backward from the last to the first, each computed again before."""
    if forward:
        return lambda one: (one.layer, one.number)
    return lambda one: (-one.layer, one.kind, -one.number)
