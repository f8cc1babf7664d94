"""Which part of its batch a step passes on under a name, such as ``labels=``, and how its loss counts these labels.

A batch that is a tuple has no names, and the step that unpacks it does. Its code is followed as far as it is certain: a
variable counts that is bound once, to the batch, a part of it, or a part that is moved or cast (``labels.long()``). A
value that anything else is done to is not known.

**Means over label tokens.** A causal language model predicts each next token, and so leaves the first label of each row
out; a masked or a sequence-to-sequence model counts all. Models are the outermost submodules whose forward takes
``labels``; where one only passes them on, those inside of it. What calls no cross entropy, itself or by transformers'
``loss_function`` (a CTC loss, a regression) is no such mean. Where code puts something before the labels (a prefix of
audio, a prompt), the first of them is predicted as well.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Hashable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any, Literal

from torch import nn

from lightning_mm5d.source.order import is_followed
from lightning_mm5d.source.trees import function_of, method_of, names, tree_of

TARGET = "target"
"""What a step passes to `torch.nn.functional.cross_entropy` as the classes."""
OF_ROWS = "one of each row"
"""In place of the path of classes that the step takes from whole rows: ``(labels != -100).sum(1) % 3``."""

Path = tuple[Hashable, ...]
"""The steps from a batch to a part of it: indices of tuples and lists, keys of dicts, names of fields."""

KEEP_VALUES = (
    *("to", "long", "int", "cuda", "cpu", "contiguous", "clone", "detach", "view", "reshape"),
    *("flatten", "squeeze"),
)
"""Methods of tensors whose result has the values of the tensor."""
_TAKEN_OUT = ("get", "pop")
_OF_EACH = {*KEEP_VALUES, "float", "bool", "clamp", "clip", "remainder", "eq", "ne", "gt", "ge", "lt", "le"}
"""Methods of tensors whose result has a value for each of the tensor's, none of them -100 for being left out."""
_BESIDE = {"remainder", "eq", "ne", "gt", "ge", "lt", "le", "clamp", "clip"}
"""those of them that take another tensor or a number"""
_OVER_ROWS = {"sum", "count_nonzero", "any", "all", "amax", "amin", "argmax", "argmin", "max", "min"}


def passed(module: nn.Module, method: str, name: str) -> frozenset[Path | None]:
    """Return the parts of the batch that a step passes as `name`, to a model or to a method that uses it so.

    Args:
        module: the LightningModule.
        method: its step, whose first argument is the batch.
        name: of the argument, for instance ``"labels"``; of positional arguments the model's ``forward`` tells it.
            `TARGET` is that of cross entropies that the step computes itself, as means in which -100 does not count.

    Returns:
        Paths of parts; a batch may lack some, which are then not passed (of ``**batch`` it is ``("labels",)``). None
        is among them where a model is given something that is not certainly a part of the batch. Empty where nothing
        is passed so, or the code is not known. ``(OF_ROWS,)`` alone where all classes are taken from whole rows.
    """
    function = method_of(type(module), method)
    tree = None if function is None else tree_of(function)
    if function is None or tree is None or len(tree.args.args) < 2:
        return frozenset()
    batch = {tree.args.args[1].arg: ()}
    paths = _Reader(module, (function,), batch).parts(name)
    return frozenset(paths if len(paths) == 1 else {None if path == (OF_ROWS,) else path for path in paths})


