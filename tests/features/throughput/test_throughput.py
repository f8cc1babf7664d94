"""`ThroughputMonitor` counts the samples and flops of a replica once, however many ranks work on it."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger

from features.toys import LANGUAGE, PAIR, SHARED, TWINS, VISION, Layout, Run, Toy, together
from lightning_mm5d import Modality

LAYOUTS = {
    "vision | language": PAIR,
    "vision for two replicas": TWINS,
    "two replicas of everything": SHARED,
    "pp 2": Layout({"model": Modality(pp_size=2)}, 2),
    "vision | pp 2": Layout({"vision": Modality(**VISION), "language": Modality(pp_size=2, **LANGUAGE)}, 3),
    "two replicas of pp 2": Layout({"model": Modality(dp_size=2, pp_size=2)}, 4, 2),
    "replicas of unlike speed": Layout({"model": Modality(dp_size=2, pipeline={"speeds": (3, 1)})}, 2, 2),
    "zero 2": Layout({"model": Modality(dp_size=2, sharding={"zero_stage": 2})}, 2, 2),
}
FLOPS, SAMPLES = 1_000_000, 8


class Counted(Toy):
    flops_per_batch = FLOPS


class Figures(CSVLogger):
    """Keeps what is logged."""

    def __init__(self, folder: Any) -> None:
        super().__init__(folder)
        self.seen: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.seen.append(dict(metrics))


def throughput(run: Run) -> Any:
    monitor = ThroughputMonitor(
        batch_size_fn=lambda batch: len(batch["label"]), length_fn=lambda batch: batch["tokens"].numel(), window_size=2
    )
    monitor.available_flops, logger = 0, Figures(run.folder)
    trainer = run.trainer(callbacks=[monitor], logger=logger, log_every_n_steps=1)
    trainer.fit(Counted(), run.training(24, SAMPLES))
    times = [one._time for one in monitor._throughputs.values()]
    return [one for one in logger.seen if "train|flops_per_sec" in one or "train/flops_per_sec" in one], [*times[0]]


@pytest.mark.parametrize("name", LAYOUTS)
def test_figures_count_a_replica_once(name: str, tmp_path: Any) -> None:
    """Ranks as the layouts of `features.toys` say; replicas of eight samples in all."""
    layout = LAYOUTS[name]
    figures, (begin, end) = together(layout, throughput, tmp_path)[0]
    last = {key.removeprefix("train/"): value for key, value in figures[-1].items()}
    assert last["samples_per_sec"] == pytest.approx(SAMPLES / (end - begin))
    assert last["items_per_sec"] == pytest.approx(SAMPLES * 5 / (end - begin))
    # with unlike speeds the flops are those of rank 0's replica
    scale = 4 / 3 if "unlike" in name else layout.replicas
    assert last["flops_per_sec"] == pytest.approx(FLOPS * scale / (end - begin))
    assert last["batches_per_sec"] == pytest.approx(layout.replicas / (end - begin))
    assert last["device/batches_per_sec"] == pytest.approx(1 / (end - begin))
    for figure in ("samples", "items", "flops"):
        assert last[f"device/{figure}_per_sec"] * layout.world == pytest.approx(last[f"{figure}_per_sec"])
