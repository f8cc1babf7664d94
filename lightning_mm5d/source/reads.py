"""What the code of a module's class reads: which numbers, which widths, and what happens between two of its layers.

A sharded module computes on this rank's heads and width, while its code may say ``self.embed_dim`` or take the width of
its input. The syntax tree of the class tells, so that a rule by names shards a module only where that is right. A class
without source is not known, and is not sharded.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from lightning_mm5d.source.trees import own_functions, tree_of

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "num_query_heads", "n_local_heads")
HEAD_WIDTHS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "dim_head", "d_head", "d_kv")
_NOT_READ = ("torch.", "transformers.modeling_layers", "transformers.modeling_utils")
_HANDLES = ("init", "tie", "resize", "save", "load", "prune", "optim", "param")
_SHAPES = ("reshape", "view", "unflatten")


@dataclass(frozen=True)
class Reads:
    """What the methods of a class read outside of its constructor.

    Attributes:
        attributes: names read from ``self``.
        config: names read from ``self.config``.
        calls: names of the functions and methods that are called, the last part of dotted ones.
        input_widths: whether a method uses the last dim of one of its arguments, which may be full or sharded.
        fused: how a fused projection is taken apart, where the code says it: ``"heads"`` for all queries, then keys,
            then values; ``"groups"`` for the query, key and value of each head together.
        arguments: names of the arguments of ``forward``.
        numbers: whole numbers that the code writes itself, in shapes or under names of its own or of its file.
    """

    attributes: frozenset[str]
    config: frozenset[str]
    calls: frozenset[str]
    input_widths: bool
    fused: Literal["heads", "groups"] | None
    arguments: tuple[str, ...]
    numbers: frozenset[int]


@dataclass(frozen=True)
class Between:
    """What a method does from the statement with a first layer to the one with a last: names as in `Reads`."""

    attributes: frozenset[str]
    calls: frozenset[str]
    slices: bool
    """Whether values are cut, as in ``x[..., ::2]``, or multiplied as matrices."""


def reads(cls: type[nn.Module]) -> Reads | None:
    """Return what the code of `cls` reads, None where some of it has no source."""
    named = list(_methods(cls))
    methods = [method for _, method in named if method is not None]
    forward = next((method.args for name, method in named if name == "forward" and method is not None), None)
    if forward is None or len(methods) < len(named):
        return None
    nodes = [node for method in methods for node in _body(method)]
    self_attributes = [node for node in nodes if isinstance(node, ast.Attribute) and _is_self(node.value)]
    config = [
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value in self_attributes
        if node.value.attr == "config"
    ]
    return Reads(
        attributes=frozenset(node.attr for node in self_attributes),
        config=frozenset(config),
        calls=frozenset(_called(nodes)),
        input_widths=any(map(_uses_input_width, methods)),
        fused=next(filter(None, map(_fused, nodes)), None),
        arguments=tuple(argument.arg for argument in (*forward.args[1:], *forward.kwonlyargs)),
        numbers=frozenset(number for _, function in _functions(cls) for number in _numbers(function)),
    )


def between(cls: type[nn.Module], first: tuple[str, ...], last: str) -> Between | None:
    """Return what happens between the attributes `first` and `last` of `cls`, None where no one method has them all."""
    methods = [method for _, method in _methods(cls)]
    for method in methods if None not in methods else ():
        assert method is not None
        statements = [node for node in ast.walk(method) if isinstance(node, ast.stmt) and _is_simple(node)]
        places = {name: [s for s in statements if _mentions(s, name)] for name in (*first, last)}
        if not all(places.values()):
            continue
        start = min(s.lineno for name in first for s in places[name])
        stop = max(s.end_lineno or s.lineno for s in places[last])
        for name in first:
            for s in places[name]:
                if s.lineno > min(t.lineno for t in places[last]) or (s in places[last] and not _feeds(s, name, last)):
                    return None
        nodes = [node for s in statements if start <= s.lineno and (s.end_lineno or 0) <= stop for node in ast.walk(s)]
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute) and _is_self(node.value)}
        slices = any(isinstance(node, (ast.Slice, ast.MatMult)) for node in nodes)
        return Between(frozenset(names), frozenset(_called(nodes)), slices)
    return None


def weights_read(cls: type[nn.Module]) -> frozenset[str]:
    """Return the names of parts whose weights the code of `cls` takes as values: ``head`` for ``self.head.weight``.

    What looks at a weight's dtype or device only, or handles parameters (ties, initializes or saves them, or gives them
    to an optimizer), does not count.
    """
    parts: set[str] = set()
    for name, function in _functions(cls):
        if not is_handling(name):
            parts |= _taken(function).parts
    return frozenset(parts)


def is_handling(name: str) -> bool:
    """Whether a method of this name handles parameters: ties, initializes or saves them, or builds an optimizer."""
    return any(word in name for word in _HANDLES)


class _Taken(NamedTuple):
    """The names in a function, None of one without and the parts whose weights it takes as values."""

    names: frozenset[str] | None
    parts: frozenset[str]


# every plan asks this of all methods of a model's classes, hundreds of them
_TAKEN = WeakKeyDictionary[FunctionType, _Taken]()


def _taken(function: FunctionType) -> _Taken:
    known = _TAKEN.get(function)
    if known is None:
        tree = tree_of(function)
        known = _TAKEN[function] = _Taken(None, frozenset()) if tree is None else _Taken(_names(tree), _parts(tree))
    return known


def _parts(method: ast.FunctionDef) -> frozenset[str]:
    nodes = list(_body(method))
    harmless = {
        id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr in ("dtype", "device")
    }
    parts: set[str] = set()
    for node in nodes:
        is_read = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in harmless
        if isinstance(node, ast.Attribute) and node.attr == "weight" and is_read:
            holder = node.value.func if isinstance(node.value, ast.Call) else node.value
            if isinstance(holder, ast.Attribute):
                parts.add(holder.attr)
    return frozenset(parts)


def _methods(cls: type[nn.Module]) -> Iterator[tuple[str, ast.FunctionDef | None]]:
    """Yield the names and trees of the methods as `_functions` does; None for the tree of one without source."""
    for name, function in _functions(cls):
        tree = tree_of(function)
        yield name, None if tree is None else _by_self(tree)


def _by_self(method: ast.FunctionDef) -> ast.FunctionDef:
    """Return a method that calls its object ``self``, whatever name its author gave it."""
    named = [*method.args.posonlyargs, *method.args.args][:1]
    is_bound = not any(ast.unparse(node) in ("staticmethod", "classmethod") for node in method.decorator_list)
    if not named or named[0].arg == "self" or not is_bound:
        return method
    self_name, method = named[0].arg, copy.deepcopy(method)  # trees are those of everybody who asks
    for node in ast.walk(method):
        if isinstance(node, ast.Name) and node.id == self_name:
            node.id = "self"
        elif isinstance(node, ast.arg) and node.arg == self_name:
            node.arg = "self"
    return method


def _functions(cls: type[nn.Module]) -> Iterator[tuple[str, FunctionType]]:
    """Yield the methods by name, but constructors, those of torch, and overridden ones that nothing calls."""
    bases = {"super", *(owner.__name__ for owner in cls.__mro__)}
    skipped = {"__init__", "__init_subclass__"}
    for owner in cls.__mro__:
        if owner is object or f"{owner.__module__}.".startswith(_NOT_READ):
            continue
        for name, function in own_functions(owner):
            if name in skipped:
                continue
            yield name, function
            named = _taken(function).names
            if named is not None and not named & bases:
                skipped.add(name)


def _names(method: ast.FunctionDef) -> frozenset[str]:
    return frozenset(node.id for node in ast.walk(method) if isinstance(node, ast.Name))


def _body(method: ast.FunctionDef) -> Iterator[ast.AST]:
    for statement in method.body:
        yield from ast.walk(statement)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_simple(node: ast.stmt) -> bool:
    return not any(isinstance(child, ast.stmt) for child in ast.iter_child_nodes(node))


def _mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(n, ast.Attribute) and n.attr == name and _is_self(n.value) for n in ast.walk(node))


def _feeds(statement: ast.stmt, first: str, last: str) -> bool:
    """Whether within a statement what `first` gives is part of what `last` is called with."""
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call) and _mentions(node.func, last)]
    return any(_mentions(argument, first) for call in calls for argument in call.args)


def _called(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                yield node.func.attr
            elif isinstance(node.func, ast.Name):
                yield node.func.id


def _numbers(function: FunctionType) -> Iterator[int]:
    """Whole numbers that a method writes in a shape, gives a name of its own, or reads under a name of its file."""
    tree = tree_of(function)
    for node in _body(tree) if tree is not None else ():
        written: list[ast.expr] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SHAPES:
            written = node.args[node.func.attr == "unflatten" :]  # the first one is a dim
        elif isinstance(node, ast.Assign):
            written = [node.value]
        elif isinstance(node, ast.Name) and type(value := function.__globals__.get(node.id)) is int:
            yield value
        for part in written:
            parts = part.elts if isinstance(part, ast.Tuple | ast.List) else [part]
            yield from (expr.value for expr in parts if isinstance(expr, ast.Constant) and type(expr.value) is int)


def _fused(node: ast.AST) -> Literal["heads", "groups"] | None:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SHAPES):
        return None
    groups = [argument.elts if isinstance(argument, ast.Tuple) else [argument] for argument in node.args]
    kinds = [_kind(size) for group in groups for size in group]
    for at in range(len(kinds)):
        here = kinds[at : at + 3]
        if here[:2] == ["3", "heads"] or here == ["3", "-1", "width"]:
            return "heads"
        if here[:2] == ["heads", "3"] or here == ["-1", "3", "width"]:
            return "groups"
    return None


def _kind(node: ast.AST) -> str:
    name = node.attr if isinstance(node, ast.Attribute) and _is_self(node.value) else ""
    return "heads" if name in HEADS else "width" if name in HEAD_WIDTHS else ast.unparse(node)


def _uses_input_width(method: ast.FunctionDef) -> bool:
    arguments = {argument.arg for argument in (*method.args.args, *method.args.kwonlyargs)}
    nodes = list(_body(method))
    widths: set[str] = set()
    shapes: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Assign) and _is_shape(node.value, arguments):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(target.elts[-1], ast.Name):
                    widths.add(target.elts[-1].id)
                elif isinstance(target, ast.Name):
                    shapes.add(target.id)
        if isinstance(node, ast.Call) and _is_shape(node, arguments) and node.args and _is_last(node.args[0]):
            return True
        if isinstance(node, ast.Subscript) and _is_last(node.slice):
            whole = isinstance(node.value, ast.Name) and node.value.id in shapes
            if whole or _is_shape(node.value, arguments):
                return True
    indexed = {id(node.value) for node in nodes if isinstance(node, ast.Subscript)}
    return any(
        isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Load)
        and (node.id in widths or (node.id in shapes and id(node) not in indexed))
        for node in nodes
    )


def _is_shape(node: ast.AST, arguments: set[str]) -> bool:
    """Whether a node is ``x.shape`` or ``x.size(...)`` of an argument."""
    node, name = (node.func, "size") if isinstance(node, ast.Call) else (node, "shape")
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id in arguments - {"self"}
    )


def _is_last(node: ast.AST) -> bool:
    return ast.unparse(node) == "-1"
