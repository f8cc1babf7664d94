"""Which backend carries tensors between ranks, where its messages live, and which rank warns for all."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist


def backend_of(device: torch.device, group: dist.ProcessGroup | None = None) -> str | None:
    """Return the backend that carries tensors of `device`, in lower case; None where the group has none.

    Args:
        device: of the tensors.
        group: that this rank is in; None for the default group. It may have one backend for each kind of device, as
            ``cpu:gloo,cuda:nccl``.
    """
    pairs = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return pairs.get(device.type)


def message_device(device: torch.device, group: dist.ProcessGroup | None = None) -> torch.device:
    """Return where messages of a group live: on `device`, or in host memory, which is what gloo carries.

    Args:
        device: where this rank computes.
        group: that this rank is in; None for the default group.
    """
    return torch.device("cpu") if backend_of(device, group) in (None, "gloo") else device


def waits_on_device(device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether a device waits for messages by itself; with gloo the host does, and each group has its threads.

    Where devices wait, ranks must issue the messages of all their groups in one order.

    Args:
        device: of the tensors.
        group: as for `backend_of`.
    """
    return backend_of(device, group) not in (None, "gloo")


def warn_on_first_rank(message: str) -> None:
    """Warn on rank 0, or in a process without other ranks."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(message, stacklevel=3)
