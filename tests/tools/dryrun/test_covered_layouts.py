"""A dry run counts what ranks send in layouts that share sequences, experts and grids, or spare memory and messages."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from features.toys import LANGUAGE, VISION, Layout
from lightning_mm5d import Modality
from ranks import run_ranks
from tools.dryrun.test_dryrun import Adam, Data, Lines, Small, Texting, counted, dry, messages_of

EXPERTS = 4


class Even(MixtralTopKRouter):
    """A router that a dry run knows: each expert has equally many tokens."""

    def forward(self, hidden_states: Tensor) -> Any:
        hidden = hidden_states.reshape(-1, self.hidden_dim)
        scores = nn.functional.linear(hidden, self.weight).softmax(-1)
        index = (torch.arange(len(hidden) * self.top_k) % EXPERTS).view(-1, self.top_k)
        return scores, scores.gather(1, index), index


class EvenExperts(Texting):
    """A Mixtral of four layers, whose routers are even."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
        config = MixtralConfig(vocab_size=512, num_hidden_layers=4, num_local_experts=EXPERTS, use_cache=False, **sizes)
        config._experts_implementation = "batched_mm"  # grouped products know no float64
        self.model = MixtralForCausalLM(config)
        self.double()
        for module in self.modules():
            if type(module) is MixtralTopKRouter:
                module.__class__ = Even


class Frozen(Adam):
    """The encoder rests on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.requires_grad_(False)


def of_text(world: int, replicas: int = 1, **options: Any) -> Layout:
    """language: all ranks."""
    return Layout({"language": Modality(**options)}, world, replicas)


LAYOUTS = {
    "cp 2": of_text(2, cp_size=2),
    "cp 2 by heads in 2 stages": of_text(4, cp_size=2, pp_size=2, context={"cp_mode": "ulysses"}),
    "tp 2 and cp 2": of_text(4, tp_size=2, cp_size=2),
    "a square of 4 ranks": of_text(4, tp_size=4, tensor={"tp_mode": "2d"}),
    "a cube of 8 ranks": of_text(8, tp_size=8, tensor={"tp_mode": "3d"}),
    "activations on the host": of_text(2, pp_size=2, memory={"offload": ["activations"]}),
    "states of optimizers on the host": of_text(2, pp_size=2, memory={"offload": ["optimizer"]}),
    "sums in half precision": of_text(2, 2, dp_size=2, communication={"communication_dtype": "bfloat16"}),
    "pipelines of 2 stages and of 1": of_text(3, 2, pipeline={"pipelines": [2, 1], "speeds": [1, 1]}),
    "two microbatches in turns": of_text(4, tp_size=2, pp_size=2, pipeline={"interleaved_microbatches": 2}),
    "cp 2 in a ring": of_text(2, cp_size=2, context={"cp_mode": "ring"}),
    "cp 4 in rings of 2": of_text(4, cp_size=4, context={"cp_mode": "hybrid", "ulysses_size": 2}),
    "tp 2 in a ring": of_text(2, tp_size=2, tensor={"sequence_parallel": "ring"}),
}
OF_EXPERTS = {
    "ep 2": of_text(2, 2, dp_size=2, ep_size=2),
    "ep 2 in 2 stages": of_text(4, 2, dp_size=2, ep_size=2, pp_size=2),
    "ep 2 and tp 2": of_text(4, 2, dp_size=2, ep_size=2, tp_size=2),
    "divided experts": of_text(4, 2, dp_size=2, ep_size=2, tp_size=2, expert_tp_size=2),
    "ep 2 with zero_stage 2": of_text(2, 2, dp_size=2, ep_size=2, sharding={"zero_stage": 2}),
}
JOINED = Layout(
    {
        "vision": Modality(pipeline={"microbatches_per_call": 2}, **VISION),
        "language": Modality(pp_size=2, **LANGUAGE),
    },
    3,
)
FROZEN = Layout({"vision": Modality(memory={"offload": ["parameters"]}, **VISION), "language": Modality(**LANGUAGE)}, 2)
ITEMS = Layout(
    {
        "vision": Modality(cp_size=2, context={"cp_mode": "items"}, colocate_with="language", **VISION),
        "language": Modality(tp_size=2, **LANGUAGE),
    },
    2,
)
QUICK = ("cp 2", "ep 2", "two microbatches in turns")
CASES = [
    *((name, layout, Small, Lines) for name, layout in LAYOUTS.items()),
    *((name, layout, EvenExperts, Lines) for name, layout in OF_EXPERTS.items()),
    ("two microbatches in a call of the encoder", JOINED, Adam, Data),
    ("an encoder on the host", FROZEN, Frozen, Data),
    ("an encoder of items", ITEMS, Adam, Data),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("layout", "kind", "data"),
    [pytest.param(*case, id=name, marks=[] if name in QUICK else pytest.mark.exhaustive) for name, *case in CASES],
)
def test_counts_the_messages_and_bytes_of_a_real_step(layout: Layout, kind: Any, data: Any) -> None:
    runs = dry(layout, kind(), data())
    for rank, real in enumerate(run_ranks(layout.world, counted, layout, kind, data)):
        assert messages_of(runs.of(rank)) == real, rank
