"""Stand-ins for the parts on other ranks: parameters without memory, modules that answer without computing, layers'
results.

Both give remote values, which are NaN and mark all that is computed from them (`lightning_mm5d.sharded.remote_value`).

**What a remote layer returns** is a stand-in for its result, in the shape of the real one. Most layers return a hidden
state of the shape that they take, alone or first in a tuple. One probe for each structure of layers tells, because
layers of a list are many and mostly equal. Other layers, which change the shape or return something else, are computed
once on their placeholders for each shape of their input.

What a pass through split layers hands from one stage to the next, and where it is among a layer's arguments.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_mm5d.config.errors import RemoteParameterError, private
from lightning_mm5d.data.lazy import LazyTensor
from lightning_mm5d.data.random_state import CPU, kept_random_state
from lightning_mm5d.partition.parts import at, hidden_place
from lightning_mm5d.sharded.remote_value import (
    Guard,
    Origin,
    Placeholder,
    RemoteValue,
    in_memory,
    is_remote,
    make_parameter,
    make_placeholder,
    marked,
    placeholder,
    plain,
    remote_value,
    without_memory,
)
from lightning_mm5d.sharded.removable import put
from lightning_mm5d.sharded.tensor import Sharded, from_local
from lightning_mm5d.stage.payload import Packer, Path, map_tensors, rebuild, tensors_in, with_sendable_fields
from lightning_mm5d.stage.taps import OF_THE_MODULE, is_hook_of, mark_dependent, mark_stand_in, untapped
from lightning_mm5d.stage.view import Received, StageError, StandIn

_FRAMEWORKS = ("lightning_mm5d.", "torch.", "lightning.", "pytorch_lightning.", "transformers.")


def is_placeholder(tensor: Tensor) -> bool:
    """Whether `tensor` is a parameter that `drop_parameters` left without memory."""
    return isinstance(tensor, Placeholder)


def drop_parameters(root: nn.Module, names: Iterable[str], device: torch.device, guard: Guard) -> None:
    """Turn the parameters called `names` into placeholders on `device`; tied parameters stay tied.

    They stay the same objects, by which optimizers of an earlier run know them, but for those of the meta device. A
    module under several paths has one parameter with several names.
    """
    replaced: dict[int, nn.Parameter] = {}
    alive: list[nn.Parameter] = []  # an id is taken again when its parameter is gone
    for name in names:
        path, _, attribute = name.rpartition(".")
        module = root.get_submodule(path)
        parameter = module._parameters[attribute]
        assert parameter is not None
        if id(parameter) not in replaced:
            remote_parameter = _without_memory(parameter, Origin(name, guard), device)
            replaced |= {id(parameter): remote_parameter, id(remote_parameter): remote_parameter}
            alive.append(parameter)
        module._parameters[attribute] = replaced[id(parameter)]


def _without_memory(parameter: nn.Parameter, origin: Origin, device: torch.device) -> nn.Parameter:
    if type(parameter) is not nn.Parameter or parameter.is_meta:
        return placeholder(parameter, origin, device)
    parameter.grad = None
    make_placeholder(parameter, parameter.shape, origin, device)
    return parameter


def give_memory(parameters: Iterable[nn.Parameter]) -> None:
    """Turn placeholders back into parameters of uninitialised memory, in place."""
    for parameter in parameters:
        if isinstance(parameter, Placeholder):
            make_parameter(parameter, torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device))


@contextmanager
def _with_hooks(module: nn.Module, change: Callable[[Any], Any]) -> Iterator[None]:
    """Put what `change` returns in place of the forward hooks in `module` meanwhile; None leaves the hook out.

    So it is for pre-hooks of modules that have a forward hook: the two may go together.
    """
    with ExitStack() as stack:
        for part in module.modules():
            if private(part, "_forward_hooks"):
                for name in ("_forward_pre_hooks", "_forward_hooks"):
                    changed = {key: change(hook) for key, hook in private(part, name).items()}
                    shown = OrderedDict((key, hook) for key, hook in changed.items() if hook is not None)
                    stack.callback(put(part, name, shown))
        yield


def unhooked(module: nn.Module) -> AbstractContextManager[None]:
    """Leave out the forward hooks in `module` that are neither this package's nor torch's: they keep what they see."""
    return _with_hooks(module, lambda hook: hook if is_hook_of(OF_THE_MODULE, hook) else None)


class UserHooks:
    """The forward hooks of the user, neither ours nor of a framework, on modules inside of some.

    Args:
        modules: hooks on these themselves are left out. What is inside of them is walked once.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._hooks = [
            private(part, "_forward_hooks") for module in modules for part in module.modules() if part is not module
        ]

    def __bool__(self) -> bool:
        return any(not is_hook_of(_FRAMEWORKS, hook) for hooks in self._hooks if hooks for hook in hooks.values())


