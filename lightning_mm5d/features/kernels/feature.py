"""Kernels that a modality names, in place of what its modules compute: attention, RMS norms and gated units.

Attention is chosen by transformers' own `set_attn_implementation`, for the models of one modality, and stays chosen
after the run.

``rms_norm`` gives Llama's norms to `torch.nn.functional.rms_norm`, ``liger`` gives the products of gated units to
Liger's Triton kernel. A module is known by its code, and keeps its class, its name and its submodules, so that what
tensor parallelism, gathers and adapters do to these goes on.

A norm whose input has another dtype than its weight, as under autocast, computes what it always did: its result has the
dtype of both, which a kernel's has not.

RMS norms and gated units as Llama's are known: a class is known by the text of its ``forward`` alone, whatever its
name, so that a norm that differs in one operation (Gemma's, which adds 1 to its weight, say) is not taken for one.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.context_parallel.hooks.layer_attention import attention_name
from lightning_mm5d.features.kernels.fields import ATTENTIONS
from lightning_mm5d.partition import Partition
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.removable import Removable
from lightning_mm5d.source.trees import method_of, tree_of
from lightning_mm5d.stage import Runtime
from lightning_mm5d.trainer.feature import Feature


class Kernels(Feature):
    """The field `Modality.compute.kernels`: names of kernels."""

    def check(self, module: pl.LightningModule, plan: Plan, device: torch.device) -> None:
        """Refuse kernels that this module, machine or device cannot run, and choose the attention of its models.

        Raises:
            ConfigError: nothing in the modality computes what the kernel does; a package is missing; Liger on a CPU.
        """
        for name, modality in plan.modalities.items():
            field, asked = f"modalities.{name}.compute.kernels", modality.compute.kernels
            chosen = modality.chosen_kernels
            if _FUSED.isdisjoint(chosen):
                continue
            if "liger" in chosen:
                if importlib.util.find_spec("liger_kernel") is None:
                    rule = "The package liger-kernel is not installed"
                    raise ConfigError(field, asked, rule, "Install it (pip install liger-kernel), or leave out 'liger'")
                if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
                    rule = "Liger's kernels are written in Triton, which compiles for GPUs, and the trainer has CPUs"
                    raise ConfigError(field, asked, rule, "Leave out 'liger', or use an accelerator")
            fused = fused_modules(module, plan.partition, name)
            if "rms_norm" in chosen and not fused.norms:
                rule = f"No norm of {name} computes what Llama's RMSNorm computes, by its code"
                raise ConfigError(field, asked, rule, "Leave out 'rms_norm'")
            if "liger" in chosen and not fused.gated:
                rule = f"No module of {name} computes down_proj(silu(gate_proj(x)) * up_proj(x)), by its code"
                raise ConfigError(field, asked, rule, "Leave out 'liger'")
        choose_attention(module, plan)

    def cut(self, runtime: Runtime, plan: Plan, device: torch.device) -> Callable[[], None] | None:
        """Let modules compute with chosen kernels."""
        return ChosenKernels(runtime.root, plan.partition, plan.modalities).remove


def choose_attention(module: nn.Module, plan: Plan) -> None:
    """Tell the models of transformers in each modality which attention to use.

    Raises:
        ConfigError: there is no such model, it cannot change its attention, or it shares its configuration with
            another modality that uses another one.
    """
    for name, modality in plan.modalities.items():
        chosen = next((kernel for kernel in modality.chosen_kernels if kernel in ATTENTIONS), None)
        if chosen is None:
            continue
        field = f"modalities.{name}.compute.kernels"
        models = _models(module, plan.partition, name)
        if not models:
            rule = f"The attention of models of transformers is chosen by its name, and {name} has no such model"
            raise ConfigError(field, modality.compute.kernels, rule, f"Leave out {chosen!r}")
        for model in models:
            _check_shared(module, plan, name, model)
            try:
                model.set_attn_implementation(chosen)
            except (ImportError, ValueError) as error:
                raise ConfigError(field, modality.compute.kernels, str(error), "Use 'sdpa', or leave it out") from None
            if attention_name(model.config) != chosen:
                rule = f"{type(model).__name__} uses {attention_name(model.config)!r} and cannot change it"
                raise ConfigError(field, modality.compute.kernels, rule, f"Leave out {chosen!r}")


def _models(module: nn.Module, partition: Partition, modality: str) -> list[PreTrainedModel]:
    """The outermost models all of whose parameters a modality uses."""
    models = dict[str, PreTrainedModel]()
    for path, part in module.named_modules():
        if not isinstance(part, PreTrainedModel) or any(path.startswith(f"{outer}.") for outer in models):
            continue
        names = [f"{path}.{name}" if path else name for name, _ in part.named_parameters()]
        if names and all(modality in partition.users(name) for name in names):
            models[path] = part
    return list(models.values())


def _check_shared(module: nn.Module, plan: Plan, name: str, model: PreTrainedModel) -> None:
    chosen = plan.modalities[name].chosen_kernels
    inside = {id(part.config) for part in model.modules() if isinstance(part, PreTrainedModel)}
    for other, modality in plan.modalities.items():
        if other == name or not {*modality.chosen_kernels}.isdisjoint({*chosen}.intersection(ATTENTIONS)):
            continue
        if any(id(part.config) in inside for part in _models(module, plan.partition, other)):
            rule = f"{type(model).__name__} has one configuration with models of {other}, which name another attention"
            fix = f"Name the same attention for {name} and {other}"
            raise ConfigError(f"modalities.{name}.compute.kernels", plan.modalities[name].compute.kernels, rule, fix)


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
    norms, gated = dict[str, float](), list[str]()
    for path, module in root.named_modules():
        names = [f"{path}.{name}" for name, _ in module.named_parameters()]
        if modality not in partition.users(*names) or "forward" in vars(module):
            continue
        epsilon = epsilon_of_rms_norm(type(module)) if len(names) == 1 else None
        if epsilon is not None and isinstance(eps := getattr(module, epsilon, None), float):
            norms[path] = eps
        elif is_gated_unit(type(module)) and isinstance(module.act_fn, nn.SiLU | SiLUActivation):
            gated.append(path)
    return FusedModules(norms, tuple(gated))


class ChosenKernels(Removable):
    """The modules of one rank that compute with chosen kernels, from the making of this object to `remove`.

    Made after layers are compiled, whose code then holds these kernels.

    Args:
        root: the LightningModule.
        partition: what belongs to which modality.
        modalities: the configuration.
    """

    def __init__(self, root: nn.Module, partition: Partition, modalities: Mapping[str, Modality]) -> None:
        for name, modality in modalities.items():
            if _FUSED.isdisjoint(modality.chosen_kernels):
                continue
            fused = fused_modules(root, partition, name)
            if "rms_norm" in modality.chosen_kernels:
                # one function for all that add the same: compiled layers that are equal then share code
                norms = {eps: _norm(eps) for eps in fused.norms.values()}
                for path, eps in fused.norms.items():
                    self.put_forward(root.get_submodule(path), norms[eps])
            if "liger" in modality.chosen_kernels:
                unit = _gated_unit(importlib.import_module(LIGER).liger_swiglu)
                for path in fused.gated:
                    self.put_forward(root.get_submodule(path), unit)


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


_RMS_NORM = r"""(?P<dtype>\w+) = (?P<x>\w+)\.dtype
(?P=x) = (?P=x)\.to\(torch\.float32\)
(?P<variance>\w+) = (?P=x)\.pow\(2\)\.mean\(-1, keepdim=True\)
(?P=x) = (?P=x) \* torch\.rsqrt\((?P=variance) \+ self\.(?P<eps>\w+)\)
return self\.weight \* (?P=x)\.to\((?P=dtype)\)"""
_GATED = r"self\.down_proj\(self\.act_fn\(self\.gate_proj\((?P<x>\w+)\)\) \* self\.up_proj\((?P=x)\)\)"
_GATED_UNIT = rf"return {_GATED}|(?P<y>\w+) = {_GATED.replace('P<x>', 'P<z>').replace('P=x', 'P=z')}\nreturn (?P=y)"


def epsilon_of_rms_norm(cls: type[nn.Module]) -> str | None:
    """Return the attribute that a class adds under the root of Llama's RMS norm, None where it computes anything else.

    The norm is ``weight * (x / sqrt(mean(x * x) + eps)).to(x.dtype)``, whose inner part is computed in float32.
    """
    match = _matched(cls, _RMS_NORM)
    return None if match is None else match["eps"]


def is_gated_unit(cls: type[nn.Module]) -> bool:
    """Whether a class computes ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``."""
    return _matched(cls, _GATED_UNIT) is not None


def _matched(cls: type[nn.Module], pattern: str) -> re.Match[str] | None:
    function = method_of(cls, "forward")
    tree = None if function is None else tree_of(function)
    if tree is None or len(tree.args.args) != 2 or tree.args.vararg or tree.args.kwarg or tree.args.kwonlyargs:
        return None
    body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    match = re.fullmatch(pattern, "\n".join(map(ast.unparse, body)))
    return match if match and tree.args.args[1].arg in match.groupdict().values() else None


FEATURE = Kernels
