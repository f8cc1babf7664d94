"""What exists on a rank between the trainer's setup and teardown.

It is built in a fixed order on all ranks: (1) process groups, in plan order; (2) the cut module; (3) transport and
engine; (4) gradients, metrics and steps. `Session.close` undoes it, and gathers the weights of all stages first unless
ranks keep their shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection, MetricTracker

from lightning_mm5d.checkpoint.module_state import BufferState, restore_full, share_buffers
from lightning_mm5d.config.errors import private
from lightning_mm5d.data.loader import Shown, per_replica
from lightning_mm5d.data_parallel.main_parameters import MainParameters, computing_dtypes
from lightning_mm5d.engine.engine import Engine
from lightning_mm5d.engine.ordered_transport import Wire
from lightning_mm5d.engine.run_groups import Groups, PayloadGroups, RunGroups, make_groups
from lightning_mm5d.engine.step import StepGathers, make_gathering
from lightning_mm5d.gradients.gradients import ParameterHooks, SumGroups, make_gradients
from lightning_mm5d.plan.holdings import DataShards
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import UNSPLIT_SCHEDULES, Graph, Schedule
from lightning_mm5d.sharded.collectives import backend_of, message_device
from lightning_mm5d.stage import is_placeholder
from lightning_mm5d.trainer.batch_parts import BatchParts, Splitting, Weighing
from lightning_mm5d.trainer.checkpoints import Checkpoints
from lightning_mm5d.trainer.cut_module import CutModule
from lightning_mm5d.trainer.feature import BEFORE_TRANSFER, Attached, Feature, Running
from lightning_mm5d.trainer.kept_shards import has_rows, keep_shards, lose_rows
from lightning_mm5d.trainer.metrics import MetricSync, count_apart, unregistered
from lightning_mm5d.trainer.optimization import Optimization
from lightning_mm5d.trainer.process_group import device_mesh
from lightning_mm5d.trainer.replica_collectives import ReplicaCollectives
from lightning_mm5d.trainer.steps import Replica, Steps
from lightning_mm5d.trainer.turns import Turns
from lightning_mm5d.trainer.user_step import Context, ResultChannel
from lightning_mm5d.trainer.validation import main_dtype


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a rank runs.

    Attributes:
        schedule: its name, a table or a function.
        num_microbatches: M; None where each batch decides, by `microbatch_size`.
        microbatching: how a batch is split.
        loss_weight: what microbatches weigh.
        rank: global rank.
        device: where this rank computes.
        timeout: of operations between ranks.
        seed: for random state, the same on all ranks.
        features: of the strategy.
        checkpoints: of which a save may be under way.
        bucket_bytes: how much of gradients and parameters is summed or exchanged at once.
        groups: makes the process groups.
        wire: makes the transport of payloads.
    """

    schedule: str | Callable[[Graph], Schedule]
    num_microbatches: int | None
    microbatch_size: int | None
    microbatching: Splitting
    loss_weight: Weighing
    rank: int
    device: torch.device
    timeout: timedelta
    seed: int
    features: Sequence[Feature] = ()
    checkpoints: Checkpoints | None = None
    bucket_bytes: int = 25 * 2**20
    groups: Callable[..., Groups] = Groups
    wire: Callable[[PayloadGroups, torch.device, int], Wire] = PayloadGroups.transport


