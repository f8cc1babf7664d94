"""Masks that a user's step makes, and rings within and between nodes, against one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_mm5d import ConfigError, Modality, MultimodalStrategy, multimodal_mask
from lightning_mm5d.context_parallel.exchange import attention as exchange
from lightning_mm5d.layout.layout import Layout
from parity.harness import fit
from ranks import run_ranks

TOKENS, VOCABULARY = 40, 32


def fields() -> dict[str, Tensor]:
    """Two rows: an image, text and two images in text; two documents with an image each."""
    modality = torch.zeros(2, TOKENS, dtype=torch.long)
    image = torch.zeros(2, TOKENS, dtype=torch.long)
    document = torch.zeros(2, TOKENS, dtype=torch.long)
    for row, start, stop, number in ((0, 0, 9, 0), (0, 15, 21, 1), (0, 21, 26, 2), (1, 3, 8, 0), (1, 24, 33, 0)):
        modality[row, start:stop], image[row, start:stop] = 1, number
    document[1, 20:] = 1
    return {"modality": modality, "group": image, "document": document}


def dense(modality: Tensor, group: Tensor, document: Tensor) -> Tensor:
    """The same mask pair by pair, bool [B, S, S]."""
    at = torch.arange(TOKENS)
    together = document[:, :, None] == document[:, None, :]
    text = (modality == 0)[:, :, None] & (at[:, None] >= at[None, :])
    same = (modality[:, :, None] == modality[:, None, :]) & (group[:, :, None] == group[:, None, :])
    return together & (text | ((modality > 0)[:, :, None] & same))


class Masked(L.LightningModule):
    """A Llama with a mask of one integer per token, or with the same mask given dense."""

    def __init__(self, how: str) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        self.how = how
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
            )
        )

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        parts = {key: value[: len(ids)] for key, value in fields().items()}
        mask = multimodal_mask(**parts) if self.how == "bitfield" else dense(**parts)[:, None]
        if self.how == "added":
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.get_default_dtype()).min)
        return self.model(ids, attention_mask=mask, labels=ids, use_cache=False).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TwoNodes(MultimodalStrategy):
    """Lays ranks out as if every two were on a node."""

    @cached_property
    def layout(self) -> Layout:  # type: ignore[override]
        return Layout.build(self.modalities, world_size=self.world_size, loss_modality="language", ranks_per_node=2)


def batches() -> list[Tensor]:
    return [torch.randint(0, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(n)) for n in range(2)]


def train(rank: int, cls: Any, runs: list[tuple[str, dict[str, Any]]], world: int, after: Any) -> list[Any]:
    found = []
    for how, modality in runs:
        recorder = fit(Masked(how), batches(), cls({"language": Modality(**modality)}), world)
        found.append((recorder.losses, recorder.gradients))
    assert after()
    return found


def compare(
    cls: Any, runs: list[tuple[str, dict[str, Any]]], world: int, after: Callable[[], bool] = lambda: True
) -> None:
    expected = fit(Masked("dense"), batches())
    for rank in run_ranks(world, train, cls, runs, world, after):
        for (how, modality), (losses, gradients) in zip(runs, rank, strict=True):
            where = f"{how}, {modality}"
            torch.testing.assert_close(
                losses, expected.losses, rtol=1e-6, atol=1e-7, msg=lambda m, w=where: f"{w}: {m}"
            )
            if "tp_size" in modality:  # parts of parameters; the losses of two steps tell as much
                continue
            for found, wanted in zip(gradients, expected.gradients, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7, msg=lambda m, w=where: f"{w}: {m}")


def test_the_mask_of_one_integer_per_token_is_the_dense_one() -> None:
    mask = multimodal_mask(**fields())
    assert mask.shape == (2, 1, TOKENS, TOKENS)
    assert mask.stride() == (0, 0, 0, 0), "it has memory of its own"
    torch.testing.assert_close(mask & True, dense(**fields())[:, None])
    q = torch.randn(2, 2, TOKENS, 8)
    torch.testing.assert_close(
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask),
        F.scaled_dot_product_attention(q, q, q, attn_mask=dense(**fields())[:, None]),
    )


def test_numbers_that_do_not_fit_a_mask_are_refused() -> None:
    with pytest.raises(ConfigError, match="modality: got 16"):
        multimodal_mask(torch.full((1, 4), 16))


@pytest.mark.usefixtures("float64")
def test_masks_of_ones_own_equal_one_process() -> None:
    """language: ranks 0-1."""
    runs = [
        ("bitfield", {"cp_size": 2}),
        ("bitfield", {"cp_size": 2, "cp_mode": "ring", "cp_distribution": "zigzag"}),
        ("bitfield", {"cp_size": 2, "cp_mode": "ulysses", "cp_distribution": "uniform"}),
        ("dense", {"cp_size": 2, "cp_mode": "ring"}),
        ("added", {"cp_size": 2}),
        ("bitfield", {"tp_size": 2}),
    ]
    compare(MultimodalStrategy, runs, 2)


@pytest.mark.usefixtures("float64")
def test_rings_within_and_between_nodes_equal_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """language: ranks 0-3, two on a node; the ring is two rings of two, and two across."""
    make, made = exchange.Ring, [0]

    def ring(local: Any, split: Any, groups: Any, device: Any) -> Any:
        assert [group.size for group in groups] == [2, 2]
        made[0] += 1
        return make(local, split, groups, device)

    monkeypatch.setattr(exchange, "Ring", ring)
    compare(TwoNodes, [("bitfield", {"cp_size": 4, "cp_mode": "ring"})], 4, after=lambda: made[0] > 0)
