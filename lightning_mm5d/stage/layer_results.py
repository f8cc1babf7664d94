"""What a remote layer returns: a stand-in for its result, in the shape of the real one.

Most layers return a hidden state of the shape that they take, alone or first in a tuple. One probe for each structure
of layers tells, because layers of a list are many and mostly equal. Other layers, which change the shape or return
something else, are computed once on their placeholders for each shape of their input.

What a pass through split layers hands from one stage to the next, and where it is among a layer's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_mm5d.partition.parts import at, hidden_place
from lightning_mm5d.sharded.remote_value import Guard, Origin, RemoteValue, marked
from lightning_mm5d.sharded.tensor import Sharded, from_local
from lightning_mm5d.stage.payload import Path, map_tensors, tensors_in
from lightning_mm5d.stage.remote import ShapeMemory
from lightning_mm5d.stage.taint import mark_stand_in
from lightning_mm5d.stage.view import Received, StageError, StandIn


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


Kind = int | Literal["tensor", "other"]
"""A hidden state alone, first in a tuple of so many entries, or something else."""


class LayerResults:
    """Makes the stand-ins of one modality's layers.

    Args:
        shapes: remembers what layers return.
        guard: of the values that other ranks have.
        quiet: entered around computations that only tell a shape.
        pads: whether a tuple behind the hidden state may be filled with None; else its tensors are stood in for too.
    """

    def __init__(
        self, shapes: ShapeMemory, guard: Guard, quiet: Callable[[], AbstractContextManager], *, pads: bool
    ) -> None:
        self._shapes, self._guard, self._quiet, self._pads = shapes, guard, quiet, pads
        self._kinds: dict[int, Kind] = {}
        self._by_structure: dict[Any, Kind] = {}

    def of(self, layer: nn.Module, original: Callable, args: tuple, kwargs: dict[str, Any], found: StandIn) -> Any:
        """Return the stand-in for ``original(*args, **kwargs)``, the forward of `layer`.

        Args:
            layer: the remote layer.
            original: its own forward.
            args: of the call.
            kwargs: of the call.
            found: its hidden state.
        """
        kind = self._kinds.get(id(layer))
        if kind is None:
            key = _structure(layer)
            if key not in self._by_structure:
                self._by_structure[key] = self._probe(layer, original, args, kwargs, found.hidden)
            kind = self._kinds[id(layer)] = self._by_structure[key]
        origin = Origin(found.origin, self._guard)
        if kind == "other":
            if found.received == "result":
                return found.hidden
            with self._quiet():
                result = self._shapes.placeholder(layer, origin, original, args, kwargs)
            result = map_tensors(result, lambda tensor: _stand_in(tensor, origin, found.is_later))
            if found.received == "first" and isinstance(result, list | tuple):
                return type(result)([found.hidden, *result[1:]])
            return result
        hidden = found.hidden if found.received else _stand_in(found.hidden, origin, found.is_later)
        return hidden if kind == "tensor" else (hidden, *[None] * (int(kind) - 1))

    def _probe(self, layer: nn.Module, original: Callable, args: tuple, kwargs: dict[str, Any], hidden: Any) -> Kind:
        """Run a layer once on its placeholders to see what it returns."""
        try:
            with self._quiet():
                result = self._shapes.computed(layer, original, args, kwargs)
        except Exception as error:  # it needs what stand-ins left out (an earlier layer's bias), or real memory
            kinds = [kind for kind in self._by_structure.values() if kind != "other"]
            if not kinds and not isinstance(error, RuntimeError):
                raise
            return kinds[-1] if kinds else "tensor"
        several = isinstance(result, list | tuple)
        first = result[0] if several and result else result
        if not isinstance(hidden, Tensor) or not isinstance(first, Tensor):
            return "other"
        if several and not (self._pads and all(map(_may_be_none, result[1:]))):
            return "other"
        same = first.shape == hidden.shape and first.is_floating_point() == hidden.is_floating_point()
        return "other" if not same else len(result) if several else "tensor"


def _may_be_none(entry: Any) -> bool:
    """Whether an entry beside the hidden state holds tensors alone; the code after a layer computes with numbers."""
    if isinstance(entry, list | tuple):
        return all(map(_may_be_none, entry))
    return not isinstance(entry, int | float | str)


def _structure(layer: nn.Module) -> Any:
    """A key that is equal for layers of equal modules and parameters."""
    modules = tuple((name, type(module), module.extra_repr()) for name, module in layer.named_modules())
    return modules, tuple((name, parameter.shape) for name, parameter in layer.named_parameters())


def _stand_in(hidden: Tensor, origin: Origin, later: bool) -> Tensor:
    """Return a remote value like `hidden`.

    It carries a gradient, because hooks may be registered on it, and may be written to.
    """
    if isinstance(hidden, Sharded) and hidden.travels_local:
        local = _stand_in(hidden.local, origin, later)
        found: Tensor = from_local(local, hidden.sharded_dim, hidden.lengths, hidden.group)
    elif isinstance(hidden, RemoteValue):
        found = marked(hidden, origin, exact=False)
    else:
        real = hidden.is_floating_point() or hidden.is_complex()
        filler = torch.full((), float("nan") if real else 0, dtype=hidden.dtype, device=hidden.device)
        filler.requires_grad_(real and torch.is_grad_enabled())
        mark_stand_in(filler, later=later)
        found = marked(filler.expand(hidden.shape).clone(), origin)
    mark_stand_in(found, later=later)
    return found
