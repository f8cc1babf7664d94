"""What this rank writes of a sharded checkpoint: its pieces of the module's tensors, and of the optimizers' states.

A state of an optimizer that has the shape of its parameter, or of this rank's rows of it, is cut as the parameter is.
All others, such as a count of steps, are equal on all ranks of the parameter, and the writer of its first piece writes
them.

Which rank writes which piece of a tensor is a pure function of the plan, the same on all ranks. A piece is a box of a
full tensor that lies in one box of a rank's local tensor too. The pieces of a tensor cover it once. Of what data
parallel ranks share, each writes its own rows. Where several ranks hold the same rows, the one with the fewest bytes so
far writes them, and large pieces are divided among all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mm5d.checkpoint.optimizer_state import names_of
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.layout.layout import even_ranges
from lightning_mm5d.partition.parts import tensors_of
from lightning_mm5d.plan.holdings import Box, DataShards, Holdings, Part, whole_box, with_range
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.remote_value import Guard, Origin, is_remote, placeholder
from lightning_mm5d.sharded.shards import Range, Shard
from lightning_mm5d.stage.remote import is_placeholder

_DIVIDED_BYTES = 4 * 2**20  # a piece from this size on is divided among the ranks that hold it


@dataclass(frozen=True)
class Saved:
    """A tensor that is saved.

    Args:
        shape: of the full tensor.
        itemsize: bytes of an element.
        copies: how many tensors of its shape are saved with it, itself counted: 3 for a weight that Adam trains.
        source: the one rank that has its value; None where all ranks that hold it have.
    """

    shape: tuple[int, ...]
    itemsize: int
    copies: int = 1
    source: int | None = None


@dataclass(frozen=True)
class Piece:
    """A box of a full tensor, and the rank that writes it.

    Attributes:
        name: of the tensor.
        box: in the full tensor.
        local: where it lies in the local tensor of `writer`.
        writer: global rank.
        is_first: whether its writer also writes what belongs to the whole tensor.
    """

    name: str
    box: Box
    local: Box
    writer: int = 0
    is_first: bool = False


def pieces_of(plan: Plan, tensors: Mapping[str, Saved]) -> list[Piece]:
    """Return the pieces of all `tensors`, by name, in their order."""
    loads, shards = [0] * plan.layout.size, DataShards(plan)
    by_name: dict[str, list[Piece]] = {}
    open_pieces: list[tuple[int, int, Piece, tuple[int, ...]]] = []
    for name, saved in tensors.items():
        by_name[name] = []
        for piece, ranks in _candidates(plan, shards, name, saved):
            cost = math.prod(stop - start for start, stop in piece.box) * saved.itemsize
            if len(ranks) > 1 and cost >= _DIVIDED_BYTES and piece.box[0][1] - piece.box[0][0] >= len(ranks):
                for part, rank in zip(_divided_run(piece, len(ranks)), ranks, strict=True):
                    by_name[name].append(replace(part, writer=rank))
                    loads[rank] += cost * saved.copies // len(ranks)
            else:
                open_pieces.append((-cost * saved.copies, len(open_pieces), piece, ranks))
    for cost, _, piece, ranks in sorted(open_pieces, key=lambda open_piece: open_piece[:2]):
        writer = min(ranks, key=lambda rank: (loads[rank], rank))
        loads[writer] -= cost
        by_name[piece.name].append(replace(piece, writer=writer))
    result = []
    for pieces in by_name.values():
        first, *others = sorted(pieces, key=lambda piece: piece.box)
        result += [replace(first, is_first=True), *others]
    return result


def _candidates(plan: Plan, shards: DataShards, name: str, saved: Saved) -> Iterator[tuple[Piece, tuple[int, ...]]]:
    """Yield pieces that cover a tensor once, each with the ranks that may write it."""
    shard, ownership = plan.division.shards.get(name), plan.ownership
    whole = whole_box(saved.shape)
    if shard is None:
        if saved.source is not None:
            ranks: tuple[int, ...] = (saved.source,)
        else:
            ranks = ownership.ranks_holding(name) if name in ownership.sizes else ownership.primary_ranks(name)[:1]
        yield from _shared(shards, Piece(name, whole, whole), ranks)
        return
    holders = ownership.ranks_holding(name) if name in ownership.sizes else ownership.primary_ranks(name)
    for index in shard.distinct:
        ranks = tuple(rank for rank in holders if ownership.shard_index(name, rank) == index)
        for full, local in _own_rows(shard, index):
            piece = Piece(name, with_range(whole, shard.dim, full), with_range(whole, shard.dim, local))
            if (across := shard.across) is not None:
                start, stop = across.ranges[index]
                boxes = (
                    with_range(piece.box, across.dim, (start, stop)),
                    with_range(piece.local, across.dim, (0, stop - start)),
                )
                piece = replace(piece, box=boxes[0], local=boxes[1])
            yield from _shared(shards, piece, ranks)


def _shared(shards: DataShards, piece: Piece, ranks: tuple[int, ...]) -> Iterator[tuple[Piece, tuple[int, ...]]]:
    """Cut a piece that `ranks` hold to the rows that each of them owns, where they share it."""
    owned = {rank: rows for rank in ranks if (rows := shards.of(piece.name, rank)) is not None}
    if not owned:
        yield piece, ranks
        return
    rows = next(iter(owned.values()))
    (start, _), (first, last) = piece.box[rows.dim], piece.local[rows.dim]
    for place, (low, high) in enumerate(rows.ranges):
        low, high = max(low, first), min(high, last)
        if low < high:
            box = with_range(piece.box, rows.dim, (start + low - first, start + high - first))
            part = replace(piece, box=box, local=with_range(piece.local, rows.dim, (low, high)))
            yield part, tuple(rank for rank, rank_rows in owned.items() if rank_rows.place == place)


def _own_rows(shard: Shard, index: int) -> list[tuple[Range, Range]]:
    """Return the rows of a rank of the group that no rank before it holds: in the full tensor, and in its local one."""
    edges = sorted({edge for held in shard.ranges for span in held for edge in span})
    rows: list[tuple[Range, Range]] = []
    offset = 0
    for start, stop in shard.ranges[index]:
        for low, high in pairwise([start, *(edge for edge in edges if start < edge < stop), stop]):
            local, offset = offset, offset + high - low
            before = any(
                first <= low and high <= last
                for other, held in enumerate(shard.ranges[:index])
                for first, last in held
                if shard.is_beside(index, other)
            )
            if before or low == high:
                continue
            if rows and rows[-1][0][1] == low and rows[-1][1][1] == local:
                rows[-1] = ((rows[-1][0][0], high), (rows[-1][1][0], offset))
            else:
                rows.append(((low, high), (local, offset)))
    return rows


def _divided_run(piece: Piece, count: int) -> list[Piece]:
    """Cut a piece into `count` parts along its first dim."""
    (start, stop), (local, _) = piece.box[0], piece.local[0]
    return [
        replace(piece, box=((start + a, start + b), *piece.box[1:]), local=((local + a, local + b), *piece.local[1:]))
        for a, b in even_ranges(stop - start, count)
    ]


TRAINED_COPIES = 3  # a weight and two moments
AVERAGES = "lightning_mm5d/averages"  # begins the names of tensors of copies that callbacks average weights into


@dataclass(frozen=True)
class Item:
    """A piece with its values.

    Attributes:
        name: under which it is stored.
        tensor: values of the piece; may share memory with what is trained.
        box: in the full tensor.
        shape: of the full tensor.
    """

    name: str
    tensor: Tensor
    box: Box
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Item:
        """Return a tensor in one piece."""
        return cls(name, tensor, whole_box(tensor.shape), tuple(tensor.shape))


class OwnShards:
    """The pieces of one rank.

    Args:
        root: the LightningModule, as it is on this rank.
        plan: all stages; None where this rank has the whole module alone.
        rank: global rank.
        sources: which rank has the value of a buffer whose primary rank has not.
        stand_ins: what `own_state` has put in place of tensors, by name.
        averages: copies of `root` that callbacks average into, by name, cut as it is.
        division: `pieces_of`, or what returns the same.
    """

    def __init__(
        self,
        root: nn.Module,
        plan: Plan | None,
        rank: int,
        sources: Mapping[str, int] | None = None,
        stand_ins: Mapping[str, Tensor] | None = None,
        averages: Mapping[str, nn.Module] | None = None,
        division: Callable[[Plan, Mapping[str, Saved]], list[Piece]] = pieces_of,
    ) -> None:
        self._root, self._plan, self._rank = root, plan, rank
        sources, self._stand_ins = sources or {}, stand_ins or {}
        self._tensors = dict(tensors_of(root))
        self._holdings = None if plan is None else Holdings(plan, root)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        if self._holdings is not None:
            self._shapes = {name: self._holdings.full_shape(name, shape) for name, shape in self._shapes.items()}
        parameters = dict(root.named_parameters(remove_duplicate=False))
        saved = {}
        for name, tensor in self._tensors.items():
            copies = TRAINED_COPIES if name in parameters and tensor.requires_grad else 1
            source = None if name in parameters else sources.get(name)
            saved[name] = Saved(self._shapes[name], tensor.itemsize, copies, source)
        self._pieces: dict[str, list[Piece]] = {name: [] for name in saved}
        if plan is None:
            for name, saved_tensor in saved.items():
                box = whole_box(saved_tensor.shape)
                self._pieces[name].append(Piece(name, box, box, is_first=True))
        else:
            first_names = {id(tensor): name for name, tensor in reversed(self._tensors.items())}
            once = {name: saved[name] for name in saved if first_names[id(self._tensors[name])] == name}
            for piece in division(plan, once):
                self._pieces[piece.name].append(piece)
            for name, tensor in self._tensors.items():
                first = first_names[id(tensor)]
                if name != first:
                    self._pieces[name] = self._pieces[first]
        self._names = {name: name for name in self._tensors}
        for label, copy in (averages or {}).items():
            for name, tensor in tensors_of(copy):
                full = f"{AVERAGES}/{label}/{name}"
                self._names[full], self._tensors[full] = name, tensor

    def module_items(self, names: Mapping[str, str]) -> Iterator[Item]:
        """Yield what this rank writes of tensors of the module.

        Args:
            names: of tensors, by the names under which they are stored.

        Raises:
            ConfigError: this rank does not have the value of a tensor that it writes.
        """
        for stored, name in names.items():
            yield from self._cut(stored, self._names[name], self._tensors[name].detach())

    def optimizer_items(self, optimizer: Optimizer, prefix: str) -> tuple[list[Item], dict[str, dict[str, Any]]]:
        """Return what this rank writes of an optimizer's state: pieces, and by parameter and key what has no pieces."""
        items: list[Item] = []
        rest: dict[str, dict[str, Any]] = {}
        for label, parameter in labelled(optimizer, self._root):
            if is_placeholder(parameter):
                continue
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and self._is_cut(label, value, parameter):
                    items += self._cut(f"{prefix}/{key}/{label}", label, value.detach())
                elif not self._writes_rest(label):
                    continue
                elif isinstance(value, Tensor):
                    items.append(Item.whole(f"{prefix}/{key}/{label}", value.detach()))
                else:
                    rest.setdefault(label, {})[key] = value
        return items, rest

    def name_of(self, value: Tensor) -> str | None:
        """Return the first name of the module's tensor that `value` is, or stands for; None for any other tensor."""
        name = self._by_identity.get(id(value))
        if name is not None or is_remote(value) or not value.numel():
            return name
        return self._by_memory.get(_memory(value))

    @cached_property
    def _by_identity(self) -> dict[int, str]:
        return {id(tensor): name for name, tensor in (*self._stand_ins.items(), *reversed(self._tensors.items()))}

    @cached_property
    def _by_memory(self) -> dict[tuple[Any, ...], str]:
        return {_memory(tensor): name for name, tensor in reversed(self._tensors.items()) if not is_remote(tensor)}

    def _writes_rest(self, label: str) -> bool:
        if label not in self._pieces:
            return self._rank == 0
        return any(piece.is_first and piece.writer == self._rank for piece in self._pieces[label])

    def _cut(self, stored: str, name: str, value: Tensor) -> Iterator[Item]:
        for piece in self._pieces[name]:
            if piece.writer != self._rank:
                continue
            if is_remote(value):
                rule = "A checkpoint has the values of all tensors of the module, and no rank has this one"
                raise ConfigError(name, "a tensor without a value", rule, "Write it on the ranks that have its values")
            view = value
            if self._holdings is not None and piece.box != whole_box(value.shape):
                holding = self._holdings.of(name, self._rank, value.shape)
                view = holding.view(value, Part(piece.local, piece.box))
            yield Item(stored, view, piece.box, self._shapes[name])

    def _is_cut(self, label: str, value: Tensor, parameter: Tensor) -> bool:
        """Whether a state of a parameter is cut as it is."""
        if label not in self._tensors or value.shape == parameter.shape:
            return label in self._tensors
        return self._holdings is not None and (
            value.shape == self._holdings.of(label, self._rank, parameter.shape).owned
        )


