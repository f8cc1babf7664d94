"""A search for a model of the zoo, with its own batch as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
from torch.utils.data import DataLoader

from lightning_mm5d.config.modality import Modality
from lightning_mm5d.tools.cli.cluster_plan import search_of
from lightning_mm5d.tools.cli.estimates import tracer
from lightning_mm5d.tools.cli.job import Job, settle
from lightning_mm5d.tools.planner.layout_costs import Cluster
from lightning_mm5d.tools.planner.profile import Measured
from lightning_mm5d.tools.planner.search import LayoutSearch
from parity.harness import strategy
from zoo import CASES


class OneBatch(L.LightningDataModule):
    """Gives one batch of a case of the zoo."""

    def __init__(self, name: str, batch_size: int) -> None:
        super().__init__()
        self.name, self.batch_size = name, batch_size

    def train_dataloader(self) -> Any:
        return DataLoader([CASES[self.name].make_batch([1] * self.batch_size)], batch_size=None)


def searching(
    name: str,
    ranks: int,
    *,
    memory: int = 2**40,
    samples: int = 4,
    fields: Mapping[str, Any] | None = None,
    costs: Mapping[str, Sequence[float]] | None = None,
    **cluster: Any,
) -> LayoutSearch:
    """Return the search of a model on so many ranks of one node.

    Args:
        name: of the case.
        ranks: of the node.
        memory: bytes of each rank.
        samples: of a replica's batch, as the data have it.
        fields: of its modalities.
        costs: seconds of the forward of whole modalities.
        cluster: other fields of the cluster.
    """
    case = CASES[name]
    modalities = {
        key: Modality(**case.modality_paths.get(key, {}), **(fields or {}).get(key, {})) for key in case.modalities
    }
    made = strategy(modalities, num_microbatches=2)
    settle(made, ranks, 1)
    job = Job(made, case.build(), modalities, OneBatch(name, samples))
    found = Cluster(nodes=1, ranks=ranks, memory=memory, **cluster)
    told = {key: list(map(Measured, seconds)) for key, seconds in (costs or {}).items()}
    return search_of(job, found, None, tracer(job), lambda made: made.measured(told, case.modalities[-1]))[0]
