"""Runs the real code of one rank in one process: setup, plan, groups, the cut module, engine, steps and optimizer."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric
from typing_extensions import override

from lightning_mm5d.config.errors import private
from lightning_mm5d.data.microbatch import copied
from lightning_mm5d.engine.codec import TreeChannel
from lightning_mm5d.engine.flight import AroundStep, AroundSteps, Course
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.sharded.remote_value import is_remote
from lightning_mm5d.strategy import MultimodalStrategy
from lightning_mm5d.tools.dryrun.answered import (
    BACKEND,
    AnsweredGroups,
    AnsweredTransport,
    Edge,
    Messages,
    Records,
    Sent,
    UnknownPayloadError,
    answered,
    recorded,
)
from lightning_mm5d.tools.planner.hollow_tensors import HollowTensors
from lightning_mm5d.trainer.construction import Construction, copy_without_memory
from lightning_mm5d.trainer.feature import Attached, Feature, Running
from lightning_mm5d.trainer.session import RunOptions
from lightning_mm5d.trainer.user_step import StepResult, tree_of

_STEPS = 2
_SILENT = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
KINDS = ("parameters", "gradients", "optimizer", "activations", "peak")


class DryRun(Feature, AroundSteps, AroundStep, Callback):
    """One rank on which nothing has values, and nobody else is there.

    Args:
        rank: global rank.
        records: what other ranks send.
        wanted: an edge whose first step is all that is asked for; None for two steps.

    Attributes:
        messages: of the last step.
        under_way: those of the step that runs.
        transport: of the rank, once it has one.
        seconds: of each step.
        memory: bytes by kind in the last step.
    """

    def __init__(self, rank: int, records: Records, wanted: Edge | None = None) -> None:
        super().__init__({})
        self.rank, self.records, self.wanted = rank, records, wanted
        self.hollow, self.messages = HollowTensors(), Messages()
        self.under_way = Messages()
        self.transport: AnsweredTransport | None = None
        self.seconds: list[float] = []
        self.memory = dict.fromkeys(KINDS, 0)
        self._running: Running | None = None
        self._began = 0.0
        self._base = self._enough = 0
        self._counts: Callable[[Sent], Any] = lambda sent: sent.place

    # --- doors ---

    def wire(self, plan: Plan, groups: Any, device: torch.device, rank: int) -> AnsweredTransport:
        """Return the transport of the rank."""
        self.transport = AnsweredTransport(plan, rank, self.hollow, self.under_way, self.records)
        return self.transport

    def results(self) -> list[Tensor]:
        """Return the messages that tell a rank what another one has returned: a loss, and nothing beside it."""
        messages: list[Tensor] = []
        TreeChannel(messages.append, torch.device("cpu")).send(tree_of(StepResult(torch.ones(()))))
        return messages

    def attach(self, running: Running) -> Attached | None:
        self._running = running
        running.engine.around.append(self)
        running.steps.first = None  # nothing is compared on a first batch
        running.steps.compares = False  # nor with the losses of ranks that are answered for
        return None

    def doing(self) -> str:
        """Return the action that has failed."""
        return "" if self._running is None else self._running.engine.doing()

    # --- what it measures ---

    def step(self, course: Course) -> AroundStep:
        parts = [part.batch for replica in course.step.microbatches.values() for part in replica]
        forms = {str(tree_map_only(Tensor, lambda tensor: (tensor.shape, tensor.dtype), part)) for part in parts}
        # of equal microbatches the first of each replica tells what all are
        self._enough = len(
            course.step.microbatches if len(forms) == 1 else {action.microbatch for action in course.actions}
        )
        self._counts = (lambda sent: sent.place[0]) if len(forms) == 1 else (lambda sent: sent.place)
        self._base = self.hollow.alive - self.hollow.size_of(self._gradients())
        return self

    def after(self, numbers: range) -> None:
        edges = {} if self.transport is None else self.transport.sent
        if self.wanted is not None and len({self._counts(sent) for sent in edges.get(self.wanted, ())}) >= self._enough:
            raise Enough
        activations = self.hollow.alive - self._base - self.hollow.size_of(self._gradients())
        self.memory["activations"] = max(self.memory["activations"], activations)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.under_way.clear()
        self.memory["activations"] = 0
        self.memory["parameters"] = self.hollow.size_of(self._held())
        self.hollow.peak, self._began = self.hollow.alive, time.perf_counter()

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.memory["gradients"] = sum(gradient.nbytes for gradient in self._gradients())

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)
        states = [value for opt in trainer.optimizers for state in opt.state.values() for value in state.values()]
        self.memory["optimizer"] = self.hollow.size_of(state for state in states if isinstance(state, Tensor))
        self.memory["peak"] = self.hollow.peak
        self.messages = Messages(self.under_way)

    def _held(self) -> list[Tensor]:
        assert self._running is not None
        return [parameter for parameter in self._running.module.parameters() if not is_remote(parameter)]

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._held() if parameter.grad is not None]


class HollowConstruction(Construction):
    """Gives a rank's parameters and all buffers memory that nothing touches."""

    def __init__(self, hollow: HollowTensors) -> None:
        self._hollow = hollow

    @override
    def make(self, module: Any, plan: Plan, rank: int, *, device: torch.device, wire: torch.device) -> None:
        stages = plan.topology.stages_of(rank)
        held = frozenset[str]().union(*(plan.ownership.parameters[key] for key in stages))
        known: dict[int, Any] = {}
        for path, part in module.named_modules(remove_duplicate=False):
            for name, parameter in part._parameters.items():
                full = f"{path}.{name}".lstrip(".")
                if parameter is not None and (full in held or id(parameter) in known):
                    if id(parameter) not in known:
                        hollow = nn.Parameter(self._hollow.of(parameter.detach()), parameter.requires_grad)
                        known |= {id(parameter): hollow, id(hollow): hollow}
                    part._parameters[name] = known[id(parameter)]
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.is_meta:
                    part._buffers[name] = known.setdefault(id(buffer), self._hollow.of(buffer))
            if isinstance(part, Metric):
                defaults = private(part, "_defaults")
                for name in [name for name, default in defaults.items() if isinstance(default, Tensor)]:
                    defaults[name] = torch.zeros(defaults[name].shape, dtype=defaults[name].dtype)
                    setattr(part, name, defaults[name].clone())


