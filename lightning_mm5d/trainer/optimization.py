"""Gradients and optimizers between Lightning's hooks: synchronised, clipped and checked over all ranks.

What features do around the steps of optimizers: the door of the optimization.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cached_property
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_mm5d.checkpoint.optimizer_state import drop_remote_state, names_of
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.gradients.gradients import Gradients, ParameterHooks, called, has_hooks, is_skipped
from lightning_mm5d.plan.holdings import DataShards
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.collectives import message_device
from lightning_mm5d.sharded.own_backwards import replaced, without_inputs
from lightning_mm5d.sharded.remote_value import Guard
from lightning_mm5d.sharded.removable import Removable, meanwhile
from lightning_mm5d.trainer.hidden_gradients import HiddenGradients, hooked
from lightning_mm5d.trainer.kept_values import KeptValues
from lightning_mm5d.trainer.process_group import decided


class SkippedUpdate(Exception):  # noqa: N818 - no error: it ends the optimizer's step
    """Leaves an optimizer's step before it changes anything; raised on all ranks or on none."""


class AroundUpdates:
    """Is called at each step of an optimizer; what a subclass leaves out does nothing."""

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """A training step begins; `optimizers` are all of the trainer's."""

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Return what is entered around a step of `optimizer`, in which it gets its gradients."""
        return nullcontext()

    def stepped(self) -> None:
        """An optimizer has stepped."""

    def ready(self, optimizer: Optimizer, *, is_scaled: bool) -> None:
        """The gradients of `optimizer` are there, summed over ranks, and it has not stepped.

        Args:
            optimizer: that is about to step.
            is_scaled: whether a scaler looks at the gradients itself, which it lets overflow now and then.

        Raises:
            SkippedUpdate: the optimizer must not step.
        """


SUMMED_LATE = "Gradients of an accumulation are summed over ranks at its last batch"


def is_summed_late(plan: Plan, name: str) -> bool:
    """Whether an accumulation sums the gradient of a parameter over ranks at its last batch alone."""
    first = plan.ownership.ranks_holding(name)[0]
    return DataShards(plan).of(name, first) is None and any(
        len(ranks) > 1 for ranks in plan.ownership.ranks_by_shard(name)
    )


class Summing(NamedTuple):
    """When the gradients of a step that a schedule runs are summed over ranks.

    Attributes:
        is_early: whether they are summed while the schedule runs; else at the backward that Lightning calls.
        share: what Lightning multiplies the loss by: the part of an accumulation that a batch is; None where somebody
            may multiply it by something else.
        continues: whether gradients add to those of earlier batches that no rank has sent yet.
        check: gets the factor that the backward multiplies sums by.
    """

    is_early: bool
    share: float | None
    continues: bool
    check: Callable[[Tensor], None]


class Optimization(Removable):
    """What happens to gradients and optimizers on one rank.

    Args:
        module: the user's module.
        plan: all stages.
        gradients: of the parameters that this rank holds.
        hooks: of the module's parameters.
        guard: of the values that other ranks have.
        is_plain: whether every rank is a replica of the full model, with a loss of its own.
        device: where this rank computes.

    Attributes:
        syncs: whether the next backward sums gradients over ranks, as outside of Lightning's accumulation.
        is_unsummed: whether there are gradients of an accumulation that its last batch will sum over ranks.
        hidden: gradients of shared parameters between batches.
        around: is called at each step of an optimizer.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        plan: Plan,
        gradients: Gradients,
        hooks: ParameterHooks,
        *,
        guard: Guard,
        is_plain: bool,
        device: torch.device,
    ) -> None:
        self._hooks, self._guard = hooks, guard
        self._module, self._plan, self._gradients = module, plan, gradients
        self._is_plain, self._device = is_plain, device
        self._shares = any(modality.shared_stage for modality in plan.modalities.values())
        self.syncs = True
        self.is_unsummed = False
        self._summed = self._is_share_shown = self._is_in_backward = self._has_fresh = False
        self._own_backwards = 0
        self._unzeroed: list[Tensor | None] = []  # sums of earlier steps that were not zeroed, within an accumulation
        self._has_own_factor: bool | None = None
        self._names = names_of(module)
        self.hidden = HiddenGradients(gradients.shared, self._names)
        self.around: list[AroundUpdates] = []

    def adopt(self, optimizers: Sequence[Optimizer]) -> None:
        """Free the state that `optimizers` keep for parameters of other ranks."""
        for optimizer in optimizers:
            drop_remote_state(optimizer)
            for parameter, state in getattr(optimizer, "state", {}).items():
                if (shared := self._gradients.shared.get(parameter)) is not None:
                    shared.cut_state(state)

    def drop_old_gradients(self, optimizers: Sequence[Optimizer]) -> None:
        """Free gradients that Lightning is about to zero, or two sets of them would be held."""
        for feature in self.around:
            feature.begin(optimizers)
        module, trainer = self._module, self._module.trainer
        is_stock = type(module).optimizer_zero_grad is pl.LightningModule.optimizer_zero_grad
        # hooks before it may look at them
        is_stock &= type(module).on_before_zero_grad is pl.LightningModule.on_before_zero_grad
        callbacks = vars(trainer)["callbacks"]
        is_stock &= all(type(callback).on_before_zero_grad is pl.Callback.on_before_zero_grad for callback in callbacks)
        if is_stock and trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            for optimizer in optimizers:
                optimizer.zero_grad()

    def summing(self, precision: Precision) -> Summing:
        """Return when the gradients of the next step are summed, which a schedule runs before its backward.

        Early where it is known by what the backward will multiply them, and hooks of parameters need no full ones.
        """
        if self._has_own_factor is None:
            # agreed once: callbacks may be those of one rank
            self._has_own_factor = decided(not self._is_stock(precision), False, message_device(self._device))
        is_known = not (self._has_own_factor or self._hooks.exist())
        self._summed = is_known and self.syncs
        return Summing(
            self._summed,
            1.0 / self._module.trainer.accumulate_grad_batches if is_known else None,
            is_known and self.is_unsummed,
            self._check_factor if self._has_own_factor and self._shares else _anything,
        )

    def _is_stock(self, precision: Precision) -> bool:
        """Whether nobody on this rank can give the loss another factor than Lightning does."""
        callbacks = vars(self._module.trainer)["callbacks"]
        return (
            type(self._module).backward is pl.LightningModule.backward
            and type(self._module).on_before_backward is pl.LightningModule.on_before_backward
            and all(type(callback).on_before_backward is pl.Callback.on_before_backward for callback in callbacks)
            and type(precision).__module__.startswith("lightning.")
        )

    def _check_factor(self, factor: Tensor) -> None:
        """Refuse a factor that differs between ranks: sums of shared gradients cannot be told apart; collective."""
        ends = torch.stack([factor, -factor]).to(message_device(self._device), torch.float64)
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        highest, lowest = ends[0].item(), -ends[1].item()
        if highest != lowest:
            rule = (
                "Gradients of parameters that ranks share (zero_stage) are summed before the backward, so that the "
                "factor must be the same on all ranks"
            )
            fix = "Scale the loss in training_step, or use zero_stage=0"
            raise ConfigError("backward", f"a factor of the loss from {lowest} to {highest}", rule, fix)

    def backward(
        self, loss: Tensor, precision: Precision, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the backward that Lightning calls, summed over ranks before `on_after_backward`; return the loss.

        That of a batch that the step skips is for sums alone. No hook is called around it, as Lightning calls none,
        unless another plain replica gives gradients.
        """
        if is_skipped(loss):
            scaler = getattr(precision, "scaler", None)
            self._has_fresh = False
            with self.synced(), self._publishing():
                (loss if scaler is None else scaler.scale(loss)).backward()
            return precision.post_backward(loss, self._module) if self._has_fresh else loss.detach()
        if not (self._is_plain or self._module.automatic_optimization):
            loss = loss / self._plan.layout.num_replicas  # ranks sum gradients
        loss = precision.pre_backward(loss, self._module)
        # a user's may go on to clip, and sees sums after each `loss.backward()`, as under DDP
        is_users = type(self._module).backward is not pl.LightningModule.backward
        is_own = is_users and self._plan.topology.is_replicated
        self._own_backwards = 0
        with self.sums_own_backwards(divides=False) if is_own else self.synced(), self._publishing():
            precision.backward(loss, self._module, optimizer, *args, **kwargs)
        if is_own and not self._own_backwards:  # other replicas may have gradients
            with self.synced():
                pass
        return precision.post_backward(loss, self._module)

    @contextmanager
    def synced(self) -> Generator[None, None, None]:
        """Enter around a backward: its gradients are summed over all ranks that hold their parameters."""
        with meanwhile(self, _is_in_backward=True), self._synced():
            yield

    @contextmanager
    def _synced(self) -> Generator[None, None, None]:
        """Enter around a backward, whose gradients are summed.

        Plain replicas sum while it runs. Gradients that an earlier backward has summed already are kept out of it. In
        Lightning's accumulation the sum is left to the last backward, unless hooks of parameters wait for it.
        """
        if not self.syncs and not self._hooks.exist():
            if not self.is_unsummed:
                self._unzeroed = self._gradients.take()
            self.is_unsummed = True
            with self._laid():
                yield
            if not self._is_plain:
                self.show_shares(shown=True)
            return
        summed, self._summed = self._summed, False
        older = self._unzeroed if self.is_unsummed else self._gradients.take()
        self._unzeroed = []
        if self._is_plain:
            reduction = self._gradients.reduction(is_early=not self._hooks.exist())
            with self._laid(), reduction.watched(self._gradients.parameters):
                yield
            self._gradients.finish(reduction, 1.0 / self._plan.layout.num_replicas)  # each has its own mean
            self._has_fresh = any(parameter.grad is not None for parameter in self._gradients.parameters)
        else:
            yield
            if not summed:
                self._gradients.reduce()  # a schedule has given each replica its share of the loss
        self.is_unsummed = False
        for shared in self._gradients.shared.all:
            if has_hooks(shared.parameter):
                raise hooked(self._names[id(shared.parameter)], shared.shard)
        values = KeptValues(self._module) if self._plan.topology.edges and self._hooks.exist() else None
        with nullcontext() if self._is_plain else called(self._gradients.parameters):
            if older:
                self._gradients.add(older)
        if values is not None and decided(bool(values.changes()), False, message_device(self._device)):
            rule = "It runs on the ranks that hold the parameter, and others would read something else in the module"
            fix = "Read p.grad in on_before_optimizer_step, which all ranks run with full gradients"
            raise ConfigError("register_hook", "a hook of a parameter that writes to the module", rule, fix)

    @contextmanager
    def sums_own_backwards(self, *, divides: bool = True) -> Generator[None, None, None]:
        """Enter around backwards of users: `loss.backward()` sums over ranks, as `manual_backward` does.

        Args:
            divides: whether losses are means of replicas, of whose gradients ranks of a schedule take the sum.
        """

        def backward(original: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._is_in_backward:
                original(tensors, *args, **kwargs)
                return
            replicas = 1 if self._is_plain or not divides else self._plan.layout.num_replicas
            if replicas > 1:
                given = [tensors] if isinstance(tensors, Tensor) else tensors
                tensors = [tensor / replicas for tensor in given]
            self._own_backwards += 1
            with self.synced():
                original(tensors, *args, **kwargs)

        with replaced(backward):
            yield

    def _publishing(self) -> AbstractContextManager[None]:
        """Return what is entered around the backward that Lightning calls, which publishes sums of a schedule."""
        if self._is_plain or not self._module.automatic_optimization:
            return nullcontext()
        rule = "The step has run its backwards already, for all parameters, and this one publishes their gradients"
        fix = "Call loss.backward() without inputs, and let only these parameters require a gradient"
        return without_inputs("backward", rule, fix)

    def show_shares(self, *, shown: bool) -> None:
        """Show hooks the share that this rank has of a sum as its own mean, as replicas have; False: as a share again.

        What a hook adds to gradients before the last batch of an accumulation then counts once, and not once a rank.
        """
        if shown and not self._has_hooks_after_backward():
            return
        if shown or self._is_share_shown:
            for count, parameters in self._late.items():
                gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
                if gradients:
                    torch._foreach_mul_(gradients, float(count) if shown else 1.0 / count)
        self._is_share_shown = shown

    def _has_hooks_after_backward(self) -> bool:
        trainer: Any = self._module.trainer
        hooks = [owner.on_after_backward for owner in (self._module, *trainer.callbacks)]
        unset = (pl.LightningModule.on_after_backward, pl.Callback.on_after_backward)
        return any(getattr(hook, "__func__", hook) not in unset for hook in hooks)

    @cached_property
    def _late(self) -> dict[int, list[nn.Parameter]]:
        """This rank's parameters whose gradients an accumulation sums at its last batch, by the number of ranks."""
        by_ranks: dict[int, list[nn.Parameter]] = {}
        for parameter in self._gradients.parameters:
            name, rank = self._names[id(parameter)], dist.get_rank()
            if name in self._plan.shapes and is_summed_late(self._plan, name):
                shards = self._plan.ownership.ranks_by_shard(name)
                by_ranks.setdefault(max(len(ranks) for ranks in shards if rank in ranks), []).append(parameter)
        return by_ranks

    @contextmanager
    def _laid(self) -> Generator[None, None, None]:
        """Enter around a backward of plain replicas; a schedule has backwards of its own."""
        if self._is_plain:
            self._gradients.lay()
        yield
        if self._is_plain:
            self._gradients.leave()

    @contextmanager
    def stepping(
        self, optimizer: Optimizer, closure: Callable[[], Any], precision: Precision
    ) -> Generator[Callable[[], Any], None, None]:
        """Enter around an optimizer's step, which may end early; give the closure to step with.

        Raises:
            ConfigError: the optimizer has parameters that are new; from the closure, when the optimizer calls it again
                and ranks hold parts of the parameters.
        """
        self._check_known(optimizer)
        calls, has_scaler = 0, getattr(precision, "scaler", None) is not None
        with ExitStack() as stack:
            for feature in self.around:
                stack.enter_context(feature.stepping(optimizer))

            def agreed() -> Any:
                nonlocal calls
                calls += 1
                if calls > 1:
                    self._check_repeats(optimizer)
                result = closure()
                for feature in self.around if calls == 1 else ():
                    feature.ready(optimizer, is_scaled=has_scaler)
                if has_scaler:
                    stack.enter_context(self._with_gradient(optimizer))
                    self._agree_on_overflow(optimizer)
                return self._common(result) if _follows_loss(optimizer) else result

            with suppress(SkippedUpdate):
                yield agreed
        shared = self._gradients.shared
        if shared.all:
            shared.stepped(parameter for group in optimizer.param_groups for parameter in group["params"])
            shared.rest()
            self.hidden.show()

    def _check_known(self, optimizer: Optimizer) -> None:
        """Refuse parameters that the module lacked when the run began, whose gradients no rank sums or publishes."""
        if self._is_plain and self._plan.layout.size == 1:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._names:
                    raise ConfigError(
                        "optimizer.param_groups",
                        f"a parameter of shape {tuple(parameter.shape)} that the module lacked when the run began",
                        "Ranks share the parameters out before on_fit_start, and sum the gradients of these alone",
                        "Make all layers in __init__ or configure_model, frozen until they train, or add them between "
                        "two calls of trainer.fit",
                    )

    def _common(self, loss: Any) -> Any:
        """Return the mean loss over replicas, so that an optimizer that follows it does the same on all; collective."""
        if not isinstance(loss, Tensor) or self._plan.layout.num_replicas == 1:
            return loss
        total = loss.detach().to(message_device(self._device), copy=True)
        dist.all_reduce(total)
        return (total / self._plan.layout.size).to(loss.device)

    def _check_repeats(self, optimizer: Optimizer) -> None:
        """Refuse optimizers that evaluate the loss at other weights: how far they go depends on all parameters."""
        if self._plan.topology.edges or self._plan.division.shards or self._gradients.shared.all:
            raise ConfigError(
                "configure_optimizers",
                type(getattr(optimizer, "optimizer", optimizer)).__name__,
                "It calls its closure several times in one step, and what it does between depends on all parameters, "
                "of which ranks hold parts",
                "Use one that calls it once, such as AdamW, or one stage (colocate all, pp_size=1), tp_size=1 and "
                "zero_stage=0",
            )

    @contextmanager
    def _with_gradient(self, optimizer: Optimizer) -> Generator[None, None, None]:
        """Give an optimizer without a gradient on this rank an empty one; a scaler refuses to step without any."""
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

    def _agree_on_overflow(self, optimizer: Optimizer) -> None:
        """Let all ranks skip an optimizer's step where any rank has a gradient that is not finite; collective."""
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norms = torch._foreach_norm(grads) if grads else []
        bad = torch.stack([*norms]).isfinite().logical_not().any().float() if norms else torch.zeros(())
        bad = bad.to(message_device(self._device))
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        if bool(bad):
            torch._foreach_zero_(grads)
            torch._foreach_add_(grads, float("inf"))

    def norm(self, norm_type: float, names: Collection[str] | None = None) -> Tensor:
        """Return the norm of the gradients of `names`, or of all, over all ranks; collective."""
        parameters = self._gradients.parameters
        if names is not None:
            named = dict(self._module.named_parameters(remove_duplicate=False))
            if unknown := [name for name in names if name not in named]:
                rule = "Names are those of module.named_parameters()"
                raise ConfigError("grad_norm.names", unknown[0], rule, f"Use one such as {next(iter(named), '')!r}")
            chosen = {id(named[name]) for name in names}
            parameters = tuple(parameter for parameter in parameters if id(parameter) in chosen)
        if self.is_unsummed:
            held = dict(self._module.named_parameters()) if names is None else names
            if late := next((n for n in held if n in self._plan.shapes and is_summed_late(self._plan, n)), None):
                fix = "Call it in on_before_optimizer_step"
                raise ConfigError("strategy.grad_norm", f"a call before, for {late}", SUMMED_LATE, fix)
        with self._guard.suspended("strategy.grad_norm()"):
            is_double = any(p.dtype == torch.float64 for p in self._module.parameters())
            dtype = torch.float64 if is_double else torch.float32
            return self._gradients.norm(parameters, None, norm_type, dtype)

    def clip_over_all_ranks(self, plugin: Precision) -> None:
        """Let a precision plugin clip by the norm over all ranks, or by value on any, until `remove`."""

        def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
            with self._guard.suspended("clipping by norm"):
                parameters = list(plugin.main_params(optimizer))
                total = self._gradients.norm(parameters, None)
                torch.nn.utils.clip_grads_with_norm_(parameters, float(clip_val), total)

        def clip_grad_by_value(optimizer: Optimizer, clip_val: float) -> None:
            with self._guard.suspended("clipping by value"):
                parameters = [p for p in plugin.main_params(optimizer) if p.grad is not None]
                if parameters:  # a rank may hold none of the optimizer's
                    torch.nn.utils.clip_grad_value_(parameters, clip_value=clip_val)

        self.put_attribute(plugin, "clip_grad_by_norm", clip_grad_by_norm)
        self.put_attribute(plugin, "clip_grad_by_value", clip_grad_by_value)

    def remove(self) -> None:
        """Leave gradients and the precision plugin as they were."""
        self.hidden.take()
        super().remove()


def _anything(_: Tensor) -> None:
    """Accept any factor."""


def _follows_loss(optimizer: Optimizer) -> bool:
    """Whether an optimizer looks at the loss that its closure returns."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return any(cls.__name__ == "LBFGS" for cls in type(inner).__mro__)


def setting_holders(module: pl.LightningModule) -> list[dict[str, Any]]:
    """Return the groups of optimizers, and the attributes of schedulers, also of those that others hold."""
    schedulers = [config.scheduler for config in module.trainer.lr_scheduler_configs]
    schedulers += [value for value in vars(module).values() if isinstance(value, LRScheduler)]
    for scheduler in schedulers:
        for value in getattr(scheduler, "__dict__", {}).values():  # as of a SequentialLR
            inner = value if isinstance(value, list | tuple) else [value]
            schedulers += [each for each in inner if isinstance(each, LRScheduler) and each not in schedulers]
    groups = [group for optimizer in module.trainer.optimizers for group in optimizer.param_groups]
    return [*groups, *(vars(scheduler) for scheduler in schedulers if hasattr(scheduler, "__dict__"))]
