"""Modules without a list of layers, and lists that change shapes: cut in stages they equal one process, or are refused.

language: one rank a stage, unless a test says otherwise. The default run holds each way in which modules are written
once or twice; `exhaustive` holds more of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
from torch import nn
from torch.utils.data import DataLoader

from features import unlisted
from features.toys import assert_same, figures, weights
from features.unlisted import (
    Encoded,
    Pyramid,
    ResNet,
    Tapped,
    TwoLinears,
    Walked,
    batches,
    build,
    nested,
    sequential,
    trees,
)
from lightning_mm5d import Modality
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.partition import partition
from parity.harness import Batches, strategy
from ranks import run_ranks
from sweeps import swept

Model = Callable[[], nn.Module]
Case = tuple[Model, dict[str, Any], dict[str, Any]]
"""A model, options of the strategy, and of the trainer."""


def train(model: Model, frozen: tuple[str, ...] = (), chosen: Any = "auto", devices: int = 1, **options: Any) -> Any:
    """Two epochs with validation; return metrics, and all parameters and buffers."""
    warnings.simplefilter("ignore")
    module = build(model)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen or "none"))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options = {"accelerator": "cpu", "max_epochs": 2, "use_distributed_sampler": False, **quiet, **options}
    trainer = L.Trainer(devices=devices, strategy=chosen, **options)
    training, validation = (DataLoader(Batches(batches(count)), batch_size=None) for count in (4, 1))
    trainer.fit(module, training, validation)
    return figures(trainer), weights(module)


def stages(size: int, chunks: int = 1) -> dict[str, Any]:
    return {"modalities": {"language": Modality(pp_size=size, pipeline={"pp_chunks": chunks})}}


ENCODER = {"vision": Modality(module="encoder", pp_size=2), "language": Modality(pp_size=2)}
CASES: dict[str, dict[str, Case]] = {
    "2": {
        "a part registered after the one that follows it": (TwoLinears, stages(2), {"accumulate_grad_batches": 2}),
        "batch norms": (ResNet, stages(2), {}),
        "chunks": (sequential, {**stages(2, 2), "schedule": "interleaved", "num_microbatches": 4}, {}),
        "a module that all layers share": (
            unlisted.Universal,
            {**stages(2, 2), "schedule": "interleaved", "num_microbatches": 4},
            {},
        ),
        "skip connections of a decoder": (unlisted.UNet, stages(2), {}),
        "a loss of all states, frozen at first": (Tapped, stages(2), {"frozen": ("net.before", "net.layers.0")}),
        "a dict walked in order": (Walked, stages(2), {}),
        "a state of each shared layer": (unlisted.Grouped, stages(2), {}),
        "lists in lists": (nested, {**stages(2), "schedule": "gpipe", "num_microbatches": 2}, {}),
        "a part that runs twice": (unlisted.Repeats, stages(2), {}),
    },
    "3": {
        "a decision": (unlisted.Decides, {**stages(3), "num_microbatches": 2}, {}),
        "a skip connection": (unlisted.Skips, stages(3), {}),
        "skip connections, split backward": (
            unlisted.Transformer,
            {**stages(3), "schedule": "zero_bubble", "num_microbatches": 4},
            {},
        ),
        "a loss of all states": (Tapped, {**stages(3), "num_microbatches": 2}, {}),
        "a list that changes shapes": (Pyramid, stages(3), {}),
    },
    "4": {
        "chunks with skip connections": (unlisted.Transformer, {**stages(4), "num_microbatches": 4}, {}),
        "trees that cross": (trees, {**stages(4), "num_microbatches": 4}, {}),
        "an encoder | a head without a list": (Encoded, {"modalities": ENCODER, "schedule": "zero_bubble"}, {}),
    },
    "more of 2": {
        "a frozen stem": (ResNet, stages(2), {"frozen": ("net.conv1", "net.bn1", "net.layer1")}),
    },
    "more of 3": {
        "batch norms": (ResNet, stages(3), {}),
        "leaves": (sequential, {**stages(3), "schedule": "zero_bubble", "num_microbatches": 2}, {}),
        "shared layers, split backward": (
            unlisted.Grouped,
            {**stages(3), "schedule": "zero_bubble", "num_microbatches": 4},
            {},
        ),
    },
}


@pytest.mark.parametrize("which", swept(CASES, "more of 2", "more of 3"))
def test_parts_in_stages_equal_one_process(which: str) -> None:
    """Losses, validation, parameters and the statistics of batch norms."""
    expected = [train(model, **options) for model, _, options in CASES[which].values()]
    ranks = run_ranks(int(which[-1]), _all, which)
    for index, name in enumerate(CASES[which]):
        assert_same(ranks[0][index], expected[index], where=name)
        for rank in ranks:
            assert_same(rank[index][0], expected[index][0], where=name)


def _all(rank: int, which: str) -> list[Any]:
    return [
        train(model, chosen=strategy(**{"num_microbatches": 1, **chosen}), devices=int(which[-1]), **options)
        for model, chosen, options in CASES[which].values()
    ]


REFUSED: dict[str, tuple[Model, int, str]] = {
    "one without a gradient, later": (unlisted.SkipsUnseen, 3, "depends on `net.a`"),
    "a part that runs twice": (unlisted.Repeats, 3, "enters net.b twice"),
    "a part that is left out": (unlisted.LeavesOut, 4, "enters net.d after net.b"),
    "another order than the code's": (unlisted.Turns, 3, "enters net.c after net.a"),
    "a layer that is left out": (unlisted.LayerDrop, 2, "enters net.layers.3 after net.layers.1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_cross_is_refused_by_name(what: str) -> None:
    model, world, rule = REFUSED[what]
    with pytest.raises(AssertionError, match=f"(StageError|RemoteParameterError): .*{rule}"):
        run_ranks(world, _one, model, world)


def _one(rank: int, model: Model, world: int) -> Any:
    return train(model, chosen=strategy(num_microbatches=1, **stages(world)), devices=world)


def test_an_order_that_no_code_tells_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pp_size: got 2.*no list of layers, and no code"):
        partition(build(unlisted.Hidden), {"language": Modality(pp_size=2)})


def test_parts_are_in_the_order_of_the_code_and_lists_are_taken_apart_where_they_cost_more_than_a_stage() -> None:
    def cut(model: Model, size: int) -> list[tuple[str, ...]]:
        found = partition(build(model), {"language": Modality(pp_size=size)})
        paths = found.parts["language"].paths
        return [
            tuple(path.removeprefix("net.") for path in paths[cut.first : cut.last]) for cut in found.stages["language"]
        ]

    assert cut(TwoLinears, 2) == [("a",), ("b",)]
    assert cut(ResNet, 2) == [("conv1", "bn1", "layer1", "layer2"), ("layer3.0", "layer3.1", "fc")]
    assert cut(nested, 3)[:2] == [("0.0",), ("0.1",)]
    assert partition(build(TwoLinears), {"language": Modality(pp_size=2)}).owners["net.scale"] == ("language.0",)
