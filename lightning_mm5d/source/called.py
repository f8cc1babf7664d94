"""Which functions run when a module is called: those that its forward names, also in its own helpers.

Methods of the module and its bases, properties, methods of submodules, functions of the model's own files and autograd
functions are read, too. Submodules that are called are not. An alias or an attribute that holds a function of a library
counts by the name that the library gives it.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Collection
from functools import partial
from inspect import getattr_static
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn
from torch.autograd import Function

from lightning_mm5d.source.trees import Source, decorated, function_of, is_super, next_method, own_functions

PRODUCT = "@"
"""The name of a product of matrices by its operator."""
_PYTHONS = object()  # stands for a function of Python's own
_LIBRARIES = {*sys.stdlib_module_names, "torch", "torchvision", "lightning", "pytorch_lightning", "einops"}


def called(source: Source, module: nn.Module) -> frozenset[str] | None:
    """Return the names of the library functions and tensor methods that a call of `module` may run.

    None where some of the model's own code has no source. Of dotted names the last part is given, ``@`` of a product of
    matrices; Python's own functions are left out.
    """
    reader = _Reader(source)
    for name in ("__call__", "forward"):
        reader.follow(getattr_static(type(module), name, None), module)
    return None if reader.is_hidden else frozenset(reader.found)


def around(source: Source, module: nn.Module, columns: Collection[str], rows: Collection[str]) -> frozenset[str]:
    """Return what `called` does, of the code before the first of some layers and after the last one alone.

    Args:
        source: reads code.
        module: which calls the layers.
        columns: names of layers that take its input; code before them is left out where there are none.
        rows: names of those that make its result; code after them is left out where there are none.
    """
    reader, function = _Reader(source), function_of(getattr_static(type(module), "forward", None))
    while function is not None and _is_read(function, is_method=True) and (tree := source.tree(function)) is not None:
        own = tree.args.args[0].arg if tree.args.args else None
        place, nodes = _Place(function, module, own), [*ast.walk(tree)]
        uses = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr in {*columns, *rows}]
        uses = [node for node in uses if isinstance(node.value, ast.Name) and node.value.id == own]
        simple = [node for node in nodes if isinstance(node, ast.stmt) and not _has_statements(node)]
        first = min((node.lineno for node in uses), default=None)
        last = max((node.end_lineno or node.lineno for node in uses), default=None)
        for statement in simple:
            is_before = first is None or ((statement.end_lineno or first) < first and bool(columns))
            is_after = last is not None and statement.lineno > last and bool(rows)
            inputs = [] if is_before or is_after else _inputs(statement, own, columns)
            for node in ast.walk(statement) if is_before or is_after else inputs:
                if not is_super(node):
                    reader.visit(node, place)
        if uses:
            break
        function = next_method(type(module), function, "forward")
    return frozenset(reader.found)


def _has_statements(node: ast.AST) -> bool:
    return any(isinstance(child, ast.stmt) for child in ast.iter_child_nodes(node))


def _inputs(statement: ast.stmt, own: str | None, names: Collection[str]) -> list[ast.AST]:
    """The code within a statement that makes the arguments of calls of ``self.name``."""
    found: list[ast.AST] = []
    for call in ast.walk(statement):
        way = call.func if isinstance(call, ast.Call) else None
        if not isinstance(call, ast.Call) or not isinstance(way, ast.Attribute) or way.attr not in names:
            continue
        if isinstance(way.value, ast.Name) and way.value.id == own:
            found += [node for argument in call.args for node in ast.walk(argument)]
    return found


class _Place(NamedTuple):
    """A function that is read, the module whose method it is, and the name that this has there."""

    function: Any  # a FunctionType, which typing would bind as a method here
    module: nn.Module | None
    own: str | None


class _Method(NamedTuple):
    """What a module has under a name: a function, ``staticmethod`` or property."""

    written: Any
    module: nn.Module | None


class _Reader:
    def __init__(self, source: Source) -> None:
        self._source = source
        self._seen: set[tuple[FunctionType, int]] = set()
        self.found: set[str] = set()
        self.is_hidden = False

    def follow(self, written: Any, module: nn.Module | None) -> None:
        """Read a function of the model with its decorators; `module` is its first argument where it is a method."""
        module = None if isinstance(written, staticmethod) else module
        for function in decorated(getattr(written, "__func__", written)):
            if (function, id(module)) in self._seen or not _is_read(function, is_method=module is not None):
                continue
            self._seen.add((function, id(module)))
            tree = self._source.tree(function)
            if tree is None:
                self.is_hidden = True
                continue
            arguments = [*tree.args.posonlyargs, *tree.args.args]
            place = _Place(function, module, arguments[0].arg if arguments and module is not None else None)
            for statement in tree.body:
                for node in ast.walk(statement):
                    self.visit(node, place)

    def visit(self, node: ast.AST, place: _Place) -> None:
        if isinstance(node, ast.MatMult):
            self.found.add(PRODUCT)
        elif isinstance(node, ast.Attribute) and is_super(node) and place.module is not None:
            self.follow(next_method(type(place.module), place.function, node.attr), place.module)
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Load):
            self._take(_value(node, place), place)
        if isinstance(node, ast.Call) and _value(node.func, place) is None and not is_super(node.func):
            if isinstance(node.func, ast.Attribute):
                self.found.add(node.func.attr)
            elif isinstance(node.func, ast.Name):
                self.found.add(node.func.id)

    def _take(self, value: Any, place: _Place) -> None:
        """Read a function of the model, and note the name of a library's; either may be called under another name."""
        module = None
        while isinstance(value, partial):
            value = value.func
        if isinstance(value, _Method):
            value, module = value
        elif isinstance(value, type) and issubclass(value, Function):
            value = getattr_static(value, "forward")
        function = function_of(value)
        if module is None and function in _methods(place.module):  # by its class, or by a decorator that holds it
            module = place.module
        if function is not None and _is_read(function, is_method=module is not None):
            self.follow(value, module)
        elif callable(value) and not isinstance(value, (type, nn.Module)):
            self.found.add(getattr(value, "__name__", ""))


