"""The experts that this rank shares with others: their forwards bring tokens to them, in the actions of a step.

In a step each rank computes with its own experts. Elsewhere, as in an evaluation, and in a step in which the ranks can
not meet, parameters are whole and the experts' own forward runs.

A result that is still under way: it is waited for when something needs it.

Experts return it where their block has a shared expert. So the block computes that one meanwhile, if its code calls it
before it uses the result. Changes of its shape wait for nothing. Any other function gets the plain tensor.

It refuses (`RuntimeError`) code that takes it without torch's functions, such as an autograd function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_mm5d.config.errors import ConfigError, private
from lightning_mm5d.data.random_state import torch_states
from lightning_mm5d.expert_parallel import Context, ExpertLayer, Load, Products, Showing
from lightning_mm5d.features.shared_experts.held_experts import Adapters, ExpertGroups, HeldExperts, adapters_around
from lightning_mm5d.features.shared_experts.token_exchange import (
    BACKWARD,
    DTYPES,
    FORWARD,
    Arrive,
    Arriving,
    Backward,
    Leave,
    Lengths,
    Record,
    Round,
    Rounds,
    TokenCall,
    TokenGroup,
    Wish,
    forward,
    recorded_forward,
)
from lightning_mm5d.layout.layout import even_lengths
from lightning_mm5d.sharded.removable import Removable
from lightning_mm5d.sharded.tensor import Sharded, functions_named
from lightning_mm5d.sharded.torch_internals import as_plain_tensors, in_checkpoint, unobserved

_make_wrapper = private(Tensor, "_make_wrapper_subclass")
_TOLD = frozenset(
    functions_named("size dim numel is_floating_point __len__ shape dtype device ndim layout is_cuda", Tensor)
)
_SHAPED: set[Any] = {Tensor.view, Tensor.reshape, torch.reshape}


class AwaitedResult(Tensor):
    """Stands for a tensor of known shape; see `awaited`."""

    _finish: Callable[[], Tensor]
    _arrived: Tensor | None

    def result(self) -> Tensor:
        """Return the tensor, the same at each call."""
        if self._arrived is None:
            self._arrived = self._finish()
        return self._arrived

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in _TOLD:
            with as_plain_tensors():
                return func(*args, **kwargs)
        if func in _SHAPED and isinstance(first, cls) and not any(isinstance(arg, torch.dtype) for arg in args):
            rest, options = args[1:], kwargs
            shape = func(torch.empty(first.shape, device="meta"), *rest, **options).shape
            return awaited(shape, first, lambda: func(first.result(), *rest, **options))
        args, kwargs = tree_map_only(AwaitedResult, AwaitedResult.result, (tuple(args), kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} takes a result of experts that is still under way; clone it before")


def awaited(shape: torch.Size, like: Tensor, finish: Callable[[], Tensor]) -> AwaitedResult:
    """Return what stands for the result of `finish`, which is called at most once.

    Args:
        shape: of the result.
        like: of the result's dtype and device.
        finish: waits for the result, and returns it.
    """
    placeholder: AwaitedResult = _make_wrapper(AwaitedResult, shape, dtype=like.dtype, device=like.device)
    placeholder._finish, placeholder._arrived = finish, None
    return placeholder


@dataclass
class _Flight:
    """What is kept of the forward of a microbatch, by layer."""

    products: Products  # entered around the experts
    records: dict[int, list[Record]] = field(default_factory=dict)
    of_forward: Counter[int] = field(default_factory=Counter)  # records that the forward has made


def has_shared_expert(root: nn.Module, path: str) -> bool:
    """Whether the block around some experts has an expert that all tokens go to."""
    block = root.get_submodule(path.rpartition(".")[0])
    return any(getattr(block, name, None) is not None for name in ("shared_expert", "shared_experts"))


class SharedExperts(Removable):
    """The experts of one rank.

    Args:
        root: the LightningModule.
        layers: of each stage of this rank, in the order in which they run.
        groups: of each layer, by its path.
        device: where this rank computes.
        is_dry: whether nothing but shapes is kept of what runs at the moment.
        is_compiled: whether compiled code takes the results of experts, which then wait for them.
    """

    def __init__(
        self,
        root: nn.Module,
        layers: Mapping[Any, Sequence[ExpertLayer]],
        groups: Mapping[str, ExpertGroups],
        *,
        device: torch.device,
        is_dry: Callable[[], bool],
        is_compiled: bool = False,
    ) -> None:
        self._device, self._is_dry = device, is_dry
        self._stages: dict[Any, list[HeldExperts]] = {}
        self._rounds: dict[Any, Rounds] = {}
        self._context: Context | None = None  # of a step in which ranks meet
        self._showing: Showing | None = None  # of such a step
        self._flights: dict[Any, _Flight] = {}
        self._stage: Any = None
        self._flight = _Flight(nullcontext)
        self._is_forward = True
        self._calls: Counter[int] = Counter()
        self._arriving: Arriving | None = None  # results, where microbatches take turns
        self._open: Backward | None = None  # between its two exchanges
        for stage, stage_layers in layers.items():
            held = [self._held(root, layer, place, groups[layer.path]) for place, layer in enumerate(stage_layers)]
            if held:
                self._stages[stage] = held
                max_experts = max(layer.number for layer in held)
                self._rounds[stage] = Rounds(held[0].groups.host, max_experts, self._serve)
            for layer in held:
                layer.overlaps = not is_compiled and has_shared_expert(root, layer.path)
                for number, module in enumerate(layer.called):
                    self._patch(module, partial(self._called, layer, module, number))

    def loads(self) -> dict[str, Load]:
        """Return how many rows experts and ranks have had in forwards since the last call, by path of the layer."""
        layers = [layer for stage in self._stages.values() for layer in stage]
        loads = {layer.path: Load.of(layer.tokens, layer.ranges) for layer in layers}
        for layer in layers:
            layer.tokens = [0] * layer.number
        return loads

    # --- a step ---

    @property
    def are_apart(self) -> bool:
        """Whether a step runs in which each rank computes with its own experts."""
        return self._context is not None

    def token_groups(self, stage: Any) -> list[TokenGroup]:
        """Return the groups between whose ranks tokens of a stage travel."""
        return [layer.groups.tokens for layer in self._stages.get(stage, ())]

    def agree(self, stage: Any, wish: bool) -> bool:
        """Whether all ranks that share experts of a stage wish something; collective over them."""
        return self._rounds[stage].agree(wish)

    def take(self) -> Any:
        """Return what is of the action that runs, one microbatch at a time."""
        return self._stage, self._flight, self._is_forward, self._calls, self._arriving, self._open

    def put(self, state: Any) -> None:
        """Go on with the action that `take` returned `state` of."""
        self._stage, self._flight, self._is_forward, self._calls, self._arriving, self._open = state

    def begin(self, context: Context, showing: Showing) -> None:
        """Begin a step in whose actions ranks meet.

        Args:
            context: the precision of a forward.
            showing: entered around the forward of experts with this rank's rows.
        """
        self._context, self._showing = context, showing

    def end(self) -> None:
        """End a step."""
        self._context = self._showing = self._arriving = self._open = None
        self._flights.clear()

    @contextmanager
    def during(self, stage: Any, flight: Any, *, forward: bool, products: Products = nullcontext) -> Iterator[None]:
        """Enter around a forward, or a backward that computes input gradients, of a stage.

        Args:
            stage: that runs.
            flight: equal for a forward and its backward.
            forward: whether it is a forward.
            products: of a forward, entered around the products of experts there and in its backward.
        """
        if self._context is None or stage not in self._stages:
            yield
            return
        self._stage, self._is_forward, self._calls = stage, forward, Counter()
        self._flight = self._flights.setdefault(flight, _Flight(products))
        yield
        self._settle()
        self._rounds[stage].reach(Wish(), forward=forward)
        self._stage = None
        if not forward:
            del self._flights[flight]

    # --- calls ---

    def _held(self, root: nn.Module, layer: ExpertLayer, place: int, groups: ExpertGroups) -> HeldExperts:
        wrappers = [*adapters_around(root, layer.path).values()]
        adapters = Adapters(wrappers, layer.number, layer.ranges[groups.tokens.index], lambda: self._stage is not None)
        for take_away in adapters.patch():
            self.changes.callback(take_away)
        return HeldExperts(root, layer, place, groups, adapters)

    def _patch(self, module: nn.Module, instead: Callable[..., Any]) -> None:
        @torch.compiler.disable
        def called(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return instead(args, kwargs)

        self.put_forward(module, called)

    def _called(
        self, layer: HeldExperts, module: nn.Module, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Answer a call of a module: of experts, of the layer around them, or of one of them."""
        if self._stage is None and layer.groups.copies is None and not self._is_dry():
            return layer.whole(module, *args, **kwargs)
        if layer.plan is None:
            return self._called_one(layer, module, number, *args, **kwargs)
        if layer.plan.forward is not None:
            return layer.plan.forward(module, partial(self._exchanged, layer), *args, **kwargs)
        return self._exchanged(layer, *layer.arguments(module, args, kwargs))

    def _exchanged(self, layer: HeldExperts, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums of what experts compute of tokens, in their shape."""
        if self._is_dry():
            return tokens * weights.sum(-1).view(*tokens.shape[:-1], 1).to(tokens.dtype)
        copies = layer.groups.copies
        if copies is not None:  # each of the ranks that hold the same experts takes some of the tokens
            tokens, index, weights = (_full(tensor) for tensor in (tokens, index, weights))
        hidden = tokens.reshape(-1, tokens.shape[-1])
        if copies is not None:
            lengths = even_lengths(len(hidden), copies.size)
            start = sum(lengths[: copies.index])
            hidden, weights = copies.scattered(hidden, 0, lengths), copies.scattered(weights, 0, lengths)
            index = index.narrow(0, start, lengths[copies.index])
        if self._stage is None:
            result = layer.all(hidden, index, weights)
            return (result if copies is None else copies.gathered(result, 0, lengths)).view(tokens.shape)
        finish = self._dispatched(layer, hidden, index, weights)
        if copies is not None:
            return copies.gathered(finish(), 0, lengths).view(tokens.shape)
        # a checkpoint compares the order of what is saved, and a traced forward may use the result sooner
        overlaps = layer.overlaps and type(hidden) is Tensor and not in_checkpoint()
        return awaited(hidden.shape, hidden, finish).view(tokens.shape) if overlaps else finish().view_as(tokens)

    def _dispatched(self, layer: HeldExperts, hidden: Tensor, index: Tensor, weights: Tensor) -> Callable[[], Tensor]:
        """Bring rows to their experts; return what waits for the results and gives each token the sum of its own."""
        experts = index.reshape(-1)
        order = torch.argsort(experts, stable=True)
        # a number after the last expert's stands for none, as it does for the experts of transformers
        counts = experts.new_zeros(layer.number + 1).scatter_add_(0, experts, torch.ones_like(experts)).tolist()
        order = order[: len(order) - counts.pop()]
        tokens = order // max(index.shape[1], 1)
        trains = torch.is_grad_enabled()
        arrive = self._sent(layer, hidden.index_select(0, tokens), Wish(FORWARD, counts=tuple(counts)))

        def finish() -> Tensor:
            with torch.set_grad_enabled(trains):
                weighted = arrive() * weights.reshape(-1)[order].unsqueeze(1)
                return torch.zeros_like(hidden).index_add_(0, tokens, weighted.to(hidden.dtype))

        return finish

    def _called_one(self, layer: HeldExperts, module: nn.Module, number: int, rows: Tensor) -> Tensor:
        """Answer the call of one expert of a list with rows of its own, ``[P, H]`` or ``[B, S, H]``."""
        if self._is_dry():
            return rows * 1
        copies = layer.groups.copies
        if copies is not None:
            rows = _full(rows)
        if rows.dim() not in (2, 3):
            rule = "Experts of a list are called with rows [P, H] or [B, S, H]"
            raise ConfigError(layer.path, f"a tensor of shape {list(rows.shape)}", rule, "Use ep_size=1")
        flat, batch = rows.reshape(-1, rows.shape[-1]), len(rows) if rows.dim() == 3 else 0
        if copies is not None:  # an expert may need its rows together, so one of the ranks that hold it sends them
            lengths = [len(flat), *[0] * (copies.size - 1)]
            flat, batch = copies.scattered(flat, 0, lengths), 0 if copies.index else batch
        if self._stage is not None:
            counts = tuple(len(flat) if place == number else 0 for place in range(layer.number))
            wish = Wish(FORWARD, expert=number + 1, batch=batch, counts=counts)
            result = self._sent(layer, flat, wish)()
        elif copies is not None and copies.index > 0:
            result = flat
        else:
            result = layer.whole(module, flat.view(rows.shape)).reshape(flat.shape)
        return (result if copies is None else copies.gathered(result, 0, lengths)).view(rows.shape)

    def _sent(self, layer: HeldExperts, rows: Tensor, wish: Wish) -> Callable[[], Tensor]:
        """Bring rows to their experts; return what waits for the results."""
        again = self._is_forward and in_checkpoint()  # the record is made then
        call = TokenCall(partial(self.exchange, layer), partial(self.exchange_back, layer), wish, again=again)
        # experts have gradients of tokens that do not want any, and of those of other ranks
        anchor = torch.zeros((), device=rows.device, requires_grad=torch.is_grad_enabled())
        ticket = Leave.apply(anchor, rows, call)
        return lambda: Arrive.apply(ticket, call)

    # --- rounds ---

    def exchange(self, layer: HeldExperts, rows: Tensor, wish: Wish) -> tuple[Arriving, Record | None]:
        """Have the experts of all ranks compute `rows`, when it is their turn."""
        self._settle()
        wish = wish._replace(layer=layer.place, number=self._calls[layer.place])
        with unobserved():  # what experts compute is no operation of the layer that waits for them
            this_round = self._rounds[self._stage].reach(wish, forward=self._is_forward)
            assert this_round is not None
            results, record = self._run_forward(layer, this_round, rows)
            if layer.groups.tokens.hand_over is not None:
                self._arriving = results
            return results, record

    def exchange_back(self, layer: HeldExperts, gradient: Tensor, record: Record | None) -> Backward:
        """Begin to bring gradients of results to the experts, when it is their turn.

        Raises:
            ConfigError: the step differentiates by itself, outside of the backwards of its schedule.
        """
        if self._stage is None or self._is_forward:
            rule = "Ranks that share experts (ep_size) give them their gradients in the backward of a step, and once"
            fix = "Leave the backward to the trainer, or use ep_size=1"
            raise ConfigError(layer.path, "differentiated in the step", rule, fix)
        self._settle()
        if record is None:  # of a forward whose layer is computed again
            place = self._rounds[self._stage].place
            records = [record for record in self._flight.records.get(layer.place, ()) if place in record.left]
            if not records:
                raise RuntimeError(f"{layer.path} has no forward that this backward belongs to")
            record = records[-1]
        wish = Wish(BACKWARD, layer.place, record.number)
        this_round = self._rounds[self._stage].reach(wish, forward=self._is_forward)
        assert this_round is not None
        self._open = self._run_backward(layer, this_round, gradient, record)
        return self._open

    def _settle(self) -> None:
        """End a backward that has begun: other ranks have no other exchange between its two.

        Where microbatches take turns, wait for results that are under way, too: all ranks hand over there, before the
        next round.
        """
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving.wait()
        opened, self._open = self._open, None
        if opened is not None:
            opened.end()

    def _run_forward(self, layer: HeldExperts, this_round: Round, rows: Tensor) -> tuple[Arriving, Record | None]:
        flight, place, tokens = self._flight, layer.place, layer.groups.tokens
        self._calls[place] += 1
        lengths, compute = layer.lengths(this_round), partial(self._compute, layer, flight.products)
        if self._is_forward:
            layer.note(this_round)
        again = not self._is_forward and flight.of_forward[place] > 0
        if not this_round.trains or again or (self._is_forward and layer.recomputed):
            layer.recomputed |= again
            with torch.no_grad():
                return forward(rows, lengths, tokens, compute), None
        number = max((record.number for record in flight.records.get(place, ())), default=-1) + 1
        results, record = recorded_forward(rows, lengths, tokens, compute, number, this_round)
        flight.records.setdefault(place, []).append(record)
        flight.of_forward[place] += int(self._is_forward)
        return results, record

    def _compute(self, layer: HeldExperts, products: Products, rows: Tensor, lengths: Lengths) -> Tensor | None:
        assert self._showing is not None
        with self._showing(layer.own_module):
            return layer.compute_local(products, rows, lengths)

    def _run_backward(self, layer: HeldExperts, this_round: Round, gradient: Tensor, record: Record) -> Backward:
        record.left -= this_round.wishing
        if not record.left:
            self._flight.records[layer.place].remove(record)
        return Backward(gradient, record, layer.groups.tokens)

    def _serve(self, this_round: Round) -> None:
        """Take part in what others want, without tokens of this rank."""
        chosen = this_round.chosen
        layer = self._stages[self._stage][chosen.layer]
        assert self._context is not None
        if chosen.kind == FORWARD:
            no_rows = torch.empty(0, chosen.width, dtype=DTYPES[chosen.dtype], device=self._device)
            states = torch_states(self._device)
            with self._context():
                self._run_forward(layer, this_round, no_rows)[0].wait()
            if not self._is_forward and not all(map(torch.equal, states, torch_states(self._device))):
                rule = "This rank's own step skips the layer, so nothing restores what its experts have drawn"
                fix = "Leave out dropout in experts, or recomputation of these layers"
                raise ConfigError(layer.path, "dropout in experts of a layer that is computed again", rule, fix)
            return
        record = next(record for record in self._flight.records[layer.place] if record.number == chosen.number)
        no_rows = record.rows.new_zeros(sum(record.lengths.sent), record.rows.shape[1])
        self._run_backward(layer, this_round, no_rows, record).end()


def _full(tensor: Tensor) -> Tensor:
    return tensor.full() if isinstance(tensor, Sharded) else tensor
