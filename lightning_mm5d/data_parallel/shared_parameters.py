"""The parameters of which this rank owns some rows: what they show when, how rows travel, and the two faces of each.

A shared parameter is one object with two faces. *Whole*, it has the local tensor that layers compute with. *Own*, it
has the rows that this rank owns, and their gradient: so optimizers step on the objects that the user gave them, with
states of the size of their rows. It shows its own face from the end of a training step to the end of the optimizer's
step.

Between batches a parameter of stage 1 or 2 is whole, and one of stage 3 is own; the whole tensors of stage 3 have
memory while a step runs.

With a main parameter (`main_parameters`), own rows have its precision, and it is own between batches whatever its
stage; whole, it is rounded to the precision that layers compute in.

Where the gather is compressed, whole tensors have rounded rows, equal on all ranks, and the rows that a rank owns stay
exact, in memory of their own.

A parameter whose values are elsewhere at the moment: the first use of them has them brought.

It is the same object, of another class for that time. Its data are NaN without memory, so that code which no torch
function sees can neither read freed memory nor pass unnoticed.

The two collectives of ranks that share parameters: a sum of which each rank gets its rows, and their exchange.

Devices that order messages, as NCCL's do, sum in their own reduce-scatter. Over gloo, which has none of its own, a sum
is an all-to-all and an addition in this rank's memory: the bytes of a ring for shares of any lengths. The gather pads
each share to the longest, and so does the reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_mm5d.plan.holdings import DataShard
from lightning_mm5d.plan.plan import Traffic
from lightning_mm5d.sharded.collectives import waits_on_device
from lightning_mm5d.sharded.remote_value import TELLING, plain
from lightning_mm5d.sharded.torch_internals import all_gather_single, reduce_scatter_single


class ScatteredSum:
    """A reduce-scatter that is under way.

    Args:
        sent: flat; for each rank of `group`, in its order, what this rank adds to that rank's sum. It is kept until it
            has left.
        lengths: of what each rank gets, the same on all ranks.
        group: the ranks that share.
    """

    def __init__(self, sent: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> None:
        self._length, self._count = lengths[group.rank()], len(lengths)
        self._is_ordered = waits_on_device(sent.device, group)
        self._total: Tensor | None = None
        self._work: Any
        if self._is_ordered:
            longest = max(lengths)
            if min(lengths) < longest:
                sent = torch.cat([F.pad(part, (0, longest - part.numel())) for part in sent.split(list(lengths))])
            arrived = sent.new_empty(longest)
            self._work = reduce_scatter_single(arrived, sent, group, async_op=True)
        else:
            arrived = sent.new_empty(self._length * self._count)
            sizes = [self._length] * self._count
            self._work = dist.all_to_all_single(arrived, sent, sizes, list(lengths), group=group, async_op=True)
        self._sent: Tensor | None = sent
        self._arrived: Tensor | None = arrived

    def is_there(self) -> bool:
        """Whether `wait` does not hold up the host."""
        return self._is_ordered or self._arrived is None or self._work.is_completed()

    def wait(self) -> Tensor:
        """Return the sum of this rank's chunks over all ranks, and free what was sent and has arrived."""
        if self._total is None:
            self._work.wait()
            assert self._arrived is not None
            if self._is_ordered:
                self._total = self._arrived[: self._length]
            else:
                self._total = self._arrived.view(self._count, -1).sum(0)
            self._sent = self._arrived = self._work = None  # gloo's work keeps both
        return self._total


class Gathered:
    """An all-gather that is under way.

    Args:
        rows: a flat tensor.
        lengths: of the flat tensors of all ranks of `group`, in its order.
        group: the ranks that share.
    """

    def __init__(self, rows: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> None:
        longest = max(lengths)
        self._lengths = lengths
        self._padded = rows if rows.numel() == longest else torch.cat([rows, rows.new_empty(longest - rows.numel())])
        self._all = rows.new_empty(longest * len(lengths))
        self._work: Any = all_gather_single(self._all, self._padded, group=group, async_op=True)

    def wait(self) -> list[Tensor]:
        """Return the flat tensors of all ranks."""
        self._work.wait()
        return [rows[:length] for rows, length in zip(self._all.chunk(len(self._lengths)), self._lengths, strict=True)]


# a backward from a parameter adds to its gradient
_TELLING = TELLING | {Tensor.untyped_storage, Tensor.data_ptr, Tensor.grad.__set__, torch.autograd.backward}  # type: ignore[union-attr]


class Closed(nn.Parameter):
    """A parameter without values.

    Attributes:
        opens: brings them, and gives the parameter its class again; or leaves NaN where only shapes are asked for.
        opened: that class.
    """

    opens: Callable[[], None]
    opened: type[nn.Parameter]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # a view of itself is how torch finds the node that accumulates its gradient
        if func not in _TELLING and not (func is Tensor.view_as and args[0] is args[1]):
            closed = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Closed)]
            for leaf in closed:
                if isinstance(leaf, Closed):  # another of the same layer may have opened it
                    leaf.opens()
            if not any(isinstance(leaf, Closed) for leaf in closed):
                return func(*args, **kwargs)
        with plain():
            return func(*args, **kwargs)


