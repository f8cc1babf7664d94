"""Functions of a sharded tensor against those of the full one: values, gradients, what stays sharded, what is gathered.

The layout of all tests is that of `tensor_cases`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.sharded.tensor import Sharded, from_local
from ranks import run_ranks
from sharded.tensor_cases import LENGTHS, SHAPES, WORLDS, Function, close, make, random, run, start


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

    run_ranks(world, met, world)


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
def test_numbers_are_written_to_local_entries(world: int) -> None:
    def writing(*index: Any) -> Function:
        def written(x: Tensor) -> Tensor:
            x[index] = -7.0
            return x * x

        return written

    indices: list[tuple[Any, ...]] = [
        (slice(None), slice(None), [0, 3]),  # Chameleon bans tokens so
        (..., torch.tensor([4, 1, 4])),
        (..., -1),
        (slice(None), 0),
        (0, slice(1, 3)),
        (1,),
        (torch.tensor([True, False]), slice(None), slice(2, None)),
        (torch.arange(40).view(2, 4, 5) % 3 == 0,),
        (torch.tensor([0, 1]), slice(None), torch.tensor([3, 0])),
        (None, 0, ..., slice(0, 4, 2)),
        (),
    ]
    run(world, *((-1, writing(*index), True, []) for index in indices), (-2, writing(slice(None), 0), True, []))


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
    run_ranks(world, copied, world)


def test_writes_that_would_go_to_a_gathered_copy_are_refused() -> None:
    def refused(rank: int) -> None:
        group = start(2)
        x = make(-2, group)[0].detach()
        other = random(2, 5, 4, seed=2)
        index = torch.tensor([0])
        writes: list[Function] = [
            lambda: x.__setitem__((slice(None), 0), other[:, 0]),
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

    run_ranks(2, refused)
