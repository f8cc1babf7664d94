"""A sharded tensor against the full one: values, gradients, what stays sharded and what is gathered.

Layout of all tests with processes: ranks 0-1 hold 3 and 2 of 5, ranks 0-2 hold 3, 0 and 2.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.sharded.tensor import Sharded, from_local
from ranks import run_ranks

LENGTHS = {2: (3, 2), 3: (3, 0, 2)}
SHAPES = {-1: (2, 4, 5), -2: (2, 5, 4), -3: (5, 2, 4)}
WORLDS = pytest.mark.parametrize("world", [2, 3])
Function = Callable[..., Any]


def start(world: int) -> TensorGroup:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    assert dist.get_world_size() == world
    return TensorGroup(dist.group.WORLD)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape))) + 0.5


def make(dim: int, group: TensorGroup, seed: int = 0) -> tuple[Sharded, Tensor, Tensor]:
    """A sharded tensor, the leaf that is its local one, and the full one."""
    whole = random(*SHAPES[dim], seed=seed).requires_grad_()
    lengths = LENGTHS[group.size]
    local = group.local_of(whole.detach(), dim, lengths).clone().requires_grad_()
    return from_local(local, dim, lengths, group), local, whole


def close(found: Tensor, expected: Tensor | None) -> None:
    assert not isinstance(found, Sharded)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def compare(group: TensorGroup, dim: int, function: Function, stays: bool | None, *others: Tensor) -> None:
    """Call `function` on the sharded and on the full tensor (and `others`), and compare values and gradients."""
    x, local, whole = make(dim, group)
    theirs = [other.clone().requires_grad_(other.is_floating_point()) for other in others]
    ours = [other.clone().requires_grad_(other.is_floating_point()) for other in others]
    before = group.moved
    found = function(x * 1, *ours)
    expected = function(whole * 1, *theirs)
    if stays is not None:
        assert isinstance(found, Sharded) == stays, f"{function} stays sharded: {not stays}"
        assert (group.moved == before) == stays
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    value = found.full() if isinstance(found, Sharded) else found
    close(value, expected)
    if not expected.requires_grad:
        assert not found.requires_grad
        return
    weights = random(*expected.shape, seed=7).to(expected.dtype)
    (value * weights).sum().backward()
    (expected * weights).sum().backward()
    close(local.grad, group.local_of(whole.grad, dim, LENGTHS[group.size]))
    for mine, other in zip(ours, theirs, strict=True):
        if other.grad is not None:
            close(mine.grad, other.grad)


def each(rank: int, world: int, cases: list[tuple[int, Function, bool | None, list[Tensor]]]) -> None:
    group = start(world)
    for dim, function, stays, others in cases:
        compare(group, dim, function, stays, *others)


def run(world: int, *cases: tuple[int, Function, bool | None, list[Tensor]]) -> None:
    run_ranks(world, each, world, list(cases), limit=60)


@WORLDS
def test_pointwise_functions_of_numbers_stay_sharded(world: int) -> None:
    functions: list[Function] = [
        lambda x: 2 * x + 1 - x / 3,
        lambda x: (1 - x) ** 2 + 2 / x + 2**x,
        lambda x: -x.pow(3).abs().sqrt().exp(),
        lambda x: torch.rsqrt(x).tanh() * torch.sigmoid(x),
        lambda x: F.gelu(x) + F.gelu(x, approximate="tanh"),
        lambda x: F.silu(F.relu(x - 1)) + F.softplus(x),
        lambda x: x.clamp(min=0.7) + torch.clamp(x, 0.6, 1.2),
        lambda x: x.masked_fill(x > 1, 0.0),
        lambda x: torch.where(x > 1, x, 0.5 * x),
        lambda x: x.float().double().contiguous().to(torch.float64).type_as(x),
        lambda x: x.to(x),
        lambda x: (x > 1) & ~(x >= 1.2) | torch.isnan(x),
        lambda x: x.detach() + x.data,
        lambda x: x.bfloat16(),
    ]
    run(world, *((dim, function, True, []) for dim in SHAPES for function in functions))


@WORLDS
def test_operations_in_place_write_to_the_local_tensor(world: int) -> None:
    def assigned(x: Tensor, y: Tensor) -> Tensor:
        same = x
        x += y
        x *= 2
        x.sub_(1).clamp_(min=0.3)
        x.masked_fill_(x > 2, 0.0)
        F.relu(x, inplace=True)
        assert same is x
        return same * x

    run(world, *((dim, assigned, True, [random(*SHAPES[dim], seed=1)]) for dim in SHAPES))


@WORLDS
def test_other_operands_are_matched_by_broadcasting(world: int) -> None:
    functions: list[Function] = [
        lambda x, y: x * y,
        lambda x, y: y - x,
        lambda x, y: torch.addcmul(x, y, x, value=0.3),
        lambda x, y: x.add(y, alpha=2),
        lambda x, y: torch.maximum(x, y) + x,
        lambda x, y: torch.where(y > 1, x, y),
        lambda x, y: x.clamp(max=y),
        lambda x, y: x * x + y * (y + x),
    ]
    cases = []
    for dim, shape in SHAPES.items():
        ones = [*shape]
        ones[dim] = 1
        for other in (shape, ones, shape[-1:], shape[-2:], (1, 1, 1), (), (3, *shape), (2, 1, 1, 1)):
            cases += [(dim, function, True, [random(*other, seed=3)]) for function in functions]
    run(world, *cases)


@WORLDS
def test_equal_shardings_meet_locally_and_others_in_full(world: int) -> None:
    def met(rank: int, world: int) -> None:
        group = start(world)
        x, local, whole = make(-1, group)  # [2, 4, 5]
        y, other_part, other = make(-2, group, seed=1)  # [2, 5, 4]
        found = x * y.mT + y.mT
        assert isinstance(found, Sharded)
        assert group.moved == 0
        expected = whole * other.mT + other.mT
        close(found.full(), expected)
        for function in (lambda a, b: a @ b, lambda a, b: a[:, :2, :4] + b[:, :2], lambda a, b: a[0].T - b[1]):
            ours, theirs = function(x, y), function(whole, other)
            found, expected = found + ours.sum(), expected + theirs.sum()
            close(ours.full() if isinstance(ours, Sharded) else ours, theirs)
        found.sin().sum().backward()
        expected.sin().sum().backward()
        close(local.grad, group.local_of(whole.grad, -1, LENGTHS[world]))
        close(other_part.grad, group.local_of(other.grad, -2, LENGTHS[world]))
        elsewhere = from_local(torch.ones(2, 4, LENGTHS[world][::-1][rank]), -1, LENGTHS[world][::-1], group)
        close(x + elsewhere, whole + 1)

    run_ranks(world, met, world, limit=60)


@WORLDS
def test_functions_along_other_dims_stay_sharded(world: int) -> None:
    functions: list[Function] = [
        lambda x: x.mean(-1, keepdim=True),
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
        lambda x: x.sum(dim=-1),
        lambda x: x.sum(0) + x.mean((0, -1))[..., None],
        lambda x: x.amax(-1) - x.logsumexp(-1),
        lambda x: x.norm(2, -1) + torch.linalg.vector_norm(x, dim=-1),
        lambda x: F.softmax(x, dim=-1) + x.softmax(0) + F.log_softmax(x, dim=-1, dtype=torch.float64),
        lambda x: F.normalize(x, dim=-1),
        lambda x: F.layer_norm(x, (4,)),
        lambda x: F.rms_norm(x, (4,)),
        lambda x: x.argmax(-1),
    ]
    weighted: list[Function] = [
        lambda x, w, b: F.layer_norm(x, (4,), w, b),
        lambda x, w, b: F.layer_norm(x, (4,), bias=b),
        lambda x, w, b: F.rms_norm(x, (4,), w, eps=1e-5),
        lambda x, w, b: torch.layer_norm(x, (4,), w, b),
    ]
    linear: list[Function] = [lambda x, w, b: F.linear(x, w, b), lambda x, w, b: F.linear(x, w) + x @ w.T]
    run(
        world,
        *((-2, function, True, []) for function in functions),
        *((-2, function, True, [random(4), random(4, seed=1)]) for function in weighted),
        *((dim, function, True, [random(6, 4), random(6)]) for dim in (-2, -3) for function in linear),
        (-3, lambda x: x.mean((1, 2)) + x.sum(-1).sum(-1), True, []),
        (-2, lambda x: x.std(dim=-1, correction=0) + x.var(-1, unbiased=False), world == 2, []),
    )


@WORLDS
def test_functions_along_the_sharded_dim_gather(world: int) -> None:
    functions: list[Function] = [
        lambda x: x.mean(-2),
        lambda x: x.sum(),
        lambda x: x.softmax(1),
        lambda x: x.cumsum(1),
        lambda x: F.layer_norm(x, (5, 4)),
        lambda x: x.max(-1).values,
        lambda x: x.var(1) + x.norm(),
        lambda x: x[:, 0],
        lambda x: x[:, 1:],
        lambda x: x[:, [0, 2]],
        lambda x: x[torch.ones(2, 5, dtype=torch.bool)],
        lambda x: x[..., torch.tensor([0, 1])],
        lambda x: x.flip(1),
        lambda x: torch.cat([x, x], 0),
        lambda x: torch.stack((x, 2 * x)).sum(0),
        lambda x: torch.einsum("bsd,btd->bst", x, x),
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: x.view(10, 4),
        lambda x: x.mT @ x,
        lambda x: list(x)[1],
    ]
    run(
        world,
        *((-2, function, False, []) for function in functions),
        (-1, lambda x, w: F.linear(x, w), False, [random(3, 5)]),
        (-1, lambda x, w: F.layer_norm(x, (5,), w), False, [random(5)]),
        (-1, lambda x, w: w @ x, False, [random(6, 4)]),
    )


@WORLDS
def test_views_and_indices_that_keep_the_sharded_dim_stay_sharded(world: int) -> None:
    mask = torch.tensor([[True, False, True, True], [False, True, True, False]])
    rows = torch.tensor([1, 0, 1])
    logits: list[Function] = [
        lambda x: x[..., :-1, :],
        lambda x: x[:, 1:],
        lambda x: x[..., :-1, :].contiguous().view(-1, 5),
        lambda x: x[..., :-1, :].contiguous().view(-1, x.size(-1)),
        lambda x: x.reshape(8, 5),
        lambda x: x.view((4, 2, 5)),
        lambda x: x.reshape(1, -1, 2, 5).flatten(0, 1),
        lambda x: x.flatten(0, 1),
        lambda x: x.flatten(end_dim=-2),
        lambda x: x[mask],
        lambda x: x[rows],
        lambda x: x[rows, 2],
        lambda x: x[rows, :, slice(0, None)],
        lambda x: x[rows, rows],
        lambda x: x[0],
        lambda x: x[1, -1],
        lambda x: x[None, ..., None],
        lambda x: x[:, None],
        lambda x: x[...],
        lambda x: x[:, :, 0:5],
        lambda x: x[torch.zeros(2, 4, dtype=torch.bool)],
        lambda x: x[torch.zeros(2, 4, dtype=torch.bool)].view(-1, 5),
    ]
    hidden: list[Function] = [
        lambda x: x[..., 1:],
        lambda x: x[0],
        lambda x: x[:, :, None] + x[..., None, 1:2],
        lambda x: x[..., 0],
        lambda x: x.view(2, 5, 2, -1),
        lambda x: x.view(2, 5, 2, -1).flatten(2),
        lambda x: x.transpose(1, 2),
        lambda x: x.permute(2, 0, 1),
        lambda x: x.mT.swapaxes(0, 1),
        lambda x: x.movedim(0, -1),
        lambda x: x.unsqueeze(1) + x.unsqueeze(-1).squeeze(-1).unsqueeze(0),
        lambda x: x.squeeze() + x[:1].squeeze(0),
    ]
    run(
        world,
        *((-1, function, True, []) for function in logits),
        *((-2, function, True, []) for function in hidden),
    )


@WORLDS
def test_clones_are_full_because_they_are_made_to_write_to(world: int) -> None:
    def written(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 0] = 3.0
        return x

    def copied(rank: int, world: int) -> None:
        x, _, whole = make(-2, start(world))
        found = copy.deepcopy(x)
        close(found, whole)
        assert found.is_leaf
        assert found.requires_grad
        close(copy.deepcopy(x.detach()), whole.detach())

    run(world, (-2, written, False, []), (-1, written, False, []))
    run_ranks(world, copied, world, limit=60)


def test_writes_that_would_go_to_a_gathered_copy_are_refused() -> None:
    def refused(rank: int) -> None:
        group = start(2)
        x = make(-2, group)[0].detach()
        other = random(2, 5, 4, seed=2)
        index = torch.tensor([0])
        writes: list[Function] = [
            lambda: x.__setitem__((slice(None), 0), 1.0),
            lambda: x.copy_(other),
            lambda: x.index_put_((index,), other[:1]),
            lambda: x.masked_scatter_(other > 1, other),
            lambda: x.index_add_(0, index, other[:1]),
            lambda: x.scatter_(0, index.view(1, 1, 1), 1.0),
            lambda: x.add_(from_local(random(2, 5, 2), -1, (2, 2), group)),
            lambda: torch.add(other, other, out=x),
            lambda: F.rrelu(x, inplace=True),
            lambda: x.transpose_(0, 1),
            lambda: setattr(x, "data", other),
        ]
        before = x.local.clone()
        for write in writes:
            with pytest.raises(ConfigError, match=r"clone\(\)"):
                write()
        assert x.local.equal(before)
        whole = other.clone()
        whole[:] = x  # a plain tensor takes the full one
        close(whole, x.full())
        whole.add_(x).copy_(x)
        close(whole, x.full())

    run_ranks(2, refused, limit=60)


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

    run_ranks(world, asked, world, limit=60)


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

    run_ranks(world, hooked, world, limit=60)


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

    run_ranks(2, refused, limit=60)


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

    run_ranks(world, compared, world, limit=60)


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

    run_ranks(world, cast, world, limit=60)


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

    results = run_ranks(world, dropped, world, limit=60)
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

    run_ranks(world, counted, world, limit=60)
