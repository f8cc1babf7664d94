"""What Lightning asks of a strategy between a backward and the optimizer's step, and its reductions over replicas."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Collection, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mm5d.trainer.checkpoint_strategy import CheckpointStrategy
from lightning_mm5d.trainer.replica_collectives import ReplicaCollectives


class GradientStrategy(CheckpointStrategy, ABC):
    """Sums gradients over ranks at the backward, and lets all ranks step together.

    Args:
        processes: arguments of `CheckpointStrategy`, in its order.
        options: keywords of `CheckpointStrategy`.
    """

    def __init__(self, *processes: Any, **options: Any) -> None:
        super().__init__(*processes, **options)

    # --- gradients ---

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """As Lightning's own, but with gradients summed over ranks before `on_after_backward` shows them to users."""
        module, run = self._module("backward"), self._run("backward")
        self.pre_backward(closure_loss)
        if not (run.is_plain or module.automatic_optimization):
            closure_loss = closure_loss / run.plan.layout.num_replicas  # ranks sum gradients
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        with run.optimization.synced():
            self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        run = self._run("block_backward_sync")
        run.optimization.syncs = False
        try:
            yield
            run.optimization.show_shares(shown=False)
        finally:
            run.optimization.syncs = True
            run.rest()
            run.optimization.hidden.show()

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        result, run = None, self._run("optimizer_step")
        with (
            run.views.suspended("the step of an optimizer"),
            run.optimization.stepping(optimizer, closure, self.precision_plugin) as agreed,
        ):
            result = super().optimizer_step(optimizer, agreed, model, **kwargs)
        run.stepped()
        return result

    def grad_norm(self, norm_type: float = 2.0, names: Collection[str] | None = None) -> Tensor:
        """Return the norm of all gradients of the module, each element counted once, on every rank; collective.

        Args:
            norm_type: the p of the p-norm; ``inf`` for the largest.
            names: of the parameters whose gradients are counted; None for all.

        Returns:
            A tensor of one element, equal on all ranks; 0 where there are no gradients.

        Raises:
            ConfigError: a name is not in the module; nothing runs.
        """
        return self._run("grad_norm").optimization.norm(norm_type, names)

    def gradient_norm(self, norm_type: float = 2.0) -> Tensor:
        """Return `grad_norm` of all gradients: its older name."""
        return self.grad_norm(norm_type)

    def full_parameters(self) -> AbstractContextManager[None]:
        """Return what is entered to see full parameters on every rank, outside of steps; collective.

        What is written to them is taken over by the ranks that hold them. All ranks must write the same. Hooks of
        modules and callbacks need no such context: the first use of a parameter gathers all of them.

        Raises:
            ConfigError: nothing runs.
        """
        return self._run("full_parameters").views.entered("the end of full_parameters()", "values")

    def full_gradients(self) -> AbstractContextManager[None]:
        """Return what is entered to see full gradients on every rank, outside of steps; collective.

        Within it ``parameter.grad`` is the full gradient, or None where no rank has one. What is written or assigned is
        taken over by the ranks that hold the parameter. All ranks must write the same.

        Raises:
            ConfigError: nothing runs.
        """
        return self._run("full_gradients").views.entered("the end of full_gradients()", "gradients")

    # --- communication of Lightning's own ---

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the replicas of the loss modality, each counted once; the same result on all ranks."""
        collectives = self._collectives
        return collectives.reduce(tensor, reduce_op) if isinstance(tensor, Tensor) and collectives else tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather ``[D, ...]`` from the D replicas of the loss modality; inside a step, from within it."""
        # a LightningModule passes the world where its user passed nothing
        collectives = self._collectives
        if collectives is None or collectives.is_plain or group not in (None, dist.group.WORLD):
            return super().all_gather(tensor, group, sync_grads)
        return collectives.all_gather(tensor, sync_grads)

    @property
    def _collectives(self) -> ReplicaCollectives | None:
        """Those of the run, or after it those of its layout; None before the first run."""
        if self._session is not None:
            return self._session.collectives
        if self._last_plan is None or not dist.is_initialized():
            return None
        return ReplicaCollectives.after(self._last_plan, self.global_rank)
