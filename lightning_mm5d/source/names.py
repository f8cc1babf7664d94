"""Which names the code of modules mentions: functions that it calls, attributes and variables that it uses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from types import FunctionType

from torch import nn

from lightning_mm5d.source.trees import Source, function_of, method_of, own_functions


def names(source: Source, function: FunctionType, variables: bool = True) -> frozenset[str] | None:
    """Return the names of attributes, globals and variables in the body of `function`, None where it has no source.

    Args:
        source: reads the function.
        function: its annotations, defaults and decorators do not count.
        variables: whether its arguments and local variables count.
    """
    tree = source.tree(function)
    if tree is None:
        return None
    nodes = [*_evaluated(tree.args), *(node for statement in tree.body for node in _evaluated(statement))]
    named = [(name, is_variable) for node in nodes for name, is_variable in _named(node)]
    local = {name for name, is_variable in named if is_variable}
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return frozenset(name for name, _ in named if variables or name in attributes or name not in local)


def forward_names(source: Source, cls: type[nn.Module]) -> frozenset[str] | None:
    """Return `names` of the forward of `cls`; none for torch's own layers and for a forward that is not Python code."""
    forward = method_of(cls, "forward")
    return frozenset() if forward is None or _is_torch(cls) else names(source, forward)


def class_names(source: Source, cls: type[nn.Module]) -> frozenset[str] | None:
    """Return `names` of all methods of `cls`, and of functions in its module that its forward names.

    None where one of them has no source.
    """
    found = forward_names(source, cls)
    functions = [one for owner in cls.__mro__ if not _is_torch(owner) for _, one in own_functions(owner)]
    beside = getattr(method_of(cls, "forward"), "__globals__", {})
    called = [function_of(beside.get(name)) for name in found or ()]
    functions += [one for one in called if one is not None and one.__module__ == cls.__module__]
    every = [found, *(names(source, function) for function in functions)]
    return None if None in every else frozenset().union(*(one for one in every if one is not None))


def mentions(source: Source, cls: type, words: list[str]) -> bool:
    """Whether methods that `cls` itself defines, except for its constructor, contain one of `words`, also in strings.

    True where a method has no source.
    """
    for name, function in own_functions(cls):
        if name == "__init__":
            continue
        tree = source.tree(function)
        if tree is None or any(word in words for node in ast.walk(tree) for word in _words(node, tree)):
            return True
    return False


def _is_torch(cls: type) -> bool:
    return cls.__module__.startswith("torch.nn")


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Walk what runs when a function does: no annotations, and of its own arguments no defaults."""
    yield node
    if isinstance(node, ast.arguments):
        children: list[ast.AST] = [*node.posonlyargs, *node.args, *node.kwonlyargs]
        children += [one for one in (node.vararg, node.kwarg) if one is not None]
    elif isinstance(node, ast.arg):
        children = []
    elif isinstance(node, ast.AnnAssign):
        children = [node.target, *([] if node.value is None else [node.value])]
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        defaults = [one for one in (*node.args.defaults, *node.args.kw_defaults) if one is not None]
        body = [node.body] if isinstance(node, ast.Lambda) else [*node.body, *node.decorator_list]
        children = [node.args, *defaults, *body]
    else:
        children = list(ast.iter_child_nodes(node))
    for child in children:
        yield from _evaluated(child)


def _named(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield each name that a node has, and whether a local variable may be called so."""
    if isinstance(node, ast.Name):
        yield node.id, isinstance(node.ctx, ast.Store)
    elif isinstance(node, ast.Attribute):
        yield node.attr, False
    elif isinstance(node, ast.arg):
        yield node.arg, True
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name, True
    elif isinstance(node, ast.alias):
        yield node.name, False
        if node.asname:
            yield node.asname, True


def _words(node: ast.AST, tree: ast.FunctionDef) -> Iterator[str]:
    if node is tree:
        return
    yield from (name for name, _ in _named(node))
    if isinstance(node, ast.keyword) and node.arg is not None:
        yield node.arg
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from re.findall(r"\w+", node.value)