class _Reader:
    """Reads one function; `known` are its arguments that are parts of the batch, `trail` leads here."""

    def __init__(self, module: nn.Module, trail: tuple[FunctionType, ...], known: Mapping[str, Path]) -> None:
        self._module, self._trail = module, trail
        tree = tree_of(trail[-1])
        assert tree is not None
        self._tree, self._self = tree, tree.args.args[0].arg if tree.args.args else ""
        self._bindings: dict[str, list[tuple[ast.expr | None, Path]]] = {}
        for node in ast.walk(tree):
            self._bind(node)
        self._known = {key: path for key, path in known.items() if key not in self._bindings}

    def parts(self, name: str) -> set[Path | None]:
        paths: set[Path | None] = set()
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call):
                paths |= self._of_call(node, name)
        return paths

    def _bind(self, node: ast.AST) -> None:
        """Note what a statement binds names to, None for what is not looked into."""
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind_to(target, node.value, ())
        elif (isinstance(node, ast.AnnAssign) and node.value is not None) or isinstance(node, ast.NamedExpr):
            self._bind_to(node.target, node.value, ())
        elif isinstance(node, (ast.AugAssign, ast.For, ast.AsyncFor, ast.comprehension)):
            self._bind_to(node.target, None, ())
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._bind_to(node.optional_vars, None, ())

    def _bind_to(self, target: ast.expr, value: ast.expr | None, part: Path) -> None:
        if isinstance(target, ast.Name):
            self._bindings.setdefault(target.id, []).append((value, part))
        elif isinstance(target, (ast.Tuple, ast.List)):
            starred = any(isinstance(element, ast.Starred) for element in target.elts)
            for index, element in enumerate(target.elts):
                if value is None or starred:
                    self._bind_to(element, None, ())
                elif isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts) and not part:
                    self._bind_to(element, value.elts[index], ())
                else:
                    self._bind_to(element, value, (*part, index))
        elif isinstance(target, (ast.Starred, ast.Subscript, ast.Attribute)):
            # ``labels[mask] = -100`` makes another value of what a name stands for
            inner: ast.expr = target
            while isinstance(inner, (ast.Starred, ast.Subscript, ast.Attribute)):
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id != self._self:
                self._bindings.setdefault(inner.id, []).append((None, ()))

    def _path(self, node: ast.expr, seen: tuple[str, ...] = ()) -> Path | None:
        """The part of the batch that an expression is; None where it is not certain."""
        if isinstance(node, ast.Name):
            bound = self._bindings.get(node.id, [])
            if node.id in self._known:
                return self._known[node.id]
            if len(bound) != 1 or node.id in seen:
                return None
            value, part = bound[0]
            inner = None if value is None else self._path(value, (*seen, node.id))
            return None if inner is None else (*inner, *part)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in KEEP_VALUES:
                return self._path(node.func.value, seen)
            if node.func.attr in _TAKEN_OUT and node.args and isinstance(node.args[0], ast.Constant):
                return self._step(node.func.value, node.args[0].value, seen)
        if isinstance(node, ast.Subscript):
            try:
                return self._step(node.value, ast.literal_eval(node.slice), seen)
            except ValueError:
                return None
        if isinstance(node, ast.Attribute):
            return self._step(node.value, node.attr, seen)
        return None

    def _step(self, node: ast.expr, step: Any, seen: tuple[str, ...]) -> Path | None:
        inner = self._path(node, seen) if isinstance(step, (int, str)) else None
        return None if inner is None else (*inner, step)

    def _is_of_rows(self, node: ast.expr, seen: tuple[str, ...] = ()) -> bool:
        """Whether an expression is a sum or an extreme over a dim, or computed from one; a dim that is kept is none."""
        if isinstance(node, ast.Name):
            bound = self._bindings.get(node.id, [])
            is_known = len(bound) == 1 and node.id not in seen and not self._is_argument(node.id)
            value = bound[0][0] if is_known else None
            return value is not None and self._is_of_rows(value, (*seen, node.id))
        if isinstance(node, (ast.BinOp, ast.Compare)):  # a tensor beside it may have a value for each token
            sides = [node.left, *(node.comparators if isinstance(node, ast.Compare) else [node.right])]
            others = [side for side in sides if not self._is_of_rows(side, seen)]
            return len(others) < len(sides) and all(map(self._is_number, others))
        if isinstance(node, ast.Attribute) or (isinstance(node, ast.Subscript) and ast.unparse(node.slice) in "01"):
            return self._is_of_rows(node.value, seen)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return False
        if node.func.attr in _OF_EACH:
            beside = node.args if node.func.attr in _BESIDE else []
            return self._is_of_rows(node.func.value, seen) and all(map(self._is_number, beside))
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        dims = [*node.args[ast.unparse(node.func.value) == "torch" :]]
        dims += [value for name, value in named.items() if name in ("dim", "axis")]
        is_dim = len(dims) == 1 and ast.unparse(dims[0]).lstrip("-").isdecimal()  # `labels.min(cap)` is one of each
        return node.func.attr in _OVER_ROWS and is_dim and "keepdim" not in named

    def _is_number(self, node: ast.expr) -> bool:
        """Whether an expression is a number: a constant, a size of a tensor, or an attribute below the module."""
        if isinstance(node, ast.UnaryOp):
            return self._is_number(node.operand)
        sized = node.value if isinstance(node, ast.Subscript) else node.func if isinstance(node, ast.Call) else None
        if isinstance(sized, ast.Attribute):
            return sized.attr in ("shape", "size")
        if isinstance(node, ast.Name) and node.id not in self._bindings and not self._is_argument(node.id):
            return isinstance(self._trail[-1].__globals__.get(node.id), int | float)
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        return isinstance(node, ast.Constant) or (
            root is not node and isinstance(root, ast.Name) and root.id == self._self
        )

    def _is_argument(self, name: str) -> bool:
        return any(isinstance(arg, ast.arg) and arg.arg == name for arg in ast.walk(self._tree))

    def _of_call(self, call: ast.Call, name: str) -> set[Path | None]:
        callee = self._callee(call.func)
        if name == TARGET and (arguments := _of_cross_entropy(call, callee)) is not None:
            of_rows = bool(arguments) and self._is_of_rows(arguments[-1])
            return {(OF_ROWS,) if of_rows else self._path(arguments[-1]) if arguments else None}
        paths = dict(self._given(call, callee, name))
        if isinstance(callee, FunctionType):
            followed = self._followed(callee, {key: path for key, path in paths.items() if path is not None}, name)
            if followed:
                return followed
        if name not in paths or name == TARGET or (callee is None and paths[name] is None):
            return set()
        return {paths[name]}

    def _callee(self, node: ast.expr) -> nn.Module | FunctionType | None:
        """A submodule, or a method of the module itself; None for anything else."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        if not (isinstance(node, ast.Name) and node.id == self._self):
            return None
        here = self._module
        for at, step in enumerate(names):
            inner = here._modules.get(step)
            if inner is None:
                return method_of(type(here), step) if here is self._module and at == len(names) - 1 else None
            here = inner
        return method_of(type(here), "forward") if here is self._module else here

    def _given(
        self, call: ast.Call, callee: nn.Module | FunctionType | None, name: str
    ) -> Iterator[tuple[str, Path | None]]:
        """The parts of the batch that the arguments of a call are, by the callee's name for each."""
        names: list[str] = []
        forward = method_of(type(callee), "forward") if isinstance(callee, nn.Module) else callee
        if forward is not None:
            names = [*inspect.signature(forward).parameters]
            static = inspect.getattr_static(type(self._module), forward.__name__, None)
            names = names if forward is callee and isinstance(static, staticmethod) else names[1:]
        for at, argument in enumerate(call.args):
            if isinstance(argument, ast.Starred):
                whole = self._path(argument.value)
                if whole is not None:
                    yield from ((key, (*whole, index)) for index, key in enumerate(names[at:]))
                break
            if at < len(names) and not _is_none(argument):
                yield names[at], self._path(argument)
        for keyword in call.keywords:
            path = self._path(keyword.value)
            if keyword.arg is not None and not _is_none(keyword.value):
                yield keyword.arg, path
            elif keyword.arg is None and path is not None:
                yield from ((key, (*path, key)) for key in (name, *names))

    def _followed(self, function: FunctionType, given: Mapping[str, Path], name: str) -> set[Path | None]:
        if function in self._trail or len(self._trail) > 8 or not is_followed(function) or tree_of(function) is None:
            return set()
        return _Reader(self._module, (*self._trail, function), given).parts(name)


