"""Which functions run when a module is called: those that its forward names, also in its own helpers.

Methods of the module and its bases, properties, methods of submodules, functions of the model's own files and autograd
functions are read, too. Submodules that are called are not. An alias or an attribute that holds a function of a library
counts by the name that the library gives it.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from inspect import getattr_static
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn
from torch.autograd import Function

from lightning_mm5d.source.trees import decorated, function_of, is_super, next_method, own_functions, tree_of

PRODUCT = "@"
"""The name of a product of matrices by its operator."""
_PYTHONS = object()  # stands for a function of Python's own
_OF_NUMBERS = {"math", "numpy", "functools", "_functools"}  # whose functions compute with sizes, not with tensors
_ROOM = re.compile("^(?:fft|linalg|special)_")  # torch.linalg.norm says that it is linalg_norm
_LIBRARIES = {
    *sys.stdlib_module_names,
    *("torch", "torchvision", "lightning", "pytorch_lightning", "lightning_fabric", "einops"),
}


def called(module: nn.Module) -> frozenset[str] | None:
    """Return the names of the library functions and tensor methods that a call of `module` may run.

    None where some of the model's own code has no source. Of dotted names the last part is given, ``@`` of a product of
    matrices; Python's own functions are left out.
    """
    reader = _Reader()
    for name in ("__call__", "forward"):
        reader.follow(getattr_static(type(module), name, None), module)
    return None if reader.is_hidden else frozenset(reader.names)


def around(module: nn.Module, columns: Collection[str], rows: Collection[str]) -> frozenset[str]:
    """Return what `called` does, of the code before the first of some layers and after the last one alone.

    Nothing where no layer is found in a forward, in those that it extends or in methods that they call.

    Args:
        module: which calls the layers.
        columns: names of layers that take its input; code before them is left out where there are none.
        rows: names of those that make its result; code after them is left out where there are none.
    """
    reader, seen = _Reader(), set[FunctionType]()
    ways = _Ways(_users(module, columns), _users(module, rows))
    function = function_of(getattr_static(type(module), "forward", None))
    while function is not None and function not in seen and _is_read(function, is_method=True):
        seen.add(function)
        tree = tree_of(function)
        if tree is None:
            break
        self_name = tree.args.args[0].arg if tree.args.args else None
        uses = [node for node in ast.walk(tree) if _is_of(node, self_name, ways.columns | ways.rows)]
        later = next_method(type(module), function, "forward")
        is_wrapper = any(is_super(node) for node in ast.walk(tree))
        if not uses and not is_wrapper:
            break
        for node in _around(tree, self_name, uses, ways):
            if not is_super(node):
                reader.visit(node, _Place(function, module, self_name))
        function = None if uses else later
    return frozenset(reader.names)


class _Ways(NamedTuple):
    """Names of layers, and of the methods that call them."""

    columns: frozenset[str]
    rows: frozenset[str]


def _users(module: nn.Module, names: Collection[str]) -> frozenset[str]:
    """Return the names of some of a module's layers, and of its own methods that call them, beside its forward."""
    trees = {
        name: tree
        for cls in reversed(type(module).__mro__)
        for name, function in own_functions(cls)
        if name != "forward" and _is_read(function, is_method=True) and (tree := tree_of(function)) is not None
    }
    users, size = {*names}, 0
    while size < len(users):
        size = len(users)
        users |= {
            name
            for name, tree in trees.items()
            if tree.args.args and any(_is_of(node, tree.args.args[0].arg, users) for node in ast.walk(tree))
        }
    return frozenset(users)


def _is_of(node: ast.AST, self_name: str | None, names: Collection[str]) -> bool:
    """Whether a node is ``self.name`` for one of the names."""
    if not isinstance(node, ast.Attribute) or node.attr not in names:
        return False
    return isinstance(node.value, ast.Name) and node.value.id == self_name


