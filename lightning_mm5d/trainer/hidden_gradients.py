"""Stands for gradients of shared parameters while these show full tensors, as stages 1 and 2 do between batches.

A rank has the gradients of its rows alone, which it keeps beside the parameter until that shows rows
again. One process has a gradient there: in an accumulation that of the batches so far, after a step the one that was
stepped with. A stand-in in its place can be dropped and zeroed, as `zero_grad` does; other uses of it raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data_parallel.shared_parameters import SharedParameter, SharedParameters
from lightning_mm5d.plan.holdings import DataShard
from lightning_mm5d.sharded.remote_value import TELLING, plain

_ZEROS = {Tensor.zero_, torch.zero_, torch._foreach_zero_}


class _StandIn(Tensor):
    """A gradient that this rank has in part, full of NaN and without memory."""

    path: str
    zeroes: Callable[[], None]
    rule: str
    instead: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TELLING:
            with plain():
                return func(*args, **(kwargs or {}))
        first: Any = args[0] if args else None
        operands: list[Any] = list(first) if isinstance(first, (list, tuple)) else [first]
        if func in _ZEROS:
            for operand in operands:
                if isinstance(operand, _StandIn):
                    operand.zeroes()
                else:
                    operand.zero_()
            return first
        arguments = [*operands, *args[1:], *(kwargs or {}).values()]
        hidden = next(argument for argument in arguments if isinstance(argument, _StandIn))
        raise ConfigError(f"{hidden.path}.grad", "a use between batches", hidden.rule, hidden.instead)


def stand_in(
    path: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    zeroes: Callable[[], None],
    rule: str,
    fix: str,
) -> Tensor:
    """Return a gradient that can be dropped and zeroed, by `zeroes`, and whose other uses raise ConfigError.

    Args:
        path: of the parameter.
        shape: of the gradient.
        dtype: of the gradient.
        device: of the gradient.
        zeroes: sets what it stands for to zero.
        rule: why it cannot be used.
        fix: what can be.
    """
    with torch.inference_mode(False):
        empty = torch.full((), float("nan"), dtype=dtype, device=device)
        shown = torch.Tensor._make_subclass(_StandIn, empty.expand(*shape))
    shown.path, shown.zeroes, shown.rule, shown.instead = path, zeroes, rule, fix
    return shown


def is_stand_in(gradient: Any) -> bool:
    """Whether a gradient is one of `stand_in`."""
    return isinstance(gradient, _StandIn)


class HiddenGradients:
    """Shows stand-ins between batches.

    Args:
        shared: the parameters of which this rank owns rows.
        names: of parameters, by id.
    """

    def __init__(self, shared: SharedParameters, names: dict[int, str]) -> None:
        self._shared, self._names = shared, names
        self._shown: list[tuple[SharedParameter, Tensor]] = []

    def show(self) -> None:
        """Show a stand-in for each gradient that is kept beside a parameter."""
        self.take()
        for shared in self._shared.all:
            if shared.is_whole and not shared.rests_own and shared.gradient is not None:
                parameter = shared.parameter
                shown = stand_in(
                    self._names.get(id(parameter), "parameter"),
                    parameter.shape,
                    parameter.dtype,
                    parameter.device,
                    partial(_zero, shared),
                    "Ranks that share a parameter (zero_stage) have gradients of their rows alone, and between batches "
                    "it shows its full tensor",
                    "Use it in a hook of the module or of a callback, or in `with trainer.strategy.full_gradients():`",
                )
                parameter.grad = shown
                self._shown.append((shared, shown))

    def take(self) -> None:
        """Take the stand-ins away, and over what somebody has set in place of one: None, or a full gradient."""
        for shared, shown in self._shown:
            now = shared.parameter.grad
            if shared.is_whole and now is not shown:
                shared.gradient = None if now is None else shared.shard.rows(now).clone()
            if shared.is_whole:
                shared.parameter.grad = None
        self._shown.clear()


def _zero(shared: SharedParameter) -> None:
    if shared.gradient is not None:
        shared.gradient.zero_()


def hooked(name: str, shard: DataShard) -> ConfigError:
    """Return the error for a hook on the shared parameter `name`."""
    other = "ep_size=1" if shard.of_experts else "zero_stage=0"
    rule = "Ranks that share a parameter have the gradients of their rows alone"
    fix = f"Register a hook on a module, change gradients by element in on_before_optimizer_step, or use {other}"
    return ConfigError(f"{name}.register_hook", "a hook on the gradient", rule, fix)
