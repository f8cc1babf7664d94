"""Tiny models of the families that tensor parallelism knows, with a batch and a loss for each, by name in `FAMILIES`.

Sizes are chosen to be awkward: 67 tokens, which no degree divides, widths that three ranks do not divide, fewer key and
value heads than query heads. All dropout is zero, and parameters are perturbed after the model's own initialisation, so
that tables and scales which start at zero or one have gradients that differ. Families of the zoo are taken from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from zoo import CASES

from .chatglm import ChatGLM
from .family_inputs import (
    VOCABULARY,
    Batch,
    image_and_text,
    labelled_pixels,
    pair,
    pixels,
    points,
    sized_image_and_text,
    source_and_target,
    speech_and_text,
    tokens,
    typed_image_and_text,
    unpadded,
    waves,
)
from .family_sizes import (
    BART_SIZES,
    DEEPSEEK,
    EXPERTS,
    GROUPED,
    IDS,
    NO_DROPOUT,
    QWEN_EXPERTS,
    SPEECH,
    T5_SIZES,
    TEXT,
    VISION,
    WIDE,
)

FLOAT32 = 5e-6  # tolerance of models that drop to float32 on the way: in norms, softmaxes or the loss


class Root(nn.Module):
    """What a LightningModule is to tensor parallelism: it holds the model, and gives the loss of a batch."""

    def __init__(self, model: nn.Module, fixed: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.model, self.fixed = model, fixed or {}

    def forward(self, batch: Batch) -> Tensor:
        result = self.model(**batch, **self.fixed)
        loss = getattr(result, "loss", None)
        if loss is not None:
            return loss
        tensors = [value for value in result.values() if isinstance(value, Tensor) and value.requires_grad]
        weighted = [value * torch.linspace(-1, 1, value.shape[-1]) for value in tensors]
        return torch.stack([value.square().mean() for value in weighted]).sum()


@dataclass(frozen=True)
class Family:
    """How to build one family, and to feed it.

    Attributes:
        make: gives the model, in the default dtype.
        batch: gives its arguments.
        tolerance: largest difference to the unsharded model, relative to the largest value; models that drop to float32
            have a larger one.
        fixed: arguments of every call.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    tolerance: float = 1e-9
    fixed: dict[str, Any] | None = None

    def build(self, seed: int = 0) -> Root:
        """The model in train mode on the CPU; equal seeds give equal parameters."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            root = Root(self.make(), self.fixed).train()
            for parameter in root.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return root

    def feed(self, seed: int = 0) -> Batch:
        """A batch that depends on the seed alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.batch()


def made(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """A model of transformers by the names of its class and its configuration's."""

    def make() -> nn.Module:
        built = getattr(hf, config)(**options)
        built._experts_implementation = "eager"  # the others know no float64 on the CPU
        return getattr(hf, model)(built).to(torch.get_default_dtype())

    return make


def of_zoo(name: str, tolerance: float = FLOAT32) -> Family:
    case = CASES[name]

    def make() -> nn.Module:
        return case.make_module().model  # type: ignore[union-attr,return-value]

    fixed = {"return_loss": True} if name == "clip" else {} if name == "bert" else {"use_cache": False}
    return Family(make, lambda: case.make_batch([1, 1]), tolerance, fixed)


def causal(model: str, config: str, sizes: dict[str, Any] = GROUPED, **options: Any) -> Family:
    return Family(made(model, config, **(sizes | options)), tokens, FLOAT32, {"use_cache": False})


def masked(model: str, config: str, **options: Any) -> Family:
    return Family(made(model, config, **(TEXT | NO_DROPOUT | options)), tokens)


def vision(model: str, config: str, **options: Any) -> Family:
    return Family(made(model, config, **(VISION | {"num_labels": 3} | options)), labelled_pixels)


def swin(model: str, config: str) -> Family:
    sizes: dict[str, Any] = {
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 1],
        "num_heads": [2, 4],
        "window_size": 4,
        "mlp_ratio": 1.5,
        "drop_path_rate": 0.0,
        "num_labels": 3,
    }
    return Family(made(model, config, **sizes, **NO_DROPOUT), lambda: labelled_pixels(16))


def sam() -> nn.Module:
    config = hf.SamConfig(
        vision_config={
            "hidden_size": 32,
            "output_channels": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
            "window_size": 2,
            "global_attn_indexes": [1],
            "mlp_dim": 50,
            "num_pos_feats": 8,
        },
        prompt_encoder_config={"hidden_size": 16, "image_size": 16, "patch_size": 4, "mask_input_channels": 4},
        mask_decoder_config={
            "hidden_size": 16,
            "mlp_dim": 20,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "iou_head_hidden_dim": 8,
        },
    )
    return hf.SamModel(config).to(torch.get_default_dtype())


def falcon(**options: Any) -> Family:
    sizes = IDS | WIDE | {"hidden_dropout": 0.0, "attention_dropout": 0.0, "ffn_hidden_size": 50} | options
    return Family(made("FalconForCausalLM", "FalconConfig", **sizes), tokens, FLOAT32, {"use_cache": False})