def _around(tree: ast.FunctionDef, self_name: str | None, uses: Sequence[ast.AST], ways: _Ways) -> Iterator[ast.AST]:
    """Yield the code of a method before the first use of a layer, and after the last one."""
    lines = [(node.lineno, node.end_lineno or node.lineno) for node in uses if isinstance(node, ast.expr)]
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.stmt) or isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            continue
        # of a loop or condition its head alone: what is in it comes by itself
        parts = [child for child in ast.iter_child_nodes(statement) if isinstance(child, (ast.expr, ast.withitem))]
        nodes = [node for part in parts for node in ast.walk(part)]
        ends = [node.end_lineno or 0 for node in nodes if isinstance(node, ast.expr)]
        is_before = bool(ways.columns) and max(ends, default=0) < min((start for start, _ in lines), default=0)
        is_after = bool(ways.rows) and statement.lineno > max((end for _, end in lines), default=0)
        if not lines or is_before or is_after:
            yield from nodes
            continue
        for call in nodes:
            if isinstance(call, ast.Call) and _is_of(call.func, self_name, ways.columns):
                for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
                    yield from ast.walk(argument)
            under = [node for child in ast.iter_child_nodes(call) for node in ast.walk(child)]
            if any(isinstance(node, ast.Call) and _is_of(node.func, self_name, ways.rows) for node in under):
                yield call
                yield from ast.walk(call.func) if isinstance(call, ast.Call) else ()


class _Place(NamedTuple):
    """A function that is read, the module whose method it is, and the name that this has there."""

    function: Any  # a FunctionType, which typing would bind as a method here
    module: nn.Module | None
    self_name: str | None


class _Method(NamedTuple):
    """What a module has under a name: a function, ``staticmethod`` or property."""

    written: Any
    module: nn.Module | None


class _Reader:
    def __init__(self) -> None:
        self._seen: set[tuple[FunctionType, int]] = set()
        self.names: set[str] = set()
        self.is_hidden = False

    def follow(self, written: Any, module: nn.Module | None) -> None:
        """Read a function of the model with its decorators; `module` is its first argument where it is a method."""
        module = None if isinstance(written, staticmethod) else module
        for function in decorated(getattr(written, "__func__", written)):
            if (function, id(module)) in self._seen or not _is_read(function, is_method=module is not None):
                continue
            self._seen.add((function, id(module)))
            tree = tree_of(function)
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
            self.names.add(PRODUCT)
        elif isinstance(node, ast.Attribute) and is_super(node) and place.module is not None:
            self.follow(next_method(type(place.module), place.function, node.attr), place.module)
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Load):
            self._take(_value(node, place), place)
        if isinstance(node, ast.Call) and _value(node.func, place) is None and not is_super(node.func):
            if isinstance(node.func, ast.Attribute) and not _is_harmless(node, place):
                self.names.add(node.func.attr)
            elif isinstance(node.func, ast.Name) and node.func.id not in place.function.__code__.co_varnames:
                self.names.add(node.func.id)

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
        # by its class, or by a decorator that holds it
        if module is None and function is not None and function in _methods(place.module):
            module = place.module
        if function is not None and _is_read(function, is_method=module is not None):
            self.follow(value, module)
        elif callable(value) and not isinstance(value, (type, nn.Module)):
            owner = str(getattr(value, "__module__", "")).partition(".")[0]
            if owner not in _OF_NUMBERS:
                self.names.add(_ROOM.sub("", getattr(value, "__name__", "")))


def _is_harmless(call: ast.Call, place: _Place) -> bool:
    """Whether a method that is not known is one of a string, or a part that the module has without a value."""
    if call.args and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str):
        return True
    return isinstance(call.func, ast.Attribute) and isinstance(_value(call.func.value, place), nn.Module)


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
    if name == place.self_name:
        return place.module
    code, cells = place.function.__code__, place.function.__closure__ or ()
    if name in code.co_varnames or name in code.co_cellvars:
        return None
    if name in code.co_freevars:
        try:
            return cells[code.co_freevars.index(name)].cell_contents
        except ValueError:  # not bound yet
            return None
    bound = place.function.__globals__.get(name)
    return _PYTHONS if bound is None and hasattr(builtins, name) else bound


def _methods(module: nn.Module | None) -> set[FunctionType]:
    return {function for owner in type(module).__mro__ for _, function in own_functions(owner)}


def _is_read(function: FunctionType, *, is_method: bool) -> bool:
    """Whether a function is the model's; transformers' shared files are read for methods alone."""
    name = str(function.__globals__.get("__name__", ""))
    is_shared = name.startswith("transformers.") and not name.startswith("transformers.models.")
    return name.partition(".")[0] not in _LIBRARIES and (is_method or not is_shared)
