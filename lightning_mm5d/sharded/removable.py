"""What stands before callables and attributes of objects that are others' own, until it is removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from types import MethodType
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


@contextmanager
def meanwhile(owner: object, **values: Any) -> Iterator[None]:
    """Let attributes of `owner` have these values until the end of the context, and then those from before.

    Of several contexts on one attribute, the last must end first.
    """
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


class Removable:
    """Base of what changes objects of others, until `remove`."""

    @cached_property
    def changes(self) -> ExitStack:
        """What takes each change back; `remove` calls the last one first."""
        return ExitStack()

    def put_attribute(self, owner: object, name: str, value: Any) -> None:
        """Let `owner` have `value` under `name` until `remove`."""
        self.changes.callback(put(owner, name, value))

    def put_forward(self, module: object, forward: Callable[..., Any]) -> None:
        """Let `module` compute by `forward` until `remove`; a copy of the module does so with its own weights."""
        self.put_attribute(module, "forward", MethodType(forward, module))

    def remove(self) -> None:
        """Leave all objects as they were."""
        self.changes.close()
