"""torchmetrics over the ranks of a pipeline, on gloo.

Layouts: "two replicas": encoders on ranks 0-1, loss replicas on ranks 2 and 3; "one replica": encoders on
ranks 0-1, rank of the last stage 2 (rank 3 is not part of it). One launch of four processes runs everything; the tests
judge what the ranks report.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, MinMaxMetric, PearsonCorrCoef
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassPrecision,
    MulticlassRecall,
)

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.sharded.remote_value import Guard
from lightning_mm5d.trainer.metrics import JoinedMetrics, MetricSync
from ranks import run_ranks

LIMIT_S = 60.0  # wall clock of the launch; a deadlock ends here
WORLD = 4
# the microbatches of each replica, as spans of the 24 samples
SPANS = {2: [(0, 3), (3, 6), (6, 9), (9, 14)], 3: [(14, 17), (17, 20), (20, 22), (22, 24)]}


class SumOfMaxima(Metric):
    """States that only a list can hold: rows of different lengths, left as they are by a sync."""

    rows: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", [], dist_reduce_fx=None)

    def update(self, row: Tensor) -> None:
        self.rows.append(row)

    def compute(self) -> Tensor:
        return torch.stack([row.max() for row in self.rows]).sum()


def data(start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """Samples ``[start, stop)`` of 24: logits [B, 3], classes [B], scores [B]."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(24, 3, generator=generator)
    classes = torch.randint(3, (24,), generator=generator)
    scores = torch.rand(24, generator=generator)
    return logits[start:stop], classes[start:stop], scores[start:stop]


def make() -> dict[str, Metric]:
    return {
        "accuracy": MulticlassAccuracy(3, average="micro"),
        "auroc": BinaryAUROC(),
        "cat": CatMetric(),
        "mean": MeanMetric(),
        "pearson": PearsonCorrCoef(),
        "sum_of_maxima": SumOfMaxima(),
    }


def update(metrics: dict[str, Metric], start: int, stop: int) -> None:
    logits, classes, scores = data(start, stop)
    metrics["accuracy"].update(logits, classes)
    metrics["auroc"].update(scores, classes > 0)
    metrics["cat"].update(scores)
    metrics["mean"].update(scores)
    metrics["pearson"].update(scores, logits[:, 0])
    metrics["sum_of_maxima"].update(scores)


def make_collection() -> MetricCollection:
    return MetricCollection([MulticlassAccuracy(3), MulticlassPrecision(3), MulticlassRecall(3)])


def compute(metrics: dict[str, Metric]) -> dict[str, Tensor]:
    return {name: metric.compute() for name, metric in metrics.items()}


def share(rank: int, step: int) -> list[tuple[int, int]]:
    """The microbatches of this rank in each of two steps; encoder ranks are cut off before any metric."""
    return SPANS[rank][2 * step : 2 * step + 2] if rank in SPANS else []


# --- what the ranks run ---


def two_replicas(rank: int, sync: MetricSync) -> dict[str, Any]:
    found: dict[str, Any] = {}
    metrics = make()
    sync.attach(metrics.values())

    with sync.local():
        for span in share(rank, 0):
            update(metrics, *span)
        if rank == 2:  # a rank of the last stage alone computes, and caches, in the middle of a schedule
            found["mid-schedule accuracy"] = metrics["accuracy"].compute()
    found["after one step"] = compute(metrics)
    found["cached"] = compute(metrics)
    with sync.local():
        for span in share(rank, 1):
            update(metrics, *span)
    found["after two steps"] = compute(metrics)
    found["own values in cat"] = sum(value.numel() for value in metrics["cat"].metric_state["value"])

    twin = copy.deepcopy(metrics["cat"])
    twin._computed = None
    found["copy"] = twin.compute()

    for metric in metrics.values():
        metric.reset()
    with sync.local():
        if rank >= 2:
            update(metrics, 0, 4)
    found["after reset"] = metrics["mean"].compute()
    return found


def collection_of_two_replicas(rank: int, sync: MetricSync) -> dict[str, Any]:
    collection = make_collection()
    sync.attach(collection.values(copy_state=False))
    steps = []
    for step in (0, 1):
        with sync.local():
            for span in share(rank, step):
                collection.update(*data(*span)[:2])
        steps.append(collection.compute())
    return {"collection": steps, "groups": len(collection.compute_groups)}


