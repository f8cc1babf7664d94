"""Syntax trees of functions: the one way in which this library reads users' code.

Questions about code (`order`, `reads`, `names`) ask for them here. Code is never run. A function without source
(compiled, or made by ``exec``) is not known, and each question says what follows from that.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any


def function_of(value: object) -> FunctionType | None:
    """Return the function under decorators, ``staticmethod`` or ``classmethod``; None for anything else."""
    try:
        function = inspect.unwrap(getattr(value, "__func__", value))  # type: ignore[arg-type]
    except ValueError:  # it wraps itself
        return None
    return function if inspect.isfunction(function) else None


def decorated(function: Any) -> Iterator[FunctionType]:
    """Yield what is called in turn: the decorators' functions around `function`, and what it is without them."""
    inner = function_of(function)
    while inspect.isfunction(function):
        yield function
        function = None if function is inner else getattr(function, "__wrapped__", None)


def method_of(cls: type, name: str) -> FunctionType | None:
    """Return the method that instances of `cls` have, as `function_of` does; None where there is none."""
    return function_of(inspect.getattr_static(cls, name, None))


def next_method(cls: type, function: FunctionType, name: str) -> FunctionType | None:
    """Return what ``super().name`` is in a method of `cls` or of one of its bases; None where it is no function."""
    owners = [index for index, one in enumerate(cls.__mro__) if function in dict(own_functions(one)).values()]
    # the last one has written it: others may have it again, by a wrapper around what they inherit
    later = cls.__mro__[owners[-1] + 1 :] if owners else ()
    return next((function_of(vars(one)[name]) for one in later if name in vars(one)), None)


def is_super(node: ast.AST) -> bool:
    """Whether a node is an attribute of ``super()``."""
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "super"
    )


def own_functions(cls: type) -> Iterator[tuple[str, FunctionType]]:
    """Yield the names and functions of the methods that `cls` itself defines; properties are none."""
    for name, value in vars(cls).items():
        if (function := function_of(value)) is not None:
            yield name, function


def tree_of(function: FunctionType) -> ast.FunctionDef | None:
    """Return the syntax tree of `function`, None where it has no source of its own (also for a ``lambda``).

    Each function is parsed once in a process.
    """
    key = function.__code__.co_filename, function.__code__  # equal code may stand in several files
    if key not in _TREES:
        _TREES[key] = _parsed(function)
    return _TREES[key]


_TREES: dict[tuple[str, CodeType], ast.FunctionDef | None] = {}
"""What each code object was written as, which stays: each plan asks again, and parsing takes milliseconds."""


def _parsed(function: FunctionType) -> ast.FunctionDef | None:
    # of a decorator's function `inspect` would return what it wraps
    code = function.__code__ if hasattr(function, "__wrapped__") else function
    try:
        text = inspect.getsource(code)
        # not by `dedent`, which fails where a docstring has lines without indent
        tree = ast.parse(f"if 1:\n{text}" if text[:1].isspace() else text).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    found = tree.body[0] if isinstance(tree, ast.If) else tree
    return found if isinstance(found, ast.FunctionDef) else None
