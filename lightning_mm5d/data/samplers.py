"""Samplers that yield the indices of the shards that a rank serves, equal on all ranks that serve them.

A sampler or batch sampler that draws is reseeded for each draw, so the order is a function of (seed, epoch, shard).

They refuse, for several shards: samplers that cannot be placed on another shard, and batch samplers that fixed their
batches before.

**States of an order.** How a dataloader draws its order: random generators that it and its samplers hold, their states
saved and put back. A sampler with a generator of its own draws the order of an epoch from that generator's state. So a
resumed epoch needs the state with which the epoch began.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.overrides import distributed
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler, UnrepeatedDistributedSamplerWrapper
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from lightning_mm5d.config.errors import ConfigError, private
from lightning_mm5d.data.random_state import seed_all, seed_of, seeded

WRAPPERS = (DistributedSamplerWrapper, UnrepeatedDistributedSamplerWrapper)
MOVABLE = (DistributedSampler, UnrepeatedDistributedSampler, *WRAPPERS)


Drawing = Callable[[], AbstractContextManager[None]]


class SeededBatch(list[Any]):
    """Indices of one batch. A worker that receives them seeds its generators from `key` and reads a plain list."""

    def __init__(self, items: Iterable[Any], key: tuple[int | str, ...]) -> None:
        super().__init__(items)
        self.key = key

    def __reduce__(self) -> Any:
        return _received, (list(self), self.key)


@dataclass(frozen=True)
class SeededItem:
    """An index for a data set that is read without batching. A worker that receives it seeds its generators."""

    index: Any
    key: tuple[int | str, ...]

    def __reduce__(self) -> Any:
        return _received, (self.index, self.key)


def _received(indices: Any, key: tuple[int | str, ...]) -> Any:
    """Return `indices`; seed the generators of a worker, which reads them next."""
    if get_worker_info() is not None:
        seed_all(seed_of(*key))
    return indices


@dataclass(frozen=True)
class Start:
    """Where one pass over the data begins.

    Attributes:
        batch: number in the epoch of the first batch of each shard.
        skipped: batches of each shard that were consumed before.
        samplers: those of the shards in this pass; None for the usual ones.
    """

    batch: int = 0
    skipped: int = 0
    samplers: list[Any] | None = None


class ShardOrder(Sampler[Any]):
    """The indices of all served shards: one item of each for every step. It keeps random state as it is.

    For one shard, it shows the other attributes of the user's own sampler, and sets them there.

    As under Lightning alone, a batch sampler is not told the epoch, but what it draws from is, its `sampler`.

    Args:
        samplers: what yields the indices of each shard, of batches where the loader batches.
        seed: of all draws.
        shards: the shards' numbers.
        seeds_workers: whether batches are read in workers, which then seed their generators for each batch.
        of_batches: whether this stands as a batch sampler.

    Attributes:
        wraps_items: whether each item is a `SeededItem`.
        start: where the next pass begins.
        epoch: of the order.
        drawing: entered where the first item of a pass is drawn, in place of a seed; None for a seed.
        exchange: takes `samplers` and how many batches of each are skipped; returns what yields as many batches of as
            many samples, after an exchange of samples with other shards. None without one.
    """

    def __init__(
        self,
        samplers: list[Any],
        seed: int,
        shards: Sequence[int],
        *,
        seeds_workers: bool,
        of_batches: bool = False,
    ) -> None:
        self.samplers = samplers
        self.seed = seed
        self.shards = tuple(shards)
        self.seeds_workers = seeds_workers
        self.wraps_items = False
        self.start = Start()
        self.epoch = 0
        self.drawing: Drawing | None = None
        self.exchange: Callable[[Sequence[Any], int], Sequence[Any]] | None = None
        self.of_batches = of_batches
        self.sampler = _DrawnFrom(self)  # where Lightning looks for `set_epoch` when this stands as the batch sampler

    def __getattr__(self, name: str) -> Any:
        if name in _OF_ORDERS or name.startswith("__"):  # while it is copied
            raise AttributeError(name)
        return getattr(self.samplers[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OF_ORDERS or len(self.samplers) > 1:
            super().__setattr__(name, value)
        else:
            setattr(self.samplers[0], name, value)

    def __iter__(self) -> Iterator[Any]:
        start, end = self.start, object()
        samplers: Sequence[Any] = start.samplers or self.samplers
        if self.exchange is not None:
            samplers = self.exchange(samplers, start.skipped)
        streams = [
            itertools.islice(drawn(sampler, self.seed, self.epoch, self.drawing), start.skipped, None)
            for sampler in samplers
        ]
        for step, group in enumerate(itertools.zip_longest(*streams, fillvalue=end), start.batch):
            for shard, item in zip(self.shards, group, strict=True):
                if item is not end:
                    yield self._seeded(item, step, shard)

    def __len__(self) -> int:
        return sum(len(sampler) for sampler in self.samplers)

    def begin_epoch(self, epoch: int) -> None:
        """Draw the order of an epoch from now on; called as Lightning tells samplers of it."""
        self.epoch = epoch
        for sampler in self.samplers:
            target = getattr(sampler, "sampler", None) if self.of_batches else sampler
            if callable(forward := getattr(target, "set_epoch", None)):
                forward(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Tell the user's own samplers; on a batch sampler only code of the user's own calls it."""
        if not self.of_batches:
            self.begin_epoch(epoch)
            return
        for sampler in self.samplers:
            if callable(forward := getattr(sampler, "set_epoch", None)):
                forward(epoch)

    def reseed(self, seed: int) -> None:
        """Take over the seed of an earlier run."""
        self.seed = seed
        for sampler in self.samplers:
            leaf = leaf_of(sampler)
            if isinstance(leaf, WRAPPERS) and isinstance(inner := private(leaf.dataset, "_sampler"), EpochOrder):
                inner.seed = seed

    def _seeded(self, item: Any, step: int, shard: int) -> Any:
        key = (self.seed, "batch", self.epoch, step, shard)
        if self.wraps_items:
            return SeededItem(item, key)
        return SeededBatch(item, key) if self.seeds_workers and isinstance(item, list | tuple) else item


