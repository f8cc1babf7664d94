"""Initialises modules that were built on the meta device, as the modules themselves would.

Nothing was recorded of such modules. So what gives them their values runs again, without memory, under a recorder that
takes the module's tensors for undefined memory. What it recorded is then made one tensor at a time, as ever. In the
order in which constructors run, children before parents:

1. A transformers model that its configuration describes in full: its constructor, on a second model of which each
   tensor is copied. So all is as in an ordinary construction, computed buffers and random numbers too.
2. Any other module: ``reset_parameters``, or torch's ``_reset_parameters``, and for transformers models that were
   changed since ``initialize_weights``. A tied tensor gets the value of the module that comes first.

A tensor that nobody writes in full is refused by name. So are adapters of peft, whose matrices their constructor sets
together.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_mm5d.config.errors import ConfigError, imported, private
from lightning_mm5d.features.deferred_init.deferred_init import DeferredInit
from lightning_mm5d.features.deferred_init.deferred_weights import DeferredWeights, tensors_of
from lightning_mm5d.partition.parts import has_module


def initialize_meta(module: nn.Module, names: Iterable[str] | None = None) -> DeferredWeights:
    """Record how a module on the meta device initialises itself, for `DeferredWeights.materialize`.

    Args:
        module: it keeps its meta tensors; nothing gets memory here.
        names: the parameters and buffers to initialise, all of the meta device if none are given.

    Raises:
        ConfigError: a tensor is written by no initialiser, or only in part.
    """
    chosen = None if names is None else frozenset(names)
    tensors = [
        (found, tensor)
        for found, _, tensor in tensors_of(module)
        if tensor.is_meta and (chosen is None or not chosen.isdisjoint(found))
    ]
    wanted = {id(tensor) for _, tensor in tensors}
    parts = {id(part): _parts(part) for part in module.modules() if _is_pretrained(part)}
    recorder = DeferredInit()
    with _untied(module) as stand_ins:
        for tensor in [*(tensor for _, tensor in tensors), *stand_ins]:
            recorder.adopt(tensor)
        with recorder, torch.no_grad():
            _initialize(module, "", wanted, parts)
    weights = recorder.weights(module)
    undefined = [name for name in weights.unknown if any(found[0] == name for found, _ in tensors)]
    if undefined:
        _refuse(module, undefined[0])
    kept = [entry for entry in weights.tensors if chosen is None or not chosen.isdisjoint(entry[0])]
    return dataclasses.replace(weights, tensors=kept, unknown=())


@contextmanager
def _untied(module: nn.Module) -> Iterator[list[Tensor]]:
    """Give each module a parameter of its own meanwhile, so that the first one's initialiser has the last word."""
    first: set[int] = set()
    ties: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in first:
                first.add(id(parameter))
            elif parameter.is_meta:
                ties.append((private(part, "_parameters"), name, parameter))
    for parameters, name, parameter in ties:
        parameters[name] = nn.Parameter(torch.empty_like(parameter), parameter.requires_grad)
    try:
        yield [p for parameters, name, _ in ties if (p := parameters[name]) is not None]
    finally:
        for parameters, name, parameter in ties:
            parameters[name] = parameter


def _initialize(module: nn.Module, path: str, wanted: set[int], parts: Mapping[int, list[Any]]) -> None:
    """Run the initialisers of a module's children, then its own."""
    if not any(id(tensor) in wanted for tensor in _tensors(module)):
        return
    if hasattr(module, "adapter_layer_names"):
        rule = "The constructor of a peft layer sets its matrices together, and cannot be repeated"
        fix = "Build the adapters in configure_model, outside of torch.device('meta')"
        raise ConfigError(path or type(module).__name__, f"{type(module).__name__} on the meta device", rule, fix)
    if _is_pretrained(module) and _construct_again(module, wanted, parts[id(module)]):
        return
    for name, child in module.named_children():
        _initialize(child, f"{path}.{name}".lstrip("."), wanted, parts)
    reset = _initializer(module)
    if reset is not None:
        _reset(module, reset)
    if _is_pretrained(module):
        module.initialize_weights()  # type: ignore[operator]


def _is_pretrained(module: nn.Module) -> bool:
    model = imported("transformers.modeling_utils", "PreTrainedModel")
    return model is not None and isinstance(module, model)


def _construct_again(module: nn.Module, wanted: set[int], parts: list[Any]) -> bool:
    """Copy the tensors of a second transformers model, if its configuration makes it of the same parts."""
    before = torch.get_default_dtype()
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), before)
    try:
        torch.set_default_dtype(dtype)
        second: nn.Module = type(module)(copy.deepcopy(module.config))
    except TypeError:
        return False  # it takes more than a configuration
    finally:
        torch.set_default_dtype(before)
    if _parts(second) != parts:
        return False
    values = {name: tensor for names, _, tensor in tensors_of(second) for name in names}
    for names, _, tensor in tensors_of(module):
        if id(tensor) in wanted:
            tensor.copy_(values[names[0]])
    for part, other in zip(module.modules(), second.modules(), strict=True):
        if "_is_hf_initialized" in vars(other):
            part._is_hf_initialized = True  # type: ignore[assignment]
    return True


def _parts(module: nn.Module) -> list[Any]:
    """What must be equal for two modules to be of the same parts."""
    modules: list[Any] = [
        (name, parametrize.type_before_parametrizations(part)) for name, part in module.named_modules()
    ]
    return modules + [(names, kind, t.shape, t.dtype) for names, kind, t in tensors_of(module)]


def _tensors(module: nn.Module) -> Iterable[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _initializer(module: nn.Module) -> Callable[[], Any] | None:
    """The module's method that initialises its own tensors, where it has one that needs no arguments."""
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if callable(method) and all(
            p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            for p in inspect.signature(method).parameters.values()
        ):
            return method
    return None


def _reset(module: nn.Module, reset: Callable[[], Any]) -> None:
    """Run an initialiser; what it writes into a parametrized tensor goes into the tensors that it is computed from."""
    if not parametrize.is_parametrized(module):
        reset()
        return
    with parametrize.cached():
        reset()
        values = {name: getattr(module, name) for name in module.parametrizations}  # type: ignore[union-attr]
    for name, value in values.items():
        setattr(module, name, value)


def _refuse(module: nn.Module, name: str) -> NoReturn:
    owner, _, leaf = name.rpartition(".")
    kind = type(module.get_submodule(owner) if has_module(module, owner) else module).__name__
    raise ConfigError(
        name,
        "a tensor of the meta device that no initialiser writes in full",
        "A module that is built on the meta device is initialised by reset_parameters of its parts, and by "
        "initialize_weights of transformers models",
        f"Build it in configure_model, outside of torch.device('meta'), or give {kind} a method reset_parameters that "
        f"writes {leaf}",
    )
