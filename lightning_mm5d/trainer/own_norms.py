"""Refuses a `backward` that takes the norm of gradients where ranks hold parts of the module.

Hooks see the gradients of all ranks. An overridden `LightningModule.backward` sees those of its rank, before ranks sum
them: with another norm on each rank weights drift from those of one process. What the method does is read from its
source and from that of the methods that it calls.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import grad_norm

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.plan.data_shards import DataShards
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.source.names import names
from lightning_mm5d.source.trees import Source, decorated, method_of

_CLIPS = {"clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm"}
_NORMS = {"norm", "vector_norm", "_foreach_norm"}


def check_norms(module: pl.LightningModule, plan: Plan) -> None:
    """Refuse a module whose `backward` takes a norm of gradients of one rank alone.

    Raises:
        ConfigError: where ranks hold several stages, shards or rows.
    """
    parts = plan.division.shards or DataShards(plan).exist
    if plan.topology.is_replicated and not parts:
        return
    if found := _norm_in(Source(), type(module), "backward"):
        raise ConfigError(
            f"{type(module).__name__}.backward",
            found,
            "It takes the norm of the gradients of one rank, before they are summed over ranks",
            "Do it in on_after_backward or on_before_optimizer_step, which see full gradients",
        )


def _norm_in(source: Source, cls: type, hook: str) -> str:
    """Return the name of what takes a norm in a hook, "" where nothing does or where its source is unknown."""
    for function in _called(source, cls, hook):
        named = names(source, function, variables=False) or frozenset()
        for name in sorted(named):
            if name in _CLIPS or (name == "grad_norm" and "strategy" not in named and _is_lightnings(function)):
                return name
        if "grad" in named and _calls_norm(source, function):
            return "the norm of .grad"
    return ""


def _called(source: Source, cls: type, hook: str) -> Iterator[FunctionType]:
    """Yield the functions of a hook, and those that it names: methods of the same class, and functions beside it."""
    waiting, seen = [getattr(cls, hook, None)], set[Any]()
    while waiting:
        for function in decorated(waiting.pop()):
            if function in seen or function.__module__.startswith(("lightning.", "torch.")):
                continue
            seen.add(function)
            yield function
            named = names(source, function, variables=False) or frozenset()
            waiting += [method_of(cls, name) or function.__globals__.get(name) for name in named]


def _calls_norm(source: Source, function: FunctionType) -> bool:
    tree = source.tree(function)
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)] if tree is not None else []
    return any(isinstance(call, ast.Attribute) and call.attr in _NORMS for call in calls)


def _is_lightnings(function: FunctionType) -> bool:
    return function.__globals__.get("grad_norm", grad_norm) is grad_norm
