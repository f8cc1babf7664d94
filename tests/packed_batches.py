"""Tokens of packed images, videos and audio, for tests."""

import torch
from torch import Tensor

from lightning_mm5d.data.packed_images import PackedTokens

IMAGE, VIDEO, AUDIO = 1, 2, 3
TOKENS = PackedTokens(image=IMAGE, video=VIDEO, audio=AUDIO)


def ids(*samples: list[int], length: int = 24) -> Tensor:
    """Token ids [B, length]; sample i holds the given tokens, then text."""
    return torch.stack([torch.tensor(sample + [9] * (length - len(sample))) for sample in samples])
