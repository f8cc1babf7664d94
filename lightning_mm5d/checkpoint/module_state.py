"""Module state as one process would have it, collected from all ranks and loaded into any layout.

A checkpoint is what one process would have written: every parameter in full under the name that the module gives it. So
any Lightning run can load it, in any layout. To write it, the primary ranks of a parameter send it, or their shards of
it, to rank 0, and ranks that share it send their rows; to read it, each rank takes what it holds. Tensors are gathered
one at a time, into host memory: no device needs room for more than one.

It refuses state dicts with missing or unknown keys, as torch does when told to be strict, and other shapes.

Sharded checkpoints, folders of weights and state dicts in memory are read through `load_local`: of each tensor the
shard and rows of this rank, and nothing else.

Says which rank has the value of a buffer that several stages write.

Every stage runs the user's step, up to the layer where it ends. So several ranks write a buffer that no module with
parameters holds (a mean of features, a counter). The last stage of its modality has its value, unless what that wrote
depends on values of other ranks, or its step ends before a write. Then it is the value of a stage that made all writes
and had what they need. Where no rank had it, `sources` refuses the buffer by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.engine.codec import broadcast, bytes_of, receive_tree, send_tree
from lightning_mm5d.partition.parts import tensors_of
from lightning_mm5d.plan.holdings import Holding, Holdings, narrowed
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.collectives import of_all_ranks
from lightning_mm5d.sharded.remote_value import (
    Guard,
    Origin,
    Placeholder,
    RemoteValue,
    is_remote,
    make_parameter,
    make_placeholder,
    make_plain,
)
from lightning_mm5d.sharded.torch_internals import version_of
from lightning_mm5d.stage.payload import map_tensors
from lightning_mm5d.stage.remote import give_memory, is_placeholder
from lightning_mm5d.storage.files import Region, StateDictSource, TensorSource


class BufferState:
    """The buffers of a module on one rank, since the run began.

    Args:
        root: the LightningModule, before its first step.
        plan: all stages.
    """

    def __init__(self, root: nn.Module, plan: Plan) -> None:
        self._root, self._plan = root, plan
        self._stages = [plan.topology.instances(stage)[0][0] for stage in plan.topology.members]
        named = root.named_buffers(remove_duplicate=False)
        shared = {name: buffer for name, buffer in named if name in plan.ownership.written_by_all}
        self._start = {name: (buffer, version_of(buffer)) for name, buffer in shared.items()}

    def sources(self, device: torch.device) -> Mapping[str, int]:
        """Return the rank that has the value of each buffer whose primary rank has not; collective.

        Args:
            device: where messages of the default group live.

        Raises:
            ConfigError: no rank had all that a write to a buffer needs.
        """
        if not self._start or not self._plan.topology.edges:
            return {}
        now = dict(self._root.named_buffers(remove_duplicate=False))
        local = torch.tensor([self._figures(name, now.get(name)) for name in self._start], device=device)
        by_rank = of_all_ranks(local).tolist()  # [rank, buffer, (writes, is new, is remote)]
        sources: dict[str, int] = {}
        for index, name in enumerate(self._start):
            primary = self._plan.ownership.primary_ranks(name)[0]
            *figures, is_absent = by_rank[primary][index]
            most = max([figures, *(by_rank[rank][index][:2] for rank in self._stages)], key=lambda pair: pair[::-1])
            if is_absent or figures != most:  # the steps of an early stage may end before a write
                same = [rank for rank in self._stages if by_rank[rank][index] == [*most, 0]]
                if not same:
                    raise ConfigError(
                        name,
                        f"a buffer that rank {primary} writes with values that only other ranks have",
                        "A buffer's value is that of a rank which made all writes to it and had all that they need",
                        "Write it before the layers that are split over stages, in the module that computes the value, "
                        'or set `feeds="all"` on the modality whose features it is written from',
                    )
                sources[name] = same[-1]
        return sources

    def _figures(self, name: str, buffer: Tensor | None) -> list[int]:
        if buffer is None:
            return [0, 1, 1]
        first, writes = self._start[name]
        return [version_of(buffer) - (writes if buffer is first else 0), buffer is not first, is_remote(buffer)]


def settle(buffers: Iterable[Tensor]) -> None:
    """Make ordinary tensors of buffers that were written with values of other ranks, before they get new values."""
    for buffer in buffers:
        if isinstance(buffer, RemoteValue):
            make_plain(buffer)


HOST = torch.device("cpu")
_BUCKET_ELEMENTS = 8 * 2**20


def is_partial(root: nn.Module) -> bool:
    """Whether parameters of `root` are on other ranks only, as during a run and after one that failed."""
    return any(is_placeholder(parameter) for parameter in root.parameters())


def equalize(root: nn.Module, device: torch.device) -> None:
    """Give all ranks the full parameters and buffers of rank 0, those with memory; collective.

    Args:
        root: the LightningModule, full on rank 0 where it has memory.
        device: where messages of the default group live.
    """
    give_memory(root.parameters())
    settle(root.buffers())
    if dist.get_world_size() == 1:
        return
    held: dict[torch.dtype, list[Tensor]] = {}
    for tensor in (*root.parameters(), *root.buffers()):
        if not tensor.is_meta:
            held.setdefault(tensor.dtype, []).append(tensor.data)
    for tensors in held.values():
        while tensors:
            bucket = [tensors.pop(0)]
            while tensors and sum(t.numel() for t in bucket) + tensors[0].numel() <= _BUCKET_ELEMENTS:
                bucket.append(tensors.pop(0))
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).to(device)
            flat = broadcast(flat, 0)
            for tensor, piece in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(piece.view_as(tensor))


def collect_module(
    root: nn.Module,
    plan: Plan,
    rank: int,
    targets: Sequence[int] = (0,),
    *,
    wire: torch.device,
    buffers: BufferState | None = None,
) -> dict[str, Any]:
    """Return the module's state dict: full tensors on the ranks `targets`, on others what they hold; collective.

    A tied tensor is one tensor under all of its names. What a rank holds in full stays where it is, and all else is
    collected in host memory, one tensor at a time.

    Args:
        root: the LightningModule, as it is on this rank.
        plan: all stages.
        rank: global rank.
        targets: ranks that get full tensors.
        wire: where messages of the default group live.
        buffers: which ranks have the values of buffers that several stages write.

    Raises:
        ConfigError: no rank has the value of a buffer.
    """
    return _collected(root, plan, rank, targets, {} if buffers is None else buffers.sources(wire), wire)


def _collected(
    root: nn.Module, plan: Plan, rank: int, targets: Sequence[int], sources: Mapping[str, int], wire: torch.device
) -> dict[str, Any]:
    state = root.state_dict(keep_vars=True)  # a user's call without it is refused where parameters are sharded
    tensors, holdings = dict(tensors_of(root)), Holdings(plan, root)
    known: dict[int, Tensor] = {}
    collect_others(root, state, plan, rank, targets, wire=wire)
    for name, value in state.items():
        if isinstance(value, Tensor) and name in tensors:
            source = tensors[name]
            if id(source) not in known:
                known[id(source)] = _collect(name, value.detach(), holdings, rank, targets, wire, sources.get(name))
            state[name] = known[id(source)]
    return state


def collect_others(
    root: nn.Module, state: dict[str, Any], plan: Plan, rank: int, targets: Sequence[int] = (0,), *, wire: torch.device
) -> None:
    """Give the ranks `targets` the tensors of a state dict that are no parameters or buffers; collective.

    They are states of metrics: tensors, and lists of them, of which the primary rank has the value. Others get them in
    host memory.
    """
    tensors = dict(tensors_of(root))
    for name, value in state.items():
        if name in tensors or not isinstance(value, Tensor | list):
            continue
        keeper = plan.ownership.primary_ranks(name)[0]
        for target in targets:
            if rank == keeper != target:
                send_tree(value, target, wire)
            elif rank == target != keeper:
                state[name] = in_host_memory(receive_tree(keeper, wire))


def load_module(root: nn.Module, state: Mapping[str, Any], strict: bool, plan: Plan, rank: int) -> None:
    """Load what this rank holds of a state dict of full tensors.

    Args:
        root: the LightningModule, as it is on this rank.
        state: what `collect_module` returns.
        strict: whether keys must be those of the module.
        plan: all stages.
        rank: global rank.

    Raises:
        RuntimeError: shapes are others; with `strict`, also when keys are missing or unknown.
    """
    expected = {name: value for name, value in root.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    source = StateDictSource(state)
    local, holdings = dict(state), Holdings(plan, root)
    for name, value in expected.items():
        shape = holdings.full_shape(name, value.shape)
        if name not in state or (value.shape == shape and not is_placeholder(value)):
            continue
        check_shape(root, name, source.shape(name), shape)  # torch compares the shapes of full tensors alone
        if is_placeholder(value):
            del local[name]
        else:
            local[name] = torch.empty_like(value, requires_grad=False)
            for held, region in pieces(local[name], holdings.of(name, rank, value.shape)):
                held.copy_(source.read(name, region))
    settle(buffer for name, buffer in root.named_buffers(remove_duplicate=False) if name in local)
    incompatible = root.load_state_dict(local, strict=False)
    remote = {name for name, value in expected.items() if is_placeholder(value)}
    missing = [name for name in incompatible.missing_keys if name not in remote]
    if strict:
        Loaded(sorted(remote - state.keys()) + missing, incompatible.unexpected_keys).check(root)


def in_host_memory(tree: Any) -> Any:
    """Return a tree of tensors and plain values with its tensors in host memory."""
    return map_tensors(tree, lambda tensor: tensor.to(HOST))


def restore_full(
    root: nn.Module,
    plan: Plan,
    rank: int,
    targets: Sequence[int] = (0,),
    *,
    wire: torch.device,
    buffers: BufferState | None = None,
) -> None:
    """Give the module on the ranks `targets` its full tensors, with the values of all ranks; collective.

    All ranks move it to host memory first, where a trainer leaves a module: so a device never holds more than what its
    rank trained. On other ranks placeholders (NaN for a buffer) replace the local tensors, so that all tensors have
    their full shape on all ranks again; other values that they hold stay. Parameters remain the same objects; those
    whose shape changes, or that had no memory, lose their gradients.

    Args:
        root: the LightningModule, as it is on this rank.
        plan: all stages.
        rank: global rank.
        targets: ranks that get full tensors.
        wire: where messages of the default group live.
        buffers: which ranks have the values of buffers that several stages write.

    Raises:
        ConfigError: no rank has the value of a buffer; all other tensors are restored before.
    """
    sources, missing = _sources(buffers, wire)
    root.cpu()
    state = _collected(root, plan, rank, targets, sources, wire)
    guard, holdings = Guard(plan.ownership.holders), Holdings(plan, root)
    done: set[int] = set()
    for name, tensor in tensors_of(root):
        shape, is_sharded = holdings.full_shape(name, tensor.shape), name in plan.division.shards
        if id(tensor) in done or not (is_sharded or is_placeholder(tensor) or tensor.shape != shape):
            continue
        done.add(id(tensor))
        value = state.get(name)
        if value is None and is_sharded:  # a buffer that is not saved
            value = _collect(name, tensor.detach(), holdings, rank, targets, wire)
        if rank in targets:
            if value is not None:
                _set(tensor, value)
        elif tensor.shape != shape:
            _make_remote(tensor, torch.Size(shape), Origin(name, guard))
    if rank in targets:
        give_memory(root.parameters())
        settle(root.buffers())
        root.load_state_dict(state, strict=False)
    if missing is not None:
        raise missing


def share_buffers(root: nn.Module, plan: Plan, *, wire: torch.device, buffers: BufferState | None = None) -> None:
    """Give all ranks the newest value of every buffer that is not sharded; collective.

    Raises:
        ConfigError: no rank has the value of a buffer; all others are shared before.
    """
    sources, missing = _sources(buffers, wire)
    settle(root.buffers())
    for name, buffer in root.named_buffers():
        if name not in plan.division.shards:
            source = sources.get(name, plan.ownership.primary_ranks(name)[0])
            buffer.data.copy_(broadcast(buffer.detach().to(wire), source))
    if missing is not None:
        raise missing


def _sources(buffers: BufferState | None, wire: torch.device) -> tuple[Mapping[str, int], ConfigError | None]:
    """Return which ranks have the values of buffers, or the error that no rank has one; the same on all ranks."""
    try:
        return ({} if buffers is None else buffers.sources(wire)), None
    except ConfigError as error:
        return {}, error


def _collect(
    name: str,
    value: Tensor,
    holdings: Holdings,
    rank: int,
    targets: Sequence[int],
    wire: torch.device,
    source: int | None = None,
) -> Tensor:
    """Return the full tensor of `value` on the ranks `targets`, and `value` on others.

    It is sent by the ranks that keep it, each its own rows, or by the rank `source`. What arrives, and what is put
    together of rows, is in host memory.
    """
    result, shape = value, holdings.full_shape(name, value.shape)
    for target in targets:
        full: Tensor | None = None
        for keeper in holdings.keepers(name) if source is None else [source]:
            if rank not in (keeper, target):
                continue
            holding = None if source is not None else holdings.of(name, keeper, value.shape)
            own_shape = shape if holding is None else holding.owned
            here = value if holding is None or rank != keeper else holding.own_part(value)
            if keeper != target and rank == keeper:
                dist.send(bytes_of(here.detach().to(wire)), target)
            elif keeper != target:
                here = torch.empty(own_shape, dtype=value.dtype, device=wire)
                dist.recv(bytes_of(here), keeper)
                here = here.to(HOST)
            if rank != target:
                continue
            if holding is None or own_shape == shape:
                full = here
                continue
            if full is None:
                full = torch.empty(shape, dtype=value.dtype, device=HOST)
            for held, region in holding.parts(own_shape):
                narrowed(full, region).copy_(narrowed(here, held))
        if rank == target and full is not None:
            result = full
    return result


def _set(tensor: Tensor, value: Tensor) -> None:
    """Give a parameter or buffer a value of any shape, in place."""
    if isinstance(tensor, Placeholder):
        make_parameter(tensor, value)
    else:
        tensor.grad = None
        tensor.data = value


def _make_remote(tensor: Tensor, shape: torch.Size, origin: Origin) -> None:
    """Turn a parameter into a placeholder of `shape`, and a buffer into NaN of it, in place."""
    tensor.grad = None
    if isinstance(tensor, nn.Parameter):
        make_placeholder(tensor, shape, origin)
    else:
        filler = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
        tensor.data = torch.full(shape, filler, dtype=tensor.dtype, device=tensor.device)


@dataclass(frozen=True)
class Loaded:
    """What came of loading.

    Attributes:
        missing: names of the module that the source has not.
        unexpected: names of the source that the module has not.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    def check(self, root: nn.Module) -> None:
        """Raise RuntimeError, in torch's words, where a name is missing or unexpected."""
        if self.missing or self.unexpected:
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(root).__name__}: missing keys {self.missing}, "
                f"unexpected keys {self.unexpected}"
            )