def _of_cross_entropy(call: ast.Call, callee: nn.Module | FunctionType | None) -> list[ast.expr] | None:
    """The targets of a cross entropy; none where it is no mean of all but -100; None for another call."""
    if isinstance(callee, nn.Module):
        if type(callee).__module__ != nn.CrossEntropyLoss.__module__:
            return None
        if not isinstance(callee, nn.CrossEntropyLoss):
            return []  # another loss is added
        is_mean = callee.reduction == "mean" and callee.ignore_index == -100 and callee.weight is None
    else:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
        if callee is not None or name != "cross_entropy":
            return None
        usual = {"reduction": "'mean'", "ignore_index": "-100"}
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        is_usual = all(keywords.get(name, value) == value for name, value in usual.items())
        is_mean = is_usual and "weight" not in keywords and len(call.args) <= 2
    targets = [*call.args[1:], *(keyword.value for keyword in call.keywords if keyword.arg == TARGET)]
    return targets if is_mean and len(targets) == 1 else []


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


Counting = Literal["all", "shifted"]
"""Which labels count: all, or all but the first of each row; those of -100 never do."""
_OUTPUTS = {"logits", "last_hidden_state", "hidden_states", "decoder_hidden_states", "encoder_last_hidden_state"}
_LOSSES = {"cross_entropy", "CrossEntropyLoss", "fixed_cross_entropy"}


