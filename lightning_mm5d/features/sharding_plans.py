"""What families of models need beyond rules by names: fused projections, per-head tables, widths that their code reads.

Each entry was read from the code of the class in transformers and is tried against the unsharded model. Keys are names
of classes; a class counts with all that derive from it, if it and its forward come from transformers or from the code
that a model on the Hub brings along.

Other sources decide about a class that is not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_mm5d.config.errors import private
from lightning_mm5d.tensor_parallel.family_plans import Entry, Part, TensorParallelPlan

_ENTRYWISE = frozenset(
    (
        *("relu", "relu6", "gelu", "silu", "elu", "celu", "selu", "leakyrelu", "mish", "hardswish", "tanh"),
        *("sigmoid", "softplus"),
    )
)
_ALL_HEADS: tuple[Part, ...] = ("heads", "heads", "heads")

_SEPARATE = TensorParallelPlan(
    column={"q_proj": ("heads",), "k_proj": ("heads",), "v_proj": ("heads",)},
    row={"o_proj": ("heads",)},
    heads="num_attention_heads",
)
_SEPARATE_OUT = replace(_SEPARATE, row={"out_proj": ("heads",)})
_GPT2 = TensorParallelPlan(
    column={"c_attn": _ALL_HEADS}, row={"c_proj": ("heads",)}, heads="num_heads", local={"split_size": "heads"}
)
_GPT2_CROSS = replace(_GPT2, column={"c_attn": ("heads", "heads"), "q_attn": ("heads",)})
_BLIP = TensorParallelPlan(
    column={"qkv": _ALL_HEADS},
    row={"projection": ("heads",)},
    heads="num_heads",
    local={"embed_dim": "heads"},
    whole_width=True,
)
_SAM_VISION = TensorParallelPlan(
    column={"qkv": _ALL_HEADS}, row={"proj": ("heads",)}, heads="num_attention_heads", shared=("rel_pos_h", "rel_pos_w")
)
_T5 = TensorParallelPlan(
    column={"q": ("heads",), "k": ("heads",), "v": ("heads",)},
    row={"o": ("heads",)},
    heads="n_heads",
    local={"inner_dim": "heads"},
    parameters={"relative_attention_bias.weight": (1, "heads")},
    arguments={"position_bias": 1},
    results={1: 1, 2: 1},
)
_SWIN_V2 = TensorParallelPlan(
    column={
        "self.query": ("heads",),
        "self.key": ("heads",),
        "self.value": ("heads",),
        "self.continuous_position_bias_mlp.2": ("heads",),
    },
    row={"output.dense": ("heads",)},
    heads="self.num_attention_heads",
    local={"self.all_head_size": "heads"},
    parameters={"self.logit_scale": (0, "heads")},
)


def _bloom_attention(module: Any) -> TensorParallelPlan | None:
    if module.pretraining_tp > 1 and module.slow_but_exact:  # reads slices of the weight itself
        return None
    return TensorParallelPlan(
        column={"query_key_value": ("groups",)}, row={"dense": ("heads",)}, heads="num_heads", arguments={"alibi": -1}
    )


def _bloom_mlp(module: Any) -> TensorParallelPlan | None:
    if module.pretraining_tp > 1 and module.slow_but_exact:
        return None
    return TensorParallelPlan(column={"dense_h_to_4h": ("width",)}, row={"dense_4h_to_h": ("width",)})


def _falcon(module: Any) -> TensorParallelPlan:
    plan = TensorParallelPlan(
        column={"query_key_value": ("groups",)},
        row={"dense": ("heads",)},
        heads="num_heads",
        key_value_heads="num_kv_heads",
        arguments={"alibi": 1, "attention_mask": 1},
    )
    if not module.new_decoder_architecture and module.multi_query:
        return replace(plan, column={"query_key_value": ("heads", "key_value_heads", "key_value_heads")})
    return plan


def _gpt_neox(module: Any) -> TensorParallelPlan:
    heads = module.dense.in_features // module.head_size
    return TensorParallelPlan(column={"query_key_value": ("groups",)}, row={"dense": ("heads",)}, heads=heads)


def _gpt_oss(module: Any) -> TensorParallelPlan:
    return TensorParallelPlan(
        column={"q_proj": ("heads",), "k_proj": ("key_value_heads",), "v_proj": ("key_value_heads",)},
        row={"o_proj": ("heads",)},
        heads=module.q_proj.out_features // module.head_dim,
        key_value_heads=module.k_proj.out_features // module.head_dim,
        local={"num_key_value_groups": "group_size"},
        parameters={"sinks": (0, "heads")},
    )


def _internvl(module: Any) -> TensorParallelPlan | None:
    if any(True for norm in (module.q_norm, module.k_norm) for _ in norm.parameters()):
        return None  # they are norms of all heads together
    return replace(_SEPARATE, row={"projection_layer": ("heads",)}, heads="num_heads", local={"embed_dim": "heads"})


def _phi4_audio(module: Any) -> TensorParallelPlan:
    heads = module.q_proj.out_features // module.head_dim
    return replace(_SEPARATE, heads=heads, arguments={"attention_mask": 1})  # it holds a bias of each head


def _phi3(module: Any) -> TensorParallelPlan:
    return TensorParallelPlan(
        column={"qkv_proj": ("heads", "key_value_heads", "key_value_heads")},
        row={"o_proj": ("heads",)},
        heads="config.num_attention_heads",
        key_value_heads="num_key_value_heads",
        local={"num_key_value_groups": "group_size"},
    )


def _chatglm_attention(module: Any) -> TensorParallelPlan | None:
    if not hasattr(module, "num_attention_heads_per_partition") or not hasattr(module, "core_attention"):
        return None
    plan = TensorParallelPlan(
        column={"query_key_value": ("groups",)},
        row={"dense": ("heads",)},
        heads="num_attention_heads_per_partition",
        local={
            "projection_size": "heads",
            "core_attention.hidden_size_per_partition": "heads",
            "core_attention.num_attention_heads_per_partition": "heads",
        },
    )
    if getattr(module, "multi_query_attention", False):
        return replace(
            plan,
            column={"query_key_value": ("heads", "key_value_heads", "key_value_heads")},
            key_value_heads="num_multi_query_groups_per_partition",
        )
    return plan


def _chatglm_mlp(module: Any) -> TensorParallelPlan | None:
    activation = getattr(module, "activation_func", None)  # halves its input: silu of the first half times the second
    if "swiglu" not in getattr(activation, "__name__", "") or not hasattr(module, "dense_h_to_4h"):
        return None
    return TensorParallelPlan(column={"dense_h_to_4h": ("width", "width")}, row={"dense_4h_to_h": ("width",)})


def _torch_attention(module: Any) -> TensorParallelPlan:
    of_one: tuple[int | str, ...] = (0, "heads")
    return TensorParallelPlan(
        row={"out_proj": ("heads",)},
        heads="num_heads",
        parameters={
            **dict.fromkeys(("in_proj_weight", "in_proj_bias"), (0, *_ALL_HEADS)),
            **dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), of_one),
            **dict.fromkeys(("bias_k", "bias_v"), (2, "heads")),
        },
    )


def _torch_layer(module: Any) -> TensorParallelPlan | None:
    activation = module.activation
    of_torch = f"{getattr(activation, '__module__', '')}.".startswith(("torch.", "builtins."))
    name = getattr(activation, "__name__", type(activation).__name__).lower().replace("_", "")
    written = {private(cls, "_ff_block") for cls in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)}
    if not of_torch or name not in _ENTRYWISE or private(type(module), "_ff_block") not in written:
        return None
    return TensorParallelPlan(column={"linear1": ("width",)}, row={"linear2": ("width",)})


FAMILIES: Mapping[str, Entry] = {
    "BeitAttention": replace(_SEPARATE, arguments={"attention_mask": 1}),
    "BlipAttention": _BLIP,
    "Blip2Attention": _BLIP,
    "BloomAttention": _bloom_attention,
    "BloomMLP": _bloom_mlp,
    "FalconAttention": _falcon,
    "GPT2Attention": lambda module: _GPT2_CROSS if module.is_cross_attention else _GPT2,
    "GPTJAttention": _SEPARATE_OUT,
    "GPTNeoXAttention": _gpt_neox,
    "GptOssAttention": _gpt_oss,
    "InstructBlipAttention": _BLIP,
    "InstructBlipVideoAttention": _BLIP,
    "InternVLVisionAttention": _internvl,
    "MLP": _chatglm_mlp,
    "MT5Attention": _T5,
    "MultiheadAttention": _torch_attention,
    "Phi3Attention": _phi3,
    "Phi4MultimodalAudioAttention": _phi4_audio,
    "SamAttention": _SEPARATE_OUT,
    "SamVisionAttention": _SAM_VISION,
    "SelfAttention": _chatglm_attention,
    "SwinAttention": replace(
        _SEPARATE, parameters={"relative_position_bias.relative_position_bias_table": (1, "heads")}
    ),
    "Swinv2Attention": _SWIN_V2,
    "T5Attention": _T5,
    "TransformerDecoderLayer": _torch_layer,
    "TransformerEncoderLayer": _torch_layer,
}
