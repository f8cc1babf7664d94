"""How numbers of each kind travel: what a feature makes of what modalities say, and what follows for a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from lightning_mm5d.config.features import parts
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.collectives import Encoding

Kind = Literal["gradients", "parameters", "payloads", "tensor_parallel"]


def encoding_of(modality: Modality, kind: Kind) -> Encoding | None:
    """Return how a modality's traffic of one kind is encoded; None sends tensors as they are."""
    every = (module.encoding_of(modality, kind) for module in parts("encoding"))
    return next((one for one in every if one is not None), None)


class Traffic(NamedTuple):
    """How what ranks send of a parameter is encoded; None sends it as it is.

    Attributes:
        gradients: in sums.
        parameters: in the gather of rows.
        is_apart: whether it shares no block of numbers with parameters of which `is_apart` is False. Tensor parallel
            ranks hold what they do not shard in full, and sum and gather their copies each by itself. These must stay
            equal to the bit, although beside them in a message each of these ranks has shards of its own.
    """

    gradients: Encoding | None = None
    parameters: Encoding | None = None
    is_apart: bool = False

    @property
    def key(self) -> tuple[str, str, bool]:
        """Equal for parameters that may share a message."""
        return str(self.gradients), str(self.parameters), self.is_apart


def traffic_of(plan: Plan, name: str, ranks: Sequence[int], dtype: torch.dtype) -> Traffic:
    """Return how what `ranks` send each other of a parameter is encoded.

    Modalities that share a parameter and do not say the same of it send it as it is.

    Args:
        plan: all stages.
        name: of the parameter.
        ranks: that sum its gradients.
        dtype: of the parameter.
    """
    stages = dict.fromkeys(plan.topology.stage_of[owner] for owner in plan.partition.owners[name])
    modalities = [plan.modalities[modality] for modality in dict.fromkeys(stage.modality for stage in stages)]

    def of(kind: Kind) -> Encoding | None:
        found = {encoding_of(modality, kind) for modality in modalities}
        one = found.pop() if len(found) == 1 else None
        return one if one is not None and one.changes(dtype) else None

    gradients, parameters = of("gradients"), of("parameters")
    copied = name not in plan.division.shards and set(plan.ownership.ranks_holding(name)) != set(ranks)
    return Traffic(gradients, parameters, copied and (gradients or parameters) is not None)
