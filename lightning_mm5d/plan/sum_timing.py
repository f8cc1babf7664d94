"""When sums of gradients may leave while a schedule runs, where devices have one order for all messages.

With gloo they may leave at any time. Such devices must not wait in a circle, whatever the batches of replicas are: so a
sum has the same place among the messages of the schedule on all of its ranks.
"""

from __future__ import annotations

from typing import NamedTuple

from lightning_mm5d.plan.plan import Plan


class SumTiming(NamedTuple):
    """When sums may leave.

    Attributes:
        early: whether a sum leaves in the last action of its stage; else after all actions.
        inside: whether it leaves within that action; else at its end, after messages of layers.
        late: names of the parameters that wait for the end of all actions, because several stages use them.
    """

    early: bool = True
    inside: bool = True
    late: frozenset[str] = frozenset()


def ordered_timing(plan: Plan) -> SumTiming:
    """Return when sums may leave where devices have one order for all messages; the same on all ranks.

    Replicas that share ranks end their stages at different places among the messages of these ranks, and so do several
    encoders of one replica. Layers that are
    gathered for an action are gathered at places that depend on the batch. Context parallel ranks have other tokens,
    and so may have other gradients at a time; and a rank without tokens for some experts comes to its next gradients
    before it serves those of other ranks.
    """
    topology, owners, layout = plan.topology, plan.partition.owners, plan.layout
    alone = all(len(topology.connected_replicas(rank)) == 1 for rank in range(layout.size))
    alone &= all(layout.sizes(name).dp == layout.num_replicas for name in layout.modalities)
    gathers = any(one.shared_stage == 3 and one.reshard_after_forward for one in plan.modalities.values())
    return SumTiming(
        early=not gathers and (alone or not topology.edges),
        inside=not plan.experts and all(layout.sizes(name).cp == 1 for name in layout.modalities),
        late=frozenset(name for name in plan.sizes if len({topology.stage_of[key] for key in owners[name]}) > 1),
    )
