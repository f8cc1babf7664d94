"""Shares the sequences of one modality's layers over context parallel ranks, in place.

Each layer gets an instance attribute in front of its `forward`: a whole hidden state is split over ranks at its entry,
and so is what goes along with the tokens; inside, everything works on plain local tensors, and only the attention
(`attention.Attention`) communicates; what comes out is a `Sharded` that acts as the whole and enters the next layer as
it is. So whatever a model does between layers or behind them is right, and costs a gather only where it needs one.

Which tokens a rank takes is decided when a whole hidden state comes in, by the masks that were made for it. A layer
that is computed again for its backward gets the same `Sharded`, hence the same tokens.

An encoder in mode ``items`` gives each rank whole items of its batch, or whole segments of a packed sequence, and no
token leaves its rank; where there are fewer items than ranks, sequences are split.

While a model generates, every rank computes whole sequences: it looks at one token at a time, and at a cache.

It refuses what `check.probe` finds: layers in which tokens mix beside the attention.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.context_parallel.balance.distributions import by_items, distribute
from lightning_mm5d.context_parallel.exchange.attention import ContextGroups
from lightning_mm5d.context_parallel.hooks.arguments import (
    Arguments,
    item_dim,
    names_of,
    replaced,
    token_dim,
)
from lightning_mm5d.context_parallel.hooks.attention import Attention, Call
from lightning_mm5d.context_parallel.hooks.interface import Interface
from lightning_mm5d.context_parallel.hooks.recorded_states import as_wholes, full_of, nothing
from lightning_mm5d.context_parallel.hooks.support import mixed, probe, takes_products
from lightning_mm5d.context_parallel.masks.caches import Cache
from lightning_mm5d.partition.hidden_state import at, hidden_place
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.sharded.sequence import Holders, ShardedSequence
from lightning_mm5d.sharded.sequence_operations import is_tokens
from lightning_mm5d.sharded.tensor import Sharded
from lightning_mm5d.sharded.token_split import TokenSplit
from lightning_mm5d.tensor_parallel.region import Region, drops


@dataclass(frozen=True)
class Ranks:
    """Those that share a modality's layers with this one.

    Attributes:
        context: its context parallel ranks.
        sharing: these and their tensor parallel ranks, which run fastest.
        tensor: its tensor parallel ranks; None where it has none.
    """

    context: ContextGroups
    sharing: TensorGroup
    tensor: TensorGroup | None = None


@dataclass(eq=False)
class _Pass:
    """What a layer is about to work on.

    Attributes:
        sequence: of its tokens or items; parts are held as the hidden state's.
        dim: of the hidden state that is divided, from the last.
        call: what the attention needs to know.
    """

    sequence: ShardedSequence
    dim: int
    call: Call


class ContextParallel:
    """The shared layers of one modality on one rank.

    Args:
        name: of the modality.
        modality: its configuration.
        root: the LightningModule.
        path: of the list of layers in it.
        ranks: who shares them.
        averages: whether the gradient of a leaf is that of a parameter whose mean over ranks is taken in the end.
        interface: of this rank; its attention puts itself there.
        active: gives the run of a stage on a microbatch that is under way, forward or backward, if any.
        device: where this rank computes.
    """

    def __init__(
        self,
        name: str,
        modality: Modality,
        root: nn.Module,
        path: str,
        ranks: Ranks,
        *,
        averages: Callable[[Tensor], bool],
        interface: Interface,
        active: Callable[[], Any] = lambda: None,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        self._name, self._ranks = name, ranks
        self._by_items = modality.cp_mode == "items"
        self._distribution = modality.cp_distribution
        layers: nn.Module = root.get_submodule(path)
        self._layers = list(layers.children())
        degree = ranks.context.whole.size
        self._holders = Holders(ranks.context.whole, degree, averages)
        if ranks.tensor is not None:
            self._holders.finer = Holders(ranks.sharing, degree, averages, ranks.tensor, coarser=self._holders)
        self._divides_tokens = modality.sequence_parallel and ranks.tensor is not None
        self._sequences: weakref.WeakValueDictionary[Any, ShardedSequence] = weakref.WeakValueDictionary()
        self._stream = Region(ranks.context.whole, drops=drops(layers), device=device)
        self._undo: list[Callable[[], object]] = []
        self._known: dict[Any, tuple[tuple[bool, ...], nn.Module]] = {}
        self._recent, self._splits = Cache(16), interface.caches.tokens
        self._device = device
        members = [module for layer in self._layers for module in layer.modules()]
        mode: Any = "allgather" if self._by_items else modality.cp_mode
        self._attention = Attention(name, mode, ranks.context, members, active, interface.caches)
        self.replaying = self._attention.replaying
        parent = root.get_submodule(path.rpartition(".")[0])
        holders = [module for module in (*members, parent) if hasattr(getattr(module, "config", None), "model_type")]
        packed = any("cu_seqlens" in names_of(module.forward) for module in members)
        interface.add(self._attention, {id(one.config): one.config for one in holders}.values(), packed)
        self._generates = False
        for index, layer in enumerate(self._layers):
            self._patch(layer, index)
        for module in root.modules():
            if hasattr(module, "prepare_inputs_for_generation"):
                self._patch_generate(module)
        self._attention.takes_products = takes_products(members)

    @property
    def groups(self) -> list[TensorGroup]:
        """All groups that its work communicates in."""
        context, sharing, tensor = self._ranks.context, self._ranks.sharing, self._ranks.tensor
        found = (context.whole, context.inner, context.outer, sharing, tensor)
        return [group for group in found if group is not None]

    def remove(self) -> None:
        """Take the patches away again."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._recent.clear()
        self._attention.forget()

    def sequence(self, description: Any) -> ShardedSequence:
        """The sequence that a peer described."""
        size, ranges = description
        split = TokenSplit.of(ranges, size)
        holders = self._holders if split.ranks == self._holders.degree else self._holders.finer
        assert holders is not None
        return self._sequence(split, holders)

    # --- layers ---

    def _patch(self, layer: nn.Module, index: int) -> None:
        own = vars(layer).get("forward")
        names = names_of(layer.forward)

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            inner = partial(type(module).forward, module) if own is None else own
            if not self._generates:
                self._refuse_cache((*args, *kwargs.values()), index)
            return self._run(module, inner, Arguments(args, kwargs), names)

        # bound, so that a copy of the module computes with its own weights
        vars(layer)["forward"] = MethodType(forward, layer)

        def undo() -> None:
            vars(layer).pop("forward", None)
            if own is not None:
                vars(layer)["forward"] = own

        self._undo.append(undo)

    def _refuse_cache(self, values: tuple[Any, ...], index: int) -> None:
        """Refuse keys of earlier calls, which are those of some tokens, or of all on every rank."""
        for value in values:
            count = getattr(value, "get_seq_length", None)
            if count is not None and int(count(index)):
                raise ConfigError(
                    f"modalities.{self._name}.cp_size",
                    f"past_key_values of {int(count(index))} tokens",
                    "A step works on whole sequences, without keys of earlier calls",
                    "Call model.generate, or use cp_size=1",
                )

    def _patch_generate(self, module: nn.Module) -> None:
        had, original = vars(module).get("generate"), module.generate

        def generate(*args: Any, **kwargs: Any) -> Any:
            before, self._generates = self._generates, True
            try:
                return original(*args, **kwargs)  # type: ignore[operator]
            finally:
                self._generates = before

        vars(module)["generate"] = generate

        def undo() -> None:
            vars(module).pop("generate", None)
            if had is not None:
                vars(module)["generate"] = had

        self._undo.append(undo)

    @torch.compiler.disable
    def _run(self, layer: nn.Module, inner: Callable[..., Any], given: Arguments, names: tuple[str, ...]) -> Any:
        where = hidden_place(*given)
        if where is None or self._generates:
            return inner(*given.args, **given.kwargs)
        state = at(where, *given)
        now = self._pass(state, given.kwargs)
        if now is None:
            return inner(*given.args, **given.kwargs)
        local = replaced(given, names, partial(self._part, now), where, self._local_state(state, now))
        now.call.crosses = self._crosses(layer, inner, local, names, now)
        now.call.is_differentiated = state.requires_grad or any(one.requires_grad for one in layer.parameters())
        with ExitStack() as stack:
            stack.enter_context(self._attention.during(now.call))
            if layer.training:
                stack.enter_context(self._stream.inside())
            if now.dim == -2:
                batch = state.shape[0] if state.dim() > 2 else 1
                stack.enter_context(as_wholes(self._name, now.sequence.coarser, batch))
            result = inner(*local.args, **local.kwargs)
        self._keep_states(given, now)
        return self._whole(result, now)

    def _crosses(
        self, layer: nn.Module, inner: Callable[..., Any], local: Arguments, names: tuple[str, ...], now: _Pass
    ) -> tuple[bool, ...]:
        """For each attention of a layer, whether its keys are of another sequence; found out once for each layer."""
        given = (*names[: len(local.args)], *(name for name, value in local.kwargs.items() if value is not None))
        key = (id(layer), now.dim, given)
        if key in self._known:
            return self._known[key][0]
        lengths = now.sequence.coarse.lengths
        if min(lengths) < 2 or self._attention.is_silent:  # too short to tell this time
            return ()
        group = self._ranks.context.whole
        found: tuple[bool, ...] = ()
        failed = None
        try:
            with nothing():
                found = probe(self._name, layer, inner, local, self._attention, names, now.dim, lengths[group.index])
        except ConfigError as error:
            failed = error
        # all ranks or none, or some would wait for those that are gone
        somewhere = group.max(torch.tensor(float(failed is not None), device=self._device))
        if failed is not None:
            raise failed
        if somewhere:
            raise mixed(self._name, layer, "was refused on another rank")
        self._known[key] = found, layer  # which keeps its id
        return found

    # --- what is split how ---

    def _pass(self, state: Tensor, kwargs: Mapping[str, Any]) -> _Pass | None:
        """How a layer's hidden state is split; None where it stays whole."""
        if self._is_own(state):
            return self._pass_of(state.group, state.sharded_dim)  # type: ignore[attr-defined]
        if self._by_items and state.dim() > 2 and state.shape[0] >= self._holders.degree:
            items = distribute("uniform", state.shape[0], self._holders.degree, _no_work, self._splits)
            return self._pass_of(self._sequence(items, self._holders), -state.dim())
        split = self._split(state, kwargs) if state.dim() > 1 else None
        if split is None:
            return None
        sequence = self._sequence(split, self._holders)
        divides = self._divides_tokens and min(split.lengths) >= self._ranks.sharing.size // self._holders.degree
        return self._pass_of(sequence.finer if divides else sequence, -2)

    def _is_own(self, x: Tensor) -> bool:
        """Whether `x` is divided already, and by this modality: another's sequences lie on other ranks."""
        return isinstance(x, Sharded) and is_tokens(x.group) and x.group.coarser.holders is self._holders

    def _pass_of(self, sequence: ShardedSequence, dim: int) -> _Pass:
        return _Pass(sequence, dim, Call(sequence.coarse if dim == -2 else None))

    def _split(self, state: Tensor, kwargs: Mapping[str, Any]) -> TokenSplit | None:
        """Who takes which tokens; None for sequences that are too short for all ranks to take part."""
        size, degree = state.shape[-2], self._holders.degree
        if size < degree:
            return None
        bounds, work = kwargs.get("cu_seqlens"), partial(self._attention.masks.work, size)
        if bounds is not None:
            lengths: list[int] = self._recent.get("lengths", lambda: bounds.diff().tolist(), (bounds,))
            work = partial(_work_of_segments, lengths)
            if self._by_items and len(lengths) >= degree:
                items = by_items(lengths, [length * (length + state.shape[-1]) for length in lengths], degree)
                if min(items.lengths):
                    return items
        split = distribute(self._distribution, size, degree, work, self._splits)
        return split if min(split.lengths) else distribute("uniform", size, degree, work, self._splits)

    def _sequence(self, split: TokenSplit, holders: Holders) -> ShardedSequence:
        found = self._sequences.get(split)
        if found is None:
            known = self._splits.get(split, lambda: split)  # one object for equal splits, with what was made of it
            found = self._sequences[split] = ShardedSequence(known, holders)
        return found

    # --- into a layer ---

    def _local_state(self, state: Tensor, now: _Pass) -> Tensor:
        sequence = now.sequence
        if not self._is_own(state):
            state = state.full() if isinstance(state, Sharded) else state
            state = sequence.wrapped(sequence.scattered(state, now.dim, sequence.lengths), now.dim)
        return sequence.own_tokens(state)  # type: ignore[arg-type]

    def _part(self, now: _Pass, name: str, value: Any) -> Any:
        """What this rank's layer gets of an argument."""
        if isinstance(value, MutableMapping):
            for key, entry in value.items():
                value[key] = self._state_part(now, entry)
            return value
        if not isinstance(value, Tensor):
            return value
        sequence = now.sequence.coarser
        if isinstance(value, Sharded):
            if not is_tokens(value.group):
                return value
            if value.group.coarser is sequence:
                return value.group.own_tokens(value)
            value = value.full()  # of another sequence
        size = sequence.split.size
        dim = token_dim(name, value, size) if now.dim == -2 else item_dim(name, value, size, -now.dim)
        wants = value.requires_grad and torch.is_grad_enabled()
        if dim is None:
            return sequence.copied(value) if wants else value
        if wants:  # not kept: it belongs to the graph of one layer
            return sequence.scattered(value, dim, sequence.lengths)
        return self._recent.get((sequence, dim), lambda: sequence.local_of(value, dim, sequence.lengths), (value,))

    def _state_part(self, now: _Pass, entry: Any) -> Any:
        if isinstance(entry, (list, tuple)):
            return type(entry)(self._state_part(now, one) for one in entry)
        is_part = isinstance(entry, Sharded) and is_tokens(entry.group)
        return entry.group.own_tokens(entry) if is_part and entry.group.coarser is now.sequence.coarser else entry

    # --- out of a layer ---

    def _keep_states(self, given: Arguments, now: _Pass) -> None:
        """Let what layers share in a dict be known as parts, for stages behind this one."""
        sequence = now.sequence.coarser
        length = sequence.lengths[sequence.index]

        def divide(entry: Any) -> Any:
            if isinstance(entry, (list, tuple)):
                return type(entry)(divide(one) for one in entry)
            fits = isinstance(entry, Tensor) and not isinstance(entry, Sharded) and entry.dim() > 2
            return sequence.wrapped(entry, -2) if fits and entry.shape[-2] == length else entry

        for value in (*given.args, *given.kwargs.values()):
            if isinstance(value, MutableMapping) and now.dim == -2:
                for key, entry in value.items():
                    value[key] = divide(entry)

    def _whole(self, result: Any, now: _Pass) -> Any:
        if isinstance(result, Tensor):
            sequence = now.sequence
            if not isinstance(result, Sharded):  # where tokens are divided further, a layer may have gathered them
                sequence = sequence.coarser if result.shape[now.dim] == sequence.own_size else sequence
            return sequence.wrapped(result, now.dim)
        if isinstance(result, (tuple, list)) and result and isinstance(result[0], Tensor):
            batch = result[0].shape[0] if result[0].dim() > 2 else 1
            parts = (self._whole(result[0], now), *(self._whole_beside(one, now, batch) for one in result[1:]))
            return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
        return result

    def _whole_beside(self, x: Any, now: _Pass, batch: int) -> Any:
        """The whole of what a layer returns beside its hidden state."""
        if not isinstance(x, Tensor) or isinstance(x, Sharded):
            return x
        sequence = now.sequence.coarser
        if now.dim == -2:
            whole = full_of(x, sequence, batch)
        else:
            whole = sequence.wrapped(x, -x.dim()) if x.dim() and x.shape[0] == sequence.own_size else None
        if whole is None and x.requires_grad:
            raise ConfigError(
                f"modalities.{self._name}.cp_size",
                f"a result of shape {list(x.shape)}",
                "A layer returns, beside its hidden state, something made of this rank's tokens, of which all ranks "
                "would need to be asked",
                "Return it for each token, or use cp_size=1",
            )
        return x if whole is None else whole


def _work_of_segments(lengths: list[int], block: int) -> Tensor:
    """What the queries of each block of a packed sequence cost, int64 ``[ceil(S / block)]``."""
    per_token = torch.repeat_interleave(torch.tensor(lengths), torch.tensor(lengths))
    padded = torch.nn.functional.pad(per_token, (0, -len(per_token) % block))
    return padded.view(-1, block).sum(1)


def _no_work(block: int) -> Tensor:
    raise AssertionError("the split does not ask for it")
