"""A tensor of which each rank holds some tokens, beside full ones and along other dims: what stays sharded.

The layout of all tests is that of `sequence_cases`.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sharded.sequence_cases import B, Function, S, W, on, random, run
from sweeps import swept

pytestmark = pytest.mark.processes


def test_pointwise_functions_stay_sharded() -> None:
    functions: list[Function] = [
        lambda x: 2 * x + 1 - x / 3,
        lambda x: -x.pow(3).abs().sqrt().exp() + torch.rsqrt(x).tanh() * torch.sigmoid(x),
        lambda x: F.gelu(x) + F.silu(F.relu(x - 1)) + F.softplus(x),
        lambda x: torch.where(x > 1, x, 0.5 * x).masked_fill(x > 1.2, 0.0),
        lambda x: x.float().double() + x.detach(),
        lambda x: (x > 1) & ~(x >= 1.2),
        lambda x: x.argmax(-1),
    ]
    run(*on(True, *functions), *on(True, *functions, shape=(1, S, W)), *on(True, *functions, dim=-3, shape=(S, B, W)))


SHAPES = {
    "as the whole": (B, S, W),
    "one for all tokens": (B, 1, W),
    "one for each token": (S, 1),
    "of a token": (W,),
    "of the batch": (B, 1, 1),
    "a number": (),
    "of more dims": (3, B, S, W),
}


@pytest.mark.parametrize("kind", swept(["parameters", "computed", "leaves"], "computed"))
def test_full_tensors_beside_local_ones_get_the_gradient_of_one_process(kind: str) -> None:
    functions: list[Function] = [
        lambda x, y: x * y,
        lambda x, y: y - x,
        lambda x, y: torch.addcmul(x, 1 + y, x, value=0.3),
        lambda x, y: torch.where(y > 1, x, y) + torch.maximum(x, y),
        lambda x, y: x * x + y * (y + x),
        lambda x, y: x.mul(y.exp()).add(y, alpha=2),
    ]
    shapes = [random(*shape, seed=3) for shape in SHAPES.values()]
    run(*(case for other in shapes for case in on(True, *functions, others=(other,), kind=kind)))


@pytest.mark.parametrize("kind", swept(["parameters", "computed", "leaves"], "leaves"))
def test_norms_and_projections_stay_sharded(kind: str) -> None:
    norms: list[Function] = [
        lambda x, w, b: F.layer_norm(x, (W,), w, b),
        lambda x, w, b: F.layer_norm(x, (W,), 1 + w, b * 2),
        lambda x, w, b: F.rms_norm(x, (W,), w, eps=1e-5) + b,
        lambda x, w, b: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + w) + b,
        lambda x, w, b: w.to(torch.float32).double() * x + b,
    ]
    linear: list[Function] = [
        lambda x, w, b: F.linear(x, w, b),
        lambda x, w, b: x @ w.T + b,
        lambda x, w, b: F.linear(F.linear(x, w, b), w.T),  # tied: used twice, and in another way
        lambda x, w, b: torch.matmul(x[:, 1:], w.t()) + b,
        lambda x, w, b: F.linear(x.flatten(0, 1), w, b),
    ]
    run(
        *on(True, *norms, others=(random(W, seed=1), random(W, seed=2)), kind=kind),
        *on(True, *linear, others=(random(6, W), random(6)), kind=kind),
        *on(True, *linear, others=(random(6, W), random(6)), kind=kind, shape=(1, S, W)),
    )


def test_functions_along_other_dims_stay_sharded() -> None:
    functions: list[Function] = [
        lambda x: x.mean(-1, keepdim=True) * x,
        lambda x: x.sum(-1) + x.amax(-1) - x.logsumexp(-1),
        lambda x: x.sum(0) + x.mean((0, -1))[..., None],
        lambda x: F.softmax(x, dim=-1) + x.log_softmax(0),
        lambda x: F.normalize(x, dim=-1) + x.norm(2, -1)[..., None],
        lambda x: x.cumsum(-1) + x.cumsum(0),
        lambda x: x.transpose(1, 2),
        lambda x: x.permute(2, 0, 1) * x.mT.movedim(1, 0),
        lambda x: x.unsqueeze(1).squeeze(1)[..., None],
    ]
    run(*on(True, *functions))


def test_functions_along_tokens_gather() -> None:
    index = torch.tensor([[0], [S - 1]])
    functions: list[Function] = [
        lambda x: x.sum(),
        lambda x: x.mean(1),
        lambda x: x.mean(),
        lambda x: x.softmax(1),
        lambda x: x.cumsum(1),
        lambda x: x.max(1).values + x.var(1),
        lambda x: x.flip(1).roll(1, 1),
        lambda x: torch.cat([x, x], 1),
        lambda x: torch.cat([x[:, :1], x], 1),
        lambda x: torch.stack((x, 2 * x)).sum(0),
        lambda x: torch.einsum("bsd,btd->bst", x, x),
        lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1],
        lambda x: x.gather(1, index.unsqueeze(-1).expand(-1, -1, W)),
        lambda x: torch.take_along_dim(x, index.unsqueeze(-1), 1),
        lambda x: F.conv1d(x.mT, torch.ones(2, W, 3, dtype=x.dtype), padding=1),
        lambda x: x.chunk(2, 1)[1] + x.split(4, 1)[1],
        lambda x: x.unbind(1)[2] + list(x)[1][:2],
        lambda x: x.topk(2, 1).values.sort(1).values,
        lambda x: x.clone(),
    ]
    run(*on(False, *functions), *on(False, *functions[:2], shape=(1, S, W)))


def test_pooled_tokens_have_the_gradient_of_one_process() -> None:
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 0], [0, 1, 0, 0, 1, 1, 1]], dtype=torch.float64)
    functions: list[Function] = [
        lambda x, w, m: F.linear(x[:, 0], w).tanh(),
        lambda x, w, m: F.linear(x[:, -1], w),
        lambda x, w, m: F.linear((x * m.unsqueeze(-1)).sum(1) / m.sum(1, keepdim=True), w),
        lambda x, w, m: F.linear(x, w)[torch.arange(B), m.cumsum(1).argmax(1)],
        lambda x, w, m: (F.linear(x, w) * m[..., None])[:, 2:].amax(1),
        lambda x, w, m: F.normalize(x.mean(1), dim=-1) @ F.normalize(F.linear(x[:, 0], w), dim=-1).T[:W, :1],
    ]
    run(*on(False, *functions, others=(random(W, W), mask)))
