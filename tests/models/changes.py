"""What a test does to a composed model before it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_mm5d import MultimodalModel


def frozen_ends(model: MultimodalModel) -> None:
    model.freeze(vision=True, vision_projector=False, language=True)


def lora(model: MultimodalModel) -> Any:
    from peft import LoraConfig, get_peft_model

    targets = r".*(q_proj|v_proj|lm_head)"
    adapted = get_peft_model(
        model, LoraConfig(r=2, lora_alpha=4, fan_in_fan_out=False, target_modules=targets, init_lora_weights=False)
    )
    for name, parameter in adapted.named_parameters():
        if ".projector." in name:
            parameter.requires_grad_(True)
    return adapted


def recomputed(model: MultimodalModel) -> None:
    model.activation_checkpointing_enable()


CHANGES: dict[str, Callable[[MultimodalModel], Any] | None] = {
    "none": None,
    "frozen ends": frozen_ends,
    "lora": lora,
    "recomputed": recomputed,
}
