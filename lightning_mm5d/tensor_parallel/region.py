"""The stretch of a forward in which each rank works on its own part: from column layers to the row layer behind them.

On the way in a value is copied to the ranks (its partial gradients are summed), or a sequence shard is gathered; on the
way out the partial results are summed, or summed and scattered again. Layers that take the same input share one copy,
so the backward of an attention or a perceptron communicates once, however many projections it has.

Inside, dropout draws from a random stream of the rank's own; outside, all ranks draw the same masks. The rank's stream
starts from a number drawn from the common one, so that a recomputed layer draws again what it drew.

It refuses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mm5d.tensor_parallel.collectives import (
    TensorGroup,
    copy,
    gather_for_shards,
    reduce,
    reduce_scatter,
)
from lightning_mm5d.tensor_parallel.divided import Divided, divided

Linear = Callable[[nn.Module, Tensor, "Tensor | None"], Tensor]
_STREAM = 0x9E3779B97F4A7C15  # odd, so that ranks get seeds that are far apart


class Region:
    """What the divided layers of one modality share on this rank.

    Args:
        group: its tensor parallel ranks.
        drops: whether anything in it may drop values out, so that random streams matter.
        device: where it computes.
    """

    def __init__(self, group: TensorGroup, *, drops: bool, device: torch.device) -> None:
        self.group = group
        self._drops, self._device = drops, device
        self._outer: tuple[Tensor, Tensor | None] | None = None
        self._source: Tensor | None = None
        self._version = 0
        self._entered: Tensor | None = None
        self._sequence: tuple[int, tuple[int, ...]] | None = None

    def enter(self, x: Tensor, training: bool) -> Tensor:
        """Return `x` for work on divided weights; the same `x` gives the same result until `leave`."""
        if self._drops and training and self._outer is None:
            self._switch()
        if x is self._source and self._entered is not None and self._fits(x):
            return self._entered
        if isinstance(x, Divided):
            self._sequence = (x.divided_dim, x.lengths)
            entered = gather_for_shards(x.part, x.divided_dim, x.lengths, self.group)
        else:
            entered = copy(x, self.group) if x.requires_grad and torch.is_grad_enabled() else x
        self._source, self._entered, self._version = x, entered, _version(x)
        return entered

    def leave(self, y: Tensor) -> Tensor:
        """Return the sum of the partial `y` over ranks: whole, or a shard of the sequence where shards came in."""
        sequence = self._sequence
        self.forget()
        if self._outer is not None:
            self._restore()
        if sequence is None:
            return reduce(y, self.group)
        dim, lengths = sequence
        return divided(reduce_scatter(y, dim, lengths, self.group), dim, lengths, self.group)

    def forget(self) -> None:
        """Let go of what came in."""
        self._sequence = self._source = self._entered = None

    def _fits(self, x: Tensor) -> bool:
        assert self._entered is not None
        wants = x.requires_grad and torch.is_grad_enabled()
        return self._entered.requires_grad == wants and _version(x) == self._version

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Draw from the common random stream meanwhile."""
        if self._outer is None:
            yield
            return
        inner = self._states()
        self._restore()
        yield
        self._outer = self._states()
        self._set(inner)

    # --- random streams ---

    def _switch(self) -> None:
        # without a generator of its own: checkpointing puts back the common ones before it recomputes
        seed = int(torch.randint(0, 2**62, ()))
        self._outer = self._states()
        own = (seed + (self.group.index + 1) * _STREAM) % 2**63
        torch.default_generator.manual_seed(own)
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index or 0].manual_seed(own)

    def _restore(self) -> None:
        assert self._outer is not None
        self._set(self._outer)
        self._outer = None

    def _states(self) -> tuple[Tensor, Tensor | None]:
        on_gpu = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return torch.get_rng_state(), on_gpu

    def _set(self, states: tuple[Tensor, Tensor | None]) -> None:
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.cuda.set_rng_state(states[1], self._device)


def linear(module: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return what a linear layer computes of `x` ``[..., in]`` with its weight and `bias`: ``[..., out]``."""
    weight: Any = module.weight
    return F.linear(x, weight if isinstance(module, nn.Linear) else weight.t(), bias)


def drops(module: nn.Module) -> bool:
    """Whether anything in `module` drops values out in training: a rate above 0 under a name that says so."""
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            return True
        for name, value in vars(part).items():
            if ("drop" in name or name.endswith("pdrop")) and isinstance(value, float) and value > 0:
                return True
    return False


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version
