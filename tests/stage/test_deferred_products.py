"""Products of experts put their weight gradients off: the input-gradient pass computes none, and none is lost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from lightning_mm5d.stage.deferred import Deferred, DeferredProducts

EXPERTS, WIDTH, INNER, TOKENS = 3, 8, 12, 7
SIZES = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_local_experts": EXPERTS}


class Batched(nn.Module):
    """All experts on equal numbers of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        every = x.expand(EXPERTS, -1, -1)
        return torch.bmm(torch.bmm(every, self.up).tanh(), self.down).sum(0)


class Whole(nn.Module):
    """One expert after the other, by several names of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.down = nn.Parameter(torch.randn(INNER, WIDTH))

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        first, *others = (torch.matmul(x, self.up[0]), x @ self.up[1], x.matmul(self.up[2]))
        return torch.mm(sum(others, first).tanh(), self.down)


def transformers_experts(cls: type[nn.Module], config: type, implementation: str) -> nn.Module:
    settings = config(**SIZES)
    settings._experts_implementation = implementation
    experts = cls(settings)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    return experts


KINDS: dict[str, tuple[Callable[[], nn.Module], torch.dtype]] = {
    "loop": (lambda: transformers_experts(MixtralExperts, MixtralConfig, "eager"), torch.float64),
    "grouped": (lambda: transformers_experts(MixtralExperts, MixtralConfig, "grouped_mm"), torch.float32),
    "transposed": (lambda: transformers_experts(GptOssExperts, GptOssConfig, "eager"), torch.float64),
    "transposed, grouped": (lambda: transformers_experts(GptOssExperts, GptOssConfig, "grouped_mm"), torch.float32),
    "batched": (Batched, torch.float64),
    "names": (Whole, torch.float64),
}


def routed(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, of which the last expert gets none."""
    x = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    index = torch.randint(EXPERTS - 1, (TOKENS, 1))
    return x, index, torch.ones(TOKENS, 1, dtype=dtype)


def weights(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters() if p.dim() == 3 or name == "down"}


@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_input_gradient_pass_computes_no_weight_gradient(kind: str, again: bool) -> None:
    torch.manual_seed(0)
    make, dtype = KINDS[kind]
    experts = make().to(dtype)
    x, index, ones = routed(dtype)
    experts(x, index, ones).square().sum().backward()
    expected, below = {name: p.grad for name, p in experts.named_parameters()}, x.grad
    experts.zero_grad()
    x.grad, due = None, Deferred()

    def run(x: Tensor) -> Tensor:
        with DeferredProducts(due):
            return experts(x, index, ones)

    with due:
        (checkpoint(run, x, use_reentrant=False) if again else run(x)).square().sum().backward()
    torch.testing.assert_close(x.grad, below)
    assert all(gradient is None for gradient in weights(experts).values())
    due.compute()
    torch.testing.assert_close({name: p.grad for name, p in experts.named_parameters()}, expected)


def test_autocast_keeps_what_it_multiplied() -> None:
    torch.manual_seed(0)
    experts = KINDS["loop"][0]()
    x, index, ones = routed(torch.float32)
    found = []
    for due in (None, Deferred()):
        experts.zero_grad()
        with torch.autocast("cpu", torch.bfloat16), nullcontext() if due is None else DeferredProducts(due):
            out = experts(x, index, ones)
        with due or nullcontext():
            out.float().square().sum().backward()
        if due is not None:
            due.compute()
        found.append([p.grad for p in experts.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("case", ["frozen", "hook", "computed", "no gradient below"])
def test_what_cannot_be_put_off_has_its_gradient_at_once(case: str) -> None:
    weight, x = nn.Parameter(torch.randn(2, 4, 4)), torch.randn(3, 4, requires_grad=case != "no gradient below")
    if case == "hook":
        weight.register_hook(lambda gradient: 2 * gradient)
    due, used = Deferred(), weight * 2 if case == "computed" else weight
    if case == "frozen":
        weight.requires_grad_(False)
        x = x * nn.Parameter(torch.ones(()))
    with DeferredProducts(due):
        out = F.linear(x, used[0])
    with due:
        out.sum().backward()
    assert not due.weights
    assert (weight.grad is None) is (case == "frozen")