class DryStrategy(MultimodalStrategy):
    """A strategy whose rank runs alone; made of a configured one by `dry_strategy`."""

    dry: DryRun

    @override
    def run_guarded(self, function: Any, trainer: Any, reports: Any, *args: Any, **kwargs: Any) -> Any:
        self.set_world_ranks()
        return function(*args, **kwargs)

    @override
    def new_store(self) -> dist.Store:
        return dist.HashStore()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj

    @override
    def run_options(self, plan: Plan) -> RunOptions:
        wire: Any = partial(self.dry.wire, plan)
        return replace(super().run_options(plan), groups=AnsweredGroups, wire=wire)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        batch = next(iter(super().process_dataloader(dataloader)))  # type: ignore[call-overload]
        return [copied(batch) for _ in range(_STEPS)]

    @override
    def teardown(self) -> None:
        self._failed = True  # nobody is there to gather weights from
        super().teardown()


class Enough(BaseException):
    """All that was asked for is known."""


def dry_strategy(strategy: MultimodalStrategy, dry: DryRun) -> DryStrategy:
    """Return a strategy as `strategy`, whose rank runs alone."""
    dry_copy: Any = copy(strategy)
    dry_copy.__class__ = type("DryStrategy", (DryStrategy, type(strategy)), {})
    dry_copy.accelerator = dry_copy.parallel_devices = dry_copy.cluster_environment = dry_copy.precision_plugin = None
    dry_copy._features = (*strategy._features, dry)
    dry_copy.dry, dry_copy._construction, dry_copy._process_group_backend = dry, HollowConstruction(dry.hollow), BACKEND
    return dry_copy


