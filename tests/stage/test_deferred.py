"""Deferred weight gradients: what the input-gradient pass computes and frees, and that no gradient is lost."""

from __future__ import annotations

import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from lightning_mm5d.config.errors import private
from lightning_mm5d.stage.deferred import Deferred, deferred_linear, defers, is_linear


class Block(nn.Module):
    """Two projections around a norm and a nonlinearity; `due` puts their weight gradients off."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.up = Conv1D(6, 4) if kind is Conv1D else nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.down = Conv1D(4, 6) if kind is Conv1D else nn.Linear(6, 4, bias=False)
        self.due: Deferred | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.exp(self.norm(self._run(self.up, x)))
        return x + self._run(self.down, hidden * 2)

    def _run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x) if self.due is None or not defers(layer, x) else deferred_linear(layer, x, layer.bias, self.due)


def gradients(block: Block) -> dict[str, Tensor]:
    return {name: p.grad for name, p in block.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_split_backward_gives_the_gradients_of_a_full_backward(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    block = Block(kind).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    block(block(x)).square().sum().backward()
    expected, below = gradients(block), x.grad
    block.zero_grad()
    x.grad, block.due = None, Deferred()
    with block.due:
        block(block(x)).square().sum().backward()
    assert set(gradients(block)) == {name for name in expected if "norm" in name or "bias" in name}
    torch.testing.assert_close(x.grad, below)
    block.due.compute()
    torch.testing.assert_close(gradients(block), expected)
    block.due.compute()  # nothing is due any more
    torch.testing.assert_close(gradients(block), expected)


class Saved:
    """What autograd saves, in a wrapper that can be watched."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_the_first_half_frees_what_autograd_saved() -> None:
    block, alive = Block(nn.Linear), weakref.WeakSet()
    block.due = Deferred()

    def pack(tensor: Tensor) -> Saved:
        alive.add(saved := Saved(tensor))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        loss = block(torch.randn(3, 4, requires_grad=True)).sum()
    assert len(alive) > 6
    with block.due:
        loss.backward()
    assert not alive
    block.due.compute()
    assert block.up.weight.grad is not None


def test_a_frozen_weight_is_left_to_the_layer() -> None:
    layer, x = nn.Linear(4, 4), torch.zeros(1, 4, requires_grad=True)
    assert defers(layer, x)
    assert not defers(layer, x.detach())
    with torch.no_grad():
        assert not defers(layer, x)
    layer.weight.requires_grad_(False)
    assert not defers(layer, x)


def test_only_layers_with_their_own_forward_are_linear() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    replaced = nn.Linear(2, 2)
    replaced.forward = lambda x: x
    assert is_linear(nn.Linear(2, 2))
    assert is_linear(Conv1D(2, 2))
    assert not any(is_linear(module) for module in (Scaled(2, 2), replaced, nn.LayerNorm(2)))


def test_a_weight_that_is_computed_from_others_is_not_put_off() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    assert not defers(layer, torch.zeros(1, 3, requires_grad=True))


def test_a_weight_with_hooks_is_not_put_off() -> None:
    """Also fails should torch keep hooks under another name: the input-gradient pass would call them with None."""
    block = Block(nn.Linear)
    block.due, seen = Deferred(), []
    block.up.weight.register_hook(lambda gradient: seen.append(gradient.shape))
    block.down.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.shape))
    with block.due:
        block(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert sorted(seen) == sorted([block.up.weight.shape, block.down.weight.shape])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_that_are_computed_again_put_off_once(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    block, x = Block(nn.Linear).double(), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    block(x).square().sum().backward()
    expected = gradients(block)
    block.zero_grad()
    block.due = Deferred()
    with block.due:
        checkpoint(block, x, use_reentrant=use_reentrant).square().sum().backward()
    assert block.up.weight.grad is None
    block.due.compute()
    torch.testing.assert_close(gradients(block), expected)


def test_autocast_computes_in_sixteen_bits_and_keeps_gradients_in_thirty_two() -> None:
    torch.manual_seed(0)
    block, x = Block(nn.Linear), torch.randn(3, 4, requires_grad=True)
    found = []
    for due in (None, Deferred()):
        block.zero_grad()
        x.grad, block.due = None, due
        with torch.autocast("cpu", torch.bfloat16):
            out = block.up(x) if due is None else deferred_linear(block.up, x, block.up.bias, due)
        assert out.dtype == torch.bfloat16
        with due or nullcontext():
            out.float().square().sum().backward()
        if due is not None:
            assert block.up.weight.grad is None
            due.compute()
        assert block.up.weight.grad is not None
        assert block.up.weight.grad.dtype == torch.float32
        found.append((block.up.weight.grad, x.grad))
    torch.testing.assert_close(found[0], found[1])


def penalised(block: Block, x: Tensor) -> Tensor:
    """What a step with a gradient penalty and an adaptive weight of its loss computes."""
    out = block(x)
    (below,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (last,) = torch.autograd.grad(out.sum(), block.down.weight, retain_graph=True)
    return out.sum() * last.norm().detach() + below.square().sum()


def test_what_a_step_differentiates_by_itself_is_right_and_adds_nothing() -> None:
    torch.manual_seed(0)
    block, x = Block(nn.Linear).double(), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    penalised(block, x).backward()
    expected, below = gradients(block), x.grad
    block.zero_grad()
    x.grad, block.due = None, Deferred()
    loss = penalised(block, x)
    assert not gradients(block)
    with block.due:
        loss.backward()
    block.due.compute()
    torch.testing.assert_close(gradients(block), expected)
    torch.testing.assert_close(x.grad, below)


def test_what_is_put_off_is_its_own_where_a_parameter_takes_the_same_memory() -> None:
    torch.manual_seed(0)
    layer, pos = nn.Linear(4, 4).double(), nn.Parameter(torch.zeros(3, 4, dtype=torch.float64))
    parts = [torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    for x in parts:
        (layer(x) + pos.unsqueeze(0)).square().sum().backward()
    expected = layer.weight.grad
    layer.zero_grad()
    pos.grad = None
    due = [Deferred() for _ in parts]
    for x, one in zip(parts, due, strict=True):
        with one:
            (deferred_linear(layer, x, layer.bias, one) + pos.unsqueeze(0)).square().sum().backward()
    for one in due:
        one.compute()
    torch.testing.assert_close(layer.weight.grad, expected)


def test_results_can_be_changed_in_place() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 3, 4, requires_grad=True)
    out = deferred_linear(layer, x, layer.bias, Deferred())
    out.view(2, 3, 2, 2)[..., 0].mul_(2)
    assert torch.relu_(out).shape == (2, 3, 4)
    out.sum().backward()


def test_complex_weights_are_left_to_the_layer() -> None:
    assert not defers(nn.Linear(2, 2, dtype=torch.complex64), torch.zeros(1, 2, dtype=torch.complex64).requires_grad_())


@pytest.mark.parametrize("name", ["_backward_hooks", "_post_accumulate_grad_hooks"])
def test_torch_has_the_private_names_that_tell_of_hooks(name: str) -> None:
    assert private(nn.Linear(1, 1).weight, name) is None