def make_closed(parameter: nn.Parameter, shape: Sequence[int], dtype: torch.dtype, opens: Callable[[], None]) -> None:
    """Show NaN of a shape and dtype; `opens` is called before a function uses values, and must call `make_open`."""
    make_open(parameter)
    filler = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
    parameter.data = torch.full((), filler, dtype=dtype, device=parameter.device).expand(shape)
    kind = type(parameter)
    parameter.__class__ = Closed
    vars(parameter).update(opens=opens, opened=kind)


def make_open(parameter: nn.Parameter) -> None:
    """Give a parameter its own class again, where it is closed."""
    if isinstance(parameter, Closed):
        parameter.__class__ = vars(parameter).pop("opened")
        del vars(parameter)["opens"]


class SharedParameter:
    """One parameter that is shared.

    Args:
        parameter: whole, or this rank's rows.
        shard: what this rank owns of it.
        shape: of the local tensor when it is whole.
        traffic: how its rows and gradients travel.
        computes: dtype of the local tensor that layers compute with; None for that of `parameter`.

    Attributes:
        dtype: of the local tensor.
        own_rows: this rank's rows.
        whole: the local tensor; None while it has no memory.
        gradient: of the rows, while the parameter shows its whole face.
        shows_rows: whether it shows own rows in a step that computes with them, and gets their gradients there.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        shard: DataShard,
        shape: Sequence[int],
        traffic: Traffic,
        computes: torch.dtype | None = None,
    ) -> None:
        self.parameter, self.shard, self.shape, self.traffic = parameter, shard, tuple(shape), traffic
        self.dtype = computes or parameter.dtype
        self._gathered: Tensor | None = None  # own rows of the whole tensor, where these are rounded
        self.gradient: Tensor | None = None
        self.shows_rows = False
        self._rows: Tensor | None = None  # own rows in the precision of layers, in a step that computes with them
        self._version = parameter._version  # when it began to show its whole face
        self.whole: Tensor | None = parameter.data if parameter.shape == self.shape else None
        self.is_whole = self.whole is not None
        self.own_rows = parameter.data if self.whole is None else shard.rows(self.whole)
        if self.rests_own and self.whole is not None:
            self.own_rows = self.own_rows.clone(memory_format=torch.contiguous_format)
            self.show_own()
        elif not self.rests_own and self.whole is None:
            self.whole = self.own_rows.new_empty(self.shape)
            shard.rows(self.whole).copy_(self.own_rows)
            self.own_rows = shard.rows(self.whole)
        if not self.rests_own and traffic.parameters is not None:
            self.own_rows = self.own_rows.clone(memory_format=torch.contiguous_format)

    @property
    def rests_own(self) -> bool:
        """Whether it shows own rows between batches, when the whole tensor has no memory."""
        return self.shard.stage == 3 or self.dtype != self.own_rows.dtype

    @property
    def is_apart(self) -> bool:
        """Whether own rows have memory of their own, beside those of the whole tensor."""
        return self.rests_own or self.traffic.parameters is not None

    @property
    def is_rounded(self) -> bool:
        """Whether the local tensor has rounded rows, also of what was frozen after it was trained."""
        return self._gathered is not None and not self.rests_own

    @property
    def is_hidden(self) -> bool:
        """Whether it shows NaN in a step that computes with own rows."""
        return self.shows_rows and isinstance(self.parameter, Closed)

    def widen(self, dtype: torch.dtype) -> None:
        """Give it a main parameter of `dtype`, between batches."""
        assert self.gradient is None
        was_own = not self.is_whole
        self.own_rows = self.own_rows.to(dtype)
        if was_own:
            self.parameter.grad = None
            self.parameter.data = self.own_rows
        else:
            self.show_own()

    def show_own(self) -> None:
        """Show the rows that this rank owns, and their gradient."""
        if self.is_whole:
            make_open(self.parameter)
            self.adopt_changes()
            self.parameter.grad = None
            self.parameter.data = self.own_rows.contiguous()  # as optimizers take for granted
            self.parameter.grad, self.gradient = self.gradient, None
            self.is_whole = self.shows_rows = False
            self._rows = None
        if self.rests_own:
            self.whole = None
        if self.dtype != self.own_rows.dtype:
            self.parameter.grad_dtype = None

    def show_whole(self) -> None:
        """Show the local tensor, without a gradient."""
        assert self.whole is not None
        if not self.is_whole:
            self._leave_own()
            self.parameter.data = self.whole

    def show_closed(self, opens: Callable[[], None]) -> None:
        """Show NaN in the shape of the local tensor, and free what memory that has.

        Args:
            opens: called before the first use of its values; must call `reopen`.
        """
        self.shows_rows, self._rows = False, None
        if not self.is_whole:
            self._leave_own()
        elif self.rests_own and not isinstance(self.parameter, Closed):
            self.adopt_changes()
            self._version = self.parameter._version
        if self.whole is not None and self.whole.untyped_storage().resizable():
            self.whole.untyped_storage().resize_(0)
        else:  # an array of numpy has shown it: its memory goes with the last view, and others follow in new memory
            self.whole = None
        make_closed(self.parameter, self.shape, self.dtype, opens)

    def reopen(self) -> None:
        """Show the local tensor in place of NaN."""
        assert self.whole is not None
        make_open(self.parameter)
        if self.shard.of_experts:
            forget_node(self.parameter)
        self.parameter.data = self.whole

    def show_rows(self) -> None:
        """Let a closed parameter show own rows in a step that computes with them, in the precision of layers."""
        make_open(self.parameter)
        if self._rows is None:
            forget_node(self.parameter)
            self._rows = self.own_rows.to(self.dtype)
        self.parameter.data = self._rows
        self.shows_rows = True

    def hide_rows(self, opens: Callable[[], None]) -> None:
        """Show NaN in the shape of the local tensor until `show_rows`, with `opens` as for `show_closed`."""
        make_closed(self.parameter, self.shape, self.dtype, opens)

    def _leave_own(self) -> None:
        self.keep_own()
        self.gradient, self.parameter.grad = self.parameter.grad, None
        self.is_whole, self._version = True, self.parameter._version
        if self.dtype != self.own_rows.dtype:
            self.parameter.grad_dtype = self.own_rows.dtype

    def keep_own(self) -> None:
        """Take the rows from the parameter, whose data an optimizer may have replaced by a new tensor."""
        rows = self.parameter.data
        if not self.is_whole and rows.data_ptr() != self.own_rows.data_ptr():
            self.own_rows.copy_(rows)

    def note_gathered(self) -> None:
        """Remember this rank's rows of the whole tensor as they were gathered."""
        if self.is_apart and not self.rests_own:
            assert self.whole is not None
            self._gathered = self.shard.rows(self.whole).clone()

    def adopt_changes(self) -> None:
        """Take over what was written to this rank's rows of a whole tensor, as a step or callback may."""
        if not (self.is_whole and self.is_apart) or self.whole is None:
            return
        before = self._gathered
        if self.rests_own:
            if self.whole.untyped_storage().size() == 0 or self.parameter._version == self._version:
                return
            before = self.own_rows.to(self.dtype)
        with torch.inference_mode(False), torch.no_grad():
            rows = self.shard.rows(self.whole)
            self.own_rows.copy_(rows if before is None else torch.where(rows == before, self.own_rows, rows))

    def give_memory(self) -> None:
        """Let the local tensor have memory, in the storage that it had before."""
        if self.whole is None:
            self.whole = self.own_rows.new_empty(self.shape, dtype=self.dtype)
        elif self.whole.untyped_storage().size() == 0:  # others may share memory that was never freed
            self.whole.untyped_storage().resize_(self.whole.numel() * self.whole.element_size())

    def cut_state(self, state: dict[str, Any]) -> None:
        """Leave of an optimizer's state for the local tensor the rows that this rank owns."""
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == self.shape:
                state[key] = self.shard.rows(value).clone(memory_format=torch.contiguous_format)

    def numel_at(self, place: int) -> int:
        """Return the number of elements of the rank at `place` of the block."""
        start, stop = self.shard.ranges[place]
        length = self.shape[self.shard.dim]
        return torch.Size(self.shape).numel() // length * (stop - start)


