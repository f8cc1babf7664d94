"""What the engine needs to know of a step that it runs, and the gathers of parameters in it.

Parameters are gathered once, or for each forward and backward where all ranks agree that this can end. There tokens
travel to the ranks that hold their experts; else experts are gathered as other parameters are.

Replicas that meet in gathers must run equal numbers of microbatches, in orders in which nobody waits for ever. Both are
the same on all ranks before the step begins.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.microbatch import Microbatch
from lightning_mm5d.data_parallel.gathering import Gathering
from lightning_mm5d.data_parallel.shared_parameters import Groups, SharedParameters
from lightning_mm5d.expert_parallel import Experts
from lightning_mm5d.plan.issued import why_apart
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import Action, Graph, Kind, Schedule
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.sharded.collectives import backend_of, warn_on_first_rank
from lightning_mm5d.stage import Deferred, DeferredProducts, Runtime, StageView


class Scope(Protocol):
    """Something that belongs to one microbatch at a time."""

    def take(self) -> Any:
        """Return what belongs to the microbatch that is computed."""

    def put(self, state: Any) -> None:
        """Go on with the microbatch that `take` returned `state` of."""


class Step(Protocol):
    """One step of the user's module, run once for every stage and microbatch of this rank.

    Attributes:
        microbatches: by the replicas that this rank serves.
        random_key: what random state depends on, beside the microbatch; None leaves generators alone.
        epoch: of the run.
        trains: whether backwards follow.
        fails: whether a pipeline cannot run it; the engine sets it.
        forgives: the errors by which it fails, and which end nothing else.
        scopes: what belongs to one microbatch at a time.
    """

    microbatches: Mapping[int, list[Microbatch]]
    random_key: tuple[int | str, ...] | None
    epoch: int
    trains: bool
    fails: bool
    forgives: tuple[type[Exception], ...]
    scopes: Sequence[Scope]

    def structure(self, batch: Any) -> Hashable:
        """Return a key that is equal for batches that take the same way through the model."""

    def context(self) -> AbstractContextManager[Any]:
        """Enter around each run: the precision of the forward."""

    def run(self, microbatch: Microbatch, index: int, place: tuple[Hashable, int] = (None, 0)) -> Any:
        """Run the user's step on microbatch `index`, as the stage and for the replica of `place`.

        The result of the last stage counts.
        """

    def reads(self) -> AbstractContextManager[list[str]]:
        """Enter around a run of the user's step; gives a list, empty unless the run asks which step it is."""

    def finish(self, result: Any, index: int) -> Tensor | None:
        """Keep the last stage's result of a microbatch; return its scaled loss in training, else None."""

    def uncounted(self, *, repeats: bool = False) -> AbstractContextManager[Any]:
        """Enter around a run whose metric updates must not count, because another run counts them.

        Args:
            repeats: whether it is one of the same stage, and not of another one.
        """


