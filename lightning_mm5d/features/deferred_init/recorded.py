"""What a record is made of: operations, the memories that they work on, and the generators that they draw from.

**Operations** are pure data that says what was called, on which views of which memories. They know which memories they
read, write and overwrite in full, because only that decides what may be freed, moved or left out.

**Memories** are numbered. A view names a memory and the geometry of a tensor in it, so views, transposes and `.data`
need no operation of their own. A memory is known by its storage: all views of a tensor, and its `.data`, share it.
While recording it is a storage of the meta device, which has a size and no bytes. A real tensor that a recorded
operation writes is *adopted*: its storage gets a number, too, and the contents that it has at that moment are the
memory's first.

**Random sources** say where each recorded draw stands in its generator's stream. A recorded operation draws nothing, so
a state that user code saves and sets again (`fork_rng`) would say nothing. So the generator moves on by one number at
each recorded operation. Each state that it passes stands for "after operation i". A state that it did not pass was set
by the user's code (`torch.manual_seed`), and replay sets it too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.nn.parameter import is_lazy

from lightning_mm5d.config.errors import ConfigError, private
from lightning_mm5d.sharded.remote_value import is_remote

# Random operators that draw as many numbers as their inputs' values demand.
DRAWS_BY_VALUE = ("multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet")
CPU, META = torch.device("cpu"), torch.device("meta")


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

    @property
    def draws_by_value(self) -> bool:
        """Whether the values of its arguments tell how many numbers it draws."""
        return any(name in self.name for name in DRAWS_BY_VALUE)

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
        function = operator_named(function)
    return Operation(function, *fields)


def operator_named(name: str) -> OpOverload:
    """Return an operator by its name, for instance ``aten.normal_.default``."""
    operator: OpOverload = attrgetter(name)(torch.ops)
    return operator


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


class Memories:
    """All memories of one record."""

    def __init__(self) -> None:
        self._storages: list[UntypedStorage] = []  # of the meta device; the index is the memory's number
        self._memories: list[Memory] = []
        self._numbers: dict[int, int] = {}  # by the identity of a storage, which is kept so that it stays unique
        self._adopted: list[UntypedStorage] = []

    def table(self) -> dict[int, Memory]:
        """Every memory by its number, with the size that it has now."""
        return {
            number: replace(memory, n_bytes=self._storages[number].nbytes())
            for number, memory in enumerate(self._memories)
        }

    def number(self, tensor: Tensor) -> int | None:
        """The number of the memory that a tensor lies in, none if it is not known."""
        if is_lazy(tensor) or tensor.layout != torch.strided or is_remote(tensor):
            return None
        return self._numbers.get(id(tensor.untyped_storage()))

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in a known memory."""
        return self.number(tensor) is not None

    def known(self, tensor: Tensor) -> int:
        """The number of the memory that a tensor lies in."""
        number = self.number(tensor)
        assert number is not None
        return number

    def device(self, tensor: Tensor) -> torch.device:
        """The device that a tensor in a known memory stands for."""
        return self._memories[self.known(tensor)].device

    def view(self, tensor: Tensor) -> View:
        """Where a tensor lies."""
        if tensor.is_neg():
            rule = "A recorded tensor has no such views"
            raise ConfigError("configure_model", "a negated view of a weight", rule, "Clone it")
        return View(
            memory=self.known(tensor),
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
            dtype=tensor.dtype,
            conjugate=tensor.is_conj(),
        )

    def covered(self, tensor: Tensor) -> bool:
        """Whether a tensor reaches all of its memory."""
        view = self.view(tensor)
        return view.covers(self._storages[view.memory].nbytes())

    def add(self, tensor: Tensor, device: torch.device, *, empty: bool = False) -> None:
        """Number the memory of a meta tensor that an operation made, or left `empty`."""
        self._add(tensor.untyped_storage(), Memory(0, device, undefined=Undefined.EMPTY if empty else None))

    def adopt(self, tensor: Tensor) -> None:
        """Number the memory of a tensor that was there before, with what it holds now; a meta tensor holds nothing."""
        storage = tensor.untyped_storage()
        if tensor.is_meta:
            self._add(storage, Memory(0, CPU, undefined=Undefined.META))
            return
        self._adopted.append(storage)
        self._numbers[id(storage)] = len(self._storages)
        contents = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        self._add(UntypedStorage(storage.nbytes(), device="meta"), Memory(0, tensor.device, contents))

    def twin(self, tensor: Tensor) -> Tensor:
        """A meta tensor of the same geometry, in the same memory where that is known."""
        if tensor.is_meta:
            return tensor
        if self.holds(tensor):
            view = self.view(tensor)
            return view.tensor(self._storages[view.memory])
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)

    def _add(self, storage: UntypedStorage, memory: Memory) -> None:
        self._numbers[id(storage)] = len(self._storages)
        self._storages.append(storage)
        self._memories.append(memory)


def default_generator(device: torch.device) -> Generator:
    """The generator that operations on `device` draw from where they are given none."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    if not module.default_generators:
        module.init()
    return module.default_generators[index]


@contextmanager
def unmoved(generators: Sequence[Generator]) -> Iterator[None]:
    """Give generators their states back at the end."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def same(generator: Generator, other: Generator) -> bool:
    """Whether two objects are one generator; operators are given generators in wrappers of their own."""
    return bool(private(generator, "_cdata") == private(other, "_cdata"))


class RandomSource:
    """One generator, from the first recorded operation that would draw from it."""

    def __init__(self, generator: Generator, index: int) -> None:
        self.generator, self.index = generator, index
        self.start = generator.get_state()
        self._passed: dict[bytes, int | None] = {_key(self.start): None}
        self._now = _key(self.start)

    @property
    def stands_for(self) -> Generator | torch.device:
        """The generator; its device where it is that device's default."""
        device = self.generator.device
        return device if same(default_generator(device), self.generator) else self.generator

    def draw(self, operation: int) -> Draw:
        """Note that the operation of this index draws now."""
        draw = Draw(self.index, self.changed())
        torch.rand((), generator=self.generator, device=self.generator.device)
        self._now = _key(self.generator.get_state())
        self._passed[self._now] = operation
        return draw

    def changed(self) -> Tensor | int | None:
        """What the user's code set the state to since the last draw, none if nothing."""
        state = self.generator.get_state()
        key = _key(state)
        if key == self._now:
            return None
        self._now = key
        passed = self._passed.get(key, state)
        return self.start if passed is None else passed

    def rewind(self) -> None:
        """Give the generator the state from before recording."""
        self.generator.set_state(self.start)
        self._now = _key(self.start)


def _key(state: Tensor) -> bytes:
    return state.numpy().tobytes()
