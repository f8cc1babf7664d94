"""Kernels of other packages in place of what modules compute with several operations, with ``kernels`` on a modality.

``rms_norm`` gives Llama's norms to `torch.nn.functional.rms_norm`, ``liger`` gives the products of gated units to
Liger's Triton kernel. A module is known by its code (`source.formulas`), and keeps its class, its name and its
submodules, so that what tensor parallelism, gathers and adapters do to these goes on.

A norm whose input has another dtype than its weight, as under autocast, computes what it always did: its result has
the dtype of both, which a kernel's has not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import SiLUActivation

from lightning_mm5d.config.modality import Modality
from lightning_mm5d.partition import Partition
from lightning_mm5d.source.formulas import is_gated_unit, rms_norm
from lightning_mm5d.source.trees import Source

LIGER = "liger_kernel.transformers.functional"
_FUSED = frozenset({"rms_norm", "liger"})


class FusedModules(NamedTuple):
    """The modules of one modality that kernels compute.

    Attributes:
        norms: path of each norm, and what it adds under the root.
        gated: paths of the units ``down_proj(silu(gate_proj(x)) * up_proj(x))``.
    """

    norms: dict[str, float]
    gated: tuple[str, ...]


def fused_modules(root: nn.Module, partition: Partition, modality: str) -> FusedModules:
    """Return the modules of a modality that chosen kernels compute, on whichever rank they are."""
    source, norms, gated = Source(), dict[str, float](), list[str]()
    for path, module in root.named_modules():
        names = [f"{path}.{name}" for name, _ in module.named_parameters()]
        owners = {key.modality for name in names for key in partition.owners.get(name, ())}
        if modality not in owners or "forward" in vars(module):
            continue
        found = rms_norm(source, type(module)) if len(names) == 1 else None
        if found is not None and isinstance(eps := getattr(module, found.eps, None), float):
            norms[path] = eps
        elif is_gated_unit(source, type(module)) and isinstance(module.act_fn, nn.SiLU | SiLUActivation):
            gated.append(path)
    return FusedModules(norms, tuple(gated))


class ChosenKernels:
    """The modules of one rank that compute with chosen kernels, from the making of this object to `remove`.

    Made after layers are compiled, whose code then holds these kernels, and before modules of other ranks are patched.

    Args:
        root: the LightningModule.
        partition: what belongs to which modality.
        modalities: the configuration.
    """

    def __init__(self, root: nn.Module, partition: Partition, modalities: Mapping[str, Modality]) -> None:
        self._undo: list[Callable[[], object]] = []
        for name, modality in modalities.items():
            if _FUSED.isdisjoint(modality.chosen_kernels):
                continue
            found = fused_modules(root, partition, name)
            if "rms_norm" in modality.chosen_kernels:
                # one function for all that add the same: compiled layers that are equal then share code
                norms = {eps: _norm(eps) for eps in found.norms.values()}
                for path, eps in found.norms.items():
                    self._put(root.get_submodule(path), norms[eps])
            if "liger" in modality.chosen_kernels:
                unit = _gated_unit(importlib.import_module(LIGER).liger_swiglu)
                for path in found.gated:
                    self._put(root.get_submodule(path), unit)

    def remove(self) -> None:
        """Leave the modules as they were."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _put(self, module: nn.Module, forward: Callable[..., Tensor]) -> None:
        # bound, so that a copy of the module computes with its own weights
        vars(module)["forward"] = MethodType(forward, module)
        self._undo.append(partial(vars(module).pop, "forward", None))


def _norm(eps: float) -> Callable[[Any, Tensor], Tensor]:
    def forward(module: Any, hidden_states: Tensor) -> Tensor:
        weight = module.weight
        if hidden_states.dtype != weight.dtype:
            return type(module).forward(module, hidden_states)
        return F.rms_norm(hidden_states, weight.shape, weight, eps)

    return forward


def _gated_unit(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def forward(module: Any, x: Tensor) -> Tensor:
        return module.down_proj(product(module.gate_proj(x), module.up_proj(x)))

    return forward
