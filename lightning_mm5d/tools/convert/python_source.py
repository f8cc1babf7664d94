"""Reads values out of a Python file without running it: literals, ``dict(...)``, names and sums of these.

What only a run could tell, such as ``AMP_TYPE.NAIVE`` or ``args.tp``, is an `Unread` with its text.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Call:
    """A call that makes one of the objects that were asked for.

    Attributes:
        name: of what is called, without its module.
        arguments: by name.
        line: where it is written, from 1.
    """

    name: str
    arguments: dict[str, Any]
    line: int


def read_python(text: str, file: str, makers: Mapping[str, Sequence[str]]) -> tuple[dict[str, Any], list[Call]]:
    """Return what the file assigns to names, and its calls of `makers`; nothing of it is run.

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
        for node in tree.body:
            reader.assign(node)
        return reader.names, list(reader.calls(tree))
    except ConfigError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError("FILE", file, f"It is no Python: {error}", "Correct it there") from error


class _Reader:
    def __init__(self, makers: Mapping[str, Sequence[str]]) -> None:
        self._makers = {"dict": (), **makers}
        self.names: dict[str, Any] = {}

    def assign(self, node: ast.stmt) -> None:
        """Note the value of ``name = value`` at the top of the file."""
        if isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
            self.names[node.target.id] = self.value(node.value)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    self.names[target.id] = self.value(node.value)

    def calls(self, tree: ast.Module) -> Iterator[Call]:
        """The calls of the makers that stand in no other such call, with what they are given."""
        inner: set[int] = set()
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or id(node) in inner:
                continue
            name = _last_name(node.func)
            if name in self._makers and name != "dict":
                inner |= {id(one) for one in ast.walk(node) if one is not node}
                yield Call(name, self._arguments(node, name), node.lineno)

    def value(self, node: ast.expr) -> Any:
        """The value of an expression, or an `Unread`."""
        match node:
            case ast.Constant():
                return node.value
            case ast.List() | ast.Tuple():
                return [self.value(one) for one in node.elts]
            case ast.Dict() if all(isinstance(key, ast.Constant) for key in node.keys):
                keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
                return {key: self.value(one) for key, one in zip(keys, node.values, strict=True)}
            case ast.Call() if (name := _last_name(node.func)) in self._makers:
                assert name is not None
                return self._arguments(node, name)
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
        found: dict[str, Any] = {}
        positions = self._makers[name]
        for index, one in enumerate(node.args):
            if index >= len(positions) or isinstance(one, ast.Starred):
                raise _refused(one, f"{name} is read by the names of its arguments")
            found[positions[index]] = self.value(one)
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                found[keyword.arg] = value
            elif isinstance(value, dict):
                found |= value
            else:
                raise _refused(keyword.value, f"{name} takes arguments that only a run could tell")
        return found

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


def refuse_unread(value: Any, path: str) -> None:
    """Refuse a configuration of which a value was not read.

    Args:
        value: the configuration, or a part of it.
        path: of that part.

    Raises:
        ConfigError: at the first such value.
    """
    if isinstance(value, Unread):
        rule = f"Line {value.line} computes it, and files are not run here"
        raise ConfigError(path, value.text, rule, "Write its value there")
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, one in parts:
        refuse_unread(one, f"{path}.{key}" if path else str(key))


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
