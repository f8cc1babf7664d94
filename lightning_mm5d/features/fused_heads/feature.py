"""Puts chosen heads in place, whose logits are computed with their loss, with `fused_linear_cross_entropy`.

A head returns `LazyLogits` while a run of a step is under way. At the end of the step logits that somebody still holds
are computed, because weights may change after it. Outside of runs, and in evaluations that all ranks run in lock step,
heads compute what they always did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.features.fused_heads.lazy_logits import Head, lazy_logits, settle
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.class_operations import Columns
from lightning_mm5d.sharded.removable import Removable
from lightning_mm5d.sharded.sequence import is_tokens
from lightning_mm5d.sharded.tensor import Sharded
from lightning_mm5d.stage import Runtime
from lightning_mm5d.trainer.feature import Feature


class FusesHeads(Feature):
    """The field `Modality.compute.fused_linear_cross_entropy`."""

    def check(self, module: pl.LightningModule, plan: Plan, device: torch.device) -> None:
        """Refuse a module none of whose models names a linear layer as its output embeddings."""
        if (name := _fused(plan)) is not None and not heads(module):
            rule = "It fuses a linear head with its loss, and no model here returns one from get_output_embeddings()"
            fix = (
                "Leave it unset, or let the model have that method as models of transformers do. It must return a "
                "torch.nn.Linear without an adapter, such as one of LoRA, on it"
            )
            raise ConfigError(f"modalities.{name}.compute.fused_linear_cross_entropy", True, rule, fix)

    def needs_schedule(self, plan: Plan) -> bool:
        """Whether there is a step to end."""
        return _fused(plan) is not None

    def cut(self, runtime: Runtime, plan: Plan, device: torch.device) -> Callable[[], None] | None:
        """Let heads return logits that are computed later."""
        return None if _fused(plan) is None else FusedHeads(runtime).remove


def heads(root: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers that models in `root` name as their output embeddings, by path."""
    layers: dict[str, nn.Linear] = {}
    paths = {module: path for path, module in root.named_modules()}
    for module in paths:
        named = getattr(module, "get_output_embeddings", None)
        head = named() if callable(named) else None
        if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and head in paths:
            layers[paths[head]] = head
    return layers


def _fused(plan: Plan) -> str | None:
    return next(
        (name for name, modality in plan.modalities.items() if modality.compute.fused_linear_cross_entropy), None
    )


class FusedHeads(Removable):
    """The heads of one rank, from the making of this object to `remove`.

    Args:
        runtime: the module and its stages.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._settle: list[Callable[[], None]] = []
        self._heads: set[nn.Module] = set()
        held = frozenset().union(*runtime.stages.values())

        def whole(head: nn.Module, input: Tensor) -> Tensor:
            lazy = self._lazy(head, input, None)
            return nn.Linear.forward(head, input) if lazy is None else lazy  # type: ignore[arg-type]

        for path, head in heads(runtime.root).items():
            if f"{path}.weight" in held:
                self._heads.add(head)
                if "forward" not in vars(head):  # else it is sharded over tensor parallel ranks
                    self.put_forward(head, whole)
        if runtime.tensor is not None:
            self.put_attribute(runtime.tensor, "computes_logits", self._lazy)
        runtime.ends.append(self.settle)

    def settle(self) -> None:
        """End a step: compute logits that somebody still holds."""
        for each in self._settle:
            each()
        self._settle.clear()

    def _lazy(self, head: Any, hidden: Tensor, columns: Columns | None) -> Tensor | None:
        """Return the logits of plain hidden states, or of this rank's tokens; None where they are computed at once."""
        if head not in self._heads or self._runtime.active is None or hidden.dim() < 2:
            return None
        if isinstance(hidden, Sharded):
            if not is_tokens(hidden.group) or hidden.sharded_dim != -2:
                return None
        elif type(hidden) is not Tensor:
            return None
        # of no rows and classes: tells the dtype, and lets parameters that are not here yet arrive
        local = hidden.local if isinstance(hidden, Sharded) else hidden
        bias = None if head.bias is None else head.bias[:0]
        example = F.linear(local.detach().narrow(-2, 0, 0), head.weight[:0], bias)
        if type(example) is not Tensor or not example.is_floating_point() or example.is_meta:
            return None
        logits = lazy_logits(Head(module=head, dtype=example.dtype, columns=columns), hidden)
        self._settle.append(settle(logits))
        return logits


FEATURE = FusesHeads
