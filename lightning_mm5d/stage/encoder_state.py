"""What a frozen encoder's features depend on beside its inputs: weights, buffers, modes, configuration and precision.

Weights are hashed once, and again after a write in place, which counts up a tensor's version. Plain attributes of
modules (numbers, strings, ``training``) are part of the state; code is not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn

_PLAIN = (bool, int, float, str)


class EncoderState:
    """The state of one modality, as a boundary of it computes with it.

    Args:
        root: the LightningModule.
        path: of the module that has the boundary.
        owned: names of the modality's parameters and buffers, in the LightningModule.
        device: where this rank computes.
    """

    def __init__(self, root: nn.Module, path: str, owned: Collection[str], device: torch.device) -> None:
        self._device = device
        start = root.get_submodule(path)
        self._modules = dict(_modules(start, path, frozenset(owned)))
        tensors = {**dict(root.named_parameters(remove_duplicate=False)), **dict(root.named_buffers())}
        self._tensors = {name: tensor for name, tensor in tensors.items() if name in owned}
        self._start, self._weights = start, ""
        self._seen: list[tuple[int, int, torch.dtype]] | None = None

    def fingerprint(self) -> str:
        """Return a digest that is equal for equal states."""
        seen = [(id(tensor), tensor._version, tensor.dtype) for tensor in self._tensors.values()]
        if seen != self._seen:
            self._weights, self._seen = self._hashed(), seen
        modes = [
            torch.__version__,
            transformers.__version__,
            self._device.type,
            torch.is_autocast_enabled(self._device.type),
            str(torch.get_autocast_dtype(self._device.type)),
            torch.get_float32_matmul_precision(),
            str(torch.get_default_dtype()),
        ]
        attributes = [
            (
                path,
                type(module).__module__,
                type(module).__qualname__,
                module.training,
                *_plain(module, path),
            )
            for path, module in self._modules.items()
        ]
        return hashlib.sha256(repr([self._weights, modes, attributes]).encode()).hexdigest()

    def _hashed(self) -> str:
        digest = hashlib.sha256()
        config: Any = getattr(self._start, "config", None)
        if hasattr(config, "to_dict"):
            digest.update(json.dumps(config.to_dict(), sort_keys=True, default=str).encode())
        for name, tensor in sorted(self._tensors.items()):
            digest.update(name.encode())
            update(digest, tensor)
        return digest.hexdigest()


def update(digest: Any, tensor: Tensor) -> None:
    """Add dtype, shape and numbers of a tensor to a digest of hashlib."""
    digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
    local = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    if local.numel():
        digest.update(local.view(-1).view(torch.uint8).numpy().data)


def _modules(module: nn.Module, path: str, owned: frozenset[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and what is inside of it, without modules all of whose tensors belong to other modalities."""
    yield path, module
    for name, child in module.named_children():
        full = f"{path}.{name}" if path else name
        own = [f"{full}.{one}" for one, _ in child.named_parameters()]
        if not own or not owned.isdisjoint(own):
            yield from _modules(child, full, owned)


def is_bookkeeping(module: nn.Module, name: str, path: str) -> bool:
    """Whether an attribute is one that transformers, or Lightning for the root, keep for themselves."""
    return name.startswith("_") and (not path or type(module).__module__.startswith("transformers."))


def _plain(module: nn.Module, path: str) -> list[tuple[str, Any]]:
    """The attributes of plain values."""
    return [
        (name, value)
        for name, value in vars(module).items()
        if name != "training"
        and not is_bookkeeping(module, name, path)
        and (isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(one, _PLAIN) for one in value)))
    ]
