"""Every family of the zoo, and of experts, in three dtypes: deferred weights are those that transformers loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import PreTrainedModel

from zoo import CASES

from .hugging_face import EXPERTS, SMALL, assert_same, rewritten

pytestmark = pytest.mark.exhaustive

EXPERT_MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "mixtral": lambda: (
        transformers.MixtralForCausalLM,
        transformers.MixtralConfig(**SMALL, num_local_experts=4),
    ),
    "qwen2_moe": lambda: (
        transformers.Qwen2MoeForCausalLM,
        transformers.Qwen2MoeConfig(**EXPERTS, num_experts=4, shared_expert_intermediate_size=16),
    ),
    "olmoe": lambda: (transformers.OlmoeForCausalLM, transformers.OlmoeConfig(**SMALL, num_experts=4)),
    "gpt_oss": lambda: (
        transformers.GptOssForCausalLM,
        transformers.GptOssConfig(**SMALL, num_local_experts=4, head_dim=8),
    ),
    "deepseek_v3": lambda: (
        transformers.DeepseekV3ForCausalLM,
        transformers.DeepseekV3Config(
            **EXPERTS | {"num_key_value_heads": 4}, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2,
            kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, v_head_dim=8, qk_nope_head_dim=8,
            first_k_dense_replace=1,
        ),
    ),
    "jamba": lambda: (
        transformers.JambaForCausalLM,
        transformers.JambaConfig(
            **SMALL, num_experts=4, mamba_d_state=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
            expert_layer_offset=1, use_mamba_kernels=False,
        ),
    ),
    "vit": lambda: (
        transformers.ViTForImageClassification,
        transformers.ViTConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=8, patch_size=4
        ),
    ),
}  # fmt: skip
# Names of checkpoints from before the families were rebuilt, by the names of today.
OLD_NAMES: dict[str, dict[str, str]] = {
    "llava": {
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    },
    "qwen2_vl": {"model.visual.": "visual.", "model.language_model.": "model."},
}
DTYPES = (None, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("name", CASES)
def test_families_of_the_zoo(name: str, tmp_path: Path) -> None:
    model = getattr(CASES[name].build(), "model", None)
    if not isinstance(model, PreTrainedModel):
        pytest.skip("not of transformers")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    for dtype in DTYPES:
        assert assert_same(type(model), tmp_path, dtype=dtype)


@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_families_whose_weights_are_converted(name: str, tmp_path: Path) -> None:
    cls, config = EXPERT_MODELS[name]()
    cls(config).save_pretrained(tmp_path)
    for dtype in DTYPES:
        assert assert_same(cls, tmp_path, dtype=dtype)


@pytest.mark.parametrize("name", OLD_NAMES)
def test_names_of_old_checkpoints(name: str, tmp_path: Path) -> None:
    model = getattr(CASES[name].build(), "model", None)
    model.save_pretrained(tmp_path, save_original_format=False)

    def rename(key: str) -> str:
        for new, old in OLD_NAMES[name].items():
            if key.startswith(new):
                return old + key.removeprefix(new)
        return key

    rewritten(tmp_path, lambda tensors: {rename(key): tensor for key, tensor in tensors.items()})
    assert not set(load_file(tmp_path / "model.safetensors")) & {
        key for key, _ in model.named_parameters() if "." in key and rename(key) != key
    }
    assert len(assert_same(type(model), tmp_path)) >= len(list(model.parameters()))
