"""Logits that nobody computed: losses and gradients of torch, in chunks, and everything else as if they were there."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_mm5d import ConfigError
from lightning_mm5d.features.fused_heads.lazy_logits import (
    Head,
    LazyLogits,
    RowLosses,
    chunk_rows,
    lazy_logits,
    linear_row_losses,
    settle,
)

B, S, D, C = 3, 7, 8, 37


class Case:
    """A head and hidden states ``[B, S, D]``, with lazy logits or with plain ones."""

    def __init__(self, *, lazy: bool, bias: bool = True, dtype: torch.dtype = torch.float64) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.head = nn.Linear(D, C, bias=bias, dtype=dtype)
            self.hidden = torch.randn(B, S, D, dtype=dtype, requires_grad=True)
            self.labels = torch.randint(C, (B, S))
        self.labels[0, 3:] = -100
        self.logits = lazy_logits(Head(module=self.head, dtype=dtype), self.hidden) if lazy else self.head(self.hidden)

    def run(self, use: Callable[[Tensor, Tensor], Tensor]) -> list[Any]:
        found = use(self.logits, self.labels)
        found.sum().backward()
        return [found.detach(), self.hidden.grad, *(p.grad for p in self.head.parameters())]


def shifted(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, C), labels.view(-1), **options)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": shifted,
    "sum over a count": lambda x, y: shifted(x, y, reduction="sum") / 5,
    "each row": lambda x, y: shifted(x, y, reduction="none") * torch.arange(B * S),
    "smoothed": lambda x, y: shifted(x, y, label_smoothing=0.2),
    "another class ignored": lambda x, y: F.cross_entropy(x.view(-1, C), y.clamp(min=0).view(-1), ignore_index=5),
    "all ignored": lambda x, y: shifted(x, torch.full_like(y, -100), reduction="sum"),
    "soft cap": lambda x, y: shifted((x / 3).tanh() * 3, y),
    "scaled": lambda x, y: shifted(0.5 * x, y),
    "rows shifted apart": lambda x, y: F.cross_entropy(
        x[..., :-1, :].contiguous().flatten(0, 1), y[..., 1:].reshape(-1)
    ),
    "masked rows": lambda x, y: F.cross_entropy(x[:, :-1][y[:, 1:] != -100], y[:, 1:][y[:, 1:] != -100]),
    "some samples": lambda x, y: F.cross_entropy(input=x[1], target=y[1]),
}
COMPUTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "classes in the middle": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "class weights": lambda x, y: shifted(x, y, weight=torch.linspace(1, 2, C, dtype=x.dtype)),
    "probabilities": lambda x, y: F.cross_entropy(x.flatten(0, 1), torch.softmax(x.detach().flatten(0, 1), -1)),
    "another use": lambda x, y: shifted(x, y) + x.logsumexp(-1).mean() + x[..., -1].sum(),
    "written to": lambda x, y: shifted(x.masked_fill_(x > 1, 0), y),
    "an entry set": lambda x, y: (x.__setitem__((..., 3), 0.0), shifted(x, y))[1],
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_those_of_torch_without_the_logits(name: str, bias: bool) -> None:
    lazy, plain = Case(lazy=True, bias=bias), Case(lazy=False, bias=bias)
    found, expected = lazy.run(LOSSES[name]), plain.run(LOSSES[name])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert isinstance(lazy.logits, LazyLogits)
    assert lazy.logits._logits is None


@pytest.mark.parametrize("name", COMPUTED)
def test_whatever_else_uses_logits_gets_them(name: str) -> None:
    found, expected = Case(lazy=True).run(COMPUTED[name]), Case(lazy=False).run(COMPUTED[name])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_a_mean_over_no_label_is_nan_and_its_gradients_are_zero_as_in_torch() -> None:
    lazy, plain = Case(lazy=True), Case(lazy=False)
    for case in (lazy, plain):
        case.labels.fill_(-100)
    found, expected = lazy.run(shifted), plain.run(shifted)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert all(not gradient.any() for gradient in found[1:])


def test_a_cast_is_part_of_the_loss() -> None:
    found, expected = (Case(lazy=lazy).run(lambda x, y: shifted(x.float(), y)) for lazy in (True, False))
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_it_tells_what_a_tensor_tells_without_being_computed() -> None:
    lazy, plain = Case(lazy=True).logits, Case(lazy=False).logits
    for tell in (Tensor.size, Tensor.dim, Tensor.numel, len, Tensor.is_floating_point):
        assert tell(lazy) == tell(plain)  # type: ignore[operator]
    assert (lazy.shape, lazy.dtype, lazy.device, lazy.requires_grad) == (plain.shape, plain.dtype, plain.device, True)
    assert isinstance(lazy, LazyLogits)
    assert lazy._logits is None
    assert lazy.float().dtype == torch.float32
    assert lazy.to(lazy.dtype) is lazy
    assert repr(lazy) == repr(plain)


def test_wrong_targets_are_refused_as_torch_does() -> None:
    case = Case(lazy=True)
    with pytest.raises(IndexError, match="out of bounds"):
        shifted(case.logits, case.labels.fill_(C))
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(case.logits.view(-1, C), case.labels.view(-1)[1:])


def test_what_would_be_wrong_without_the_logits_is_refused() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradient: Tensor) -> Tensor:
            return gradient[0] * 2

    case = Case(lazy=True)
    with pytest.raises(ConfigError, match="fused_linear_cross_entropy"):
        Twice.apply(case.logits).sum().backward()
    case = Case(lazy=True)
    shifted(case.logits, case.labels)
    with pytest.raises(ConfigError, match="no gradient reaches"):
        case.logits.retain_grad()
    with torch.no_grad():
        case.head.weight.add_(1)
    with pytest.raises(ConfigError, match="written to"):
        case.logits.sum()
    case = Case(lazy=True)
    flat = case.logits.view(-1, C)
    case.logits.mul_(2)
    with pytest.raises(ConfigError, match="written to"):
        flat.sum()


def test_what_somebody_holds_at_the_end_of_a_step_is_computed_with_the_weights_of_the_step() -> None:
    case = Case(lazy=True)
    end, expected = settle(case.logits), Case(lazy=False).logits  # type: ignore[arg-type]
    end()
    with torch.no_grad():
        case.head.weight.zero_()
    torch.testing.assert_close(case.logits + 0, expected)


@pytest.mark.parametrize(
    ("rows", "width", "classes", "expected"), [(8192, 4096, 131072, 256), (5, 8, 8, 8), (0, 8, 80, 1)]
)
def test_a_chunk_of_logits_is_about_as_large_as_the_hidden_states(
    rows: int, width: int, classes: int, expected: int
) -> None:
    assert chunk_rows(rows, width, classes) == expected


class Largest(TorchDispatchMode):
    """The largest result of an operation, in elements."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.most = max([self.most, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))])
        return result


def test_no_tensor_of_a_step_is_larger_than_the_weight() -> None:
    rows, width, classes = 1024, 16, 512
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(classes, width, requires_grad=True)
    target = torch.randint(classes, (rows,))
    with Largest() as largest:
        linear_row_losses(hidden, weight, None, target, RowLosses()).mean().backward()
    assert largest.most <= max(weight.numel(), 2 * hidden.numel())
    gc.collect()
