"""Lets the layers of a traced step keep what they would keep on a grid of tensor parallel ranks.

The step runs once, on full tensors, so it does what ranks on a grid do besides: it makes a block where a full hidden
state enters a layer and the full tensor where it leaves the last one, and norms by the grid's own function. All that
layers make counts with the part of the rank that has most rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn

from lightning_mm5d.partition.hidden_state import with_state
from lightning_mm5d.tensor_parallel.grid.grid_checks import GridChecks
from lightning_mm5d.tensor_parallel.grid.grid_norms import Norm, normed
from lightning_mm5d.tensor_parallel.grid.grid_plan import GridPlan


class _Alone:
    """Stands for the ranks that norm a row together."""

    def sum(self, x: Tensor, *, in_place: bool = False) -> Tensor:
        return x


class GridTrace:
    """The layers of one modality.

    Args:
        modality: its name.
        plan: of its grid.
        number: of a tensor's storage.
        note: called with the kind, the input and the result of each norm that is computed on the full width (``norm``)
            and of the first matrix of each low-rank adapter (``adapter``).
    """

    def __init__(
        self,
        modality: str,
        plan: GridPlan,
        number: Callable[[Tensor], int],
        note: Callable[[str, Tensor, Tensor], None],
    ) -> None:
        self.shape, self._plan, self._number, self._note = plan.shape, plan, number, note
        self._checks = GridChecks(modality, plan.shape)
        self._blocks: set[int] = set()  # storages that layers make of blocks
        self._enters = False
        self._entered: tuple[int, ...] = (0, 0, 0)  # shape of the hidden state
        self._wide = 1

    @property
    def is_even(self) -> bool:
        """Whether each rank has as many samples as any other."""
        return self._entered[0] % (self.shape.depth * self.shape.side) == 0

    @property
    def _rows(self) -> int:
        return math.ceil(math.ceil(self._entered[0] / self.shape.depth) / self.shape.side)

    def share(self, size: int) -> int:
        """Return how much a rank has of `size` bytes of a full tensor in blocks."""
        return size * self._rows * self._wide // (self._entered[0] * self.shape.side)

    def part(self, number: int, made: Tensor, given: Collection[int]) -> int:
        """Return a rank's bytes of what an operation in a layer makes.

        Args:
            number: of the storage.
            made: the tensor.
            given: numbers of the storages that the operation takes.
        """
        size, samples = made.untyped_storage().nbytes(), self._entered[0]
        if not self._enters and self._blocks.isdisjoint(given):  # a mask
            return size * self._rows // samples if made.shape[:1] == (samples,) else size
        self._blocks.add(number)
        is_one_number = made.dim() == 3 and made.shape[-1] == 1  # of each token
        return self.share(size) * (self.shape.side if is_one_number else 1)

    def attach(self, copy: nn.Module) -> list[Callable[[], object]]:
        """Patch the layers of `copy`; return what takes the patches away."""
        undo: list[Callable[[], object]] = []
        for path, norm in self._plan.norms.items():
            module = copy.get_submodule(path)
            vars(module)["forward"] = MethodType(self._norm(norm, module.forward), module)
            undo.append(partial(vars(module).pop, "forward", None))
        for path in filter(self._plan.holds, self._plan.adapters):
            undo.append(copy.get_submodule(path).register_forward_hook(self._note_adapter).remove)
        for path, module in copy.named_modules():
            if isinstance(module, nn.Embedding) and not self._plan.holds(path):
                undo.append(module.register_forward_pre_hook(self._checks.note_ids).remove)
        return undo

    def entered(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any], int]:
        """Return the arguments of a layer with a block as the hidden state, and bytes of the full one.

        Raises:
            ConfigError: the layer cannot compute on blocks.
        """
        place, hidden = self._checks.given(module, args, kwargs)
        self._entered = tuple(hidden.shape)
        size = hidden.numel() * hidden.element_size()
        if self._number(hidden) not in self._blocks:
            self._enters = True
            args, kwargs = with_state(place, hidden.clone(), args, kwargs)
            self._enters = False
        return args, kwargs, size

    def left(self, module: nn.Module, result: Any) -> None:
        """Refuse a result of a layer that is no hidden state."""
        self._checks.made(module, result[0] if isinstance(result, tuple | list) else result, self._entered)

    def full(self, result: Any) -> Any:
        """Return the result of the last layer with a full hidden state."""
        if isinstance(result, tuple | list):
            return type(result)([result[0].clone(), *result[1:]])
        return result.clone()

    def is_adapter(self, path: str) -> bool:
        """Whether a linear layer of a layer on the grid is a matrix of a low-rank adapter."""
        return ".lora_" in path and self._plan.holds(path)

    def _note_adapter(self, module: nn.Module, args: tuple[Any, ...], made: Tensor) -> None:
        self._note("adapter", args[0], made)

    def _norm(self, norm: Norm | None, inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(module: nn.Module, input: Tensor) -> Tensor:
            self._checks.normed(module, norm, input, self._entered[-1], self._entered[-1])
            if norm is not None:
                return normed(module, input, norm, _Alone())  # type: ignore[arg-type]
            self._note("norm", input, input)
            self._wide = self.shape.side
            full = inner(input.clone())
            self._wide = 1
            return full.clone()

        return forward
