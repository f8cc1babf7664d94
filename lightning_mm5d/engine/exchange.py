"""Pytrees between ranks outside of a schedule: broadcast within a group, or sent from one rank to another.

For what is exchanged rarely (outputs of evaluation steps, optimizer state): each message describes itself, as JSON.

It refuses what a `Payload` cannot hold.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.stage.payload import Packer, rebuild


def broadcast_tree(tree: Any, src: int, group: dist.ProcessGroup | None, device: torch.device) -> Any:
    """Return rank `src`'s `tree` on every rank of `group`; collective.

    Args:
        tree: tensors and plain values in containers; read on rank `src` only.
        src: global rank.
        group: its group; None for the default one.
        device: where tensors travel and arrive.
    """
    if dist.get_world_size(group) == 1:
        return tree
    sends = dist.get_rank() == src
    return _exchange(tree if sends else None, sends, device, lambda tensor: dist.broadcast(tensor, src, group=group))


def send_tree(tree: Any, dst: int, device: torch.device) -> None:
    """Send `tree` to rank `dst`, which calls `recv_tree`; waits for it."""
    _exchange(tree, True, device, lambda tensor: dist.send(tensor, dst))


def recv_tree(src: int, device: torch.device) -> Any:
    """Return the tree that rank `src` sends with `send_tree`."""
    return _exchange(None, False, device, lambda tensor: dist.recv(tensor, src))


def _exchange(tree: Any, sends: bool, device: torch.device, move: Any) -> Any:
    packer = Packer()
    text = b""
    if sends:
        description = packer.describe(tree)
        specs = [[str(tensor.dtype).removeprefix("torch."), *tensor.shape] for tensor in packer.tensors]
        text = json.dumps([description, specs]).encode()
    size = torch.tensor([len(text)], device=device)
    move(size)
    encoded = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device) if sends else None
    if encoded is None:
        encoded = torch.empty(int(size), dtype=torch.uint8, device=device)
    move(encoded)
    if sends:
        tensors = [tensor.detach().to(device).contiguous() for tensor in packer.tensors]
    else:
        description, specs = json.loads(bytes(encoded.tolist()))
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for dtype, *shape in specs]
    for tensor in tensors:
        if tensor.numel():
            move(_raw(tensor))
    return tree if sends else rebuild(description, tensors)


def _raw(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
