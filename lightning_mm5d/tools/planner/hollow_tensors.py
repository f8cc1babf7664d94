"""Tensors whose memory nothing touches: operations on them give shapes, strides and sharing of storages, and no values.

A hollow tensor is an ordinary CPU tensor. Its memory is reserved and never written or read, so that it takes none of
the machine. Autograd, views, subclasses, `parameter.data` and shared storages work as in training. Fake tensors of
torch are of a class of their own and do not allow that. Whatever is computed from a hollow tensor is hollow. What is
computed from a batch alone has values, but for large floating-point tensors that no other tensor goes into.

What comes from a generator that is given has values, too. Choices of the largest entries, as a router's, take all of
them equally often. Another result of few elements has values: 1.0, or False for a comparison; of a tensor full of NaN,
NaN and True. So code may read a loss or a norm. Refuses operations whose shapes depend on values that are not there.

Finds how many bytes of states an optimizer keeps for a parameter, by a step of it on tensors without memory.

The optimizers are those that `configure_optimizers` returns, called on a copy of the module without memory, with a
stand-in for the trainer that tells how many steps there are. So any class and any settings count: momentum, moments of
Adam, factored moments, states that are made when it is constructed.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_mm5d.config.errors import ConfigError, private
from lightning_mm5d.data.random_state import kept_random_state
from lightning_mm5d.trainer.construction import copy_without_memory

_FEW = 64
"""elements of a new floating-point tensor that has values"""
_LARGE = 2**20
"""elements of a floating-point tensor above which it has no values, whatever it was computed from"""
_CPU = torch.device("cpu")
_aten = torch.ops.aten
_AS_VIEWS = {_aten._unsafe_view.default, _aten._reshape_alias.default, _aten.lift_fresh.default}
GROUPED = private(_aten, "_grouped_mm").default
"""the grouped matrix product"""
_INDEX = _aten.index.Tensor
_BINCOUNT = _aten.bincount.default
_SCALAR = _aten._local_scalar_dense.default
_CHOICES = {_aten.topk.default: 2, _aten.max.dim: 1, _aten.argmax.default: 1}
"""operations that choose the largest, and the place of their dim among the arguments"""
_NAN = float("nan")
_PLAIN = Tensor.__torch_dispatch__


def _counted(_: Tensor, weights: Tensor | None = None, minlength: int = 0) -> int:
    """How many numbers `torch.bincount` counts, which metrics say; 0 where only the values tell."""
    return minlength if weights is None else 0


Watch = Callable[[Any, Sequence[Tensor], Sequence[Tensor], Sequence[Any]], None]


LARGE = 2**16
"""elements of a floating-point buffer above which its values are left out"""


class HollowTensors(TorchDispatchMode):
    """A context in which whatever is computed from hollow tensors is hollow.

    Args:
        watch: called after each operation with the operation, the tensors that it took and those that it made, and its
            positional arguments.

    Attributes:
        alive: bytes of all storages that were made here and are alive.
        peak: most of `alive` at a time, since it was set.
    """

    def __init__(self, watch: Watch | None = None) -> None:
        super().__init__()
        self._watch = watch
        self.alive = self.peak = 0
        self._sizes: dict[int, int] = {}  # of storages by their addresses
        self._hollow: set[int] = set()
        self._nan: set[int] = set()
        self._kinds: dict[Any, str] = {}
        self._known: dict[Any, Any] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Return a hollow tensor on the CPU in place of `tensor`, which may be on the meta device."""
        return self._new_like(tensor).requires_grad_(tensor.requires_grad)

    def on_cpu(self, value: Any) -> Any:
        """An attribute without the meta device, where constructors leave it: states of metrics, tables, masks."""
        if isinstance(value, torch.device) and value.type == "meta":
            return torch.device("cpu")
        if isinstance(value, Tensor) and value.is_meta:
            is_table = not value.is_floating_point() and value.numel() <= LARGE  # in which a step may look up places
            return torch.zeros(value.shape, dtype=value.dtype) if is_table else self.of(value)
        if type(value) in (list, tuple):
            return type(value)(map(self.on_cpu, value))
        return {key: self.on_cpu(part) for key, part in value.items()} if type(value) is dict else value

    def is_hollow(self, tensor: Tensor) -> bool:
        """Whether a tensor has no values."""
        return tensor.untyped_storage()._cdata in self._hollow

    def size_of(self, tensors: Any) -> int:
        """Return the bytes of the storages of some tensors, each counted once."""
        storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
        return sum(storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = self._kinds.get(func) or self._kinds.setdefault(func, _kind(func))
        if (kind == "view" and self._watch is None) or any(cls.__torch_dispatch__ is not _PLAIN for cls in types):
            return func(*args, **kwargs)  # a class with a dispatch of its own gets it now
        inputs = _tensors((args, [*kwargs.values()]))
        outputs = self._computed(func, kind, inputs, args, kwargs)
        if self._watch is not None:
            self._watch(func, inputs, _tensors([outputs]), args)
        return outputs

    def _computed(self, func: Any, kind: str, inputs: Sequence[Tensor], args: Any, kwargs: dict[str, Any]) -> Any:
        keys = [tensor.untyped_storage()._cdata for tensor in inputs]
        if kind in ("new", "write"):
            large = [tensor for tensor in inputs if tensor.is_floating_point() and tensor.numel() > _LARGE]
            if large or not self._hollow.isdisjoint(keys):
                nan = not self._nan.isdisjoint(keys) or any(self._begins_with_nan(tensor) for tensor in large)
                return self._without_values(func, kind, args, kwargs, nan)
        takes_device = any(argument.name == "device" for argument in func._schema.arguments)
        is_own = kwargs.get("generator") is not None  # a probe, which looks at what comes out
        if not inputs and takes_device and kwargs.get("device") in (None, _CPU) and not is_own:
            shown = func(*args, **{**kwargs, "device": "meta", "pin_memory": None})
            if shown.is_floating_point() and shown.numel() > _FEW:
                return self._new_like(shown, any(argument != argument for argument in args))
        outputs = func(*args, **kwargs)
        for tensor in _tensors([outputs]):
            self._note(tensor)
        return outputs

    def _without_values(self, func: Any, kind: str, args: Any, kwargs: Mapping[str, Any], nan: bool) -> Any:
        if func is _SCALAR and (args[0].is_floating_point() or args[0].dtype == torch.bool):  # of a large tensor
            return (_NAN if nan else 1.0) if args[0].is_floating_point() else nan
        if func is _BINCOUNT and (length := _counted(*args, **kwargs)):
            return self._new_like(torch.empty(length, dtype=torch.int64, device="meta"))
        masks = [mask for mask in args[1] if mask is not None and mask.dtype == torch.bool] if func is _INDEX else []
        is_dynamic = torch.Tag.dynamic_output_shape in func.tags and func is not _INDEX
        if func is _SCALAR or is_dynamic or any(map(self.is_hollow, masks)):
            rule = "It depends on values that a dry run does not have, as how many tokens a router sends where"
            raise ConfigError("dryrun", str(func), rule, "Compute it from the batch alone, or ask `mm5d inspect`")
        if masks:
            args = (args[0], _places(args[1]))
        written = _written(func, args, kwargs) if kind == "write" else []
        for tensor in written:
            self._note(tensor)
            self._hide(tensor, nan)
        if written and all(output.alias_info is not None for output in func._schema.returns):
            return None if not func._schema.returns else written[0] if len(written) == 1 else tuple(written)
        results = tree_map_only(Tensor, lambda shown: self._new_like(shown, nan), self._shown(func, args, kwargs))
        if func in _CHOICES:
            self._choose(results, args[0].shape, *args[_CHOICES[func] :])
        return results

    def _choose(self, results: Any, shape: torch.Size, dim: int | None = -1, *_: Any) -> None:
        """Let choices of the largest entries along a dim, as routers make them, take all of them equally often."""
        chosen = results if isinstance(results, Tensor) else results[1]
        if dim is not None and shape:
            ordered = chosen if chosen.dim() < len(shape) else chosen.movedim(dim, -1)
            ordered.copy_(torch.arange(chosen.numel()).remainder(shape[dim]).view(ordered.shape))
            self._hollow.discard(chosen.untyped_storage()._cdata)

    def _shown(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """The results of an operation on the meta device, found once for each form of what it takes."""
        key = func, _form(args), _form([*kwargs.values()])
        if key not in self._known:
            arguments, options = tree_map_only(Tensor, lambda tensor: _like(tensor, "meta"), (args, dict(kwargs)))
            if options.get("device") is not None:
                options["device"] = torch.device("meta")
            self._known[key] = (_grouped if func is GROUPED else func)(*arguments, **options)
        return self._known[key]

    def _new_like(self, shown: Tensor, nan: bool = False) -> Tensor:
        """A tensor like the one that is shown."""
        tensor = _like(shown)
        self._note(tensor)
        if tensor.numel() <= _FEW and tensor.is_floating_point():
            return tensor.fill_(_NAN if nan else 1.0)
        if tensor.numel() <= _FEW and tensor.dtype == torch.bool:
            return tensor.fill_(nan)
        self._hide(tensor, nan)
        return tensor

    def _begins_with_nan(self, tensor: Tensor) -> bool:
        return not self.is_hollow(tensor) and bool(tensor[(0,) * tensor.dim()].isnan())

    def _hide(self, tensor: Tensor, nan: bool) -> None:
        """Take a tensor's values for unknown."""
        self._hollow.add(key := tensor.untyped_storage()._cdata)
        if nan:
            self._nan.add(key)

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            weakref.finalize(storage, self._free, key)
        self.alive += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.alive)

    def _free(self, key: int) -> None:
        self.alive -= self._sizes.pop(key)
        self._hollow.discard(key)
        self._nan.discard(key)


def _kind(func: Any) -> str:
    """What an operation does: a ``view``, another ``form`` of a tensor, a ``write``, or something ``new``."""
    if func.is_view or func in _AS_VIEWS or torch.Tag.inplace_view in func.tags:
        return "view"
    if func.overloadpacket in (_aten.set_, _aten.resize_):
        return "form"
    return "write" if any(_is_written(argument) for argument in func._schema.arguments) else "new"


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes to."""
    places = [(place, argument.name) for place, argument in enumerate(func._schema.arguments) if _is_written(argument)]
    return _tensors([args[place] if place < len(args) else kwargs.get(name) for place, name in places])


def _tensors(arguments: Any) -> list[Tensor]:
    """The tensors in a list of arguments, and in lists in it."""
    tensors: list[Tensor] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            tensors.append(argument)
        elif isinstance(argument, (list, tuple)):
            tensors += _tensors(argument)
    return tensors


def _form(given: Any) -> Any:
    """What results depend on, but values."""
    if isinstance(given, Tensor):
        return given.shape, given.stride(), given.dtype
    return tuple(map(_form, given)) if isinstance(given, (list, tuple)) else (type(given), given)


def _like(shown: Tensor, device: str = "cpu") -> Tensor:
    return torch.empty_strided(shown.shape, shown.stride(), dtype=shown.dtype, device=device)


def _grouped(a: Tensor, b: Tensor, ends: Tensor | None = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
    """The result of grouped matrix products, which torch knows without memory in bfloat16 alone."""
    groups = (len(ends),) if ends is not None and a.dim() == b.dim() == 2 else ()
    if a.dim() == b.dim() == 3:
        groups = (a.shape[0],)
    return a.new_empty(*groups, a.shape[-2], b.shape[-1], dtype=out_dtype or a.dtype)


def _places(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices with the places of what masks choose instead of the masks."""
    places: list[Tensor | None] = []
    for index in indices:
        places += index.nonzero().unbind(1) if index is not None and index.dtype == torch.bool else [index]
    return places


_STEPS = 1000
TRAINER = SimpleNamespace(
    estimated_stepping_batches=_STEPS,
    num_training_batches=_STEPS,
    max_steps=_STEPS,
    max_epochs=1,
    accumulate_grad_batches=1,
    world_size=1,
    num_nodes=1,
    num_devices=1,
    global_step=0,
    current_epoch=0,
)


Remade = Callable[[Optimizer, Mapping[str, Any], list[nn.Parameter]], Optimizer | None]


class StateBytes(NamedTuple):
    """Bytes beside one parameter.

    Attributes:
        persistent: of its states.
        working: that a step needs for a moment.
        together: whether a step works on all parameters at once, so that this memory adds up.
        moved: that the operations of a step read and write.
    """

    persistent: int
    working: int
    together: bool
    moved: int = 0


class OptimizerStates:
    """The states of a module's optimizers.

    Args:
        module: full; the meta device will do.
        remade: makes an optimizer of the same class with other parameters and the settings of a group; None where it
            cannot.

    Attributes:
        optimizers: that `configure_optimizers` returned.

    Raises:
        Exception: of the user's `configure_optimizers`, which may need a trainer.
    """

    def __init__(self, module: LightningModule, remade: Remade) -> None:
        self._remade = remade
        copy = copy_without_memory(module)
        with kept_random_state(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            copy.trainer = TRAINER  # type: ignore[assignment]
            self.optimizers = list(_optimizers(copy.configure_optimizers()))
        # a function that a user put on the module knows the parameters of the module itself
        groups = {
            id(parameter): (optimizer, group)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self._group_of = {
            name: groups[id(parameter)]
            for root in (module, copy)
            for name, parameter in root.named_parameters(remove_duplicate=False)
            if id(parameter) in groups
        }
        self._known: dict[Any, StateBytes | None] = {}

    def of(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> StateBytes | None:
        """Return what is kept for a trained parameter of this name, of which a rank has a part of `shape`.

        Nothing where no optimizer has it; None where the optimizer cannot be tried.
        """
        if name not in self._group_of:
            return StateBytes(0, 0, False)
        optimizer, group = self._group_of[name]
        key = id(group), shape, dtype
        if key not in self._known:
            self._known[key] = self._tried(optimizer, group, shape, dtype)
        return self._known[key]

    def optimizers_of(self, parameters: Mapping[str, nn.Parameter]) -> list[Optimizer]:
        """Return optimizers of the same classes and settings, one for each group, that have other parameters.

        Args:
            parameters: by the names of those in whose place they are.

        Raises:
            TypeError: one cannot be made.
        """
        members: dict[int, list[str]] = {}
        for name in filter(self._group_of.__contains__, parameters):
            members.setdefault(id(self._group_of[name][1]), []).append(name)
        return [self._probe(*self._group_of[names[0]], [parameters[n] for n in names]) for names in members.values()]

    def _probe(self, optimizer: Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
        probe = self._remade(optimizer, group, parameters)
        if probe is None:
            raise TypeError(type(optimizer))
        if callable(train := getattr(probe, "train", None)):
            train()
        return probe

    def _tried(
        self, optimizer: Optimizer, group: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype
    ) -> StateBytes | None:
        try:
            with kept_random_state():
                states, working, moved = self._step(optimizer, group, shape, dtype, 1)
                _, several, _ = self._step(optimizer, group, shape, dtype, 4)
                together = several > 2.5 * working  # up to twice as much is left over from the parameter before
                return StateBytes(states, working, together, moved)
        except Exception:  # whatever a class of somebody else's does with tensors that have no values
            return None

    def _step(
        self, optimizer: Optimizer, group: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype, count: int
    ) -> tuple[int, int, int]:
        """Bytes of states, at most of other tensors in a step on `count` parameters, and that it reads and writes."""
        moved = 0

        def watch(func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor], _: Any) -> None:
            nonlocal moved
            moved += 0 if func.is_view else sum(tensor.nbytes for tensor in (*inputs, *outputs))

        hollow = HollowTensors(watch)
        parameters = [nn.Parameter(hollow.of(torch.empty(shape, dtype=dtype, device="meta"))) for _ in range(count)]
        with hollow:
            probe = self._probe(optimizer, group, parameters)
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            for _ in range(2):
                hollow.peak = moved = 0
                probe.step()
        states = hollow.size_of(leaf for leaf in tree_leaves(list(probe.state.values())) if isinstance(leaf, Tensor))
        return states, max(hollow.peak - 2 * sum(parameter.nbytes for parameter in parameters) - states, 0), moved


def _optimizers(returned: Any) -> Iterator[Optimizer]:
    """The optimizers in what `configure_optimizers` returns, whichever of its forms that has."""
    if isinstance(returned, Optimizer):
        yield returned
    elif isinstance(returned, Mapping):
        yield from _optimizers(returned.get("optimizer"))
    elif isinstance(returned, list | tuple):
        for part in returned:
            yield from _optimizers(part)
