"""Modules that rules by names divide, and others that differ from these by one thing, which keeps them whole."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS = 32, 4


class Attention(nn.Module):
    """One that the rules divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = WIDTH, HEADS, WIDTH // HEADS
        self.config = SimpleNamespace(num_attention_heads=HEADS, mystery=3)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def heads_of(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads_of(layer(x)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ReadsWidth(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(*x.shape[:-1], self.embed_dim)


class ReadsWidthOfAnotherName(Attention):
    def forward(this, x: Tensor) -> Tensor:  # noqa: N805
        return super().forward(x).view(*x.shape[:-1], this.embed_dim)


class ReadsInputWidth(Attention):
    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        return super().forward(x).view(batch, length, width)


class ReadsInputShape(Attention):
    def forward(self, x: Tensor) -> Tensor:
        shape = x.size()
        return super().forward(x).view(shape)


class ReadsLastSize(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.size(-1) ** -0.5


class ReadsNumber(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.pieces = 2

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.pieces


class ReadsConfig(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.config.mystery


class NormOfAllHeads(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.LayerNorm(WIDTH)


class NormWithoutParameters(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.LayerNorm(WIDTH, elementwise_affine=False)


class FunctionalNorm(Attention):
    def heads_of(self, x: Tensor) -> Tensor:
        return super().heads_of(F.normalize(x, dim=-1))


class Gate(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)


class Parameter(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HEADS))


class PerHeadBuffer(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Buffer(torch.ones(HEADS, 1))


class PerHeadArgument(Attention):
    def forward(self, x: Tensor, position_bias: Tensor | None = None) -> Tensor:
        return super().forward(x)


class WrongNumberOfHeads(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2


class NoNumberOfHeads(Attention):
    def __init__(self) -> None:
        super().__init__()
        del self.num_heads, self.head_dim, self.config


class WideQueries(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, 2 * WIDTH)


class LinearOfItsOwn(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).round()


class OddLinear(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.v_proj = LinearOfItsOwn(WIDTH, WIDTH)


class FusedUnknown(Attention):
    """A fused projection of which the code does not say how it is made."""

    def __init__(self) -> None:
        super().__init__()
        del self.q_proj, self.k_proj, self.v_proj
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.heads_of, self.qkv(x).chunk(3, dim=-1))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class FusedByParts(FusedUnknown):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(*x.shape[:-1], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class FusedByPartsOfHeads(FusedUnknown):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:-1], 3, -1, self.head_dim).permute(2, 0, 3, 1, 4)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class FusedByANumber(FusedUnknown):
    """The number of heads has a name of its own, so that 3 stands before the width of a head."""

    def forward(self, x: Tensor) -> Tensor:
        number = self.num_heads
        q, k, v = self.qkv(x).view(*x.shape[:-1], number, 3, self.head_dim).permute(3, 0, 2, 1, 4)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class FusedByHeads(FusedUnknown):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (self.num_heads, 3, self.head_dim)).permute(3, 0, 2, 1, 4)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class IntegralRates(Attention):
    """Rates and scales that are written without a point."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.scaling, self.attn_logit_softcapping = 0, 1, 50
        self.config.attention_dropout = 0

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) * self.scaling * self.attn_logit_softcapping
        return F.dropout(F.dropout(x, self.dropout, self.training), self.config.attention_dropout, self.training)


class ListsOfNorms(Attention):
    """A norm for each head, in a module that holds them all."""

    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH // HEADS) for _ in range(HEADS))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([norm(x) for norm, x in zip(self.norms, x.split(1, 1), strict=False)], 1)

    def __init__(self) -> None:
        super().__init__()
        self.q_layernorm = self.k_layernorm = type(self).Norms()
        type(self.q_layernorm).__name__ = "LayerNormPerHead"


class NumberOfHeadsInATensor(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.pieces = torch.tensor(HEADS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.pieces


class NumberOfHeadsInside(Attention):
    """A part without parameters counts all heads."""

    class Scale(nn.Module):
        num_heads: int

        def forward(self, x: Tensor) -> Tensor:
            return x / self.num_heads

    def __init__(self) -> None:
        super().__init__()
        self.scale = type(self).Scale()
        self.scale.num_heads = HEADS


class ReadsKeyValueHeads(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.num_key_value_heads = HEADS

    def heads_of(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.num_key_value_heads, self.head_dim).transpose(1, 2)


class ReadsHeadsOfConfig(Attention):
    def heads_of(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.config.num_attention_heads, self.head_dim).transpose(1, 2)


class NormOfTheOutput(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads_of(self.q_proj(x)), self.heads_of(self.k_proj(x)), self.heads_of(self.v_proj(x))
        attended = self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.norm(x + attended)


class NormsOfHeads(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(WIDTH // HEADS), nn.RMSNorm(WIDTH // HEADS)


class Perceptron(nn.Module):
    """One that the rules divide."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.dropout(self.act(self.fc1(x)), 0.0))


class PerceptronInALayer(Perceptron):
    """What stands before and behind the two layers is of no concern."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        hidden = self.act(self.fc1(hidden))
        hidden = self.fc2(hidden)
        return self.behind(F.softmax(hidden, -1))


class NormBetween(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.norm(self.act(self.fc1(x))))


class FunctionalNormBetween(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.fc1(x))
        hidden = F.layer_norm(hidden, (12,))
        return self.fc2(hidden)


class SoftmaxBetween(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Softmax(-1)


class MethodBetween(Perceptron):
    def middle(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.middle(self.fc1(x)))


class ParameterBetween(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.scale * self.fc1(x))


class WeightTakenDirectly(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.act(self.fc1(x)), self.fc2.weight, self.fc2.bias)


class OtherOrder(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 8)
        self.fc2 = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc2(x)
        return self.fc1(self.act(hidden))


class Sizes(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 24)


class Halved(nn.Module):
    """A fused gate and up projection, the gate first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(8, 24), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Interleaved(Halved):
    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up_proj(x)
        return self.down_proj(F.silu(both[..., ::2]) * both[..., 1::2])


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 24, 8))
        self.down_proj = nn.Parameter(torch.randn(3, 8, 12))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (x @ self.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
        return ((F.silu(gate) * up) @ self.down_proj.transpose(1, 2)).sum(0)


class InterleavedExperts(Experts):
    def forward(self, x: Tensor) -> Tensor:
        both = x @ self.gate_up_proj.transpose(1, 2)
        return ((F.silu(both[..., ::2]) * both[..., 1::2]) @ self.down_proj.transpose(1, 2)).sum(0)


class BiasedExperts(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(3, 8))


class Model(nn.Module):
    """What says of itself how it may be divided, as Hugging Face models do."""

    def __init__(self, part: nn.Module, tp_plan: dict[str, str]) -> None:
        super().__init__()
        self.layers, self.tp_plan = nn.ModuleList([nn.ModuleDict({"mlp": part})]), tp_plan


class OutsideFactor(Perceptron):
    """The second layer takes what a third one has made."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        factor = self.other(x).softmax(-1)
        return self.fc2(factor * self.fc1(x))


class RateAsInteger(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.dropout(self.act(self.fc1(x)), self.dropout, self.training))
