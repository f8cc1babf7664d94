"""Random state as a function of (seed, step, microbatch, replica), so that all stages of a replica agree.

Every stage runs the user's step for itself; an augmentation or a noise drawn in it must come out alike everywhere.
So the generators are seeded before each run, and put back behind the step so that the code around it draws as ever.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_of(*parts: int | str) -> int:
    """Return a seed below 2**63 that depends on all `parts`, the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(seed: int, device: torch.device) -> None:
    """Seed Python's, numpy's and torch's generators, of the CPU and of `device`."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    seed_torch(seed, device)


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's generators, of the CPU and of `device`."""
    if device.type == "cpu":
        # `torch.manual_seed` also notes a stack trace for a GPU that nobody uses, which takes a millisecond
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Put the generators back when the context ends."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
