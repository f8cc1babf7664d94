"""Ranks that share experts compute microbatches side by side as one process computes them one after another.

language: ranks 0 and 1 share experts; with two stages or two tensor parallel ranks 0 and 2, and 1 and 3, or neighbours.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from features.interleaving.test_interleaved import side_by_side
from lightning_mm5d.features.throughput.feature import ModalityThroughput
from ranks import call_ranks

from .composed_training import Composition, Mixture, trained
from .expert_parity import CASES, Shared, compare

TWO = {"interleaved_microbatches": 2}
AGAIN = TWO | {"activation_checkpointing": "full"}


pytestmark = pytest.mark.usefixtures("float64")


def beside(name: str, fields: dict[str, Any], **options: Any) -> Shared:
    (path,) = CASES[name].layers["language"]
    watched = partial(side_by_side, path=path)
    return Shared(name=name, ep=2, fields=fields, microbatches=4, prepare=watched, **options)


PAIRS = [
    beside("mixtral", AGAIN),
    beside("deepseek_v3", TWO),  # results of experts are under way while the shared expert computes
]
FOURS = [
    beside("mixtral", AGAIN | {"pp_size": 2}),
    beside("deepseek_v3", AGAIN | {"tp_size": 2}),
]
MORE_PAIRS = [
    beside("deepseek_v3", AGAIN),
    beside("gpt_oss", TWO),
    beside("llama4_text", AGAIN),
    beside("dbrx", TWO),
    beside("mixtral", TWO, router_loss=True),
    beside("mixtral", TWO | {"interleaved_microbatches": 4}),
    beside("mixtral", TWO | {"zero_stage": 1}),
    beside("handwritten_gated_experts", TWO),
]
MORE_FOURS = [
    beside("mixtral", TWO | {"pp_size": 2}, schedule="zero_bubble"),
    beside("mixtral", AGAIN | {"tp_size": 2}),
    beside("mixtral", TWO | {"tp_size": 2, "sequence_parallel": True}),
    beside("mixtral", TWO | {"tp_size": 2, "expert_tp_size": 2}),
    beside("deepseek_v3", TWO | {"pp_size": 2}, schedule="gpipe"),
    beside("deepseek_v3", TWO | {"cp_size": 2}),
    beside("mixtral", TWO),  # two blocks
]


@pytest.mark.parametrize(("world", "cases"), [(2, PAIRS), (4, FOURS)], ids=["2", "4"])
def test_microbatches_side_by_side_with_shared_experts_equal_one_process(world: int, cases: list[Shared]) -> None:
    compare(world, *cases)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("world", "cases"), [(2, MORE_PAIRS), (4, MORE_FOURS)], ids=["2", "4"])
def test_more_forms_of_experts_side_by_side_equal_one_process(world: int, cases: list[Shared]) -> None:
    compare(world, *cases)


class Unlike(Mixture):
    """Calls its model twice for some microbatches, which other replicas need not have at the same time.

    Nor do they count the flops of the same steps, as their batches have unlike shapes.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        side_by_side(self)

    def configure_callbacks(self) -> list[Callback]:
        return [ModalityThroughput(available_flops=1e12)]

    def on_before_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
        ids = batch["input_ids"]
        return {**batch, "unused": ids.new_zeros(len(ids), 1 + int(ids.sum()) % 3)}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        batch = {name: tensor for name, tensor in batch.items() if name != "unused"}
        loss = super().training_step(batch, batch_idx)
        if int(batch["input_ids"].sum()) % 2:
            flipped = {name: tensor.flip(1) for name, tensor in batch.items()}
            loss = loss + super().training_step(flipped, batch_idx)
        return loss


UNLIKE = [
    pytest.param({"ep_size": 2} | TWO, id="kept", marks=pytest.mark.exhaustive),
    pytest.param({"ep_size": 2} | AGAIN, id="again"),
]


@pytest.mark.parametrize("fields", UNLIKE)
def test_replicas_may_call_experts_unlike_numbers_of_times_side_by_side(fields: dict[str, Any]) -> None:
    several = {"accumulate_grad_batches": 3}
    one = Composition(fields=fields, microbatches=2, trainer=several, cls=Unlike)
    (expected,) = call_ranks(1, trained, one.alone)
    torch.testing.assert_close(call_ranks(2, trained, one)[0], expected, rtol=0, atol=1e-9)
