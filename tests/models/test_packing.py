"""Documents in one row never see each other, in each family that may be packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.models.packing import NEED_A_MASK, READ_POSITIONS, check_packs, first_fit, packed_options

LENGTHS = (9, 7, 1, 3)
ENDS: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WINDOW = {"sliding_window": 4}
HEADS = {"head_dim": 8}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("mistral", "phi3", "olmo3", "cohere2", "starcoder2"), WINDOW),
    **dict.fromkeys(("gemma", "glm", "glm4", "qwen3", "helium", "seed_oss", "hunyuan_v1_dense"), HEADS),
    "gemma2": {"head_dim": 8, **WINDOW},
    "gemma3_text": {"head_dim": 8, **WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, **WINDOW},
    "qwen2_moe": EXPERTS,
    "qwen3_moe": {"head_dim": 8, **EXPERTS},
    "mixtral": {"num_local_experts": 4},
    "granitemoe": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}
OTHER_NAMES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
    "gpt_neo": {"hidden_size": 32, "num_heads": 4, "num_layers": 2, "attention_types": [[["global", "local"], 1]]}
    | {"window_size": 4, "max_position_embeddings": 64},
    "opt": {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"max_position_embeddings": 64, "word_embed_proj_dim": 32},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False},
}
USUAL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
USUAL |= {"num_key_value_heads": 2, "max_position_embeddings": 64}


def config(family: str) -> Any:
    own = OTHER_NAMES.get(family) or {**USUAL, **OWN.get(family, {})}
    if family in ("gpt_neox", "persimmon"):
        own.pop("num_key_value_heads")
    return hf.AutoConfig.for_model(family, **ENDS, **own)


def logits(model: Any, documents: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of each document in one row, [S, V]."""
    lengths = [len(document) for document in documents]
    embeds = model.get_input_embeddings()(torch.cat(documents)[None])
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    options = packed_options(model.config, embeds, {"position_ids": positions, "attention_mask": None})
    with torch.no_grad():
        return list(model(inputs_embeds=embeds, **options).logits[0].split(lengths))


@pytest.mark.parametrize("family", sorted(READ_POSITIONS | NEED_A_MASK))
def test_a_document_gives_the_same_logits_alone_and_beside_any_others(family: str) -> None:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config(family)).eval()
    check_packs(model.config)
    documents = [torch.randint(3, 64, (length,)) for length in LENGTHS]
    others = [torch.randint(3, 64, (length,)) for length in LENGTHS]
    packed = logits(model, documents)
    with torch.no_grad():
        alone = [model(document[None]).logits[0] for document in documents]
    for index, expected in enumerate(alone):
        changed = logits(model, [*others[:index], documents[index], *others[index + 1 :]])[index]
        torch.testing.assert_close(packed[index], expected, atol=2e-5, rtol=0)
        torch.testing.assert_close(changed, expected, atol=2e-5, rtol=0)


def test_families_in_which_documents_would_see_each_other_are_refused() -> None:
    alibi = hf.FalconConfig(alibi=True)
    for other in (hf.BloomConfig(), hf.MambaConfig(), hf.GptOssConfig(), alibi):
        with pytest.raises(ConfigError, match="would see each other"):
            check_packs(other)


def test_batches_with_a_mask_or_a_cache_are_left_as_they_are() -> None:
    embeds, positions = torch.zeros(1, 4, 8), torch.arange(4)[None]
    for given in ({}, {"attention_mask": positions}, {"attention_mask": positions, "position_ids": positions}):
        assert packed_options(config("opt"), embeds, given) is given


def test_each_document_goes_into_the_first_row_with_room() -> None:
    assert first_fit([5, 4, 3, 2, 6], 8) == [[0, 2], [1, 3], [4]]
    assert first_fit([], 8) == []
    assert first_fit([8, 8], 8) == [[0], [1]]