def siglip() -> nn.Module:
    config = hf.SiglipConfig(text_config=TEXT | {"projection_size": 32}, vision_config=VISION)
    return hf.SiglipModel(config).to(torch.get_default_dtype())


def paligemma() -> nn.Module:
    config = hf.PaliGemmaConfig(
        vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 32} | VISION,
        text_config={"model_type": "gemma", "head_dim": 8} | GROUPED,
        image_token_index=66,
        projection_dim=32,
        hidden_size=32,
    )
    return hf.PaliGemmaForConditionalGeneration(config).to(torch.get_default_dtype())


def mistral3() -> nn.Module:
    config = hf.Mistral3Config(
        vision_config={"model_type": "pixtral", "head_dim": 8} | VISION | {"image_size": 16},
        text_config={"model_type": "mistral", "head_dim": 8} | GROUPED,
        image_token_index=66,
        spatial_merge_size=2,
        vision_feature_layer=-1,
    )
    return hf.Mistral3ForConditionalGeneration(config).to(torch.get_default_dtype())


def voxtral() -> nn.Module:
    config = hf.VoxtralConfig(
        audio_config={
            "hidden_size": 16,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_mel_bins": 8,
            "max_source_positions": 8,
        },
        text_config={"model_type": "llama"} | GROUPED,
        audio_token_id=66,
    )
    return hf.VoxtralForConditionalGeneration(config).to(torch.get_default_dtype())


def internvl(*, use_qk_norm: bool) -> nn.Module:
    config = hf.InternVLConfig(
        vision_config={"model_type": "internvl_vision", "use_qk_norm": use_qk_norm, "norm_type": "rms_norm"}
        | VISION
        | {"image_size": [8, 8], "patch_size": [2, 2]},
        text_config={"model_type": "qwen2"} | GROUPED,
        image_token_id=66,
        image_seq_length=4,
    )
    return hf.InternVLForConditionalGeneration(config).to(torch.get_default_dtype())