class DryRuns:
    """Dry runs of the ranks of a job, which share what they know of payloads.

    Args:
        job: what is to run: the strategy, module, data, precision and plan of a `tools.cli.job.Job`.
    """

    def __init__(self, job: Any) -> None:
        self.job, self._topology = job, job.plan.topology
        self._known: dict[tuple[int, Edge], list[Sent]] = {}

    def of(self, rank: int) -> DryRun:
        """Run two steps of a rank, after as much of the ranks before it as tells what these send."""
        dry = DryRun(rank, self._records(rank, self._topology.stages_of(rank)))
        run(self.job, dry)
        return dry

    def _records(self, rank: int, stages: Iterable[StageKey]) -> Records:
        """What arrives at some stages of a rank, and what has been found beside it."""
        for stage in stages:
            for edge in (edge for edge in self._topology.edges if edge[1] == stage):
                for source in self._sources(rank, edge):
                    self._find(source, edge)
        records: dict[Edge, list[Sent]] = {}
        for (_, name), sent in self._known.items():
            records.setdefault(name, []).extend(sent)
        return records

    def _sources(self, rank: int, edge: tuple[StageKey, StageKey]) -> list[int]:
        """One rank of each instance that sends to a rank on an edge."""
        strategy = self.job.strategy
        counts = strategy.layout.microbatches(strategy.usual_microbatches())
        places = [(replica, i) for replica in strategy.layout.replicas_of_rank(rank) for i in range(counts[replica])]
        places = [place for place in places if rank in self._topology.ranks_at(edge[1], *place)]
        ends = dict.fromkeys(self._topology.ranks_at(edge[0], *place) for place in places)
        return [ranks[0] for ranks in ends if rank not in ranks]

    def _find(self, rank: int, edge: tuple[StageKey, StageKey]) -> None:
        name = str(edge[0]), str(edge[1])
        if (rank, name) in self._known:
            return
        dry = DryRun(rank, self._records(rank, [edge[0]]), name)
        blocked: UnknownPayloadError | None = None
        try:
            run(self.job, dry)
        except Enough:
            pass
        except UnknownPayloadError as error:  # in another stage of that rank
            blocked = error
        sent = [] if dry.transport is None else dry.transport.sent[name]
        if not sent:
            raise AssertionError(f"rank {rank} sends nothing on {name}") from blocked
        self._known[rank, name] = sent


def run(job: Any, dry: DryRun) -> None:
    """Run two steps of one rank.

    Raises:
        Enough: what `dry` wants to know is known.
        UnknownPayloadError: the rank needs what nothing is known of.
    """
    strategy = dry_strategy(job.strategy, dry)
    module = copy_without_memory(job.module)
    vars(module)["configure_model"] = lambda: None  # it has run
    node, place = divmod(dry.rank, per_node := job.strategy.num_processes)
    named = patch.dict(os.environ, {"LOCAL_RANK": str(place), "NODE_RANK": str(node), "MASTER_PORT": "1"})
    groups, records = answered(dry.under_way, dry.results), recorded(lambda: dry.transport)
    shown = patch.object(rank_zero_only, "rank", dry.rank, create=True)  # or others after it would say nothing
    with named, shown, groups, records, warnings.catch_warnings(), dry.hollow:
        warnings.simplefilter("ignore")
        silent: Any = dict.fromkeys(_SILENT, False)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=per_node,
            num_nodes=job.strategy.num_nodes,
            strategy=strategy,
            precision=job.precision,
            max_steps=_STEPS,
            max_epochs=1,
            limit_val_batches=0,
            callbacks=[dry],
            **silent,
        )
        try:
            trainer.fit(module, datamodule=job.data)
        except Exception as error:
            error.add_note(f"in the dry run of rank {dry.rank}: {dry.doing() or 'before its first action'}")
            raise
