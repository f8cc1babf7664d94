"""What happens to an optimizer's step when a loss or a gradient is not finite: agreed by all ranks before it.

One number is reduced over all ranks for each step of an optimizer, and only where the user asks for it. The names of
what is not finite travel only when something is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_mm5d.config.errors import NonFiniteError
from lightning_mm5d.engine.groups import gather_texts

_NAMED = 3  # ranks in one message


class SkippedStep(Exception):  # noqa: N818 - no error: it ends the optimizer's step
    """Leaves an optimizer's step before it changes anything."""


class NonFinite:
    """Looks for losses and gradients that are not finite.

    Args:
        reaction: ``propagate`` looks at nothing, ``raise`` and ``skip`` leave parameters and optimizers as they were.
        names: of parameters, by identity.
        stages: what each rank runs.
        device: where messages of the default group live.

    Attributes:
        skipped: optimizer steps that were skipped.
    """

    def __init__(
        self,
        reaction: Literal["propagate", "raise", "skip"],
        names: Mapping[int, str],
        stages: Sequence[str],
        device: torch.device,
    ) -> None:
        self.skipped = 0
        self._reaction, self._names, self._stages, self._device = reaction, names, stages, device
        self._losses: list[Tensor] = []

    def note_loss(self, loss: Tensor) -> None:
        """Keep the loss of a backward until the next step of an optimizer."""
        if self._reaction != "propagate":
            self._losses.append(loss.detach())

    def check(self, optimizer: Optimizer, step: int, *, is_scaled: bool) -> None:
        """Look before an optimizer's step, with summed gradients; collective.

        Args:
            optimizer: whose gradients count.
            step: number of the step, for messages.
            is_scaled: whether a scaler looks at the gradients itself, which it lets overflow now and then.

        Raises:
            NonFiniteError: on all ranks, with ``raise``.
            SkippedStep: on all ranks, with ``skip``.
        """
        if self._reaction == "propagate":
            return
        bad = torch.tensor(float(self._is_bad(optimizer, is_scaled)), device=self._device)
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        losses, self._losses = self._losses, []
        if not bool(bad):
            return
        found = gather_texts(self._found(optimizer, losses, is_scaled), self._device)
        message = f"step {step}: {self._named(found)}"
        if self._reaction == "raise":
            raise NonFiniteError(f"{message}. No parameter was changed by it")
        self.skipped += 1
        rank_zero_warn(f"{message}. The optimizer's step is skipped, as {self.skipped - 1} before it", stacklevel=8)
        raise SkippedStep

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

    def _found(self, optimizer: Optimizer, losses: Sequence[Tensor], is_scaled: bool) -> str:
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

    def _named(self, found: Sequence[str]) -> str:
        """Return where it is; a loss that is not finite comes before the gradients that it makes so."""
        first = [rank for rank, text in enumerate(found) if text.startswith("loss")]
        ranks = first or [rank for rank, text in enumerate(found) if text]
        shown = [f"{found[rank]} on rank {rank} ({self._stages[rank]})" for rank in ranks[:_NAMED]]
        more = [f"{len(ranks) - _NAMED} more ranks"] if len(ranks) > _NAMED else []
        return f"not finite: {', '.join([*shown, *more])}"
