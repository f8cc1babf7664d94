"""Gradients across ranks: summed over all that hold a parameter, counted once in a norm, published at backward.

Every gradient is the derivative of one number, the mean loss over all microbatches of all replicas, so replicas and
stages that share a parameter (tied embeddings) *sum* theirs; nothing needs a correction for how often it occurs.

It refuses nothing. A gradient that no rank has stays None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_BUCKET_BYTES = 25 * 2**20


class Gradients:
    """The gradients of the parameters that this rank holds.

    Args:
        parameters: by name, each once.
        groups: for each of them the ranks that hold it, with their group (None where this rank is alone).
        counted: names of those that this rank counts in a norm over all ranks.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        groups: Mapping[str, dist.ProcessGroup | None],
        counted: Iterable[str],
    ) -> None:
        self.parameters = tuple(parameters.values())
        self._counted = {id(parameters[name]) for name in counted}
        self._shared: dict[tuple[dist.ProcessGroup, torch.dtype], list[nn.Parameter]] = {}
        for name, parameter in parameters.items():
            group = groups[name]
            if group is not None:
                self._shared.setdefault((group, parameter.dtype), []).append(parameter)

    def take(self) -> list[Tensor | None]:
        """Move the gradients out of the parameters."""
        taken = [parameter.grad for parameter in self.parameters]
        self.put([None] * len(taken))
        return taken

    def put(self, gradients: Sequence[Tensor | None]) -> None:
        """Set the gradients, as `take` returned them."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def add(self, gradients: Sequence[Tensor | None], factor: Tensor | float = 1.0) -> None:
        """Add `gradients` times `factor`; the given tensors may be kept and changed."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is None:
                continue
            if not isinstance(factor, float) or factor != 1.0:
                gradient.mul_(factor)
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def reduce(self, factor: float = 1.0) -> None:
        """Sum each gradient over the ranks that hold its parameter. Collective; call it on all ranks alike.

        What is frozen costs nothing; it must be frozen on all ranks alike.

        Args:
            factor: of each sum.
        """
        trained = {key: [p for p in held if p.requires_grad] for key, held in self._shared.items()}
        for work, bucket, flat in [item for key, held in trained.items() for item in _start(key[0], held)]:
            work.wait()
            _unpack(bucket, flat if factor == 1.0 else flat.mul_(factor))

    def norm(self, parameters: Iterable[Tensor], group: dist.ProcessGroup | None, norm_type: float = 2.0) -> Tensor:
        """Return the norm of the gradients of `parameters` over all ranks, each parameter counted once.

        Args:
            parameters: those of an optimizer on this rank.
            group: all ranks.
            norm_type: the p of the p-norm; ``inf`` for the largest.
        """
        grads = [p.grad.detach() for p in parameters if p.grad is not None and id(p) in self._counted]
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        norms = torch._foreach_norm(grads, norm_type) if grads else []
        dtype = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
        # one dtype on all ranks, whatever they hold
        local = torch.stack([norm.to(device, torch.float64) for norm in norms]) if norms else None
        if norm_type == float("inf"):
            total = local.max() if local is not None else torch.zeros((), dtype=torch.float64, device=device)
            dist.all_reduce(total, dist.ReduceOp.MAX, group)
        else:
            total = (
                (local**norm_type).sum() if local is not None else torch.zeros((), dtype=torch.float64, device=device)
            )
            dist.all_reduce(total, dist.ReduceOp.SUM, group)
            total = total ** (1.0 / norm_type)
        return total.to(dtype)


def _start(group: dist.ProcessGroup, parameters: list[nn.Parameter]) -> list[tuple[Any, list[nn.Parameter], Tensor]]:
    started = []
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in (*parameters, None):
        if parameter is not None:
            bucket.append(parameter)
            size += parameter.numel() * parameter.element_size()
        if bucket and (parameter is None or size >= _BUCKET_BYTES):
            flat = _pack(bucket)
            started.append((dist.all_reduce(flat, group=group, async_op=True), bucket, flat))
            bucket, size = [], 0
    return started


def _pack(bucket: list[nn.Parameter]) -> Tensor:
    """One flat tensor: all gradients, zeros where there is none, and behind them a flag for each."""
    pieces = [p.grad.reshape(-1) if p.grad is not None else p.new_zeros(p.numel()) for p in bucket]
    flags = torch.tensor([p.grad is not None for p in bucket], dtype=bucket[0].dtype, device=bucket[0].device)
    return torch.cat([*pieces, flags])


def _unpack(bucket: list[nn.Parameter], flat: Tensor) -> None:
    count = len(bucket)
    present = flat[-count:].tolist()
    for parameter, flag, piece in zip(bucket, present, flat[:-count].split([p.numel() for p in bucket]), strict=True):
        if flag:
            # views of the bucket: the gradient's old memory is given up instead of being copied into
            parameter.grad = piece.view_as(parameter)


class _Publish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, publish: Callable[[Tensor], None]) -> Tensor:
        ctx.publish = publish
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[None, None, None]:
        ctx.publish(gradient[0])
        return None, None, None


def published(value: Tensor, publish: Callable[[Tensor], None]) -> Tensor:
    """Return `value` as the result of a computation whose backward calls ``publish(gradient)``.

    Lightning runs the step, then zeroes gradients, then calls backward; a schedule runs whole inside the step. So its
    gradients wait until that backward, and accumulation, scaling and a user's own `backward` work as ever.

    Args:
        value: 0-dim loss.
        publish: gets the 0-dim gradient of whatever is computed from the result.
    """
    anchor = torch.zeros((), dtype=value.dtype, device=value.device, requires_grad=True)
    return _Publish.apply(anchor, value.detach(), publish)
