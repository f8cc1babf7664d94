"""A sharded tensor within torch: its metadata, gradients, checkpoints, modes, autocast and random numbers.

The layout of all tests is that of `tensor_cases`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.sharded.tensor import Sharded, from_local
from ranks import run_ranks
from sharded.tensor_cases import LENGTHS, WORLDS, close, compare, make, random, run, start


@WORLDS
def test_metadata_is_that_of_the_full_tensor_without_communication(world: int) -> None:
    def asked(rank: int, world: int) -> None:
        group = start(world)
        x, local, whole = make(-2, group)
        y = x * 2
        for a, b in ((x, whole), (y, whole * 2), (x.detach().float(), whole.detach().float())):
            assert isinstance(a, Tensor)
            assert a.shape == a.size() == torch.Size([2, 5, 4]) == Tensor.shape.__get__(a)  # type: ignore[attr-defined]
            assert (a.size(1), a.size(dim=-2), len(a), a.dim(), a.ndim, a.numel()) == (5, 5, 2, 3, 3, 40)
            assert torch.numel(a) == 40
            for name in ("dtype", "device", "requires_grad", "layout", "is_leaf", "is_cuda", "is_meta"):
                assert getattr(a, name) == getattr(b, name), name
            assert (a.grad_fn is None) == (b.grad_fn is None)
            assert a.is_floating_point()
            assert torch.is_floating_point(a)
            assert a.element_size() == b.element_size()
            for like in (torch.zeros_like(a), torch.ones_like(a, dtype=torch.bool), a.new_zeros(a.shape)):
                assert type(like) is Tensor
                assert like.shape == b.shape
            assert "local of rank" in repr(a)
            assert "local of rank" in f"{a}"
        assert (x.sharded_dim, x.lengths, x.group) == (-2, LENGTHS[world], group)
        assert x.local is local
        assert not x.detach().requires_grad_().local.grad_fn
        assert group.moved == 0
        assert y.requires_grad
        assert not torch.no_grad()(lambda: y + 1)().requires_grad

    run_ranks(world, asked, world)


@WORLDS
def test_gradients_of_a_sharded_tensor_are_sharded(world: int) -> None:
    def hooked(rank: int, world: int) -> None:
        group = start(world)
        x, local, whole = make(-2, group)
        weights = random(2, 5, 4, seed=5)
        seen: list[Tensor] = []
        y, z = x * 2, whole * 2
        y.register_hook(lambda g: seen.append(g) or g * 3)
        z.register_hook(lambda g: g * 3)
        (y.mean(-1, keepdim=True) * weights).sum().backward()
        (z.mean(-1, keepdim=True) * weights).sum().backward()
        assert isinstance(seen[0], Sharded)
        assert isinstance(x.grad, Sharded)
        close(x.grad.full(), whole.grad)
        y, z = x * 2, whole * 2
        (found,) = torch.autograd.grad(y.cumsum(1) * y, [y], grad_outputs=weights)
        (expected,) = torch.autograd.grad(z.cumsum(1) * z, [z], grad_outputs=weights)
        assert isinstance(found, Sharded)
        close(found.full(), expected)
        local.grad = whole.grad = None
        torch.autograd.backward([x * x], [weights])
        (whole * whole).backward(weights)
        close(x.grad.full(), whole.grad)

    run_ranks(world, hooked, world)


class PassThrough(torch.autograd.Function):
    """What sharded data parallelism puts around the inputs of a module: it bypasses torch functions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@WORLDS
def test_it_passes_through_autograd_functions(world: int) -> None:
    def passed(x: Tensor) -> Tensor:
        x = PassThrough.apply(x)
        assert x.shape == (2, 5, 4)
        return PassThrough.apply(x * 2) * x

    run(world, (-2, passed, True, []), (-2, lambda x: PassThrough.apply(x).cumsum(1), False, []))


