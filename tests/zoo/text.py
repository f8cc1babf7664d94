"""Families with text in the decoder and no placeholders: decoders, a masked encoder, encoder-decoders.

Samples are padded on the right by different amounts, so that masks depend on the microbatch. All dropout is
zero, since a parity test cannot follow random masks through another layout.
"""

from typing import Any

import lightning as L
import torch

from .case import FIRST_TEXT_ID, LABELS, VOCABULARY, Batch, Case, TinyModule, pad_right, text_batch

PAD, BOS, EOS = 0, 6, 7
IDS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
DECODER_START: dict[str, Any] = {"decoder_start_token_id": PAD}
LLAMA: dict[str, Any] = IDS | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SOURCE_FRAMES, MEL_BINS = 8, 8


def build_llama(*, tied: bool) -> L.LightningModule:
    from transformers import LlamaConfig, LlamaForCausalLM

    return TinyModule(LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=tied)), use_cache=False)


def build_gpt2() -> L.LightningModule:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        **IDS, n_embd=32, n_layer=4, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return TinyModule(GPT2LMHeadModel(config), use_cache=False)


def build_bert() -> L.LightningModule:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return TinyModule(BertForMaskedLM(config))


def build_t5() -> L.LightningModule:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=32,
        num_layers=3,
        num_decoder_layers=4,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=0.0,
        **DECODER_START,
    )
    return TinyModule(T5ForConditionalGeneration(config), use_cache=False)


def build_whisper() -> L.LightningModule:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        **IDS,
        num_mel_bins=MEL_BINS,
        d_model=32,
        encoder_layers=3,
        encoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_layers=4,
        decoder_attention_heads=4,
        decoder_ffn_dim=32,
        decoder_start_token_id=BOS,
        max_source_positions=SOURCE_FRAMES,
        max_target_positions=32,
    )
    return TinyModule(WhisperForConditionalGeneration(config), use_cache=False)


def padded_batch(counts: list[int]) -> Batch:
    return pad_right(text_batch([0] * len(counts), length=14), PAD)


def summary_batch(counts: list[int]) -> Batch:
    """The source is padded, the target is all labels."""
    source = padded_batch(counts)
    source["labels"] = torch.randint(FIRST_TEXT_ID, VOCABULARY, (len(counts), LABELS))
    return source


def speech_batch(counts: list[int]) -> Batch:
    return {
        "input_features": torch.randn(len(counts), MEL_BINS, 2 * SOURCE_FRAMES),
        "labels": torch.randint(FIRST_TEXT_ID, VOCABULARY, (len(counts), 10)),
    }


def lower_half(embeddings: tuple[str, ...], layers: str) -> dict[str, tuple[str, ...]]:
    return {"none": (), "lower": (*embeddings, f"{layers}.0", f"{layers}.1")}


CASES = [
    Case(
        name="llama",
        make_module=lambda: build_llama(tied=False),
        make_batch=padded_batch,
        modalities=("language",),
        layers={"language": ("model.model.layers",)},
        frozen=lower_half(("model.model.embed_tokens",), "model.model.layers"),
    ),
    Case(
        name="llama_tied",
        make_module=lambda: build_llama(tied=True),
        make_batch=padded_batch,
        modalities=("language",),
        layers={"language": ("model.model.layers",)},
        frozen=lower_half(("model.model.embed_tokens",), "model.model.layers"),
    ),
    Case(
        name="gpt2",
        make_module=build_gpt2,
        make_batch=padded_batch,
        modalities=("language",),
        layers={"language": ("model.transformer.h",)},
        frozen=lower_half(("model.transformer.wte", "model.transformer.wpe"), "model.transformer.h"),
    ),
    Case(
        name="bert",
        make_module=build_bert,
        make_batch=padded_batch,
        modalities=("language",),
        layers={"language": ("model.bert.encoder.layer",)},
        frozen=lower_half(("model.bert.embeddings",), "model.bert.encoder.layer"),
    ),
    Case(
        name="t5",
        make_module=build_t5,
        make_batch=summary_batch,
        modalities=("language",),
        layers={"language": ("model.encoder.block", "model.decoder.block")},
        frozen={
            "none": (),
            "encoder": ("model.shared", "model.encoder"),
            "language": ("model.shared", "model.decoder"),
        },
    ),
    Case(
        name="whisper",
        make_module=build_whisper,
        make_batch=speech_batch,
        modalities=("audio", "language"),
        layers={"audio": ("model.model.encoder.layers",), "language": ("model.model.decoder.layers",)},
        boundaries={"audio": "model.model.encoder"},
        frozen={"none": (), "encoder": ("model.model.encoder",), "language": ("model.model.decoder",)},
        tokens_key="labels",
    ),
]