def shown_stand_ins(module: nn.Module) -> AbstractContextManager[None]:
    """Enter around a run of `module` on stand-ins: hooks in it that read a number for themselves go on without."""

    def lenient(hook: Callable) -> Callable:
        @wraps(hook)  # so that it counts as the user's
        def call(*args: Any, **kwargs: Any) -> Any:
            with suppress(RemoteParameterError):
                return hook(*args, **kwargs)

        return hook if is_hook_of(OF_THE_MODULE, hook) else call

    return _with_hooks(module, lenient)


class ShapeMemory:
    """The shapes that remote modules return, found by running each once for each shape of its input."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Any, list[tuple[torch.Size, torch.dtype, torch.device]]]] = {}

    def placeholder(
        self, module: nn.Module, origin: Origin, original: Callable, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Return remote values in the shape of ``original(*args, **kwargs)``, the forward of `module`.

        Not zero-stride: models write features into embeddings in place.
        It carries a gradient where the result would, because hooks may be registered on it; they are never called.
        """
        with plain():
            grad = torch.is_grad_enabled() and (
                any(parameter.requires_grad for parameter in module.parameters())
                or any(tensor.requires_grad for _, tensor in tensors_in((args, kwargs)))
            )
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and args:
            device = args[0].device
            enabled = torch.is_autocast_enabled(device.type)
            dtype = torch.get_autocast_dtype(device.type) if enabled else module.weight.dtype
            shape = (*args[0].shape[:-1], module.out_features)  # which may be a large vocabulary
            tensor = without_memory(shape, dtype, device, origin, requires_grad=grad)
            mark_dependent(tensor)
            return tensor
        if isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward and args:
            shape = (*args[0].shape, module.embedding_dim)
            return _filled(shape, module.weight.dtype, args[0].device, grad, origin)
        signature = tuple((path, tensor.shape, tensor.dtype) for path, tensor in tensors_in((args, kwargs)))
        others = tuple(repr(value) for value in (*args, *kwargs.values()) if isinstance(value, (int, float, str)))
        key = (id(module), signature, others, torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))
        if key not in self._known:
            result = with_sendable_fields(type(module).__name__, self.computed(module, original, args, kwargs))
            packer = Packer()
            description = packer.describe(result)
            self._known[key] = description, [(t.shape, t.dtype, t.device) for t in packer.tensors]
        description, specs = self._known[key]
        return rebuild(description, [_filled(*spec, grad, origin) for spec in specs])

    def computed(self, module: nn.Module, original: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return ``original(*args, **kwargs)``, computed of NaN; buffers and random state stay as they are.

        Lazy tensors are not loaded for it.
        Code that looks at values (a router, a check for NaN) may fail on NaN; then it is computed of ones.
        """
        args, kwargs = tree_map_only(LazyTensor, LazyTensor.form, (args, kwargs))
        try:
            return self._computed(module, original, args, kwargs)
        except Exception:
            args, kwargs = map_tensors((args, kwargs), _of_ones)
            try:
                with plain():
                    return self._computed(module, original, args, kwargs, fill=1)
            except Exception:
                pass  # the first error says more
            raise

    def _computed(
        self, module: nn.Module, original: Callable, args: tuple, kwargs: dict[str, Any], fill: float = math.nan
    ) -> Any:
        device = next((parameter.device for parameter in module.parameters()), CPU)
        eager = torch.compiler.set_stance("force_eager")
        quiet = unhooked(module)
        copied = copied_buffers(buffers_in(module))
        memory = in_memory(module.parameters(), fill)
        with torch.no_grad(), memory, kept_random_state(device), copied, eager, quiet:
            return original(*args, **kwargs)


@contextmanager
def copied_buffers(places: Iterable[tuple[nn.Module, str]]) -> Iterator[None]:
    """Put copies in place of buffers, which are given by their modules and names, meanwhile.

    Values that are put back would change buffers for autograd, too, where this rank has computed with them.
    """
    saved = [(module._buffers, name, module._buffers[name]) for module, name in places]
    copies: dict[int, Any] = {id(None): None}
    for buffers, name, buffer in saved:
        if id(buffer) not in copies:
            copies[id(buffer)] = buffer.clone()  # type: ignore[union-attr]
            copies[id(buffer)].original = buffer
        buffers[name] = copies[id(buffer)]
    try:
        yield
    finally:
        for buffers, name, buffer in saved:
            buffers[name] = None if buffer is None else copies[id(buffer)].original


def buffers_in_call(places: Iterable[tuple[nn.Module, str]], *, writes: bool) -> AbstractContextManager[None]:
    """Enter in a call of an encoder, which writes to its buffers, or to copies of them."""
    return _shown_originals(places) if writes else copied_buffers(places)


@contextmanager
def _shown_originals(places: Iterable[tuple[nn.Module, str]]) -> Iterator[None]:
    """Put buffers in place of their copies again, where they are copied; what they are then stays in their places."""
    shown: list[tuple[dict[str, Any], str, Any, Any]] = []
    for part, name in places:
        last: Any = part._buffers[name]
        while hasattr(getattr(last, "original", None), "original"):
            last = last.original
        shown += [(part._buffers, name, part._buffers[name], last)] * hasattr(last, "original")
    for buffers, name, _, last in shown:
        buffers[name] = last.original
    try:
        yield
    finally:
        for buffers, name, copy, last in shown:
            last.original, buffers[name] = buffers[name], copy


def buffers_in(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return all buffers in `module`, by their modules and names."""
    return [(part, name) for part in module.modules() for name in part._buffers]


def _of_ones(tensor: Tensor) -> Tensor:
    if not is_remote(tensor):
        return tensor
    make = torch.ones if tensor.is_floating_point() else torch.zeros  # integers are indices
    return make(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _filled(shape: Iterable[int], dtype: torch.dtype, device: torch.device, grad: bool, origin: Origin) -> Tensor:
    tensor = remote_value(shape, dtype, device, origin, requires_grad=grad)
    mark_dependent(tensor)
    return tensor


@dataclass
class LayerCall:
    """One pass through a list of layers, as it leaves a stage.

    Attributes:
        hidden: the hidden state at the entry of the first layer after the stage: a tensor, or a tree of tensors.
        skip_inputs: other arguments of later layers, by (layer, path in ``(args, kwargs)``): tensors, and entries of
            dicts that layers share states in.
        returned: where the hidden state is in the result of the stage's last layer; None where code made it from that.
    """

    hidden: Any
    skip_inputs: dict[tuple[int, Path], Any]
    returned: Received


def hidden_path(args: tuple, kwargs: Mapping[str, Any]) -> Path:
    """Return where in ``(args, kwargs)`` the hidden state is: a tensor, else the first tuple or dict of tensors."""
    place: Path | None = hidden_place(args, kwargs)
    if place is None:
        place = next((path[:2] for path, _ in tensors_in((args, kwargs))), None)
    if place is None:
        raise StageError("a layer that is split over stages takes no tensor")
    return place


def hidden_of(args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Return the hidden state among a layer's arguments."""
    return at(hidden_path(args, kwargs), args, kwargs)  # type: ignore[arg-type]


def place_in(result: Any, hidden: Any) -> Received:
    if hidden is result:
        return "result"
    return "first" if isinstance(result, (tuple, list)) and result and hidden is result[0] else None


Kind = int | Literal["tensor", "other"]
"""A hidden state alone, first in a tuple of so many entries, or something else."""


class LayerResults:
    """Makes the stand-ins of one modality's layers.

    Args:
        shapes: remembers what layers return.
        guard: of the values that other ranks have.
        quiet: entered around computations that only tell a shape.
        pads: whether a tuple behind the hidden state may be filled with None; else its tensors are stood in for too.
    """

    def __init__(
        self, shapes: ShapeMemory, guard: Guard, quiet: Callable[[], AbstractContextManager], *, pads: bool
    ) -> None:
        self._shapes, self._guard, self._quiet, self._pads = shapes, guard, quiet, pads
        self._kinds: dict[int, Kind] = {}
        self._by_structure: dict[Any, Kind] = {}

    def of(self, layer: nn.Module, original: Callable, args: tuple, kwargs: dict[str, Any], stand_in: StandIn) -> Any:
        """Return the stand-in for ``original(*args, **kwargs)``, the forward of `layer`.

        Args:
            layer: the remote layer.
            original: its own forward.
            args: of the call.
            kwargs: of the call.
            stand_in: its hidden state.
        """
        kind = self._kinds.get(id(layer))
        if kind is None:
            key = _structure(layer)
            if key not in self._by_structure:
                self._by_structure[key] = self._probe(layer, original, args, kwargs, stand_in.hidden)
            kind = self._kinds[id(layer)] = self._by_structure[key]
        origin = Origin(stand_in.origin, self._guard)
        if kind == "other":
            if stand_in.received == "result":
                return stand_in.hidden
            with self._quiet():
                result = self._shapes.placeholder(layer, origin, original, args, kwargs)
            result = map_tensors(result, lambda tensor: _stand_in(tensor, origin, stand_in.is_later))
            if stand_in.received == "first" and isinstance(result, list | tuple):
                return type(result)([stand_in.hidden, *result[1:]])
            return result
        hidden = stand_in.hidden if stand_in.received else _stand_in(stand_in.hidden, origin, stand_in.is_later)
        return hidden if kind == "tensor" else (hidden, *[None] * (int(kind) - 1))

    def _probe(self, layer: nn.Module, original: Callable, args: tuple, kwargs: dict[str, Any], hidden: Any) -> Kind:
        """Run a layer once on its placeholders to see what it returns."""
        try:
            with self._quiet(), untapped(hidden):  # which travels by itself
                result = self._shapes.computed(layer, original, args, kwargs)
        except Exception as error:  # it needs what stand-ins left out (an earlier layer's bias), or real memory
            kinds = [kind for kind in self._by_structure.values() if kind != "other"]
            if not kinds and not isinstance(error, RuntimeError):
                raise
            return kinds[-1] if kinds else "tensor"
        several = isinstance(result, list | tuple)
        first = result[0] if several and result else result
        if not isinstance(hidden, Tensor) or not isinstance(first, Tensor):
            return "other"
        if several and not (self._pads and all(map(_may_be_none, result[1:]))):
            return "other"
        same = first.shape == hidden.shape and first.is_floating_point() == hidden.is_floating_point()
        return "other" if not same else len(result) if several else "tensor"


def _may_be_none(entry: Any) -> bool:
    """Whether an entry beside the hidden state holds larger tensors alone.

    The code after a layer computes with numbers, as auxiliary losses are (``hidden, loss = layer(hidden)``).
    """
    if isinstance(entry, list | tuple):
        return all(map(_may_be_none, entry))
    return not isinstance(entry, int | float | str) and not (isinstance(entry, Tensor) and entry.dim() == 0)


def _structure(layer: nn.Module) -> Any:
    """A key that is equal for layers of equal modules and parameters."""
    modules = tuple((name, type(module), module.extra_repr()) for name, module in layer.named_modules())
    return modules, tuple((name, parameter.shape) for name, parameter in layer.named_parameters())


def _stand_in(hidden: Tensor, origin: Origin, later: bool) -> Tensor:
    """Return a remote value like `hidden`.

    It carries a gradient, because hooks may be registered on it, and may be written to.
    """
    if isinstance(hidden, Sharded) and hidden.travels_local:
        local = _stand_in(hidden.local, origin, later)
        stand_in: Tensor = from_local(local, hidden.sharded_dim, hidden.lengths, hidden.group)
    elif isinstance(hidden, RemoteValue):
        stand_in = marked(hidden, origin, exact=False)
    else:
        real = hidden.is_floating_point() or hidden.is_complex()
        filler = torch.full((), float("nan") if real else 0, dtype=hidden.dtype, device=hidden.device)
        filler.requires_grad_(real and torch.is_grad_enabled())
        mark_stand_in(filler, later=later)
        stand_in = marked(filler.expand(hidden.shape).clone(), origin)
    mark_stand_in(stand_in, later=later)
    return stand_in
