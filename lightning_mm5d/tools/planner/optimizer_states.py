"""Finds how many bytes of states an optimizer keeps for a parameter, by a step of it on tensors without memory.

The optimizers are those that `configure_optimizers` returns, called on a copy of the module without memory, with a
stand-in for the trainer that tells how many steps there are. So any class and any settings count: momentum, moments of
Adam, factored moments, states that are made when it is constructed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_mm5d.data.random_state import kept_random_state
from lightning_mm5d.tools.planner.hollow_tensors import HollowTensors
from lightning_mm5d.trainer.construction import copy_without_memory

_STEPS = 1000
TRAINER = SimpleNamespace(
    estimated_stepping_batches=_STEPS,
    num_training_batches=_STEPS,
    max_steps=_STEPS,
    max_epochs=1,
    accumulate_grad_batches=1,
    world_size=1,
    num_nodes=1,
    num_devices=1,
    global_step=0,
    current_epoch=0,
)


Remade = Callable[[Optimizer, Mapping[str, Any], list[nn.Parameter]], Optimizer | None]


class StateBytes(NamedTuple):
    """Bytes beside one parameter.

    Attributes:
        kept: of its states.
        working: that a step needs for a moment.
        together: whether a step works on all parameters at once, so that this memory adds up.
        moved: that the operations of a step read and write.
    """

    kept: int
    working: int
    together: bool
    moved: int = 0


class OptimizerStates:
    """The states of a module's optimizers.

    Args:
        module: full; the meta device will do.
        remade: makes an optimizer of the same class with other parameters and the settings of a group; None where it
            cannot.

    Attributes:
        optimizers: that `configure_optimizers` returned.

    Raises:
        Exception: of the user's `configure_optimizers`, which may need a trainer.
    """

    def __init__(self, module: LightningModule, remade: Remade) -> None:
        self._remade = remade
        copy = copy_without_memory(module)
        with kept_random_state(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            copy.trainer = TRAINER  # type: ignore[assignment]
            self.optimizers = list(_optimizers(copy.configure_optimizers()))
        # a function that a user put on the module knows the parameters of the module itself
        groups = {
            id(parameter): (optimizer, group)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self._group_of = {
            name: groups[id(parameter)]
            for one in (module, copy)
            for name, parameter in one.named_parameters(remove_duplicate=False)
            if id(parameter) in groups
        }
        self._known: dict[Any, StateBytes | None] = {}

    def of(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> StateBytes | None:
        """Return what is kept for a trained parameter of this name, of which a rank has a part of `shape`.

        Nothing where no optimizer has it; None where the optimizer cannot be tried.
        """
        if name not in self._group_of:
            return StateBytes(0, 0, False)
        optimizer, group = self._group_of[name]
        key = id(group), shape, dtype
        if key not in self._known:
            self._known[key] = self._tried(optimizer, group, shape, dtype)
        return self._known[key]

    def _tried(
        self, optimizer: Optimizer, group: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype
    ) -> StateBytes | None:
        try:
            with kept_random_state():
                kept, working, moved = self._step(optimizer, group, shape, dtype, 1)
                _, several, _ = self._step(optimizer, group, shape, dtype, 4)
                together = several > 2.5 * working  # up to twice as much is left over from the parameter before
                return StateBytes(kept, working, together, moved)
        except Exception:  # whatever a class of somebody else's does with tensors that have no values
            return None

    def _step(
        self, optimizer: Optimizer, group: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype, count: int
    ) -> tuple[int, int, int]:
        """Bytes of states, at most of other tensors in a step on `count` parameters, and that it reads and writes."""
        moved = 0

        def watch(func: Any, given: Sequence[Tensor], made: Sequence[Tensor], _: Any) -> None:
            nonlocal moved
            moved += 0 if func.is_view else sum(tensor.nbytes for tensor in (*given, *made))

        hollow = HollowTensors(watch)
        parameters = [nn.Parameter(hollow.of(torch.empty(shape, dtype=dtype, device="meta"))) for _ in range(count)]
        with hollow:
            probe = self._remade(optimizer, group, parameters)
            if probe is None:
                raise TypeError(type(optimizer))
            if callable(train := getattr(probe, "train", None)):
                train()
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            for _ in range(2):
                hollow.peak = moved = 0
                probe.step()
        kept = hollow.size_of(one for one in tree_leaves(list(probe.state.values())) if isinstance(one, Tensor))
        return kept, max(hollow.peak - 2 * sum(parameter.nbytes for parameter in parameters) - kept, 0), moved


def _optimizers(returned: Any) -> Iterator[Optimizer]:
    """The optimizers in what `configure_optimizers` returns, whichever of its forms that has."""
    if isinstance(returned, Optimizer):
        yield returned
    elif isinstance(returned, Mapping):
        yield from _optimizers(returned.get("optimizer"))
    elif isinstance(returned, list | tuple):
        for one in returned:
            yield from _optimizers(one)
