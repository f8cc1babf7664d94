"""A tensor of which each rank of a group holds a part, and that acts as the whole.

The user's code and that of Hugging Face must see logits with the whole vocabulary and hidden states with the whole
sequence, although each rank computed only a part. A `Sharded` answers for the whole and keeps working on the parts
where that is right: pointwise operations, operations along other dims, views and indices that leave the divided dim
whole, and the cross entropy over divided classes. Any other function gets the whole tensor, gathered when it asks.

All ranks of the group must do the same with it, because each gather is a collective. Values and gradients are those
of the whole: where a replicated tensor meets parts, its gradient is summed or gathered.

It refuses writes that would go to a gathered copy (`ConfigError`), and kernels that would take the part for the whole.
An autograd function of the user's is not asked whether it can work on parts: it needs `whole` tensors, unless it passes
its arguments on, as those of checkpoints and of sharded data parallelism do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_mm5d.config.errors import ConfigError

WRITING = {"__setitem__", "__set__", "__delete__"} | {
    f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}


class Group(Protocol):
    """What holds the parts of divided tensors: a tensor parallel group, or a sequence split over ranks.

    Attributes:
        index: of this rank among those that hold parts.
        size: their number.
        factor: how many times the gradient of the whole a part's gradient is.
    """

    index: int
    size: int
    factor: int

    def part(self, whole: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """This rank's part of a whole tensor without a graph."""

    def copied(self, x: Tensor) -> Tensor:
        """The whole `x` for work on parts."""

    def scattered(self, x: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """This rank's part of the whole `x`."""

    def gathered(self, x: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """The whole of which `x` is this rank's part."""

    def description(self) -> Any:
        """JSON from which a peer finds its own."""


class Parts(NamedTuple):
    """How a tensor is divided: along `dim`, which is negative, into `lengths`, which add up to `size`, over `group`."""

    dim: int
    lengths: tuple[int, ...]
    size: int
    group: Group


class Sharded(Tensor):
    """See above; made by `from_local`.

    Attributes:
        rules: for each function that works on parts, how: ``rule(func, args, kwargs)``, NotImplemented where it cannot.
        division: how it is divided.
    """

    rules: ClassVar[dict[Any, Callable[..., Any]]] = {}
    division: Parts
    _part: Tensor | None  # none yet where autograd may still put the tensor itself into a graph
    _held: Tensor  # the part's values, perhaps not in its graph

    @property
    def part(self) -> Tensor:
        """This rank's part, a plain tensor in the same graph."""
        if self._part is not None:
            return self._part
        if not torch.is_grad_enabled():
            return self._held
        with torch._C.DisableTorchFunctionSubclass():
            in_graph = self.requires_grad and not self._held.requires_grad  # that of a view is that of its base
        self._part = _Part.apply(self) if in_graph else self._held
        return self._part

    def full(self) -> Tensor:
        """The whole tensor, plain and replicated: a collective."""
        dim, lengths, _, group = self.division
        return group.gathered(self.part, dim, lengths)

    @property
    def sharded_dim(self) -> int:
        """The dim that is divided, counted from the last (-1)."""
        return self.division.dim

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of the dim on each rank."""
        return self.division.lengths

    @property
    def group(self) -> Any:
        """What holds the parts, a `Group`."""
        return self.division.group

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Of the whole."""
        sizes = [*self._held.shape]
        sizes[self.division.dim] = self.division.size
        return torch.Size(sizes)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        rule = cls.rules.get(func)
        if rule is not None and args:
            result = rule(func, args, kwargs)
            if result is not NotImplemented:
                return result
        return on_full(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Only what bypasses torch functions comes here. Tensors that are saved for the backward are detached.
        x = args[0]
        if func is not torch.ops.aten.detach.default:
            raise ConfigError(str(func), "a divided tensor", "A kernel would see one part", "Call it with `x.full()`")
        return without_graph(func(x._held), x.division)


class _Part(torch.autograd.Function):
    """The part of a `Sharded` that came out of an autograd function, and has its graph but no part in it."""

    @staticmethod
    def forward(ctx: Any, x: Sharded) -> Tensor:
        return x._held.detach()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Tensor:
        return gradient[0]


def from_local(part: Tensor, dim: int, lengths: Sequence[int], group: Group) -> Sharded:
    """Return the tensor of which `part` is this rank's part.

    Args:
        part: this rank's part, plain; gradients flow to it.
        dim: what is divided.
        lengths: of the dim on each rank.
        group: the ranks.
    """
    dim = dim if dim < 0 else dim - part.dim()
    assert part.shape[dim] == lengths[group.index], f"part {tuple(part.shape)}, dim {dim}, lengths {lengths}"
    return as_sharded(part, Parts(dim, tuple(lengths), sum(lengths), group))


def as_sharded(part: Tensor, division: Parts) -> Sharded:
    result = part.as_subclass(Sharded)
    result._part = part if torch.is_grad_enabled() else None
    result._held = part
    result.division = division
    return result


def without_graph(part: Tensor, division: Parts) -> Sharded:
    """For autograd to put into a graph."""
    result = as_sharded(part, division)
    result._part = None
    return result


def on_full(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    name = getattr(func, "__name__", "")
    written = [kwargs.get("out")]
    if (name.endswith("_") and not name.endswith("__")) or name in WRITING or kwargs.get("inplace"):
        written.append(args[0])
    if any(isinstance(leaf, Sharded) for leaf in tree_leaves(written)):
        raise ConfigError(
            f"{name or func}",
            "a tensor of which each rank holds a part",
            "What is written would be lost, because it needs the whole tensor, which is a gathered copy",
            "Write to `x.clone()`, which is whole on every rank",
        )
    found: dict[int, Tensor] = {}

    def whole(x: Sharded) -> Tensor:
        if id(x) not in found:
            found[id(x)] = x.full()
        return found[id(x)]

    args, kwargs = tree_map_only(Sharded, whole, (tuple(args), dict(kwargs)))
    return func(*args, **kwargs)
