"""A stand-in for ChatGLM, whose code is not in transformers but comes with the model from the Hub.

Its classes and attributes have the names of that code, as the table of families expects them: a fused projection of all
queries, then the keys and values of fewer heads, a core attention with numbers of its own, a fused gate and up
projection with the activation in a function. Sequences come first: [S, B, D].
"""

from __future__ import annotations

from types import SimpleNamespace

import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, GROUPS, INNER = 32, 4, 2, 25
HOME = "transformers_modules.chatglm"


class CoreAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden_size_per_partition = WIDTH
        self.num_attention_heads_per_partition = HEADS

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True).permute(2, 0, 1, 3)
        return attended.reshape(*attended.shape[:2], self.hidden_size_per_partition)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection_size = WIDTH
        self.hidden_size_per_attention_head = WIDTH // HEADS
        self.num_attention_heads_per_partition = HEADS
        self.num_multi_query_groups_per_partition = GROUPS
        self.multi_query_attention = True
        self.query_key_value = nn.Linear(WIDTH, WIDTH + 2 * GROUPS * WIDTH // HEADS)
        self.core_attention = CoreAttention()
        self.dense = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        width = self.hidden_size_per_attention_head
        heads, groups = self.num_attention_heads_per_partition, self.num_multi_query_groups_per_partition
        parts = self.query_key_value(hidden_states).split([heads * width, groups * width, groups * width], dim=-1)
        query, key, value = (part.unflatten(-1, (-1, width)) for part in parts)
        key, value = (x.repeat_interleave(heads // groups, dim=2) for x in (key, value))
        return self.dense(self.core_attention(query, key, value)), None


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def swiglu(x: Tensor) -> Tensor:
            gate, up = x.chunk(2, dim=-1)
            return F.silu(gate) * up

        self.activation_func = swiglu
        self.dense_h_to_4h = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.dense_4h_to_h = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.dense_4h_to_h(self.activation_func(self.dense_h_to_4h(hidden_states)))


class GLMBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(WIDTH)
        self.self_attention = SelfAttention()
        self.post_attention_layernorm = nn.LayerNorm(WIDTH)
        self.mlp = MLP()

    def forward(self, hidden_states: Tensor) -> Tensor:
        attended, _ = self.self_attention(self.input_layernorm(hidden_states))
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class ChatGLM(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList([GLMBlock() for _ in range(2)])
        self.output_layer = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        hidden_states = self.embedding(input_ids.t())
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        logits = self.output_layer(hidden_states).transpose(0, 1)
        return SimpleNamespace(loss=F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


for one in (CoreAttention, SelfAttention, MLP, GLMBlock, ChatGLM):
    one.__module__ = one.forward.__module__ = HOME