_OF_ORDERS = {
    *("samplers", "seed", "shards", "seeds_workers", "wraps_items", "start", "epoch", "drawing"),
    *("exchange", "of_batches", "sampler"),
}


class _DrawnFrom:
    """What an order of batches shows as its `sampler`: the attributes are those of the user's own.

    Args:
        order: that draws from it.
    """

    def __init__(self, order: ShardOrder) -> None:
        self._order = order

    def __getattr__(self, name: str) -> Any:
        if name == "_order" or name.startswith("__"):  # while it is copied
            raise AttributeError(name)
        return getattr(self._order.samplers[0].sampler, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._order.samplers[0].sampler)

    def __len__(self) -> int:
        return len(self._order.samplers[0].sampler)

    def set_epoch(self, epoch: int) -> None:
        self._order.begin_epoch(epoch)


def drawn(sampler: Any, seed: int, epoch: int, drawing: Drawing | None = None) -> Iterator[Any]:
    """Yield a sampler's items, seeded for each; global random state stays as it is.

    Args:
        sampler: of batches or items.
        seed: of the run.
        epoch: of the order.
        drawing: entered for the first item in place of a seed.
    """
    end = object()
    with seeded(seed, "order", epoch) if drawing is None else drawing():
        items = iter(sampler)
        first = [] if drawing is None else [*itertools.islice(items, 1)]
    yield from first
    for step in itertools.count(len(first)):
        with seeded(seed, "order", epoch, step):
            item = next(items, end)
        if item is end:
            return
        yield item


