"""Finds the layers that turn hidden states into a language model's logits.

It refuses `fused_linear_cross_entropy` on a model without one.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality


def heads(root: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers that models in `root` name as their output embeddings, by path."""
    found: dict[str, nn.Linear] = {}
    paths = {module: path for path, module in root.named_modules()}
    for module in paths:
        named = getattr(module, "get_output_embeddings", None)
        head = named() if callable(named) else None
        if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and head in paths:
            found[paths[head]] = head
    return found


def check_heads(root: nn.Module, modalities: Mapping[str, Modality]) -> None:
    """Refuse `fused_linear_cross_entropy` where no head is found.

    Raises:
        ConfigError: a modality has it, and no model in `root` names a linear layer as its output embeddings.
    """
    for name, modality in modalities.items():
        if modality.fused_linear_cross_entropy and not heads(root):
            raise ConfigError(
                f"modalities.{name}.fused_linear_cross_entropy",
                True,
                "It fuses a linear head with its loss, and no model here returns one from get_output_embeddings()",
                "Leave it unset, or let the model have that method as models of transformers do. It must return a "
                "torch.nn.Linear without an adapter, such as one of LoRA, on it",
            )