class Session:
    """The running state of one rank.

    Args:
        module: full or as this rank holds it, and equal on all ranks.
        plan: all stages.
        options: how this rank runs.

    Attributes:
        is_plain: whether every rank is a replica of the full model and steps need no schedule.
        moving: entered where a batch moves to the device; see `CutModule.moving`.
        steps: runs the steps of the module.
        optimization: gradients and optimizers between Lightning's hooks.
        collectives: over the replicas of the loss modality.
        turns: what ranks agree on at the start of a batch.
        buffers: which ranks have the values of buffers; None until `attach`.
        guard: of the values that other ranks have.
        shared: the parameters of which this rank owns rows.
    """

    def __init__(self, module: pl.LightningModule, plan: Plan, options: RunOptions) -> None:
        self._batch_parts = BatchParts(module, options, plan.layout, options.rank)
        shards = DataShards(plan)
        self.is_plain = plan.topology.is_replicated and options.num_microbatches == 1 and not shards.exist
        self.is_plain &= self._batch_parts.counts_equally or plan.layout.num_replicas == 1
        self.is_plain &= plan.main_params is None and not any(
            feature.needs_schedule(plan) for feature in options.features
        )
        self.plan = plan
        self._module, self._options = module, options
        self._groups = options.groups(options.timeout, device=message_device(options.device))
        self.buffers: BufferState | None = None
        # whole from its begin to its end, because replicas may have unequal numbers of batches
        self._predicts = module.trainer.predicting
        self._hooks = ParameterHooks(module)
        groups = self._run_groups = make_groups(
            self._groups,
            plan,
            options.rank,
            trained=[name for name, parameter in module.named_parameters() if parameter.requires_grad],
            is_ordered=backend_of(options.device) != "gloo",
        )
        splits_backward = options.schedule not in UNSPLIT_SCHEDULES
        rank, device = options.rank, options.device
        self._cut = CutModule(
            module, plan, groups, rank=rank, device=device, splits_backward=splits_backward, features=options.features
        )
        self._copies = self._cut.host_copies()
        self.moving = nullcontext if isinstance(self._copies, nullcontext) else self._cut.moving
        self.guard = self._cut.runtime.guard
        self._transport = None if groups.payloads is None else options.wire(groups.payloads, device, rank)
        self._engine = Engine(
            plan,
            self._cut.runtime,
            self._cut.views,
            self._transport,
            schedule=options.schedule,
            num_microbatches=self._batch_parts.count,
            rank=rank,
            device=device,
            instances=groups.instances,
            hosts=groups.hosts,
        )
        self._attached: list[Attached] = []
        self._meshes: dict[str, DeviceMesh | None] = {}
        self._connect(groups)
        world = range(plan.layout.size)
        together = self._groups.get(world, "turns", backend="gloo") if len(world) > 1 else None
        # on ranks without such layers too, which are asked for their numbers of microbatches
        meets = any(modality.sharding.reshard_after_forward for modality in plan.modalities.values()) or plan.experts
        self._meets = self._groups.get(world, "gathers of a step", backend="gloo") if meets else None
        self.turns = Turns(
            module.trainer,
            together,
            steps_together=not self.is_plain,
            predicts_together=not self.is_plain and plan.layout.num_replicas == 1,
            checkpoints=options.checkpoints,
        )

    def _connect(self, groups: RunGroups) -> None:
        """Make gradients, metrics and steps; phase 4."""
        module, plan, rank, device = self._module, self.plan, self._options.rank, self._options.device
        held = {name: parameter for name, parameter in module.named_parameters() if not is_placeholder(parameter)}
        gradients = make_gradients(
            plan,
            rank,
            held,
            SumGroups(groups.gradients, groups.across, groups.host, has_rows=DataShards(plan).exist),
            self._options.bucket_bytes,
            [*module.parameters()],
            lambda: (self._options.seed, module.current_epoch, module.trainer.fit_loop.batch_idx, module.global_step),
            device=device,
        )
        self.shared = gradients.shared
        self._mains = MainParameters(module, main_dtype(plan.main_params), self.shared)
        self._gathering = make_gathering(plan, self._cut.runtime, self._cut.views, self.shared, groups.gathers)
        last = plan.topology.instances(plan.topology.last_stage)
        is_last = any(rank in ranks for ranks in last)
        loss_group = groups.loss if is_last else None
        self._metrics = MetricSync(loss_group=loss_group, is_last=is_last, world_src=last[0][0], guard=self.guard)
        parts = [*module.modules(), *unregistered(module)]
        for part in parts if plan.layout.size > 1 or not self.is_plain else ():
            if isinstance(part, MetricCollection):
                count_apart(part)
        if not self.is_plain:
            trackers = [part for part in parts if isinstance(part, MetricTracker)]
            self._metrics.attach([part for part in parts if isinstance(part, Metric)], trackers)
        replicas = {
            number: Replica(
                src=last[number][0],
                ends_here=rank in last[number],
                results=ResultChannel(
                    src=last[number][0],
                    group=groups.replicas.get(number),
                    device=message_device(device),
                    host=groups.hosts.get(number),
                ),
            )
            for number in plan.layout.replicas_of_rank(rank)
            if not self.is_plain
        }
        self.shown = Shown(len(plan.layout.replicas_of_rank(rank)))
        runs = self._engine, gradients, replicas, self._metrics
        self.steps = Steps(
            module,
            plan,
            *runs,
            rank=rank,
            device=device,
            loss_group=loss_group,
            loss_host=groups.loss_host if is_last else None,
            batch_parts=self._batch_parts,
            seed=self._options.seed if plan.draws_by_microbatch(replicas) else None,
        )
        self.optimization = Optimization(
            module, plan, gradients, self._hooks, guard=self.guard, is_plain=self.is_plain, device=device
        )
        self.collectives = ReplicaCollectives(plan, rank, self._cut.runtime, groups.loss)

    def share(self, optimizers: Sequence[Optimizer]) -> None:
        """Leave this rank the rows that it owns, and free what `optimizers` keep for other ranks."""
        self.shared.begin(computing_dtypes(self._module), trains=bool(optimizers))
        self._mains.adopt()
        if self.shared.all:
            self._gathering.attach()
        if self.shared.all or self._meets is not None:
            shared = self._gathering, self._meets, self._cut.experts
            self._engine.gathers = StepGathers(self.plan, *shared, self._options.device)
        if self._predicts:
            self.shared.show_whole()
            self._mains.show_computing()
        self.optimization.adopt(optimizers)

    def device_mesh(self, modality: str) -> DeviceMesh | None:
        """Return the mesh of a modality's ranks; None on other ranks. Collective at the first call for it."""
        if modality not in self._meshes:
            options = self._options
            self._meshes[modality] = device_mesh(self.plan.layout, modality, self._groups, options.device, options.rank)
        return self._meshes[modality]

    def attach(self, trainer: pl.Trainer) -> None:
        """Extend the trainer until `close`: clipping, SIGTERM, hooks for batches, and features."""
        self.turns.attach()
        if not self.is_plain:
            self._metrics.attach_new(vars(trainer)["callbacks"])
        self.buffers = BufferState(self._module, self.plan)  # after the module has moved to its device
        self.optimization.clip_over_all_ranks(trainer.strategy.precision_plugin)
        # Lightning calls the hook with whatever the loader yields, also where that is several batches; this is not the
        # user's hook itself, which would then count as overridden
        vars(self._module)[BEFORE_TRANSFER] = per_replica(private(self._module, BEFORE_TRANSFER))
        running = Running(
            trainer=trainer,
            module=self._module,
            plan=self.plan,
            rank=self._options.rank,
            device=self._options.device,
            schedule=self._options.schedule,
            num_microbatches=self._batch_parts.count,
            runtime=self._cut.runtime,
            engine=self._engine,
            transport=self._transport,
            experts=self._cut.experts,
            optimization=self.optimization,
            steps=self.steps,
            groups=self._run_groups,
            more_groups=self._groups,
            turns=self.turns,
            shared=self.shared,
            buffers=self.buffers,
            is_plain=self.is_plain,
        )
        for feature in self._options.features:
            if (attached := feature.attach(running)) is not None:
                self._attached.append(attached)

    def train(self, optimizers: Sequence[Optimizer], precision: Precision, arguments: Sequence[Any]) -> Any:
        """Run `training_step`; return its output with a loss whose backward publishes gradients.

        Args:
            optimizers: of the trainer.
            precision: of the trainer.
            arguments: of the step: the batch, and what Lightning passes after it.
        """
        self.turns.begin_training_step()
        shares = bool(self.shared.all)
        if shares:
            self.optimization.hidden.take()
            self.shared.settle()
        if self.plan.main_params is not None and self._mains.adopt():  # what was unfrozen since the last step
            self._gathering.attach()
        if shares:
            self.shared.show_own()
        self.optimization.drop_old_gradients(optimizers)
        if shares:
            self._gathering.prepare()
        scaler = getattr(precision, "scaler", None)
        scale: Callable[[Tensor], Tensor] = scaler.scale if scaler is not None else lambda loss: loss
        summing = self.optimization.summing(precision)
        with self._copies, self._computing():
            output = self.steps.train(self.shown.all(arguments), precision.train_step_context, scale, summing)
        if shares:
            self.shared.show_own()
        return output

    def _computing(self) -> AbstractContextManager[None]:
        """Enter where layers compute, in their own precision where parameters have main ones."""
        return nullcontext() if self.plan.main_params is None else self._mains.computing()

    def optimize(self, arguments: Sequence[Any], context: Context) -> Any:
        """Run a `training_step` that optimizes manually; return what it returned.

        Args:
            arguments: of the step: the batch, and what Lightning passes after it.
            context: entered around its forward.
        """
        self.turns.begin_training_step()
        with self._copies:
            return self.steps.optimize(self.shown.all(arguments), context)

    def stepped(self) -> None:
        """Take note that an optimizer has stepped."""
        for feature in self.optimization.around:
            feature.stepped()

    def writes(self) -> bool | None:
        """Return whether the step that is under way writes files for all ranks here; None outside of steps."""
        ends_here = self._cut.runtime.guard.ends_here
        return None if ends_here is None else ends_here and self.steps.writes

    def evaluate(self, name: str, arguments: Sequence[Any], context: Context) -> Any:
        """Run one of the other steps; return what it would have returned for the full batch, on every rank.

        Args:
            name: of the LightningModule's method.
            arguments: of the step: the batch, and what Lightning passes after it.
            context: entered around each microbatch's forward.
        """
        self.turns.begin_evaluation_batch()
        shares = bool(self.shared.all) and not self._predicts
        if shares:
            self.shared.settle()
            self.shared.show_whole()
        with self._copies, self._computing():
            output = self.steps.evaluate(name, self.shown.all(arguments), context)
        if shares:
            self.shared.rest()
        return output

    def traffic(self) -> dict[str, Any]:
        """Return what this rank does with a microbatch, and its payloads under way, for the monitor's thread."""
        transport = self._transport
        unsent, due = (0, 0) if transport is None else (transport.unsent, transport.due)
        return {"action": self._engine.doing(), "thread": self._engine.thread(), "unsent": unsent, "due": due}

    def abort(self, why: str = "") -> None:
        """Stop without waiting for other ranks; `why` is what a main thread that waits raises."""
        if self._transport is not None:
            self._transport.abort(why)

    def close(self, targets: Sequence[int], *, failed: bool) -> None:
        """Undo what the session did to the module; collective unless `failed`.

        Args:
            targets: ranks that get the full weights; without any, all ranks keep their shards.
            failed: whether the run has failed, after which nothing can be gathered.
        """
        for attached in self._attached:
            attached.leave(targets, failed=failed)
        for attached in reversed(self._attached):
            attached.remove()
        self._cut.remove()
        self._metrics.detach()
        self.optimization.remove()
        self.turns.remove()
        vars(self._module).pop(BEFORE_TRANSFER, None)
        self._gathering.remove()
        self._mains.show_main()
        rank = self._options.rank
        if failed:
            self.abort()
            self.shared.keep(failed=True)
            lose_rows(self._module, self.plan, rank)
            return
        self.shared.settle()
        self.shared.keep()
        wire = message_device(self._options.device)
        if self.plan.topology.edges or self.plan.division.shards or has_rows(self._module, self.plan, rank):
            if targets:
                restore_full(self._module, self.plan, rank, targets, wire=wire, buffers=self.buffers)
            else:
                keep_shards(self._module, self.plan)
                share_buffers(self._module, self.plan, wire=wire, buffers=self.buffers)
        dist.barrier()
        for attached in self._attached:
            attached.finish()
        if self._transport is not None:
            self._transport.close()
        dist.barrier()
        self._groups.destroy()
