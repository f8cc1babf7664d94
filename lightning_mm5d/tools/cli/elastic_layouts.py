"""Trains ranks of torchrun that a layout cannot have, by one that the planner finds for them.

``elastic: true`` in the configuration of ``mm5d fit`` lays a file over it. A script of one's own says `ElasticStrategy`
in place of `MultimodalStrategy`. Rank 0 searches, and tells the others what it has found; an error of its search is one
on all ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch.utils.data import IterableDataset
from typing_extensions import override

from lightning_mm5d.checkpoint.rank_reports import RankReports
from lightning_mm5d.config.errors import ConfigError, RankLostError, repeated
from lightning_mm5d.config.modality import as_modalities, loss_modality_of
from lightning_mm5d.data.random_state import kept_random_state
from lightning_mm5d.strategy import MultimodalStrategy
from lightning_mm5d.tools.cli.cluster_file import device_here
from lightning_mm5d.tools.cli.cluster_plan import lay_out, layout_file, quiet, said_of, search_of, sets_batch
from lightning_mm5d.tools.cli.configuration import Source, prepare
from lightning_mm5d.tools.cli.estimates import tracer
from lightning_mm5d.tools.cli.job import DTYPES, Job, configurations, load
from lightning_mm5d.tools.cli.terminal import warn
from lightning_mm5d.tools.planner.layout_costs import Cluster
from lightning_mm5d.tools.planner.search import Candidate, words
from lightning_mm5d.trainer.construction import configured, copy_without_memory
from lightning_mm5d.trainer.process_group import round_store

_SEARCHES = timedelta(minutes=30)
"""how long rank 0 may search"""


class ElasticStrategy(MultimodalStrategy):
    """A `MultimodalStrategy` whose layout is that of `mm5d plan` where torchrun's ranks cannot have the given one.

    Its arguments are those of `MultimodalStrategy`, and say the layout of the ranks that there usually are. With
    `dp_size` the samples of a step stay as many as on these, where a layout of fewer ranks can have as many.
    """

    @override
    def validate_before_launch(
        self, module: pl.LightningModule, *data: Any, callbacks: Sequence[pl.Callback] = ()
    ) -> None:
        if TorchElasticEnvironment.detect():
            layout = agreed(lambda: self._other_layout(module, data))
            if layout is not None:
                lay_out(self, as_modalities(layout["modalities"]), layout["schedule"], layout["microbatches"])
                for source in data:
                    if isinstance(source, pl.LightningDataModule) and layout["batch_size"] is not None:
                        _set_batch_size(source, layout["batch_size"])
        super().validate_before_launch(module, *data, callbacks=callbacks)

    def _other_layout(self, module: pl.LightningModule, data: Sequence[Any]) -> dict[str, Any] | None:
        """Return what these ranks train by; None where they can have the given layout."""
        self.raise_refused()
        try:
            assert self.layout.size  # raises where the sizes do not fill the world; what else is wrong is refused later
        except ConfigError as error:
            refused = error
        else:
            return None
        try:
            job = self._job(module, data, refused)
        except Exception as error:  # of user code that is called or copied before its time
            refused.add_note(
                f"No other layout is searched, since module and data cannot be tried before the run: {error}"
            )
            raise refused from error
        usual = self.modalities[loss_modality_of(self.modalities)].dp_size
        with kept_random_state():  # data draw from it
            candidate, replica_batch = best(job, _cluster(self.num_nodes, self.num_processes), usual)
        size = candidate.samples * candidate.microbatches
        return {
            "modalities": {
                name: said_of(modality, job.modalities[name]) for name, modality in candidate.modalities.items()
            },
            "schedule": candidate.schedule,
            "microbatches": candidate.microbatches,
            "batch_size": size if size != replica_batch and sets_batch(job, replica_batch) else None,
        }

    def _job(self, module: pl.LightningModule, data: Sequence[Any], refused: ConfigError) -> Job:
        """Return what a call of the trainer trains, of which a search changes nothing."""
        precision = str(self.precision_plugin.precision)
        copy = copy_without_memory(configured(module, self.precision_plugin))
        source = next((source for source in data if isinstance(source, pl.LightningDataModule)), None)
        if source is None and data and data[0] is not None:
            source = pl.LightningDataModule()
            vars(source)["train_dataloader"] = lambda: _copied(data[0])
        elif source is not None:
            source = _copied(source)
        return Job(self, copy.to(DTYPES.get(precision)), self.modalities, source, precision, refused=refused)


def _copied(data: Any) -> Any:
    """Return a copy of a dataloader or a data module whose reading leaves it as it is; samples by index are shared."""
    held = vars(data) if hasattr(data, "__dict__") else {}
    shared = {id(held[name]): None for name in ("_iterator", "trainer") if held.get(name) is not None}
    dataset = held.get("dataset")
    if dataset is not None and not isinstance(dataset, IterableDataset):
        shared[id(dataset)] = dataset
    return deepcopy(data, shared)


def _set_batch_size(data: pl.LightningDataModule, size: int) -> None:
    """Have a data module make batches of `size` samples.

    Raises:
        ConfigError: its `batch_size` stays as it is.
    """
    if "batch_size" in data.hparams:
        data.hparams["batch_size"] = size
    with suppress(AttributeError):  # a property
        data.batch_size = size  # type: ignore[attr-defined]
    if data.batch_size != size:  # type: ignore[attr-defined]
        rule = f"The layout for these ranks has batches of {size} samples, and the data module's cannot be set"
        raise ConfigError("data.batch_size", data.batch_size, rule, "Keep it in an attribute")  # type: ignore[attr-defined]


def with_layout(arguments: Sequence[str], file: Path) -> list[str]:
    """Return the arguments of ``mm5d fit``, with a layout where the configured one cannot have the ranks of this job.

    Args:
        arguments: of a LightningCLI whose configuration says ``elastic: true``; the ranks are those of torchrun.
        file: where the layout is written to.

    Raises:
        ConfigError: no layout of these ranks can run.
    """
    environment = TorchElasticEnvironment()
    if not environment.detect():
        return list(arguments)

    def searched_layout() -> str:
        per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        configs, options = configurations(arguments)
        return elastic_layout(prepare(configs, None, options), environment.world_size() // per_node, per_node)

    text = agreed(searched_layout)
    if not text:
        return list(arguments)
    file.write_text(text, encoding="utf-8")
    return [*arguments, f"--config={file}"]


def elastic_layout(source: Source, nodes: int, per_node: int) -> str:
    """Return a layout of other ranks than the configured ones, as a file that lies over the configuration.

    Args:
        source: of the configuration.
        nodes: how many there are.
        per_node: ranks of each.

    Returns:
        The text of the file; "" where the configured layout can have these ranks.
    """
    job = load(source, world=(per_node, nodes))
    if job.refused is None:
        return ""
    replicas = None
    with suppress(ConfigError):  # `devices: auto` says nothing of the ranks that there were
        replicas = load(source).strategy.num_replicas
    cluster = _cluster(nodes, per_node)
    candidate, replica_batch = best(job, cluster, replicas)
    return layout_file(candidate, job, source, cluster, replica_batch)


def _cluster(nodes: int, per_node: int) -> Cluster:
    memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else sys.maxsize
    return Cluster(nodes=nodes, ranks=per_node, memory=memory, **device_here())


def best(job: Job, cluster: Cluster, replicas: int | None) -> tuple[Candidate, int]:
    """Return the fastest layout of a cluster and the samples of a replica's batch as the data have them; print it.

    The samples of a step stay as many as `replicas` have, where a layout can have as many.

    Raises:
        ConfigError: no layout of these ranks can run.
    """
    own_ranks = sum(modality.own_ranks_per_replica for modality in job.modalities.values())
    for count in dict.fromkeys((replicas, max(cluster.size // own_ranks, 1))):
        with quiet():
            search, replica_batch = search_of(job, cluster, None, tracer(job), replicas=count)
            layouts = search.best()
        if layouts:
            break
    else:
        raise search.refusal()
    warn([f"elastic: {cluster.size} ranks train {search.batch} samples a step as {words(layouts[0].candidate)}"])
    return layouts[0].candidate, replica_batch


def agreed(find: Callable[[], Any]) -> Any:
    """Return on all ranks of torchrun the JSON value that `find` returns on rank 0.

    Raises:
        ConfigError: of `find`, on all ranks.
        RankLostError: on the other ranks, where it fails by another error.
    """
    environment = TorchElasticEnvironment()
    rank, store = environment.global_rank(), round_store(environment, _SEARCHES)
    reports = RankReports(store, "elastic layout", rank=rank, world_size=environment.world_size(), timeout=_SEARCHES)
    value: Any = None
    problem: Any = None
    failed: Exception | None = None
    if rank == 0:
        try:
            value = find()
        except ConfigError as error:
            failed, problem = error, [error.field, str(error.got), error.rule, error.fix]
        except Exception as error:
            failed, problem = error, f"{type(error).__name__}: {error}"
        reports.tell("found", [value, problem])
    value, problem = reports.hear("found")
    reports.part("found")
    if failed is not None:
        raise failed
    if isinstance(problem, list):
        raise ConfigError(*problem)
    if problem is not None:
        raise repeated(RankLostError(f"rank 0: {problem}"), 0, problem)
    return value
