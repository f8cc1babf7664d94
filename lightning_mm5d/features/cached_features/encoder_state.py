"""What a frozen encoder's features depend on beside its inputs: weights, buffers, modes, configuration and precision.

Tensors are looked up by name at each call, because a move to another device, ``load_state_dict(assign=True)`` or an
assignment puts others in their places. Each is hashed once, and again after a write in place, which counts up its
version. Attributes of modules are part of the state, whatever they hold (`Contents`): numbers, containers, tensors,
functions and configurations. Of a module that also holds weights of other modalities, such as the LightningModule
itself, those attributes and modules count that the code of the encoder's boundary names. Code of classes is not part of
the state, and neither are metrics.

`Contents` writes out what plain values, containers, functions and objects hold, so that it can be compared and hashed:
it turns a value into nested tuples of strings and numbers. Containers are followed, and objects by what copying them
would take along. A function is its name, code, defaults and closure. Tensors are handed to a function of the caller. An
object that occurs again is written by the order of first sight, so cycles end.

It refuses (`ValueError`) attributes whose content cannot be known, such as a lock or an open file.
"""

from __future__ import annotations

import builtins
import copyreg
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from inspect import getattr_static, isfunction
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from lightning_mm5d.partition.compiled import IN_PLACE
from lightning_mm5d.partition.parts import holds_metrics, hyperparameters, is_lightnings, tensors_of
from lightning_mm5d.sharded.remote_value import is_remote
from lightning_mm5d.sharded.torch_internals import version_of
from lightning_mm5d.source.order import is_followed
from lightning_mm5d.source.trees import closure_of, codes_in, function_of

_OF_TORCH = frozenset(vars(nn.Module())) | {"forward", IN_PLACE}
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_FRAMEWORKS = ("lightning.", "pytorch_lightning.", "lightning_fabric.", "torch._dynamo.")


class EncoderState:
    """The state of one modality, as a boundary of it computes with it.

    Args:
        root: the LightningModule.
        path: of the module that has the boundary.
        method: of that module.
        owned: names of the modality's parameters and buffers, in the LightningModule.
        device: where this rank computes.
    """

    def __init__(self, root: nn.Module, path: str, method: str, owned: Collection[str], device: torch.device) -> None:
        self._root, self._path, self._method, self._device = root, path, method, device
        self._owned = sorted(owned)
        every = {name for name, _ in tensors_of(root)}
        self._inside = _paths_to(self._owned)
        self._mixed = _paths_to(every.difference(owned)) | {""}
        self._hashed: dict[int, tuple[Tensor, int, torch.dtype, str]] = {}
        self._others: dict[int, EncoderState] = {}

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers that the module has now, by their names in the LightningModule."""
        tensors: dict[str, Tensor] = {}
        for name in self._owned:
            owner, _, attribute = name.rpartition(".")
            tensor = getattr(self._root.get_submodule(owner), attribute, None)
            if isinstance(tensor, Tensor):
                tensors[name] = tensor
        for path, module in self._modules():
            if path not in self._mixed:
                held = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
                tensors |= {f"{path}.{name}": tensor for name, tensor in held}
        return tensors

    def fingerprint(self) -> str:
        """Return a digest that is equal for equal states.

        Raises:
            ValueError: the content of an attribute cannot be known; the message names it.
        """
        hashed, self._hashed = self._hashed, {}
        contents = Contents(lambda tensor: self._digest(tensor, hashed), self._other_module)
        modes = [
            torch.__version__,
            transformers.__version__,
            self._device.type,
            torch.is_autocast_enabled(self._device.type),
            str(torch.get_autocast_dtype(self._device.type)),
            torch.get_float32_matmul_precision(),
            str(torch.get_default_dtype()),
        ]
        modules = [
            (path, contents.of(type(module)), self._attributes(path, module, contents))
            for path, module in self._modules()
        ]
        tensors = [(name, self._digest(tensor, hashed)) for name, tensor in sorted(self.tensors().items())]
        return hashlib.sha256(repr([modes, modules, tensors]).encode()).hexdigest()

    def _digest(self, tensor: Tensor, hashed: dict[int, tuple[Tensor, int, torch.dtype, str]]) -> str:
        """Return the digest of a tensor; `hashed` are those of the last call, and this call's are kept."""
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(f"a tensor of layout {tensor.layout} on {tensor.device}, which has no numbers to read")
        version = version_of(tensor)
        known = self._hashed.get(id(tensor)) or hashed.get(id(tensor))
        if known is None or tensor.is_inference() or known[1:3] != (version, tensor.dtype):
            digest = hashlib.sha256()
            update(digest, tensor)
            known = tensor, version, tensor.dtype, digest.hexdigest()
        self._hashed[id(tensor)] = known
        return known[3]

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the boundary's module and those inside of it that the features may depend on."""
        todo = [(self._path, self._root.get_submodule(self._path))]
        while todo:
            path, module = todo.pop()
            yield path, module
            for name, child in module.named_children():
                full = f"{path}.{name}" if path else name
                is_used = path not in self._mixed or isinstance(module, _CONTAINERS) or name in self._names
                if full in self._inside or (is_used and not holds_metrics(child)):
                    todo.append((full, child))

    def _attributes(self, path: str, module: nn.Module, contents: Contents) -> list[tuple[str, Any]]:
        values = {
            name: value
            for name, value in vars(module).items()
            if name not in _OF_TORCH
            and not is_bookkeeping(module, name)
            and not type(value).__module__.startswith(_FRAMEWORKS)
            and not isfunction(getattr_static(type(module), name, None))  # stands before a method
            and not is_remote(value)
        }
        if (hparams := hyperparameters(module)) is not None:
            values["hparams"] = hparams
        values["training"] = module.training
        if path in self._mixed:
            values = {name: value for name, value in values.items() if name in self._names}
        named_contents = []
        for name, value in values.items():
            try:
                named_contents.append((name, contents.of(value)))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}.{name}".lstrip(".") + f" holds {error}") from None
        return named_contents

    @cached_property
    def _names(self) -> set[str]:
        """All names in the code of the boundary, and in the code of the methods and functions that it calls."""
        inside = self._root.get_submodule(self._path).named_modules(prefix=self._path)
        types = {type(part) for path, part in inside if path == self._path or path in self._inside & self._mixed}
        return _names_in(types, self._method)

    def _other_module(self, module: nn.Module) -> Any:
        """What stands for a module that an attribute holds: its path, or what it holds where it has none."""
        path = next((path for path, candidate in self._root.named_modules() if candidate is module), None)
        if path is not None:
            return "module", path
        if id(module) not in self._others:
            state = EncoderState(module, "", "forward", list(module.state_dict()), self._device)
            state._mixed = frozenset()
            self._others[id(module)] = state
        return "module", self._others[id(module)].fingerprint()


