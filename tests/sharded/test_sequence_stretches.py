"""Views, stretches and indices of a tensor of which each rank holds some tokens, and writes to it.

The layout of all tests is that of `sequence_cases`.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mm5d.config.errors import ConfigError
from ranks import run_ranks
from sharded.sequence_cases import LAYOUTS, WORLD, B, Function, Ranks, S, W, on, random, run


def test_sequences_in_a_row_stay_sharded() -> None:
    functions: list[Function] = [
        lambda x: x.view(-1, W),
        lambda x: x.reshape(B * S, -1) * 2,
        lambda x: x.flatten(0, 1).view(B, S, W) + x,
        lambda x: x.view(-1, W).softmax(-1).view(B, -1, W),
        lambda x: x.flatten(end_dim=-2),
        lambda x: x.view(B, S, 1, W).transpose(1, 2),
        lambda x: x.view(B, S, W, 1).transpose(1, 2).flatten(2).view(B, W, S),
        lambda x: x[..., :-1, :].contiguous().view(-1, W),
        lambda x: x[:, 1:].reshape(-1, W).view(B, S - 1, W) * x[:, 1:],
        lambda x: x[:, 1:].reshape(-1, W).relu().view_as(x[:, 1:]),
        lambda x: x.sum(-1).view(-1),
        lambda x: x.sum(-1).flatten().view(B, S) + x[..., 0],
        lambda x: x.unsqueeze(0).flatten(0, 2),
    ]
    run(*on(True, *functions))
    one: list[Function] = [
        lambda x: x.view(-1, W),
        lambda x: x.squeeze(0).unsqueeze(0) + x.view(S, W),
        lambda x: x[:, 1:].view(-1, W),
        lambda x: x[0, 1:-1],
        lambda x: x.reshape(S, W).reshape(1, S, W),
    ]
    several: list[Function] = [
        lambda x: x.flatten(0, 2),
        lambda x: x.flatten(1, 2),
        lambda x: x.flatten(0, 1).view(2, 3, S, W),
        lambda x: x.flatten(0, 2).view(2, 3, S, W),
        lambda x: x.flatten(1, 2).view(2, 3, S, W) + x.flatten(0, 1).view(x.shape),
        lambda x: x.view(6, S, W).view(-1, W).view(6, S, W)[:, 2:],
    ]
    run(*on(True, *one, shape=(1, S, W)), *on(True, *several, shape=(2, 3, S, W)))


def test_views_that_mix_tokens_gather() -> None:
    functions: list[Function] = [
        lambda x: x.view(B, -1),
        lambda x: x.flatten(1),
        lambda x: x.transpose(0, 1).flatten(0, 1),
        lambda x: x.view(-1),
        lambda x: x.view(-1, W).view(S, B, W),
        lambda x: x.view(-1, W)[3:].view(-1),
        lambda x: x[:, :6].reshape(B * 3, 2, W),
    ]
    run(*on(None, *functions))


def test_stretches_of_tokens_stay_sharded() -> None:
    functions: list[Function] = [
        lambda x: x[:, :-1],
        lambda x: x[:, 1:],
        lambda x: x[..., :-1, :],
        lambda x: x[..., 1:, :],
        lambda x: x[:, 2:5] * x[:, 2:5].exp(),
        lambda x: x[:, 2:][:, :-2],
        lambda x: x[:, -3:],
        lambda x: x[:, :3] + x[:, :3].mean(-1, keepdim=True),
        lambda x: x[0, 1:],
        lambda x: x[:1, 1:, ..., None],
        lambda x: x[:, 1:2],
        lambda x: x[:, 1:, :2],
        lambda x: x.flatten(0, 1)[2 : S + 3],
    ]
    run(*on(True, *functions))


def test_stretches_of_other_ranks_meet_in_full() -> None:
    functions: list[Function] = [
        lambda x: x[:, 1:] - x[:, :-1],
        lambda x: x[:, :3] * x[:, 3:6],
        lambda x: F.mse_loss(x[:, 1:], x[:, :-1].detach()),
        lambda x: (x[:, 1:] * x[:, :-1]).sum(-1).exp(),
    ]
    run(*on(False, *functions))


def test_indices_of_tokens_are_right() -> None:
    mask = torch.tensor([[1, 0, 1, 0, 0, 1, 0], [0, 1, 0, 0, 1, 1, 1]], dtype=torch.bool)
    rows, columns = torch.tensor([0, 1, 1]), torch.tensor([6, 0, 3])
    functions: list[Function] = [
        lambda x: x[:, 0],
        lambda x: x[:, -1] + x[:, 3],
        lambda x: x[mask],
        lambda x: x[mask].view(-1, W)[1:],
        lambda x: x.flatten(0, 1)[mask.flatten()],
        lambda x: x[rows, columns],
        lambda x: x[:, columns],
        lambda x: x[:, [0, 2]],
        lambda x: x[:, ::2],
        lambda x: x[:, 5:2],
        lambda x: x.masked_select(mask.unsqueeze(-1)),
        lambda x: x[x.sum(-1) > 5],
        lambda x: x[1, 2, 3],
        lambda x: x[torch.zeros(B, S, dtype=torch.bool)],
    ]
    in_parts: list[Function] = [lambda x: x[0], lambda x: x[rows], lambda x: x[None, ..., None], lambda x: x[:1]]
    run(*on(False, *functions), *on(True, *in_parts))


def test_writes_in_place_go_to_the_local_tensor() -> None:
    mask = torch.tensor([[1, 0, 1, 0, 0, 1, 0], [0, 1, 0, 0, 1, 1, 1]], dtype=torch.bool).unsqueeze(-1)

    def written(x: Tensor, y: Tensor) -> Tensor:
        same = x
        x += y
        x *= 2
        x.sub_(1).clamp_(min=0.3)
        x.masked_fill_(mask, 0.0)
        x[:, 2], x[..., 0], x[1, -3:] = 0.7, 0.2, 0.4
        F.relu(x, inplace=True)
        assert same is x
        return same * x

    def copied(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone()
        x[:, 0] = y[..., 0, :]
        x[mask.expand_as(x)] = 0.5
        return x

    run(
        *on(True, written, others=(random(B, S, W, seed=1),)),
        *on(True, written, others=(random(W, seed=1),)),
        *on(False, copied, others=(random(B, S, W, seed=1),), kind="computed"),
    )


def test_writes_of_tensors_to_some_tokens_are_refused_on_every_rank() -> None:
    def refused(rank: int) -> None:
        ranks = Ranks()
        for layout in LAYOUTS.values():
            sequence = ranks.share(layout)
            x = sequence.wrapped(sequence.local_of(random(B, S, W), -2, sequence.lengths).clone(), -2)
            writes: list[Function] = [
                lambda x=x: x.__setitem__((slice(None), 0), random(W)),
                lambda x=x: x.index_fill_(1, torch.tensor([0]), 0.0),
                lambda x=x: x[:, 1:].add_(x[:, :-1]),
            ]
            for write in writes:
                with pytest.raises(ConfigError, match=r"clone\(\)"):
                    write()

    run_ranks(WORLD, refused)
