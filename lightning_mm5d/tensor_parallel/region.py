"""The stretch of a forward in which each rank works on local tensors: from column layers to the row layer after them.

On the way in a value is copied to the ranks (its partial gradients are summed), or a sequence shard is gathered; on the
way out the partial results are summed, or summed and scattered again. Layers that take the same input share one copy,
so the backward of an attention or a MLP communicates once, however many projections it has.

Inside, dropout draws from a random stream of the rank's own; outside, all ranks draw the same masks. The rank's stream
starts from a number drawn from the common one, so that a recomputed layer draws again what it drew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mm5d.data.random_state import drawn_seed, seed_torch, set_torch_states, torch_states
from lightning_mm5d.sharded.collectives import TensorGroup, reduce, reduce_scatter, with_length
from lightning_mm5d.sharded.remote_value import same_origin
from lightning_mm5d.sharded.sequence import is_tokens, ring_gather, ring_sum_scattered
from lightning_mm5d.sharded.tensor import Sharded, from_local
from lightning_mm5d.sharded.torch_internals import ends_graph, version_of
from lightning_mm5d.source.trees import method_of, names
from lightning_mm5d.tensor_parallel.entrance import Due, Entrance, PutsOff, Sharding, autocast, fits, weight_gradient

Linear = Callable[[nn.Module, Tensor, "Tensor | None"], Tensor]
_OF_MODULES = ("summary_", "classifier_")  # of heads that a model may not have, and that have modules for it


class Region:
    """What the sharded layers of one modality share on this rank.

    Args:
        group: its tensor parallel ranks.
        drops: whether anything in it may drop values out, so that random streams matter.
        device: where it computes.
        rings: whether shards of a sequence travel around a ring beside products.
    """

    def __init__(self, group: TensorGroup, *, drops: bool, device: torch.device, rings: bool = False) -> None:
        self.group, self.rings = group, rings
        self._drops, self._device = drops, device
        self._outer: list[Tensor] | None = None
        self._came: list[tuple[Tensor, Entrance, int]] = []
        self._sequences: tuple[Sharding, ...] = ()
        self._left: tuple[Sharding, ...] = ()

    def enter(self, x: Tensor, training: bool, first: nn.Module | None = None) -> Entrance:
        """Return the way of `x` to sharded weights; the same `x` gives the same one until `leave`.

        Args:
            x: the input.
            training: whether the layer is in training.
            first: the layer, where it computes its product next.
        """
        if training:
            self._switch()
        wants = x.requires_grad and torch.is_grad_enabled()
        for source, known, version in self._came:
            if x is source and version == version_of(x) and known.entered.requires_grad == wants:
                return known
        # code between these layers may ask for the full shape, so tokens of other ranks are gathered
        local = x.full() if isinstance(x, Sharded) and is_tokens(x.group) else x
        if isinstance(local, Sharded):
            self._sequences += ((local.sharded_dim, local.lengths),)
            sharding = local.sharded_dim, local.lengths
            entered = Entrance(local.local, self.group, sharding, rings=self.rings, first=first)
        else:
            entered = Entrance(local, self.group)
        self._came = [*self._came, (x, entered, version_of(x))]
        return entered

    def leave(self, y: Tensor) -> Tensor:
        """Return the sum of the partial `y` over ranks: full, or a shard of the sequence where shards came in.

        The sum may take the memory of `y`, a product that nobody else holds.

        Where nothing came in, `y` is an adapter's result and becomes full or sharded as that of its layer did.
        """
        sharding = self.sharding_of(y)
        self.forget()
        if sharding is None:
            return reduce(y, self.group, is_fresh=True)
        return from_local(reduce_scatter(y, *sharding, self.group), *sharding, self.group)

    def leave_in_ring(self, module: nn.Module, x: Tensor, puts_off: PutsOff) -> Tensor | None:
        """Return `leave` of the product of a row layer without its bias, summed and scattered beside the product.

        Args:
            module: the layer.
            x: its input, of which this rank has some columns.
            puts_off: of a layer and its input, what takes its weight gradient if that is put off.

        Returns:
            The result; None where no shard of a sequence came in, or no ring is wanted.
        """
        sharding = self.sharding_of(x) if self.rings and fits(module) and not isinstance(x, Sharded) else None
        if sharding is None or sharding[0] == -1:
            return None
        return from_local(_ring_row(module, x, sharding, self.group, puts_off(module, x)), *sharding, self.group)

    def sharding_of(self, x: Tensor) -> Sharding | None:
        """How the sequence of a full `x` in this stretch is sharded outside of it; None where nothing came in so."""
        if self._came:
            self._left = self._sequences
        return next(((d, n) for d, n in self._left if x.dim() >= -d and x.shape[d] == sum(n)), None)

    def forget(self) -> None:
        """Let go of what came in, and draw from the common random stream again."""
        self._came, self._sequences = [], ()
        self._restore()

    @contextmanager
    def closing(self) -> Iterator[None]:
        """`forget` where the work stops: checkpointing stops a recomputation after the last tensor that it needs."""
        try:
            yield
        except BaseException:
            self.forget()
            raise

    def take(self) -> Any:
        """Return what belongs to the microbatch that is computed."""
        return self._outer, self._came, self._sequences, self._left

    def put(self, state: Any) -> None:
        """Go on with the microbatch that `take` returned `state` of."""
        self._outer, self._came, self._sequences, self._left = state

    # --- random streams ---

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Draw from the common random stream meanwhile."""
        if self._outer is None:
            yield
            return
        inner = torch_states(self._device)
        self._restore()
        try:
            yield
        finally:
            self._outer = torch_states(self._device)
            set_torch_states(inner, self._device)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Draw from the rank's own random stream meanwhile."""
        is_first = self._outer is None
        self._switch()
        try:
            yield
        finally:
            if is_first:
                self._restore()

    def _switch(self) -> None:
        if not self._drops or self._outer is not None:
            return
        # without a generator of its own: checkpointing puts back the common ones before it recomputes
        seed = drawn_seed(self.group.index)
        self._outer = torch_states(self._device)
        seed_torch(seed, self._device)

    def _restore(self) -> None:
        if self._outer is not None:
            set_torch_states(self._outer, self._device)
            self._outer = None


