"""Estimated and measured steps of the small LLaVA of `two_ranks` in layouts of a few ranks, and of a proposed layout.

The estimates know what one process measures of the layers, forwards and backwards, and of the step of the optimizers,
and what ``mm5d doctor --links`` measures of links, memory and processes that compute beside each other. Nothing is
fitted to a run on ranks. Ranks are two, or those of ``--ranks 3`` or ``--ranks 4``; each has a core of its own, or rows
tell nothing. The last two rows are the layout that the search proposes over the best of those measured, and over the
best of those that put encoder and language model on ranks of their own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader
from turns import WARMUP, Side, Turns, fit, race_all, row
from two_ranks import BATCH, MICROBATCHES, Llava, Samples

from lightning_mm5d import Modality, MultimodalStrategy
from lightning_mm5d.config.groups import with_fields
from lightning_mm5d.partition.find import find
from lightning_mm5d.tools.cli.cluster_file import read_cluster
from lightning_mm5d.tools.cli.cluster_plan import search_of
from lightning_mm5d.tools.cli.estimates import first_microbatch, tracer
from lightning_mm5d.tools.cli.job import Job, settle
from lightning_mm5d.tools.planner.layout_costs import LayoutCosts
from lightning_mm5d.tools.planner.profile import measure, measure_update
from lightning_mm5d.tools.planner.search import Candidate, LayoutSearch, words

STEPS = 12 + WARMUP
SHARED = Modality(colocate_with="language")
FIRST = Modality(colocate_with="language.0")
Layout = tuple[dict[str, Modality], str]


def _both(schedule: str = "1f1b", encoder: Modality = SHARED, **language: Any) -> Layout:
    return {"vision": encoder, "language": with_fields(Modality(), **language)}, schedule


OF_TWO: dict[str, Layout] = {
    "encoder | language, 1f1b": _both(encoder=Modality()),
    "encoder | language, zero_bubble": _both("zero_bubble", encoder=Modality()),
    "encoder and pp 2, gpipe": _both("gpipe", FIRST, pp_size=2),
    "encoder and pp 2, 1f1b": _both("1f1b", FIRST, pp_size=2),
    "encoder and pp 2, zero_bubble": _both("zero_bubble", FIRST, pp_size=2),
    "encoder on both of pp 2, 1f1b": _both("1f1b", pp_size=2),
    "encoder on both of pp 2, zero_bubble": _both("zero_bubble", pp_size=2),
    "encoder on both of pp 2, interleaved": _both("interleaved", pp_size=2, pp_chunks=2),
    "encoder on both of pp 2, zbv": _both("zbv", pp_size=2, pp_chunks=2),
    "two replicas": _both(dp_size=2),
    "two replicas, zero_stage 3": _both(dp_size=2, zero_stage=3),
    "encoder pp 2 and pp 2, 1f1b": _both("1f1b", Modality(pp_size=2, colocate_with="language"), pp_size=2),
}


OF_THREE: dict[str, Layout] = {
    "encoder | language pp 2, 1f1b": _both(encoder=Modality(), pp_size=2),
    "encoder | language pp 2, zero_bubble": _both("zero_bubble", Modality(), pp_size=2),
    "encoder pp 2 | language, 1f1b": _both(encoder=Modality(pp_size=2)),
    "encoder and pp 3, 1f1b": _both("1f1b", FIRST, pp_size=3),
    "encoder on all of pp 3, 1f1b": _both("1f1b", pp_size=3),
    "encoder on all of pp 3, zero_bubble": _both("zero_bubble", pp_size=3),
}
OF_FOUR: dict[str, Layout] = {
    "encoder | language pp 3, 1f1b": _both(encoder=Modality(), pp_size=3),
    "encoder pp 2 | language pp 2, 1f1b": _both(encoder=Modality(pp_size=2), pp_size=2),
    "encoder pp 2 | language pp 2, zero_bubble": _both("zero_bubble", Modality(pp_size=2), pp_size=2),
    "encoder tp 2 | language tp 2, 1f1b": _both(encoder=Modality(tp_size=2), tp_size=2),
    "two replicas of encoder | language, 1f1b": _both(encoder=Modality(), dp_size=2),
    "encoder on all of pp 4, zero_bubble": _both("zero_bubble", pp_size=4),
    "two replicas of encoder on both of pp 2, 1f1b": _both("1f1b", pp_size=2, dp_size=2),
    "four replicas": _both(dp_size=4),
}
LAYOUTS = {2: OF_TWO, 3: OF_THREE, 4: OF_FOUR}


class Data(L.LightningDataModule):
    """The samples of `two_ranks`."""

    def __init__(self, batch_size: int = BATCH) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(), batch_size=self.batch_size)


def searched(ranks: int) -> LayoutSearch:
    """The search of so many ranks, with costs that one process measures here."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.yaml"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*launcher, "-m", "lightning_mm5d.tools.cli.main", "doctor", "--links", "--out", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        cluster = read_cluster(file)
    modalities = {"vision": Modality(), "language": Modality()}
    strategy = MultimodalStrategy(modalities, batching={"num_microbatches": MICROBATCHES})
    settle(strategy, ranks, 1)
    job = Job(strategy, Llava(), modalities, Data())

    def scaled(costs: LayoutCosts) -> Any:
        assert job.module is not None
        assert costs.step.states is not None
        seconds = measure(job.module, first_microbatch(job), find(job.module, modalities), costs.rows)
        return costs.measured(seconds, "language", measure_update(costs.step.states, costs.step.updated))

    return search_of(job, replace(cluster, memory=2**40), None, tracer(job), scaled, replicas=1)[0]


