"""What exists on a rank between the trainer's setup and teardown: groups, the cut module, transport, engine.

Built in a fixed order on all ranks: (1) process groups, in plan order; (2) the module loses what other ranks hold and
is patched; (3) gradients, engine and steps. `close` undoes it, and gathers the weights of all stages first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.plugins import Precision
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_mm5d.checkpoint.checkpoint import drop_remote_state, restore_whole
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.context_parallel.hooks.apply import ContextParallel, Ranks
from lightning_mm5d.context_parallel.hooks.interface import Interface
from lightning_mm5d.engine.engine import Engine
from lightning_mm5d.engine.groups import Groups
from lightning_mm5d.engine.recorder import Recorder
from lightning_mm5d.engine.run_groups import make_groups
from lightning_mm5d.engine.transport import Transport
from lightning_mm5d.gradients.gradients import make_gradients, sum_groups
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import UNSPLIT_SCHEDULES, Graph, Schedule
from lightning_mm5d.stage import Runtime, drop_parameters, is_placeholder, views
from lightning_mm5d.tensor_parallel.apply import TensorParallel
from lightning_mm5d.trainer.device import DeviceFigures
from lightning_mm5d.trainer.measured_timeline import write_timeline
from lightning_mm5d.trainer.metrics import MetricSync
from lightning_mm5d.trainer.step_result import ResultChannel
from lightning_mm5d.trainer.steps import Replica, Steps

# by name, because they come from many packages
_OVER_WHOLE_MATRICES = {
    "Adafactor",
    "LBFGS",
    "Muon",
    "Lamb",
    "LAMB",
    "Lars",
    "LARS",
    "Shampoo",
    "SOAP",
    "Adalomo",
    "LOMO",
}


class Session:
    """The running state of one rank.

    Args:
        module: whole, and equal on all ranks.
        plan: all stages.
        schedule: its name, a table or a function.
        num_microbatches: M.
        loss_weight: what microbatches weigh.
        rank: global rank.
        device: where this rank computes.
        timeout: of operations between ranks.
        seed: for random state, the same on all ranks.
        timeline: file for the timeline of the last training step; None records none.

    Attributes:
        is_plain: whether every rank is a replica of the whole model and steps need no schedule.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        plan: Plan,
        *,
        schedule: str | Callable[[Graph], Schedule],
        num_microbatches: int,
        loss_weight: Literal["samples", "tokens"],
        rank: int,
        device: torch.device,
        timeout: timedelta,
        seed: int,
        timeline: str | None = None,
    ) -> None:
        self.plan = plan
        weighs = loss_weight != "samples" or callable(getattr(module, "loss_weight", None))
        is_whole = plan.topology.is_replicated and num_microbatches == 1
        self.is_plain = is_whole and not (weighs and plan.layout.num_replicas > 1)
        self._module, self._rank, self._device = module, rank, device
        self._unsynced, self._seed = False, seed
        self._clipper: Precision | None = None
        self._groups = Groups(timeout)
        self._in = make_groups(
            self._groups,
            plan,
            rank,
            gradients=sum_groups(plan),
            trained=[name for name, parameter in module.named_parameters() if parameter.requires_grad],
            is_plain=self.is_plain,
        )
        self._cut(schedule, num_microbatches)
        self._connect_parts(num_microbatches, loss_weight)
        self._timeline, self._schedule, self._num_microbatches = timeline, schedule, num_microbatches
        if timeline is not None:
            self._engine.recorder = Recorder(device)

    # --- before a session ---

    @staticmethod
    def connect(environment: ClusterEnvironment, backend: str | None, timeout: timedelta, device: torch.device) -> None:
        """Make the default process group, unless there is one."""
        if dist.is_initialized():
            return
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        chosen = backend or ("nccl" if device.type == "cuda" else "gloo")
        dist.init_process_group(
            chosen,
            rank=environment.global_rank(),
            world_size=environment.world_size(),
            timeout=timeout,
            device_id=device if chosen == "nccl" else None,
        )

    @staticmethod
    def wire(device: torch.device) -> torch.device:
        """Return where messages of the default group live."""
        return device if dist.get_backend() == "nccl" else torch.device("cpu")

    @staticmethod
    def agreed_seed(device: torch.device) -> int:
        """Return rank 0's seed; collective."""
        own = int(os.environ.get("PL_GLOBAL_SEED") or torch.initial_seed() % 2**62)
        seed = torch.tensor([own], device=Session.wire(device))
        dist.broadcast(seed, 0)
        return int(seed)

    # --- building ---

    def _cut(self, schedule: str | Callable[[Graph], Schedule], num_microbatches: int) -> None:
        plan, module = self.plan, self._module
        own = plan.topology.stages_of(self._rank)
        held = {key: plan.ownership.parameters[key] for key in own}
        local = frozenset().union(*held.values())
        names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        drop_parameters(module, [name for name in names if name not in local], self._device)
        every = views(plan.partition, plan.topology.members, plan.topology.consumes)
        self._views = {key: every[key] for key in own}
        self._tensor: TensorParallel | None = None
        if self._in.tensor:
            self._tensor = TensorParallel(
                module, plan.division, self._in.tensor, holds=local.__contains__, device=self._device
            )
        self._context = self._share_sequences(local)
        self._runtime = Runtime(
            module,
            plan.partition,
            {self._views[key]: held[key] for key in own},
            defers=schedule not in UNSPLIT_SCHEDULES,
            tensor=self._tensor,
            sharing=self._in.sharing,
            context=self._context,
        )
        self.transport: Transport | None = None
        if plan.topology.edges or self._in.sharing:
            self._runtime.install()
        for name, modality in plan.modalities.items():
            layers = plan.partition.layers[name]
            if modality.sequence_parallel and name in self._in.tensor and name not in self._context and layers:
                assert self._tensor is not None
                self._tensor.divide_sequences(module.get_submodule(layers), name)
        if plan.topology.edges:
            assert self._in.ascending is not None and self._in.descending is not None  # noqa: PT018
            self.transport = Transport(self._in.ascending, self._in.descending, self._device, self._rank)
        self._engine = Engine(
            plan,
            self._runtime,
            self._views,
            self.transport,
            schedule=schedule,
            num_microbatches=num_microbatches,
            rank=self._rank,
            device=self._device,
            instances=self._in.instances,
        )

    def _share_sequences(self, held: frozenset[str]) -> dict[str, ContextParallel]:
        """Share the sequences of this rank's layers over context parallel ranks; `held` are its parameters."""
        found: dict[str, ContextParallel] = {}
        if self._in.context:
            self._interface = Interface()
        for name, context in self._in.context.items():
            layers = self.plan.partition.layers[name]
            assert layers is not None, f"{name} has no layers whose sequences could be shared"
            degree = context.whole.size
            averaged = {
                id(parameter)
                for parameter_name, parameter in self._module.named_parameters(remove_duplicate=False)
                if parameter_name in held and self.plan.ownership.cp_degree(parameter_name, self._rank) == degree
            }
            found[name] = ContextParallel(
                name,
                self.plan.modalities[name],
                self._module,
                layers,
                Ranks(context, self._in.sharing[name], self._in.tensor.get(name)),
                averages=lambda x, averaged=averaged: id(x) in averaged,  # type: ignore[misc]
                interface=self._interface,
                active=lambda: self._runtime.active,
                device=self._device,
            )
        return found

    def _connect_parts(self, num_microbatches: int, loss_weight: Literal["samples", "tokens"]) -> None:
        plan, layout, module = self.plan, self.plan.layout, self._module
        held: dict[str, torch.nn.Parameter] = {}
        for name, parameter in module.named_parameters():
            if not is_placeholder(parameter):
                held[name] = parameter
        self.gradients = make_gradients(plan, self._rank, held, self._in.gradients)
        last = plan.topology.instances(plan.topology.last_stage)
        is_last = any(self._rank in ranks for ranks in last)
        self._sources = tuple(ranks[0] for ranks in last)
        self._metrics = MetricSync(
            loss_group=self._in.loss_modality if is_last else None, is_loss_modality=is_last, world_src=last[0][0]
        )
        if not self.is_plain:
            self._metrics.attach(part for part in module.modules() if isinstance(part, Metric))
        wire = Session.wire(self._device)
        replicas = {
            number: Replica(
                src=last[number][0],
                ends_here=self._rank in last[number],
                results=ResultChannel(src=last[number][0], group=self._in.replicas[number], device=wire),
            )
            for number in layout.replicas_of_rank(self._rank)
            if not self.is_plain
        }
        alone = all(len(layout.replica_ranks(number)) == 1 for number in replicas)
        self.steps = Steps(
            module,
            plan,
            self._engine,
            self.gradients,
            replicas,
            self._metrics,
            rank=self._rank,
            device=self._device,
            loss_group=self._in.loss_modality if is_last else None,
            num_microbatches=num_microbatches,
            loss_weight=loss_weight,
            seed=None if alone else self._seed,
        )
        stages = ["+".join(plan.topology.stages_of(rank)) for rank in range(layout.size)]
        self.figures = DeviceFigures(self._engine, self.transport, stages, self._device)

    # --- optimizers and gradients ---

    def adopt_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Free what `optimizers` keep for parameters of other ranks.

        Raises:
            ConfigError: with divided parameters, an optimizer whose update of an element depends on others.
        """
        for optimizer in optimizers:
            inner = getattr(optimizer, "optimizer", optimizer)
            names = {cls.__name__ for cls in type(inner).__mro__}
            if self.plan.division.shards and not names.isdisjoint(_OVER_WHOLE_MATRICES):
                raise ConfigError(
                    "configure_optimizers",
                    type(inner).__name__,
                    "Its update of an element depends on the whole matrix, and tensor parallel ranks have parts of it",
                    "Use an optimizer that works by element, such as AdamW, or tp_size=1",
                )
            drop_remote_state(optimizer)

    def drop_old_gradients(self, optimizers: Sequence[Optimizer]) -> None:
        """Free gradients that Lightning is about to zero, or two sets of them would be held."""
        module, trainer = self._module, self._module.trainer
        is_stock = type(module).optimizer_zero_grad is pl.LightningModule.optimizer_zero_grad
        if is_stock and trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            for optimizer in optimizers:
                optimizer.zero_grad()

    @contextmanager
    def synced(self, enabled: bool) -> Generator[None, None, None]:
        """Around a backward: sum the gradients that it adds over all ranks that hold their parameters.

        Gradients that an earlier backward has summed already are kept out of it.
        """
        if not enabled:
            self._unsynced = True
            yield
            return
        older = None if self._unsynced else self.gradients.take()
        yield
        # a schedule has given each replica its share of the loss; plain replicas have their own mean
        self.gradients.reduce(1.0 / self.plan.layout.num_replicas if self.is_plain else 1.0)
        self._unsynced = False
        if older is not None:
            self.gradients.add(older)

    @contextmanager
    def with_gradient(self, optimizer: Optimizer) -> Generator[None, None, None]:
        """Give an optimizer that has no gradient here an empty one; a scaler refuses to step without any."""
        params = optimizer.param_groups[0]["params"]
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            yield
            return
        empty = torch.nn.Parameter(torch.zeros(1, device=self._device))
        empty.grad = torch.zeros_like(empty)
        params.append(empty)
        try:
            yield
        finally:
            params.pop()
            optimizer.state.pop(empty, None)

    def agree_on_overflow(self, optimizer: Optimizer) -> None:
        """Let all ranks skip an optimizer's step where any rank has a gradient that is not finite; collective."""
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norms = torch._foreach_norm(grads) if grads else []
        bad = torch.zeros((), device=Session.wire(self._device))
        for norm in norms:
            bad = torch.maximum(bad, (~norm.isfinite()).to(bad))
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        if bool(bad):
            for grad in grads:
                grad.fill_(float("inf"))

    def clip_over_all_ranks(self, plugin: Precision) -> None:
        """Let a precision plugin clip by the norm over all ranks, until `close`."""

        def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
            parameters = list(plugin.main_params(optimizer))
            total = self.gradients.norm(parameters, None)
            torch.nn.utils.clip_grads_with_norm_(parameters, float(clip_val), total)

        vars(plugin)["clip_grad_by_norm"] = clip_grad_by_norm
        self._clipper = plugin

    # --- communication between replicas ---

    def reduce(self, tensor: Tensor, reduce_op: Any) -> Tensor:
        """Reduce over the replicas of the loss modality, one rank of each; the same result on all ranks."""
        name = str(getattr(reduce_op, "name", reduce_op)).lower().rpartition(".")[2]
        if name in ("max", "min"):
            result = tensor.detach().clone()
            dist.all_reduce(result, dist.ReduceOp.MAX if name == "max" else dist.ReduceOp.MIN)
            return result
        result = tensor.detach().clone() if self._rank in self._sources else torch.zeros_like(tensor)
        dist.all_reduce(result)
        if name in ("mean", "avg"):
            result = result / self.plan.layout.num_replicas
        return result

    def all_gather(self, tensor: Tensor, sync_grads: bool) -> Tensor:
        """Gather ``[D, ...]`` from one rank of each replica."""
        count = self.plan.layout.num_replicas
        run = self._runtime.active
        if run is not None:
            if not run.stage.is_last or self._in.loss_modality is None:
                return torch.stack([tensor] * count)
            if sync_grads:
                return torch.stack(_gather_with_grad(tensor, self._in.loss_modality))
            gathered = [torch.empty_like(tensor) for _ in range(count)]
            dist.all_gather(gathered, tensor.detach().contiguous(), group=self._in.loss_modality)
            return torch.stack(gathered)
        everywhere = [torch.empty_like(tensor) for _ in range(self.plan.layout.size)]
        dist.all_gather(everywhere, tensor.detach().contiguous())
        return torch.stack([everywhere[rank] for rank in self._sources])

    # --- the end ---

    def abort(self) -> None:
        """Stop without waiting for anybody."""
        if self.transport is not None:
            self.transport.abort()

    def close(self, targets: Sequence[int], gather: bool) -> None:
        """Undo what the session did to the module; with `gather`, whole on the ranks `targets`."""
        self._runtime.remove()
        for shared in self._context.values():
            shared.remove()
        if self._context:
            self._interface.remove()
        if self._tensor is not None:
            self._tensor.remove()
        self._metrics.detach()
        if self._clipper is not None:
            vars(self._clipper).pop("clip_grad_by_norm", None)
        self.figures.detach()
        if gather:
            if self.plan.topology.edges or self.plan.division.shards:
                restore_whole(self._module, self.plan, self._rank, targets)
            dist.barrier()
            if self._timeline is not None and self._engine.recorder is not None:
                write_timeline(
                    self._timeline,
                    self._engine.recorder,
                    self.plan,
                    self._schedule,
                    self._num_microbatches,
                    rank=self._rank,
                    wire=Session.wire(self._device),
                )
        if self.transport is not None:
            if gather:
                self.transport.close()
            else:
                self.transport.abort()
        if gather:
            dist.barrier()
            self._groups.destroy()


def _gather_with_grad(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    from torch.distributed.nn.functional import all_gather

    return list(all_gather(tensor, group))