def linear(module: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return what a linear layer computes of `x` ``[..., in]`` with its weight and `bias`: ``[..., out]``."""
    weight: Any = module.weight
    return F.linear(x, weight if isinstance(module, nn.Linear) else weight.t(), bias)


def drops(module: nn.Module) -> bool:
    """Whether anything in `module` may drop values out in training.

    True for a rate above 0 in a module or its configuration, where the name of the rate or of the class contains
    "drop"; for a forward that names ``dropout`` where there is no such rate; and for a forward without source.
    """
    for part in module.modules():
        rates = [*_rates(part), *_rates(getattr(part, "config", None))]
        if any(rate > 0 for rate in rates):
            return True
        if not rates and not hasattr(part, "dropout"):
            forward = method_of(type(part), "forward")
            named = frozenset() if forward is None else names(forward, variables=False)
            if named is None or "dropout" in named:
                return True
    return False


def _rates(holder: Any) -> Iterator[float]:
    is_dropout = "drop" in type(holder).__name__.lower()  # then its rate may have any name, such as `p`
    for name, value in getattr(holder, "__dict__", {}).items():
        is_rate = "drop" in name and not name.startswith(_OF_MODULES)
        if isinstance(value, Tensor) and value.dim() == 0:
            value = 1.0 if value.is_meta else value.item()
        if isinstance(value, Real) and not isinstance(value, bool) and (is_rate or (is_dropout and value <= 1)):
            yield float(value)


def _ring_row(module: nn.Module, x: Tensor, sharding: Sharding, group: TensorGroup, due: Due | None) -> Tensor:
    """Return this rank's shard of what a row layer computes of `x`, without its bias: summed and scattered.

    The sum of one shard travels around the ring while the product for the next one is computed. The backward is the
    mirror image: gradients of the shards travel while the rows at hand are multiplied for the gradient of the input.
    The gathered rows give the weight gradient afterwards, or later where a split backward puts it off.

    Shapes: inputs ``[..., S, in]``, results ``[..., S of this rank, out]``; weights ``[out, in]``, or ``[in, out]`` of
    a Conv1D.

    Args:
        module: the layer, whose weight is this rank's.
        x: the columns of its input that this rank has.
        sharding: of the sequence of results.
        group: the tensor parallel ranks.
        due: takes the weight gradient while it is open; None where it is never put off.
    """
    layer = sharding, group, not isinstance(module, nn.Linear), due
    return same_origin(_RingRow.apply(autocast(x), module.weight, *layer), x)


class _RingRow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        sharding: Sharding,
        group: TensorGroup,
        is_conv: bool,
        due: Due | None,
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight if x.requires_grad else None)
        # beside what is saved, which checkpointing replaces by a copy that is no parameter
        ctx.weight, ctx.due = weight, due
        ctx.sharding, ctx.group, ctx.is_conv, ctx.columns = sharding, group, is_conv, x.shape[-1]
        (dim, lengths), cast = sharding, autocast(weight)
        rows = cast.t() if is_conv else cast

        def part(start: int, length: int) -> Tensor:
            return F.linear(x.narrow(dim, start, length).contiguous(), rows)

        return ring_sum_scattered(part, dim, lengths, group)

    @staticmethod
    @ends_graph
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_input, wants_weight, *_ = ctx.needs_input_grad
        dim, lengths = ctx.sharding
        below: Tensor | None = None
        if wants_input:
            weight = weight.to(gradient.dtype)  # autocast ran the forward in the gradient's dtype
            weight = weight.t() if ctx.is_conv else weight
            below = gradient.new_empty(with_length([*gradient.shape[:-1], ctx.columns], dim, sum(lengths)))

        def multiply(rows: Tensor, start: int) -> None:
            if below is not None:
                below.narrow(dim, start, rows.shape[dim]).copy_(rows @ weight)

        full, of_weight = ring_gather(gradient, dim, lengths, ctx.group, multiply), None
        if wants_weight:
            rows = full.reshape(-1, full.shape[-1])
            of_weight = weight_gradient(ctx.weight, rows, x, is_conv=ctx.is_conv, due=ctx.due, is_own=True)
        return below, of_weight, None, None, None, None
