"""Refuses hooks that take the norm of gradients by themselves where ranks hold parts of the module.

Each rank would take the norm of its own gradients, clip by another factor than the rest, and log another number: the
weights drift from those of one process without an error. What a hook does is read from its source and from that of the
methods that it calls; a hook without source is refused where parameters are sharded.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
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
_HOOKS = (
    "configure_gradient_clipping",
    "on_before_optimizer_step",
    "on_after_backward",
    "on_before_zero_grad",
    "on_train_batch_end",
    "optimizer_step",
    "backward",
)


def check_norms(owners: Iterable[pl.LightningModule | pl.Callback], plan: Plan) -> None:
    """Refuse modules and callbacks with a hook that takes a norm of gradients of one rank alone.

    Raises:
        ConfigError: such a hook, where ranks hold several stages, shards or rows.
    """
    parts = plan.division.shards or DataShards(plan).exist
    if plan.topology.is_replicated and not parts:
        return
    source = Source()
    for owner in owners:
        for hook in _HOOKS:
            found = _norm_in(source, type(owner), hook)
            if found is None and not (parts and hook == "configure_gradient_clipping"):
                continue
            if found == "":
                continue
            raise ConfigError(
                f"{type(owner).__name__}.{hook}",
                found or "code without source",
                "It takes the norm of the gradients of one rank, and other ranks hold the rest of the module",
                "Clip by Trainer(gradient_clip_val=...), or call self.clip_gradients(optimizer, "
                "gradient_clip_val=..., gradient_clip_algorithm='norm') in configure_gradient_clipping; log "
                "self.trainer.strategy.gradient_norm()",
            )


def _norm_in(source: Source, cls: type, hook: str) -> str | None:
    """Return the name of what takes a norm in a hook, "" where nothing does, None where its source is unknown."""
    unknown = False
    for function in _called(source, cls, hook):
        named = names(source, function, variables=False)
        unknown |= named is None
        for name in sorted(named or ()):
            if name in _CLIPS or (name == "grad_norm" and _is_lightnings(function)):
                return name
        if named and "grad" in named and _calls_norm(source, function):
            return "the norm of .grad"
    return None if unknown else ""


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
