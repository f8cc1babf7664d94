"""Constructors that do what constructors do: odd initialisations, ties, copies, numbers read on the way."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as old_weight_norm
from torch.utils.data import random_split
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassConfusionMatrix


class Direct(L.LightningModule):
    """Parameters and tensors made on the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.Parameter(torch.randn(4, 8) * 0.02)
        self.zeros = nn.Parameter(torch.zeros(3))
        self.frozen = nn.Parameter(torch.rand(5), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.scalar = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.ramp = nn.Parameter(torch.arange(6).float() / 6)
        self.named = nn.Parameter(torch.ones(2, 2, device=torch.device("cpu")))
        self.numpy = nn.Parameter(torch.from_numpy(np.linspace(0, 1, 5)))
        self.late = nn.Parameter(torch.arange(4.0))
        nn.init.normal_(self.late)
        self.halved = nn.Parameter(torch.randn(3, 3, dtype=torch.bfloat16))
        self.number = nn.Parameter(torch.full((2,), 3), requires_grad=False)
        self.complexes = nn.Parameter(torch.randn(2, 2, dtype=torch.complex64).conj())
        self.register_buffer("drawn", torch.randperm(7))
        self.register_buffer("mask", torch.ones(5, 5).tril().bool(), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("sampled", torch.randint(0, 9, (4,)))
        self.lambda_q = nn.Parameter(torch.normal(0, 0.1, size=(3,)))
        self.legacy = nn.Parameter(torch.Tensor(3).uniform_())
        self.nought = nn.Parameter(torch.empty(0, 3))
        self.plain = torch.randn(3)
        self.listed = [torch.zeros(2), {"deep": (torch.ones(1), torch.rand(2))}]
        self.register_parameter("absent", None)


class Schedule:
    """A plain object with tensors."""

    def __init__(self) -> None:
        self.betas = torch.linspace(0, 1, 4)
        self.products = torch.cat([torch.ones(1), self.betas[1:].cumprod(0)])


class Elsewhere(nn.Module):
    """Tensors in objects, closures, metrics and modules that are not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule()
        self.teacher = [nn.BatchNorm1d(2), nn.Linear(2, 2).requires_grad_(False)]
        mask = torch.ones(2)
        self.masked = lambda x: x * mask
        self.partial = functools.partial(torch.add, torch.zeros(2))
        self.metric = MeanSquaredError(num_outputs=3)
        self.confusion = MulticlassConfusionMatrix(4)
        self.loss = nn.CrossEntropyLoss(weight=torch.rand(3))
        self.old = old_weight_norm(nn.Linear(2, 3))
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        for layer in self.layers:
            layer.plain = torch.zeros(2)


class Initialisers(nn.Module):
    """Every function of `torch.nn.init`."""

    def __init__(self) -> None:
        super().__init__()
        made: dict[str, tuple[tuple[int, ...], Callable[[Tensor], object]]] = {
            "uniform": ((3, 4), nn.init.uniform_),
            "normal": ((30, 4), nn.init.normal_),
            "trunc_normal": ((30, 4), lambda t: nn.init.trunc_normal_(t, std=0.02)),
            "trunc_tail": ((30, 4), lambda t: nn.init.trunc_normal_(t, mean=0.0, std=1.0, a=1.5, b=3.0)),
            "constant": ((3,), lambda t: nn.init.constant_(t, 2.5)),
            "ones": ((3,), nn.init.ones_),
            "zeros": ((3,), nn.init.zeros_),
            "eye": ((3, 4), nn.init.eye_),
            "dirac": ((4, 2, 3), lambda t: nn.init.dirac_(t, groups=2)),
            "xavier_uniform": ((3, 4), nn.init.xavier_uniform_),
            "xavier_normal": ((3, 4), nn.init.xavier_normal_),
            "kaiming_uniform": ((3, 4, 3, 3), nn.init.kaiming_uniform_),
            "kaiming_normal": ((3, 4, 3, 3), nn.init.kaiming_normal_),
            "orthogonal": ((5, 3), nn.init.orthogonal_),
            "orthogonal_wide": ((3, 5), nn.init.orthogonal_),
            "sparse": ((6, 4), lambda t: nn.init.sparse_(t, 0.5)),
        }
        for name, (size, function) in made.items():
            self.register_parameter(name, nn.Parameter(torch.empty(size)))
            function(getattr(self, name))


class Edited(nn.Module):
    """Weights that are written again, in parts, by views and by `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4, padding_idx=2)
        self.embedding.weight.data[3].zero_()
        self.embedding.weight.data[[0, 1], 2] = 5.0
        self.linear = nn.Linear(4, 8)
        with torch.no_grad():
            self.linear.weight[:4].copy_(torch.eye(4))
            self.linear.weight[4:] = torch.tensor([1.0, 2.0, 3.0, 4.0])
            self.linear.bias.chunk(2)[1].fill_(7)
            self.linear.weight.view(-1)[::5].mul_(3)
        self.replaced = nn.Linear(2, 2)
        self.replaced.weight.data = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        self.replaced.bias.data = torch.randn(2)
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.lstm = nn.LSTM(3, 4, bidirectional=True)
        for name, parameter in self.lstm.named_parameters():
            if "bias" in name:
                parameter.data.fill_(0)
                n = parameter.size(0)
                parameter.data[n // 4 : n // 2].fill_(1)
        normalised = nn.Linear(4, 4)
        self.normalised = nn.Parameter(normalised.weight / normalised.weight.norm(dim=1, keepdim=True))
        self.unfolded = nn.Parameter(torch.stack([torch.full((2,), float(i)) for i in range(3)]))
        self.out = nn.Parameter(torch.empty(4))
        torch.mul(torch.ones(4), 3, out=self.out.data)


class Copied(nn.Module):
    """A model, its copy as an average, and tied layers."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.head = nn.Linear(4, 6, bias=False)
        self.embedding = nn.Embedding(6, 4)
        self.head.weight = self.embedding.weight
        self.again = self.online[0]
        self.part = nn.Parameter(torch.empty(2, 2))
        self.part.data = self.online[2].weight.data[:2, :2]
        self.wide = nn.Linear(4, 4).double()
        self.narrow = nn.Linear(4, 4).to(torch.bfloat16)
        nn.init.normal_(self.online[0].weight)
        for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
            target.data.lerp_(online.data, 0.5)


class Numbers(nn.Module):
    """Numbers that are read from tensors on the way, and shapes that a dry run tells."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        self.layers = nn.ModuleList(nn.Dropout(rate) for rate in rates)
        counts = torch.zeros(3)
        counts[1] = 4
        counts += 1
        self.sizes = [int(n) for n in counts.tolist()]
        self.width = int(counts.max())
        self.linear = nn.Linear(self.width, int(counts.numpy()[0]) + 1)
        if torch.ones(2).sum() > 1:
            self.extra = nn.Linear(2, 2)
        self.picked = nn.Parameter(torch.arange(6.0)[torch.zeros(6).bool() | (torch.arange(6) > 3)])
        self.table = torch.tensor([torch.ones(()) * 2, torch.zeros(())])
        convolution = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5))
        self.convolution = convolution
        self.flat = nn.Linear(convolution(torch.zeros(1, 1, 8, 8)).flatten(1).shape[1], 2)
        assert self.linear.weight.device == torch.device("cpu")
        assert not self.linear.weight.is_meta
        self.same = torch.zeros(2, device=self.linear.weight.device).to(self.linear.weight)
        alias = self.linear.bias.data.cpu()
        alias.fill_(9)


class Seeded(nn.Module):
    """Random states that a constructor sets, saves and restores, and generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.fixed = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        state = torch.get_rng_state()
        self.third = nn.Linear(3, 3)
        torch.set_rng_state(state)
        self.like_third = nn.Linear(3, 3)
        generator = torch.Generator().manual_seed(11)
        self.own = nn.Parameter(torch.randn(3, generator=generator))
        self.more = nn.Parameter(torch.empty(3).uniform_(generator=generator))
        self.generator = generator
        self.default = nn.Parameter(torch.randn(3, generator=torch.default_generator))
        self.split = random_split(range(9), [5, 4])[0].indices
        np.random.seed(1)
        self.numpy = nn.Parameter(torch.from_numpy(np.random.randn(3)))
        torch.manual_seed(8)
        torch.rand(3)  # reaches no parameter, and moves the generator all the same
        self.last = nn.Linear(3, 3)
        torch.manual_seed(9)


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight_norm = parametrizations.weight_norm(nn.Linear(3, 4))
        self.convolution = parametrizations.weight_norm(nn.Conv1d(4, 4, 3), dim=2)
        self.spectral = parametrizations.spectral_norm(nn.Linear(3, 4))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(4, 4))


class Bfloat16(nn.Module):
    """Built while another default dtype holds."""

    def __init__(self) -> None:
        super().__init__()
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            self.linear = nn.Linear(5, 5)
            self.ratio = nn.Parameter(torch.arange(4) / torch.full((), 3))
            self.transformer = nn.TransformerEncoderLayer(4, 2, 8)
        finally:
            torch.set_default_dtype(before)


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    return get_peft_model(LlamaForCausalLM(config), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], use_dora=True))


ODD: dict[str, Callable[[], nn.Module]] = {
    "direct": Direct,
    "elsewhere": Elsewhere,
    "initialisers": Initialisers,
    "edited": Edited,
    "copied": Copied,
    "numbers": Numbers,
    "seeded": Seeded,
    "parametrized": Parametrized,
    "bfloat16": Bfloat16,
    "lora": lora,
    "transformer": lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
    "attention": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4, add_bias_kv=True),
    "recurrent": lambda: nn.ModuleList([nn.LSTM(3, 4, 2, proj_size=2), nn.GRU(3, 4), nn.LSTMCell(2, 3)]),
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding_mode="circular"), nn.ConvTranspose1d(2, 2, 2), nn.SyncBatchNorm(4),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.GroupNorm(2, 4), nn.PReLU(),
        nn.Bilinear(2, 3, 4), nn.EmbeddingBag(5, 3), nn.CrossEntropyLoss(weight=torch.ones(3)),
    ),
}  # fmt: skip
