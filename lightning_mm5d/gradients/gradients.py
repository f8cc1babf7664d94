"""The gradients of a rank's parameters: taken and added at a step, summed over ranks, measured for clipping.

`sums` says which of them are summed over which ranks, `reduction` sums them in `buckets`, `publish` hands them to the
backward that Lightning calls. A gradient that no rank has stays None.

Hooks on parameters: called once for each batch, with the gradient of all its microbatches, replicas and stages.

A schedule runs a backward for each microbatch, so autograd would call a hook as often, with a part of the gradient each
time: a hook that clamps or adds noise would give another result than on one process.

Gradients that a schedule computed inside the step are published at the backward that Lightning calls after it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError, private
from lightning_mm5d.data.random_state import seed_of
from lightning_mm5d.data_parallel.shared_parameters import SharedParameters
from lightning_mm5d.gradients.buckets import Flat, Piece, SideStream
from lightning_mm5d.gradients.reduction import BucketOrder, Presence, Reduction
from lightning_mm5d.plan.holdings import DataShards
from lightning_mm5d.plan.issued import SumTiming, ordered_timing
from lightning_mm5d.plan.plan import Plan, traffic_of
from lightning_mm5d.plan.sums import Rows, counted_of, sums_of
from lightning_mm5d.sharded.collectives import waits_on_device
from lightning_mm5d.sharded.remote_value import plain

Publisher = Callable[[Tensor, bool], None]
"""called with the 0-dim gradient of a loss, and whether another backward may follow"""
_retains_graph: Callable[[], bool] = private(torch._C._autograd, "_get_current_graph_task_keep_graph")


class _Publish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, publish: Publisher) -> Tensor:
        ctx.publish = publish
        ctx.save_for_backward(anchor)  # as of any loss: a second backward fails unless the first one has kept the graph
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[None, None, None]:
        _ = ctx.saved_tensors
        ctx.publish(gradient[0], _retains_graph())
        return None, None, None


def published(value: Tensor, publish: Publisher) -> Tensor:
    """Return `value` as the result of a computation whose backward calls ``publish(gradient)``.

    Lightning runs the step, then zeroes gradients, then calls backward; a whole schedule runs inside the step. So its
    gradients wait until that backward, and accumulation, scaling and a user's own `backward` work as ever.

    Args:
        value: 0-dim loss.
        publish: gets the gradient of whatever is computed from the result.
    """
    anchor = torch.zeros((), dtype=value.dtype, device=value.device, requires_grad=True)
    return _Publish.apply(anchor, value.detach(), publish)


class _Skipped(Tensor):
    """A loss of which Lightning, which shows callbacks a clone, shows none."""

    def clone(self, **_: Any) -> None:  # type: ignore[override]
        return None


def skipped(device: torch.device, publish: Publisher = lambda *_: None) -> Tensor:
    """Return a loss of zero for a batch that is skipped, which callbacks do not see.

    Lightning raises where a step returns None and there are several processes.

    Args:
        device: of the loss.
        publish: as of `published`; others of the accumulation, or of the replicas, may have gradients.
    """
    return published(torch.zeros((), device=device), publish).as_subclass(_Skipped)


def is_skipped(loss: Any) -> bool:
    """Whether `loss` is one of `skipped`, or computed from it."""
    return isinstance(loss, _Skipped)


_KINDS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_HOOKS = attrgetter(*_KINDS)
"""the hooks of a parameter that change its gradient, and those that see it added: a dict or None of each"""


class ParameterHooks:
    """Knows whether a module's parameters have hooks, which a parameter that leaves this rank does not take along.

    Args:
        module: full, before any of its parameters leaves this rank.
    """

    def __init__(self, module: nn.Module) -> None:
        for kind in _KINDS:
            private(Tensor, kind)
        self._module = module
        self._from_start = any(_hooks_of(parameter) for parameter in module.parameters())

    @cached_property
    def _parameters(self) -> list[nn.Parameter]:
        """The parameters of the run, which are all there when it is first asked for: none is shared out later on."""
        return [*self._module.parameters()]

    def exist(self) -> bool:
        """Return whether any parameter has hooks, also one of other ranks: the same on all ranks."""
        with plain():
            return self._from_start or any(map(any, map(_HOOKS, self._parameters)))


@contextmanager
def set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Enter around backwards that give parts of the gradients of `parameters`: none of their hooks is called."""
    aside = [(hooks, dict(hooks)) for parameter in parameters for hooks in _hooks_of(parameter)]
    for hooks, _ in aside:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in aside:
            registered = dict(hooks)  # by the step
            hooks.clear()
            hooks.update(before | registered)


