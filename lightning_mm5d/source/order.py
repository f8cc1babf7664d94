"""In which order a module's own code touches its submodules, and which fields of a method's result its callers read.

A pipeline needs to know whether an embedding or a head is used before or after a list of layers, and whether an
encoder is called before the language model. Registration order does not say (an embedding may be registered last),
and running the model would need its inputs. So the order of attribute accesses is read from the syntax tree in
evaluation order: arguments before the call that takes them, the model's own helper methods in place.

The answer leaves out what has no source or is reached by ``getattr``; the caller falls back on registration order.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType

from torch import nn

from lightning_mm5d.source.trees import codes_in, is_call_of, is_super, method_of, next_method, tree_of

# Bookkeeping of the frameworks themselves (weight tying, generation): following it would report accesses that a
# forward pass does not make.
_NOT_FOLLOWED = (
    *("torch.", "lightning.", "pytorch_lightning.", "lightning_fabric."),
    *("transformers.modeling_utils", "transformers.generation"),
)


def accesses(module: nn.Module, *methods: str) -> list[str]:
    """Return what `methods` of `module` touch, in evaluation order.

    Args:
        module: the module whose code is read.
        methods: names of its methods, for instance ``"forward"``; those that it lacks are left out.

    Returns:
        Dotted paths relative to `module`: of submodules and parameters (``"decoder.norm"``), and of methods called on
        them or on the module itself (``"get_image_features"``, ``"model.encode"``).
    """
    return [path for path, _ in touched(module, *methods)]


def touched(module: nn.Module, *methods: str) -> list[tuple[str, bool]]:
    """Return what `accesses` does, each with whether it is called there."""
    functions = [method_of(type(module), name) for name in methods]
    return [use for function in functions if function is not None for use in _Reader(module, (function,)).read()]


def accessed_between(module: nn.Module, method: str, members: str) -> set[str]:
    """Return what a method touches to make the inputs of modules that it calls in a loop, and in their calls.

    Args:
        module: the module whose code is read.
        method: name of its method.
        members: path of the list that these modules are in, relative to `module`.

    Returns:
        Paths as of `accesses`; not of what a loop only computes from the results of its calls.
    """
    function, paths = method_of(type(module), method), set[str]()
    if function is None:
        return paths
    reader = _Reader(module, (function,))
    reader.read()
    for loop in reader.loops:
        holders = [stmt for stmt in loop if any(f"{path}.".startswith(f"{members}.") for path in stmt.touched)]
        names = {name for stmt in holders for name in stmt.bound}
        makers = [stmt for stmt in loop if stmt in holders or not names.isdisjoint(stmt.read)]
        count = 0
        while len(makers) > count:
            count = len(makers)
            inputs = {name for stmt in makers for name in stmt.read}
            makers += [stmt for stmt in loop if stmt not in makers and not inputs.isdisjoint(stmt.written)]
        paths.update(path for stmt in makers for path in stmt.touched)
    return paths


def is_followed(function: FunctionType) -> bool:
    """Whether `function` is no bookkeeping of a framework."""
    return not function.__module__.startswith(_NOT_FOLLOWED)


@dataclass(frozen=True, eq=False)
class _Statement:
    """What a statement of a loop does.

    Attributes:
        written: the local names that it writes.
        bound: those of them that stand for what it touches.
        read: the local names that it reads.
        touched: paths of what it touches of the module.
    """

    written: frozenset[str]
    bound: frozenset[str]
    read: frozenset[str]
    touched: tuple[str, ...]


class _Reader:
    """Walks one function's syntax tree; `trail` is the chain of functions that led here, against recursion."""

    def __init__(self, module: nn.Module, trail: tuple[FunctionType, ...]) -> None:
        self._module, self._trail = module, trail
        self._touched: list[tuple[str, bool]] = []  # as `touched` returns it
        self._local: dict[str, list[str]] = {}  # names after ``self`` of what a local name stands for
        self._statements: list[_Statement] = []  # of the loop that is read
        self.loops: list[list[_Statement]] = []

    def read(self) -> list[tuple[str, bool]]:
        tree = tree_of(self._trail[-1])
        if tree is None or not tree.args.args:
            return []
        self._self = tree.args.args[0].arg
        for statement in tree.body:
            self._visit(statement)
        return self._touched

    def _visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Call):
            self._visit_call(node)
        elif isinstance(node, ast.Attribute):
            chain = self._chain(node)
            if chain is None:
                self._visit(node.value)
            else:
                self._touch(chain)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
            self._visit_assignment(node)
        elif isinstance(node, ast.Name):
            if node.id in self._local:
                self._touch(self._local[node.id])
        elif isinstance(node, ast.For):
            outer, self._statements = self._statements, []
            self._visit_noted(node.iter, node.target)
            for child in _rest(node):
                self._visit_noted(child)
            self.loops.append(self._statements)
            self._statements = outer + self._statements
        elif isinstance(node, ast.comprehension):
            for child in (node.iter, *_rest(node)):
                self._visit(child)
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            for child in (*node.generators, node.elt):
                self._visit(child)
        else:
            for child in ast.iter_child_nodes(node):
                self._visit(child)

    def _visit_noted(self, node: ast.AST, target: ast.AST | None = None) -> None:
        """Visit a statement of a loop, or what the loop runs over, and note what it does."""
        start, binds, value = len(self._touched), True, node
        if isinstance(node, (ast.If, ast.With, ast.Try, ast.ExceptHandler, ast.withitem)):
            for child in ast.iter_child_nodes(node):
                self._visit_noted(child)
            return
        self._visit(node)
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            target, value = node.targets[0] if isinstance(node, ast.Assign) else node.target, node.value
            binds = not isinstance(value, ast.Call)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            target, value, binds = node.value.func, node.value, False  # a method may write to its object
        elif isinstance(target, ast.Tuple) and is_call_of(node, "enumerate"):
            target = target.elts[-1]
        if target is not None:
            written, read = (self._names_in(part) for part in (target, value))
            paths = tuple(path for path, _ in self._touched[start:])
            self._statements.append(_Statement(written, written if binds else frozenset(), read, paths))

    def _names_in(self, node: ast.AST) -> frozenset[str]:
        return frozenset(name.id for name in ast.walk(node) if isinstance(name, ast.Name)) - {self._self}

    def _visit_assignment(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) -> None:
        """Visit what is assigned; a module that gets a local name is touched where that is used."""
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        target, value = targets[0], node.value
        chain = self._chain(value) if isinstance(value, ast.Attribute) and isinstance(target, ast.Name) else None
        is_named = chain and len(targets) == 1 and not isinstance(node, ast.AugAssign) and self._holds(chain)
        if value is not None and not is_named:
            self._visit(value)
        for assigned in targets:
            if isinstance(assigned, ast.Name):
                self._local.pop(assigned.id, None)
        if chain and is_named and isinstance(target, ast.Name):
            self._local[target.id] = chain

    def _is_module(self, node: ast.AST) -> bool:
        return self._holds(self._chain(node) or [""])

    def _holds(self, chain: list[str]) -> bool:
        """Whether the names after ``self`` lead to a module."""
        here: nn.Module | None = self._module
        for name in chain:
            here = None if here is None else here._modules.get(name)
        return here is not None

    def _visit_call(self, node: ast.Call) -> None:
        chain = self._chain(node.func)
        if chain is None and not is_super(node.func):
            self._visit(node.func)
        # a module that is handed on is called when all arguments are there
        for argument in sorted((*node.args, *(keyword.value for keyword in node.keywords)), key=self._is_module):
            self._visit(argument)
        if is_super(node.func):
            self._follow(next_method(type(self._module), self._trail[-1], node.func.attr))
        elif chain == []:
            self._follow(method_of(type(self._module), "forward"))
        elif chain is not None:
            self._touch(chain, called=True)

    def _chain(self, node: ast.AST) -> list[str] | None:
        """The names after ``self`` in ``self.a.b``, through subscripts; None for anything else."""
        names: list[str] = []
        while not isinstance(node, ast.Name):
            if isinstance(node, ast.Attribute):
                names.append(node.attr)
            elif not isinstance(node, ast.Subscript):
                return None
            node = node.value
        if node.id == self._self:
            return names[::-1]
        return [*self._local[node.id], *names[::-1]] if node.id in self._local else None

    def _touch(self, chain: list[str], called: bool = False) -> None:
        here: nn.Module = self._module
        path: list[str] = []
        for name in chain:
            if name in here._modules and here._modules[name] is not None:
                path.append(name)
                here = here._modules[name]  # type: ignore[assignment]
            elif name in here._parameters:
                path.append(name)
                break
            elif called and (function := method_of(type(here), name)) is not None:
                self._touched.append((".".join([*path, name]), True))
                if here is self._module:
                    self._follow(function)
                return
            else:
                break
        if path:
            self._touched.append((".".join(path), called and path == chain))

    def _follow(self, function: FunctionType | None) -> None:
        if function is None or function in self._trail or len(self._trail) > 8:
            return
        if is_followed(function):
            reader = _Reader(self._module, (*self._trail, function))
            self._touched += reader.read()
            self.loops += reader.loops


