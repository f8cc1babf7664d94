"""Whether the loss of a step is a mean over label tokens, and which labels it counts, as the code of models says it.

A causal language model predicts each next token, and so leaves the first label of each row out; a masked or a
sequence-to-sequence model counts all. Models are the outermost submodules whose forward takes ``labels``; where one
only passes them on, those inside of it. What calls no cross entropy, itself or by transformers' ``loss_function`` (a
CTC loss, a regression) is no such mean.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FunctionType
from typing import Literal

from torch import nn

from lightning_mm5d.source.trees import function_of, method_of, names, tree_of

Counting = Literal["all", "shifted"]
"""Which labels count: all, or all but the first of each row; those of -100 never do."""
_LOSSES = {"cross_entropy", "CrossEntropyLoss", "fixed_cross_entropy"}


def counting(module: nn.Module, own: frozenset[FunctionType] = frozenset()) -> Counting | None:
    """Return how the losses of `module` count label tokens; None where they do not, unlike ways, or nobody knows.

    Args:
        module: whose models take labels.
        own: code of a step that computes its loss itself; read where no model takes labels.
    """
    found = {_of_model(model) for model in _models(module)}
    if not found and own:
        has_loss = any(isinstance(part, nn.CrossEntropyLoss) for part in module.modules())
        found = {_of_functions(own, has_loss=has_loss)}
    return found.pop() if len(found) == 1 else None


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
    found = names(forward) or frozenset()
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return "all" if found & {*_LOSSES, "loss_function"} else counting(model)
    if "loss_function" in found:
        loss = function_of(getattr(model, "loss_function", None))
        return None if loss is None else _of_functions(frozenset((loss, forward)))
    if found & _LOSSES:
        return _of_functions(frozenset((forward,)))
    return counting(model)


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


def _is_of_labels(node: ast.expr) -> bool:
    """Whether an expression has a name with ``label`` or ``target`` in it: ``batch["labels"]``, ``self.targets``."""
    said = [getattr(one, name, None) for one in ast.walk(node) for name in ("id", "attr", "value")]
    return any(isinstance(one, str) and ("label" in one or "target" in one) for one in said)
