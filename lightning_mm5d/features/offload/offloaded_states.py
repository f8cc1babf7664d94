"""States of optimizers that are in host memory between steps.

They come back when the gradients of a step are there, and leave when the optimizer has stepped. An optimizer of torch's
own that updates each parameter by itself steps on some parameters at a time: the device holds the states of these, and
of the next ones, which are fetched meanwhile. Of any other the device holds all states during its step, because it may
look at several parameters at once or count its calls.

Between steps a state is an ordinary tensor in host memory, which checkpoints read and a load replaces. Small tensors
(step counters) stay, and so do tensors within lists and dicts and those of classes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_mm5d.config.errors import private
from lightning_mm5d.features.offload.host_memory import SMALLEST, HostMemory, Stored
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.removable import put
from lightning_mm5d.trainer.optimization import AroundUpdates

_BY_PARAMETER = (
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)


class OffloadedStates(AroundUpdates):
    """States of the optimizers of one rank.

    Args:
        module: the user's module.
        plan: all stages.
        memory: of this rank's host.
        bucket_bytes: bytes of the parameters that an optimizer steps on at a time.
    """

    def __init__(self, module: nn.Module, plan: Plan, memory: HostMemory, bucket_bytes: int) -> None:
        names = {name for name, modality in plan.modalities.items() if "optimizer" in modality.offloads}
        owners = plan.partition.owners
        self._memory, self._bucket_bytes = memory, bucket_bytes
        # parameters keep their identity for as long as a run lasts
        self._parameters = {
            id(parameter)
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if not names.isdisjoint(key.modality for key in owners.get(name, ()))
        }
        self._stored: dict[tuple[int, Any], Stored] = {}
        self._leaving: list[Stored] = []
        self._is_whole = True  # whether the step that runs is on all parameters at once

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Generator[None, None, None]:
        """Keep the states of an optimizer on the host after its step, and during it while nothing needs them."""
        buckets, step = self._buckets(optimizer), optimizer.step
        self._is_whole = not buckets
        if not buckets:
            yield
        else:
            take_away = put(optimizer, "step", lambda closure=None: self._step(optimizer, step, buckets, closure))
            try:
                yield
            finally:
                take_away()
        self.begin([optimizer])

    def ready(self, optimizer: Optimizer, *, is_scaled: bool) -> None:
        """Have the states of an optimizer that steps on all parameters at once."""
        if self._is_whole:
            self._arrive(optimizer, self._parameters)

    def begin(self, optimizers: Iterable[Optimizer]) -> None:
        """Keep the states of `optimizers` on the host, also those that a checkpoint has brought."""
        for optimizer in optimizers:
            self._leave(optimizer, self._parameters)
        while self._leaving:
            self._leaving.pop().wait()

    def _step(self, optimizer: Optimizer, step: Callable[..., Any], buckets: list[set[int]], closure: Any) -> Any:
        """What an optimizer's `step` does, some parameters at a time."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        groups = optimizer.param_groups
        self._fetch(optimizer, buckets[0])
        try:
            for bucket, following in zip(buckets, [*buckets[1:], set[int]()], strict=True):
                self._arrive(optimizer, bucket)
                self._fetch(optimizer, following)
                parts = [{**group, "params": [p for p in group["params"] if id(p) in bucket]} for group in groups]
                optimizer.param_groups = [part for part in parts if part["params"]]
                step()
                self._leave(optimizer, bucket)
        finally:
            optimizer.param_groups = groups
        return result

    def _buckets(self, optimizer: Optimizer) -> list[set[int]]:
        """The parameters of an optimizer, as many as it steps on at a time; none where it steps on all at once."""
        hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        if not self._parameters or type(optimizer) not in _BY_PARAMETER:
            return []
        if any(private(optimizer, name) for name in hooks):  # a user's, which expect one call
            return []
        found, size = [set[int]()], 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if size >= self._bucket_bytes:
                    found.append(set())
                    size = 0
                found[-1].add(id(parameter))
                size += parameter.numel() * parameter.element_size()
        return found if len(found) > 1 else []

    def _leave(self, optimizer: Optimizer, parameters: set[int]) -> None:
        for parameter, state in self._states(optimizer, parameters):
            for key, value in state.items():
                if self._is_moved(value) and not self._is_away(parameter, key, value):
                    stored = self._memory.store(value)
                    self._stored[id(parameter), key] = stored
                    self._leaving.append(stored)
                    state[key] = stored.host

    def _fetch(self, optimizer: Optimizer, parameters: set[int]) -> None:
        for parameter, state in self._states(optimizer, parameters):
            for key, value in state.items():
                if self._is_away(parameter, key, value):
                    self._stored[id(parameter), key].fetch()

    def _arrive(self, optimizer: Optimizer, parameters: set[int]) -> None:
        self._fetch(optimizer, parameters)
        for parameter, state in self._states(optimizer, parameters):
            for key, value in state.items():
                if self._is_away(parameter, key, value):
                    state[key] = self._stored.pop((id(parameter), key)).take()

    def _states(self, optimizer: Optimizer, parameters: set[int]) -> Iterator[tuple[Tensor, dict[Any, Any]]]:
        """The states of those of `parameters` whose states move."""
        for parameter, state in getattr(optimizer, "state", {}).items() if self._parameters else ():
            if id(parameter) in parameters and id(parameter) in self._parameters and isinstance(state, dict):
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
