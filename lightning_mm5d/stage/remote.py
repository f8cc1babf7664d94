"""Stand-ins for the parts on other ranks: parameters without memory, and modules that answer without computing.

A placeholder parameter has the right shape, dtype and device, and zero strides. It is full of NaN, and so is every
result computed from it. A value that was wrongly taken as unneeded therefore shows in the loss of the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mm5d.stage.payload import Packer, rebuild, tensors_in
from lightning_mm5d.stage.taint import mark_dependent


class _Unwritten(Tensor):
    """A view of a placeholder. Writes in place are dropped, because callbacks copy averages into modules."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in _KINDS for kind in types):
            return NotImplemented  # another subclass knows better
        name = getattr(func, "__name__", "")
        own = bool(args) and isinstance(args[0], (_Unwritten, Placeholder))
        if own and name.endswith("_") and not name.endswith("__") and name != "requires_grad_":
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(_Unwritten) if own and func in _VIEWS else result


_VIEWS = (Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]


class Placeholder(nn.Parameter):
    """A parameter of other ranks: NaN of its shape without memory. Writes to it are dropped."""

    __torch_function__ = _Unwritten.__torch_function__


_KINDS = (Tensor, nn.Parameter, _Unwritten, Placeholder)


def is_placeholder(tensor: Tensor) -> bool:
    """Whether `tensor` is a parameter that `drop_parameters` left without memory."""
    return isinstance(tensor, Placeholder)


def drop_parameters(root: nn.Module, names: Iterable[str], device: torch.device) -> None:
    """Replace the parameters called `names` by placeholders on `device`; tied parameters stay tied."""
    replaced: dict[int, nn.Parameter] = {}
    for name in names:
        path, _, attribute = name.rpartition(".")
        module = root.get_submodule(path)
        parameter = module._parameters[attribute]
        assert parameter is not None
        if id(parameter) not in replaced:
            filler = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
            empty = torch.full((), filler, dtype=parameter.dtype, device=device).expand(parameter.shape)
            new = Placeholder(empty, requires_grad=parameter.requires_grad)
            replaced[id(parameter)] = new
        module._parameters[attribute] = replaced[id(parameter)]


def give_memory(parameters: Iterable[nn.Parameter]) -> None:
    """Turn placeholders back into parameters of uninitialised memory, in place."""
    for parameter in parameters:
        if is_placeholder(parameter):
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            parameter.grad = None
            parameter.__class__ = nn.Parameter


class ShapeMemory:
    """The shapes that remote modules return, found by running each once for each shape of its input."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Any, list[tuple[torch.Size, torch.dtype, torch.device]]]] = {}

    def placeholder(self, module: nn.Module, original: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return NaN in the shape of ``original(*args, **kwargs)``, the forward of `module`.

        Not zero-stride: models write features into embeddings in place.
        It carries a gradient where the result would, because hooks may be registered on it; they are never called.
        """
        grad = torch.is_grad_enabled() and (
            any(parameter.requires_grad for parameter in module.parameters())
            or any(tensor.requires_grad for _, tensor in tensors_in((args, kwargs)))
        )
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and args:
            device = args[0].device
            enabled = torch.is_autocast_enabled(device.type)
            dtype = torch.get_autocast_dtype(device.type) if enabled else module.weight.dtype
            return _filled((*args[0].shape[:-1], module.out_features), dtype, device, grad)
        if isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward and args:
            return _filled((*args[0].shape, module.embedding_dim), module.weight.dtype, args[0].device, grad)
        signature = tuple((path, tensor.shape, tensor.dtype) for path, tensor in tensors_in((args, kwargs)))
        others = tuple(repr(value) for value in (*args, *kwargs.values()) if isinstance(value, (int, float, str)))
        key = (id(module), signature, others, torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))
        if key not in self._known:
            result = self.computed(module, original, args, kwargs)
            packer = Packer()
            description = packer.describe(result)
            self._known[key] = description, [(t.shape, t.dtype, t.device) for t in packer.tensors]
        description, specs = self._known[key]
        return rebuild(description, [_filled(*spec, grad) for spec in specs])

    def computed(self, module: nn.Module, original: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return ``original(*args, **kwargs)`` on placeholders; buffers and random state stay as they are."""
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
            result = original(*args, **kwargs)
            for buffer, before in buffers:
                buffer.copy_(before)
        return result


def _filled(shape: Iterable[int], dtype: torch.dtype, device: torch.device, grad: bool) -> Tensor:
    can_be_nan = dtype.is_floating_point or dtype.is_complex
    if grad and can_be_nan:
        # no leaf, because a leaf that carries a gradient cannot be written to in place
        leaf = torch.full((), float("nan"), dtype=dtype, device=device, requires_grad=True)
        tensor = leaf.expand(tuple(shape)).clone()
    else:
        tensor = torch.full(tuple(shape), float("nan") if can_be_nan else 0, dtype=dtype, device=device)
    mark_dependent(tensor)
    return tensor
