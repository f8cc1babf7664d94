"""`Strategy.broadcast` carries what Lightning and users send as JSON and tensors; nothing of a peer is unpickled."""

from __future__ import annotations

import pickle
import warnings
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from features.toys import PAIR, Run, Toy
from lightning_mm5d.config.errors import ConfigError
from ranks import run_ranks


class Point(NamedTuple):
    x: int
    y: torch.Tensor


SENT: list[Any] = [
    None,
    True,
    3,
    -0.5,
    "words",
    b"\x00\xff",
    Path("logs/version_0"),
    np.float32(0.5),
    [],
    {},
    {1, "one"},
    {"lr": [0.1, float("inf")], "loss": [1.0, 2.0], 3: ("a", None)},
    torch.arange(3),
    {"nested": [torch.ones(2, dtype=torch.float64), torch.empty(0)], "dtype": torch.bfloat16},
    Point(1, torch.zeros(())),
    "x" * 100_000,
]


class Asks(Toy):
    """Broadcasts on the way, from either rank."""

    def on_fit_start(self) -> None:
        strategy = self.trainer.strategy
        pickle.dumps = pickle.loads = None  # type: ignore[assignment]
        rank = strategy.global_rank
        self.got = [strategy.broadcast(value if rank == src else "mine", src) for value in SENT for src in (0, 1)]
        self.refused = []
        for value in (datetime(2026, 1, 1), {"x": [object()]}, {(1, 2): 3}, torch.ones(2, device="meta")):
            with pytest.raises(ConfigError, match="sent to other ranks") as e:
                strategy.broadcast(value if rank == 1 else None, 1)
            self.refused.append(str(e.value))


def _asked(rank: int) -> Any:
    warnings.simplefilter("ignore")
    module = Asks()
    Run(PAIR).trainer(max_steps=1).fit(module, Run(PAIR).training())
    return module.got, module.refused


def test_what_is_broadcast_arrives_and_other_objects_are_refused_on_every_rank() -> None:
    """vision: rank 0; language: rank 1"""
    for got, refused in run_ranks(2, _asked):
        for index, value in enumerate(SENT):
            for found in got[2 * index : 2 * index + 2]:
                assert type(found) is type(value) or isinstance(value, np.generic)
                assert found == value if isinstance(value, set) else str(found) == str(value)
        assert len(refused) == 4