class StepGathers:
    """The gathers of parameters in the steps of one rank.

    Args:
        plan: all stages.
        gathering: of this rank.
        group: all ranks, in host memory; None where ranks never meet in an action.
        experts: that this rank shares; None without any.
        device: where this rank computes.

    Raises:
        ConfigError: layers are gathered one by one around experts, where operations run in the order of issue.
    """

    def __init__(
        self,
        plan: Plan,
        gathering: Gathering,
        group: dist.ProcessGroup | None,
        experts: Experts | None,
        device: torch.device,
    ) -> None:
        self._plan, self._gathering, self._group, self._experts = plan, gathering, group, experts
        self._is_ordered = backend_of(device) != "gloo"
        self._known: dict[Any, str | None] = {}
        self._told = set[str]()
        if self._is_ordered:
            _refuse_gathers_around_experts(plan)

    def begin(
        self, step: Step, schedule: str | Callable[[Graph], Schedule], count: int, trainable: frozenset[str]
    ) -> None:
        """Begin to gather for a step; collective over the world where layers may be gathered one by one.

        Args:
            step: to be run.
            schedule: of the step.
            count: microbatches of each replica of this rank.
            trainable: names of the parameters that require a gradient.
        """
        full = all(len(parts) == count for parts in step.microbatches.values())
        why = "" if self._group is None else self._why_apart(schedule, count, trainable, full=full)
        per_action = why is None
        if why and self._plan.experts and why not in self._told:  # once for each reason
            self._told.add(why)
            warn_on_first_rank(f"ep_size: each rank gathers all experts of its layers for a step, because {why}")
        self._gathering.begin(per_action=per_action)
        if self._experts is not None and per_action:
            self._experts.begin(step.context, self._gathering.showing_rows)

    @contextmanager
    def during(self, action: Action, deferred: Deferred | None) -> Iterator[None]:
        """Enter around what an action computes: replicas meet in it.

        Args:
            action: a forward, or a backward that computes input gradients.
            deferred: of a forward, takes the weight gradients that its backward puts off.
        """
        products = nullcontext if deferred is None else partial(DeferredProducts, deferred)
        flight, forward = (action.stage, action.microbatch), action.kind is Kind.F
        with ExitStack() as stack:
            stack.enter_context(self._gathering.during(flight[0], flight, forward=forward))
            if self._experts is not None:
                if forward and self._experts.are_apart:
                    stack.enter_context(self._gathering.hiding_rows())
                stack.enter_context(self._experts.during(flight[0], flight, forward=forward, products=products))
            yield

    def end(self) -> None:
        """End a step."""
        self._gathering.end()
        if self._experts is not None:
            self._experts.end()

    def _why_apart(
        self, schedule: str | Callable[[Graph], Schedule], count: int, trainable: frozenset[str], *, full: bool
    ) -> str | None:
        counts = torch.tensor([count, -count, int(not full)])
        dist.all_reduce(counts, dist.ReduceOp.MAX, group=self._group)
        most, least, ragged = counts.tolist()
        if most != -least or ragged:
            return "replicas have unequal numbers of microbatches, as they may at the end of an epoch"
        key = (count, trainable)
        if key not in self._known:
            self._known[key] = why_apart(self._plan, schedule, count, trainable, is_ordered=self._is_ordered)
        return self._known[key]


def _refuse_gathers_around_experts(plan: Plan) -> None:
    """Refuse layers that are gathered at places that depend on the batch, between tokens that travel at such places."""
    for name, modality in plan.modalities.items():
        if modality.sharding.reshard_after_forward and modality.ep_size > 1:
            rule = (
                "With ep_size tokens travel between the gathers of layers, and this backend runs both in the order of "
                "issue, which replicas with unlike batches do not share"
            )
            fix = "Leave it unset, which gathers layers once for a step, or use gloo"
            raise ConfigError(f"modalities.{name}.sharding.reshard_after_forward", True, rule, fix)


def make_gathering(
    plan: Plan, runtime: Runtime, views: Mapping[StageKey, StageView], shared: SharedParameters, groups: Groups
) -> Gathering:
    """Return the gathers of one rank.

    Args:
        plan: all stages.
        runtime: the patched module.
        views: this rank's stages.
        shared: the parameters of which it owns rows.
        groups: for gathers, by their ranks.
    """
    layers: dict[StageKey, list[tuple[str, nn.Module]]] = {}
    reshards = set[str]()
    for key, view in views.items():
        for name, cut in view.cuts.items():
            paths = plan.partition.parts[name].paths[cut.first : cut.last]
            layers.setdefault(key, []).extend((path, runtime.root.get_submodule(path)) for path in paths)
            if plan.modalities[name].sharding.reshard_after_forward:
                reshards.update(paths)
    names = runtime.root.named_parameters(remove_duplicate=False)
    return Gathering(shared, layers, names, reshards, groups, lambda: runtime.guard.is_dry)
