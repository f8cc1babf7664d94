"""Which names the code of modules mentions: functions that it calls, attributes and variables that it uses.

The code of a user's step: its own, and that of methods and functions beside it that it names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from types import FunctionType

from torch import nn

from lightning_mm5d.source.trees import function_of, method_of, own_functions, tree_of


def names(function: FunctionType, variables: bool = True) -> frozenset[str] | None:
    """Return the names of attributes, globals and variables in the code of `function`, None where it has no source.

    Args:
        function: its annotations and decorators count.
        variables: whether its arguments and local variables count.
    """
    tree = tree_of(function)
    if tree is None:
        return None
    named = [one for node in ast.walk(tree) if node is not tree for one in _named(node)]
    local = frozenset() if variables else {name for name, kind in named if kind == "variable"}
    return frozenset(name for name, kind in named if kind == "attribute" or name not in local)


def forward_names(cls: type[nn.Module]) -> frozenset[str] | None:
    """Return `names` of the forward of `cls`; none for torch's own layers and for a forward that is not Python code."""
    forward = method_of(cls, "forward")
    return frozenset() if forward is None or _is_torch(cls) else names(forward)


def class_names(cls: type[nn.Module]) -> frozenset[str] | None:
    """Return `names` of all methods of `cls`, and of functions in its module that its forward names.

    None where one of them has no source.
    """
    found = forward_names(cls)
    functions = [one for owner in cls.__mro__ if not _is_torch(owner) for _, one in own_functions(owner)]
    beside = getattr(method_of(cls, "forward"), "__globals__", {})
    called = [function_of(beside.get(name)) for name in found or ()]
    functions += [one for one in called if one is not None and one.__module__ == cls.__module__]
    every = [found, *(names(function) for function in functions)]
    return None if None in every else frozenset().union(*(one for one in every if one is not None))


def mentions(cls: type, words: list[str]) -> bool:
    """Whether methods that `cls` itself defines, except for its constructor, contain one of `words`, also in strings.

    True where a method has no source.
    """
    for name, function in own_functions(cls):
        if name == "__init__":
            continue
        tree = tree_of(function)
        if tree is None or any(word in words for node in ast.walk(tree) if node is not tree for word in _words(node)):
            return True
    return False


def _is_torch(cls: type) -> bool:
    return cls.__module__.startswith("torch.nn")


def _named(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield each name that a node has, and its kind."""
    if isinstance(node, ast.Name):
        yield node.id, "variable" if isinstance(node.ctx, ast.Store) else "read"
    elif isinstance(node, ast.Attribute):
        yield node.attr, "attribute"
    elif isinstance(node, ast.arg):
        yield node.arg, "variable"
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name, "variable"
    elif isinstance(node, ast.alias):
        yield node.asname or node.name, "variable" if node.asname else "read"


def _words(node: ast.AST) -> Iterator[str]:
    yield from (name for name, _ in _named(node))
    if isinstance(node, ast.keyword) and node.arg is not None:
        yield node.arg
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from re.findall(r"\w+", node.value)


def reached(cls: type, step: str) -> Iterator[FunctionType]:
    """Yield the code of `step`, and the methods and functions beside it that it names, directly or through others."""
    first = method_of(cls, step)
    waiting, known = [first] if first is not None else [], set[FunctionType]()
    while waiting:
        function = waiting.pop()
        if function in known:
            continue
        known.add(function)
        yield function
        for name in names(function) or ():
            beside = function_of(function.__globals__.get(name))
            own = method_of(cls, name) if not hasattr(nn.Module, name) or name == "forward" else None
            waiting += [
                one
                for one in (own, beside)
                if one is not None and one.__module__.partition(".")[0] not in ("torch", "lightning", "transformers")
            ]
