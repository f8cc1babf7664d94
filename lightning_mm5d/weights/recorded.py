"""Recorded operations: pure data that says what was called, on which views of which memories.

Memories are numbered. A view names a memory and the geometry of a tensor in it, so views, transposes and `.data` need
no operation of their own. Operations know which memories they read, write and overwrite in full, because only
that decides what may be freed, moved or left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload

from lightning_mm5d.config.errors import private


class View(NamedTuple):
    """A tensor in a numbered memory."""

    memory: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conjugate: bool = False

    def tensor(self, storage: UntypedStorage) -> Tensor:
        """The tensor of this geometry in `storage`."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        return tensor.conj() if self.conjugate else tensor

    def covers(self, n_bytes: int) -> bool:
        """Whether the view reaches each byte of a memory of `n_bytes`."""
        if self.offset or math.prod(self.size) * self.dtype.itemsize != n_bytes:
            return False
        expected = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True, slots=True)
class Draw:
    """The random numbers that an operation takes.

    `restore` is set where the code being recorded set the generator's state just before: to a state, or to the state
    after the operation of that index.
    """

    source: int
    restore: Tensor | int | None = None


@dataclass(slots=True)
class Operation:
    """One call that made or wrote memory.

    Args:
        function: what was called, an operator or a function of this library.
        args: its arguments, with views in place of deferred tensors; tensors in them are constants.
        results: views of the tensors that it made, in the order of `made`.
        reads: memories whose contents it needs.
        writes: memories that it changes or makes.
        overwrites: those of `writes` whose former contents are gone in full.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[View | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: frozenset[int]
    draw: Draw | None
    default_dtype: torch.dtype

    @property
    def name(self) -> str:
        """The name of what was called, for instance ``aten.normal_.default``."""
        return str(self.function) if isinstance(self.function, OpOverload) else self.function.__name__

    def overwritten_views(self) -> list[View]:
        """The views that it writes without reading them."""
        if not isinstance(self.function, OpOverload):
            return [self.args[0]]
        signature = Signature.of(self.function)
        unread = signature.unread
        named = signature.named(self.args, self.kwargs)
        return [view for name, item in named if name in unread for view in leaves(item) if isinstance(view, View)]

    def __reduce__(self) -> tuple[Any, ...]:
        fields = [getattr(self, name) for name in self.__slots__]
        if isinstance(self.function, OpOverload):
            fields[0] = str(self.function)  # an operator is pickled by its name
        return _restored, tuple(fields)


def _restored(function: Any, *fields: Any) -> Operation:
    if isinstance(function, str):
        namespace, name, overload = function.split(".")
        function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return Operation(function, *fields)


class Undefined(Enum):
    """Why the contents of a memory are not defined."""

    EMPTY = "it is as torch.empty made it, in full or in part"
    META = "it was made on the meta device, and is not written in full"
    FROM_META = "it is computed from a tensor of the meta device, which has no contents"


@dataclass(frozen=True, slots=True)
class Memory:
    """A numbered memory: its size, where it would be, and what it held before the first operation.

    Args:
        n_bytes: its size.
        device: the device that it stands for.
        initial: its bytes before the first operation; none where an operation makes it, or nothing defines them.
        undefined: why nothing defines them.
    """

    n_bytes: int
    device: torch.device
    initial: Tensor | None = None
    undefined: Undefined | None = None


OVERWRITING = frozenset(
    {
        "bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_", "random_",
        "uniform_", "zero_",
    }
)  # fmt: skip
# Batch norms change their running statistics without saying so in their schema.
UNDECLARED_WRITES = {"native_batch_norm": ("running_mean", "running_var")}
SHAPE_ONLY = frozenset(
    {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"}
)


@dataclass(frozen=True, slots=True)
class Signature:
    """What an operator's schema says of it."""

    name: str
    random: bool
    view: bool
    written: frozenset[str]
    arguments: tuple[str, ...]
    out: frozenset[str] = frozenset()
    returns_tensors: bool = True

    @property
    def unread(self) -> frozenset[str]:
        """The arguments that it writes without reading them."""
        return self.out | {"self"} if self.name in OVERWRITING else self.out

    @property
    def empty(self) -> bool:
        """Whether it makes a tensor and leaves its contents open."""
        return self.name.removeprefix("new_").startswith("empty")

    @property
    def shape_only(self) -> bool:
        """Whether it takes only the shape of its argument."""
        return self.name in SHAPE_ONLY or self.name.startswith("new_")

    @classmethod
    def of(cls, function: OpOverload) -> Signature:
        """Read the signature of an operator from its schema and its tags."""
        schema = private(function, "_schema")
        name = schema.name.partition("::")[2]
        written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        written |= set(UNDECLARED_WRITES.get(name, ()))
        aliases = [r.alias_info for r in schema.returns]
        view = bool(aliases) and not written and all(alias is not None for alias in aliases)
        return cls(
            name=name,
            random=torch.Tag.nondeterministic_seeded in function.tags,
            view=view or torch.Tag.inplace_view in function.tags,
            written=frozenset(written),
            out=frozenset(a.name for a in schema.arguments if a.kwarg_only and a.name in written),
            arguments=tuple(a.name for a in schema.arguments),
            returns_tensors=all("Tensor" in str(r.type) for r in schema.returns),
        )

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Each argument with its name."""
        yield from zip(self.arguments, args, strict=False)
        yield from kwargs.items()


def leaves(value: Any) -> Iterator[Any]:
    """What lists and tuples hold, at any depth."""
    if isinstance(value, list | tuple) and not isinstance(value, View):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `function` applied to what its lists and tuples hold."""
    if isinstance(value, list | tuple) and not isinstance(value, View):
        return type(value)([mapped(function, item) for item in value])
    return function(value)
