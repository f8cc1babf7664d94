"""Replicas with unlike pipelines and speeds train as one process does on the samples of all of them.

Each case trains a tiny model for three steps of SGD in float64 on the layout that its name says, the last step with
fewer samples than the others. Ranks lie as always: pipeline ranks slowest, so that ``[4, 3]`` is "replica 0: ranks 0,
2, 4, 6; replica 1: ranks 1, 3, 5".
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import MixtralConfig, MixtralForCausalLM

from compare import State, assert_equal_to_one_process, tolerance
from lightning_mm5d import Modality, MultimodalStrategy, PipelineTemplate
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.tools.cli.job import settle
from parity.harness import Recorder, strategy
from ranks import call_ranks
from zoo import CASES, apply_freeze
from zoo.case import TinyModule
from zoo.text import VOCABULARY

STEPS = 3


class Unlike(NamedTuple):
    """A model, its layout, and how many microbatches each replica takes of a step."""

    name: str
    modalities: dict[str, Modality]
    world: int
    counts: tuple[int, ...]
    batch_size: int
    """of a replica on average"""
    options: dict[str, Any] = {}  # noqa: RUF012
    trainer: dict[str, Any] = {}  # noqa: RUF012
    variant: str = "none"


TEMPLATES = [PipelineTemplate(stages=[1, 3]), PipelineTemplate(stages=[2, 2]), PipelineTemplate(offsets=[-1, 1, 0])]
UNLIKE = {
    "pp 4 and pp 3": Unlike(
        "gpt2", {"model": Modality(pipeline={"pipelines": [4, 3]})}, 7, (8, 6), 7, {"num_microbatches": 7}
    ),
    "templates of pp 2, pp 2 and pp 3": Unlike(
        "t5", {"model": Modality(pipeline={"pipelines": TEMPLATES})}, 7, (3, 2, 4), 4, {"num_microbatches": 3}
    ),
    "pp 1, pp 2 and pp 1 at speeds": Unlike(
        "bert",
        {"model": Modality(pipeline={"pipelines": [1, 2, 1], "speeds": [1, 5, 2.5]})},
        4,
        (1, 7, 4),
        4,
        {"num_microbatches": 4, "schedule": "zero_bubble"},
    ),
    "dp 2 at speeds": Unlike(
        "bert",
        {"model": Modality(dp_size=2, pipeline={"speeds": [3, 1]})},
        2,
        (3, 1),
        4,
        {"num_microbatches": 2, "loss_weight": "tokens"},
        {"accumulate_grad_batches": 2},
    ),
    "dp 2 of any number of ranks, without microbatches": Unlike(
        "bert", {"model": Modality(pipeline={"pipelines": {"min": 1}})}, 2, (1, 1), 4, {"num_microbatches": 1}
    ),
    "dp 2 at equal speeds, in one microbatch": Unlike(
        "bert", {"model": Modality(dp_size=2, pipeline={"speeds": [1, 1]})}, 2, (1, 1), 4, {"num_microbatches": 1}
    ),
    "pp 2 and pp 1 with tp 2": Unlike(
        "bert", {"model": Modality(pipeline={"pipelines": [2, 1]}, tp_size=2)}, 6, (5, 3), 4, {"num_microbatches": 4}
    ),
    "pp 2 and pp 1 with cp 2": Unlike(
        "llama", {"model": Modality(pipeline={"pipelines": [2, 1]}, cp_size=2)}, 6, (5, 3), 4, {"num_microbatches": 4}
    ),
    "pp 2 and pp 1 with cp 2 whose ranks share parameters": Unlike(
        "llama",
        {
            "model": Modality(
                pipeline={"pipelines": [2, 1]},
                cp_size=2,
                sharding={"zero_stage": 3, "dp_shard_size": 2, "reshard_after_forward": True},
            )
        },
        6,
        (5, 3),
        4,
        {"num_microbatches": 4},
        {"gradient_clip_val": 0.1},
    ),
    "pp 2 and pp 1 with cp 2 whose ranks share experts and parameters": Unlike(
        "mixtral",
        {
            "model": Modality(
                pipeline={"pipelines": [2, 1]},
                cp_size=2,
                ep_size=2,
                sharding={"zero_stage": 1, "dp_shard_size": 2},
            )
        },
        6,
        (5, 3),
        4,
        {"num_microbatches": 4},
    ),
    "vision | language pp 2 and pp 1": Unlike(
        "llava",
        {"vision": Modality(), "language": Modality(pipeline={"pipelines": [2, 1]})},
        5,
        (5, 3),
        4,
        {"num_microbatches": 4},
    ),
    "vision with the first rank of language pp 3 and pp 2": Unlike(
        "llava",
        {"vision": Modality(colocate_with="language.0"), "language": Modality(pipeline={"pipelines": [3, 2]})},
        5,
        (5, 3),
        4,
        {"num_microbatches": 4},
        {"gradient_clip_val": 0.1},
    ),
    "vision pp 2 and pp 1 | language pp 1 and pp 2": Unlike(
        "llava",
        {"vision": Modality(pipeline={"pipelines": [2, 1]}), "language": Modality(pipeline={"pipelines": [1, 2]})},
        6,
        (4, 4),
        4,
        {"num_microbatches": 4, "schedule": "gpipe"},
    ),
    "frozen vision | language pp 2 and pp 1": Unlike(
        "llava",
        {"vision": Modality(), "language": Modality(pipeline={"pipelines": [2, 1]})},
        5,
        (5, 3),
        4,
        {"num_microbatches": 4},
        variant="encoder",
    ),
}

EXHAUSTIVE = (
    *("pp 2 and pp 1 with cp 2", "dp 2 of any number of ranks, without microbatches"),
    *("templates of pp 2, pp 2 and pp 3", "frozen vision | language pp 2 and pp 1"),
    "vision pp 2 and pp 1 | language pp 1 and pp 2",
)


class Rows(Dataset):
    """The samples of a batch."""

    def __init__(self, name: str, count: int) -> None:
        self.batch, self.count = CASES_HERE[name].batch(count, seed=1), count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: value[index] for key, value in self.batch.items()}


def mixture() -> L.LightningModule:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    counts = {"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": VOCABULARY}
    return TinyModule(MixtralForCausalLM(MixtralConfig(**sizes, **counts, experts_implementation="eager")))


CASES_HERE = CASES | {"mixtral": replace(CASES["llama"], name="mixtral", make_module=mixture)}


def build(case: Unlike) -> L.LightningModule:
    module = CASES_HERE[case.name].build()
    if case.variant != "none":
        apply_freeze(module, CASES_HERE[case.name], case.variant)
    return module


def fit(case: Unlike, chosen: Any, devices: int, batch_size: int) -> tuple[Recorder, State]:
    """Train for `STEPS` steps of `batch_size` samples a replica, the last of which lacks a few samples."""
    module, recorder, whole = build(case), Recorder(), case.batch_size * len(case.counts)
    data = Rows(case.name, STEPS * whole - 3)
    # the order in which Lightning lets replicas train
    sampler = DistributedSampler(data, num_replicas=1, rank=0) if chosen == "auto" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=chosen,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            max_epochs=1,
            callbacks=[recorder],
            **case.trainer,
        )
        trainer.fit(module, DataLoader(data, batch_size=batch_size, sampler=sampler))
    return recorder, module.state_dict()


def chosen(case: Unlike) -> MultimodalStrategy:
    return strategy(case.modalities, **case.options)


def train(rank: int, which: str) -> tuple[list[float], list[State], State]:
    """One rank's run: its losses, the gradients of each step, and at the end the parameters that it returns."""
    case = UNLIKE[which]
    recorder, state = fit(case, chosen(case), case.world, case.batch_size)
    return recorder.losses, recorder.gradients, state


