"""A tensor that is sharded along one dim over the ranks of a group, and that acts as the full tensor.

The user's code and that of Hugging Face must see logits with the whole vocabulary and hidden states with the whole
sequence, although each rank computed only a shard. A `Sharded` has the shape of the full tensor and computes on local
tensors where that is right: pointwise operations, operations along other dims, views and indices that keep the sharded
dim, and the cross entropy over sharded classes. Any other function gets the full tensor, which is gathered for it.

All ranks of the group must run the same functions on it, because each gather is a collective. Values and gradients
equal those of the full tensor: where a replicated tensor meets local ones, its gradient is summed or gathered.

It refuses writes to a gathered copy, which would be lost, and kernels that would take the local tensor for the full
one (`ConfigError`). An autograd function of the user's must be given full tensors, unless it passes its arguments on,
as those of checkpoints and of sharded data parallelism do.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.sharded.torch_internals import as_plain_tensors


def functions_named(names: str, *homes: Any) -> list[Any]:
    """Return the functions of these names in `homes`; attributes by the function that reads them.

    Args:
        names: with spaces between them; a home may lack some.
        homes: by default torch, its tensors and `torch.nn.functional`.
    """
    attrs: list[Any] = [getattr(home, name, None) for name in names.split() for home in homes or (torch, Tensor, F)]
    readers = [attr.__get__ if hasattr(attr, "__set__") else attr for attr in attrs]
    return [reader for reader in readers if callable(reader)]


WRITING = {"__setitem__", "__set__", "__delete__"} | {
    f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}


class Group(Protocol):
    """The ranks over which a tensor is sharded: a tensor parallel group, or those that hold a sequence's tokens.

    Attributes:
        index: of this rank in the group.
        size: number of ranks.
        factor: the gradient of a local tensor is this times the gradient of the same entries of the full tensor.
    """

    index: int
    size: int
    factor: int

    def local_of(self, full: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """This rank's shard of a full tensor, outside of autograd's graph."""

    def copied(self, x: Tensor) -> Tensor:
        """The full `x` for work on local tensors."""

    def scattered(self, x: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """This rank's shard of the full `x`."""

    def gathered(self, x: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """The full tensor of which `x` is this rank's shard."""

    def description(self) -> Any:
        """JSON from which a peer finds its own group."""


class Sharding(NamedTuple):
    """How a tensor is sharded.

    Attributes:
        dim: the sharded dim, negative.
        lengths: of that dim on each rank.
        size: of that dim in the full tensor, the sum of `lengths`.
        group: the ranks.
    """

    dim: int
    lengths: tuple[int, ...]
    size: int
    group: Group


class NotYetComputed(Tensor):
    """Stands for a tensor, plain or a `Sharded`, that is computed when something needs its values."""

    @abstractmethod
    def computed(self) -> Tensor:
        """Return the tensor, the same at each call."""


class Sharded(Tensor):
    """A tensor of which this rank has a shard; see the module. Made by `from_local`.

    Attributes:
        rules: for each function that works on local tensors, how: ``rule(func, args, kwargs)``, which returns
            NotImplemented for arguments that need the full tensor.
        travels_local: whether stages send each other its local tensors; else the full one.
        sharding: how it is sharded.
    """

    rules: ClassVar[dict[Any, Callable[..., Any]]] = {}
    travels_local: ClassVar[bool] = True
    sharding: Sharding
    _local: Tensor | None  # None where autograd may still put the `Sharded` itself into a graph
    _raw: Tensor  # the local tensor, perhaps outside of its graph

    @property
    def local(self) -> Tensor:
        """This rank's shard: a plain tensor in the same graph."""
        if self._local is not None:
            return self._local
        if not torch.is_grad_enabled():
            return self._raw
        with as_plain_tensors():
            in_graph = self.requires_grad and not self._raw.requires_grad  # that of a view is that of its base
        self._local = _Local.apply(self) if in_graph else self._raw
        return self._local

    def full(self) -> Tensor:
        """The full tensor, plain and replicated: a collective."""
        dim, lengths, _, group = self.sharding
        return group.gathered(self.local, dim, lengths)

    @property
    def sharded_dim(self) -> int:
        """The sharded dim, counted from the last (-1)."""
        return self.sharding.dim

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of the sharded dim on each rank."""
        return self.sharding.lengths

    @property
    def group(self) -> Any:
        """The ranks, a `Group`."""
        return self.sharding.group

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Of the full tensor."""
        sizes = [*self._raw.shape]
        sizes[self.sharding.dim] = self.sharding.size
        return torch.Size(sizes)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = cls.rules.get(func)
        if rule is not None and args:
            result = rule(func, args, kwargs)
            if result is not NotImplemented:
                return result
        return on_full(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Only what bypasses torch functions comes here. Tensors that are saved for the backward are detached.
        x = args[0]
        if func is not torch.ops.aten.detach.default:
            rule = "A kernel would see this rank's shard alone"
            raise ConfigError(str(func), "a sharded tensor", rule, "Call it with `x.full()`")
        return without_graph(x._raw, x.sharding, cls)


AnySharded = TypeVar("AnySharded", bound=Sharded)


class _Local(torch.autograd.Function):
    """The local tensor of a `Sharded` that an autograd function returned, whose graph is not that of its values."""

    @staticmethod
    def forward(ctx: Any, x: Sharded) -> Tensor:
        return x._raw.detach()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Tensor:
        return gradient[0]


def from_local(local: Tensor, dim: int, lengths: Sequence[int], group: Group) -> Sharded:
    """Return the sharded tensor of which `local` is this rank's shard.

    Args:
        local: this rank's shard, plain; gradients flow to it.
        dim: the sharded dim.
        lengths: of that dim on each rank.
        group: the ranks.
    """
    dim = dim if dim < 0 else dim - local.dim()
    assert local.shape[dim] == lengths[group.index], f"local {tuple(local.shape)}, dim {dim}, lengths {lengths}"
    return as_sharded(local, Sharding(dim, tuple(lengths), sum(lengths), group))


def as_sharded(local: Tensor, sharding: Any, kind: type[AnySharded] = Sharded) -> AnySharded:  # type: ignore[assignment]
    """Return `local` as a tensor with this `Sharding`, or another kind of one, without the checks of `from_local`."""
    result = local.as_subclass(kind)
    result._local = local if torch.is_grad_enabled() else None
    result._raw = local
    result.sharding = sharding
    return result


def without_graph(local: Tensor, sharding: Any, kind: type[AnySharded] = Sharded) -> AnySharded:  # type: ignore[assignment]
    """Return `as_sharded` of a tensor that autograd has yet to put into a graph."""
    result = as_sharded(local, sharding, kind)
    result._local = None
    return result


def is_in_place(name: str) -> bool:
    """Whether a function of torch of this name writes to its first argument."""
    return name in WRITING or (name.endswith("_") and not name.endswith("__"))


def written_by(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that a function of torch writes to in place."""
    out = kwargs.get("out")
    writes_first = is_in_place(getattr(func, "__name__", "")) or kwargs.get("inplace")
    if not writes_first and out is None:
        return []
    return [x for x in tree_leaves((args[:1] if writes_first else (), out)) if isinstance(x, Tensor)]


def on_full(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call `func` with the full tensors of what is sharded among its arguments; each is gathered once.

    Raises:
        ConfigError: `func` writes to one of them.
    """
    name = getattr(func, "__name__", "")
    if any(isinstance(leaf, Sharded) for leaf in written_by(func, args, kwargs)):
        rule = "It needs the full tensor, which is a gathered copy, so that what it writes would be lost"
        fix = "Write to `x.clone()`, which is a full tensor on every rank"
        raise ConfigError(f"{name or func}", "a sharded tensor", rule, fix)
    gathered: dict[int, Tensor] = {}

    def full(x: Sharded) -> Tensor:
        if id(x) not in gathered:
            gathered[id(x)] = x.full()
        return gathered[id(x)]

    args, kwargs = tree_map_only(Sharded, full, (tuple(args), dict(kwargs)))
    return func(*args, **kwargs)
