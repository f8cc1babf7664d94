"""The weights of one module that are yet to be made: their names, and the operations that make them.

It holds no module, only tensors without memory that stand in plain attributes. So it may be pickled, or copied,
together with the module in one go.

`tensors_of` finds every tensor that a module holds: parameters, buffers, and those in plain attributes, which must
become real too. Attributes are followed into containers, plain objects, closures, and modules that are not registered
(a teacher in a list).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any, Literal

import torch
from torch import Generator, Tensor, UntypedStorage, nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.features.deferred_init.journal import Replay, sliced
from lightning_mm5d.features.deferred_init.pretrained import Cast, Recipe
from lightning_mm5d.features.deferred_init.recorded import Memory, Operation, View, default_generator
from lightning_mm5d.source.trees import closure_of

Kind = Literal["parameter", "buffer", "attribute"]
# Objects of these packages hold no tensors that a constructor of user code made, or the whole run.
SKIPPED_PACKAGES = frozenset(
    {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "numpy", "builtins", "lightning_mm5d"}
)
# Called with all names of one tensor, more than one where it is tied, and its full value.
Sink = Callable[[tuple[str, ...], Tensor], None]


@dataclass(frozen=True)
class DeferredWeights:
    """What `DeferredInit.weights` found in a module.

    Args:
        operations: everything that was recorded.
        memories: every recorded memory by its number.
        starts: for each random source, its state before recording; the first is usually torch's CPU generator.
        draws_from: the generators of these sources; a device stands for its default generator in any process.
        ends: states that the recorded code set after the last draw.
        tensors: the names of each deferred parameter and buffer, and where it is.
        attributes: deferred tensors in plain attributes of the module, and where they are.
        read_by: what read a random value while the module was built, if anything did; the record then holds for these
            random states only.
        unwritten: names of tensors that an ordinary construction leaves as `torch.empty` made them, in full or in part;
            they are filled with zeros.
        unknown: names of tensors of the meta device whose contents were not recorded; `initialize_meta` is for them.
    """

    operations: Sequence[Operation]
    memories: Mapping[int, Memory]
    starts: Sequence[Tensor]
    draws_from: Sequence[Generator | torch.device]
    ends: Mapping[int, Tensor | int]
    tensors: Sequence[tuple[tuple[str, ...], View]]
    attributes: Sequence[tuple[Tensor, View]]
    read_by: str | None
    unwritten: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def names(self) -> frozenset[str]:
        """All names of deferred parameters and buffers."""
        return frozenset(name for names, _ in self.tensors for name in names)

    @property
    def generators(self) -> list[Generator]:
        """The generators that numbers will be drawn from, in the order of `random_state`."""
        return [default_generator(g) if isinstance(g, torch.device) else g for g in self.draws_from]

    @property
    def stored(self) -> dict[str, Recipe]:
        """How to read what lies in files, by name, where nothing has changed it since."""
        writers: dict[int, list[Operation]] = {}
        for operation in self.operations:
            for memory in operation.writes:
                writers.setdefault(memory, []).append(operation)
        recipes = {names: _recipe(view, writers) for names, view in self.tensors}
        return {name: recipe for names, recipe in recipes.items() if recipe is not None for name in names}

    @property
    def random_state(self) -> tuple[Tensor, ...]:
        """The states from which numbers will be drawn; ranks that must be equal use those of one rank."""
        return tuple(self.starts)

    def materialize(self, module: nn.Module, sink: Sink, *, random_state: Sequence[Tensor] | None = None) -> None:
        """Make the weights one by one and hand each to `sink` as soon as it is final.

        `sink` puts the value, or a part of it, where it belongs, and keeps no more than it needs. Tensors in plain
        attributes of the module become real in place. Afterwards generators are where an ordinary construction would
        have left them.

        What lies unchanged in files is not made: `stored` tells how to read it.

        Args:
            module: the module that `DeferredInit.weights` was asked for, or a copy of it.
            sink: called with all names of a tensor and its full value; names that are tied come in one call.
            random_state: `random_state` of another process, to draw what it draws.
        """
        stored = self.stored
        wanted: dict[int, list[tuple[View, Callable[[Tensor], None]]]] = {}
        for names, view in self.tensors:
            if names[0] not in stored:
                wanted.setdefault(view.memory, []).append((view, functools.partial(sink, names)))
        for tensor, view in self.attributes:
            wanted.setdefault(view.memory, []).append((view, functools.partial(_fill, tensor)))

        def final(memory: int, storage: UntypedStorage) -> None:
            for view, receive in wanted[memory]:
                receive(view.tensor(storage))

        steps = sliced(self.operations, wanted, draws=True)
        generators = self.generators
        for generator, start in zip(generators, self._starts(random_state), strict=True):
            generator.set_state(start)
        Replay(self.memories, steps, generators, frozenset(wanted), final).run(self.ends)

    def _starts(self, random_state: Sequence[Tensor] | None) -> Sequence[Tensor]:
        """The states to draw from; those of another process are refused where the record depends on its own."""
        if random_state is None or self.read_by is None:
            return self.starts if random_state is None else random_state
        for mine, other in zip(self.starts, random_state, strict=True):
            if not torch.equal(mine, other):
                got = f"{self.read_by} of a random value, with another random state than that of rank 0"
                rule = "What the module is built of depends on the value, so ranks must draw the same"
                raise ConfigError("configure_model", got, rule, "Call seed_everything before the Trainer is made")
        return self.starts


def _recipe(view: View, writers: Mapping[int, Sequence[Operation]]) -> Recipe | None:
    """How to read a view from files; None where it is not just read, or read and cast."""
    operations = writers.get(view.memory, ())
    if len(operations) != 1 or operations[0].results != (view,):
        return None
    operation = operations[0]
    recipe = getattr(operation.function, "__self__", None)
    if isinstance(recipe, Recipe):
        return recipe
    if operation.name == "aten._to_copy.default" and isinstance(operation.args[0], View):
        of = _recipe(operation.args[0], writers)
        return of and Cast(of.shape, view.dtype, of)
    return None


def filling(module: nn.Module) -> Sink:
    """A sink that gives each parameter and buffer of `module` its full value."""
    tensors = {names[0]: tensor for names, _, tensor in tensors_of(module)}

    def fill(names: tuple[str, ...], value: Tensor) -> None:
        new = _like(tensors[names[0]], value)
        if _swapped(tensors[names[0]], new):
            return
        for name in names:  # recurrent layers, which hold weak references, notice that an attribute is set
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, new)

    return fill


def _fill(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor without memory its value, in place, so that all who hold it see it."""
    if not _swapped(tensor, _like(tensor, value)):
        got = f"a tensor of shape {tuple(tensor.shape)} in a plain attribute, to which torch itself keeps references"
        rule = "Such a tensor cannot be made in place"
        raise ConfigError("configure_model", got, rule, "Register it as a buffer, or its layer as a submodule")


