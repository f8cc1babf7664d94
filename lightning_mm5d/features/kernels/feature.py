"""Checks `Modality.kernels` against a module, chooses attention of models and gives other modules kernels.

Attention is chosen by transformers' own `set_attn_implementation`, for the models of one modality, and stays chosen
after the run.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import lightning.pytorch as pl
import torch
from torch import nn
from transformers import PreTrainedModel

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.context_parallel.hooks.private_names import attention_name
from lightning_mm5d.features.kernels.chosen_kernels import ChosenKernels, fused_modules
from lightning_mm5d.features.kernels.fields import ATTENTIONS
from lightning_mm5d.partition import Partition
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.stage import Runtime
from lightning_mm5d.trainer.feature import Feature


class Kernels(Feature):
    """The field `Modality.kernels`: names of kernels."""

    def check(self, module: pl.LightningModule, plan: Plan, device: torch.device) -> None:
        """Refuse kernels that this module, machine or device cannot run, and choose the attention of its models.

        Raises:
            ConfigError: nothing in the modality computes what the kernel does; a package is missing; Liger on a CPU.
        """
        for name, modality in plan.modalities.items():
            field, said, chosen = f"modalities.{name}.kernels", modality.kernels, modality.chosen_kernels
            if {"liger", "rms_norm"}.isdisjoint(chosen):
                continue
            if "liger" in chosen:
                if importlib.util.find_spec("liger_kernel") is None:
                    rule = "The package liger-kernel is not installed"
                    raise ConfigError(field, said, rule, "Install it (pip install liger-kernel), or leave out 'liger'")
                if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
                    rule = "Liger's kernels are written in Triton, which compiles for GPUs, and the trainer has CPUs"
                    raise ConfigError(field, said, rule, "Leave out 'liger', or use an accelerator")
            found = fused_modules(module, plan.partition, name)
            if "rms_norm" in chosen and not found.norms:
                rule = f"No norm of {name} computes what Llama's RMSNorm computes, by its code"
                raise ConfigError(field, said, rule, "Leave out 'rms_norm'")
            if "liger" in chosen and not found.gated:
                rule = f"No module of {name} computes down_proj(silu(gate_proj(x)) * up_proj(x)), by its code"
                raise ConfigError(field, said, rule, "Leave out 'liger'")
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
        chosen = next((one for one in modality.chosen_kernels if one in ATTENTIONS), None)
        if chosen is None:
            continue
        field = f"modalities.{name}.kernels"
        models = _models(module, plan.partition, name)
        if not models:
            rule = f"The attention of models of transformers is chosen by its name, and {name} has no such model"
            raise ConfigError(field, modality.kernels, rule, f"Leave out {chosen!r}")
        for model in models:
            _check_shared(module, plan, name, model)
            try:
                model.set_attn_implementation(chosen)
            except (ImportError, ValueError) as error:
                raise ConfigError(field, modality.kernels, str(error), "Use 'sdpa', or leave it out") from None
            if attention_name(model.config) != chosen:
                rule = f"{type(model).__name__} uses {attention_name(model.config)!r} and cannot change it"
                raise ConfigError(field, modality.kernels, rule, f"Leave out {chosen!r}")


def _models(module: nn.Module, partition: Partition, modality: str) -> list[PreTrainedModel]:
    """The outermost models all of whose parameters a modality uses."""
    found = dict[str, PreTrainedModel]()
    for path, part in module.named_modules():
        if not isinstance(part, PreTrainedModel) or any(path.startswith(f"{one}.") for one in found):
            continue
        names = [f"{path}.{name}" if path else name for name, _ in part.named_parameters()]
        if names and all(modality in {key.modality for key in partition.owners.get(name, ())} for name in names):
            found[path] = part
    return list(found.values())


def _check_shared(module: nn.Module, plan: Plan, name: str, model: PreTrainedModel) -> None:
    chosen = plan.modalities[name].chosen_kernels
    inside = {id(part.config) for part in model.modules() if isinstance(part, PreTrainedModel)}
    for other, modality in plan.modalities.items():
        if other == name or not {*modality.chosen_kernels}.isdisjoint({*chosen}.intersection(ATTENTIONS)):
            continue
        if any(id(part.config) in inside for part in _models(module, plan.partition, other)):
            rule = f"{type(model).__name__} has one configuration with models of {other}, which name another attention"
            fix = f"Name the same attention for {name} and {other}"
            raise ConfigError(f"modalities.{name}.kernels", plan.modalities[name].kernels, rule, fix)


FEATURE = Kernels