def _rest(node: ast.For | ast.comprehension) -> Iterator[ast.AST]:
    """All but what is run over."""
    return (child for child in ast.iter_child_nodes(node) if child is not node.iter)


def used_fields(root: nn.Module, path: str, method: str) -> frozenset[str] | None:
    """Return the fields that all callers of a method read from its result, None where the code does not tell.

    Args:
        root: the LightningModule.
        path: dotted path of the module that has the method; its ancestors' code is read too. Ancestors' methods of
            the same name only hand the call on.
        method: its name; of ``"forward"`` the calls of the module itself count, by the names that lead to it.
    """
    parts, fields, calls = path.split(".") if path else [], set[str](), 0
    is_module = method == "forward"
    callee = parts[-1] if is_module and parts else method
    for depth in range(len(parts) + (not is_module)):
        cls = type(root.get_submodule(".".join(parts[:depth])))
        for function in {method_of(cls, name) for name in dir(cls) if is_module or name != method} - {None}:
            if function is None or function.__module__.startswith(_NOT_FOLLOWED):
                continue
            if not any(callee in code.co_names for code in codes_in(function.__code__)):
                continue  # most methods: their trees would be walked for nothing
            tree = tree_of(function)
            if tree is None and not is_module:
                return None
            if tree is None or (is_module and not tree.args.args):
                continue
            path_of_module = [*(arg.arg for arg in tree.args.args[:1]), *parts[depth:]]
            parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
            for node in ast.walk(tree):
                if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)):
                    continue
                is_callee = _names(node) == path_of_module if is_module else node.attr == method
                if not is_callee:
                    continue
                user = parents[node]
                if is_module and isinstance(user, ast.Attribute) and user.attr != "forward":
                    continue
                read = _fields_read(user, parents, tree) if isinstance(user, ast.Call) and user.func is node else None
                if read is None:
                    return None
                calls += 1
                fields |= read
    return frozenset(fields) if calls else None


def _names(node: ast.AST) -> list[str]:
    """The names of ``a.b.c``; nothing for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def _fields_read(call: ast.Call, parents: dict[ast.AST, ast.AST], tree: ast.AST) -> set[str] | None:
    user = parents[call]
    if (field := _field(user)) is not None:
        return {field}
    if isinstance(user, ast.Assign) and len(user.targets) == 1 and isinstance(user.targets[0], ast.Name):
        name = user.targets[0].id
        uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]
        readers = [parents[node] for node in uses if isinstance(node.ctx, ast.Load)]
        fields = {_field(reader) for reader in readers}
        if readers and None not in fields:
            return {field for field in fields if field is not None}
    return None


def _field(node: ast.AST) -> str | None:
    """The name in ``result.name`` and ``result["name"]``."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return node.slice.value
    return None
