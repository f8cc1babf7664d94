"""What a method does in loops: which modules it calls, as often as its code tells, and which lists it appends to.

**Modules in loops** such as ``for i in range(self.config.num_layers)``. A model may run one module several times, in
place of a list of modules. How often, and which member of a list each time, is computed from the numbers in the syntax
tree and in the module's own attributes. The code itself is never run: what is more than arithmetic, ``len``, ``int``,
``min`` and ``max`` is not known.

**Lists in loops over data.** An entry of such a list stands for a sample, or for a batch that met a condition. So the
entries of microbatches are never one entry, however many each has left. Code that is not known, and lists under another
name than ``self.name``, tell nothing.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from numbers import Integral, Real
from typing import Any

from torch import nn

from lightning_mm5d.source.trees import is_call_of, method_of, own_functions, tree_of

_MOST = 10_000
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"int": int, "len": len, "min": min, "max": max}


class _UnknownError(Exception):
    """The code does not tell a value."""


def looped_calls(module: nn.Module) -> list[list[str]]:
    """Return for each loop over a range in its forward the submodules that it calls, in order, as paths from `module`.

    A loop whose count or whose choice of a submodule is not known gives nothing.
    """
    function = method_of(type(module), "forward")
    tree = None if function is None else tree_of(function)
    if tree is None or not tree.args.args:
        return []
    loop_calls = []
    for loop in (node for node in ast.walk(tree) if isinstance(node, ast.For)):
        with suppress(_UnknownError):
            loop_calls.append(_calls(loop, module, tree.args.args[0].arg))
    return [calls for calls in loop_calls if calls]


def _calls(loop: ast.For, module: nn.Module, self_name: str) -> list[str]:
    if not is_call_of(loop.iter, "range") or not isinstance(loop.target, ast.Name):
        return []
    values: dict[str, Any] = {self_name: module}
    bounds = [_value(argument, values) for argument in loop.iter.args]
    if not all(isinstance(bound, Integral) for bound in bounds) or len(turns := range(*bounds)) > _MOST:
        raise _UnknownError
    paths = list[str]()
    for turn in turns:
        values = {self_name: module, loop.target.id: turn}
        for statement in loop.body:
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and (path := _called(node.func, module, self_name, values)) is not None:
                    paths.append(path)
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                try:
                    values[statement.targets[0].id] = _value(statement.value, values)
                except _UnknownError:
                    values.pop(statement.targets[0].id, None)
    return paths


def _called(node: ast.AST, module: nn.Module, self_name: str, values: Mapping[str, Any]) -> str | None:
    """The path of the submodule that an expression names, None where it names something else."""
    if isinstance(node, ast.Subscript):
        inner = _called(node.value, module, self_name, values)
        holder = None if inner is None else module.get_submodule(inner)
        if not isinstance(holder, nn.ModuleList):
            return None
        index = _value(node.slice, values)
        if not isinstance(index, Integral) or not -len(holder) <= int(index) < len(holder):
            raise _UnknownError
        return f"{inner}.{int(index) % len(holder)}"
    if not isinstance(node, ast.Attribute):
        return None
    if isinstance(node.value, ast.Name) and node.value.id == self_name:
        return node.attr if node.attr in module._modules and module._modules[node.attr] is not None else None
    inner = _called(node.value, module, self_name, values)
    held = None if inner is None else module.get_submodule(inner)._modules.get(node.attr)
    return None if held is None else f"{inner}.{node.attr}"


def _value(node: ast.AST, values: Mapping[str, Any]) -> Any:
    """The value of an expression of numbers.

    Raises:
        _UnknownError: it is something else.
    """
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in values:
        return values[node.id]
    if isinstance(node, ast.Attribute):
        holder = _value(node.value, values)
        held = vars(holder) if hasattr(holder, "__dict__") else {}
        modules = holder._modules if isinstance(holder, nn.Module) else {}
        if node.attr in held or node.attr in modules:
            return held.get(node.attr, modules.get(node.attr))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, values), _value(node.right, values)
        if all(isinstance(operand, Real) for operand in (left, right)) and (right or not _divides(node.op)):
            return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        arguments = [_value(argument, values) for argument in node.args]
        if all(isinstance(arg, Real | list | tuple | nn.ModuleList) for arg in arguments) and not node.keywords:
            return _FUNCTIONS[node.func.id](*arguments)
    raise _UnknownError


def _divides(op: ast.operator) -> bool:
    return isinstance(op, ast.Div | ast.FloorDiv | ast.Mod)


_PLAIN = frozenset(
    ("batch_idx", "dataloader_idx", "range", "enumerate", "zip", "len", "isinstance", "hasattr", "getattr")
)
_FRAMEWORKS = frozenset(("torch", "lightning", "pytorch_lightning"))
_BY_NAME = frozenset(("items", "keys", "values"))


def appended_by_data(cls: type) -> frozenset[str]:
    """Return the attributes of ``self`` that methods of `cls` append to in loops over data or where data says so.

    Args:
        cls: class of the module.
    """
    attributes = set[str]()
    for owner in (base for base in cls.__mro__ if base.__module__.partition(".")[0] not in _FRAMEWORKS):
        for _, function in own_functions(owner):
            tree = tree_of(function)
            if tree is not None and tree.args.args:
                attributes.update(
                    _appended(tree, tree.args.args[0].arg, frozenset(arg.arg for arg in tree.args.args[2:]), False)
                )
    return frozenset(attributes)


def _appended(node: ast.AST, self_name: str, arguments: frozenset[str], by_data: bool) -> Iterator[str]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        whole = node.func.attr == "extend" and not all(isinstance(arg, ast.List | ast.Tuple) for arg in node.args)
        if whole or (by_data and node.func.attr in ("append", "extend", "insert", "appendleft")):
            yield from _attribute(node.func.value, self_name)
    if isinstance(node, ast.AugAssign) and (by_data or not isinstance(node.value, ast.List | ast.Tuple)):
        yield from _attribute(node.target, self_name)
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.Add):
        sides = node.value.left, node.value.right
        if by_data or not any(isinstance(side, ast.List | ast.Tuple) for side in sides):
            added = {name for side in sides for name in _attribute(side, self_name)}
            yield from added.intersection(name for target in node.targets for name in _attribute(target, self_name))
    if isinstance(node, ast.For):
        over = node.iter
        named = isinstance(over, ast.Call) and isinstance(over.func, ast.Attribute) and over.func.attr in _BY_NAME
        by_data |= not named and _reads_data(over, self_name, frozenset())
    elif isinstance(node, ast.If | ast.While):
        by_data |= _reads_data(node.test, self_name, arguments)
    for child in ast.iter_child_nodes(node):
        yield from _appended(child, self_name, arguments, by_data)


def _reads_data(test: ast.AST, self_name: str, arguments: frozenset[str]) -> bool:
    """Whether an expression names more than ``self``, numbers of batches, and arguments that are flags or words."""
    if isinstance(test, ast.BoolOp):
        return any(_reads_data(value, self_name, arguments) for value in test.values)
    if isinstance(test, ast.UnaryOp):
        return _reads_data(test.operand, self_name, arguments)
    if isinstance(test, ast.Name) and test.id in arguments:
        return False
    words = [*test.comparators, test.left] if isinstance(test, ast.Compare) else []
    if any(isinstance(word, ast.Constant) and isinstance(word.value, str | None) for word in words):
        return False
    return any(isinstance(node, ast.Name) and node.id != self_name and node.id not in _PLAIN for node in ast.walk(test))


def _attribute(node: ast.AST, self_name: str) -> Iterator[str]:
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self_name:
        yield node.attr