def measured(candidate: Candidate, ranks: int) -> float:
    """The median step."""
    modalities = dict(candidate.modalities)
    batching = {"num_microbatches": candidate.microbatches}
    samples = candidate.samples * candidate.microbatches

    def train(turns: Turns, _: int) -> None:
        strategy = MultimodalStrategy(modalities, schedule=candidate.schedule, batching=batching)
        few = torch.utils.data.Subset(Samples(), range(STEPS * samples))
        fit(Llava(), DataLoader(few, batch_size=samples), strategy, ranks, turns)

    return statistics.median(race_all([Side(ranks, train)], STEPS)[0].seconds)


def main(names: list[str], ranks: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    search, steps, within = searched(ranks), dict[str, float](), 0
    for name, (modalities, schedule) in LAYOUTS[ranks].items():
        if names and not any(part in name for part in names):
            continue
        replicas = modalities["language"].dp_size or 1
        count = MICROBATCHES // replicas
        candidate = Candidate(modalities, schedule, BATCH // MICROBATCHES, count)
        judged = search.judged(candidate)
        assert judged is not None
        steps[name], estimate = measured(candidate, ranks), judged.time.seconds
        within += abs(estimate / steps[name] - 1) <= 0.1
        row(f"estimate over step, {name}", estimate / steps[name], "0.9 to 1.1", _times(estimate, steps[name]))
    best = search.best()[0]
    seconds = measured(best.candidate, ranks)
    proposed = f"proposed ({words(best.candidate)})"
    row(
        f"estimate over step, {proposed}", best.time.seconds / seconds, "0.9 to 1.1", _times(best.time.seconds, seconds)
    )
    print(f"within a tenth: {within} of {len(steps)} layouts")
    row(
        f"{proposed} over the best of these",
        seconds / min(steps.values()),
        "1.05",
        _times(seconds, min(steps.values())),
    )
    apart = [step for name, step in steps.items() if name.startswith("encoder") and " | " in name]
    if apart:
        row(f"the best of encoder | language over {proposed}", min(apart) / seconds, "1.1", _times(min(apart), seconds))


def _times(first: float, second: float) -> str:
    return f"{1e3 * first:.0f} / {1e3 * second:.0f} ms"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of layouts; all without them")
    parser.add_argument("--ranks", type=int, default=2, choices=LAYOUTS)
    arguments = parser.parse_args()
    main(arguments.names, arguments.ranks)
