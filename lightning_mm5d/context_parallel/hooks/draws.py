"""Random draws inside of a layer that works on local tokens: for each sample equal on all ranks, for tokens not.

A layer may drop whole samples (stochastic depth, also called DropPath), by one number for each sample: ranks that hold
tokens of the same sample must draw the same number. Draws for tokens come from a stream of each rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_mm5d.data.random_state import drawing_together
from lightning_mm5d.source.names import names
from lightning_mm5d.source.trees import Source, method_of

_BY_SIZE = {torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal}
_BY_FIRST_ARGUMENT = {
    *(torch.bernoulli, torch.rand_like, torch.randn_like, torch.randint_like),
    *(Tensor.bernoulli, Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.random_, Tensor.exponential_),
    *(F.dropout, F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout, torch.dropout),
}

_NAMES = {"drop_path", "stochastic_depth"} | {
    one.__name__ for one in _BY_SIZE | _BY_FIRST_ARGUMENT if "dropout" not in one.__name__
}


def drawing(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules, beside torch's own dropouts, whose code names a function that draws random numbers."""
    source, known, found = Source(), dict[type, bool](), list[nn.Module]()
    for part in layers:
        cls = type(part)
        if cls not in known:
            forward = None if cls.__module__.startswith("torch.") else method_of(cls, "forward")
            named = None if forward is None else names(source, forward, variables=False)
            known[cls] = named is not None and not named.isdisjoint(_NAMES)
        if known[cls]:
            found.append(part)
    return found


class Draws(TorchFunctionMode):
    """Enter around code that works on local tokens: what it draws for whole samples is equal on all ranks.

    Args:
        index: of the rank in its group.
        shape: of the local tokens, ``[..., B, S, D]``, or ``[S, D]`` where samples are packed.
        device: where this rank computes.
    """

    def __init__(self, index: int, shape: torch.Size, device: torch.device) -> None:
        super().__init__()
        self._index, self._shape, self._device = index, shape, device

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        shape = None
        if func in _BY_FIRST_ARGUMENT:
            shape = (args[0] if args else kwargs["input"]).shape
        elif func in _BY_SIZE and kwargs.get("generator") is None and kwargs.get("out") is None:
            shape = func(*args, **{**kwargs, "device": "meta"}).shape
        if shape is None or self.has_tokens(shape):
            return func(*args, **kwargs)
        with drawing_together(self._index, self._device):
            return func(*args, **kwargs)

    def has_tokens(self, shape: torch.Size) -> bool:
        """Whether something of `shape` has values for each token, not for each sample."""
        length = self._shape[-2]
        if len(shape) == len(self._shape):
            return shape[-2] == length and (length > 1 or shape == self._shape)
        if len(self._shape) == 2:  # packed
            return length in shape
        batch = self._shape[:-2].numel()
        return length in shape[1:] or (len(shape) > 0 and shape[0] != batch and shape[0] in (length, batch * length))
