"""Reads values out of a Python file without running it: literals, ``dict(...)``, names and sums of these.

What only a run could tell, such as ``AMP_TYPE.NAIVE`` or ``args.tp``, is an `Unread` with its text.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

from lightning_mm5d.config.errors import ConfigError

_OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_LARGEST = 2**40  # operands and powers of anything that is a size


@dataclass(frozen=True)
class Unread:
    """An expression whose value only a run could tell.

    Attributes:
        text: as it is written.
        line: where it is written, from 1.
    """

    text: str
    line: int

    def __repr__(self) -> str:
        return self.text


@dataclass
class Call:
    """A call that makes one of the objects that were asked for, with what is set on the object later.

    Attributes:
        name: of what is called, without its module.
        arguments: by name.
        line: where it is written, from 1.
    """

    name: str
    arguments: dict[str, Any]
    line: int


ALL_MODULES = "all modules of the model"
"""Stands for the list that ``PipelineTemplate.get_modules(model)`` makes."""


def read_python(text: str, file: str, makers: Mapping[str, Sequence[str]]) -> tuple[dict[str, Any], list[Call]]:
    """Return what the file assigns to names, and its calls of `makers`; nothing of it is run.

    Statements are read in their order, those of functions after the rest of the file. A name that several branches, a
    loop or an argument may set is an `Unread`.

    Args:
        text: of the file.
        file: its name, for errors.
        makers: names of classes whose calls are read like ``dict(...)``, each with the names of its positional
            arguments.

    Raises:
        ConfigError: it is no Python.
    """
    try:
        tree = ast.parse(text)
        reader = _Reader(makers)
        reader.read(tree.body)
        return reader.names, reader.calls
    except ConfigError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError("FILE", file, f"It is no Python: {error}", "Correct it there") from error


_Function = ast.FunctionDef | ast.AsyncFunctionDef


class _Reader:
    """One scope: a file, or a function with the names around it."""

    def __init__(self, makers: Mapping[str, Sequence[str]], around: _Reader | None = None) -> None:
        self._makers = {"dict": (), **makers}
        self.names: dict[str, Any] = {} if around is None else dict(around.names)
        self.calls: list[Call] = [] if around is None else around.calls
        self._call_of: dict[str, Call] = {} if around is None else dict(around._call_of)
        self._functions: list[_Function] = []
        self._values: dict[int, dict[str, Any]] = {}  # of the calls of makers

    def read(self, body: Sequence[ast.stmt]) -> None:
        """Read statements, then the functions that they define."""
        self._read(body)
        for node in (node for function in self._functions for node in ast.walk(function)):
            for name in node.names if isinstance(node, ast.Global | ast.Nonlocal) else ():
                self._forget(name, node)
        for function in self._functions:
            inner = _Reader(self._makers, self)
            for argument in ast.walk(function.args):
                if isinstance(argument, ast.arg):
                    inner._forget(argument.arg, function)
            inner.read(function.body)

    def _read(self, body: Sequence[ast.stmt]) -> None:
        for node in body:
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    self._functions.append(node)
                    self._forget(node.name, node)
                case ast.ClassDef():
                    self._functions += [member for member in node.body if isinstance(member, _Function)]
                    self._forget(node.name, node)
                case ast.With() | ast.AsyncWith():
                    for item in node.items:
                        self._collect(item)
                        self._forget_all(item)
                    self._read(node.body)
                case ast.If() if ast.unparse(node.test) == "__name__ == '__main__'":
                    self._read(node.body)
                case ast.If() | ast.For() | ast.AsyncFor() | ast.While() | ast.Try() | ast.Match():
                    self._read_branches(node)
                case _:
                    self._collect(node)
                    self._bind(node)

    def _read_branches(self, node: ast.stmt) -> None:
        """Read statements that run once, several times or not at all."""
        if not isinstance(node, ast.If):
            self._forget_all(node)
        for name in ("test", "iter", "subject"):
            self._collect(getattr(node, name, ast.Pass()))
        before, call_of = dict(self.names), dict(self._call_of)
        handlers = [*getattr(node, "handlers", ()), *getattr(node, "cases", ())]
        bodies = [getattr(node, name, ()) for name in ("body", "orelse", "finalbody")]
        for body in (*bodies, *(handler.body for handler in handlers)):
            self.names, self._call_of = dict(before), dict(call_of)
            self._read(body)
        self.names, self._call_of = before, call_of
        self._forget_all(node)

    def _bind(self, node: ast.stmt) -> None:
        """Note what a statement sets."""
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            self._set(node.target, node.value)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._set(target, node.value)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            self._call_method(node.value)
        else:
            self._forget_all(node)

    def _set(self, target: ast.expr, value: ast.expr) -> None:
        owner = target.value if isinstance(target, ast.Attribute) else None
        if isinstance(target, ast.Name):
            self.names[target.id] = self.value(value)
            self._call_of.pop(target.id, None)
            same = [call for call in self.calls if call.arguments is self.names[target.id]]
            self._call_of.update(dict.fromkeys([target.id], same[0]) if same else {})
        elif isinstance(owner, ast.Name) and isinstance(target, ast.Attribute) and owner.id in self._call_of:
            self._call_of[owner.id].arguments[target.attr] = self.value(value)
        else:
            self._forget_all(target)

    def _call_method(self, node: ast.Call) -> None:
        """Take the arguments of ``plugin.set_pipelines``; forget an object that another method may change."""
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        if not isinstance(owner, ast.Name) or owner.id not in self.names:
            return
        if owner.id not in self._call_of:
            if isinstance(self.names[owner.id], dict | list):
                self._forget(owner.id, node)
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "set_pipelines":
            names = ("pipelines", "num_microbatches")
            passed = dict(zip(names, node.args, strict=False)) | {kw.arg: kw.value for kw in node.keywords if kw.arg}
            pipelines, counts = passed.get(names[0]), passed.get(names[1])
            arguments = self._call_of[owner.id].arguments
            arguments |= {name: self.value(argument) for name, argument in passed.items()}
            if isinstance(pipelines, ast.List) and isinstance(counts, ast.Dict):  # by template
                count_of = {
                    ast.unparse(key): self.value(count)
                    for key, count in zip(counts.keys, counts.values, strict=True)
                    if key
                }
                ordered = [count_of.get(ast.unparse(template), arguments[names[1]]) for template in pipelines.elts]
                arguments[names[1]] = ordered

    def _forget_all(self, node: ast.AST) -> None:
        """Forget the names that a statement may set or change."""
        for child in ast.walk(node):
            holder = child
            while isinstance(holder, ast.Attribute | ast.Subscript):
                holder = holder.value
            is_set = isinstance(getattr(child, "ctx", None), ast.Store | ast.Del)
            if isinstance(holder, ast.Name) and is_set:
                self._forget(holder.id, child)
            elif isinstance(child, ast.alias):
                self._forget((child.asname or child.name).partition(".")[0], node)

    def _forget(self, name: str, node: Any) -> None:
        if name in self.names:
            self.names[name] = Unread(name, node.lineno)
        self._call_of.pop(name, None)

    def _collect(self, node: ast.AST) -> None:
        """Note the calls of the makers that stand in no other such call, with what they are given."""
        inner: set[int] = set()
        for call in ast.walk(node):
            if not isinstance(call, ast.Call) or id(call) in inner:
                continue
            name = _last_name(call.func)
            if name in self._makers and name != "dict":
                inner |= {id(nested) for nested in ast.walk(call) if nested is not call}
                self.calls.append(Call(name, self.value(call), call.lineno))

    def value(self, node: ast.expr) -> Any:
        """The value of an expression, or an `Unread`."""
        match node:
            case ast.Constant() if not isinstance(node.value, complex | EllipsisType):  # no value of a configuration
                return node.value
            case ast.List() | ast.Tuple():
                return [self.value(element) for element in node.elts]
            case ast.Dict() if all(isinstance(key, ast.Constant) for key in node.keys):
                keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
                return {key: self.value(value) for key, value in zip(keys, node.values, strict=True)}
            case ast.Call() if (name := _last_name(node.func)) in self._makers:
                assert name is not None
                if id(node) not in self._values:
                    self._values[id(node)] = self._arguments(node, name)
                return self._values[id(node)]
            case ast.Call(func=ast.Attribute(attr="get_modules")):
                return ALL_MODULES
            case ast.Name() if node.id in self.names:
                return self.names[node.id]
            case ast.UnaryOp(op=ast.USub()) if _is_number(number := self.value(node.operand)):
                return -number
            case ast.BinOp() if type(node.op) in _OPERATIONS:
                return self._computed(node)
            case ast.Subscript():
                return self._entry(node)
        return _unread(node)

    def _arguments(self, node: ast.Call, name: str) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        positions = self._makers[name]
        for index, argument in enumerate(node.args):
            if index >= len(positions) or isinstance(argument, ast.Starred):
                raise _refused(argument, f"{name} is read by the names of its arguments")
            arguments[positions[index]] = self.value(argument)
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                arguments[keyword.arg] = value
            elif isinstance(value, dict):
                arguments |= value
            else:
                raise _refused(keyword.value, f"{name} takes arguments that only a run could tell")
        return arguments

    def _computed(self, node: ast.BinOp) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        if not (_is_number(left) and _is_number(right)) or max(abs(left), abs(right)) > _LARGEST:
            return _unread(node)
        if isinstance(node.op, ast.Pow) and not 0 <= right <= (40 if abs(left) <= 10 else 3):
            return _unread(node)
        try:
            return _OPERATIONS[type(node.op)](left, right)
        except ArithmeticError:
            return _unread(node)

    def _entry(self, node: ast.Subscript) -> Any:
        holder, key = self.value(node.value), self.value(node.slice)
        try:
            return holder[key] if isinstance(holder, dict | list) else _unread(node)
        except (KeyError, IndexError, TypeError):
            return _unread(node)


def refuse_unread(value: Any, path: str, listed: Collection[str] = ()) -> None:
    """Refuse a configuration of which a value was not read.

    Args:
        value: the configuration, or a part of it.
        path: of that part.
        listed: names whose values do not matter.

    Raises:
        ConfigError: at the first such value.
    """
    if isinstance(value, Unread):
        rule = f"Line {value.line} computes it, and files are not run here"
        raise ConfigError(path, value.text, rule, "Write its value there")
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        if key not in listed:
            refuse_unread(part, f"{path}.{key}" if path else str(key), listed)


def _last_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _unread(node: ast.expr) -> Unread:
    return Unread(ast.unparse(node), node.lineno)


def _refused(node: ast.expr, rule: str) -> ConfigError:
    return ConfigError(f"line {node.lineno}", ast.unparse(node), rule, "Write its arguments as name=value")