def test_kernels_that_bypass_torch_functions_are_refused() -> None:
    def refused(rank: int) -> None:
        x = make(-2, start(2))[0]
        with torch._C.DisableTorchFunctionSubclass(), pytest.raises(ConfigError, match=r"x\.full\(\)"):
            torch.add(x, 1)

    run_ranks(2, refused)


@WORLDS
def test_checkpoints_take_return_and_recompute_it(world: int) -> None:
    kinds: list[type] = []

    def block(x: Tensor, w: Tensor) -> Tensor:
        kinds.append(type(x))
        x = x + F.silu(x * w)
        return F.layer_norm(x, (4,), w) + x.cumsum(1)[:, :1] + F.dropout(x, 0.0)

    def once(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(block, x, w, use_reentrant=False)

    def nested(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(lambda x, w: once(once(x, w) * 2, w), x, w, use_reentrant=False)

    def by_keyword(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(lambda **kwargs: block(**kwargs), x=x, w=w, use_reentrant=False)

    def offloaded(x: Tensor, w: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return block(x, w)

    def compared(rank: int, world: int) -> None:
        group = start(world)
        for function, times in ((once, 2), (nested, 5), (by_keyword, 2), (offloaded, 1)):
            kinds.clear()
            compare(group, -2, function, None, random(4))
            assert kinds.count(Sharded) == kinds.count(Tensor) == times

    run_ranks(world, compared, world)


@WORLDS
def test_modes_see_it_and_it_works_under_them(world: int) -> None:
    class Names(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def seen(x: Tensor) -> Tensor:
        with Names() as inner, Names() as outer:
            result = (x * 2).cumsum(1) + x
        assert inner.names[:2] == outer.names[:2] == ["mul", "cumsum"]
        return result

    run(world, (-2, seen, None, []))


@WORLDS
def test_autocast_acts_on_the_local_tensor(world: int) -> None:
    def cast(rank: int, world: int) -> None:
        group = start(world)
        x, local, whole = make(-2, group)
        w = random(6, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, expected = F.linear(x.float(), w.float()), F.linear(whole.float(), w.float())
            assert found.dtype == expected.dtype == torch.bfloat16
            assert isinstance(found, Sharded)
            assert F.softmax(found, -1).dtype == F.softmax(expected, -1).dtype
        torch.testing.assert_close(found.full(), expected)
        found.float().sum().backward()
        expected.float().sum().backward()
        torch.testing.assert_close(local.grad, group.local_of(whole.grad, -2, LENGTHS[world]))

    run_ranks(world, cast, world)


@WORLDS
def test_dropout_draws_independently_on_each_rank_and_equally_afterwards(world: int) -> None:
    def dropped(rank: int, world: int) -> tuple[Tensor, Tensor]:
        group = start(world)
        torch.manual_seed(1)
        local = torch.ones(LENGTHS[world][rank] * 1000, requires_grad=True)
        x = from_local(local, 0, [length * 1000 for length in LENGTHS[world]], group)
        y = F.dropout(x, 0.25)
        assert isinstance(y, Sharded)
        assert F.dropout(x, 0.25, training=False) is x
        assert F.dropout(x, 0.0) is x
        assert not F.dropout(x, 1.0).any()
        y.sum().backward()
        close(local.grad, y.local)
        z = F.dropout(x.detach() * 1, 0.25, inplace=True)
        assert z.unique().tolist() == pytest.approx([0, 4 / 3])
        whole = y.full()
        assert abs(float((whole == 0).float().mean()) - 0.25) < 0.03
        return whole, torch.rand(3)

    results = run_ranks(world, dropped, world)
    for whole, after in results:
        assert after.equal(results[0][1])
        assert not whole[:2000].equal(whole[-2000:])


@WORLDS
def test_what_is_gathered_for_several_arguments_is_gathered_once(world: int) -> None:
    def counted(rank: int, world: int) -> None:
        group = start(world)
        x = make(-2, group)[0]
        x.full()
        once = group.moved
        F.scaled_dot_product_attention(x, x, x)
        assert group.moved == pytest.approx(2 * once)

    run_ranks(world, counted, world)
