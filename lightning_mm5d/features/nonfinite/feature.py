"""What happens to an optimizer's step when a loss or a gradient is not finite: agreed by all ranks before it.

One number is reduced over all ranks for each step of an optimizer, and only where the user asks for it. The names of
what is not finite travel only when something is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_mm5d.checkpoint.optimizer_state import names_of
from lightning_mm5d.config.errors import NonFiniteError
from lightning_mm5d.engine.run_groups import gather_texts
from lightning_mm5d.sharded.collectives import message_device
from lightning_mm5d.trainer.feature import Attached, Feature, Running
from lightning_mm5d.trainer.optimization import AroundUpdates, SkippedUpdate

_NAMED = 3  # ranks in one message


class OnNonFinite(Feature):
    """The field `on_nonfinite`: ``propagate`` looks at nothing, ``raise`` and ``skip`` let no parameter change."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._reaction: Literal["propagate", "raise", "skip"] = fields["on_nonfinite"]

    def attach(self, running: Running) -> Attached | None:
        """Look at the loss of each backward, and at gradients before each step of an optimizer."""
        return None if self._reaction == "propagate" else _NonFinite(self._reaction, running)


class _NonFinite(Attached, AroundUpdates):
    """Looks for losses and gradients that are not finite."""

    def __init__(self, reaction: Literal["raise", "skip"], running: Running) -> None:
        self._reaction, self._module, self._device = reaction, running.module, message_device(running.device)
        self._names, self._stages = names_of(running.module), running.plan.topology.stage_names()
        self._skipped = 0
        self._losses: list[Tensor] = []
        running.optimization.around.append(self)
        precision = running.trainer.precision_plugin
        prepared = precision.pre_backward

        def pre_backward(loss: Tensor, module: pl.LightningModule) -> Any:
            self._losses.append(loss.detach())  # as it is before a scaler
            return prepared(loss, module)

        self.put_attribute(precision, "pre_backward", pre_backward)

    def ready(self, optimizer: Optimizer, *, is_scaled: bool) -> None:
        """Look before an optimizer's step, with summed gradients; collective.

        Raises:
            NonFiniteError: on all ranks, with ``raise``.
            SkippedUpdate: on all ranks, with ``skip``.
        """
        bad = torch.tensor(float(self._is_bad(optimizer, is_scaled)), device=self._device)
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        losses, self._losses = self._losses, []
        if not bool(bad):
            return
        texts = gather_texts(self._local_text(optimizer, losses, is_scaled), self._device)
        message = f"step {self._module.global_step}: {self._named(texts)}"
        if self._reaction == "raise":
            raise NonFiniteError(f"{message}. No parameter was changed by it")
        rank_zero_warn(f"{message}. The optimizer's step is skipped, as {self._skipped} before it", stacklevel=8)
        self._skipped += 1
        raise SkippedUpdate

    def _is_bad(self, optimizer: Optimizer, is_scaled: bool) -> bool:
        """Return whether a loss or gradient of this rank is not finite."""
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norms = torch._foreach_norm(grads) if grads and not is_scaled else []
        kinds = {(norm.dtype, norm.device) for norm in norms}
        stacked = [torch.stack([norm for norm in norms if (norm.dtype, norm.device) == kind]) for kind in kinds]
        flags = [value.isfinite().all().to(self._device) for value in (*self._losses, *stacked)]
        if not flags or all(torch.stack(flags).tolist()):
            return False
        # a norm may overflow where no element does, and is many times as fast
        exact = grads if norms else []
        return any(not bool(value.isfinite().all()) for value in (*self._losses, *exact))

    def _local_text(self, optimizer: Optimizer, losses: Sequence[Tensor], is_scaled: bool) -> str:
        """Return what is not finite on this rank, in words; empty where all is."""
        bad = [float(loss) for loss in losses if not bool(loss.isfinite().all())]
        if bad:
            return f"loss {bad[0]}"
        named = [
            self._names.get(id(parameter), "a parameter")
            for group in optimizer.param_groups
            for parameter in group["params"]
            if not is_scaled and parameter.grad is not None and not bool(parameter.grad.isfinite().all())
        ]
        more = f" and of {len(named) - 1} more" if len(named) > 1 else ""
        return f"gradient of {named[0]}{more}" if named else ""

    def _named(self, texts: Sequence[str]) -> str:
        """Return where it is; a loss that is not finite comes before the gradients that it makes so."""
        first = [rank for rank, text in enumerate(texts) if text.startswith("loss")]
        ranks = first or [rank for rank, text in enumerate(texts) if text]
        shown = [f"{texts[rank]} on rank {rank} ({self._stages[rank]})" for rank in ranks[:_NAMED]]
        more = [f"{len(ranks) - _NAMED} more ranks"] if len(ranks) > _NAMED else []
        return f"not finite: {', '.join([*shown, *more])}"


FEATURE = OnNonFinite
