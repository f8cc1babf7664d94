"""Every architecture of transformers that a shrunken default configuration can build comes out as ever."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MODEL_MAPPING, PretrainedConfig

from lightning_mm5d.features.deferred_init.construction import initialize_meta
from lightning_mm5d.features.deferred_init.deferred_weights import tensors_of

from .construction import assert_as_ever, assert_equal_modules, materialized, seed_all

SMALL = {
    "vocab_size": 99, "hidden_size": 32, "d_model": 32, "n_embd": 32, "embed_dim": 32, "dim": 32, "ffn_dim": 48,
    "intermediate_size": 48, "d_ff": 48, "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2,
    "encoder_layers": 2, "decoder_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "n_head": 4,
    "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 64, "image_size": 32, "patch_size": 8, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 16, "head_dim": 8, "projection_dim": 16,
    "d_kv": 8, "depth": 2, "word_embed_proj_dim": 32, "embedding_size": 16, "hidden_dim": 32, "out_hidden_size": 32,
}  # fmt: skip
LIMIT = 40_000_000  # parameters


def shrunken(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration with small numbers where it has numbers of these names, its sub-configurations too."""
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            shrunken(value)
        elif name in SMALL and isinstance(value, int) and value > SMALL[name]:
            setattr(config, name, SMALL[name])
        elif name in ("layer_types", "mlp_layer_types") and isinstance(value, list):
            setattr(config, name, value[:2])
    return config


def model_class(config: type[PretrainedConfig]) -> type[nn.Module]:
    found: Any = MODEL_MAPPING[config]
    return found[0] if isinstance(found, tuple) else found


def built(config: type[PretrainedConfig]) -> Any:
    """A function that builds the model, none where the shrunken configuration does not fit."""
    try:
        kind, small = model_class(config), shrunken(config())

        def build() -> nn.Module:
            return kind(copy.deepcopy(small))

        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in build().parameters())
        return build if size <= LIMIT and build() is not None else None
    except Exception:  # not a model that this test can build as ever
        return None


@pytest.mark.exhaustive
@pytest.mark.parametrize("config", sorted(MODEL_MAPPING.keys(), key=lambda c: c.__name__), ids=lambda c: c.__name__)
def test_architectures_come_out_as_ever(config: type[PretrainedConfig]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build = built(config)
        if build is None:
            pytest.skip("the shrunken configuration does not fit")
        unwritten = assert_as_ever(build).unwritten
        seed_all()
        expected = build()
        with torch.device("meta"):
            module = build()
        seed_all()
        # What torch.Tensor(n) and torch.normal make is real under torch.device("meta"), and drawn there.
        real = {name for names, _, tensor in tensors_of(module) if not tensor.is_meta for name in names}
        materialized(module, initialize_meta(module))
        assert_equal_modules(module, expected, besides=real | {*unwritten})