def forget_node(parameter: nn.Parameter) -> None:
    """Have autograd make a new node that adds up gradients, since that of an older graph expects another shape.

    A node lasts as long as any graph that leads to it; data of another dtype lets go of it.
    """
    other = torch.float32 if parameter.dtype == torch.float16 else torch.float16
    parameter.data = torch.empty(0, dtype=other, device=parameter.device)


Groups = Mapping[tuple[int, ...], dist.ProcessGroup | None]


class Fetch:
    """The rows of some parameters on their way from all ranks of a block.

    Args:
        held: of one block and dtype.
        group: the block.
        exact: whether rows travel as they are.
    """

    def __init__(self, held: Sequence[SharedParameter], group: dist.ProcessGroup, *, exact: bool) -> None:
        self._held = held
        rows = torch.cat([shared.own_rows.reshape(-1).to(shared.dtype) for shared in held])
        self._sizes = [[shared.numel_at(place) for shared in held] for place in range(len(held[0].shard.block))]
        encoding = None if exact else held[0].traffic.parameters
        start: Callable[..., Any] = Gathered if encoding is None else encoding.gathered  # equal rows on all ranks
        self._gathered = start(rows, [sum(sizes) for sizes in self._sizes], group)

    def finish(self) -> None:
        """Write the rows to the local tensors, which get memory."""
        with torch.inference_mode(False):  # of an evaluation
            for shared in self._held:
                shared.give_memory()
        targets, sources = [], []
        for place, (flat, sizes) in enumerate(zip(self._gathered.wait(), self._sizes, strict=True)):
            for shared, part in zip(self._held, flat.split(sizes), strict=True):
                if place != shared.shard.place or shared.is_apart:
                    assert shared.whole is not None
                    targets.append(shared.shard.rows(shared.whole, place))
                    sources.append(part.view(targets[-1].shape))
        torch._foreach_copy_(targets, sources)
        for shared in self._held:
            shared.note_gathered()

    def drop(self) -> None:
        """Wait for the rows, and throw them away."""
        self._gathered.wait()