def strays(rank: int, sync: MetricSync) -> dict[str, Any]:
    """Encoders that update before they are cut off; ranks of the last stage that run the step for earlier stages."""
    metrics = make()
    sync.attach(metrics.values())
    with sync.local():
        if rank < 2:
            update(metrics, 0, 2)
        else:
            with sync.discarded():
                update(metrics, *((0, 24) if rank == 2 else (3, 9)))
            for span in SPANS[rank]:
                update(metrics, *span)
                with sync.discarded():
                    update(metrics, 5, 7)
    return {"strays": compute(metrics), "counts": metrics["mean"].update_count}


def one_replica(rank: int, sync: MetricSync) -> dict[str, Any]:
    metrics = make()
    sync.attach(metrics.values())
    with sync.local():
        if rank == 2:
            for start in range(0, 24, 4):
                update(metrics, start, start + 4)
    return {"one replica": compute(metrics)}


def rank_body(rank: int) -> dict[str, Any]:
    loss_groups = dist.new_group([2, 3])
    three = dist.new_group([0, 1, 2])
    found = {}
    for scenario in (two_replicas, collection_of_two_replicas, strays):
        sync = MetricSync(loss_group=loss_groups, is_last=rank >= 2, world_src=2)
        found |= scenario(rank, sync)
    if rank < 3:
        sync = MetricSync(loss_group=None, is_last=rank == 2, world_src=2, world_group=three)
        found |= one_replica(rank, sync)
    everyone = MetricSync(loss_group=dist.group.WORLD, is_last=True, world_src=0)
    mean = MeanMetric()
    everyone.attach([mean])
    mean.update(float(rank))
    found["all loss_modality"] = mean.compute()
    return found


def rank_main(rank: int) -> dict[str, Any]:
    warnings.simplefilter("error")
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S / 2))
    return rank_body(rank)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What each of the four ranks found."""
    return run_ranks(WORLD, rank_main, limit=LIMIT_S)


@pytest.fixture
def alone() -> Iterator[MetricSync]:
    """A sync in a world of one, for what needs no peers."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield MetricSync(loss_group=None, is_last=True, world_src=0)
    dist.destroy_process_group()


def one_process(name: str, *spans: tuple[int, int]) -> Tensor:
    """The value of a metric that saw these samples, in this order."""
    metrics = make()
    for span in spans:
        update(metrics, *span)
    return metrics[name].compute()


NAMES = sorted(make())
STEP_ONE = [*share(2, 0), *share(3, 0)]
STEPS = [*SPANS[2], *SPANS[3]]


