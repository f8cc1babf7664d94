"""Puts a value in front of an attribute of one object, and takes it away again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def put(owner: object, name: str, value: Any) -> Callable[[], None]:
    """Let `owner` have `value` under `name`, in front of what its class or itself has there.

    Returns:
        What leaves the owner as it was. Of several on one attribute, the last is taken away first.
    """
    attributes = vars(owner)
    had, before = name in attributes, attributes.get(name)
    attributes[name] = value

    def take_away() -> None:
        if had:
            attributes[name] = before
        else:
            attributes.pop(name, None)

    return take_away