class SharedParameters:
    """All shared parameters of one rank.

    Args:
        parameters: of this rank by name, each once, in one order on all ranks.
        shards: of those that are shared, by name.
        shapes: of the local tensors of these by name.
        groups: the process group of each tuple of ranks.
        traffic: how they travel, by name.
        bucket_bytes: how much is exchanged at once.

    Attributes:
        all: the shared parameters, in one order on all ranks; none before `begin`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shards: Mapping[str, DataShard],
        shapes: Mapping[str, Sequence[int]],
        groups: Groups,
        traffic: Mapping[str, Traffic],
        *,
        bucket_bytes: int,
    ) -> None:
        self._parameters, self._shards, self._shapes = parameters, shards, shapes
        self._groups, self._traffic, self._bucket_bytes = groups, traffic, bucket_bytes
        self.all: list[SharedParameter] = []
        self._by_id: dict[int, SharedParameter] = {}

    def begin(self, computes: Mapping[str, torch.dtype], *, trains: bool) -> None:
        """Share the parameters as they are now, on the device where ranks compute; collective.

        Args:
            computes: what layers compute in, by name of each parameter that has a main parameter.
            trains: whether there are optimizers; without any, what rests as own rows alone has something to share.
        """
        for name, shard in self._shards.items():
            parameter = self._parameters[name]
            if trains or shard.stage == 3 or name in computes:
                shared = SharedParameter(parameter, shard, self._shapes[name], self._traffic[name], computes.get(name))
                self.all.append(shared)
                self._by_id[id(shared.parameter)] = shared
        self._fetch([p for p in self.all if not p.rests_own and p.is_apart and p.parameter.requires_grad])

    def leave_step(self) -> None:
        """Show own rows where a step that has failed left parameters without values."""
        for shared in self.all:
            if isinstance(shared.parameter, Closed):
                shared.show_own()

    def keep(self, *, failed: bool = False) -> None:
        """Leave what is shown between batches: the local tensors, of stage 3 this rank's rows.

        Args:
            failed: whether the run has failed, after which rows that travelled rounded stay so; else they are exchanged
                exactly, which is collective.
        """
        self.rest()
        if not failed:
            self._make_exact()
        self.all.clear()
        self._by_id.clear()

    @contextmanager
    def exact(self) -> Iterator[frozenset[int]]:
        """Enter between batches, where values are read that must not be rounded; collective.

        Yields:
            The addresses of what is exact meanwhile and rounded afterwards.
        """
        self.settle()
        rounded = self._make_exact()
        try:
            yield frozenset(shared.whole.data_ptr() for shared in rounded if shared.whole is not None)
        finally:
            self._fetch(rounded)

    def _make_exact(self) -> list[SharedParameter]:
        """Let local tensors that have rounded rows have exact ones; return their parameters."""
        rounded = [shared for shared in self.all if shared.is_rounded]
        for shared in rounded:
            shared.adopt_changes()
        self._fetch(rounded, exact=True)
        return rounded

    def get(self, parameter: Tensor) -> SharedParameter | None:
        """Return the shared parameter that `parameter` is, if it is one."""
        return self._by_id.get(id(parameter))

    def show_own(self) -> None:
        """Let all show the rows that this rank owns."""
        self._take_data()
        for shared in self.all:
            shared.show_own()

    def show_whole(self) -> None:
        """Let all show their local tensors; collective where they have no memory."""
        self._fetch([shared for shared in self.all if shared.whole is None])
        for shared in self.all:
            shared.show_whole()

    def rest(self) -> None:
        """Show what is shown between batches, and free the whole tensors of what rests as own rows."""
        for shared in self.all:
            if shared.rests_own:
                shared.show_own()
            else:
                shared.show_whole()

    def settle(self) -> None:
        """Exchange rows that an optimizer may have changed outside of the trainer's step; collective.

        Call between batches: what still shows own rows there was in a step that only called the closure, or that
        stepped on the inner optimizer.
        """
        self._take_data()
        self.stepped([shared.parameter for shared in self.all if not shared.rests_own and not shared.is_whole])
        self.rest()

    def _take_data(self) -> None:
        """Take over the data that somebody has set in place of a local tensor's."""
        for shared in self.all:
            if shared.is_whole and not shared.rests_own and shared.whole is not None:
                data = shared.parameter.data
                if data.data_ptr() != shared.whole.data_ptr():
                    shared.whole.copy_(data)
                    shared.parameter.data = shared.whole

    def stepped(self, parameters: Iterable[Tensor]) -> None:
        """Exchange rows of `parameters` after an optimizer's step on this rank's; collective."""
        held = [self._by_id[id(p)] for p in parameters if id(p) in self._by_id]
        for shared in held:
            shared.keep_own()
        # what was frozen after it got its gradient is stepped on too
        changed = [shared for shared in held if shared.parameter.requires_grad or shared.parameter.grad is not None]
        self._fetch([shared for shared in changed if not shared.rests_own])

    def _fetch(self, wanted: Sequence[SharedParameter], *, exact: bool = False) -> None:
        """Write the rows of all ranks to the local tensors of `wanted`, which get memory; collective."""
        before: Fetch | None = None
        for fetch in self.started(wanted, exact=exact):  # each has copies of its rows: two at a time
            if before is not None:
                before.finish()
            before = fetch
        if before is not None:
            before.finish()

    def started(
        self, wanted: Sequence[SharedParameter], groups: Groups | None = None, *, exact: bool = False
    ) -> Iterator[Fetch]:
        """Begin to gather the rows of `wanted`, a bucket whenever the next one is asked for; collective.

        Args:
            wanted: equal on all ranks of a block.
            groups: of these blocks, where they are not those that gradients are summed over.
            exact: whether rows travel as they are.
        """
        for held in self._buckets(wanted):
            group = (groups or self._groups)[held[0].shard.block]
            assert group is not None
            yield Fetch(held, group, exact=exact)

    def _buckets(self, wanted: Sequence[SharedParameter]) -> list[list[SharedParameter]]:
        """Return `wanted` in lists that are exchanged at once, in one order on all ranks that share one of them."""
        by_key: dict[Any, list[list[SharedParameter]]] = {}
        sizes: dict[Any, int] = {}
        for shared in wanted:
            dtypes = f"{shared.dtype} of {shared.own_rows.dtype}"
            key = shared.shard.block, shared.shard.across, dtypes, shared.traffic.key
            if key not in by_key or sizes[key] >= self._bucket_bytes:
                by_key.setdefault(key, []).append([])
                sizes[key] = 0
            by_key[key][-1].append(shared)
            sizes[key] += shared.dtype.itemsize * shared.own_rows.numel() * len(shared.shard.block)
        return [bucket for key in sorted(by_key) for bucket in by_key[key]]
