"""What a feature is: the protocol by which what only some runs need plugs into the core.

A feature is a package below ``features``; `config.features` lists them, and nothing else names one. Its phases:

1. check: after the core's own checks, on every process, before processes and again when the module is set up;
2. layers, cut: on each rank of a run, while its module is cut down to what it computes;
3. loading: for each dataloader that Lightning has prepared, which a module may ask for before 4;
4. attach: when module, engine and optimizers are ready. While the run lasts, the engine and the optimization call what
   a feature has appended to their doors (`Engine.around`, `Optimization.around`). What it has put in front of an
   attribute (`sharded.removable`) is called in place of it;
5. leave, remove: when the run has ended or failed, the latter in reverse order;
6. finish: after a run that has not failed, when the weights are where they belong; collective.

All ranks attach features in the order of the list, so that these may be collective. They import the core
and never each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_mm5d.checkpoint.module_state import BufferState
from lightning_mm5d.config.features import parts
from lightning_mm5d.data_parallel.shared_parameters import SharedParameters
from lightning_mm5d.engine.agreement import Agreement
from lightning_mm5d.engine.engine import Engine
from lightning_mm5d.engine.ordered_transport import Wire
from lightning_mm5d.engine.run_groups import Groups, RunGroups
from lightning_mm5d.expert_parallel import Experts
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import AnySchedule
from lightning_mm5d.sharded.removable import Removable
from lightning_mm5d.stage import Runtime
from lightning_mm5d.trainer.optimization import Optimization
from lightning_mm5d.trainer.steps import Steps
from lightning_mm5d.trainer.turns import Turns

BEFORE_TRANSFER = "_on_before_batch_transfer"
"""of the LightningModule: what calls the user's hook, right before a batch moves to its device"""


@dataclass(frozen=True, kw_only=True)
class Running:
    """A run on one rank, as features see it.

    Attributes:
        trainer: that runs.
        module: of the user, cut down to this rank.
        plan: all stages.
        rank: global rank.
        device: where this rank computes.
        schedule: its name, a table or a function.
        num_microbatches: M; None where each batch decides.
        runtime: the patched module.
        engine: runs the actions of steps.
        transport: carries payloads; None where nothing is sent.
        experts: that this rank shares; None without any.
        optimization: gradients and optimizers.
        steps: run the steps of the module.
        groups: of ranks, of this rank.
        more_groups: makes further groups; collective.
        turns: what ranks agree on when a batch begins.
        shared: the parameters of which this rank owns rows.
        buffers: which ranks have the values of buffers.
        is_plain: whether every rank is a replica of the full model and steps need no schedule.
    """

    trainer: pl.Trainer
    module: pl.LightningModule
    plan: Plan
    rank: int
    device: torch.device
    schedule: AnySchedule
    num_microbatches: int | None
    runtime: Runtime
    engine: Engine
    transport: Wire | None
    experts: Experts | None
    optimization: Optimization
    steps: Steps
    groups: RunGroups
    more_groups: Groups
    turns: Turns
    shared: SharedParameters
    buffers: BufferState
    is_plain: bool


class Attached(Removable):
    """A feature on one rank, from `Feature.attach` on; `remove` is not collective, because the run may have failed."""

    def leave(self, targets: Sequence[int], *, failed: bool) -> None:
        """A run ends, and the module is still that of this rank; collective unless it has failed.

        Args:
            targets: ranks that get the full weights; without any, all ranks keep their shards.
            failed: whether the run has failed, after which nothing can be gathered.
        """

    def finish(self) -> None:
        """The run has ended well, and weights are where they belong; collective."""


class Feature:
    """One feature of a strategy; what a subclass leaves out does nothing.

    Args:
        fields: of the strategy, by name, as the user gave them and after their checks.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        pass

    def check(self, module: pl.LightningModule, plan: Plan, device: torch.device) -> None:
        """Refuse what this module, plan or device cannot do.

        Raises:
            ConfigError: names the field of the feature.
        """

    def check_callbacks(self, callbacks: Sequence[pl.Callback], plan: Plan) -> None:
        """Refuse callbacks of the trainer that cannot work with this plan.

        Raises:
            ConfigError: names the callback.
        """

    def saving(self, checkpoint: dict[str, Any], module: pl.LightningModule) -> None:
        """Add something to a checkpoint, on the rank that writes it."""

    def needs_schedule(self, plan: Plan) -> bool:
        """Whether a schedule runs the steps of replicas of the full model, too, which else run as they are."""
        return False

    def layers(
        self, module: pl.LightningModule, layers: Mapping[str, list[str]], plan: Plan, in_lock_step: Callable[[], bool]
    ) -> Callable[[], None] | None:
        """Stand before the forwards of this rank's layers, which tensor parallel ranks have sharded, and nothing else.

        Args:
            module: of the user, without the parameters of other ranks.
            layers: the paths of this rank's layers, by modality.
            plan: all stages.
            in_lock_step: whether all ranks of a replica run the same code at the moment.

        Returns:
            What undoes it; None where nothing was done.
        """

    def cut(self, runtime: Runtime, plan: Plan, device: torch.device) -> Callable[[], None] | None:
        """Stand before callables of the module on one rank.

        It comes after the `layers` of all features, and before what other ranks compute is patched: so what stands
        before a callable is called wherever the callable is.

        Returns:
            What undoes it; None where nothing was done.
        """

    def loading(self, dataloader: Any, trainer: pl.Trainer, agreement: Agreement | None) -> None:
        """A dataloader of this rank is there, from which nothing was read; all ranks come here in the same order.

        Args:
            dataloader: what `data.loader.shard_loader` returned.
            trainer: that reads it.
            agreement: compares statements of all ranks; None before they have met.

        Raises:
            ConfigError: the feature cannot work with these data.
        """

    def attach(self, running: Running) -> Attached | None:
        """Begin on one rank of a run; None where the feature has nothing to do there."""


def is_of_user(hook: Callable[..., Any]) -> bool:
    """Whether a hook is neither Lightning's nor this package's."""
    module = str(getattr(hook, "__module__", ""))
    return not module.startswith(("lightning.", "pytorch_lightning.", "lightning_mm5d."))


def made_features(fields: Mapping[str, Any]) -> tuple[Feature, ...]:
    """Return the features that are there, for the fields of a strategy.

    Each package has a module ``feature`` with ``FEATURE``, its subclass of `Feature`.
    """
    return tuple(module.FEATURE(fields) for module in parts("feature"))
