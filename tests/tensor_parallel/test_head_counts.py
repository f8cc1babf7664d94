"""Attentions of transformers that count or norm key and value heads: two ranks compute what one computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    BltLocalDecoderConfig,
    ChameleonConfig,
    Idefics2PerceiverConfig,
    MllamaTextConfig,
    StableLmConfig,
)
from transformers.models.blt.modeling_blt import BltSelfAttention
from transformers.models.chameleon.modeling_chameleon import ChameleonAttention
from transformers.models.idefics2.modeling_idefics2 import Idefics2PerceiverAttention
from transformers.models.mllama.modeling_mllama import MllamaTextSelfAttention
from transformers.models.stablelm.modeling_stablelm import StableLmAttention

from .two_ranks import differences

WIDTH, HEADS, HEAD, TOKENS = 32, 4, 8, 6
SIZES = {"hidden_size": WIDTH, "num_attention_heads": HEADS}


def made(name: str, key_value: int) -> nn.Module:
    sizes = SIZES | {"num_key_value_heads": key_value}
    if name == "blt":
        return BltSelfAttention(BltLocalDecoderConfig(**sizes), 0)
    if name == "chameleon":
        return ChameleonAttention(ChameleonConfig(**sizes), 0)
    if name == "idefics2":
        sizes = {"resampler_n_heads": HEADS, "resampler_head_dim": HEAD, "num_key_value_heads": key_value}
        return Idefics2PerceiverAttention(Idefics2PerceiverConfig(hidden_size=WIDTH, **sizes), 0)
    if name == "mllama":
        return MllamaTextSelfAttention(MllamaTextConfig(**sizes), 0)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    norms = name == "stablelm with norms"
    return StableLmAttention(StableLmConfig(**sizes, rope_parameters=rope, qk_layernorm=norms), 0)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("key_value", [HEADS, 2])
@pytest.mark.parametrize("name", ["blt", "chameleon", "idefics2", "mllama", "stablelm", "stablelm with norms"])
def test_key_and_value_heads_are_this_ranks(name: str, key_value: int) -> None:
    torch.manual_seed(0)
    module = made(name, key_value).train()
    module.config._attn_implementation = "eager"  # type: ignore[union-attr]
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape) * 0.3
    hidden, angles = torch.randn(2, TOKENS, WIDTH), torch.randn(2, TOKENS, HEAD)
    inputs = {"hidden_states": hidden, "attention_mask": None, "position_embeddings": (angles.cos(), angles.sin())}
    if name == "idefics2":
        inputs = {"latents": hidden, "context": torch.randn(2, TOKENS, WIDTH), "attention_mask": None}
    found = differences(module, inputs, 5e-6)
    whole = name in ("chameleon", "stablelm with norms")  # of norms for each head
    assert found is None if whole else found == []