class EpochOrder(Sampler[Any]):
    """A sampler of the user's, drawn once an epoch: the same order for every shard, on every rank."""

    def __init__(self, sampler: Any, seed: int) -> None:
        self.sampler = sampler
        self.seed = seed
        self.epoch = 0
        self.drawn: list[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self.drawn is None:
            with seeded(self.seed, "order", self.epoch):
                self.drawn = list(self.sampler)
        return iter(self.drawn)

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.drawn = epoch, None
        if callable(forward := getattr(self.sampler, "set_epoch", None)):
            forward(epoch)


class _CheckedBatches:
    """A copy of the user's batch sampler, refused when it yields samples that are not of its shard."""

    def __init__(self, batches: Any, sampler: DistributedSampler[Any]) -> None:
        self.batches = batches
        self.sampler = sampler

    def __getattr__(self, name: str) -> Any:
        if name == "batches" or name.startswith("__"):  # while it is copied
            raise AttributeError(name)
        return getattr(self.batches, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("batches", "sampler"):
            super().__setattr__(name, value)
        else:
            setattr(self.batches, name, value)

    def __iter__(self) -> Iterator[Any]:
        allowed = set(self.sampler)
        return (self._checked(batch, allowed) for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def _checked(self, batch: Any, allowed: set[int]) -> Any:
        if not allowed.issuperset(batch):
            raise unservable(
                self.batches,
                "a batch sampler must take its samples from the sampler it is given, when it is iterated",
                "Build the batches in its __iter__, not in its __init__",
            )
        return batch


def leaf_of(indices: Any) -> Any:
    """Return the sampler that a batch sampler draws from, or the sampler itself."""
    return indices if isinstance(indices, DistributedSampler) else getattr(indices, "sampler", None)


def samplers_of_shards(
    loader: DataLoader[Any], indices: Any, shards: Sequence[int], num_shards: int, seed: int, *, unshared: bool
) -> list[Any]:
    """Return for each shard what yields its indices: of batches, or of single items without automatic batching.

    Args:
        loader: of the user.
        indices: its sampler, or its batch sampler where it batches.
        shards: those that this rank serves.
        num_shards: of the data set.
        seed: of the order.
        unshared: whether no other rank loads the same shard, so that a sampler of the user's own class may stay.
    """
    leaf = leaf_of(indices)
    if not isinstance(leaf, DistributedSampler):
        if len(shards) > 1:
            raise unservable(
                type(indices).__name__, "it must draw from a DistributedSampler", "Keep use_distributed_sampler=True"
            )
        return [indices]
    wrapped: Any = leaf.dataset if isinstance(leaf, WRAPPERS) else None
    if wrapped is not None:
        inner = private(wrapped, "_sampler")
        if not isinstance(inner, EpochOrder):
            wrapped._sampler = EpochOrder(inner, seed)
    if (leaf.num_replicas, [leaf.rank]) == (num_shards, list(shards)):
        return [indices]
    if type(leaf) not in MOVABLE:
        if unshared:
            return [indices]
        raise ConfigError(
            f"{type(leaf).__name__}(num_replicas, rank)",
            (leaf.num_replicas, leaf.rank),
            f"This rank serves replicas {list(shards)} of {num_shards}, and a DistributedSampler of a class of "
            "one's own cannot be placed on them",
            f"Pass num_replicas={num_shards} and rank={shards[0]} (trainer.distributed_sampler_kwargs), or a "
            "plain sampler, or give every modality the same dp_size",
        )
    source: Any = leaf.dataset if wrapped is None else wrapped._sampler
    return [
        placed(loader, indices, leaf, type(leaf)(source, num_shards, shard, leaf.shuffle, leaf.seed, leaf.drop_last))
        for shard in shards
    ]


def placed(loader: DataLoader[Any], indices: Any, leaf: Any, moved: DistributedSampler[Any]) -> Any:
    """Return a copy of `indices` that draws from `moved` instead of `leaf`, where no sample of another shard passes."""
    batches = drawing_from(moved, loader, indices, leaf)
    if batches is moved or type(indices) is BatchSampler or getattr(indices, "deals_to_replicas", False):
        return batches
    return _CheckedBatches(batches, moved)


def drawing_from(moved: Any, loader: DataLoader[Any], indices: Any, leaf: Any) -> Any:
    """Return a copy of `indices` that draws from `moved` instead of `leaf`; the data set is not copied."""
    if indices is leaf:
        return moved
    memo = {id(dataset): dataset for dataset in (loader.dataset, getattr(leaf, "dataset", None))}
    try:
        return copy.deepcopy(indices, {**memo, id(leaf): moved})
    except (TypeError, NotImplementedError) as error:
        raise unservable(indices, f"it must be possible to copy it ({error})", "Use a BatchSampler") from error


def for_predictions(indices: Any, order: ShardOrder) -> Any:
    """Return `order`, wrapped where `indices` is: Lightning reads the indices of predictions from the wrapper."""
    return PlainIndices(order) if isinstance(indices, _wrapper()) else order


def _wrapper() -> Any:
    return private(distributed, "_IndexBatchSamplerWrapper")


_Wrapper: Any = _wrapper()


class PlainIndices(_Wrapper):
    """Shows plain lists to prediction writers, which save them."""

    def __next__(self) -> Any:
        batch = super().__next__()
        if isinstance(batch, SeededBatch):
            self.seen_batch_indices[-1] = list(batch)
        return batch


def unservable(got: Any, rule: str, fix: str) -> ConfigError:
    """The error for a loader that cannot serve several replicas."""
    return ConfigError(
        "dataloader",
        got,
        f"This rank loads for several replicas of the language model, for which {rule}",
        f"{fix}, or give every modality the same dp_size",
    )


def generator_states(*holders: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of the generators in the first of `holders` that has any, by path."""
    for holder in holders:
        if states := {path: _state(generator) for path, generator in _generators(holder)}:
            return states
    return {}


def set_generator_states(states: Mapping[str, Any], *holders: Mapping[str, Any]) -> None:
    """Put `generator_states` back in each of `holders`, where a path still leads to a generator of the same kind."""
    for path, generator in itertools.chain.from_iterable(map(_generators, holders)):
        state = states.get(path)
        if isinstance(generator, torch.Generator) and isinstance(state, Tensor):
            generator.set_state(state.cpu())
        elif isinstance(generator, random.Random) and isinstance(state, list | tuple):
            version, numbers, gauss = state
            generator.setstate((version, tuple(numbers), gauss))
        elif isinstance(generator, np.random.RandomState) and isinstance(state, dict):
            generator.set_state(_arrays(state))
        elif isinstance(generator, np.random.Generator) and isinstance(state, dict):
            generator.bit_generator.state = _arrays(state)


def _generators(holder: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield path and generator for those of `holder`, and of samplers that it draws from, each once."""
    seen = set() if seen is None else seen
    seen.add(id(holder))
    values = holder if isinstance(holder, Mapping) else getattr(holder, "__dict__", {})
    for name, value in list(values.items()):
        where = f"{path}.{name}" if path else name
        if id(value) in seen:
            continue
        if isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
            seen.add(id(value))
            yield where, value
        elif _draws(name, value):
            yield from _generators(value, where, seen)
        elif isinstance(value, list) and value and all(_draws("", sampler) for sampler in value):
            for index, sampler in enumerate(value):
                yield from _generators(sampler, f"{where}.{index}", seen)


def _draws(name: str, value: Any) -> bool:
    """Whether a dataloader takes its order from `value`. Its data set is the user's own and stays as it is."""
    if isinstance(value, Sampler) or name == "indices":
        return True
    # Lightning's wrapper holds a sampler as its data set, and that one holds the user's sampler
    return (name == "dataset" and isinstance(value, Dataset) and hasattr(value, "_sampler")) or name == "_sampler"


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, numbers, gauss = generator.getstate()
        return [version, list(numbers), gauss]
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return _plain(generator.bit_generator.state)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": str(value.dtype)}
    return value.item() if isinstance(value, np.generic) else value


def _arrays(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"array", "dtype"}:
            return np.array(value["array"], dtype=value["dtype"])
        return {key: _arrays(inner) for key, inner in value.items()}
    return value


Segment = tuple[int, int | None, int]
RANDOM = "random"  # in `order_of`: arguments of a RandomSampler
SEED = "seed"


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """How the order of an epoch was drawn.

    Attributes:
        number: of the epoch.
        seed: of the run.
        begun: what `order_of` says of the loader that began it.
        before: states of the samplers' generators when it began.
        drawing: entered where a sampler without a generator draws; None for a seed.
    """

    number: int
    seed: int
    begun: Mapping[str, Any]
    before: Mapping[str, Any]
    drawing: Drawing | None = None


def order_of(indices: Any) -> dict[str, Any]:
    """Return, in plain values, how a loader draws its order, by what another layout's loader does not know of it.

    Args:
        indices: its batch sampler, or its sampler where it does not batch.
    """
    leaf = leaf_of(indices)
    if isinstance(leaf, DistributedSampler):
        return {SEED: leaf.seed}
    sampler = indices if leaf is None else leaf
    if type(sampler) is not RandomSampler:
        return {}
    drawn_by = {"replacement": sampler.replacement, "num_samples": private(sampler, "_num_samples")}
    return {RANDOM: {**drawn_by, "generator": sampler.generator is not None}}


def batch_size_of(indices: Any) -> int | None:
    """Return the batch size that a batch sampler states; None without one."""
    size = getattr(indices, "batch_size", None)
    return size if isinstance(size, int) else None
