"""Whole checkpoints out of parts, and parts out of whole checkpoints.

A checkpoint is what one process would have written: every parameter under the name that the module gives it, optimizer
state by the position that the parameter has in the user's own groups. So any Lightning run can load it, in any layout.
To write it, the rank that stands for a parameter sends it to rank 0; to read it, each rank takes what it holds.

It refuses state dicts that lack keys or have others, as torch does when told to be strict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mm5d.engine.exchange import recv_tree, send_tree
from lightning_mm5d.engine.plan import Plan
from lightning_mm5d.stage.remote import is_placeholder


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
        optimizer: of the parameters of `root`, whatever is remote.
        root: the LightningModule.
        plan: all stages.
        rank: global rank.
        device: where messages live.
    """
    names: dict[int, str] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    whole = optimizer.state_dict()
    state: dict[int, Any] = {}
    for group, saved in zip(optimizer.param_groups, whole["param_groups"], strict=True):
        for parameter, index in zip(group["params"], saved["params"], strict=True):
            keeper = plan.keeper(names[id(parameter)]) if id(parameter) in names else 0
            found = whole["state"].get(index) if rank == keeper else None
            if keeper != 0 and rank == keeper:
                send_tree(found, 0, device)
            elif keeper != 0 and rank == 0:
                found = recv_tree(keeper, device)
            if rank == 0 and found:
                state[index] = found
    return {**whole, "state": state}


def load_optimizer(optimizer: Optimizer, whole: Mapping[str, Any]) -> None:
    """Load this rank's part of a state dict of one process.

    Raises:
        ValueError: the groups are not those that it was saved from.
    """
    remote = {
        index
        for group, saved in zip(optimizer.param_groups, whole["param_groups"], strict=False)
        for parameter, index in zip(group["params"], saved["params"], strict=False)
        if is_placeholder(parameter)
    }
    state = {index: value for index, value in whole["state"].items() if index not in remote}
    optimizer.load_state_dict({**whole, "state": state})


def collect_module(root: nn.Module, plan: Plan, rank: int, targets: Sequence[int] = (0,)) -> dict[str, Any]:
    """Return the module's state dict, whole on the ranks `targets`; on others remote values stay placeholders.

    Collective. One tensor at a time, so that no rank needs more memory than its result.
    """
    state = root.state_dict()
    device = _wire(root)
    sent: dict[int, Tensor] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue
        keeper = plan.keeper(name)
        for target in targets:
            if target == keeper:
                continue
            if rank == keeper:
                dist.send(value.detach().to(device).contiguous(), target)
            elif rank == target:
                buffer = torch.empty(value.shape, dtype=value.dtype, device=device)
                dist.recv(buffer, keeper)
                state[name] = sent.setdefault(id(value), buffer) if is_placeholder(value) else buffer.to(value.device)
    return state


def load_module(root: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load this rank's part of a whole state dict.

    Raises:
        RuntimeError: with `strict`, when keys are missing or unknown.
    """
    expected = root.state_dict(keep_vars=True)
    remote = {name for name, value in expected.items() if isinstance(value, Tensor) and is_placeholder(value)}
    missing = sorted(name for name in remote if name not in state)
    found = root.load_state_dict({name: value for name, value in state.items() if name not in remote}, strict=False)
    missing += [name for name in found.missing_keys if name not in remote]
    if strict and (missing or found.unexpected_keys):
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(root).__name__}: missing keys {missing}, "
            f"unexpected keys {found.unexpected_keys}"
        )


def _wire(root: nn.Module) -> torch.device:
    """Where point-to-point messages of the default group live."""
    if dist.get_backend() == "nccl":
        return next((p.device for p in root.parameters()), torch.device("cpu"))
    return torch.device("cpu")