def _value(node: ast.AST, place: _Place) -> Any:
    """What a dotted name stands for, None where code alone does not tell."""
    if isinstance(node, ast.Name):
        return _named(node.id, place)
    owner = _value(node.value, place) if isinstance(node, ast.Attribute) else None
    if not isinstance(node, ast.Attribute) or owner is None:
        return None
    if isinstance(owner, nn.Module):
        held = {**vars(owner), **owner._modules}.get(node.attr)
        if held is not None or (node.attr == "forward" and owner is not place.module):  # it is read by itself
            return owner if held is None else held
        written = getattr_static(type(owner), node.attr, None)
        written = getattr(written, "fget", getattr(written, "func", written))
        return None if function_of(written) is None else _Method(written, owner)
    return getattr(owner, node.attr, None) if isinstance(owner, (ModuleType, type)) else None


def _named(name: str, place: _Place) -> Any:
    if name == place.own:
        return place.module
    code, cells = place.function.__code__, place.function.__closure__ or ()
    if name in code.co_varnames or name in code.co_cellvars:
        return None
    if name in code.co_freevars:
        try:
            return cells[code.co_freevars.index(name)].cell_contents
        except ValueError:  # not bound yet
            return None
    found = place.function.__globals__.get(name)
    return _PYTHONS if found is None and hasattr(builtins, name) else found


def _methods(module: nn.Module | None) -> set[FunctionType]:
    return {function for owner in type(module).__mro__ for _, function in own_functions(owner)}


def _is_read(function: FunctionType, *, is_method: bool) -> bool:
    """Whether a function is the model's; transformers' shared files are read for methods alone."""
    name = str(function.__globals__.get("__name__", ""))
    is_shared = name.startswith("transformers.") and not name.startswith("transformers.models.")
    return name.partition(".")[0] not in _LIBRARIES and (is_method or not is_shared)
