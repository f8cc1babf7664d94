"""Parameters and gradients in full while hooks of users run, on every rank.

One process has the full tensors wherever a hook looks at them. Here a rank has parts: nothing of other stages, a shard
with tensor parallelism, rows with ``zero_stage``. So around a hook all parameters that some rank lacks a part of are
`Awaited`: they show the shape, dtype and device of the full tensor, and the first use of a value, or of a gradient,
gathers those of the whole module. What the hook writes is cut back to this rank's part at its end.

Ranks need not look together. The protocol of a hook has three phases, and each message is one small sum on the host:

1. *Open*: a rank that needs values or gradients says so, and waits until all ranks have said something.
2. *Serve*: a rank at the end of its hook, or at a call of the strategy within it, says so, and sends what it holds as
   long as another one opens.
3. *Leave*: all ranks are at the end of the same hook, or before the same call. If they are at unequal places, all raise
   `RankMismatchError`.

A hook that looks at parameters costs the memory of them all on each rank until it ends. One that does not costs the
message of phase 3, and a run without hooks of its own nothing. Hooks of predictions with several replicas get errors in
place of values, since replicas may predict unequal numbers of batches.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError, RankLostError, RankMismatchError, RemoteParameterError
from lightning_mm5d.data_parallel.shared_parameters import forget_node
from lightning_mm5d.engine.codec import broadcast
from lightning_mm5d.expert_parallel import parameters_of
from lightning_mm5d.features.full_views.full_states import (
    DTYPES,
    Awaited,
    Form,
    FullStates,
    Kind,
    Moving,
    PartExchange,
    check_kept,
    get_data,
    partial_names,
    refuse_gradient,
    set_data,
)
from lightning_mm5d.features.full_views.viewed_hooks import Hook, LateHooks, common, of_all, of_some, tell_full_shapes
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.collectives import join_late, message_device
from lightning_mm5d.sharded.remote_value import Placeholder, is_remote, plain
from lightning_mm5d.stage import Runtime
from lightning_mm5d.stage.payload import tensors_in
from lightning_mm5d.trainer.feature import Attached, Feature, Running, is_of_user
from lightning_mm5d.trainer.hidden_gradients import is_stand_in, stand_in
from lightning_mm5d.trainer.optimization import SUMMED_LATE, is_summed_late

_KINDS: tuple[Kind, ...] = ("values", "gradients", "states")
_NOWHERE = -(2**62)


class FullViews(Feature):
    """Shows full tensors in the hooks of the module and of callbacks, and where the strategy is asked for them."""

    def cut(self, runtime: Runtime, plan: Plan, device: torch.device) -> Callable[[], None] | None:
        """Stand before `configure_optimizers`, which runs earlier."""
        return tell_full_shapes(runtime.root, plan)

    def attach(self, running: Running) -> Attached:
        """Stand before the hooks that users wrote."""
        return _FullViews(running)


class _FullViews(Attached):
    """The views of one rank's module, as it is on this rank between steps."""

    def __init__(self, running: Running) -> None:
        module, plan, guard = running.module, running.plan, running.runtime.guard
        parted = partial_names(plan)
        world = range(plan.layout.size)
        self._module, self._plan, self._rank = module, plan, running.rank
        self._shared, self._guard, self._optimization = running.shared, guard, running.optimization
        self._group = running.more_groups.get(world, "hooks", backend="gloo") if parted else None
        self._device, self._wire, self._buffers = running.device, message_device(running.device), running.buffers
        self._exchange = PartExchange(module, plan, self._rank, self._wire)
        self._forms = [Form(name, p, plan.shapes[name]) for name, p in module.named_parameters() if name in parted]
        self._shapes = {id(form.parameter): (form.name, form.shape) for form in self._forms}
        self._states = FullStates(self._exchange, self._group, self._device)
        self._opened: set[Kind] = set()
        self._is_entered = self._is_shown = self._shares = self._meets = self._watches_calls = False
        self._shown: list[Form] = []
        self._place = ""
        self._swapped: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        self._calls: list[tuple[nn.Module, AbstractContextManager[None]]] = []
        guard.shows_full = not self._forms
        guard.suspended, guard.entered = self.suspended, self.entered
        if self._forms:
            self._watch_hooks(running.trainer)

    # --- hooks ---

    def _watch_hooks(self, trainer: Any) -> None:
        """Show full tensors in the hooks that users wrote."""
        self._watch_together(together := of_all(trainer, self._module))
        self._optimization.around.append(LateHooks(together, self._watch_together))
        for hook in of_some(trainer, self._module):
            self._watch(hook, functools.partial(self._withheld, f"{type(hook.owner).__name__}.{hook.name}"))
        if is_of_user(self._module.optimizer_step):
            self._watch_step(self._module)

    def _watch_together(self, hooks: list[Hook]) -> None:
        """Show full tensors in hooks that all ranks call together; collective."""
        predicts_apart = self._plan.layout.num_replicas > 1  # replicas may predict unequal numbers of batches
        for hook in common(hooks, self._group):
            end, shares = f"the end of {type(hook.owner).__name__}.{hook.name}", "predict" not in hook.name
            self._watch(hook, functools.partial(self.entered, end, shares=shares or not predicts_apart))

    def _watch(self, hook: Hook, view: Callable[[], AbstractContextManager[None]]) -> None:
        owner, _, call, holder, key = hook
        before = holder.get(key)
        self._watch_calls()

        @functools.wraps(call)
        def viewed(*args: Any, **kwargs: Any) -> Any:
            with view():
                result = call(*args, **kwargs)
                check_kept(owner, self._forms if "values" in self._opened else ())
                return result

        def undo() -> None:
            if holder.get(key) is viewed:
                if before is None:
                    holder.pop(key)
                else:
                    holder[key] = before

        holder[key] = viewed
        self.changes.callback(undo)

    def _watch_step(self, module: pl.LightningModule) -> None:
        """Show full tensors in an `optimizer_step` of the user's, but for the step itself and the closure before it."""
        step = module.optimizer_step
        self._watch_calls()

        @functools.wraps(step)
        def viewed(epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None, **kwargs: Any) -> Any:
            def closure() -> Any:
                with self.suspended("the closure of an optimizer"):
                    return optimizer_closure()

            with self.entered(f"the end of {type(module).__name__}.optimizer_step"):
                given = None if optimizer_closure is None else closure
                return step(epoch, batch_idx, optimizer, given, **kwargs)

        self.put_attribute(module, "optimizer_step", viewed)

    def _watch_calls(self) -> None:
        """Let layers that are sharded compute with local tensors, also where a hook calls them; once, on all ranks."""
        if self._watches_calls:
            return
        self._watches_calls = True
        apart = {*self._plan.division.shards, *dict(parameters_of(self._plan.experts))}

        @torch.compiler.disable  # where what holds the layer is compiled
        def enter(path: str, module: nn.Module, _: Any) -> None:
            if self._is_shown:
                local = self.suspended(f"a call of {path or 'the module'}")
                local.__enter__()
                self._calls.append((module, local))

        @torch.compiler.disable
        def leave(path: str, module: nn.Module, _: Any, result: Any) -> None:
            if self._calls and self._calls[-1][0] is module:
                self._calls.pop()[1].__exit__(None, None, None)
                for _, tensor in tensors_in(result):
                    if tensor.requires_grad:
                        tensor.register_hook(functools.partial(refuse_gradient, path))

        for path, module in self._module.named_modules():
            if any(name in apart for name, _ in module.named_parameters(path, recurse=False)):
                before = module.register_forward_pre_hook(functools.partial(enter, path), prepend=True)
                after = module.register_forward_hook(functools.partial(leave, path), always_call=True)
                self.changes.callback(before.remove)
                self.changes.callback(after.remove)

    # --- views ---

    @contextmanager
    def entered(self, place: str, *opens: Kind, shares: bool = True) -> Iterator[None]:
        """Enter where parameters and gradients are to be seen in full; collective where `shares`.

        Args:
            place: where this view ends, in words that are the same on all ranks.
            opens: what is gathered at once.
            shares: whether all ranks enter; else uses of what this rank lacks raise an error.
        """
        if not self._forms:
            yield
            return
        if self._is_entered:
            for kind in opens:
                self._open(kind)
            yield
            return
        if self._is_shown:  # the strategy is asked for what is withheld, which is for all ranks to do
            with self._suspension(place), self.entered(place, *opens, shares=shares):
                yield
            return
        self._is_entered, self._shares, self._place = True, shares, "a hook"
        try:
            self._show()
            for kind in opens:
                self._open(kind)
            yield
            self._leave(place)
        except KeyboardInterrupt as error:
            if shares and not self._meets and not error.args:  # others wait for the end of the hook
                error.args = (f"rank {self._rank} was interrupted by SIGINT",)
                join_late(torch.tensor([*(False for _ in _KINDS), self._rank + 1, _NOWHERE, _NOWHERE]), self._group)
            raise
        finally:
            self._is_entered = False
            self._restore()

    @contextmanager
    def _withheld(self, place: str) -> Iterator[None]:
        """Enter where ranks need not come together: shapes are full there, and a part of a value raises an error."""
        if self._is_entered or self._is_shown:
            yield
            return
        self._shares, self._place = False, place
        try:
            self._show()
            yield
        finally:
            self._restore()

    def suspended(self, place: str) -> AbstractContextManager[None]:
        """Enter around a call that works on local tensors; collective within a view."""
        return self._suspension(place) if self._is_shown else nullcontext()

    @contextmanager
    def _suspension(self, place: str) -> Iterator[None]:
        is_entered, shares = self._is_entered, self._shares
        try:
            self._leave(place)
        finally:
            self._restore()
        self._is_entered = False
        try:
            yield
        finally:
            self._is_entered, self._shares = is_entered, shares
            self._show()

    def _show(self) -> None:
        self._guard.shows_full = self._shares
        with plain():
            is_all = self._is_entered  # else only what is there in part
            self._shown = [form for form in self._forms if is_all or get_data(form.parameter).shape != form.shape]
            for form in self._shown:
                parameter = form.parameter
                form.data, form.grad, form.kind = get_data(parameter), parameter.grad, type(parameter)
                parameter.grad = None
                set_data(parameter, form.nan(form.data.dtype, self._device))
                parameter.__class__ = Awaited
                vars(parameter)["opens"] = self._open
        trainer = self._module._trainer
        optimizers = trainer.optimizers if trainer is not None else ()
        self._states.show(optimizers, self._shapes, lambda: self._open("states"))
        self._is_shown = True

    def _open(self, kind: Kind) -> None:
        if kind in self._opened or not self._is_shown:
            return
        if not self._shares:
            name = next(form.name for form in self._forms)
            raise RemoteParameterError(
                f"{kind} of parameters such as `{name}` are read in {self._place}, which ranks may call unequally "
                "often, so that they cannot gather them there. Read them in a hook that all ranks call, such as "
                "on_train_epoch_start, on_predict_start or on_fit_end, and keep what comes of them in an attribute"
            )
        self._meet(kind)

    def _leave(self, place: str) -> None:
        """Serve other ranks until all are at `place`; then take over what was written."""
        with plain():
            has_new = any(form.parameter.grad is not None for form in self._shown)
        if has_new and "gradients" not in self._opened:  # a backward of the hook has added some
            self._open("gradients")
        if self._shares:
            self._meet(place=place)
        with torch.inference_mode(False), torch.no_grad(), plain():
            if self._is_shown:
                self._states.take_back()
            for form in self._forms if self._opened else ():
                self._check_shape(form)
            for form in self._forms if self._opened else ():
                if not issubclass(form.kind, Placeholder):
                    if "values" in self._opened:
                        self._exchange.cut(form.name, form.parameter.data, form.data)
                        shared = self._shared.get(form.parameter)
                        # rows of what is frozen are not exchanged after an optimizer's step
                        if (
                            shared
                            and shared.whole is not None
                            and not (shared.rests_own or form.parameter.requires_grad)
                        ):
                            self._exchange.cut(form.name, form.parameter.data, shared.whole)
                    if "gradients" in self._opened:
                        self._take_gradient(form)

    def _check_shape(self, form: Form) -> None:
        parameter = form.parameter
        for kind, tensor in (("values", parameter.data), ("gradients", parameter.grad)):
            if kind in self._opened and tensor is not None and tuple(tensor.shape) != form.shape:
                got = f"{kind} of shape {tuple(tensor.shape)}"
                raise ConfigError(form.name, got, f"Its shape is {form.shape}", "Keep the shape of parameters in hooks")

    def _take_gradient(self, form: Form) -> None:
        new, local = form.parameter.grad, self._local_gradient(form)
        if is_stand_in(new):
            return
        shared = self._shared.get(form.parameter)
        whole = shared if shared is not None and shared.is_whole else None
        if new is not None:
            if self._waits(form):
                rule = "Gradients of an accumulation are summed over ranks at its last batch"
                fix = "Set it in on_before_optimizer_step"
                raise ConfigError(f"{form.name}.grad", "a gradient set before", rule, fix)
            if local is None:
                shape = form.data.shape if whole is None else self._exchange.own_shape(form.name)
                local = torch.empty(shape, dtype=new.dtype, device=form.data.device)
            self._exchange.cut(form.name, new, local)
        if whole is not None:
            whole.gradient = None if new is None else local
            form.grad = form.grad if new is not None else None
        else:
            form.grad = None if new is None else local

    def _restore(self) -> None:
        """Show what this rank has outside of hooks."""
        if not self._is_shown:
            return
        self._is_shown, self._guard.shows_full = False, not self._forms
        self._states.restore()
        with torch.inference_mode(False), torch.no_grad(), plain():
            for form in self._shown:
                parameter = form.parameter
                parameter.grad = None
                vars(parameter).pop("opens", None)
                parameter.__class__ = form.kind
                if "values" in self._opened and form.data.shape != parameter.shape:
                    forget_node(parameter)
                set_data(parameter, form.data)
                parameter.grad = form.grad
                form.grad = None
            for module, name, shown, before in self._swapped:
                if module._buffers.get(name) is shown:
                    if shown._version and not is_remote(before):
                        before.copy_(shown)
                    module._buffers[name] = before
        self._swapped.clear()
        self._opened.clear()

    # --- what ranks say to each other ---

    def _meet(self, opens: Kind | None = None, place: str = "") -> None:
        """Open, phase 1; or serve and leave, phases 2 and 3; collective."""
        code, self._meets = zlib.crc32(place.encode()), True
        at = [code, -code] if opens is None else [_NOWHERE, _NOWHERE]
        while True:
            flags = torch.tensor([*(kind == opens for kind in _KINDS), 0, *at])
            dist.all_reduce(flags, dist.ReduceOp.MAX, self._group)
            *wanted, interrupted, last, first = flags.tolist()
            if interrupted:
                raise KeyboardInterrupt(f"rank {interrupted - 1} was interrupted by SIGINT")
            for kind, is_wanted in zip(_KINDS, wanted, strict=True):
                if is_wanted:
                    self._gather(kind, keeps=opens is not None)
            if opens is None and not any(wanted) and last != -first:
                raise self._mismatch(place)
            if opens is not None or not any(wanted):
                self._meets = False
                return

    def _mismatch(self, place: str) -> RankMismatchError:
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, place, group=self._group)
        places: dict[str, list[str]] = {}
        for rank, name in enumerate(names):
            places.setdefault(name, []).append(str(rank))
        told = "; ".join(f"rank {', '.join(ranks)} at {name}" for name, ranks in places.items())
        return RankMismatchError(
            f"ranks are at unequal places of a hook: {told}. Checkpoints, full_state_dict and norms need all ranks: "
            "call them outside of conditions that differ between ranks, such as trainer.is_global_zero"
        )

    # --- gathering ---

    def _waits(self, form: Form) -> bool:
        """Whether the gradient of a parameter is not yet summed over ranks."""
        return self._optimization.is_unsummed and is_summed_late(self._plan, form.name)

    def _local_gradient(self, form: Form) -> Tensor | None:
        shared = self._shared.get(form.parameter)
        return shared.gradient if shared is not None and shared.is_whole else form.grad

    def _present(self, form: Form, kind: Kind) -> Tensor | None:
        """What this rank has of a parameter: a full tensor once opened, else its local part."""
        if kind in self._opened:
            return form.parameter.data if kind == "values" else form.parameter.grad
        if issubclass(form.kind, Placeholder):
            return None
        return form.data if kind == "values" else self._local_gradient(form)

    def _gather(self, kind: Kind, *, keeps: bool) -> None:
        """Send what this rank holds, and show the full tensors where `keeps`; collective."""
        keeps = keeps and kind not in self._opened
        with torch.inference_mode(False), torch.no_grad(), plain():
            if kind == "states":
                self._states.gather(is_open=kind in self._opened, keeps=keeps)
                self._opened |= {kind} if keeps else set()
                return
            present = [self._present(form, kind) for form in self._forms]
            codes = torch.tensor([0 if tensor is None else 1 + DTYPES.index(tensor.dtype) for tensor in present])
            dist.all_reduce(codes, dist.ReduceOp.MAX, self._group)
            dtypes = [None if code == 0 else DTYPES[code - 1] for code in codes.tolist()]
            full: list[Tensor | None] = [None] * len(dtypes)
            moving: list[Moving] = []
            for index, (form, dtype) in enumerate(zip(self._forms, dtypes, strict=True)):
                if dtype is None:
                    continue
                if kind == "gradients" and self._waits(form):
                    full[index] = self._unsummed(form, present[index], dtype)
                    continue
                if keeps:
                    full[index] = torch.zeros(form.shape, dtype=dtype, device=self._device)
                moving.append(Moving(form.name, dtype, present[index], full[index]))
            self._exchange.bring(moving)
            if kind == "values" and self._plan.topology.edges:
                self._gather_buffers(keeps=keeps)
            if not keeps:
                return
            for form, tensor in zip(self._forms, full, strict=True):
                if kind == "values":
                    assert tensor is not None, form.name
                    if form.data.shape != form.shape:
                        forget_node(form.parameter)
                    form.parameter.data, form.shown = tensor, tensor.data_ptr()
                elif tensor is not None:
                    added = form.parameter.grad  # by a backward of the hook
                    if form.parameter.dtype != tensor.dtype:
                        form.parameter.grad = None
                        form.parameter.data = form.nan(tensor.dtype, self._device)
                    form.parameter.grad = tensor if added is None else tensor + added
            self._opened.add(kind)

    def _unsummed(self, form: Form, local: Tensor | None, dtype: torch.dtype) -> Tensor:
        def zero() -> None:
            if local is not None:
                local.zero_()

        return stand_in(
            form.name,
            form.shape,
            dtype,
            self._device,
            zero,
            SUMMED_LATE,
            "Use it in on_before_optimizer_step, or use accumulate_grad_batches=1",
        )

    def _gather_buffers(self, *, keeps: bool) -> None:
        """Show the newest value of every buffer that another rank writes; collective."""
        assert self._buffers is not None
        try:
            sources = self._buffers.sources(self._wire)
        except RankLostError:
            raise
        except ConfigError:  # it has no value anywhere, and raises where it is read
            sources = {}
        for path, module in self._module.named_modules():
            for name, buffer in [*module._buffers.items()]:
                full_name = f"{path}.{name}" if path else name
                if buffer is None or full_name in self._plan.division.shards:
                    continue
                source = sources.get(full_name, self._plan.ownership.primary_ranks(full_name)[0])
                shown = broadcast(buffer.detach().to(self._wire).clone(), source).to(buffer.device)
                if keeps and source != self._rank:
                    module._buffers[name] = shown
                    self._swapped.append((module, name, shown, buffer))


FEATURE = FullViews
