"""Tells of what a step writes where nobody sees it, because it ends on another rank than rank 0, and of numbers of
ranks that it computes with.

``trainer.is_global_zero`` is true in a step where that of the first replica ends, so files are written there. A logger
writes on rank 0 alone; ``rank_zero_only`` and ``self.global_rank == 0`` ask for rank 0, where the step is cut off.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_mm5d.source.trees import decorated, reached, tree_of


def tell_of_ranks(module: nn.Module, step: str, ends_on: int, replicas: int, world: int) -> None:
    """Warn on rank 0 of lines of a step that mean another rank than they say; some ranks are no replicas.

    They use a logger, call what is for rank 0 or compare the rank with 0, and the step ends on another one; or they
    index or compute with a number of ranks, as users of DDP do, whose ranks are replicas.

    Args:
        module: the LightningModule.
        step: name of the method.
        ends_on: the rank where the step of the first replica ends.
        replicas: of the data.
        world: all ranks.
    """
    for function in reached(type(module), step):
        tree = tree_of(function)
        if tree is None:
            continue
        aliases, ranks = _aliases(tree, _is_logger), _aliases(tree, _is_rank)
        for node in ast.walk(tree):
            said = _said(node, type(module), function, aliases) if ends_on else None
            counts = _counts(node, ranks)
            if isinstance(node, (ast.expr, ast.AugAssign)) and (said is not None or counts):
                code = function.__code__
                line = f"{Path(code.co_filename).name}:{code.co_firstlineno + node.lineno - tree.lineno}"
                where = f"{ast.unparse(node)} in {function.__qualname__} ({line})"
                what = f"{step} ends on rank {ends_on}, and {where} {said}"
                if counts:
                    what = (
                        f"{where} counts all {world} ranks, and the replicas of the data are {replicas}. Where DDP's "
                        "ranks are meant, use self.trainer.strategy.replica_rank and .num_replicas"
                    )
                rank_zero_warn(what, stacklevel=4)


def _is_rank(node: ast.AST | None) -> bool:
    """Whether a node is the number of a rank, or that of all ranks."""
    if isinstance(node, ast.Call):
        return not node.args and getattr(node.func, "attr", getattr(node.func, "id", "")) in _ASKED
    return isinstance(node, ast.Attribute) and node.attr in ("global_rank", "world_size")


def _counts(node: ast.AST, ranks: frozenset[str]) -> bool:
    """Whether a node indexes or computes with a number of ranks; `ranks` are names of these."""

    def is_rank(one: ast.AST) -> bool:
        return _is_rank(one) or (isinstance(one, ast.Name) and one.id in ranks)

    if isinstance(node, ast.Subscript):
        return any(map(is_rank, ast.walk(node.slice)))
    if isinstance(node, ast.AugAssign):
        return is_rank(node.value)
    return isinstance(node, ast.BinOp) and (is_rank(node.left) or is_rank(node.right))


_ASKED = frozenset(("get_rank", "get_world_size"))
_KEPT = frozenset(("log_metrics", "log_dir", "save_dir", "root_dir", "name", "version"))  # where nothing is lost
_LOOKING = frozenset(("isinstance", "hasattr", "type", "len", "bool", "enumerate", "zip"))


def _aliases(tree: ast.FunctionDef, is_meant: Callable[[ast.AST | None], bool]) -> frozenset[str]:
    """The names that code gives to what is meant: ``logger = self.logger``, ``for one in self.loggers``."""
    pairs: list[tuple[ast.AST, ast.AST | None]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            pairs += [(target, node.value) for target in node.targets]
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs += zip(node.targets[0].elts, node.value.elts, strict=False)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
            pairs.append((node.target, node.value))
        elif isinstance(node, (ast.For, ast.comprehension)):
            pairs.append((node.target, node.iter))
    return frozenset(target.id for target, value in pairs if isinstance(target, ast.Name) and is_meant(value))


def _is_logger(node: ast.AST | None, aliases: frozenset[str] = frozenset()) -> bool:
    if isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Name):
        return node.id in aliases
    return isinstance(node, ast.Attribute) and node.attr in ("logger", "loggers")


def _uses_logger(node: ast.AST, aliases: frozenset[str]) -> bool:
    """Whether a node is an attribute of a logger by which it may write, or hands it to a function."""
    if isinstance(node, ast.Attribute):
        return node.attr not in _KEPT and _is_logger(node.value, aliases)
    if not isinstance(node, ast.Call) or getattr(node.func, "id", "") in _LOOKING:
        return False
    return any(_is_logger(one, aliases) for one in (*node.args, *(keyword.value for keyword in node.keywords)))


def _said(node: ast.AST, cls: type, function: FunctionType, aliases: frozenset[str]) -> str | None:
    if _uses_logger(node, aliases):
        return (
            "logs on rank 0 alone, so that it is lost. Use self.log, or keep the value in an attribute, which all "
            "ranks see in hooks (self.images = images), and make the same call in on_train_batch_end, "
            "on_validation_batch_end or on_validation_epoch_end"
        )
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
        sides = (node.left, node.comparators[0])
        if any(getattr(one, "attr", "") in ("global_rank", "local_rank") for one in sides) and any(
            isinstance(one, ast.Constant) and one.value == 0 for one in sides
        ):
            return "chooses rank 0, where the step is cut off. Use self.trainer.is_global_zero"
    if isinstance(node, ast.Call) and _is_for_rank_zero(node.func, cls, function):
        return "runs on rank 0 alone (rank_zero_only), where the step is cut off. Ask for self.trainer.is_global_zero"
    return None


def _is_for_rank_zero(called: ast.expr, cls: type, function: FunctionType) -> bool:
    """Whether what is called, a method of `cls` or a function beside `function`, has Lightning's decorator."""
    if isinstance(called, ast.Attribute):
        value = getattr(cls, called.attr, None)
    else:
        value = function.__globals__.get(getattr(called, "id", ""))
    found = list(decorated(value))
    if not found or found[-1].__module__.startswith("lightning"):  # `rank_zero_info` and its like
        return False
    return any(one.__code__.co_filename.endswith("rank_zero.py") for one in found[:-1])
