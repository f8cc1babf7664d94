"""Losses over what transformers records inside of shared layers, against one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_mm5d import Modality, MultimodalStrategy
from parity.harness import fit
from ranks import run_ranks


class Routed(L.LightningModule):
    """A Mixtral whose loss has a term over its routers."""

    def __init__(self) -> None:
        from transformers import MixtralConfig, MixtralForCausalLM

        super().__init__()
        torch.manual_seed(0)
        self.model = MixtralForCausalLM(
            MixtralConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                num_local_experts=4,
                output_router_logits=True,
                router_aux_loss_coef=0.5,
                experts_implementation="eager",
            )
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch, labels=batch["input_ids"], use_cache=False).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches() -> list[dict[str, Tensor]]:
    """One with padding, one without a mask, and a single sequence."""
    generator = torch.Generator().manual_seed(0)
    first, second, third = (torch.randint(0, 64, (rows, 30), generator=generator) for rows in (2, 2, 1))
    mask = torch.ones_like(first)
    mask[0, -5:] = 0
    return [{"input_ids": first, "attention_mask": mask}, {"input_ids": second}, {"input_ids": third}]


def train(rank: int, fields: dict[str, Any], world: int) -> Any:
    recorder = fit(Routed(), batches(), MultimodalStrategy({"language": Modality(**fields)}), world)
    return recorder.losses, recorder.gradients


@pytest.mark.usefixtures("float64")
def test_a_loss_over_routers_sees_the_tokens_of_all_ranks() -> None:
    """language: ranks 0-1."""
    expected = fit(Routed(), batches())
    for losses, gradients in run_ranks(2, train, {"cp_size": 2, "cp_distribution": "zigzag"}, 2):
        torch.testing.assert_close(losses, expected.losses, rtol=1e-6, atol=1e-7)
        for found, wanted in zip(gradients, expected.gradients, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
