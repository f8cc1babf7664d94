"""The parameters of which this rank owns some rows: what they show when, and how rows travel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mm5d.data_parallel.shared_parameter import Closed, SharedParameter, gather
from lightning_mm5d.plan.data_shards import DataShard
from lightning_mm5d.plan.plan import Traffic

T = TypeVar("T")
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
        own = torch.cat([one.own.reshape(-1).to(one.dtype) for one in held])
        self._sizes = [[one.numel_at(place) for one in held] for place in range(len(held[0].shard.block))]
        encoding = None if exact else held[0].traffic.parameters
        self._gathered = gather(own, [sum(sizes) for sizes in self._sizes], group, encoding)

    def finish(self) -> None:
        """Write the rows to the local tensors, which get memory."""
        with torch.inference_mode(False):  # of an evaluation
            for one in self._held:
                one.give_memory()
        targets, sources = [], []
        for place, (flat, sizes) in enumerate(zip(self._gathered.wait(), self._sizes, strict=True)):
            for one, part in zip(self._held, flat.split(sizes), strict=True):
                if place != one.shard.place or one.is_apart:
                    assert one.whole is not None
                    targets.append(one.shard.rows(one.whole, place))
                    sources.append(part.view(targets[-1].shape))
        torch._foreach_copy_(targets, sources)
        for one in self._held:
            one.note_gathered()

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
                one = SharedParameter(parameter, shard, self._shapes[name], self._traffic[name], computes.get(name))
                self.all.append(one)
                self._by_id[id(one.parameter)] = one
        self._fetch([one for one in self.all if not one.rests_own and one.is_apart and one.parameter.requires_grad])

    def leave_step(self) -> None:
        """Show own rows where a step that has failed left parameters without values."""
        for one in self.all:
            if isinstance(one.parameter, Closed):
                one.show_own()

    def keep(self, *, failed: bool = False) -> None:
        """Leave what is shown between batches: the local tensors, of stage 3 this rank's rows.

        Args:
            failed: whether the run has failed, after which rows that travelled rounded stay so; else they are exchanged
                exactly, which is collective.
        """
        self.rest()
        if not failed:
            self._make_exact()
        self._forget()

    def _forget(self) -> None:
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
            yield frozenset(one.whole.data_ptr() for one in rounded if one.whole is not None)
        finally:
            self._fetch(rounded)

    def _make_exact(self) -> list[SharedParameter]:
        """Let local tensors that have rounded rows have exact ones; return their parameters."""
        rounded = [one for one in self.all if not one.rests_own and one.is_apart and one.parameter.requires_grad]
        for one in rounded:
            one.adopt_changes()
        self._fetch(rounded, exact=True)
        return rounded

    def get(self, parameter: Tensor) -> SharedParameter | None:
        """Return the shared parameter that `parameter` is, if it is one."""
        return self._by_id.get(id(parameter))

    def show_own(self) -> None:
        """Let all show the rows that this rank owns."""
        self._take_data()
        for one in self.all:
            one.show_own()

    def show_whole(self) -> None:
        """Let all show their local tensors; collective where they have no memory."""
        self._fetch([one for one in self.all if one.whole is None])
        for one in self.all:
            one.show_whole()

    def rest(self) -> None:
        """Show what is shown between batches, and free the whole tensors of what rests as own rows."""
        for one in self.all:
            if one.rests_own:
                one.show_own()
            else:
                one.show_whole()

    def settle(self) -> None:
        """Exchange rows that an optimizer may have changed outside of the trainer's step; collective.

        Call between batches: what still shows own rows there was in a step that only called the closure, or that
        stepped on the inner optimizer.
        """
        self._take_data()
        self.stepped([one.parameter for one in self.all if not one.rests_own and not one.is_whole])
        self.rest()

    def _take_data(self) -> None:
        """Take over the data that somebody has set in place of a local tensor's."""
        for one in self.all:
            if one.is_whole and not one.rests_own and one.whole is not None:
                data = one.parameter.data
                if data.data_ptr() != one.whole.data_ptr():
                    one.whole.copy_(data)
                    one.parameter.data = one.whole

    def stepped(self, parameters: Iterable[Tensor]) -> None:
        """Exchange rows of `parameters` after an optimizer's step on this rank's; collective."""
        found = [self._by_id[id(p)] for p in parameters if id(p) in self._by_id]
        for one in found:
            one.keep_own()
        # what was frozen after it got its gradient is stepped on too
        changed = [one for one in found if one.parameter.requires_grad or one.parameter.grad is not None]
        self._fetch([one for one in changed if not one.rests_own])

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
        for held in self._buckets(wanted, lambda one: one):
            group = (groups or self._groups)[held[0].shard.block]
            assert group is not None
            yield Fetch(held, group, exact=exact)

    def _buckets(self, items: Sequence[T], parameter: Callable[[T], SharedParameter]) -> list[list[T]]:
        """Return `items` in lists that are exchanged at once, in one order on all ranks that share one of them."""
        found: dict[Any, list[list[T]]] = {}
        sizes: dict[Any, int] = {}
        for item in items:
            one = parameter(item)
            key = one.shard.block, one.shard.across, f"{one.dtype} of {one.own.dtype}", one.traffic.key
            if key not in found or sizes[key] >= self._bucket_bytes:
                found.setdefault(key, []).append([])
                sizes[key] = 0
            found[key][-1].append(item)
            sizes[key] += one.dtype.itemsize * one.own.numel() * len(one.shard.block)
        return [bucket for key in sorted(found) for bucket in found[key]]
