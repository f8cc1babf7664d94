"""Trains a mixture of experts on ranks and in one process, and compares parameters and states of optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_mm5d import Modality
from parity.harness import Batches, strategy
from ranks import call_ranks

from .expert_case import ExpertCase, causal
from .families import FAMILIES, LATER, QWEN

DEEP = causal(
    "qwen3_moe_of_four_layers",
    "Qwen3MoeForCausalLM",
    "Qwen3MoeConfig",
    (*LATER, "3.mlp.experts"),
    5,
    **QWEN,
    num_experts=5,
    num_hidden_layers=4,
    mlp_only_layers=[0],
)
CASES: dict[str, ExpertCase] = {**FAMILIES, "deep": DEEP}


@dataclass(frozen=True)
class Layout:
    """A run on ranks.

    Attributes:
        name: of the family.
        fields: of each modality.
        world: ranks.
        replicas: of the language model.
        microbatches: of each replica.
        samples: of a batch over all replicas.
        last: samples of each replica in the last step, of text alone.
        images: of each sample; one each without.
        skips: whether a batch whose second token is odd skips the experts of the second layer.
        options: of the strategy.
    """

    name: str
    fields: dict[str, dict[str, Any]]
    world: int
    replicas: int = 2
    microbatches: int = 2
    samples: int = 4
    last: Sequence[int] = ()
    images: Sequence[int] | None = None
    skips: bool = False
    options: dict[str, Any] = field(default_factory=dict)


class States(Callback):
    """Keeps what the run leaves."""

    def __init__(self) -> None:
        self.states: dict[str, Any] = {}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.states = trainer.strategy.optimizer_state(trainer.optimizers[0])["state"]


def skipping(module: Any) -> None:
    """Let the second layer of a language model go without its experts, by the batch."""
    odd: list[bool] = [False]

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        odd[0] = bool(int(kwargs["input_ids"][0, 1]) % 2)

    block = module.model.model.layers[1].mlp
    inner = block.forward
    module.model.model.register_forward_pre_hook(note, with_kwargs=True)
    block.forward = lambda hidden: hidden * 0.5 if odd[0] else inner(hidden)


def train(rank: int, one: Layout, alone: bool) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    """Train two steps; return states of the optimizer, parameters and warnings about experts."""
    torch.set_default_dtype(torch.float64)
    case = CASES[one.name]
    module: Any = case.build()
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=0.01, eps=1e-2)
    if one.skips:
        skipping(module)
    batches = []
    for step in range(2):
        shares = one.last if step else ()
        batch = case.batch(sum(shares) or one.samples, step, images=one.images)
        assert batch is not None
        if alone or not shares:
            batches += [batch] if alone else case.split(batch, one.replicas)
        else:
            parts = {name: value.split(list(shares)) for name, value in batch.items()}
            batches += [{name: value[place] for name, value in parts.items()} for place in range(one.replicas)]
    fields = {case.modalities[-1]: {}} if alone else one.fields
    modalities = {name: Modality(**said) for name, said in fields.items()}
    count = one.microbatches * (one.replicas if alone else 1)
    chosen = strategy(modalities, num_microbatches=count, loss_weight="tokens", **({} if alone else one.options))
    states, data = States(), Batches(batches)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1 if alone else one.world,
            strategy=chosen,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[states],
            use_distributed_sampler=False,
        )
        sampler = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0, shuffle=False)
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None, sampler=sampler))
    told = [str(warning.message) for warning in said if "ep_size" in str(warning.message)]
    return states.states, module.state_dict(), told


def check(one: Layout, tolerance: float = 1e-9) -> list[str]:
    """Compare a run on ranks with one process; return what rank 0 warned of experts."""
    ((states, weights, _),) = call_ranks(1, train, one, True)
    got = call_ranks(one.world, train, one, False)[0]
    for name, value in weights.items():
        torch.testing.assert_close(got[1][name], value, rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")
    for key, state in states.items():
        torch.testing.assert_close(got[0][key], state, rtol=0, atol=tolerance)
    return got[2]
