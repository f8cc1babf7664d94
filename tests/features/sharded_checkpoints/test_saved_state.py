"""States of a checkpoint are read when they are asked for, and not to see whether they are there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_mm5d.features.sharded_checkpoints.sharded_load import SavedOptimizerState, SavedWeights
from lightning_mm5d.storage.files import StateDictSource


class Counting(StateDictSource):
    """Counts what is read."""

    reads = 0

    def read(self, name: str, region: Any = None) -> Tensor:
        self.reads += 1
        return super().read(name, region)


def test_looking_for_a_state_reads_nothing() -> None:
    source = Counting({"a": torch.ones(2)})
    state = SavedOptimizerState(source, ["x", "y"], {0: ({"moment": "a"}, {"beta": 0.5})})
    assert (0 in state, 1 in state, len(state), list(state)) == (True, False, 1, [0])
    assert source.reads == 0
    assert state[0]["beta"] == 0.5
    assert source.reads == 1


def test_weights_change_like_a_dict_and_are_read_once_asked() -> None:
    source = Counting({"a": torch.ones(2), "b": torch.zeros(3)})
    weights = SavedWeights(source, {"extra": 3})
    assert ("a" in weights, len(weights), weights.names()) == (True, 3, ["a", "b"])
    assert weights.shape("b") == (3,)
    assert source.reads == 0
    weights["c"] = weights.pop("a")
    assert (sorted(weights), source.reads) == (["b", "c", "extra"], 1)
    assert weights.read("c", [(0, 1)]).tolist() == [1.0]
    assert weights.copy().extra() == {"extra": 3}
