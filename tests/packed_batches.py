"""Tokens of packed images, videos and audio, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_mm5d.data.microbatch import split
from lightning_mm5d.data.packed_images import PackedTokens

IMAGE, VIDEO, AUDIO = 1, 2, 3
TOKENS = PackedTokens(image=IMAGE, video=VIDEO, audio=AUDIO)


def ids(*samples: list[int], length: int = 24) -> Tensor:
    """Token ids [B, length]; sample i holds the given tokens, then text."""
    return torch.stack([torch.tensor(sample + [9] * (length - len(sample))) for sample in samples])


def numbered(rows: int, *shape: int) -> Tensor:
    """A tensor [rows, *shape] in which every row is filled with its own number."""
    return torch.arange(float(rows)).view(-1, *[1] * len(shape)).expand(rows, *shape).contiguous()


def owned(batch: Any, parts: int, key: str = "pixel_values", tokens: PackedTokens = TOKENS) -> list[list[float]]:
    """The numbers of the rows of `key` that each microbatch gets."""
    values = [microbatch.batch[key] for microbatch in split(batch, parts, image_tokens=tokens)]
    return [[] if value is None else value.flatten(1)[:, 0].tolist() for value in values]