@contextmanager
def called(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Call the hooks of `parameters` as autograd would; inside, their new gradients are added to older ones."""
    fresh = [parameter for parameter in parameters if parameter.grad is not None]
    for parameter in fresh:
        changing, _ = _HOOKS(parameter)
        for hook in [*changing.values()] if changing else ():
            changed = hook(parameter.grad)
            if changed is not None:
                parameter.grad = changed
    yield
    for parameter in fresh:
        _, seeing = _HOOKS(parameter)
        for hook in [*seeing.values()] if seeing else ():
            hook(parameter)


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether a parameter has hooks of any kind on its gradient."""
    return bool(_hooks_of(parameter))


def _hooks_of(parameter: nn.Parameter) -> list[dict[int, Any]]:
    """The hooks of a parameter: one dict for each kind that it has."""
    return [hooks for hooks in _HOOKS(parameter) if hooks]


class SumGroups(NamedTuple):
    """The groups over which gradients are summed.

    Attributes:
        by_ranks: all of a plan by their ranks; None, of those that this rank is not in.
        across: by their ranks, for sums over blocks of shared parameters alone.
        host: all ranks, with messages in host memory; None for one rank.
        has_rows: whether any rank owns rows of a parameter.
    """

    by_ranks: Mapping[tuple[int, ...], dist.ProcessGroup | None]
    across: Mapping[tuple[int, ...], dist.ProcessGroup | None]
    host: dist.ProcessGroup | None
    has_rows: bool


def unfrozen(name: str) -> ConfigError:
    """Return the error of a step that unfreezes a parameter."""
    rule = "Ranks compute and sum the gradients of what is trained when a step begins"
    return ConfigError(f"{name}.requires_grad", "True, set in training_step", rule, "Set it in on_train_batch_start")


class Gradients:
    """The gradients of the parameters that this rank holds.

    Args:
        parameters: by name, each once, as they are on this rank.
        order: the buckets in which they are summed.
        presence: what ranks agree on.
        groups: over which they are summed.
        counted: names of the parameters that this rank counts in a norm over all ranks, with their rows or None for
            the whole local tensor.
        shared: the parameters of which this rank owns rows.
        stages: the parameters that each stage of this rank uses.
        timing: when sums may leave.
        device: where this rank computes.

    Attributes:
        parameters: of this rank.
        shared: those of which it owns rows.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        order: BucketOrder,
        presence: Presence,
        groups: SumGroups,
        counted: Mapping[str, Rows | None],
        shared: SharedParameters,
        *,
        stages: Mapping[Hashable, Sequence[nn.Parameter]],
        timing: SumTiming,
        device: torch.device,
    ) -> None:
        self.parameters, self.shared, self._device = tuple(parameters.values()), shared, device
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._counted = {id(parameters[name]): rows for name, rows in counted.items()}
        self._order, self._presence, self._stages, self._timing = order, presence, stages, timing
        self._has_sums, self._has_rows = bool(groups.by_ranks), groups.has_rows
        self._laid: list[Flat] = []

    def lay(self) -> None:
        """Give parameters without a gradient the memory in which backwards add to theirs."""
        self._laid = self._order.flats()
        for flat in self._laid:
            flat.lay()

    def leave(self) -> None:
        """Leave None where no backward has added to a gradient since `lay`."""
        for flat in self._laid:  # a step may have frozen parameters since
            flat.leave()

    def take(self) -> list[Tensor | None]:
        """Move the gradients out of the parameters."""
        taken = [parameter.grad for parameter in self.parameters]
        self.put([None] * len(taken))
        return taken

    def put(self, gradients: Sequence[Tensor | None]) -> None:
        """Set the gradients, as `take` returned them."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def add(self, gradients: Sequence[Tensor | None], factor: Tensor | float = 1.0) -> None:
        """Add `gradients` times `factor`; the given tensors may be kept and changed."""
        new = [gradient for gradient in gradients if gradient is not None]
        if new and not (isinstance(factor, float) and factor == 1.0):
            torch._foreach_mul_(new, factor)
        held: list[Tensor] = []
        added: list[Tensor] = []
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                held.append(parameter.grad)
                added.append(gradient)
        if held:
            torch._foreach_add_(held, added)

    def reduction(self, *, is_early: bool = True, whole: bool = True, rows: bool = False) -> Reduction:
        """Return a sum over ranks that begins while backwards run; `finish` ends it.

        Frozen parameters are skipped; they must be frozen on all ranks.

        Args:
            is_early: False sends nothing before `finish`, as other ranks may do it or not.
            whole: whether it sums gradients of parameters that are not shared.
            rows: whether it sums those of which this rank owns rows; their parameters show their local tensors.
        """
        buckets = self._order.buckets(whole=whole, rows=rows)
        sums = (whole and self._has_sums) or (rows and self._has_rows)  # the same on all ranks
        return Reduction(
            buckets,
            self._presence if sums else None,
            is_early=is_early and self._timing.early,
            inside=self._timing.inside,
            is_whole=whole,
            stages=self._stages,
        )

    def finish(self, reduction: Reduction, factor: float = 1.0) -> dict[int, Tensor]:
        """End a sum in whose backwards gradients were watched; a collective of all ranks.

        Returns:
            As `Reduction.finish`.

        Raises:
            ConfigError: a parameter that the step has unfrozen.
        """
        for parameter in self._order.left_out(whole=reduction.is_whole):
            raise unfrozen(self._names[id(parameter)])
        rows = reduction.finish(factor)
        self._order.learn(reduction.final, reduction.repeated)
        if reduction.is_whole:
            self._order.sent()
        return rows

    def reduce(self, factor: float = 1.0) -> None:
        """Sum each gradient over the ranks that hold its parameter, but for shared ones; a collective of all ranks.

        Args:
            factor: of each sum.
        """
        self.reduction(is_early=False).finish(factor)
        self._order.sent()

    def norm(
        self,
        parameters: Iterable[Tensor],
        group: dist.ProcessGroup | None,
        norm_type: float = 2.0,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the norm of the gradients of `parameters` over all ranks, each element counted once.

        Args:
            parameters: those of an optimizer on this rank.
            group: all ranks.
            norm_type: the p of the p-norm; ``inf`` for the largest.
            dtype: of the norm; None for float64 where any of `parameters` that has a gradient here is, else float32.
        """
        held = [p for p in parameters if self._gradient(p) is not None]
        grads = [grad for p in held if id(p) in self._counted for grad in self._counted_rows(p)]
        norms = torch._foreach_norm(grads, norm_type) if grads else []
        # the dtype of the clipped parameters, also those that another rank counts: all ranks must scale them equally
        if dtype is None:
            dtype = torch.float64 if any(p.dtype == torch.float64 for p in held) else torch.float32
        # one dtype on all ranks, whatever they hold
        local = torch.stack([norm.to(self._device, torch.float64) for norm in norms]) if norms else None
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if norm_type == float("inf"):
            total = local.max() if local is not None else total
            dist.all_reduce(total, dist.ReduceOp.MAX, group)
        else:
            total = (local**norm_type).sum() if local is not None else total
            dist.all_reduce(total, dist.ReduceOp.SUM, group)
            total = total ** (1.0 / norm_type)
        return total.to(dtype)

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        """The gradient that this rank has, also while a shared parameter shows its full tensor."""
        shared = self.shared.get(parameter)
        return parameter.grad if shared is None or not shared.is_whole else shared.gradient

    def _counted_rows(self, parameter: Tensor) -> list[Tensor]:
        gradient = self._gradient(parameter)
        assert gradient is not None
        rows, grad = self._counted[id(parameter)], gradient.detach()
        # an empty tensor has no largest element
        return [piece for piece in ([grad] if rows is None else rows.of(grad)) if piece.numel()]


def make_gradients(
    plan: Plan,
    rank: int,
    parameters: Mapping[str, nn.Parameter],
    groups: SumGroups,
    bucket_bytes: int = 25 * 2**20,
    everything: Sequence[nn.Parameter] = (),
    random_key: Callable[[], tuple[int, ...]] = tuple,
    *,
    device: torch.device,
) -> Gradients:
    """Return the gradients of the `parameters` (by name, each once) that `rank` holds.

    Args:
        plan: all stages.
        rank: global rank.
        parameters: as they are on this rank, full or local.
        groups: those of `sum_groups` and `DataShards.groups`, and those of `DataShards.across`.
        bucket_bytes: how much one message carries.
        everything: all parameters of the model, with those of other ranks.
        random_key: gives numbers that tell a step from all others, the same on all ranks and when it is repeated.
        device: where this rank computes.
    """
    shards, sums = DataShards(plan), sums_of(plan, rank)
    owned = shards.owned_by(rank, parameters)
    counted = counted_of(plan, rank, [name for name in parameters if name not in owned])
    for name, shard in owned.items():  # the block counts it that has the rank that would count the full one
        if any(counted_of(plan, other, [name]) for other in shard.block):
            counted[name] = None
    shapes = {name: shards.local_shape(name, rank) for name in owned}
    summed = [name for name in parameters if name in sums]
    traffic = {name: traffic_of(plan, name, sums[name][0].ranks, parameters[name].dtype) for name in summed}
    shared = SharedParameters(parameters, owned, shapes, groups.by_ranks, traffic, bucket_bytes=bucket_bytes)
    numbers = {name: number for number, name in enumerate(plan.sizes)}

    def draw(pieces: Sequence[Piece]) -> int:
        return seed_of(*random_key(), pieces[0].number)

    stages = _stages_of(plan, rank, parameters)
    is_ordered = dist.is_initialized() and waits_on_device(device)
    timing = ordered_timing(plan) if is_ordered else SumTiming()
    presence = Presence(len(numbers), groups.host)
    # one sum for all of a parameter, or any number for different rows of it, in one order on all ranks
    pieces = [
        (part.ranks, Piece(parameters[name], part.rows, part.weight, numbers[name], traffic=traffic[name]))
        for name in summed
        for part in sums[name]
    ]
    order = BucketOrder(
        pieces,
        everything or [*parameters.values()],
        shared,
        groups.by_ranks,
        groups.across,
        bucket_bytes,
        count=len(numbers),
        draw=draw,
        presence=presence,
        side=SideStream(device),
        late=frozenset(numbers[name] for name in timing.late),
    )
    return Gradients(parameters, order, presence, groups, counted, shared, stages=stages, timing=timing, device=device)


def _stages_of(plan: Plan, rank: int, parameters: Mapping[str, nn.Parameter]) -> dict[Hashable, Sequence[nn.Parameter]]:
    """The parameters that each stage of `rank` uses."""
    by_stage: dict[Hashable, list[nn.Parameter]] = {stage: [] for stage in plan.topology.stages_of(rank)}
    for name, parameter in parameters.items():
        for stage in dict.fromkeys(plan.topology.stage_of[owner] for owner in plan.partition.owners.get(name, ())):
            if stage in by_stage:
                by_stage[stage].append(parameter)
    return dict(by_stage)