def _swapped(tensor: Tensor, new: Tensor) -> bool:
    try:
        torch.utils.swap_tensors(tensor, new)
    except RuntimeError:  # there is a weak reference to it, or autograd has saved it
        return False
    return True


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    """A tensor with this value, and of `tensor` the class and the Python attributes."""
    value = value.detach()
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, tensor.requires_grad)
    vars(value).update(vars(tensor))
    return value.requires_grad_(tensor.requires_grad)


def tensors_of(module: nn.Module) -> Iterator[tuple[tuple[str, ...], Kind, Tensor]]:
    """All parameters, buffers and tensors in plain attributes, each once with all its names; attributes by path."""
    names: dict[int, list[str]] = {}
    by_id: dict[int, tuple[Kind, Tensor]] = {}
    kinds: list[tuple[Kind, Iterator[tuple[str, Tensor]]]] = [
        ("parameter", module.named_parameters(remove_duplicate=False)),
        ("buffer", module.named_buffers(remove_duplicate=False)),
        ("attribute", _attributes(module)),
    ]
    for kind, pairs in kinds:
        for name, tensor in pairs:
            names.setdefault(id(tensor), []).append(name)
            by_id.setdefault(id(tensor), (kind, tensor))
    for key, (kind, tensor) in by_id.items():
        yield tuple(names[key]), kind, tensor


def _attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are reached through attributes, and are no parameter or buffer."""
    registered = {id(t) for t in [*module.parameters(), *module.buffers()]}
    queue: deque[tuple[str, Any]] = deque(module.named_modules())
    seen: dict[int, Any] = {}  # holds what it has seen, so that no identity is given twice
    while queue:
        path, value = queue.popleft()
        if id(value) in seen or isinstance(value, str | int | float | None):
            continue
        seen[id(value)] = value
        if not isinstance(value, Tensor):
            queue.extend((f"{path}.{name}".lstrip("."), item) for name, item in _within(value))
        elif id(value) not in registered:
            yield path, value


def _within(value: Any) -> Iterable[tuple[object, Any]]:
    """What a value holds, by name."""
    if isinstance(value, nn.Module):
        return [(name, item) for name, item in vars(value).items() if name not in ("_trainer", "_fabric")]
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple | deque | set | frozenset):
        return list(enumerate(value))
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, FunctionType):
        return closure_of(value).items()
    if isinstance(value, MethodType):
        return [("__self__", value.__self__)]
    if isinstance(value, type | ModuleType) or type(value).__module__.partition(".")[0] in SKIPPED_PACKAGES:
        return ()
    return list(getattr(value, "__dict__", {}).items())
