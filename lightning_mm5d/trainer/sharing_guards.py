"""Refuses uses of parameters that replicas share, where a rank shows rows of its own in place of full tensors or
gradients.



**Hidden gradients.** Stands for gradients of shared parameters while these show full tensors, as stages 1 and 2 do
between batches. A rank has the gradients of its rows alone, which it keeps beside the parameter until that shows rows
again. One process has a gradient there: in an accumulation that of the batches so far, after a step the one that was
stepped with. A stand-in in its place can be dropped and zeroed, as `zero_grad` does; other uses of it raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data_parallel.shared_parameters import Closed, SharedParameter, SharedParameters
from lightning_mm5d.gradients.gradients import has_hooks
from lightning_mm5d.plan.holdings import DataShard, DataShards
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.remote_value import TELLING, Guard, plain
from lightning_mm5d.sharded.removable import Removable

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
        given: list[Any] = list(first) if isinstance(first, (list, tuple)) else [first]
        if func in _ZEROS:
            for one in given:
                if isinstance(one, _StandIn):
                    one.zeroes()
                else:
                    one.zero_()
            return first
        every = [*given, *args[1:], *(kwargs or {}).values()]
        found = next(one for one in every if isinstance(one, _StandIn))
        raise ConfigError(f"{found.path}.grad", "a use between batches", found.rule, found.instead)


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
        for one in self._shared.all:
            if one.is_whole and not one.rests_own and one.gradient is not None:
                parameter = one.parameter
                shown = stand_in(
                    self._names.get(id(parameter), "parameter"),
                    parameter.shape,
                    parameter.dtype,
                    parameter.device,
                    partial(_zero, one),
                    "Ranks that share a parameter (zero_stage) have gradients of their rows alone, and between batches "
                    "it shows its full tensor",
                    "Use it in a hook of the module or of a callback, or in `with trainer.strategy.full_gradients():`",
                )
                parameter.grad = shown
                self._shown.append((one, shown))

    def take(self) -> None:
        """Take the stand-ins away, and over what somebody has set in place of one: None, or a full gradient."""
        for one, shown in self._shown:
            now = one.parameter.grad
            if one.is_whole and now is not shown:
                one.gradient = None if now is None else one.shard.rows(now).clone()
            if one.is_whole:
                one.parameter.grad = None
        self._shown.clear()


def _zero(shared: SharedParameter) -> None:
    if shared.gradient is not None:
        shared.gradient.zero_()


def check_shared(module: pl.LightningModule, plan: Plan) -> None:
    """Refuse modules that do with parameters what cannot be done with rows of them.

    Raises:
        ConfigError: manual optimization; hooks on shared parameters; sparse gradients of them.
    """
    shards = DataShards(plan)
    if not shards.exist:
        return
    if not module.automatic_optimization:
        rule = "Manual optimization runs its own backward, and ranks that share parameters gather them for a step"
        fix = f"Use automatic optimization, or {'ep_size=1' if plan.experts else 'zero_stage=0'}"
        raise ConfigError("automatic_optimization", False, rule, fix)
    sparse = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding) and part.sparse}
    for name, parameter in module.named_parameters():
        ranks = plan.ownership.ranks_holding(name) if name in plan.partition.owners else ()
        shard = next(filter(None, (shards.of(name, rank) for rank in ranks)), None)
        if shard is None:
            continue
        if has_hooks(parameter):
            raise hooked(name, shard)
        if id(parameter) in sparse:
            rule = "Ranks that share a parameter sum gradients of its rows, which are dense"
            raise ConfigError(f"{name}.sparse", True, rule, "Use sparse=False, or zero_stage=0")


def hooked(name: str, shard: DataShard) -> ConfigError:
    """Return the error for a hook on the shared parameter `name`."""
    other = "ep_size=1" if shard.of_experts else "zero_stage=0"
    rule = "Ranks that share a parameter have the gradients of their rows alone"
    fix = f"Register a hook on a module, change gradients by element in on_before_optimizer_step, or use {other}"
    return ConfigError(f"{name}.register_hook", "a hook on the gradient", rule, fix)


class SharingGuards(Removable):
    """Refuses calls and state dicts of modules while they show rows, until `remove`.

    Args:
        module: of this rank.
        shared: its shared parameters.
        guard: of the values that other ranks have.
    """

    def __init__(self, module: nn.Module, shared: SharedParameters, guard: Guard) -> None:
        self._guard = guard
        for path, part in module.named_modules():
            held = [
                (f"{path}.{name}" if path else name, one)
                for name, parameter in part.named_parameters(recurse=False)
                if (one := shared.get(parameter)) is not None
            ]
            if held:
                self._watch(part, held)

    def _watch(self, part: nn.Module, held: Sequence[tuple[str, SharedParameter]]) -> None:
        def refuse_call(_: nn.Module, args: Any) -> None:
            for name, one in held:
                if not one.is_whole and not self._guard.shows_full:
                    raise self._guard.error(name, "A call outside of a step")

        def refuse_state(_: nn.Module, prefix: str, keep_vars: bool) -> None:
            for name, one in held:
                is_cut = not one.is_whole or isinstance(one.parameter, Closed)
                if not keep_vars and is_cut and not self._guard.shows_full:
                    raise self._guard.error(name, "state_dict()")

        self.changes.callback(part.register_forward_pre_hook(refuse_call).remove)
        self.changes.callback(part.register_state_dict_pre_hook(refuse_state).remove)