def counting(module: nn.Module, step_functions: frozenset[FunctionType] = frozenset()) -> Counting | None:
    """Return how the losses of `module` count label tokens; None where they do not, unlike ways, or nobody knows.

    Args:
        module: whose models take labels.
        step_functions: code of a step that computes its loss itself; read where no model takes labels.
    """
    ways = {_behind(_of_model(model), *step_functions) for model in _models(module)}
    if not ways and step_functions:
        has_loss = any(isinstance(part, nn.CrossEntropyLoss) for part in module.modules())
        ways = {_of_functions(step_functions, has_loss=has_loss)}
    return ways.pop() if len(ways) == 1 else None


def takes_labels(module: nn.Module) -> bool:
    """Whether any model in `module` takes labels, and may give a loss of its own."""
    return next(_models(module), None) is not None


def leaves_loss(functions: frozenset[FunctionType]) -> bool:
    """Whether a step takes logits or states of what a model returns, and never its loss: the loss is the step's own."""
    nodes = _nodes(functions)
    items = [node for node in nodes if isinstance(node, ast.Subscript) and not isinstance(node.value, ast.Attribute)]
    read = {getattr(node.slice, "value", None) for node in items}  # not that of `x.shape[0]`
    read |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self"}
    return bool(read & _OUTPUTS) and not read & {"loss", 0}


def hands_on(functions: frozenset[FunctionType]) -> bool:
    """Whether a step computes a cross entropy, or gives labels to what is neither its own nor torch's: token means."""
    left_out = {"len", "get", "pop", *(function.__name__ for function in functions)}
    calls = [(ast.unparse(node.func).split("."), node) for node in _nodes(functions) if isinstance(node, ast.Call)]
    has_loss = any(_LOSSES & (names(function) or frozenset()) for function in functions)
    others = [call for path, call in calls if path[0] != "torch" and path[-1] not in left_out]
    arguments = [_unmoved(arg) for call in others for arg in call.args]
    arguments += [_unmoved(keyword.value) for call in others if _OUTPUTS & _words(call) for keyword in call.keywords]
    return has_loss or any(isinstance(arg, (ast.Name, ast.Subscript)) and _is_of_labels(arg) for arg in arguments)


def averages_samples(module: nn.Module, functions: frozenset[FunctionType]) -> bool:
    """Whether a step takes the cross entropies of tokens one by one, and nothing that tells of a mean over all of them.

    That is a sum over everything, by whose result a mean over tokens is divided, and a mask that takes tokens out.
    """
    nodes = _nodes(functions)
    calls = [(ast.unparse(node.func).split("."), node) for node in nodes if isinstance(node, ast.Call)]
    reductions = [loss.reduction for loss in module.modules() if isinstance(loss, nn.CrossEntropyLoss)]
    for path, call in calls:
        if path[-1] in _LOSSES:
            written = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "reduction"]
            reductions.append("none" if written == ["'none'"] else "mean")
        if path[-1] == "masked_select" or (
            path[-1] == "sum" and len(call.args) + len(call.keywords) == (path[0] == "torch")
        ):
            return False
    keys = [node.slice for node in nodes if isinstance(node, ast.Subscript)]
    return set(reductions) == {"none"} and not any(
        isinstance(key, (ast.Name, ast.Compare, ast.UnaryOp)) for key in keys
    )


