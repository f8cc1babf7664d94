"""Layers that ``torch.compile`` compiles, each once, with ``compile`` on a modality.

What is compiled is a layer's own forward. Its hooks, the recomputation, the gathers of `zero_stage` 3, the swap of
hidden states at cuts and the end of a stage stay around it. Inside of it these stay outside of the compiled code, which
ends before them and goes on after them: linear layers, embeddings and experts of which tensor parallel ranks hold
shards; linear layers whose weight gradients a split backward puts off; the attention over sequences that ranks share.

Layers of one class share a compiled function, so that layers of equal structure share code: parameters are its inputs.
A function of its own for each modality lets neither see the other's recompilations. Random numbers are those of the
same layer without compilation.

A call runs uncompiled where it has a cache of keys or a tensor subclass among its arguments, in the first microbatch of
each structure over stages (`taint`), and in evaluations that all ranks run in lock step.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError, did_you_mean
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.context_parallel.hooks.context_mask import ContextMask
from lightning_mm5d.partition.compiled import is_compiled
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.removable import Removable
from lightning_mm5d.stage.payload import tensors_in
from lightning_mm5d.trainer.feature import Feature

RECOMPILATIONS = 64
"""for a class of layers: training and evaluation, frozen and trained layers, shapes"""
_OUTSIDE = "_mm5d_outside"
_TAKES = (Tensor, nn.Parameter, ContextMask)  # a mask goes through to the attention


class Compile(Feature):
    """The field `compile` of modalities: a switch, or the name of a backend."""

    def check(self, module: pl.LightningModule, plan: Plan, device: torch.device) -> None:
        """Refuse a backend that torch does not know, and ``inductor`` on a machine without a compiler."""
        for name, modality in plan.modalities.items():
            if not modality.compute.compile:
                continue
            field, known = f"modalities.{name}.compute.compile", torch.compiler.list_backends(exclude_tags=None)
            backend = modality.compute.compile if isinstance(modality.compute.compile, str) else "inductor"
            if backend not in known:
                raise ConfigError(field, backend, "torch knows no such backend", did_you_mean(backend, known))
            compilers = [os.environ.get("CXX", "g++"), "clang++", "c++"]
            if backend == "inductor" and not torch.accelerator.is_available() and not any(map(shutil.which, compilers)):
                rule = "On CPU inductor needs a C++ compiler, and this machine has none"
                raise ConfigError(field, modality.compute.compile, rule, "Install g++, or use 'aot_eager' or false")

    def layers(
        self, module: pl.LightningModule, layers: Mapping[str, list[str]], plan: Plan, in_lock_step: Callable[[], bool]
    ) -> Callable[[], None] | None:
        """Compile the forwards of this rank's layers."""
        if not any(modality.compute.compile for modality in plan.modalities.values()):
            return None
        return _CompiledLayers(module, layers, plan.modalities, plan.partition.kept_operations, in_lock_step).remove


class _CompiledLayers(Removable):
    """The compiled layers of one rank, from the making of this object to `remove`.

    Made after layers are sharded over tensor parallel ranks, and before anything else is put in front of them.

    Args:
        root: the LightningModule.
        layers: the paths of this rank's layers, by modality.
        modalities: the configuration.
        again: modalities with layers that run again in their backward.
        is_eager: whether compiled layers run uncompiled at the moment.
    """

    def __init__(
        self,
        root: nn.Module,
        layers: Mapping[str, list[str]],
        modalities: Mapping[str, Modality],
        again: Collection[str],
        is_eager: Callable[[], bool],
    ) -> None:
        self._is_eager = is_eager
        for name, paths in layers.items():
            modality, functions = modalities[name], dict[Any, Callable[..., Any]]()
            for path in dict.fromkeys(paths):
                layer = root.get_submodule(path)
                if modality.compute.compile and not any(map(is_compiled, layer.modules())):
                    self._keep_outside(layer)
                    self._patch(layer, functions, modality, recomputes=name in again)

    def _keep_outside(self, layer: nn.Module) -> None:
        """Let compiled code end before the forwards that tensor parallelism has replaced."""
        for module in layer.modules():
            replacement = vars(module).get("forward")
            if replacement is not None:
                self.put_attribute(module, _OUTSIDE, replacement)
                self.put_forward(module, _outside)

    def _patch(
        self, layer: nn.Module, functions: dict[Any, Callable[..., Any]], modality: Modality, *, recomputes: bool
    ) -> None:
        replacement, cls = vars(layer).get("forward"), type(layer)
        if replacement is not None:  # the layer itself is what tensor parallelism has replaced
            return
        if cls not in functions:
            functions[cls] = _compiled(cls.forward, modality, recomputes=recomputes)
        compiled = functions[cls]

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._is_eager() or not _is_plain((*args, *kwargs.values())):
                return cls.forward(module, *args, **kwargs)
            return compiled(module, *args, **kwargs)

        self.put_forward(layer, forward)


def _compiled(function: Callable[..., Any], modality: Modality, *, recomputes: bool) -> Callable[..., Any]:
    backend = modality.compute.compile if isinstance(modality.compute.compile, str) else "inductor"
    return torch.compile(  # type: ignore[call-overload]
        function,
        backend=backend,
        # code for other sizes than the forward's, compiled in between, must not run when a layer runs again
        dynamic=True if recomputes else None,
        options={"fallback_random": True} if backend == "inductor" else None,
        recompile_limit=RECOMPILATIONS,
        isolate_recompiles=True,
    )


# one function for all modules, because compiled code is bound to the functions that it calls
@torch.compiler.disable
def _outside(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return vars(module)[_OUTSIDE](*args, **kwargs)


def _is_plain(values: tuple[Any, ...]) -> bool:
    """Whether a layer's arguments are what compiled code takes: plain tensors, and no cache of keys."""
    if any(hasattr(value, "get_seq_length") for value in values):
        return False
    return all(type(tensor) in _TAKES for _, tensor in tensors_in(values))


FEATURE = Compile
