"""What a pass through split layers hands from one stage to the next, and where it is among a layer's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_mm5d.partition.hidden_state import at, hidden_place
from lightning_mm5d.stage.payload import Path, tensors_in
from lightning_mm5d.stage.view import Received, StageError


@dataclass
class LayerCall:
    """One pass through a list of layers, as it leaves a stage.

    Attributes:
        hidden: the hidden state at the entry of the first layer after the stage: a tensor, or a tree of tensors.
        skip_inputs: other arguments of later layers, by (layer, path in ``(args, kwargs)``): tensors, and entries of
            dicts that layers share states in.
        returned: where the hidden state is in the result of the stage's last layer; None where code made it from that.
    """

    hidden: Any
    skip_inputs: dict[tuple[int, Path], Any]
    returned: Received


def hidden_path(args: tuple, kwargs: Mapping[str, Any]) -> Path:
    """Return where in ``(args, kwargs)`` the hidden state is: a tensor, else the first tuple or dict of tensors."""
    place: Path | None = hidden_place(args, kwargs)
    if place is None:
        place = next((path[:2] for path, _ in tensors_in((args, kwargs))), None)
    if place is None:
        raise StageError("a layer that is split over stages takes no tensor")
    return place


def hidden_of(args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Return the hidden state among a layer's arguments."""
    return at(hidden_path(args, kwargs), args, kwargs)  # type: ignore[arg-type]


def place_in(result: Any, hidden: Any) -> Received:
    if hidden is result:
        return "result"
    return "first" if isinstance(result, (tuple, list)) and result and hidden is result[0] else None
