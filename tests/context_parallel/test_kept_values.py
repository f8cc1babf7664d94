"""What layers keep in attributes of their part of sequences is told of by name.

Ranks 0-1 share each sequence.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from context_parallel.runs import Stream, steps
from features.toys import Layout, Run, assert_same, outcomes
from lightning_mm5d import Modality
from zoo.handwritten import Layer, OwnLayers

LAYOUT = Layout({"language": Modality(cp_size=2, module=["embedding", "layers", "head"])}, 2)


class Keeps(Layer):
    """Keeps its result, means of all of it and of each sample, and counts its calls."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls, self.means = 0, list[float]()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("total", torch.zeros((), dtype=torch.long))

    def forward(self, hidden: Tensor) -> Tensor:
        result = super().forward(hidden)
        self.hidden = result.detach()
        self.average = result.detach().mean()
        self.number = float(result.detach().norm())
        self.rows = result.detach().mean(dim=1)
        self.calls += 1
        self.means.append(float(self.calls))
        self.count += 1
        self.total = self.total + 1
        return result


PARTS = ("hidden", "average", "number", "rows")
COUNTS = ("calls", "means", "count", "total")


class Reads(Callback):
    """What hooks find after each batch in the first layer."""

    def __init__(self) -> None:
        self.found: dict[str, list[Any]] = {name: [] for name in COUNTS}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name in COUNTS:
            value = getattr(pl_module.layers[0], name)
            self.found[name].append(len(value) if name == "means" else int(value))


def kept(run: Run) -> Any:
    reads = Reads()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = steps(run, OwnLayers(partial(Keeps, causal=True)), Stream((16, 11)), callbacks=[reads])
    return {"losses": result["losses"], "found": reads.found, "said": [str(one.message) for one in caught]}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_layers_keep_of_shared_sequences_is_told_of_by_name(microbatches: int) -> None:
    outcome = outcomes(LAYOUT, kept, num_microbatches=microbatches)["kept"]
    said = " ".join(outcome.ranks[0]["said"])
    for name in PARTS:
        assert f"{name!r} of 'layers.0' is not whole: 2 ranks share its layers or its sequences" in said
    assert "'calls' of" not in said
    for rank in outcome.ranks:
        assert_same(rank["losses"], outcome.one["losses"], 1e-9, "losses")
        for name in COUNTS:  # of which runs that find out what a layer mixes are none
            times = 1 if name == "means" else microbatches  # what is appended is joined
            assert rank["found"][name] == [times * count for count in outcome.one["found"][name]], name