def own_state(root: nn.Module, plan: Plan | None, stand_ins: dict[str, Tensor], prefix: str = "") -> dict[str, Any]:
    """Return the module's state dict with what this rank holds in full; placeholders stand for all else.

    Args:
        root: the LightningModule, as it is on this rank, or a copy that is cut as it is.
        plan: all stages; None where this rank has the whole module.
        stand_ins: placeholders of shards by their first names, which this adds to.
        prefix: of their names.
    """
    state = root.state_dict(keep_vars=True)
    if plan is None:
        return {name: value.detach() if isinstance(value, Tensor) else value for name, value in state.items()}
    guard, holdings = Guard(plan.ownership.holders), Holdings(plan, root)
    first_names: dict[int, str] = {}
    for name, value in state.items():
        first = first_names.setdefault(id(value), name)
        if not isinstance(value, Tensor) or is_remote(value):
            continue
        shape = holdings.full_shape(name, value.shape)
        if value.shape == shape:
            state[name] = value.detach()
            continue
        key = f"{prefix}{first}"
        if key not in stand_ins:
            stand_ins[key] = placeholder(value.detach().new_empty(()).expand(shape), Origin(first, guard))
        state[name] = stand_ins[key]
    return state


def labelled(optimizer: Optimizer, root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of an optimizer in the order of its groups, by name, or by position where it has none."""
    names = names_of(root)
    parameters: Iterable[nn.Parameter] = (param for group in optimizer.param_groups for param in group["params"])
    for position, parameter in enumerate(parameters):
        yield names.get(id(parameter), f"@{position}"), parameter


class PieceCopies:
    """Copies of pieces in host memory, which the next save of the same pieces fills again.

    From a GPU they go to pinned memory, and the host does not wait before `ready`. They are copied in the order of what
    the device computes, as a forward may write to them; but states of optimizers may go on a stream of their own, until
    `await_on_device`, before an optimizer changes them.

    Args:
        beside: whether states are copied beside what the device computes, and memory is pinned and kept.
    """

    def __init__(self, *, beside: bool = False) -> None:
        self._beside = beside
        self._host_tensors: dict[tuple[str, Box], Tensor] = {}
        self._stream: Any = None
        self._events: Sequence[Any] = ()

    def take(self, items: Sequence[Item], states: Sequence[Item]) -> list[Item]:
        """Return items whose values are copies, for `ready` to wait for.

        Args:
            items: of the module.
            states: of optimizers, which nothing but their steps changes.
        """
        reusable, self._host_tensors = self._host_tensors, {}
        on_device = [item.tensor for item in (*items, *states) if item.tensor.device.type == "cuda"]
        if not on_device:
            return [self._copied(item, reusable) for item in (*items, *states)]
        current = torch.cuda.current_stream(on_device[0].device)
        copies = [self._copied(item, reusable) for item in items]
        if not self._beside:
            copies += [self._copied(item, reusable) for item in states]
            self._events = [current.record_event()]
            return copies
        self._stream = self._stream or torch.cuda.Stream(on_device[0].device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            copies += [self._copied(item, reusable) for item in states]
            self._events = current.record_event(), self._stream.record_event()
        for tensor in on_device:
            tensor.record_stream(self._stream)  # its memory is not given away before it is copied
        return copies

    def ready(self) -> None:
        """Wait until all values are copied."""
        for event in self._events:
            event.synchronize()

    def await_on_device(self) -> None:
        """Have the device copy states before what it computes from now on, and the host go on."""
        for event in self._events:
            torch.cuda.current_stream().wait_event(event)

    def close(self) -> None:
        """Take no more copies, and give their memory away."""
        self._host_tensors.clear()

    def _copied(self, item: Item, reusable: dict[tuple[str, Box], Tensor]) -> Item:
        tensor, key = item.tensor.detach(), (item.name, item.box)
        pins = self._beside and tensor.device.type == "cuda"
        host = reusable.pop(key, None)
        if host is None or (host.shape, host.dtype) != (tensor.shape, tensor.dtype):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pins)
        self._host_tensors[key] = host.copy_(tensor, non_blocking=pins)
        return replace(item, tensor=host)


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
