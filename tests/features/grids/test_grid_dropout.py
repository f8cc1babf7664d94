"""Dropout on grids: blocks are dropped by masks of their own, and what all ranks have by the same mask.

Masks of blocks, put together, are masks of the full values: with these, one process computes what the grid did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from lightning import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from features.toys import Layout, Run, alone, assert_same, together, weights
from lightning_mm5d import Modality
from lightning_mm5d.config.groups import with_fields
from lightning_mm5d.features.grids.block import GridShape
from lightning_mm5d.layout.layout import even_ranges
from parity.harness import Batches
from tensor_parallel.test_dropout import Drawn, Noted, checkpointed, differ, recorded
from zoo.case import VOCABULARY
from zoo.text import IDS, padded_batch

OUTSIDE, WEIGHTS = 0.1, 0.2  # rates of hidden states, and of weights of attentions
GRIDS: dict[str, dict[str, Any]] = {
    "2d": {"tp_size": 4, "tp_mode": "2d"},
    "2.5d": {"tp_size": 8, "tp_mode": "2.5d", "tp_depth": 2},
    "3d": {"tp_size": 8, "tp_mode": "3d"},
}
SAMPLES, LENGTH, HEADS, WIDTH = 5, 16, 3, 33


def build(family: str) -> Noted:
    eager: dict[str, Any] = {"attn_implementation": "eager"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        if family == "gpt2":
            sizes: dict[str, Any] = {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 32}
            rates = {"resid_pdrop": OUTSIDE, "embd_pdrop": OUTSIDE, "attn_pdrop": WEIGHTS}
            module = Noted(hf.GPT2LMHeadModel(hf.GPT2Config(**IDS, **sizes, **rates, **eager)))
        else:
            sizes = {"hidden_size": WIDTH, "intermediate_size": 51, "num_hidden_layers": 2}
            rates = {"hidden_dropout_prob": OUTSIDE, "attention_probs_dropout_prob": WEIGHTS}
            config = hf.BertConfig(vocab_size=VOCABULARY, num_attention_heads=HEADS, **sizes, **rates, **eager)
            module = Noted(hf.BertForMaskedLM(config))
            module.fixed = {}
    return module


def batches() -> list[Any]:
    torch.manual_seed(0)
    return [padded_batch([0] * SAMPLES) for _ in range(2)]


def trained(run: Run, module: Noted) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    drawn: Drawn = []
    with recorded(drawn):
        trainer = run.trainer(use_distributed_sampler=False)
        trainer.fit(module, DataLoader(Batches(batches()), batch_size=None))
    return {"drawn": drawn, "states": module.states, "weights": weights(module)}


def reentrant(module: Noted) -> Noted:
    module.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})  # type: ignore[operator]
    return module


def again(run: Run, kind: str) -> Run:
    assert run.layout is not None
    (modality,) = run.layout.modalities.values()
    layout = Layout({"language": with_fields(modality, activation_checkpointing=kind)}, run.layout.world)
    return Run(layout, run.options)


def few(run: Run) -> dict[str, dict[str, Any]]:
    return {"bert": trained(run, build("bert")), "bert full": trained(again(run, "full"), build("bert"))}


def everything(run: Run) -> dict[str, dict[str, Any]]:
    return few(run) | {
        "bert reentrant": trained(run, reentrant(build("bert"))),
        "gpt2": trained(run, build("gpt2")),
        "gpt2 selective": trained(again(run, "selective"), build("gpt2")),
        "gpt2 own": trained(run, checkpointed(build("gpt2"))),
    }


def ranks_of(grid: str, scenario: Callable[[Run], Any]) -> list[dict[str, dict[str, Any]]]:
    fields = GRIDS[grid]
    layout = Layout({"language": Modality(**fields)}, fields["tp_size"])
    return together(layout, scenario, num_microbatches=1)


def full_mask(masks: list[Tensor], shape: GridShape) -> Tensor:
    """Put together what ranks drew for one value; a value that is not split must be equal on all ranks."""
    if masks[0].shape == (SAMPLES, LENGTH, WIDTH):
        assert all(torch.equal(mask, masks[0]) for mask in masks)
        return masks[0]
    assert all(differ(one, other) for index, one in enumerate(masks) for other in masks[:index])
    side: Any = "inside" if masks[0].dim() == 4 else "outside"
    dim, size = (1, HEADS) if side == "inside" else (2, WIDTH)
    parts = even_ranges(size, shape.side)
    rows = 8 if shape.mode == "3d" else SAMPLES  # equally many on all ranks, with copies
    full = torch.zeros((rows, *masks[0].shape[1:dim], size, *masks[0].shape[dim + 1 :]), dtype=torch.bool)
    for index, mask in enumerate(masks):
        start, stop = shape.rows(side, index, rows)
        first, last = parts[shape.columns(side, index)]
        full[start:stop].narrow(dim, first, last - first).copy_(mask)
    return full[:SAMPLES]


@contextmanager
def dropping(masks: list[tuple[float, Tensor]]) -> Iterator[None]:
    left = list(masks)

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        rate, mask = left.pop(0)
        assert (rate, mask.shape) == (p, x.shape)
        return x * mask / (1 - p)

    with patch.object(F, "dropout", dropout):
        yield
    assert not left


def check(grid: str, ranks: list[dict[str, dict[str, Any]]]) -> None:
    shape = GridShape.of(Modality(**GRIDS[grid]))
    assert shape is not None
    for family in {"bert", "gpt2"} & ranks[0].keys():
        drawn = [rank[family]["drawn"] for rank in ranks]
        assert len(drawn[0]) == 2 * (1 + 2 * 3)  # steps; embeddings, and three in each of two layers
        assert all([rate for rate, _ in one] == [rate for rate, _ in drawn[0]] for one in drawn)
        masks = [(calls[0][0], full_mask([mask for _, mask in calls], shape)) for calls in zip(*drawn, strict=True)]
        for index, (_, mask) in enumerate(masks):
            assert all(differ(mask, other) for _, other in masks[:index]), "layers and steps draw anew"

        def one_process(run: Run, family: str = family, masks: Any = masks) -> dict[str, Any]:
            module = build(family)
            trainer = run.trainer(use_distributed_sampler=False)
            with dropping(masks):
                trainer.fit(module, DataLoader(Batches(batches()), batch_size=None))
            return {"weights": weights(module)}

        assert_same(ranks[0][family]["weights"], alone(one_process)["weights"], 1e-9, family)
    for found in zip(*(rank.values() for rank in ranks), strict=True):
        for states in zip(*(one["states"] for one in found), strict=True):
            assert all(torch.equal(state, states[0]) for state in states), "generators agree after each microbatch"
    for name, result in ranks[0].items():
        plain = ranks[0][name.split()[0]]
        assert (result is plain) or len(result["drawn"]) > len(plain["drawn"]), name
        assert_same(result["weights"], plain["weights"], 1e-12, name)


@pytest.mark.usefixtures("float64")
def test_masks_of_blocks_are_those_of_full_values_also_in_recomputation() -> None:
    """language: ranks 0-3."""
    check("2d", ranks_of("2d", few))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("grid", GRIDS)
def test_masks_on_all_grids_are_those_of_full_values(grid: str) -> None:
    """language: ranks 0-3 or 0-7."""
    check(grid, ranks_of(grid, everything))
