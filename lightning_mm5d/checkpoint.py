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


class OptimizerIndex:
    """Which parameters the user gave to an optimizer, and where, before those of other ranks were taken out.

    Args:
        optimizer: as `configure_optimizers` returned it.
        names: names of all parameters by id.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._optimizer = optimizer
        self._groups = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
        self._held = [
            [(name, p) for name, p in zip(named, group["params"], strict=True) if not is_placeholder(p)]
            for named, group in zip(self._groups, optimizer.param_groups, strict=True)
        ]

    def prune(self, device: torch.device) -> None:
        """Take out the parameters of other ranks; an optimizer that has none left gets an empty one."""
        for group, held in zip(self._optimizer.param_groups, self._held, strict=True):
            group["params"] = [p for _, p in held]
        if not any(self._held):
            # a scaler refuses optimizers without any gradient
            empty = nn.Parameter(torch.zeros(1, device=device))
            empty.grad = torch.zeros_like(empty)
            empty.register_post_accumulate_grad_hook(lambda p: None)
            self._optimizer.param_groups[0]["params"] = [empty]
        for parameter in [p for p in self._optimizer.state if is_placeholder(p)]:  # some make state when constructed
            del self._optimizer.state[parameter]

    def collect(self, plan: Plan, rank: int, device: torch.device) -> dict[str, Any]:
        """Return the state dict that the optimizer would have on one process, on rank 0; collective."""
        local = {name: p for held in self._held for name, p in held}
        state: dict[int, Any] = {}
        for index, name in enumerate(name for names in self._groups for name in names):
            keeper = plan.keeper(name) if name else 0
            found = None
            if rank == keeper and name in local:
                found = dict(self._optimizer.state.get(local[name], {}))
            if keeper != 0 and rank == keeper:
                send_tree(found, 0, device)
            elif keeper != 0 and rank == 0:
                found = recv_tree(keeper, device)
            if rank == 0 and found:
                state[index] = found
        groups, start = [], 0
        for group, names in zip(self._optimizer.param_groups, self._groups, strict=True):
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append({**options, "params": list(range(start, start + len(names)))})
            start += len(names)
        return {"state": state, "param_groups": groups}

    def load(self, whole: Mapping[str, Any]) -> None:
        """Load this rank's part of a state dict of one process."""
        state, groups, position, start = {}, [], 0, 0
        for names, held, group in zip(self._groups, self._held, whole["param_groups"], strict=True):
            kept = {name for name, _ in held}
            first = position
            for index, name in enumerate(names, start):
                if name in kept:
                    if index in whole["state"]:
                        state[position] = whole["state"][index]
                    position += 1
            start += len(names)
            groups.append({**group, "params": list(range(first, position))})
        if not position:  # the empty parameter
            groups[0]["params"] = [0]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})


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
        keeper = plan.keeper(name) if name in plan.partition.owners else plan.ranks_of(plan.last_stage)[0]
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
