"""The experts that this rank shares with others: their forwards bring tokens to them, in the actions of a step.

In a step each rank computes with its own experts. Elsewhere, as in an evaluation, and in a step in which the ranks can
not meet, parameters are whole and the experts' own forward runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.expert_parallel.adapters import Adapters, adapters_around
from lightning_mm5d.expert_parallel.awaited_result import awaited
from lightning_mm5d.expert_parallel.expert_layer import ExpertLayer, has_shared_expert
from lightning_mm5d.expert_parallel.loads import Load
from lightning_mm5d.expert_parallel.rounds import BACKWARD, FORWARD, Round, Rounds, Wish
from lightning_mm5d.expert_parallel.token_call import DTYPES, Arrive, Leave, TokenCall
from lightning_mm5d.expert_parallel.token_exchange import (
    Arriving,
    Backward,
    Lengths,
    Record,
    TokenGroup,
    forward,
    recorded_forward,
)
from lightning_mm5d.layout.even_split import even_lengths
from lightning_mm5d.sharded.collectives import TensorGroup, gather, scatter
from lightning_mm5d.sharded.tensor import Sharded
from lightning_mm5d.sharded.torch_internals import in_checkpoint, unobserved

Context = Callable[[], AbstractContextManager[Any]]
Showing = Callable[[nn.Module], AbstractContextManager[Any]]
Products = Callable[[], AbstractContextManager[Any]]


class ExpertGroups(NamedTuple):
    """The groups of one rank that share the experts of a layer.

    Attributes:
        tokens: between which rows travel.
        places: of these ranks among those of `host`.
        host: the ranks that run the layer's stage together, with messages in host memory.
        copies: the tensor parallel ranks that hold the same experts; None where they hold other parts of them.
    """

    tokens: TokenGroup
    places: tuple[int, ...]
    host: dist.ProcessGroup
    copies: TensorGroup | None


@dataclass
class _Flight:
    """What is kept of the forward of a microbatch, by layer."""

    products: Products  # entered around the experts
    records: dict[int, list[Record]] = field(default_factory=dict)
    of_forward: Counter[int] = field(default_factory=Counter)  # records that the forward has made


class _Layer:
    """One module of experts."""

    def __init__(
        self, layer: ExpertLayer, place: int, module: nn.Module, groups: ExpertGroups, adapters: Adapters
    ) -> None:
        self.path, self.place, self.groups, self.adapters = layer.path, place, groups, adapters
        self.number, self.ranges = layer.number, layer.ranges
        self.overlaps = False
        self.recomputed = False  # known after its first backward
        self.module = module
        self._inner: Callable[..., Tensor] = module.forward
        self.tokens = [0] * layer.number

    def whole(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call the experts' own forward, with all of them."""
        held = next(self.module.parameters()).shape[0]
        if held != self.number:
            raise ConfigError(
                self.path,
                f"{held} of {self.number} experts",
                "Ranks that share experts compute with them in the steps of the trainer",
                "Call the layer in a step, or use ep_size=1",
            )
        return self._inner(*args, **kwargs)

    def own(self, products: Products, rows: Tensor, experts: Tensor) -> Tensor:
        """Return what this rank's experts compute of rows of one expert each, inside of `products`."""
        start, stop = self.ranges[self.groups.tokens.index]
        module: Any = self.module
        adapted = self.adapters.adapted(module)
        module.num_experts = stop - start
        vars(module).update(adapted)
        try:
            with products():
                return self._inner(rows, experts.unsqueeze(1), rows.new_ones(len(rows), 1))
        finally:
            module.num_experts = self.number
            for name in adapted:
                del vars(module)[name]

    def lengths(self, counts: Sequence[Sequence[int]]) -> Lengths:
        """Return what travels, given the rows of each rank of the stage for each expert."""
        ranks, index = self._ranks(counts), self.groups.tokens.index
        start, stop = self.ranges[index]
        return Lengths(
            [sum(ranks[index][first:last]) for first, last in self.ranges],
            [sum(row[start:stop]) for row in ranks],
            [[*row[start:stop]] for row in ranks],
        )

    def note(self, counts: Sequence[Sequence[int]]) -> None:
        """Count rows by expert."""
        self.tokens = [sum(rows) for rows in zip(self.tokens, *self._ranks(counts), strict=False)]

    def _ranks(self, counts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        return [counts[place] for place in self.groups.places]


class SharedExperts:
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
        self._stages: dict[Any, list[_Layer]] = {}
        self._rounds: dict[Any, Rounds] = {}
        self._context: Context | None = None  # of a step in which ranks meet
        self._showing: Showing | None = None  # of such a step
        self._flights: dict[Any, _Flight] = {}
        self._stage: Any = None
        self._flight = _Flight(nullcontext)
        self._is_forward = True
        self._calls: Counter[int] = Counter()
        self._open: Backward | None = None  # between its two exchanges
        self._undo: list[Callable[[], object]] = []
        for stage, held in layers.items():
            own = [self._layer(root, one, place, groups[one.path]) for place, one in enumerate(held)]
            if own:
                self._stages[stage] = own
                most = max(layer.number for layer in own)
                self._rounds[stage] = Rounds(own[0].groups.host, most, self._serve)
            for layer in own:
                layer.overlaps = not is_compiled and has_shared_expert(root, layer.path)
                self._patch(root.get_submodule(layer.path), layer)

    def remove(self) -> None:
        """Take the patches away again."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def loads(self) -> dict[str, Load]:
        """Return how many rows experts and ranks have had in forwards since the last call, by path of the layer."""
        layers = [layer for stage in self._stages.values() for layer in stage]
        found = {layer.path: Load.of(layer.tokens, layer.ranges) for layer in layers}
        for layer in layers:
            layer.tokens = [0] * layer.number
        return found

    # --- a step ---

    @property
    def are_apart(self) -> bool:
        """Whether a step runs in which each rank computes with its own experts."""
        return self._context is not None

    def begin(self, context: Context, showing: Showing) -> None:
        """Begin a step in whose actions ranks meet.

        Args:
            context: the precision of a forward.
            showing: entered around the forward of experts with this rank's rows.
        """
        self._context, self._showing = context, showing

    def end(self) -> None:
        """End a step."""
        self._context = self._showing = self._open = None
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

    def _layer(self, root: nn.Module, layer: ExpertLayer, place: int, groups: ExpertGroups) -> _Layer:
        wrappers = [*adapters_around(root, layer.path).values()]
        adapters = Adapters(wrappers, layer.number, layer.ranges[groups.tokens.index], lambda: self._stage is not None)
        self._undo += adapters.patch()
        return _Layer(layer, place, root.get_submodule(layer.path), groups, adapters)

    def _patch(self, module: nn.Module, layer: _Layer) -> None:
        before = vars(module).get("forward")

        @torch.compiler.disable
        def called(_: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return self._called(layer, hidden_states, top_k_index, top_k_weights)

        vars(module)["forward"] = MethodType(called, module)
        if before is None:
            self._undo.append(partial(vars(module).pop, "forward", None))
        else:
            self._undo.append(partial(setattr, module, "forward", before))

    def _called(self, layer: _Layer, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        if self._is_dry():
            return hidden * weights.sum(-1, keepdim=True).to(hidden.dtype)
        copies, length = layer.groups.copies, len(hidden)
        if copies is not None:  # each of the ranks that hold the same experts takes some of the tokens
            hidden, index, weights = (x.full() if isinstance(x, Sharded) else x for x in (hidden, index, weights))
            lengths = even_lengths(length, copies.size)
            start = sum(lengths[: copies.index])
            hidden, weights = scatter(hidden, 0, lengths, copies), scatter(weights, 0, lengths, copies)
            index = index.narrow(0, start, lengths[copies.index])
        if self._stage is None:
            result = layer.whole(hidden, index, weights)
            return result if copies is None else gather(result, 0, lengths, copies)
        finish = self._dispatched(layer, hidden, index, weights)
        if copies is not None:
            return gather(finish(), 0, lengths, copies)
        return awaited(hidden, finish) if layer.overlaps and type(hidden) is Tensor else finish()

    def _dispatched(self, layer: _Layer, hidden: Tensor, index: Tensor, weights: Tensor) -> Callable[[], Tensor]:
        """Bring rows to their experts; return what waits for the results and gives each token the sum of its own."""
        experts = index.reshape(-1)
        order = torch.argsort(experts, stable=True)
        counts = experts.new_zeros(layer.number).scatter_add_(0, experts, torch.ones_like(experts)).tolist()
        tokens = order // max(index.shape[1], 1)
        rows = hidden.index_select(0, tokens)
        trains = torch.is_grad_enabled()
        again = self._is_forward and in_checkpoint()  # the record is made then
        exchange = partial(self.exchange, layer)
        call = TokenCall(exchange, partial(self.exchange_back, layer), tuple(counts), again=again)
        # experts have gradients of tokens that do not want any, and of those of other ranks
        anchor = torch.zeros((), device=rows.device, requires_grad=trains)
        ticket = Leave.apply(anchor, rows, call)

        def finish() -> Tensor:
            with torch.set_grad_enabled(trains):
                results = Arrive.apply(ticket, call)
                weighted = results * weights.reshape(-1)[order].unsqueeze(1)
                return torch.zeros_like(hidden).index_add_(0, tokens, weighted.to(hidden.dtype))

        return finish

    # --- rounds ---

    def exchange(self, layer: _Layer, rows: Tensor, wish: Wish) -> tuple[Arriving, Record | None]:
        """Have the experts of all ranks compute `rows`, when it is their turn."""
        self._settle()
        wish = wish._replace(layer=layer.place, number=self._calls[layer.place])
        with unobserved():  # what experts compute is no operation of the layer that waits for them
            found = self._rounds[self._stage].reach(wish, forward=self._is_forward)
            assert found is not None
            return self._run_forward(layer, found, rows)

    def exchange_back(self, layer: _Layer, gradient: Tensor, record: Record | None) -> Backward:
        """Begin to bring gradients of results to the experts, when it is their turn."""
        self._settle()
        if record is None:  # of a forward whose layer is computed again
            place = self._rounds[self._stage].place
            made = [one for one in self._flight.records.get(layer.place, ()) if place in one.left]
            if not made:
                raise RuntimeError(f"{layer.path} has no forward that this backward belongs to")
            record = made[-1]
        wish = Wish(BACKWARD, layer.place, record.number)
        found = self._rounds[self._stage].reach(wish, forward=self._is_forward)
        assert found is not None
        self._open = self._run_backward(layer, found, gradient, record)
        return self._open

    def _settle(self) -> None:
        """End a backward that has begun: other ranks have no other exchange between its two."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.end()

    def _run_forward(self, layer: _Layer, found: Round, rows: Tensor) -> tuple[Arriving, Record | None]:
        flight, place, tokens = self._flight, layer.place, layer.groups.tokens
        self._calls[place] += 1
        lengths, own = layer.lengths(found.counts), partial(self._own, layer, flight.products)
        if self._is_forward:
            layer.note(found.counts)
        again = not self._is_forward and flight.of_forward[place] > 0
        if not found.trains or again or (self._is_forward and layer.recomputed):
            layer.recomputed |= again
            with torch.no_grad():
                return forward(rows, lengths, tokens, own), None
        number = max((one.number for one in flight.records.get(place, ())), default=-1) + 1
        results, record = recorded_forward(rows, lengths, tokens, own, number, found)
        flight.records.setdefault(place, []).append(record)
        flight.of_forward[place] += int(self._is_forward)
        return results, record

    def _own(self, layer: _Layer, products: Products, rows: Tensor, experts: Tensor) -> Tensor:
        assert self._showing is not None
        with self._showing(layer.module):
            return layer.own(products, rows, experts)

    def _run_backward(self, layer: _Layer, found: Round, gradient: Tensor, record: Record) -> Backward:
        record.left -= found.wishing
        if not record.left:
            self._flight.records[layer.place].remove(record)
        return Backward(gradient, record, layer.groups.tokens)

    def _serve(self, found: Round) -> None:
        """Take part in what others want, without tokens of this rank."""
        chosen = found.chosen
        layer = self._stages[self._stage][chosen.layer]
        assert self._context is not None
        if chosen.kind == FORWARD:
            none = torch.empty(0, chosen.width, dtype=DTYPES[chosen.dtype], device=self._device)
            with self._context():
                self._run_forward(layer, found, none)[0].wait()
            return
        record = next(one for one in self._flight.records[layer.place] if one.number == chosen.number)
        none = record.rows.new_zeros(sum(record.lengths.sent), record.rows.shape[1])
        self._run_backward(layer, found, none, record).end()
