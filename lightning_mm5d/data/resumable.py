"""Dataloaders that know their position, and go on from one that a run of any layout has saved.

What a loader has handed out is not what was consumed: Lightning and workers fetch ahead. So the position counts the
steps that the trainer has finished. A map-style loader draws the order of its epoch again, without loading anything,
and leaves out what was consumed. An iterable is read again up to the position. A loader with `state_dict` and
`load_state_dict` of its own saves its own state.

It refuses positions in the midst of an epoch that this loader cannot go on from.

Where a training dataloader stands in its epoch, in terms that another layout can go on from.
"""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.features import parts
from lightning_mm5d.data.random_state import OrderStream, seeded
from lightning_mm5d.data.replica_view import as_replica
from lightning_mm5d.data.samplers import (
    Epoch,
    ShardOrder,
    Start,
    batch_size_of,
    generator_states,
    leaf_of,
    order_of,
    set_generator_states,
)

Kind = Literal["map", "iterable", "stateful"]


@dataclass(kw_only=True)
class Position:
    """The position of one dataloader.

    Attributes:
        kind: a map-style data set, whose order can be drawn again; an iterable, which can be read again; or a loader
            that saves its own state.
        epoch: of its order.
        segments: what was consumed in this pass over the data: ``[replicas, batch size, batches of each replica]`` for
            each layout that has worked on it; the last one is that of the run that saved it.
        batches_per_step: of each replica.
        cycled: whether the data were read to their end before in this epoch.
        samples: in the data set; None where it does not tell.
        workers: worker processes for each replica.
        order_seed: of a `DistributedSampler`.
        begun: how the layout that began the epoch draws its order, as `order_states.order_of` says it.
        before: states of the samplers' own generators when the pass began.
        now: these states when the checkpoint was saved.
        own: a loader's own states, by the replicas that it serves.
    """

    kind: Kind
    epoch: int
    segments: list[list[Any]]
    batches_per_step: int = 1
    cycled: bool = False
    samples: int | None = None
    workers: int = 0
    order_seed: int | None = None
    begun: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)
    now: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)

    def saved(self) -> dict[str, Any]:
        """Return plain values and tensors."""
        return asdict(self)

    @classmethod
    def load(cls, saved: Mapping[str, Any]) -> Position:
        """Return what `saved` returned; fields that later versions add are left out."""
        names = {attribute.name for attribute in fields(cls)}
        return cls(**{name: value for name, value in saved.items() if name in names})


class TrainerProgress(Protocol):
    """How far the trainer is in its epoch.

    Attributes:
        stream: what orders are drawn from that one process would draw from its global random state; None for seeds.
    """

    stream: OrderStream | None

    def steps_taken(self) -> int:
        """Return the steps that it has finished."""
        ...

    def fetching(self) -> None:
        """Note that a batch is fetched, before the step that uses it and all that it draws."""
        ...

    def opens_twice(self, epoch: int) -> bool:
        """Return whether Lightning opens the dataloader of this epoch, leaves it, and opens it again."""
        ...

    @property
    def order_seeds(self) -> dict[int, int]:
        """For seeds of distributed samplers in this process, those of the run that it goes on with."""
        ...


@dataclass(frozen=True)
class Progress:
    """What a loader's position depends on, beside its order.

    Attributes:
        trainer: says how far the trainer is; None where no position is kept.
        shards: replicas that this rank serves.
        num_shards: replicas that share the data set.
        batches_per_step: of each replica.
        shares: microbatches of each replica, where they are unlike.
    """

    trainer: TrainerProgress | None
    shards: tuple[int, ...]
    num_shards: int
    batches_per_step: int = 1
    shares: tuple[int, ...] | None = None

    def taken(self) -> int:
        """Return the batches of this epoch that each replica has consumed."""
        return 0 if self.trainer is None else self.trainer.steps_taken() * self.batches_per_step

    def fetching(self) -> None:
        """Tell the trainer's side that a batch is fetched now."""
        if self.trainer is not None:
            self.trainer.fetching()


_END = object()
_AT_THE_END = "resume from a checkpoint of the end of an epoch"


