"""The result of one step and what its microbatches weigh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.engine.codec import TreeChannel
from lightning_mm5d.stage import StageError
from lightning_mm5d.trainer.logs import LogOptions, MergedLog


@dataclass(frozen=True)
class Weights:
    """The weight of each microbatch in the mean over all microbatches of all replicas.

    Attributes:
        own: of this replica's microbatches, by index; empty on ranks where no step ends.
        total: of the microbatches of all replicas.
        samples: of all replicas, where these have unlike numbers; else None.
    """

    own: tuple[float, ...] = ()
    total: float = 1.0
    samples: float | None = None

    def share(self, index: int) -> float:
        """Return the factor of a microbatch's loss in the mean over all replicas; NaN where nothing weighs anything."""
        return self.own[index] / self.total if self.total else math.nan

    def weighted_sum(self, losses: Sequence[Tensor]) -> Tensor:
        """Return the sum of this replica's losses times their weights, in float64.

        A loss of weight 0 is left out: a mean over no tokens is NaN, and on one process it would not be there.
        """
        kept = [loss.double() * weight for loss, weight in zip(losses, self.own, strict=True) if weight]
        return torch.stack(kept).sum() if kept else losses[0].new_zeros((), dtype=torch.float64)


@dataclass(frozen=True)
class StepResult:
    """What one process with the full batch would have returned and logged.

    Attributes:
        loss: mean over the replica's microbatches; None outside of training.
        outputs: what the user's step returned beside it, merged over microbatches.
        logs: merged calls of ``self.log``.
        has_graph: whether the loss of any microbatch of any replica has a gradient.
        fails: whether a pipeline could not run it, so that it has nothing else.
        kept: what the step changed in attributes of the module, see `KeptValues.changes`.
    """

    loss: Tensor | None = None
    outputs: Any = None
    logs: list[MergedLog] = field(default_factory=list)
    has_graph: bool = True
    fails: bool = False
    kept: list[Any] = field(default_factory=list)

    def check_equal(self, shared: StepResult) -> None:
        """Refuse a loss or log that differs from the one of another rank with the same last layers.

        Raises:
            StageError: it differs by more than a relative 1e-5; 1e-2 for a loss in half precision.
        """
        pairs = [(f"log {own.options.name!r}", own, one) for own, one in zip(self.logs, shared.logs, strict=False)]
        found = [(name, own.value, one.value) for name, own, one in pairs if own.is_computed]
        if self.loss is not None and shared.loss is not None:
            found.insert(0, ("loss", self.loss, shared.loss))
        named = [(name, own, one) for name, own, one in found if own is not None and one is not None]
        if not named:
            return
        values = torch.stack([torch.stack([own.to(one), one]).double().cpu() for _, own, one in named])
        is_half = self.loss is not None and torch.finfo(self.loss.dtype).bits < 32
        equal = values[:, 0].isclose(values[:, 1], rtol=1e-2 if is_half else 1e-5, atol=0.0, equal_nan=True).tolist()
        for (name, _, _), (own, one), is_equal in zip(named, values.tolist(), equal, strict=True):
            if not is_equal:
                raise StageError(
                    f"the ranks that share the last layers have unequal values of the {name}, {own:.6g} and {one:.6g}. "
                    "The step reads the values of a sharded parameter itself (`lm_head.weight`, or a penalty over "
                    "`self.parameters()`), or depends on the rank: call the module instead, use the optimizer's "
                    "weight_decay, or set tp_size and cp_size to 1"
                )


class ResultChannel:
    """Shares results within one replica.

    Args:
        src: global rank where the step ends.
        group: the replica's ranks; None without other ranks.
        device: where messages live.
        host: the same ranks, for what is in host memory; None where `device` is that.
    """

    def __init__(
        self, *, src: int, group: dist.ProcessGroup | None, device: torch.device, host: dist.ProcessGroup | None = None
    ) -> None:
        self._is_alone = group is None or dist.get_world_size(group) == 1
        self._channel = None if self._is_alone else TreeChannel.within(group, src, device, host)
        self._sends = self._is_alone or dist.get_rank() == src

    def share(self, result: StepResult | None) -> StepResult:
        """Return the result of the rank where the step ends, on every rank of the replica; collective.

        Args:
            result: read on that rank only.
        """
        if self._sends:
            assert result is not None
            if self._channel is not None:
                self._channel.send(_to_tree(result))
            return result
        assert self._channel is not None
        return _from_tree(self._channel.receive())


def _to_tree(result: StepResult) -> Any:
    # numbers are a tensor, because a header is sent again when plain values in it change
    numbers = torch.tensor([result.has_graph, *(log.batch_size for log in result.logs)], dtype=torch.float64)
    options = [asdict(log.options) for log in result.logs]
    return [
        result.loss,
        numbers,
        result.outputs,
        options,
        [log.value for log in result.logs],
        result.fails,
        result.kept,
    ]


def _from_tree(tree: Any) -> StepResult:
    loss, numbers, outputs, options, values, fails, kept = tree
    has_graph, *sizes = numbers.tolist()
    logs = [
        MergedLog(options=LogOptions(**one), value=value, batch_size=size)
        for one, value, size in zip(options, values, sizes, strict=True)
    ]
    return StepResult(loss, outputs, logs, bool(has_graph), fails, kept)
