"""Tells whether ranks of several replicas can run a schedule in which some actions are collectives among them.

Gathers of parameters are collectives of ranks that are different replicas. Where these run the actions of their stages
in the same order, and no other rank makes one of them wait for an action that comes after, they can be tied to actions.

Example: an encoder on rank 0 serves two replicas of a language model on ranks 1 and 2. Under ``1f1b`` it waits for a
backward of rank 1 before it sends rank 2 its first input; ranks 1 and 2 can not meet in a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lightning_mm5d.schedule.actions import Action, Kind


def can_meet(
    actions: Mapping[int, Sequence[Action]],
    needed: Callable[[int, Action], Sequence[Action]],
    meets: Callable[[int, Action], Sequence[int]],
) -> bool:
    """Return whether all ranks come to their end.

    Args:
        actions: of each rank, in order.
        needed: returns the actions that must have ended before a rank runs one.
        meets: returns the ranks that a rank meets in an action, among them itself; none where it meets nobody.
    """
    left: dict[Action, int] = {}
    for listed in actions.values():
        for one in listed:
            left[one.provides] = left.get(one.provides, 0) + 1
    position = dict.fromkeys(actions, 0)

    def ready(rank: int) -> Action | None:
        if position[rank] == len(actions[rank]):
            return None
        action = actions[rank][position[rank]]
        return None if any(left.get(other, 0) for other in needed(rank, action)) else action

    moves = True
    while moves:
        moves = False
        for rank in actions:
            while (action := ready(rank)) is not None:
                kind = action.stage, action.kind
                others = [(other, ready(other)) for other in meets(rank, action) or (rank,)]
                found = [(other, one) for other, one in others if one is not None and (one.stage, one.kind) == kind]
                if len(found) < len(others):
                    break
                for other, met in found:
                    position[other] += 1
                    left[met.provides] -= 1
                moves = True
    return all(position[rank] == len(listed) for rank, listed in actions.items())


def gathers(action: Action) -> bool:
    """Whether an action uses the weights of its layers: all but weight gradients, which are made of activations."""
    return action.kind is not Kind.W