def update(digest: Any, tensor: Tensor) -> None:
    """Add dtype, shape and numbers of a tensor to a digest of hashlib."""
    digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
    local = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    if local.numel():
        digest.update(local.view(-1).view(torch.uint8).numpy().data)


def is_bookkeeping(module: nn.Module, name: str) -> bool:
    """Whether an attribute is one that transformers or Lightning keep for themselves."""
    return is_lightnings(module, name) or (name.startswith("_") and type(module).__module__.startswith("transformers."))


def _paths_to(names: Iterable[str]) -> frozenset[str]:
    """The paths of all modules that hold these tensors."""
    paths = {""} if names else set[str]()
    for name in names:
        while name := name.rpartition(".")[0]:
            paths.add(name)
    return frozenset(paths)


def _names_in(types: Iterable[type], method: str) -> set[str]:
    """The names that `method` uses, and those that the methods of `types` and functions of these names use."""
    classes = {base for cls in types for base in cls.__mro__}
    used_names, followed = {method}, set[FunctionType]()
    todo = [vars(cls).get(method) for cls in classes]
    while todo:
        value = todo.pop()
        function = function_of(getattr(value, "fget", getattr(value, "func", value)))  # of properties
        if function is None or function in followed or not is_followed(function):
            continue
        followed.add(function)
        words = (word for code in codes_in(function.__code__) for word in (*code.co_names, *code.co_consts))
        names = {word for word in words if isinstance(word, str)}  # constants, too: of getattr
        used_names |= names
        todo += [vars(cls).get(name) for cls in classes for name in names]
        referenced = [function.__globals__.get(name) for name in names]
        todo += referenced
        todo += [vars(module).get(name) for module in referenced if isinstance(module, ModuleType) for name in names]
    return used_names


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.layout, torch.memory_format, range)


class Contents:
    """Writes out values, of which those that occur several times are written once.

    Args:
        tensor: returns what stands for a tensor.
        module: returns what stands for a module.
    """

    def __init__(self, tensor: Callable[[Tensor], Any], module: Callable[[nn.Module], Any]) -> None:
        self._tensor, self._module = tensor, module
        self._seen: dict[int, tuple[int, Any]] = {}  # with the object, whose id must not be taken again

    def of(self, value: Any) -> Any:
        """Return the content of `value`.

        Raises:
            ValueError: it holds something whose content cannot be known.
        """
        if value is None or type(value) in _PLAIN:
            return type(value).__name__, repr(value)
        if isinstance(value, torch.device):
            return "device", value.type
        if isinstance(value, (type, ModuleType)):
            return "name", getattr(value, "__module__", ""), getattr(value, "__qualname__", value.__name__)
        if type(value) is tuple:
            return "tuple", *map(self.of, value)
        if id(value) in self._seen:
            return "again", self._seen[id(value)][0]
        self._seen[id(value)] = len(self._seen), value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, np.ndarray) and value.dtype != object:
            return "array", str(value.dtype), value.shape, value.tobytes()
        if isinstance(value, (set, frozenset)):
            return "set", *sorted(map(repr, map(self.of, value)))
        if type(value) is list:
            return "list", *map(self.of, value)
        if type(value) is dict:
            return "dict", *((self.of(key), self.of(entry)) for key, entry in value.items())
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, (MethodType, BuiltinFunctionType)):
            owner = getattr(value, "__self__", None)
            return "method", value.__module__, value.__qualname__, None if owner is builtins else self.of(owner)
        return self._copied(value)

    def _function(self, function: FunctionType) -> Any:
        return (
            "function",
            function.__module__,
            function.__qualname__,
            self._code(function.__code__),
            self.of(function.__defaults__),
            self.of(function.__kwdefaults__),
            *((name, self.of(value)) for name, value in closure_of(function).items()),
        )

    def _code(self, code: CodeType) -> Any:
        constants = [self._code(const) if isinstance(const, CodeType) else self.of(const) for const in code.co_consts]
        return code.co_code, code.co_names, code.co_varnames, tuple(constants)

    def _copied(self, value: Any) -> Any:
        """The content of an object, by the protocol of `copy`."""
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        try:
            reducer = copyreg.dispatch_table.get(type(value))
            reduced = value.__reduce_ex__(2) if reducer is None else reducer(value)
        except Exception as error:
            raise ValueError(f"a value of type {name}, whose content cannot be known ({error})") from None
        if isinstance(reduced, str):
            return name, reduced
        parts = [list(part) if index > 2 and part is not None else part for index, part in enumerate(reduced)]
        return name, *map(self.of, parts)
