"""Syntax trees of functions, the one way in which this library reads users' code, and the names that they mention.

Questions about code (`order`, `reads`, `passed`) ask for them here. Code is never run. A function without source
(compiled, or made by ``exec``) is not known, and each question says what follows from that.

**Names** are functions that code calls, and attributes and variables that it uses. `reached` yields the code of a
user's step: its own, and that of methods and functions beside it that it names.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any, TypeGuard

from torch import nn


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
    return function_of(next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None))


def next_method(cls: type, function: FunctionType, name: str) -> FunctionType | None:
    """Return what ``super().name`` is in a method of `cls` or of one of its bases; None where it is no function."""
    owners = [index for index, base in enumerate(cls.__mro__) if function in dict(own_functions(base)).values()]
    # the last one has written it: others may have it again, by a wrapper around what they inherit
    later = cls.__mro__[owners[-1] + 1 :] if owners else ()
    return next((function_of(vars(base)[name]) for base in later if name in vars(base)), None)


def is_call_of(node: ast.AST, name: str) -> TypeGuard[ast.Call]:
    """Whether a node calls what stands under a plain name: ``range(...)``."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def is_super(node: ast.AST) -> TypeGuard[ast.Attribute]:
    """Whether a node is an attribute of ``super()``."""
    return isinstance(node, ast.Attribute) and is_call_of(node.value, "super")


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
    definition = tree.body[0] if isinstance(tree, ast.If) else tree
    return definition if isinstance(definition, ast.FunctionDef) else None


def names(function: FunctionType, variables: bool = True) -> frozenset[str] | None:
    """Return the names of attributes, globals and variables in the code of `function`, None where it has no source.

    Args:
        function: its annotations and decorators count.
        variables: whether its arguments and local variables count.
    """
    tree = tree_of(function)
    if tree is None:
        return None
    named = [pair for node in ast.walk(tree) if node is not tree for pair in _named(node)]
    local = frozenset() if variables else {name for name, kind in named if kind == "variable"}
    return frozenset(name for name, kind in named if kind == "attribute" or name not in local)


def closure_of(function: FunctionType) -> dict[str, Any]:
    """Return what the free variables of a function hold, by name; None for those that are not bound yet."""
    values = dict.fromkeys(function.__code__.co_freevars)
    for name, cell in zip(values, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it is empty
            values[name] = cell.cell_contents
    return values


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield compiled code, and that of the functions, lambdas and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def forward_names(cls: type[nn.Module]) -> frozenset[str] | None:
    """Return `names` of the forward of `cls`; none for torch's own layers and for a forward that is not Python code."""
    forward = method_of(cls, "forward")
    return frozenset() if forward is None or _is_torch(cls) else names(forward)


def class_names(cls: type[nn.Module]) -> frozenset[str] | None:
    """Return `names` of all methods of `cls`, and of functions in its module that its forward names.

    None where one of them has no source.
    """
    named = forward_names(cls)
    functions = [function for owner in cls.__mro__ if not _is_torch(owner) for _, function in own_functions(owner)]
    beside = getattr(method_of(cls, "forward"), "__globals__", {})
    called = [function_of(beside.get(name)) for name in named or ()]
    functions += [function for function in called if function is not None and function.__module__ == cls.__module__]
    every = [named, *(names(function) for function in functions)]
    return None if None in every else frozenset().union(*(words for words in every if words is not None))


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
            method = method_of(cls, name) if not hasattr(nn.Module, name) or name == "forward" else None
            waiting += [
                func
                for func in (method, beside)
                if func is not None and func.__module__.partition(".")[0] not in ("torch", "lightning", "transformers")
            ]
