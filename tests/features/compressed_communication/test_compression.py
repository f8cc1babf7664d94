"""Numbers in fewer bits: how far they may be off, what they never become, and how many bytes they take."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from lightning_mm5d.features.compressed_communication.encoding import BLOCK, Compression

FLOAT8 = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}
"""largest relative error of a number that is not far below the largest of its block"""
WIRES = (*FLOAT8, torch.bfloat16, torch.float32)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LENGTHS = (0, 1, 2, 5, BLOCK - 1, BLOCK, BLOCK + 1, 1000)
INF, NAN = math.inf, math.nan


def sent(values: torch.Tensor, wire: torch.dtype, seed: int | None = None) -> torch.Tensor:
    compression = Compression(wire, is_stochastic=seed is not None)
    data = compression.encode(values, seed)
    assert data.dtype == torch.uint8
    assert data.numel() == compression.nbytes(values.numel(), values.dtype) <= values.nbytes
    return compression.decode(data, values.numel(), values.dtype).to(values.dtype).view(values.shape)


def wild(length: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of many sizes, block by block."""
    generator = torch.Generator().manual_seed(length)
    values = torch.randn(length, generator=generator, dtype=torch.float64)
    reach = 3 if dtype == torch.float16 else 30
    sizes = torch.randint(-reach, reach + 1, (length // BLOCK + 1,), generator=generator).repeat_interleave(BLOCK)
    return (values * 10.0 ** sizes[:length]).to(dtype)


@pytest.mark.parametrize("wire", FLOAT8)
def test_the_error_of_a_float8_is_bounded_by_its_size_and_that_of_its_block(wire: torch.dtype) -> None:
    info = torch.finfo(wire)
    for dtype, length, seed in itertools.product(DTYPES, LENGTHS, (None, 7)):
        values = wild(length, dtype)
        if not Compression(wire).saves(length, dtype):
            assert torch.equal(sent(values, wire, seed), values)
            continue
        error = (sent(values, wire, seed).double() - values.double()).abs()
        for block, off in zip(values.double().split(BLOCK), error.split(BLOCK), strict=True):
            smallest = info.smallest_normal * info.eps / info.max * block.abs().max()  # a step near zero
            bound = torch.maximum(FLOAT8[wire] * block.abs(), smallest / 2) * (1 if seed is None else 2)
            assert bool((off <= bound * 1.01 + torch.finfo(dtype).eps * block.abs()).all()), (wire, dtype, length)


def test_the_error_of_a_bfloat16_is_bounded_by_its_size() -> None:
    for dtype, length in itertools.product((torch.float32, torch.float64), LENGTHS):
        values = wild(length, dtype)
        error = (sent(values, torch.bfloat16) - values).abs()
        assert bool((error <= 2.0**-8 * values.abs()).all())


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", [None, 3])
def test_what_is_not_finite_stays_and_what_is_finite_stays_finite(
    wire: torch.dtype, dtype: torch.dtype, seed: int | None
) -> None:
    largest = torch.finfo(dtype).max
    ordinary = torch.linspace(-2, 2, BLOCK, dtype=dtype)
    for special in ([INF], [-INF], [NAN], [INF, -INF, NAN], [largest, -largest], [-largest, NAN], [0.0], [-0.0]):
        for filled in (0, 5, BLOCK):  # ordinary numbers beside them; none of them is lost
            values = torch.cat([ordinary[:filled], torch.tensor(special * 4, dtype=dtype), torch.zeros(2 * BLOCK)])
            values = values.to(dtype)
            got = sent(values, wire, seed)
            assert torch.equal(got.isnan(), values.isnan())
            assert torch.equal(got.isinf(), values.isinf()), (special, filled)
            assert torch.equal(got.sign().nan_to_num(), values.sign().nan_to_num())
            usual = values.isfinite() & (values.abs() <= 2)
            torch.testing.assert_close(got[usual], values[usual], rtol=0.26, atol=1e-4)
            top = values.abs() == largest
            reached = largest if wire in FLOAT8 else min(largest, torch.finfo(wire).max)
            torch.testing.assert_close(got[top], values[top].clamp(-reached, reached), rtol=0.01, atol=0)


@pytest.mark.parametrize("wire", WIRES)
def test_zeros_stay_zeros_and_rounded_numbers_stay_as_they_are(wire: torch.dtype) -> None:
    assert not sent(torch.zeros(3 * BLOCK + 1), wire).any()
    for length in LENGTHS:
        once = sent(wild(length, torch.float32), wire)
        assert torch.equal(sent(once, wire), once)
        assert torch.equal(Compression(wire).rounded(wild(length, torch.float32).view(-1, 1)), once.view(-1, 1))


def test_what_takes_no_fewer_bytes_is_sent_as_it_is() -> None:
    for wire, dtype in itertools.product(WIRES, (*DTYPES, torch.int64, torch.bool, torch.complex64, torch.uint8)):
        for length in LENGTHS:
            plain = length * dtype.itemsize
            got = Compression(wire).nbytes(length, dtype)
            assert got <= plain
            if not dtype.is_floating_point or wire.itemsize >= dtype.itemsize:
                assert got == plain
    values = torch.arange(10).to(torch.complex64)
    assert torch.equal(sent(values, torch.bfloat16), values)


def test_bytes_are_the_ratio_of_the_dtypes_and_one_scale_for_each_block() -> None:
    numbers = 100 * BLOCK
    assert Compression(torch.bfloat16).nbytes(numbers, torch.float32) / (4 * numbers) == 0.5
    assert Compression(torch.float8_e5m2).nbytes(numbers, torch.float32) / (4 * numbers) == 0.25 + 1 / BLOCK
    assert Compression(torch.float8_e4m3fn).nbytes(numbers, torch.bfloat16) / (2 * numbers) == 0.5 + 2 / BLOCK


@pytest.mark.parametrize("wire", [*FLOAT8, torch.bfloat16])
def test_the_mean_of_random_roundings_is_exact_and_draws_nothing_from_the_user(wire: torch.dtype) -> None:
    values = wild(2 * BLOCK, torch.float32)
    before = torch.get_rng_state()
    draws = torch.stack([sent(values, wire, seed).double() for seed in range(1000)])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(sent(values, wire, 5), sent(values, wire, 5))
    error = (draws.mean(0) - values.double()).abs()
    spread = draws.std(0) / math.sqrt(len(draws))
    assert bool((error <= 5 * spread + 1e-5 * values.abs()).all())
    assert (draws.std(0) > 0).double().mean() > 0.9
