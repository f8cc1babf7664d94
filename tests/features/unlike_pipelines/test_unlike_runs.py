"""Runs with unlike pipelines and speeds: metrics, batch norms, and going on in the midst of an epoch.

Layout of all: vision and the first stage of language on rank 0 with the second one on rank 2, and both on rank 1.
Replica 0 takes three of the four microbatches of a step. One launch runs everything; the tests judge what ranks return.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DistributedSampler, default_collate
from torchmetrics import MeanMetric, PearsonCorrCoef

from features.resuming import Case, assert_exact, loader, samples, stopped_and_resumed
from features.toys import LANGUAGE, VISION, WIDTH, Layout, Run, Samples, Toy, alone, assert_same, figures, together
from lightning_mm5d import ConfigError, Modality, MultimodalStrategy
from lightning_mm5d.tools.cli.job import settle

UNLIKE = Layout(
    {
        "vision": Modality(colocate_with="language.0", **VISION),
        "language": Modality(pipeline={"pipelines": [2, 1], "speeds": [3, 1]}, **LANGUAGE),
    },
    3,
    2,
)
WHOLE, SHARES = 8, ((6, 3), (2, 1))
"""samples of a step; samples and microbatches of each replica"""
COUNT = 22
CASES = {
    "after an epoch and a step": (Case(loader(COUNT, 4, shuffle=True)), 4),
    "before the last step": (Case(loader(COUNT, 4, shuffle=True)), 2),
    "in a window": (Case(loader(COUNT, 4, shuffle=True), trainer={"accumulate_grad_batches": 2}), 1),
}


class Measured(Toy):
    """Logs metrics of training and validation whose values are no means of the values of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.correlation, self.mean, self.validated = PearsonCorrCoef(), MeanMetric(), PearsonCorrCoef()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self(batch)
        loss = F.cross_entropy(logits, batch["label"])
        self.accuracy(logits, batch["label"])
        self.correlation(logits.softmax(-1)[:, 0], batch["label"].double())
        self.mean(loss, weight=len(logits))
        metrics = {"accuracy": self.accuracy, "correlation": self.correlation, "mean": self.mean}
        self.log_dict(metrics, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validated(self(batch).softmax(-1)[:, 0], batch["label"].double())
        self.log("validated", self.validated)


class Norm(nn.Module):
    """Normalizes ``[B, D]`` and ``[B, S, D]`` over all but the last dim."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden.flatten(0, -2)).view_as(hidden)


class Normed(Toy):
    """Has batch norms in all layers."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (*self.encoder.layers, *self.decoder.layers):
            layer.norm = Norm()
        self.double()


def measured(run: Run) -> dict[str, float]:
    """The metrics of an epoch whose last step lacks samples."""
    trainer = run.trainer()
    trainer.fit(Measured(), run.training(21, WHOLE), run.loader(16, WHOLE))
    return figures(trainer)


def normed(run: Run) -> dict[str, Tensor]:
    module = Normed()
    run.trainer().fit(module, run.training(2 * WHOLE, WHOLE))
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def normed_by_hand() -> list[dict[str, Tensor]]:
    """The parameters and buffers of both replicas, each with running statistics of its own microbatches."""
    module, data = Normed(), Samples(2 * WHOLE)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    order = list(DistributedSampler(data, num_replicas=1, rank=0))
    kept = [{name: value.clone() for name, value in module.named_buffers()} for _ in SHARES]
    for step in range(0, len(order), WHOLE):
        place = step
        for buffers, (count, microbatches) in zip(kept, SHARES, strict=True):
            module.load_state_dict(buffers, strict=False)
            for _ in range(microbatches):
                part = order[place : (place := place + count // microbatches)]
                batch = default_collate([data[index] for index in part])
                (module.loss(batch) * len(part) / WHOLE).backward()
            buffers.update((name, value.clone()) for name, value in module.named_buffers())
        optimizer.step()
        optimizer.zero_grad()
    parameters = {name: value.detach() for name, value in module.named_parameters()}
    return [parameters | buffers for buffers in kept]


def everything(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = {"measured": measured(run), "normed": normed(run)}  # before resumed runs seed everything
    found["resumed"] = {name: stopped_and_resumed(run, case, after, name) for name, (case, after) in CASES.items()}
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return together(UNLIKE, everything, tmp_path_factory.mktemp("unlike"), num_microbatches=2)


def test_metrics_are_those_of_one_process(ranks: list[dict[str, Any]]) -> None:
    expected = alone(measured)
    assert {"accuracy", "correlation", "mean", "validated"} <= expected.keys()
    for found in ranks:
        assert_same(found["measured"], expected, 1e-6)


def test_batch_norms_take_the_statistics_of_each_microbatch(ranks: list[dict[str, Any]]) -> None:
    """The module holds the running statistics of replica 0 after the run, and rank 1 those of its own."""
    first, second = normed_by_hand()
    assert not torch.equal(first["decoder.layers.0.norm.inner.running_mean"], torch.zeros(WIDTH))
    assert_same(ranks[0]["normed"], first)
    assert_same(ranks[1]["normed"], second)


@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_in_the_midst_of_an_epoch_to_the_last_bit(ranks: list[dict[str, Any]], name: str) -> None:
    found = [rank["resumed"][name] for rank in ranks]
    window = CASES[name][0].trainer.get("accumulate_grad_batches", 1)
    for number, one in enumerate(found):
        if number > 0:
            one["whole"]["weights"] = {}  # rank 0 has them all
        assert_exact(one, one["after"] % 3 % window)
    for epoch in range(2):
        seen = [sample for one in found[:2] for sample in samples(one["whole"]["steps"], epoch)]
        assert sorted(seen) == list(range(COUNT))
        assert len(samples(found[0]["whole"]["steps"], epoch)) == 17  # 6, 6 and 5 of 8, 8 and 6


@pytest.mark.parametrize(
    "modality",
    [
        Modality(pipeline={"pipelines": [2, 1]}),
        Modality(dp_size=3, pipeline={"speeds": [2, 1, 1]}),
        Modality(pipeline={"pipelines": {"min": 1}}),
    ],
)
def test_batch_norms_that_wait_for_all_ranks_are_refused(modality: Modality) -> None:
    module = Normed()
    module.decoder.layers[1].norm.inner = nn.SyncBatchNorm(WIDTH)
    strategy = MultimodalStrategy({"model": modality}, batching={"num_microbatches": 2})
    settle(strategy, 3, 1)
    with pytest.raises(ConfigError, match=r"^decoder\.layers\.1\.norm\.inner: got 'SyncBatchNorm'"):
        strategy.validate(module)


def test_lightnings_own_conversion_of_batch_norms_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^Trainer\(sync_batchnorm=\.\.\.\): got True"):
        Run(UNLIKE, folder=tmp_path).trainer(sync_batchnorm=True)


def test_manual_optimization_is_refused_where_samples_are_dealt_out() -> None:
    module = Toy()
    module.automatic_optimization = False
    strategy = MultimodalStrategy({"model": Modality(pipeline={"pipelines": {"min": 1}})})
    settle(strategy, 3, 1)
    with pytest.raises(ConfigError, match=r"automatic_optimization: .*neither pipelines nor speeds"):
        strategy.validate(module)
