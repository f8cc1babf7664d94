"""The tensors among the arguments of a torch function: in dicts, lists and tuples of any depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in `tree`, in their order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    return [tensor for value in tree for tensor in tensors_of(value)]


def replaced(tree: Any, found: Callable[[Any], Any]) -> Any:
    """Return `tree` with what `found` gives for a leaf in its place; None leaves it."""
    if isinstance(tree, dict):
        return {key: replaced(value, found) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        values = [replaced(value, found) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    value = found(tree)
    return tree if value is None else value
