"""`self.all_gather` and the reductions of Lightning: over the replicas of the loss modality, each counted once.

What else sees replicas in place of ranks: the hooks that make dataloaders. A datamodule that shards its data by
`trainer.global_rank` in `train_dataloader` then gives all ranks of a replica the same samples. Lightning asks these
hooks through its data sources, also before a run has been set up. With one replica the order of samples is that of one
process: there is nothing to share out.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_gather

from lightning_mm5d.config.errors import ConfigError, private
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.collectives import carried, of_all_ranks
from lightning_mm5d.sharded.remote_value import settled
from lightning_mm5d.sharded.removable import Removable
from lightning_mm5d.stage import Runtime


class ReplicaCollectives:
    """Collectives over the D replicas of the loss modality.

    Args:
        plan: all stages.
        rank: global rank.
        runtime: tells whether a step is under way; None after a run.
        loss_group: one rank of each replica, this rank among them; None elsewhere, with one replica and after a run.

    Attributes:
        is_plain: whether every rank is a replica.
    """

    def __init__(
        self, plan: Plan, rank: int, runtime: Runtime | None = None, loss_group: dist.ProcessGroup | None = None
    ) -> None:
        layout = plan.layout
        self._runtime, self._rank, self._loss_group, self._world_size = runtime, rank, loss_group, layout.size
        # the rank of each replica where its step ends
        self._sources = [ranks[0] for ranks in plan.topology.instances(plan.topology.last_stage)]
        self.is_plain = len(self._sources) == layout.size
        ranks = range(layout.size) if runtime is not None else ()
        self._shares_ranks = any(len(layout.replicas_of_rank(other)) > 1 for other in ranks)

    def reduce(self, tensor: Tensor, reduce_op: Any) -> Tensor:
        """Return the reduction over one rank of each replica, the same on all ranks; collective.

        Args:
            tensor: of this rank.
            reduce_op: ``"mean"``, ``"sum"``, ``"max"`` or ``"min"``, or an operation of torch.distributed.

        Raises:
            ConfigError: another operation.
        """
        tensor = settled(tensor, "reduce()")
        name = str(getattr(reduce_op, "name", reduce_op)).lower().rpartition(".")[2]
        if name not in ("mean", "avg", "sum", "max", "min", "none"):
            rule = "Replicas are reduced by mean, sum, max or min"
            raise ConfigError("strategy.reduce(reduce_op)", reduce_op, rule, "Use one of these, or all_gather")
        local = carried(tensor.detach())
        if name in ("max", "min"):
            result = local.clone()
            dist.all_reduce(result, dist.ReduceOp.MAX if name == "max" else dist.ReduceOp.MIN)
            return result.to(tensor.device)
        result = local.clone() if self._rank in self._sources else torch.zeros_like(local)
        dist.all_reduce(result)
        result = result.to(tensor.device)
        return result / len(self._sources) if name in ("mean", "avg") else result

    def all_gather(self, tensor: Tensor, sync_grads: bool) -> Tensor:
        """Return ``[D, ...]``, the tensors of one rank of each replica; collective.

        Args:
            tensor: of this rank, of the same shape on all.
            sync_grads: whether gradients flow back to the replicas; inside of a step only.

        Raises:
            ConfigError: replicas run one after the other, because they share ranks and the step generates.
        """
        tensor = settled(tensor, "all_gather()")
        if self._runtime is not None and self._runtime.in_lock_step and self._shares_ranks:
            rule = "The step passes several times through the model, and replicas that share ranks run it in turn"
            fix = "Gather in on_validation_batch_end, or use as many replicas of every modality"
            raise ConfigError("self.all_gather", list(tensor.shape), rule, fix)
        active = None if self._runtime is None else self._runtime.active
        if active is None:
            local = carried(tensor.detach())
            everywhere = [torch.empty_like(local) for _ in range(self._world_size)]
            dist.all_gather(everywhere, local)
            return torch.stack([everywhere[rank] for rank in self._sources]).to(tensor.device)
        if not active.stage.is_last or self._loss_group is None:
            return torch.stack([tensor] * len(self._sources))
        local = carried(tensor if sync_grads else tensor.detach(), self._loss_group)
        if sync_grads:
            return torch.stack(list(all_gather(local, self._loss_group))).to(tensor.device)
        return of_all_ranks(local, self._loss_group).to(tensor.device)


class DataloaderHooks(Removable):
    """Enters a context around each hook that makes dataloaders, until `remove`.

    Args:
        trainer: that asks for dataloaders.
        context: made anew for each call.
    """

    def __init__(self, trainer: pl.Trainer, context: Callable[[], AbstractContextManager[None]]) -> None:
        loops: list[Any] = [trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop]
        loops += [trainer.validate_loop, trainer.test_loop, trainer.predict_loop]
        for source in (private(loop, "_data_source") for loop in loops):
            self.put_attribute(source, "dataloader", _within(context, type(source).dataloader.__get__(source)))


def put_in_no_sampler(trainer: pl.Trainer) -> None:
    """Let Lightning keep the samplers of dataloaders; it would put in a distributed one, which shuffles."""
    connector: Any = private(trainer, "_accelerator_connector")
    private(connector, "use_distributed_sampler")
    connector.use_distributed_sampler = False


def _within(context: Callable[[], AbstractContextManager[None]], hook: Callable[[], Any]) -> Callable[[], Any]:
    def called() -> Any:
        with context():
            return hook()

    return called
