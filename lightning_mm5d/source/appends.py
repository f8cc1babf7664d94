"""Which lists code appends to by what it finds in a batch, rather than once for each batch.

An entry of such a list stands for a sample, or for a batch that met a condition. So the entries of microbatches are
never one entry, however many each has left. Code that is not known, and lists under another name than ``self.name``,
tell nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lightning_mm5d.source.trees import own_functions, tree_of

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
    found = set[str]()
    for owner in (one for one in cls.__mro__ if one.__module__.partition(".")[0] not in _FRAMEWORKS):
        for _, function in own_functions(owner):
            tree = tree_of(function)
            if tree is not None and tree.args.args:
                found.update(
                    _found(tree, tree.args.args[0].arg, frozenset(arg.arg for arg in tree.args.args[2:]), False)
                )
    return frozenset(found)


def _found(node: ast.AST, own: str, given: frozenset[str], by_data: bool) -> Iterator[str]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        whole = node.func.attr == "extend" and not all(isinstance(arg, ast.List | ast.Tuple) for arg in node.args)
        if whole or (by_data and node.func.attr in ("append", "extend", "insert", "appendleft")):
            yield from _attribute(node.func.value, own)
    if isinstance(node, ast.AugAssign) and (by_data or not isinstance(node.value, ast.List | ast.Tuple)):
        yield from _attribute(node.target, own)
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.Add):
        sides = node.value.left, node.value.right
        if by_data or not any(isinstance(side, ast.List | ast.Tuple) for side in sides):
            added = {name for side in sides for name in _attribute(side, own)}
            yield from added.intersection(name for target in node.targets for name in _attribute(target, own))
    if isinstance(node, ast.For):
        over = node.iter
        named = isinstance(over, ast.Call) and isinstance(over.func, ast.Attribute) and over.func.attr in _BY_NAME
        by_data |= not named and _reads_data(over, own, frozenset())
    elif isinstance(node, ast.If | ast.While):
        by_data |= _reads_data(node.test, own, given)
    for child in ast.iter_child_nodes(node):
        yield from _found(child, own, given, by_data)


def _reads_data(test: ast.AST, own: str, given: frozenset[str]) -> bool:
    """Whether an expression names more than ``self``, numbers of batches, and arguments that are flags or words."""
    if isinstance(test, ast.BoolOp):
        return any(_reads_data(value, own, given) for value in test.values)
    if isinstance(test, ast.UnaryOp):
        return _reads_data(test.operand, own, given)
    if isinstance(test, ast.Name) and test.id in given:
        return False
    words = [*test.comparators, test.left] if isinstance(test, ast.Compare) else []
    if any(isinstance(one, ast.Constant) and isinstance(one.value, str | None) for one in words):
        return False
    return any(isinstance(one, ast.Name) and one.id != own and one.id not in _PLAIN for one in ast.walk(test))


def _attribute(node: ast.AST, own: str) -> Iterator[str]:
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == own:
        yield node.attr
