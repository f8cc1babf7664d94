"""A data set whose samples hold random numbers of each library, for tests."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils.data import Dataset


class Augmented(Dataset[torch.Tensor]):
    """Sample i is (i, three random numbers, one of each library)."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()])
