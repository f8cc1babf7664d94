"""Whole checkpoints out of parts, and parts out of whole checkpoints.

A checkpoint is what one process would have written: every parameter under the name that the module gives it, optimizer
state by the position that the parameter has in the user's own groups. So any Lightning run can load it, in any layout.
To write it, the ranks that stand for a parameter send it, or their parts of it, to rank 0; to read it, each rank takes
what it holds. Of optimizer state, what is shaped as the part is divided as the parameter is, and the rest is common.

It refuses state dicts that lack keys or have others, as torch does when told to be strict, and other shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mm5d.engine.codec import receive_tree, send_tree
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.shards import Shard
from lightning_mm5d.stage.remote import Placeholder, give_memory, is_placeholder

_BUCKET_ELEMENTS = 8 * 2**20

# --- optimizers ---


def drop_remote_state(optimizer: Optimizer) -> None:
    """Free what an optimizer keeps for parameters of other ranks; some make state when they are constructed.

    The parameters themselves stay in its groups: without a gradient every optimizer passes over them, and everything
    that looks at the groups sees those of one process.
    """
    for parameter in [p for p in optimizer.state if is_placeholder(p)]:
        del optimizer.state[parameter]


def collect_optimizer(
    optimizer: Optimizer, root: nn.Module, plan: Plan, rank: int, device: torch.device
) -> dict[str, Any]:
    """Return the state dict that the optimizer would have on one process, on rank 0; collective.

    Args:
        optimizer: of the parameters of `root`, whatever is remote. Its state is that of parts where they are divided,
            also after `restore_whole`.
        root: the LightningModule.
        plan: all stages.
        rank: global rank.
        device: where messages live.
    """
    names = _names(root)
    whole = optimizer.state_dict()
    state: dict[int, Any] = {}
    for group, saved in zip(optimizer.param_groups, whole["param_groups"], strict=True):
        for parameter, index in zip(group["params"], saved["params"], strict=True):
            name = names.get(id(parameter))
            shard = None if name is None else plan.division.shards.get(name)
            parts: dict[int, Any] = {}
            for part, keeper in _senders(plan, name, shard):
                found = whole["state"].get(index) if rank == keeper else None
                if keeper != 0 and rank == keeper:
                    send_tree(found, 0, device)
                elif keeper != 0 and rank == 0:
                    found = receive_tree(keeper, device)
                if rank == 0 and found:
                    parts[part] = found
            if parts:
                state[index] = next(iter(parts.values())) if shard is None else _merged(parts, shard, parameter.shape)
    return {**whole, "state": state}


def load_optimizer(optimizer: Optimizer, whole: Mapping[str, Any], root: nn.Module, plan: Plan, rank: int) -> None:
    """Load this rank's part of a state dict of one process.

    Args:
        optimizer: of the parameters of `root`.
        whole: what `collect_optimizer` returns.
        root: the LightningModule, as it is on this rank.
        plan: all stages.
        rank: global rank.

    Raises:
        ValueError: the groups are not those that it was saved from.
    """
    names = _names(root)
    state = dict(whole["state"])
    for group, saved in zip(optimizer.param_groups, whole["param_groups"], strict=False):
        for parameter, index in zip(group["params"], saved["params"], strict=False):
            if is_placeholder(parameter):
                state.pop(index, None)
                continue
            name = names.get(id(parameter))
            shard = None if name is None else plan.division.shards.get(name)
            if name is None or shard is None or index not in state or not _is_part(parameter, shard):
                continue
            shape, part = _whole_shape(parameter.shape, shard), plan.ownership.shard_index(name, rank)
            state[index] = {
                key: shard.cut(value, part) if isinstance(value, Tensor) and value.shape == shape else value
                for key, value in state[index].items()
            }
    optimizer.load_state_dict({**whole, "state": state})


def _merged(parts: Mapping[int, Mapping[str, Any]], shard: Shard, shape: torch.Size) -> dict[str, Any]:
    """The state of a whole parameter out of that of its parts; what has none had no gradient, and counts as zeros."""
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for state in parts.values() for key in state):
        values = {part: state[key] for part, state in parts.items() if state.get(key) is not None}
        tensors = {part: value for part, value in values.items() if isinstance(value, Tensor)}
        if tensors and all(value.shape == _part_shape(shape, shard, part) for part, value in tensors.items()):
            merged[key] = next(iter(tensors.values())).new_zeros(_whole_shape(shape, shard))
            for part, value in tensors.items():
                shard.put(merged[key], value, shard.ranges[part])
        else:
            merged[key] = next(iter(values.values()), None)
    return merged


# --- modules ---


def equalize(root: nn.Module, device: torch.device) -> None:
    """Give all ranks rank 0's parameters and buffers, whole; collective.

    Args:
        root: the LightningModule, whole on rank 0.
        device: where messages of the default group live.
    """
    give_memory(root.parameters())
    if dist.get_world_size() == 1:
        return
    held: dict[torch.dtype, list[Tensor]] = {}
    for tensor in (*root.parameters(), *root.buffers()):
        held.setdefault(tensor.dtype, []).append(tensor.data)
    for tensors in held.values():
        while tensors:
            bucket = [tensors.pop(0)]
            while tensors and sum(t.numel() for t in bucket) + tensors[0].numel() <= _BUCKET_ELEMENTS:
                bucket.append(tensors.pop(0))
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).to(device)
            dist.broadcast(flat, 0)
            for tensor, piece in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(piece.view_as(tensor))


def collect_module(root: nn.Module, plan: Plan, rank: int, targets: Sequence[int] = (0,)) -> dict[str, Any]:
    """Return the module's state dict, whole on the ranks `targets`; on others it is what they hold.

    What has several names is one tensor under all of them. Collective. One tensor at a time, so that no rank needs more
    memory than its result.
    """
    state = root.state_dict()
    tensors = dict(_tensors(root))
    device = _wire(root)
    known: dict[int, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            source = tensors.get(name, value)
            if id(source) not in known:
                known[id(source)] = _collect(name, value, is_placeholder(source), plan, rank, targets, device)
            state[name] = known[id(source)]
    return state


def load_module(root: nn.Module, state: Mapping[str, Any], strict: bool, plan: Plan, rank: int) -> None:
    """Load this rank's part of a whole state dict.

    Args:
        root: the LightningModule, as it is on this rank.
        state: what `collect_module` returns.
        strict: whether keys must be those of the module.
        plan: all stages.
        rank: global rank.

    Raises:
        RuntimeError: shapes are others; with `strict`, also when keys are missing or unknown.
    """
    expected = root.state_dict(keep_vars=True)
    remote = {name for name, value in expected.items() if isinstance(value, Tensor) and is_placeholder(value)}
    missing = sorted(name for name in remote if name not in state)
    own = {name: value for name, value in state.items() if name not in remote}
    for name, value in expected.items():
        shard = plan.division.shards.get(name)
        if not isinstance(value, Tensor) or name not in state or (shard is None and name not in remote):
            continue
        shape = value.shape if shard is None else _whole_shape(value.shape, shard)
        if state[name].shape != shape:  # of what is not whole here torch could not say it
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(root).__name__}: size mismatch for {name}: the checkpoint "
                f"has {tuple(state[name].shape)}, the model {tuple(shape)}"
            )
        if shard is not None and name not in remote and _is_part(value, shard):
            own[name] = shard.cut(state[name], plan.ownership.shard_index(name, rank))
    found = root.load_state_dict(own, strict=False)
    missing += [name for name in found.missing_keys if name not in remote]
    if strict and (missing or found.unexpected_keys):
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(root).__name__}: missing keys {missing}, "
            f"unexpected keys {found.unexpected_keys}"
        )


def restore_whole(root: nn.Module, plan: Plan, rank: int, targets: Sequence[int] = (0,)) -> None:
    """Make the module on the ranks `targets` whole, with the values of all ranks; collective.

    On other ranks what is divided gives way to placeholders (NaN where it is a buffer), so that it has its whole shape
    on all ranks again; other values that they hold stay. Parameters remain the same objects; those whose shape changes,
    or that had no memory, lose their gradients.
    """
    state = collect_module(root, plan, rank, targets)
    device = _wire(root)
    done: set[int] = set()
    for name, tensor in _tensors(root):
        shard = plan.division.shards.get(name)
        if id(tensor) in done or (shard is None and not is_placeholder(tensor)):
            continue
        done.add(id(tensor))
        value = state.get(name)
        if value is None and shard is not None:  # a buffer that is not saved
            value = _collect(name, tensor.detach(), is_placeholder(tensor), plan, rank, targets, device)
        if rank in targets:
            if value is not None:
                _set(tensor, value.to(tensor.device))
        elif shard is not None and _is_part(tensor, shard):
            _forget(tensor, _whole_shape(tensor.shape, shard))
    if rank in targets:
        give_memory(root.parameters())
        root.load_state_dict(state, strict=False)


def _collect(
    name: str,
    value: Tensor,
    is_remote: bool,
    plan: Plan,
    rank: int,
    targets: Sequence[int],
    device: torch.device,
) -> Tensor:
    """Return `value` whole on the ranks `targets`, and as it is on others."""
    shard = plan.division.shards.get(name)
    result = value
    for target in targets:
        whole: Tensor | None = None
        for part, keeper in _senders(plan, name, shard):
            here = value
            if keeper != target and rank == keeper:
                dist.send(value.detach().to(device).contiguous(), target)
            elif keeper != target and rank == target:
                shape = value.shape if shard is None else _part_shape(value.shape, shard, part)
                here = torch.empty(shape, dtype=value.dtype, device=device)
                dist.recv(here, keeper)
            if rank == target and shard is not None:
                if whole is None:
                    shape = _whole_shape(value.shape, shard)
                    whole = torch.empty(shape, dtype=value.dtype, device=device if is_remote else value.device)
                shard.put(whole, here, shard.ranges[part])
            elif rank == target:
                whole = here if is_remote else here.to(value.device)
        if rank == target and whole is not None:
            result = whole
    return result


def _set(tensor: Tensor, value: Tensor) -> None:
    """Give a parameter or buffer a value of any shape, in place."""
    tensor.grad = None
    tensor.data = value
    if is_placeholder(tensor):
        tensor.__class__ = nn.Parameter


def _forget(tensor: Tensor, shape: torch.Size) -> None:
    """Turn a parameter into a placeholder of `shape`, and a buffer into NaN of it, in place."""
    filler = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    tensor.grad = None
    if isinstance(tensor, nn.Parameter):
        tensor.data = torch.full((), filler, dtype=tensor.dtype, device=tensor.device).expand(shape)
        tensor.__class__ = Placeholder
    else:
        tensor.data = torch.full(shape, filler, dtype=tensor.dtype, device=tensor.device)


# --- parts ---


def _senders(plan: Plan, name: str | None, shard: Shard | None) -> list[tuple[int, int]]:
    """The parts that make up a tensor, with the ranks that send them; rank 0 has what has no name."""
    if name is None:
        return [(0, 0)]
    primary = plan.ownership.primary_ranks(name)
    return [(0, primary[0])] if shard is None else [(part, primary[part]) for part in _distinct(shard)]


@cache
def _distinct(shard: Shard) -> tuple[int, ...]:
    """The parts with rows that no part before them has."""
    parts = range(len(shard.ranges))
    return tuple(part for part in parts if any(held.sharers[0] == part for held in shard.segments(part)))


def _whole_shape(shape: torch.Size, shard: Shard) -> torch.Size:
    """The shape of the whole of which `shape` is a part, or the whole itself."""
    return torch.Size((*shape[: shard.dim], shard.size, *shape[shard.dim + 1 :]))


def _part_shape(shape: torch.Size, shard: Shard, part: int) -> torch.Size:
    """The shape of one part of which `shape` is another, or the whole."""
    return torch.Size((*shape[: shard.dim], shard.lengths[part], *shape[shard.dim + 1 :]))


def _is_part(tensor: Tensor, shard: Shard) -> bool:
    """Whether a tensor is less than the whole; a part that is as long as that is equal to it."""
    return tensor.shape[shard.dim] != shard.size


def _tensors(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers, tied ones under each of their names."""
    yield from root.named_parameters(remove_duplicate=False)
    yield from root.named_buffers(remove_duplicate=False)


def _names(root: nn.Module) -> dict[int, str]:
    """The first name of each parameter, by identity."""
    names: dict[int, str] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    return names


def _wire(root: nn.Module) -> torch.device:
    """Where point-to-point messages of the default group live."""
    if dist.get_backend() == "nccl":
        return next((p.device for p in root.parameters()), torch.device("cpu"))
    return torch.device("cpu")