def _unmoved(node: ast.expr) -> ast.expr:
    """What an expression moves or casts: ``labels[:, 1:]`` of ``labels[:, 1:].flatten()``."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KEEP_VALUES:
        node = node.func.value
    return node


def _nodes(functions: Iterable[FunctionType]) -> list[ast.AST]:
    return [node for function in functions if (tree := tree_of(function)) is not None for node in ast.walk(tree)]


def _models(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules inside of `module` whose forward takes labels."""
    for child in module.children():
        forward = method_of(type(child), "forward")
        if forward is not None and "labels" in forward.__code__.co_varnames[: forward.__code__.co_argcount]:
            yield child
        else:
            yield from _models(child)


def _of_model(model: nn.Module) -> Counting | None:
    forward = method_of(type(model), "forward")
    assert forward is not None
    named = names(forward) or frozenset()
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return "all" if named & {*_LOSSES, "loss_function"} else counting(model)
    if "loss_function" in named:
        loss = function_of(getattr(model, "loss_function", None))
        return None if loss is None else _of_functions(frozenset((loss, forward)))
    if named & _LOSSES:
        return _of_functions(frozenset((forward,)))
    return _behind(counting(model), forward)


def _of_functions(functions: frozenset[FunctionType], *, has_loss: bool = False) -> Counting | None:
    if not has_loss and not any(_LOSSES & (names(function) or frozenset()) for function in functions):
        return None
    return "shifted" if any(_shifts(function) for function in functions) else "all"


def _shifts(function: FunctionType) -> bool:
    """Whether `function` takes its labels without the first of each row: ``labels[..., 1:]``."""
    tree = tree_of(function)
    return tree is not None and any(
        isinstance(node, ast.Subscript)
        and _is_of_labels(node.value)
        and isinstance(node.slice, ast.Tuple)
        and isinstance(last := node.slice.elts[-1], ast.Slice)
        and isinstance(last.lower, ast.Constant)
        and last.lower.value == 1
        and last.upper is None
        for node in ast.walk(tree)
    )


def _behind(way: Counting | None, *functions: FunctionType) -> Counting | None:
    """Return how labels count that some of `functions` may put behind something: the first is then predicted, too."""
    return "all" if way == "shifted" and any(map(_puts_before, _nodes(functions))) else way


def _puts_before(node: ast.AST) -> bool:
    """Whether a call puts something before labels: ``torch.cat([prefix, labels], 1)``, ``F.pad(labels, (n, 0))``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
        return False
    first, *others = node.args
    if node.func.attr in ("cat", "concat", "concatenate") and isinstance(first, (ast.List, ast.Tuple)):
        are_labels = [_is_of_labels(element) and not _makes(element) for element in first.elts]
        return True in are_labels[1:] and not are_labels[0]
    widths = [*others, *(keyword.value for keyword in node.keywords if keyword.arg == "pad"), None][0]
    is_padded = node.func.attr == "pad" and _is_of_labels(first) and isinstance(widths, (ast.List, ast.Tuple))
    # a negative width cuts the first labels off: ``F.pad(labels, (-1, 1))`` moves them
    return is_padded and ast.unparse(widths.elts[0])[0] not in "0-"  # type: ignore[union-attr]


def _makes(node: ast.expr) -> bool:
    """Whether an expression is a call that makes other values: ``labels.new_full(...)``."""
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") not in KEEP_VALUES


def _is_of_labels(node: ast.expr) -> bool:
    """Whether an expression has a name with ``label`` or ``target`` in it: ``batch["labels"]``, ``self.targets``."""
    return any("label" in word or "target" in word for word in _words(node))


def _words(node: ast.AST) -> set[str]:
    """The names, attributes, texts and names of arguments in an expression."""
    words = [getattr(child, name, None) for child in ast.walk(node) for name in ("id", "attr", "value", "arg")]
    return {word for word in words if isinstance(word, str)}
