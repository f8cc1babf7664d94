"""Where the hidden state is among what a layer is called with.

Layers of all families take it first, or by one of two names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

Place = tuple[int, int | str]  # 0 and a position among args, or 1 and a name among kwargs
_NAMES = ("hidden_states", "hidden_state")


def hidden_place(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Place | None:
    """Return where in ``(args, kwargs)`` the hidden state is: what is called so, else the first tensor.

    None where there is no tensor.
    """
    for name in _NAMES:
        if isinstance(kwargs.get(name), Tensor):
            return (1, name)
    for index, value in enumerate(args):
        if isinstance(value, Tensor):
            return (0, index)
    return next(((1, name) for name, value in kwargs.items() if isinstance(value, Tensor)), None)


def at(place: Place, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what is at `place`."""
    where, key = place
    return kwargs[key] if where else args[key]  # type: ignore[index]


def with_state(place: Place, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments with `state` at `place`."""
    where, key = place
    if where:
        return args, {**kwargs, str(key): state}
    assert isinstance(key, int)
    return (*args[:key], state, *args[key + 1 :]), kwargs