class Resumable:
    """A loader that keeps its position; a class in front of the user's own."""

    progress: Progress
    served_order: ShardOrder
    served_indices: Any = None
    reseeds_generator = False
    ahead: Callable[[Any], None] | None = None
    """takes a batch before it is needed"""
    has_validated = False
    """whether it has begun a pass of a validation"""

    _pending: Position | None = None
    _left: Any = None  # a state of its own that the next pass goes on with, in an epoch that has just begun
    _rest: list[Any] | None = None
    _began = 0
    _earlier: Sequence[list[Any]] = ()
    _cycled = False
    _before: dict[str, Any] | None = None
    _begun: dict[str, Any] | None = None
    _states: deque[tuple[int, Any]] | None = None

    # --- what Lightning and users ask for ---

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the user's own loader, where it has one."""
        user_loader = self.own_loader()
        return {} if user_loader is None else user_loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the user's own loader its state."""
        user_loader = self.own_loader()
        if user_loader is not None:
            user_loader.load_state_dict(state_dict)

    # --- saving ---

    @property
    def kind(self) -> Kind:
        if self.own_loader() is not None:
            return "stateful"
        dataset = getattr(self, "dataset", None)
        return "iterable" if self.served_indices is None or isinstance(dataset, IterableDataset) else "map"

    def own_loader(self) -> Any:
        """Return what holds a state of its own; None without one."""
        user_loader = super()
        return user_loader if hasattr(user_loader, "state_dict") and hasattr(user_loader, "load_state_dict") else None

    def began_after(self, steps: int) -> bool:
        """Whether this pass over the data began only after that many steps of the epoch."""
        return self._pending is None and self._began > steps * self.progress.batches_per_step

    def position(self, steps: int) -> Position:
        """Return the position after so many steps of the epoch, in this pass over the data."""
        if self._pending is not None:  # nothing was read since
            return self._pending
        taken = steps * self.progress.batches_per_step - self._began
        before = self._generators() if self._before is None else self._before
        return Position(
            kind=self.kind,
            epoch=self.served_order.epoch,
            segments=[*self._earlier, [self._sharing, self._batch_size, taken]],
            batches_per_step=self.progress.batches_per_step,
            cycled=self._cycled,
            samples=self._samples(),
            workers=self._workers,
            order_seed=getattr(leaf_of(self.served_indices), "seed", None),
            begun=order_of(self.served_indices) if self._begun is None else self._begun,
            before={**(states := self._stream_states())[0], **before},
            now={**states[1], **self._generators()},
            own={self._shard_key: self._own_state(taken)} if self.kind == "stateful" else {},
        )

    # --- resuming ---

    def resume(self, position: Position, seed: int, epoch: int, *, is_left: bool = False) -> None:
        """Go on from `position` at the next pass over the data.

        Args:
            position: of this loader.
            seed: of the run that saved it.
            epoch: that the trainer goes on with.
            is_left: whether the trainer ended the position's epoch before its data did, as by `max_steps`: a state of
                the loader's own goes on then, as in plain Lightning.

        Raises:
            ConfigError: the position lies in the midst of this epoch, and this loader cannot go on from it.
        """
        order = self.served_order
        order.reseed(seed)
        if position.order_seed is not None and self.progress.trainer is not None:
            leaf = leaf_of(self.served_indices)
            self.progress.trainer.order_seeds[getattr(leaf, "seed", position.order_seed)] = position.order_seed
            self.take_order_seed()
        self._began, self._before = 0, None
        trainer, stream, midst = self.progress.trainer, self._stream, epoch if position.epoch == epoch else None
        if trainer is not None and stream is not None and not stream.resume(position.before, position.now, midst):
            trainer.stream = None  # a run that drew by seeds goes on with them
        if position.epoch != epoch:
            set_generator_states(position.now, *self._holders())
            order.begin(epoch)
            if is_left and position.kind == "stateful":
                self._left = position.own.get(self._shard_key)
            return
        self._check(position)
        order.begin(epoch)
        set_generator_states(position.before, *self._holders())
        self._pending = position
        if position.kind == "map":
            segments = position.segments[:-1] if self._continues(position) else position.segments
            self._rest = self._rest_of(position, segments) if segments else None

    def take_order_seed(self) -> None:
        """Draw orders as the run did that this one goes on with, also from dataloaders that are made later."""
        seeds = self.progress.trainer.order_seeds if self.progress.trainer is not None else {}
        leaves = map(leaf_of, (self.served_indices, *self.served_order.samplers))
        for leaf in {id(leaf): leaf for leaf in leaves}.values():
            if isinstance(leaf, DistributedSampler):
                leaf.seed = seeds.get(leaf.seed, leaf.seed)

    def resume_own(self, state: Any, batches: int, epoch: int) -> None:
        """Go on from the state of the user's own loader, which plain Lightning saves for its first rank alone.

        Raises:
            ConfigError: this run has several replicas.
        """
        segments = [[1, self._batch_size, batches]]
        saved = {"0": state}
        self.resume(Position(kind="stateful", epoch=epoch, segments=segments, own=saved), self.served_order.seed, epoch)

    def resumed_step(self) -> int | None:
        """Return the number of the step that the pending pass begins with; None where it says nothing about an epoch.

        In another layout steps hold other numbers of samples. So it counts back from the end of the epoch.
        """
        position = self._pending
        if position is None or position.cycled:
            return None
        *_, batches = position.segments[-1]
        size = self.progress.batches_per_step
        if position.kind != "map":
            return batches // size
        left = len((self._rest or self.served_order.samplers)[0])
        left -= batches if self._continues(position) else 0
        return len(self) - max(0, -(-left // size))  # type: ignore[arg-type]

    def same_steps(self) -> bool:
        """Whether steps of the pending position hold as many samples as this loader's."""
        position = self._pending
        return position is None or (
            self._continues(position) and position.batches_per_step == self.progress.batches_per_step
        )

    def end_pass(self) -> None:
        """Give no batch in the pending pass."""
        if self._pending is not None:
            self._rest = [[] for _ in self.progress.shards]

    @property
    def _stream(self) -> OrderStream | None:
        """What the order is drawn from; None where its sampler has a seed."""
        is_drawn = self.served_indices is not None and not isinstance(leaf_of(self.served_indices), DistributedSampler)
        return self.progress.trainer.stream if is_drawn and self.progress.trainer is not None else None

    def _stream_states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return ({}, {}) if self._stream is None else self._stream.states(self.served_order.epoch)

    def begin_pass(self) -> tuple[int, int]:
        """Begin a pass; return the number of its first batch, and how many batches before it must be read again."""
        position, self._pending = self._pending, None
        rest, self._rest = self._rest, None
        left, self._left = self._left, None
        order, first, dropped = self.served_order, self.progress.taken(), 0
        start = Start(batch=first)
        self._states = None
        if position is not None and position.epoch != order.epoch:  # nothing was left of that epoch
            set_generator_states(position.now, *self._holders())
            position = None
        trainer = self.progress.trainer
        if position is None and first == 0 and trainer is not None and trainer.opens_twice(order.epoch):
            self._open_unread()
        if position is None:
            self._began, self._earlier, self._cycled = first, (), first > 0
            self._before, self._begun = self._generators(), None
            if left is not None:
                self.own_loader().load_state_dict(left)
        else:
            *earlier, (_, _, batches) = position.segments
            continues = self._continues(position)
            self._before, self._begun, self._cycled = position.before, position.begun, position.cycled
            self._earlier = earlier if continues else position.segments
            self._began = first - batches if continues else first
            start = Start(first, batches if continues and rest != [[]] else 0, rest)
            if position.kind == "stateful":
                start = Start(self._began)
                if (state := position.own[self._shard_key]) is not None:
                    self.own_loader().load_state_dict(state)
            elif position.kind == "iterable":
                start, dropped = Start(self._began), batches
        order.start, stream = start, self._stream
        order.drawing = None
        if stream is not None:
            order.drawing = partial(stream.drawing, order.epoch, seeds_workers=self.seeds_workers(order.epoch == 0))
        return first, dropped

    def seeds_workers(self, is_first: bool) -> bool:
        """Return whether one process draws a seed for workers in a pass; persistent workers get theirs in the first."""
        persist = getattr(self, "persistent_workers", False) and self._workers > 0
        return self.reseeds_generator and (is_first or not persist)

    def _open_unread(self) -> None:
        """Draw what one process draws for an iterator that is not read; where there are workers, they read ahead."""
        if not isinstance(self, DataLoader):
            return
        generator, has_workers = None if self.reseeds_generator else self.generator, self._workers > 0
        if self.reseeds_generator and self._stream is not None:
            self._stream.pass_over(self.served_indices, is_read=has_workers)
        elif generator is not None:
            torch.empty((), dtype=torch.int64).random_(generator=generator)  # the seed of the workers
            sampler = getattr(self.served_indices, "sampler", self.served_indices)
            if has_workers and type(sampler) is RandomSampler and sampler.generator is generator:
                next(iter(sampler), None)

    def groups(self, batches: Iterator[Any], first: int, dropped: int, *shards: Sequence[int]) -> Iterator[list[Any]]:
        """Yield the batches of each step from the number `first` on, of as many `shards` as have any left.

        Args:
            batches: of a pass that `begin_pass` has begun.
            first: number of the first step.
            dropped: steps before it that are read again.
            shards: of each batch of a step, by which it is seeded.
        """
        epoch = self.served_order.epoch
        for step in itertools.count(first - dropped):
            group = self.fetched(batches, (epoch, step), *shards)
            if not group:
                return
            if step >= first:
                self.note_batch(step)
                yield group

    def fetched(self, batches: Iterator[Any], key: tuple[int, ...], *shards: Sequence[int]) -> list[Any]:
        """Return the next batches, each seeded by `key` and its own `shards`; fewer of them at the end."""
        group = list[Any]()
        self.progress.fetching()
        for numbers in shards:
            with (
                seeded(self.served_order.seed, "batch", *key, *numbers),
                as_replica(numbers[0], self.progress.num_shards),
            ):
                batch = next(batches, _END)
            if batch is _END:
                break
            group.append(batch)
        return group

    def read_ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches; while `ahead` is there it is given each when the one before is still to come.

        What raises there raises when its batch is asked for.
        """
        read = deque[Any]()
        failed: Exception | None = None
        while True:
            if read:  # else it is noted where the batch is read
                self.progress.fetching()
            while len(read) < (1 if self.ahead is None else 2) and failed is None:
                try:
                    batch = next(batches, _END)
                except Exception as error:
                    failed = error
                    break
                if batch is _END:
                    break
                if self.ahead is not None:
                    self.ahead(batch)
                read.append(batch)
            if read:
                yield read.popleft()
            elif failed is not None:
                raise failed
            else:
                return

    def note_batch(self, number: int) -> None:
        """Keep the state of the user's own loader after batch `number`, where batches are fetched ahead of steps."""
        if self.progress.trainer is None or self.kind != "stateful":
            return
        if _length(self) is not None and self.ahead is None and self._states is None:
            return
        if self._states is None:
            self._states = deque(maxlen=2 * self.progress.batches_per_step + 1)
        self._states.append((number + 1 - self._began, self.own_loader().state_dict()))

    # --- parts of these ---

    @property
    def _batch_size(self) -> int | None:
        return batch_size_of(self.served_indices)

    @property
    def _sharing(self) -> int:
        """How many replicas share the samples; 1 where each reads them all, by a sampler of its own."""
        shares = self.kind != "map" or isinstance(leaf_of(self.served_indices), DistributedSampler)
        return self.progress.num_shards if shares else 1

    @property
    def _workers(self) -> int:
        return getattr(self, "num_workers", 0) // len(self.progress.shards)

    @property
    def _shard_key(self) -> str:
        return ",".join(map(str, self.progress.shards))

    def _samples(self) -> int | None:
        return _length(self.dataset) if self.kind == "map" else None  # type: ignore[attr-defined]

    def _generators(self) -> dict[str, Any]:
        if self.progress.trainer is None:
            return {}
        return generator_states(*self._holders())

    def _holders(self) -> list[dict[str, Any]]:
        """Return what may hold generators, under paths that are the same on all ranks: first the samplers in use."""
        indices = [getattr(sampler, "batches", sampler) for sampler in self.served_order.samplers]
        generator = None if self.reseeds_generator else getattr(self, "generator", None)
        return [{"generator": generator, "indices": sampler} for sampler in [*indices, self.served_indices]]

    def _own_state(self, taken: int) -> Any:
        """Return the state after `taken` batches of this pass; None at its beginning."""
        if taken == 0:
            return None
        if self._states is None:
            return self.own_loader().state_dict()
        return dict(self._states)[taken]

    def _continues(self, position: Position) -> bool:
        """Whether batches of this loader are those that the run would have had next."""
        return tuple(position.segments[-1][:2]) == (self._sharing, self._batch_size)

    def _rest_of(self, position: Position, segments: Sequence[Sequence[Any]]) -> list[Any]:
        known = next(iter(parts("remaining")), None)
        if known is None:
            got = f"batch size {self._batch_size} and {self.progress.num_shards} replicas"
            rule = "Others began this epoch, and this installation comes without what finds the samples that they left"
            raise _refused(got, rule, "Keep both")
        number = self.served_order.epoch
        drawing = None
        if (stream := OrderStream.begun(position.before, number)) is not None:
            drawing = partial(stream.drawing, number, seeds_workers=self.seeds_workers(number == 0))
        before, seed = position.before, self.served_order.seed
        rest: list[Any] = known.rest_of_shards(
            self,
            self.served_indices,
            [(count, size, batches) for count, size, batches in segments],
            self.progress.shards,
            self.progress.num_shards,
            epoch=Epoch(number=number, seed=seed, begun=position.begun, before=before, drawing=drawing),
            shares=self.progress.shares,
        )
        return rest

    def _check(self, position: Position) -> None:
        """Raise where the position cannot be gone on from; warn where that takes long."""
        count, _, batches = position.segments[-1]
        if position.kind != self.kind:
            raise _refused(type(self).__name__, f"The checkpoint was saved with a dataloader of kind {position.kind!r}")
        if position.kind == "map":
            if position.samples != self._samples():
                raise _refused(
                    f"{self._samples()} samples",
                    f"The checkpoint was saved in the midst of an epoch of {position.samples} samples, and which of "
                    "them were consumed is known by their places in the data set",
                )
            return
        if not batches:
            return
        what = "a dataloader with a state of its own" if position.kind == "stateful" else "an iterable data set"
        if count != self.progress.num_shards:
            raise _refused(
                f"{self.progress.num_shards} replicas",
                f"The checkpoint was saved in the midst of an epoch by {count} replicas, each with its own position in "
                f"{what}, and nothing tells which samples other replicas would have left",
                f"Run {count} replicas of the language model",
            )
        if position.kind == "stateful":
            if self._shard_key not in position.own:
                raise _refused(
                    f"a rank for the replicas {self._shard_key}",
                    f"The states of {what} were saved for ranks that serve the replicas {sorted(position.own)}",
                    "Keep the layout",
                )
            return
        if position.segments[-1][1] != self._batch_size or max(1, position.workers) != max(1, self._workers):
            raise _refused(
                f"batch size {self._batch_size} and {self._workers} workers",
                f"The checkpoint was saved in the midst of an epoch of {what}, read with batch size "
                f"{position.segments[-1][1]} and {position.workers} workers, which decide what each batch holds",
                "Keep both",
            )
        if not isinstance(getattr(self, "iterable", None), Sequence):
            warnings.warn(
                f"{batches} batches of an iterable data set are read again and dropped, to come to where the "
                "checkpoint was saved; a StatefulDataLoader of torchdata would save its position instead",
                stacklevel=2,
            )


def _length(sized: Any) -> int | None:
    """Return the length of what tells it."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def _refused(got: Any, rule: str, fix: str = "Keep the data") -> ConfigError:
    return ConfigError("dataloader", got, rule, f"{fix}, or {_AT_THE_END}")