# --- several ranks ---


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_computes_what_one_process_with_all_samples_would(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        torch.testing.assert_close(found["after one step"][name], one_process(name, *STEP_ONE))


@pytest.mark.parametrize("name", NAMES)
def test_updates_after_a_compute_are_seen_by_the_next_one_on_every_rank(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        torch.testing.assert_close(found["cached"][name], found["after one step"][name], rtol=0, atol=0)
        torch.testing.assert_close(found["after two steps"][name], one_process(name, *STEPS))


@pytest.mark.parametrize("name", NAMES)
def test_one_terminal_rank_gives_its_value_to_all(ranks: list[dict[str, Any]], name: str) -> None:
    expected = one_process(name, *((start, start + 4) for start in range(0, 24, 4)))
    for found in ranks[:3]:
        torch.testing.assert_close(found["one replica"][name], expected)


@pytest.mark.parametrize("name", NAMES)
def test_updates_on_encoder_ranks_and_discarded_ones_count_nowhere(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        torch.testing.assert_close(found["strays"][name], one_process(name, *STEPS))
    assert [found["counts"] for found in ranks] == [1, 1, 4, 4]


def test_a_collection_with_compute_groups_agrees_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for step, spans in enumerate((STEP_ONE, STEPS)):
        reference = make_collection()
        for span in spans:
            reference.update(*data(*span)[:2])
        for found in ranks:
            torch.testing.assert_close(found["collection"][step], reference.compute())
    assert [found["groups"] for found in ranks] == [3, 3, 1, 1]  # states are shared where there are updates


def test_each_rank_keeps_its_own_states_after_a_compute(ranks: list[dict[str, Any]]) -> None:
    assert [found["own values in cat"] for found in ranks] == [0, 0, 14, 10]


def test_a_compute_inside_a_schedule_covers_this_replica_only(ranks: list[dict[str, Any]]) -> None:
    expected = one_process("accuracy", *share(2, 0))
    torch.testing.assert_close(ranks[2]["mid-schedule accuracy"], expected)


def test_a_deep_copy_syncs_its_own_states(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        torch.testing.assert_close(found["copy"], one_process("cat", *STEPS))


def test_a_reset_starts_over_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        torch.testing.assert_close(found["after reset"], one_process("mean", (0, 4)))


def test_nothing_is_published_where_all_ranks_are_terminal(ranks: list[dict[str, Any]]) -> None:
    assert [found["all loss_modality"].item() for found in ranks] == [1.5] * WORLD


# --- one rank ---


def test_detach_restores_the_stock_sync(alone: MetricSync) -> None:
    metric = MeanMetric()
    alone.attach([metric])
    assert "sync" in vars(metric)
    alone.detach()
    assert "sync" not in vars(metric)
    assert pickle.loads(pickle.dumps(metric)).update_count == 0


def test_sync_on_compute_false_is_overridden_with_a_warning(alone: MetricSync) -> None:
    metric = MeanMetric(sync_on_compute=False)
    with pytest.warns(UserWarning, match=r"MeanMetric\(sync_on_compute=False\)"):
        alone.attach([metric])
    assert metric.sync_on_compute


def test_sync_on_step_is_warned_about_and_does_nothing_in_a_schedule(alone: MetricSync) -> None:
    metric = MeanMetric(dist_sync_on_step=True)
    with pytest.warns(UserWarning, match=r"MeanMetric\(dist_sync_on_step=True\)"):
        alone.attach([metric])
    with alone.local():
        assert metric(3.0) == 3.0
        assert metric(5.0) == 5.0
    assert metric.compute() == 4.0


def test_a_compute_in_a_step_is_told_of_where_it_covers_some_microbatches_alone(alone: MetricSync) -> None:
    sync = MetricSync(loss_group=None, is_last=True, world_src=0, guard=Guard(str))
    metric, other = MeanMetric(), MinMaxMetric(MeanMetric())
    sync.attach([metric, other, other._base_metric])
    with sync.local(JoinedMetrics(lambda: 0)):  # forwards compute, too
        metric(torch.tensor([3.0]))
        other(torch.tensor([3.0]))
        with pytest.warns(UserWarning, match=r"MeanMetric\.compute\(\) in a step covers the microbatches so far"):
            metric.compute()
        metric.update(torch.tensor([5.0]))
        metric.compute()
    with sync.local():
        metric.update(torch.tensor([5.0]))
        other._base_metric.compute()


def test_a_metric_with_its_own_process_group_is_refused(alone: MetricSync) -> None:
    with pytest.raises(ConfigError, match=r"MeanMetric\.process_group: .* Leave process_group unset"):
        alone.attach([MeanMetric(process_group=dist.group.WORLD)])


def test_discarded_states_come_back_even_after_an_error(alone: MetricSync) -> None:
    metric = CatMetric()
    alone.attach([metric])
    metric.update(torch.tensor([1.0, 2.0]))

    def cut_off() -> None:
        with alone.discarded():
            metric.update(torch.tensor([9.0]))
            raise RuntimeError("cut off")

    with pytest.raises(RuntimeError, match="cut off"):
        cut_off()
    assert metric.compute().tolist() == [1.0, 2.0]


def test_metrics_of_a_callback_sync_by_the_layout_also_those_that_it_makes_later(alone: MetricSync) -> None:
    class Holder:
        def __init__(self) -> None:
            self.total, self.many = CatMetric(), {"mean": MeanMetric()}
            self.local = MeanMetric(sync_on_compute=False)  # which one rank alone may compute

    holder = Holder()
    alone.attach_new([holder])
    assert all("sync" in vars(metric) for metric in (holder.total, holder.many["mean"]))
    assert "sync" not in vars(holder.local)
    holder.total = CatMetric()
    holder.both = MetricCollection({"a": MeanMetric(), "b": CatMetric()})  # type: ignore[attr-defined]
    with alone.local():
        assert "sync" in vars(holder.total)
        assert all("sync" in vars(metric) for metric in holder.both.values())  # type: ignore[attr-defined]
    alone.detach()
    assert "sync" not in vars(holder.total)
