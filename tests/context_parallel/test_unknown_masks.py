"""Mask functions that cannot be followed are evaluated, and random ones are never misread."""

from __future__ import annotations

import operator
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import masking_utils as hf

from context_parallel.mask_cases import brute, check, padding, runs
from lightning_mm5d.context_parallel.masks.mask import Mask, MaskFunction
from lightning_mm5d.sharded.torch_internals import version_of


def in_place(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    first = k <= q
    both = first
    both &= k > q - 5
    return first


WHOLE = torch.rand(2, 1, 1100, 1100, generator=torch.Generator().manual_seed(0)) > 0.5
GAPS = torch.tensor([1.0, torch.nan]).repeat(550)

UNKNOWN: dict[str, MaskFunction] = {
    "a mask of all pairs": lambda b, h, q, k: WHOLE[b, 0, q, k],
    "in place": in_place,
    "out": lambda b, h, q, k: torch.ge(q, k, out=torch.empty(0, dtype=torch.bool)),
    "a shape": lambda b, h, q, k: (k <= q) & torch.ones(q.shape, dtype=torch.bool),
    "broadcast": lambda b, h, q, k: torch.le(*torch.broadcast_tensors(k, q)),
    "reduced": lambda b, h, q, k: torch.stack([(k <= q), (k > 9 * q)]).any(0),
    "not a number": lambda b, h, q, k: ~(GAPS[q] <= GAPS[k]),
    "a number of pairs": lambda b, h, q, k: ((k <= q).long() + (k > q - 9).long()) == 2,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_functions_that_cannot_be_followed_are_evaluated(name: str) -> None:
    mask = Mask(UNKNOWN[name], batch=2, q_length=1100, k_length=1100, device="cpu")
    check(mask, brute(UNKNOWN[name], 2, 1100, 1100))
    if name != "not a number":
        assert (mask.key, mask.rows) == (None, 2)


def test_an_error_in_a_mask_function_is_raised() -> None:
    mask = Mask(hf.padding_mask_function(padding(1, 100)), batch=1, q_length=200, k_length=200, device="cpu")
    with pytest.raises(IndexError):
        mask.work()


class Asking(TorchFunctionMode):
    """Asks of each result what features that watch a step ask."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            assert result.grad_fn is None
            assert not version_of(result)
        return result


def test_functions_are_followed_in_a_step_that_is_watched() -> None:
    def mask() -> Mask:
        function = hf.and_masks(hf.causal_mask_function, lambda b, h, q, k: q - k < 9)
        return Mask(function, batch=2, q_length=40, k_length=40, device="cpu")

    with Asking():
        found = mask().key
    assert found is not None
    assert found == mask().key


class Random:
    """Random mask functions of plain torch operations."""

    def __init__(self, seed: int, size: int) -> None:
        self.dice = random.Random(seed)
        torch.manual_seed(seed)
        of = [torch.randint(-3, 4, (2, size)), torch.randint(0, 200, (2, size)).sort(1)[0], runs(2, size, 60)]
        self.tables = [*of, of[0].to(torch.int8), torch.randn(2, size), of[1].to(torch.uint8)]

    def number(self, b: Tensor, index: Tensor, depth: int) -> Tensor:
        choose = self.dice.randrange(8 if depth else 2)
        if choose == 0:
            return index
        if choose == 1:
            return self.dice.choice(self.tables)[b, index]
        inner = self.number(b, index, depth - 1)
        return [
            lambda: inner + self.dice.randrange(-9, 9),
            lambda: self.dice.randrange(100) - inner,
            lambda: inner // self.dice.randrange(1, 9),
            lambda: abs(inner),
            lambda: torch.where(inner > 3, inner, -2),
            lambda: inner.clamp(min=self.dice.randrange(5)),
        ][choose - 2]()

    def pair(self, b: Tensor, q: Tensor, k: Tensor, depth: int) -> Tensor:
        choose = self.dice.randrange(10 if depth else 5)
        if choose == 0:
            side = self.number(b, self.dice.choice([q, k]), 2)
            return side > self.dice.randrange(-2, 50)
        if choose < 5:
            x, y = self.number(b, q, 2), self.number(b, k, 2)
            if self.dice.random() < 0.3:
                x, y = y, x
            compare = self.dice.choice([operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne])
            how = self.dice.randrange(6)
            if how == 0:
                return compare(x - y, self.dice.randrange(-40, 40))
            if how == 1:
                return compare(abs(x - y), self.dice.randrange(60))
            if how == 2:
                return compare(self.dice.randrange(60), (x + y))
            if how == 3:
                return compare(x + q, y - k)
            return compare(x, y)
        x, y = self.pair(b, q, k, depth - 1), self.pair(b, q, k, depth - 1)
        third = self.pair(b, q, k, 0)
        return [
            lambda: x & y,
            lambda: x | y,
            lambda: x ^ y,
            lambda: ~x & (x.new_ones((), dtype=torch.bool) & y).to(x.device),
            lambda: torch.where(third, x, y),
        ][choose - 5]()


@pytest.mark.parametrize("seed", range(60))
def test_random_functions_are_never_misread(seed: int) -> None:
    maker = Random(seed, 300)

    def function(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        maker.dice.seed(seed)  # the same choices at each call
        return maker.pair(b, q, k, 3)

    mask = Mask(function, batch=2, q_length=300, k_length=300, device="cpu")
    assert mask.key is not None
    check(mask, brute(function, 2, 300, 300))
