"""Tensors in fewer bits, as they travel between ranks.

A float8 has a *scale* for each block of 128 neighbours, as DeepSeek-V3 has (arXiv:2412.19437): the largest magnitude of
the block, as float32, in front of the numbers. So one tensor may hold numbers of very different sizes, and the error of
a number is bounded by its own size or that of its block's largest.

Numbers that are not finite stay what they are, each by itself, and finite ones stay finite. The largest numbers of a
dtype, with which models mask scores, are no part of a scale: beside them the others of their block would vanish.

Nothing is converted that would take no fewer bytes for it: integers, complex numbers, dtypes as short as the wire's,
and single numbers, which are shorter than their scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128
_LARGEST = 0.99  # of a dtype's largest number: from there on a number is a mask
_NAN = 0x80  # the negative zero; float8_e4m3fn has two codes for what is not finite, and these are the infinities


class Compression(NamedTuple):
    """How numbers travel.

    Attributes:
        dtype: on the wire: float32, bfloat16, float8_e4m3fn or float8_e5m2.
        is_stochastic: whether numbers are rounded up or down at random, where a seed is given, so that their mean is
            exact.
    """

    dtype: torch.dtype
    is_stochastic: bool = False

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes that `numel` numbers of `dtype` take."""
        plain = numel * dtype.itemsize
        scales = 0 if self.dtype.itemsize > 1 else 4 * -(-numel // BLOCK)
        return min(plain, numel * self.dtype.itemsize + scales) if dtype.is_floating_point else plain

    def saves(self, numel: int, dtype: torch.dtype) -> bool:
        """Return whether `numel` numbers of `dtype` take fewer bytes than they have."""
        return self.nbytes(numel, dtype) < numel * dtype.itemsize

    def narrows(self, dtype: torch.dtype) -> bool:
        """Return whether long tensors of `dtype` take fewer bytes than they have."""
        return self.saves(BLOCK, dtype)

    def encode(self, tensor: Tensor, seed: int | None = None) -> Tensor:
        """Return `tensor` as bytes, ``[nbytes]`` of uint8.

        Args:
            tensor: of any shape.
            seed: of random numbers; None rounds to the nearest.
        """
        flat = tensor.detach().reshape(-1)
        if not self.saves(flat.numel(), flat.dtype):
            return flat.contiguous().view(torch.uint8)
        if not self.is_stochastic:
            seed = None
        if self.dtype.itemsize > 1:
            return _narrowed(flat, self.dtype, seed).view(torch.uint8)
        return _scaled(flat, self.dtype, seed)

    def decode(self, data: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return what `encode` wrote of `numel` numbers of `dtype`: flat, and in float32 at least where it is wider."""
        if not self.saves(numel, dtype):
            return data.clone().view(dtype)  # at an address of its own, which its dtype may want
        wide = torch.promote_types(dtype, torch.float32)
        if self.dtype.itemsize > 1:
            return data.clone().view(self.dtype).to(wide)
        return _unscaled(data, numel, self.dtype, dtype)

    def rounded(self, tensor: Tensor) -> Tensor:
        """Return `tensor` as those get it that it is sent to."""
        shape, dtype = tensor.shape, tensor.dtype
        return self.decode(self.encode(tensor), tensor.numel(), dtype).to(dtype).view(shape)


def _narrowed(x: Tensor, dtype: torch.dtype, seed: int | None = None) -> Tensor:
    """`x` in a narrower dtype of the same kind; what is finite stays finite."""
    limit = torch.finfo(dtype).max
    if limit < torch.finfo(x.dtype).max:
        x = torch.where(x.isinf(), x, x.clamp(-limit, limit))
    if seed is None or dtype != torch.bfloat16:
        return x.to(dtype)
    # the upper half of a float32 is a bfloat16, and random bits carry over from the lower half as often as they should
    x = x.float()
    bits = (x.view(torch.int32) + _random(x, seed)) & -0x10000
    return torch.where(x.isnan(), x, bits.view(torch.float32)).to(dtype)


def _scaled(flat: Tensor, dtype: torch.dtype, seed: int | None) -> Tensor:
    """Scales and numbers of float8, as bytes."""
    numel, limit = flat.numel(), _LARGEST * min(torch.finfo(flat.dtype).max, torch.finfo(torch.float32).max)
    x = flat if flat.dtype == torch.float32 else _narrowed(flat, torch.float32)
    x = torch.nn.functional.pad(x, (0, -numel % BLOCK)).view(-1, BLOCK)
    size = x.abs()
    ordinary = size < limit
    largest = torch.where(ordinary, size, 0.0).amax(1, keepdim=True)
    largest = torch.where(largest == 0, 1.0, largest)
    top = torch.finfo(dtype).max
    numbers = torch.where(ordinary, x, 0.0).div_(largest).mul_(top)
    if seed is not None:
        numbers = _drawn(numbers, dtype, seed)
    codes = numbers.to(dtype).view(torch.uint8)
    infinite, nan = (0x7F, _NAN) if dtype == torch.float8_e4m3fn else (0x7C, 0x7F)
    if dtype == torch.float8_e4m3fn:
        codes = torch.where(codes == _NAN, 0, codes)
    signs = (x < 0).to(torch.uint8) << 7
    codes = torch.where(ordinary, codes, torch.where(x.isnan(), nan, signs + infinite))
    # a negative scale: what looks infinite in this block is the largest number
    is_mask = (size >= limit).any(1, keepdim=True) & ~size.isinf().any(1, keepdim=True)
    scales = torch.where(is_mask, -largest, largest)
    return torch.cat([scales.view(-1).view(torch.uint8), codes.to(torch.uint8).view(-1)[:numel]])


def _unscaled(data: Tensor, numel: int, wire: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Undo `_scaled` for what was of `dtype`."""
    blocks = -(-numel // BLOCK)
    scales = data[: 4 * blocks].clone().view(torch.float32).view(-1, 1)
    codes = torch.nn.functional.pad(data[4 * blocks :], (0, -numel % BLOCK)).view(-1, BLOCK)
    x = codes.view(wire).to(torch.float32)
    if wire == torch.float8_e4m3fn:
        infinite = torch.where(codes > _NAN, -torch.inf, torch.inf).to(x.dtype)
        x = torch.where(codes & 0x7F == 0x7F, infinite, x)
        x = torch.where(codes == _NAN, torch.nan, x)
    x = x.div_(torch.finfo(wire).max).mul_(scales.abs())
    x = x.to(torch.promote_types(dtype, torch.float32))
    limits = torch.full_like(scales, torch.inf, dtype=x.dtype).masked_fill_(scales < 0, torch.finfo(dtype).max)
    return x.clamp_(-limits, limits).view(-1)[:numel]


def _drawn(x: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """Finite numbers of float32 rounded at random to numbers that `dtype` has."""
    info = torch.finfo(dtype)
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)  # of two, at most |x|
    step = power.clamp_(min=info.smallest_normal).mul_(info.eps)
    # halves keep numbers exact that `dtype` has
    draw = (_random(x, seed).float() + 0.5).mul_(2.0**-16)
    return (x / step).add_(draw).floor_().mul_(step).clamp_(-info.max, info.max)


def _random(x: Tensor, seed: int) -> Tensor:
    """Integers below 2**16, from a generator of their own."""
    generator = torch.Generator(x.device).manual_seed(seed)
    return torch.empty(x.shape, dtype=torch.int32, device=x.device).random_(0, 1 << 16, generator=generator)
