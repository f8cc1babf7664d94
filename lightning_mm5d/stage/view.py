"""One stage as its rank sees it, and the ways in which the user's step leaves it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_mm5d.partition import Partition, StageCut
from lightning_mm5d.schedule.graph import StageKey

Received = Literal["result", "first"] | None


class Stop(BaseException):
    """Ends the user's step where the stage ends; no `except Exception` on the way catches it."""


class StageError(ValueError):
    """The user's step does something that a step split over stages cannot do."""


class GraphEndError(RuntimeError):
    """A gradient goes back to what no backward of another stage takes it from."""


@dataclass(frozen=True)
class StandIn:
    """What the result of a remote layer is made of.

    Attributes:
        hidden: the hidden state that the layer was called with, or what was received of its result.
        origin: path of the layer.
        received: which part of its result was received: all of it, the first entry of a tuple, or nothing.
        is_later: whether a later stage computes the layer, in place of an earlier one.
    """

    hidden: Any
    origin: str
    received: Received = None
    is_later: bool = False


@dataclass(frozen=True, eq=False)
class StageView:
    """One stage as its rank sees it.

    Attributes:
        name: key of the stage.
        cuts: the layers that it holds, by modality (several where modalities run as one).
        consumes: the encoders whose results it is sent.
        must_use: those of them that no later stage is sent.
        is_last: whether the step runs to its end here.
        stops_at: modalities before whose layers everything is made that it computes.
    """

    name: StageKey
    cuts: Mapping[str, StageCut]
    consumes: frozenset[str]
    must_use: frozenset[str]
    is_last: bool
    stops_at: frozenset[str]


def views(
    partition: Partition,
    members: Mapping[StageKey, Sequence[StageKey]],
    consumes: Mapping[StageKey, frozenset[str]],
    consumers: Mapping[str, Iterable[str]],
) -> dict[StageKey, StageView]:
    """Return a `StageView` for each stage.

    Args:
        partition: what is cut where.
        members: for each stage, the partition's stages that run as this one.
        consumes: for each stage, the encoders whose results it is sent.
        consumers: for each modality but the last, those that it feeds.
    """

    def precedes(name: str) -> set[str]:
        if name not in partition.encoders or not partition.encoders[name].precedes:
            return set()
        return {*consumers[name]}.union(*map(precedes, consumers[name]))

    cuts = {cut.name: cut for stages in partition.stages.values() for cut in stages}
    last = partition.stages[partition.loss_modality][-1].name
    final = {encoder: key for key in members for encoder in consumes.get(key, ())}  # stages stand in their order
    stage_views = {}
    for key, names in members.items():
        held = {cuts[name].modality: cuts[name] for name in names}
        stage_views[key] = StageView(
            name=key,
            cuts=held,
            consumes=consumes.get(key, frozenset()),
            must_use=frozenset(encoder for encoder, last_key in final.items() if last_key == key),
            is_last=last in names,
            stops_at=frozenset(set.intersection(*map(precedes, held)) - set(held)),
        )
    return stage_views
