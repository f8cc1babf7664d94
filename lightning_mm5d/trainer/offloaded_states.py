"""States of optimizers that are in host memory between steps.

They come back when the gradients of a step are there, and leave when the optimizer has stepped. The device holds all of
them during that step: an optimizer may look at several parameters at once, and counts its own calls.

Between steps a state is an ordinary tensor in host memory, which checkpoints read and a load replaces. Small tensors
(step counters) stay, and so do tensors within lists and dicts and those of classes of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mm5d.engine.host_memory import HostMemory, Stored
from lightning_mm5d.engine.saved_activations import SMALLEST
from lightning_mm5d.plan.plan import Plan


class OffloadedStates:
    """States of the optimizers of one rank.

    Args:
        module: the user's module.
        plan: all stages.
        memory: of this rank's host.
    """

    def __init__(self, module: nn.Module, plan: Plan, memory: HostMemory) -> None:
        names = {name for name, modality in plan.modalities.items() if "optimizer" in modality.offloads}
        owners = plan.partition.owners
        self._memory = memory
        # parameters keep their identity for as long as a run lasts
        self._parameters = {
            id(parameter)
            for name, parameter in module.named_parameters()
            if not names.isdisjoint(key.modality for key in owners.get(name, ()))
        }
        self._stored: dict[tuple[int, Any], Stored] = {}

    def leave(self, optimizers: Iterable[Optimizer]) -> None:
        """Keep the states of `optimizers` on the host."""
        left = []
        for optimizer in optimizers:
            for parameter, state in self._states(optimizer):
                for key, value in state.items():
                    if self._is_moved(value) and not self._is_away(parameter, key, value):
                        left.append((parameter, state, key, self._memory.store(value)))
                        # one more reference, here or in the loop, would keep it on the device
                        state[key] = value = None
        for parameter, state, key, stored in left:
            state[key] = stored.wait()
            self._stored[id(parameter), key] = stored

    def arrive(self, optimizer: Optimizer) -> None:
        """Have the states of an optimizer on the device."""
        away = [
            (state, key, self._stored.pop((id(parameter), key)))
            for parameter, state in self._states(optimizer)
            for key, value in state.items()
            if self._is_away(parameter, key, value)
        ]
        for _, _, stored in away:
            stored.fetch()
        for state, key, stored in away:
            state[key] = stored.take()

    def _states(self, optimizer: Optimizer) -> Iterator[tuple[Tensor, dict[Any, Any]]]:
        if not self._parameters:
            return
        for parameter, state in getattr(optimizer, "state", {}).items():
            if id(parameter) in self._parameters and isinstance(state, dict):
                yield parameter, state

    def _is_away(self, parameter: Tensor, key: Any, value: Any) -> bool:
        stored = self._stored.get((id(parameter), key))
        return stored is not None and stored.host is value

    def _is_moved(self, value: Any) -> bool:
        return (
            type(value) is Tensor
            and value.device.type == self._memory.device.type
            and value.numel() * value.element_size() >= SMALLEST
        )
