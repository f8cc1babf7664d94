"""Loads the weights of a sharded checkpoint into a module that is cut, after a check that changes nothing."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_mm5d.checkpoint.buffer_state import settle
from lightning_mm5d.checkpoint.module_state import tensors_of
from lightning_mm5d.checkpoint.saved_state import SavedWeights
from lightning_mm5d.plan.holdings import Holdings
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.remote_value import is_remote
from lightning_mm5d.storage.source import TensorSource
from lightning_mm5d.weights.load_local import Loaded, check_shape, load_local


def check_weights(root: nn.Module, state: SavedWeights, strict: bool, plan: Plan | None) -> None:
    """Compare names and shapes of weights with those of a module.

    Args:
        root: the LightningModule.
        state: what was saved.
        strict: whether names must be the same.
        plan: all stages where the module is cut; None where it is whole.

    Raises:
        RuntimeError: they are others.
    """
    expected = root.state_dict(keep_vars=True)
    holdings = None if plan is None else Holdings(plan, root)
    for name in state.names():
        value = expected.get(name)
        if isinstance(value, Tensor):
            shape = value.shape if holdings is None else holdings.full_shape(name, value.shape)
            check_shape(root, name, state.shape(name), shape)
    if strict:
        found = {id(value) for name, value in expected.items() if name in state}
        missing = [name for name, value in expected.items() if id(value) not in found]
        Loaded(missing, [name for name in state if name not in expected]).check(root)


def load_weights(root: nn.Module, state: SavedWeights, plan: Plan, rank: int) -> None:
    """Read what this rank holds of the weights; names that the module does not have are left out."""
    own = {name for name, _ in tensors_of(root)}
    settle(root.buffers())
    load_local(root, Chosen(state, [name for name in state.names() if name in own]), plan, rank)
    others: dict[str, Any] = {name: state[name] for name in state if name not in own}
    if others:  # states of metrics, and what modules save that are no tensors
        root.load_state_dict(others, strict=False)


def void_weights(root: nn.Module) -> None:
    """Fill all that this rank holds and a checkpoint has with NaN, so that nobody uses half of what was loaded."""
    for value in root.state_dict().values():
        if isinstance(value, Tensor) and not is_remote(value) and (value.is_floating_point() or value.is_complex()):
            value.fill_(float("nan"))


class Chosen:
    """Some tensors of a source.

    Args:
        source: of tensors.
        names: of those that this one has.
    """

    def __init__(self, source: TensorSource, names: list[str]) -> None:
        self._names = names
        self.shape, self.dtype, self.read = source.shape, source.dtype, source.read

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return self._names
