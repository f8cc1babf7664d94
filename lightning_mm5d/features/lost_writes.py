"""Tells of what a step writes where nobody sees it, because it ends on another rank than rank 0, and of numbers of
ranks that steps and hooks compute with.

``trainer.is_global_zero`` is true in a step where that of the first replica ends, so files are written there. A logger
writes on rank 0 alone; ``rank_zero_only`` and ``self.global_rank == 0`` ask for rank 0, where the step is cut off.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FunctionType

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_mm5d.source.trees import decorated, reached, tree_of
from lightning_mm5d.trainer.feature import Attached, Feature, Running


class LostWrites(Feature):
    """Reads the code of steps and hooks where some ranks are no replicas of the data."""

    def attach(self, running: Running) -> Attached | None:
        """Tell of what the run calls."""
        trainer, layout, topology = running.trainer, running.plan.layout, running.plan.topology
        if layout.size > layout.num_replicas:
            ends_on = topology.instances(topology.last_stage)[0][0]
            for step in _STEPS[trainer.state.fn] if trainer.state.fn is not None else ():
                tell_of_ranks(running.module, step, ends_on, layout.num_replicas, layout.size)
            owners = running.module, getattr(trainer, "datamodule", None), *vars(trainer)["callbacks"]
            tell_of_counts(owners, layout.num_replicas, layout.size)
        return None


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
            reason = _reason(node, type(module), function, aliases) if ends_on else None
            counts = _counts(node, ranks)
            if isinstance(node, (ast.expr, ast.AugAssign)) and (reason is not None or counts):
                where = _where(node, tree, function)
                what = f"{step} ends on rank {ends_on}, and {where} {reason}"
                rank_zero_warn(_COUNTS.format(where, world, replicas) if counts else what, stacklevel=4)


def tell_of_counts(owners: Iterable[object], replicas: int, world: int) -> None:
    """Warn on rank 0 of lines of hooks that compute with the number of ranks, or sum over all, as users of DDP do.

    A mean, which divides what is summed over all ranks by their number or by another such sum, is right.

    Args:
        owners: the LightningModule, its datamodule and callbacks.
        replicas: of the data.
        world: all ranks, which are more.
    """
    pairs = [(type(owner), name) for owner in owners for name in dir(type(owner)) if name.startswith(_HOOKS)]
    functions = {function: 0 for cls, name in pairs for function in reached(cls, name)}
    for function in functions:
        if function.__module__.startswith(("lightning", "pytorch_lightning")) or (tree := tree_of(function)) is None:
            continue
        sizes = _aliases(tree, _is_size)
        sums = [call for call in ast.walk(tree) if isinstance(call, ast.Call) and _is_sum(call, function)]
        terms = [term for term in ast.walk(tree) if isinstance(term, (ast.BinOp, ast.AugAssign))]
        counts = [term for term in terms if any(_is_size(side, sizes) for side in _sides(term))]
        if sums and (any(isinstance(term.op, ast.Div) for term in counts) or _has_ratio(terms, sums)):
            continue
        for term in counts:
            rank_zero_warn(_COUNTS.format(_where(term, tree, function), world, replicas), stacklevel=4)
        for call in sums:
            rank_zero_warn(_SUMS.format(_where(call, tree, function), world, replicas), stacklevel=4)


_STEPS = {
    TrainerFn.FITTING: ("training_step", "validation_step"),
    TrainerFn.VALIDATING: ("validation_step",),
    TrainerFn.TESTING: ("test_step",),
    TrainerFn.PREDICTING: ("predict_step",),
}
_HOOKS = ("on_", "configure_optimizers", "lr_scheduler_step", "optimizer_step", "setup")
_COUNTS = (
    "{} counts all {} ranks, and the replicas of the data are {}. Where DDP's ranks are meant, use "
    "self.trainer.strategy.replica_rank and .num_replicas"
)
_SUMS = (
    "{} goes over all {} ranks, and the replicas of the data are {}: sums, lists and counts hold what a replica has "
    "several times. Use self.all_gather(value), self.trainer.strategy.reduce(value, reduce_op='sum') or "
    "self.log(..., sync_dist=True), which count each replica once"
)
_COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "gather_object", "all_gather_into_tensor", "gather")


def _where(node: ast.expr | ast.AugAssign, tree: ast.FunctionDef, function: FunctionType) -> str:
    code = function.__code__
    line = f"{Path(code.co_filename).name}:{code.co_firstlineno + node.lineno - tree.lineno}"
    return f"{ast.unparse(node)} in {function.__qualname__} ({line})"


def _is_size(node: ast.AST | None, aliases: frozenset[str] = frozenset()) -> bool:
    """Whether a node is the number of all ranks, or of the devices of a node."""
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return any(map(_is_size, node.args)) if name in ("max", "min", "float", "int") else name == "get_world_size"
    if isinstance(node, ast.Name):
        return node.id in aliases
    return isinstance(node, ast.Attribute) and node.attr in ("world_size", "num_devices")


def _sides(node: ast.BinOp | ast.AugAssign) -> tuple[ast.expr, ...]:
    return (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)


def _has_ratio(terms: Iterable[ast.BinOp | ast.AugAssign], sums: Iterable[ast.Call]) -> bool:
    """Whether one sum over all ranks is divided by another: ``correct / count``, ``self.sums[0] / self.sums[1]``."""
    summed = {ast.unparse(call.args[0]) for call in sums if call.args}
    ratios = [term for term in terms if isinstance(term, ast.BinOp) and isinstance(term.op, ast.Div)]
    return any(all(_named(side) in summed for side in _sides(term)) for term in ratios)


def _named(node: ast.expr) -> str:
    """The tensor that a number is taken of: ``self.sums`` of ``float(self.sums[0].item())``."""
    while True:
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value
        elif isinstance(node, ast.Call) and len(node.args) == 1:
            node = node.args[0]
        else:
            return ast.unparse(node)


def _is_sum(node: ast.Call, function: FunctionType) -> bool:
    """Whether a call is of a collective of torch.distributed over all ranks that adds or lists what they have."""
    if any(keyword.arg == "group" for keyword in node.keywords):
        return False
    if any(reduction in ast.unparse(node) for reduction in ("MAX", "MIN", "AVG")):
        return False
    name, _, last = ast.unparse(node.func).rpartition(".")
    if last not in _COLLECTIVES:
        return False
    known = function.__globals__.get(name or last)
    return name == "torch.distributed" or getattr(known, "__name__" if name else "__module__", "").startswith(
        "torch.distributed"
    )


def _is_rank(node: ast.AST | None) -> bool:
    """Whether a node is the number of a rank, or that of all ranks."""
    if isinstance(node, ast.Call):
        return not node.args and getattr(node.func, "attr", getattr(node.func, "id", "")) in _ASKED
    return isinstance(node, ast.Attribute) and node.attr in ("global_rank", "world_size")


def _counts(node: ast.AST, ranks: frozenset[str]) -> bool:
    """Whether a node indexes or computes with a number of ranks; `ranks` are names of these."""

    def is_rank(part: ast.AST) -> bool:
        return _is_rank(part) or (isinstance(part, ast.Name) and part.id in ranks)

    if isinstance(node, ast.Subscript):
        return any(map(is_rank, ast.walk(node.slice)))
    if isinstance(node, ast.AugAssign):
        return is_rank(node.value)
    return isinstance(node, ast.BinOp) and (is_rank(node.left) or is_rank(node.right))


_ASKED = frozenset(("get_rank", "get_world_size"))
_LOSSLESS = frozenset(("log_metrics", "log_dir", "save_dir", "root_dir", "name", "version"))  # where nothing is lost
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
        return node.attr not in _LOSSLESS and _is_logger(node.value, aliases)
    if not isinstance(node, ast.Call) or getattr(node.func, "id", "") in _LOOKING:
        return False
    return any(_is_logger(arg, aliases) for arg in (*node.args, *(keyword.value for keyword in node.keywords)))


def _reason(node: ast.AST, cls: type, function: FunctionType, aliases: frozenset[str]) -> str | None:
    if _uses_logger(node, aliases):
        return (
            "logs on rank 0 alone, so that it is lost. Use self.log, or keep the value in an attribute, which all "
            "ranks see in hooks (self.images = images), and make the same call in on_train_batch_end, "
            "on_validation_batch_end or on_validation_epoch_end"
        )
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
        sides = (node.left, node.comparators[0])
        if any(getattr(side, "attr", "") in ("global_rank", "local_rank") for side in sides) and any(
            isinstance(side, ast.Constant) and side.value == 0 for side in sides
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
    functions = list(decorated(value))
    if not functions or functions[-1].__module__.startswith("lightning"):  # `rank_zero_info` and its like
        return False
    return any(wrapper.__code__.co_filename.endswith("rank_zero.py") for wrapper in functions[:-1])


FEATURE = LostWrites
