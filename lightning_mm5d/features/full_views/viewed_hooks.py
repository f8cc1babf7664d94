"""Where code of users runs that may look at parameters, and whether all ranks come there together.

Most hooks run on all ranks at the same place of the loops, so that a look may gather (`HOOKS`). Code that only some
ranks may reach, such as a transfer of a batch that other replicas do not have, sees full shapes and gets an error in
place of a part of a value (`APART`).
"""

from __future__ import annotations

import functools
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mm5d.config.errors import private
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.collectives import of_all_ranks
from lightning_mm5d.sharded.remote_value import is_remote, plain
from lightning_mm5d.sharded.removable import put
from lightning_mm5d.trainer.feature import is_of_user
from lightning_mm5d.trainer.optimization import AroundUpdates

_LOOPS = ("train", "validation", "test", "predict")
HOOKS = (
    *("on_fit_start", "on_fit_end", "on_sanity_check_start", "on_sanity_check_end", "teardown"),
    *(f"on_{loop}_{when}" for loop in _LOOPS for when in ("start", "end", "epoch_start", "epoch_end")),
    *(f"on_{loop}_batch_{when}" for loop in _LOOPS for when in ("start", "end")),
    *(f"on_{loop}_model_{what}" for loop in _LOOPS for what in ("eval", "train", "zero_grad")),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"),
    *("configure_gradient_clipping", "lr_scheduler_step", "optimizer_zero_grad"),
    *("on_save_checkpoint", "on_load_checkpoint"),
)
APART = (
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
    *("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"),
    *("get_metrics", "log_metrics"),
)
"""the last two of progress bars and loggers"""


class Hook(NamedTuple):
    """Code of a user's.

    Attributes:
        owner: of the hook.
        name: as the user knows it.
        call: the hook.
        holder: the dict in which what is called in its place stands.
        key: there.
    """

    owner: Any
    name: str
    call: Callable[..., Any]
    holder: dict[Any, Any]
    key: Any


def of_users(owners: Iterable[Any], names: Iterable[str]) -> list[Hook]:
    """Return the hooks of these names that users wrote, but for callbacks that average local tensors."""
    return [
        Hook(owner, name, call, vars(owner), name)
        for owner in owners
        if not isinstance(owner, WeightAveraging | StochasticWeightAveraging)
        for name in names
        if callable(call := getattr(owner, name, None)) and is_of_user(call)
    ]


def of_all(trainer: pl.Trainer, module: pl.LightningModule) -> list[Hook]:
    """Return the hooks that all ranks call together: of the module, of callbacks, and around steps of optimizers."""
    callbacks = vars(trainer)["callbacks"]
    hooks = [*of_users([module, *callbacks], HOOKS), *of_users(callbacks, ["state_dict"])]
    return [*hooks, *of_steps(trainer.optimizers)]


def of_some(trainer: pl.Trainer, module: pl.LightningModule) -> list[Hook]:
    """Return the hooks that only some ranks may call."""
    datamodule = getattr(trainer, "datamodule", None)
    return of_users([module, *vars(trainer)["callbacks"], *trainer.loggers, datamodule], APART)


def of_steps(optimizers: Iterable[Any]) -> list[Hook]:
    """Return the hooks of users around steps of optimizers."""
    hooks: list[Hook] = []
    for optimizer in optimizers:
        for kind in ("pre", "post") if isinstance(optimizer, Optimizer) else ():
            holder = private(optimizer, f"_optimizer_step_{kind}_hooks")
            hooks += [Hook(optimizer, f"step_{kind}_hook", call, holder, key) for key, call in holder.items()]
    return [hook for hook in hooks if is_of_user(hook.call)]


class LateHooks(AroundUpdates):
    """Finds hooks around steps of optimizers that are registered after these are made, as in `on_train_start`.

    Args:
        known: those that are watched already.
        watch: watches others, once, as the first training step begins.
    """

    def __init__(self, known: Iterable[Hook], watch: Callable[[list[Hook]], None]) -> None:
        self._known, self._watch = [(id(hook.holder), hook.key) for hook in known], watch
        self._is_over = False

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        if not self._is_over:
            self._is_over = True
            self._watch([hook for hook in of_steps(optimizers) if (id(hook.holder), hook.key) not in self._known])


def common(hooks: list[Hook], group: dist.ProcessGroup | None) -> list[Hook]:
    """Return the hooks that every rank has; collective.

    A round that begins in a callback of one rank would never end.
    """
    if group is None:
        return hooks
    seen: Counter[str] = Counter()
    codes = []
    for hook in hooks:
        seen[key := f"{type(hook.owner).__qualname__}.{hook.name}"] += 1
        codes.append(zlib.crc32(f"{key} {seen[key]}".encode()))
    most = torch.tensor(len(codes))
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    local_codes = torch.tensor([*codes, *[-1] * (int(most) - len(codes))], dtype=torch.int64)
    shared = set.intersection(*map(set, of_all_ranks(local_codes, group).tolist()))
    return [hook for hook, code in zip(hooks, codes, strict=True) if code in shared]


class FullShaped(nn.Parameter):
    """A shard that tells the shape of the full tensor.

    Attributes:
        full: a tensor of that shape on the meta device.
    """

    full: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_told = func in _SHAPES and isinstance(args[0], FullShaped)
        with plain():
            return func(vars(args[0])["full"], *args[1:], **kwargs or {}) if is_told else func(*args, **kwargs or {})


_SHAPE: Any = Tensor.shape
_SHAPES = {_SHAPE.__get__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__}


def tell_full_shapes(module: nn.Module, plan: Plan) -> Callable[[], None] | None:
    """Let a `configure_optimizers` of the user's see full shapes; return what undoes it."""
    configure: Any = getattr(module, "configure_optimizers", None)
    if plan.layout.size == 1 or not is_of_user(configure):
        return None

    @functools.wraps(configure)
    def told() -> Any:
        named = [(plan.shapes.get(name), p) for name, p in module.named_parameters() if not is_remote(p)]
        shards = [(p, type(p), shape) for shape, p in named if shape is not None and p.shape != shape]
        try:
            for parameter, _, shape in shards:
                vars(parameter)["full"] = torch.empty(shape, dtype=parameter.dtype, device="meta")
                parameter.__class__ = FullShaped
            return configure()
        finally:
            for parameter, kind, _ in shards:
                parameter.__class__ = kind
                vars(parameter).pop("full", None)

    return put(module, "configure_optimizers", told)