def load_local(root: nn.Module, source: TensorSource, plan: Plan, rank: int) -> Loaded:
    """Copy into `root`, in place, what this rank holds of the tensors of `source`.

    A tied tensor is loaded under the first of its names that the source has, and missing where it has none of them.

    Args:
        root: the LightningModule, as it is on this rank: placeholders, and shards or full tensors.
        source: full tensors under the names of the module.
        plan: all stages.
        rank: global rank.

    Raises:
        RuntimeError: shapes are others.
    """
    expected = {name: value for name, value in root.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    there, holdings = set(source.names()), Holdings(plan, root)
    loaded = {id(value) for name, value in expected.items() if name in there}
    done: set[int] = set()
    for name, value in expected.items():
        if name not in there or id(value) in done:
            continue
        done.add(id(value))
        check_shape(root, name, source.shape(name), holdings.full_shape(name, value.shape))
        if is_remote(value):
            continue
        with torch.no_grad():
            for held, region in pieces(value, holdings.of(name, rank, value.shape)):
                held.copy_(source.read(name, region))
    missing = [name for name, value in expected.items() if id(value) not in loaded]
    return Loaded(missing, sorted(there - expected.keys()))


def pieces(value: Tensor, holding: Holding) -> Iterator[tuple[Tensor, Region | None]]:
    """Yield views of a tensor, each with the region of the full one that belongs there; None is all of it.

    Example: a shard of rows 0 to 2 and 6 to 8 of a ``[9, 4]`` weight gives ``value[0:2]`` with ``[(0, 2), (0, 4)]``
    and ``value[2:4]`` with ``[(6, 8), (0, 4)]``.
    """
    if value.shape == holding.full:
        yield value, None
        return
    for held, full in holding.parts(value.shape):
        yield narrowed(value, held), list(full)


def check_shape(root: nn.Module, name: str, shape: tuple[int, ...], expected: Sequence[int]) -> None:
    """Raise RuntimeError, in torch's words, where a source has a tensor of another shape than the module."""
    if tuple(shape) != tuple(expected):
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(root).__name__}: size mismatch for {name}: the checkpoint "
            f"has {tuple(shape)}, the model {tuple(expected)}"
        )