FAMILIES: dict[str, Family] = {
    "albert": masked("AlbertForMaskedLM", "AlbertConfig", embedding_size=16, inner_group_num=2),
    "bart": Family(
        made("BartForConditionalGeneration", "BartConfig", **BART_SIZES), source_and_target, fixed={"use_cache": False}
    ),
    "beit": vision(
        "BeitForImageClassification", "BeitConfig", **NO_DROPOUT, drop_path_rate=0.0, use_relative_position_bias=True
    ),
    "beit_shared_bias": vision(
        "BeitForImageClassification",
        "BeitConfig",
        **NO_DROPOUT,
        drop_path_rate=0.0,
        use_shared_relative_position_bias=True,
    ),
    "beit_eager": vision(
        "BeitForImageClassification",
        "BeitConfig",
        **NO_DROPOUT,
        drop_path_rate=0.0,
        use_relative_position_bias=True,
        attn_implementation="eager",
    ),
    "bert": of_zoo("bert"),
    "blip_2": of_zoo("blip_2"),
    "bloom": causal(
        "BloomForCausalLM",
        "BloomConfig",
        IDS | {"hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "chatglm": Family(lambda: ChatGLM(VOCABULARY).to(torch.get_default_dtype()), unpadded),
    "clip": of_zoo("clip"),
    "deberta": masked("DebertaForMaskedLM", "DebertaConfig", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "deepseek_v3": causal("DeepseekV3ForCausalLM", "DeepseekV3Config", TEXT | DEEPSEEK),
    "dinov2": vision("Dinov2ForImageClassification", "Dinov2Config", **NO_DROPOUT),
    "dinov2_swiglu": vision("Dinov2ForImageClassification", "Dinov2Config", **NO_DROPOUT, use_swiglu_ffn=True),
    "distilbert": Family(
        made(
            "DistilBertForMaskedLM",
            "DistilBertConfig",
            **IDS,
            dim=32,
            hidden_dim=50,
            n_layers=2,
            n_heads=4,
            dropout=0.0,
            attention_dropout=0.0,
        ),
        tokens,
    ),
    "ernie": masked("ErnieForMaskedLM", "ErnieConfig"),
    "falcon_alibi": falcon(alibi=True, multi_query=False, new_decoder_architecture=False),
    "falcon_alibi_eager": falcon(alibi=True, multi_query=True, attn_implementation="eager"),
    "falcon_groups": falcon(num_kv_heads=2, new_decoder_architecture=True, bias=True),
    "falcon_heads": falcon(multi_query=False, new_decoder_architecture=False, parallel_attn=False, bias=True),
    "falcon_multi_query": falcon(multi_query=True, new_decoder_architecture=False),
    "gemma": causal("GemmaForCausalLM", "GemmaConfig", head_dim=8),
    "gemma2": causal("Gemma2ForCausalLM", "Gemma2Config", head_dim=8, query_pre_attn_scalar=8, sliding_window=4),
    "gemma3": of_zoo("gemma3"),
    "gemma3_text": causal("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=8, sliding_window=4),
    "glm": causal("GlmForCausalLM", "GlmConfig", head_dim=8),
    "glm4": causal("Glm4ForCausalLM", "Glm4Config", head_dim=8),
    "gpt2": of_zoo("gpt2"),
    "gpt_neo": causal(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        IDS
        | {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "intermediate_size": 50,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "max_position_embeddings": 32,
            "embed_dropout": 0.0,
            "resid_dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "gpt_neox": causal("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT | {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "gpt_oss": causal("GptOssForCausalLM", "GptOssConfig", head_dim=8, sliding_window=4, **EXPERTS),
    "gptj": causal(
        "GPTJForCausalLM",
        "GPTJConfig",
        IDS
        | {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_inner": 50,
            "n_positions": 32,
            "rotary_dim": 4,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "hubert": Family(made("HubertForCTC", "HubertConfig", **SPEECH), waves, FLOAT32),
    "internvl": Family(lambda: internvl(use_qk_norm=False), image_and_text(4, 8), FLOAT32, {"use_cache": False}),
    "internvl_qk_norm": Family(lambda: internvl(use_qk_norm=True), image_and_text(4, 8), FLOAT32, {"use_cache": False}),
    "llama": causal("LlamaForCausalLM", "LlamaConfig"),
    "llama_biased": causal("LlamaForCausalLM", "LlamaConfig", attention_bias=True, mlp_bias=True),
    "llama_eager": causal("LlamaForCausalLM", "LlamaConfig", attn_implementation="eager"),
    "llava": of_zoo("llava"),
    "llava_next": of_zoo("llava_next"),
    "mbart": Family(
        made("MBartForConditionalGeneration", "MBartConfig", **BART_SIZES),
        source_and_target,
        fixed={"use_cache": False},
    ),
    "mistral": causal("MistralForCausalLM", "MistralConfig", sliding_window=4),
    "mistral3": Family(mistral3, sized_image_and_text, FLOAT32, {"use_cache": False}),
    "mixtral": causal("MixtralForCausalLM", "MixtralConfig", **EXPERTS),
    "opt": causal(
        "OPTForCausalLM",
        "OPTConfig",
        IDS | WIDE | {"ffn_dim": 50, "word_embed_proj_dim": 32, "max_position_embeddings": 32, "dropout": 0.0},
    ),
    "paligemma": Family(paligemma, typed_image_and_text, FLOAT32, {"use_cache": False}),
    "phi3": causal(
        "Phi3ForCausalLM", "Phi3Config", resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0, sliding_window=None
    ),
    "pixtral": Family(made("PixtralVisionModel", "PixtralVisionConfig", **VISION, head_dim=8), pixels),
    "qwen2": causal("Qwen2ForCausalLM", "Qwen2Config"),
    "qwen2_5_omni_thinker": of_zoo("qwen2_5_omni_thinker"),
    "qwen2_5_vl": of_zoo("qwen2_5_vl"),
    "qwen2_audio": of_zoo("qwen2_audio"),
    "qwen2_vl": of_zoo("qwen2_vl"),
    "qwen3": causal("Qwen3ForCausalLM", "Qwen3Config", head_dim=8),
    "qwen3_moe": causal("Qwen3MoeForCausalLM", "Qwen3MoeConfig", head_dim=8, **QWEN_EXPERTS),
    "qwen3_vl": of_zoo("qwen3_vl"),
    "roberta": masked("RobertaForMaskedLM", "RobertaConfig", pad_token_id=0),
    "sam": Family(sam, points, fixed={"multimask_output": True}),
    "siglip": Family(siglip, pair, fixed={"return_loss": True}),
    "smolvlm": of_zoo("smolvlm"),
    "swin": swin("SwinForImageClassification", "SwinConfig"),
    "swinv2": swin("Swinv2ForImageClassification", "Swinv2Config"),
    "t5": Family(
        made("T5ForConditionalGeneration", "T5Config", **T5_SIZES), source_and_target, fixed={"use_cache": False}
    ),
    "t5_eager": Family(
        made("T5ForConditionalGeneration", "T5Config", **T5_SIZES, attn_implementation="eager"),
        source_and_target,
        fixed={"use_cache": False},
    ),
    "t5_gated": Family(
        made("T5ForConditionalGeneration", "T5Config", **T5_SIZES, feed_forward_proj="gated-gelu"),
        source_and_target,
        fixed={"use_cache": False},
    ),
    "vit": vision("ViTForImageClassification", "ViTConfig", **NO_DROPOUT),
    "voxtral": Family(voxtral, speech_and_text, FLOAT32, {"use_cache": False}),
    "wav2vec2": Family(made("Wav2Vec2ForCTC", "Wav2Vec2Config", **SPEECH), waves, FLOAT32),
    "whisper": of_zoo("whisper"),
}
