"""A tensor of which each rank holds some tokens against the full one: values, gradients, what stays sharded.

Layout of all tests with processes: ranks 0-3. They share sequences of 7 tokens in fours, in twos (ranks 0-1 and 2-3 do
the same) or as two context parallel ranks of two tensor parallel ranks each; see `LAYOUTS`.

The gradient of a local tensor is R times that of one process, R being the context parallel degree. The mean over ranks
of a parameter's gradient is that of one process; the gradient of a full tensor is, without any mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.context_parallel.balance.distributions import uniform, zigzag
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.sharded.sequence import Holders, ShardedSequence
from lightning_mm5d.sharded.tensor import Sharded
from lightning_mm5d.sharded.token_split import TokenSplit
from ranks import run_ranks

WORLD, B, S, W = 4, 2, 7, 5
Function = Callable[..., Any]


@dataclass(frozen=True)
class Layout:
    """A shared sequence: ranges of each context parallel rank, and how many tensor parallel ranks shard them."""

    ranges: tuple[tuple[tuple[int, int], ...], ...]
    tensor: int = 1

    @property
    def split(self) -> TokenSplit:
        return TokenSplit.of(self.ranges, S)


LAYOUTS = {
    "two stretches": Layout(uniform(S, 2).ranges),
    "zigzag over two": Layout(zigzag(S, 2).ranges),
    "zigzag over four, of which one token is left": Layout(zigzag(S, 4).ranges),
    "scattered over four": Layout((((0, 1), (3, 4)), ((1, 3),), ((6, 7),), ((4, 6),))),
    "ranks without tokens": Layout((((2, 5),), (), ((0, 2), (5, 7)), ())),
    "two of two": Layout(zigzag(S, 2).ranges, tensor=2),
    "two of two, with fewer tokens than ranks": Layout((((3, 4),), ((0, 3), (4, 7))), tensor=2),
    "two of two, of which one has none": Layout(((), ((0, 7),)), tensor=2),
}


class Ranks:
    """The groups of this rank, and the leaves that are parameters."""

    def __init__(self) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=20))
        rank = dist.get_rank()
        pairs = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
        groups = [[dist.new_group(ranks) for ranks in kind] for kind in pairs]
        self.all = TensorGroup(dist.group.WORLD)
        self.neighbours = TensorGroup(groups[0][rank // 2])
        self.across = TensorGroup(groups[1][rank % 2])
        self.averaged: set[int] = set()

    def averages(self, x: Tensor) -> bool:
        return id(x) in self.averaged

    def share(self, layout: Layout) -> ShardedSequence:
        """The sequence of a layout, over all of its ranks."""
        degree = len(layout.ranges)
        if layout.tensor == 1:
            ranks = self.all if degree == WORLD else self.neighbours
            return ShardedSequence(layout.split, Holders(ranks, degree, self.averages))
        holders = Holders(self.across, degree, self.averages)
        holders.finer = Holders(self.all, degree, self.averages, self.neighbours, coarser=holders)
        return ShardedSequence(layout.split, holders).finer

    def mean(self, x: Tensor) -> Tensor:
        """Over all ranks; those that do the same weigh the same."""
        return self.all.sum(x) / WORLD


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape))) + 0.5


def close(found: Tensor, expected: Tensor, what: str = "") -> None:
    assert not isinstance(found, Sharded)
    torch.testing.assert_close(
        found, expected, rtol=1e-12, atol=1e-12, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


@dataclass(frozen=True)
class Case:
    """What is called on a sharded tensor and on the full one.

    Args:
        function: takes the tensor and `others`.
        stays: whether the result is in parts, and nothing was communicated for it; None where it may be either.
        shape: of the tensor.
        dim: that counts tokens.
        others: further tensors; those of floats get gradients.
        kind: what these are: ``parameters``, whole values that were ``computed`` before, or ``leaves`` of another kind.
    """

    function: Function
    stays: bool | None = None
    shape: tuple[int, ...] = (B, S, W)
    dim: int = -2
    others: tuple[Tensor, ...] = ()
    kind: str = "parameters"


def compare(ranks: Ranks, sequence: ShardedSequence, case: Case, where: str) -> None:
    whole = random(*case.shape).requires_grad_()
    local = sequence.local_of(whole.detach(), case.dim, sequence.lengths).clone().requires_grad_()
    theirs, ours = ([other.clone() for other in case.others] for _ in range(2))
    for other in (*theirs, *ours):
        other.requires_grad_(other.is_floating_point())
    ranks.averaged = {id(other) for other in ours} if case.kind == "parameters" else set()
    taken = [other * 1 for other in ours] if case.kind == "computed" else ours
    x = sequence.wrapped(local, case.dim) * 1
    before = sequence.holders.ranks.moved
    found, expected = case.function(x, *taken), case.function(whole * 1, *theirs)
    if case.stays is not None:
        assert isinstance(found, Sharded) == case.stays, f"{where}: stays sharded: {not case.stays}"
    if case.stays:
        assert sequence.holders.ranks.moved == before, f"{where}: something was communicated"
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), where
    value = found.full() if isinstance(found, Sharded) else found
    close(value, expected, where)
    assert value.requires_grad == expected.requires_grad, where
    if not expected.requires_grad:
        return
    weights = random(*expected.shape, seed=7).to(expected.dtype)
    (value * weights).sum().backward()
    (expected * weights).sum().backward()
    own = sequence.local_of(whole.grad, case.dim, sequence.lengths)  # type: ignore[arg-type]
    gradient = torch.zeros_like(local) if local.grad is None else local.grad
    close(gradient, own * sequence.holders.degree, f"{where}: gradient of the local tensor")
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.grad is None) == (other.grad is None), where
        if other.grad is not None and mine.grad is not None:
            got = ranks.mean(mine.grad) if case.kind == "parameters" else mine.grad
            close(got, other.grad, f"{where}: gradient of another")


def each(rank: int, cases: list[Case]) -> None:
    ranks = Ranks()
    for name, layout in LAYOUTS.items():
        sequence = ranks.share(layout)
        for index, case in enumerate(cases):
            compare(ranks, sequence, case, f"{name}, case {index}")


def run(*cases: Case) -> None:
    run_ranks(WORLD, each, list(cases), limit=60)


def on(stays: bool | None, *functions: Function, **options: Any) -> Iterator[Case]:
    """A case of each function."""
    return (Case(function, stays, **options) for function in functions)


# --- along other dims ---


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


@pytest.mark.parametrize("kind", ["parameters", "computed", "leaves"])
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


@pytest.mark.parametrize("kind", ["parameters", "computed", "leaves"])
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


# --- views, stretches and indices ---


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


def test_writes_to_some_tokens_are_refused_on_every_rank() -> None:
    def refused(rank: int) -> None:
        ranks = Ranks()
        for layout in LAYOUTS.values():
            sequence = ranks.share(layout)
            x = sequence.wrapped(sequence.local_of(random(B, S, W), -2, sequence.lengths).clone(), -2)
            writes: list[Function] = [
                lambda x=x: x.__setitem__((slice(None), 0), 1.0),
                lambda x=x: x.index_fill_(1, torch.tensor([0]), 0.0),
                lambda x=x: x[:, 1:].add_(x[:, :-1]),
            ]
            for write in writes:
                with pytest.raises(ConfigError, match=r"clone\(\)"):
                    write()

    run_ranks(WORLD, refused, limit=60)


# --- losses ---

CLASSES = W
TARGET = torch.tensor([[0, 4, -100, 2, 1, 3, -100], [-100, -100, 3, 3, 0, 1, 2]])


def shifted(x: Tensor, **options: Any) -> Tensor:
    """The loss of a causal language model."""
    return F.cross_entropy(x[..., :-1, :].contiguous().view(-1, CLASSES), TARGET[:, 1:].reshape(-1), **options)


@pytest.mark.filterwarnings("ignore:size_average and reduce:UserWarning")
def test_cross_entropies_are_those_of_one_process() -> None:
    weight = random(CLASSES, seed=9)
    chances = random(B * S, CLASSES, seed=4).softmax(-1)
    target = TARGET.flatten()
    plain = target.clamp(min=0)
    everything: list[dict[str, Any]] = [
        {},
        {"ignore_index": 3},
        {"weight": weight},
        {"weight": weight, "ignore_index": 1},
        {"label_smoothing": 0.1},
        {"weight": weight, "label_smoothing": 0.2},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"reduction": "sum", "weight": weight, "ignore_index": 0},
        {"reduction": "none", "weight": weight, "label_smoothing": 0.1},
        {"size_average": False},
        {"reduce": False},
    ]
    cases = []
    for options in everything:
        given = plain if options.get("ignore_index", -100) >= 0 else target
        cases += on(None, partial(of_targets, target=given, **options))
    of_chances: list[dict[str, Any]] = [{}, {"weight": weight}, {"label_smoothing": 0.1}, {"reduction": "sum"}]
    for options in (*of_chances, {"reduction": "none", "weight": weight}):
        cases += on(None, partial(of_targets, target=chances, **options))
    functions: list[Function] = [
        shifted,
        partial(shifted, label_smoothing=0.1),
        partial(shifted, reduction="sum"),
        lambda x: shifted(x, reduction="none").view(B, S - 1).sum(1),
        lambda x: F.cross_entropy(x.transpose(1, 2), TARGET),
        lambda x: F.cross_entropy(x.mT[..., :-1], TARGET[:, 1:], reduction="none"),
        lambda x: F.cross_entropy(input=x.view(-1, CLASSES), target=target),
        lambda x: nn.CrossEntropyLoss(weight=weight)(x.view(-1, CLASSES), target),
        lambda x: F.nll_loss(x.log_softmax(-1).view(-1, CLASSES), target),
        lambda x: F.cross_entropy(x[0], TARGET[0]),
        lambda x: shifted(x) + shifted(x * 2, reduction="sum") / 7,
    ]
    run(*cases, *on(None, *functions))


def test_the_loss_of_full_logits_is_never_gathered() -> None:
    run(*on(True, lambda x: shifted(x, reduction="none")))

    def counted(rank: int) -> None:
        ranks = Ranks()
        for layout in LAYOUTS.values():
            sequence = ranks.share(layout)
            local = sequence.local_of(random(B, S, W), -2, sequence.lengths).clone().requires_grad_()
            group, before = sequence.holders.ranks, sequence.holders.ranks.moved
            shifted(sequence.wrapped(local, -2)).backward()
            assert group.moved - before == 2 * 8 * (group.size - 1) / group.size, "one number was summed"

    run_ranks(WORLD, counted, limit=60)


def test_a_loss_of_no_target_is_what_it_is_on_one_process() -> None:
    """NaN for a mean, zero for a sum, without a gradient."""
    none = torch.full((B * S,), -100)
    weight = random(CLASSES, seed=9)
    everything: list[dict[str, Any]] = [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"weight": weight}]
    run(*on(None, *(partial(of_targets, target=none, **options) for options in everything)))


def of_targets(x: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(x.view(-1, CLASSES), target, **options)


def test_targets_that_are_no_classes_are_refused_on_every_rank() -> None:
    def refused(rank: int) -> list[str]:
        ranks, found = Ranks(), []
        for layout in LAYOUTS.values():
            sequence = ranks.share(layout)
            x = sequence.wrapped(sequence.local_of(random(B, S, W), -2, sequence.lengths), -2)
            target = TARGET.clone()
            target[1, 5] = CLASSES  # of one rank alone
            with pytest.raises(IndexError, match="out of bounds"):
                F.cross_entropy(x.view(-1, CLASSES), target.flatten())
            with pytest.raises(ValueError, match="reduction"):
                F.cross_entropy(x.view(-1, CLASSES), TARGET.flatten(), reduction="average")
            with pytest.raises(ValueError, match="batch_size"):
                F.cross_entropy(x.view(-1, CLASSES), TARGET.flatten()[1:])
            found.append("refused")
        return found

    assert run_ranks(WORLD, refused, limit=60) == [["refused"] * len(LAYOUTS)] * WORLD


def test_losses_in_other_words_are_those_of_one_process() -> None:
    labels = TARGET.clamp(min=0)
    counts = (TARGET != -100).double()
    teacher = random(B, S, CLASSES, seed=5).softmax(-1)
    functions: list[Function] = [
        lambda x: -(F.one_hot(labels, CLASSES) * x.log_softmax(-1)).sum(-1).mul(counts).sum() / counts.sum(),
        lambda x: F.kl_div(x.log_softmax(-1), teacher, reduction="batchmean"),
        lambda x: F.kl_div(x[:, 1:].log_softmax(-1), teacher[:, 1:], reduction="none").sum(-1)[counts[:, 1:] > 0],
        lambda x: (x.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1) * counts).sum(-1),
        lambda x: -((1 - x.softmax(-1)).pow(2) * x.log_softmax(-1)).gather(-1, labels[..., None]).mean(),
        lambda x: F.mse_loss(x, teacher) + F.l1_loss(x[..., 0], counts) + F.smooth_l1_loss(x, teacher, reduction="sum"),
        lambda x: F.binary_cross_entropy_with_logits(x[..., 0], counts, weight=counts + 1),
        lambda x: x.logsumexp(-1).square().mean() + (x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean(),
        lambda x: F.cosine_similarity(x[:, 0], x[:, 1], dim=-1) + F.cosine_similarity(x, teacher, dim=-1).sum(1),
        lambda x: F.triplet_margin_loss(x[:, 0], x[:, 1], x[:, 2]),
        lambda x: F.cross_entropy(F.normalize(x.mean(1), dim=-1) @ F.normalize(x[:, 0], dim=-1).T, torch.arange(B)),
    ]
    run(*on(None, *functions))


# --- autograd ---


def test_hooks_see_the_gradient_of_one_process() -> None:
    def hooked(rank: int) -> None:
        ranks = Ranks()
        for name, layout in LAYOUTS.items():
            sequence = ranks.share(layout)
            whole = random(B, S, W).requires_grad_()
            local = sequence.local_of(whole.detach(), -2, sequence.lengths).clone().requires_grad_()
            x = sequence.wrapped(local, -2)
            weights, seen = random(B, S, 1, seed=5), []
            y, z = x * 2, whole * 2
            y.register_hook(lambda g, seen=seen: seen.append(g) or g * 3)
            z.register_hook(lambda g, seen=seen: seen.append(g) or g * 3)
            (y.mean(-1, keepdim=True) * weights).sum().backward()
            (z.mean(-1, keepdim=True) * weights).sum().backward()
            close(seen[0].full(), seen[1], name)
            close(local.grad, sequence.local_of(whole.grad, -2, sequence.lengths) * sequence.factor, name)
            y, z = x * 2, whole * 2
            (found,) = torch.autograd.grad((y.cumsum(1) * y).sum(), [y])
            (expected,) = torch.autograd.grad((z.cumsum(1) * z).sum(), [z])
            close(found.full(), expected, name)
            local.grad = whole.grad = None
            torch.autograd.backward([x * x], [weights.expand(B, S, W)])
            (whole * whole).backward(weights.expand(B, S, W))
            close(local.grad, sequence.local_of(whole.grad, -2, sequence.lengths) * sequence.factor, name)
            assert x.is_leaf
            close(x.grad.full(), whole.grad, f"{name}: the gradient that is kept of a leaf")
            y, z = x * 2, whole * 2
            y.retain_grad()
            z.retain_grad()
            (y.pow(2).mean(1)).sum().backward()
            (z.pow(2).mean(1)).sum().backward()
            close(y.grad.full(), z.grad, f"{name}: the gradient that is kept of what was computed")

    run_ranks(WORLD, hooked, limit=60)


def test_checkpoints_recompute_it() -> None:
    def block(x: Tensor, w: Tensor) -> Tensor:
        x = x + F.silu(x * (1 + w))
        return F.layer_norm(x, (W,), w) + x.cumsum(1)[:, :1]

    def once(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(block, x, w, use_reentrant=False)

    def nested(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(lambda x, w: once(once(x, w) * 2, w), x, w, use_reentrant=False)

    def within(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(block, x, w, use_reentrant=True)

    run(*on(None, once, nested, within, others=(random(W),)))


def test_autocast_acts_on_the_local_tensor() -> None:
    def cast(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.linear(x.float(), w.float())
            assert y.dtype == torch.bfloat16
            return F.cross_entropy(y[:, :-1].reshape(-1, 6), TARGET[:, 1:].reshape(-1)).double()

    def compared(rank: int) -> None:
        ranks = Ranks()
        for name, layout in LAYOUTS.items():
            sequence = ranks.share(layout)
            whole, w = random(B, S, W), random(6, W)
            x = sequence.wrapped(sequence.local_of(whole, -2, sequence.lengths), -2)
            torch.testing.assert_close(cast(x, w), cast(whole, w), rtol=1e-2, atol=0, msg=name)

    run_ranks(WORLD, compared, limit=60)


def test_dropout_draws_apart_for_tokens_of_ranks_and_alike_afterwards() -> None:
    def dropped(rank: int) -> list[tuple[Tensor, Tensor]]:
        ranks, found = Ranks(), []
        for layout in LAYOUTS.values():
            sequence = ranks.share(layout)
            torch.manual_seed(1)
            local = torch.ones(500, sequence.lengths[sequence.index], 1, requires_grad=True)
            x = sequence.wrapped(local, -2)
            y = F.dropout(x, 0.25)
            assert isinstance(y, Sharded)
            assert F.dropout(x, 0.25, training=False) is x
            y.sum().backward()
            close(local.grad, y.local.detach() * sequence.factor)
            found.append((y.full().detach() == 0, torch.rand(3)))
        return found

    results = run_ranks(WORLD, dropped, limit=60)
    for masks in zip(*results, strict=True):
        for mask, after in masks:
            assert mask.equal(masks[0][0])
            assert after.equal(masks[0][1])
            assert abs(float(mask.double().mean()) - 0.25) < 0.03
            columns = mask.squeeze(-1).unbind(1)
            equal = [(a == b).double().mean() for i, a in enumerate(columns) for b in columns[:i]]
            assert max(equal) < 0.75, "tokens drop out independently"


def test_a_finer_sequence_knows_the_coarser_one() -> None:
    def found(rank: int) -> None:
        ranks = Ranks()
        for layout in (layout for layout in LAYOUTS.values() if layout.tensor > 1):
            fine = ranks.share(layout)
            holders = fine.holders.coarser
            assert holders is not None
            coarse = ShardedSequence(layout.split, holders)
            assert fine.coarser.split == layout.split
            assert fine.coarser.holders is holders
            assert coarse.finer.split == fine.split
            assert coarse.finer is coarse.finer
            assert coarse.coarser is coarse
            assert fine.finer is fine
            whole = random(B, S, W)
            x = fine.wrapped(fine.local_of(whole, -2, fine.lengths), -2)
            local = fine.own_tokens(x)
            assert isinstance(local, Sharded)
            close(local.full(), coarse.local_of(whole, -2, coarse.lengths))
            close(fine.wrapped(local * 2, -2).full(), whole * 2)
            y = coarse.wrapped(coarse.local_of(whole, -2, coarse.lengths), -2)
            assert not isinstance(coarse.own_tokens(y), Sharded)
            close(x.full(), y.full())
            close(x + y, whole * 2)  # other shardings meet in full

    run_ranks(WORLD, found, limit=60)
