"""Looks at the first loss: NaN where parts of the model are remote, or unequal on ranks that share layers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import Tensor

from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule.stage_key import StageKey
from lightning_mm5d.stage import Runtime, StageError, StageView


class FirstLoss:
    """Checks the first loss that a rank computes, and no later one.

    Args:
        plan: all stages.
        runtime: the patched module.
        views: this rank's stages.
    """

    def __init__(self, plan: Plan, runtime: Runtime, views: Mapping[StageKey, StageView]) -> None:
        self._plan, self._runtime, self._views = plan, runtime, views
        self._checked = False

    def check(self, loss: Tensor, stage: StageKey) -> None:
        """Warn of a loss that is NaN, and refuse unequal losses of the ranks that share the last layers."""
        if self._checked:
            return
        self._checked = True
        self._check_equal(loss, stage)
        if self._plan.topology.edges and bool(loss.detach().isnan()):
            remote = sorted(set(self._plan.partition.layers) - set(self._views[stage].cuts)) or ["earlier layers"]
            warnings.warn(
                f"The loss of the first step is NaN in stage {stage}. If it is not NaN on one process, the step uses "
                f"something there that only other ranks compute ({', '.join(remote)}, embeddings, earlier layers) and "
                "that neither passes through a boundary nor is seen by torch's functions",
                stacklevel=2,
            )

    def _check_equal(self, loss: Tensor, stage: StageKey) -> None:
        """Refuse unequal losses of the ranks that share the last layers: their weights would drift apart."""
        group = self._runtime.sharing(self._plan.partition.loss_modality)
        if group is None:
            return
        value = loss.detach().double()
        highest, lowest = float(group.max(value)), -float(group.max(-value))
        if highest - lowest > 1e-4 * max(abs(highest), abs(lowest)):
            raise StageError(
                f"the ranks that share stage {stage} have unequal losses in the first step, from {lowest:.6g} to "
                f"{highest:.6g}. The step reads the values of a sharded parameter itself (`lm_head.weight`, or a "
                "penalty over `self.parameters()`), or depends on the rank: call the module instead, use the "
                "optimizer's weight_decay, or set tp_size and cp_size to 1"
            )