@lru_cache
def reference(which: str) -> tuple[Recorder, State]:
    case = UNLIKE[which]
    return fit(case, "auto", 1, case.batch_size * len(case.counts))


def plan_of(case: Unlike) -> Plan:
    made = chosen(case)
    settle(made, case.world, 1)
    return made.plan(build(case))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "which", [pytest.param(one, marks=pytest.mark.exhaustive) if one in EXHAUSTIVE else one for one in UNLIKE]
)
def test_unlike_replicas_train_as_one_process(which: str) -> None:
    """The layout of the name, for instance "replica 0: ranks 0, 2, 4, 6; replica 1: ranks 1, 3, 5"."""
    case = UNLIKE[which]
    plan = plan_of(case)
    assert plan.layout.microbatches(case.options["num_microbatches"]) == case.counts
    recorder, parameters = reference(which)
    ranks = call_ranks(case.world, train, which)
    limits = tolerance(case.name in ("bert", "t5"))
    assert_equal_to_one_process(ranks, recorder, parameters, with_losses=False, where=which, **limits)


class Logging(L.LightningModule):
    """Logs the mean loss of its steps and of its epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = CASES["bert"].build()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.inner.model(**batch).loss
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("given", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch["labels"]))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def logged(rank: int | None, weight: str) -> dict[str, float]:
    """What the epoch of 21 samples logs, as two replicas that take 6 and 2 of 8 samples, or as one process."""
    modalities = {"model": Modality(dp_size=2, pipeline={"speeds": [3, 1]})}
    data = Rows("bert", 21)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1 if rank is None else 2,
            strategy="auto" if rank is None else strategy(modalities, num_microbatches=4, loss_weight=weight),
            **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False),
            max_epochs=1,
        )
        sampler = DistributedSampler(data, num_replicas=1, rank=0) if rank is None else None
        trainer.fit(Logging(), DataLoader(data, batch_size=8 if rank is None else 4, sampler=sampler))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("weight", ["samples", "tokens"])
def test_logs_of_replicas_at_speeds_are_those_of_one_process(weight: str) -> None:
    expected = logged(None, weight)
    assert {"loss_step", "loss_epoch", "given"} <= expected.keys()
    for found in call_ranks(2, logged, weight):
        assert found == pytest.approx(expected, rel=1e-9)
