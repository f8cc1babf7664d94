"""What layers on a grid cost, as the planner asks: what they send, and what they keep of a traced step.

Legend, of one linear layer ``Y = X W``: X, W and Y are bytes of the full tensors, q is the side of a grid and d its
depth. A rank sends, with sums as rings and broadcasts that each rank but the last passes on:

- 2d (arXiv:2104.05343) and 2.5d (arXiv:2105.14500): ``(q - 1) / q^2`` of ``X / d + W`` in the forward, and again for
  the gradient of X and for that of W;
- 3d (arXiv:2105.14450): ``(q - 1) / q^3`` of ``X + W + Y`` in the forward; of Y, ``X + W`` for the gradient of X, and
  ``X + W`` for that of W in the backward;
- a low-rank adapter on any grid: ``2 (q - 1) / q^2`` of the ``[rows, r]`` that its first matrix makes (2.5d: by d),
  in the forward and again in the backward; its second matrix sends nothing.

The traced step runs once, on full tensors, so it does what ranks on a grid do besides: it makes a block where a full
hidden state enters a layer and the full tensor where it leaves the last one, and norms by the grid's own function. All
that layers make counts with the part of the rank that has most rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_mm5d.features.grids.grid_layers import GridChecks, GridPlan
from lightning_mm5d.features.grids.grid_operations import Norm, normed
from lightning_mm5d.partition.hidden_state import with_state


class _Alone:
    """Stands for the ranks that norm a row together."""

    def sum(self, x: Tensor, *, in_place: bool = False) -> Tensor:
        return x


class GridCosts(NamedTuple):
    """What the layers of one modality cost; the planner describes its products."""

    plan: GridPlan

    @property
    def copies(self) -> int:
        """How many ranks of the grid have equal weights."""
        return self.plan.shape.depth if self.plan.shape.mode == "2.5d" else 1

    def sent(self, products: Iterable[Any]) -> float:
        """Return the bytes that a rank sends in the forward and the backward of `products`."""
        total, shape, side, size = 0.0, self.plan.shape, self.plan.shape.side, self.plan.shape.size
        layers = 1 if shape.mode == "3d" else shape.depth
        for one in products:
            if one.kind == "norm":
                total += (side - 1) / size * one.given * (1 + one.passes)
            elif one.kind == "adapter":
                total += 2 * (side - 1) / side**2 * one.made / layers * (1 + one.passes)
            elif shape.mode == "3d":
                numbers = one.given + one.weight
                backward = one.made * (one.passes or one.trains)
                total += (side - 1) / size * (numbers * (1 + one.passes + one.trains) + one.made + backward)
            else:
                panels = one.given / shape.depth + one.weight
                total += (side - 1) / side**2 * panels * (1 + one.passes + one.trains)
        return total

    def gathered(self, hidden: int, *, passes: bool) -> float:
        """Return the bytes that a rank sends where a hidden state enters a stage's first layer and leaves its last one.

        Args:
            hidden: size of the full hidden state.
            passes: whether its gradient is passed on.
        """
        return (self.plan.shape.size - 1) / self.plan.shape.size * hidden * (1 + passes)

    def trace(self, number: Callable[[Tensor], int], note: Callable[[str, Tensor, Tensor], None]) -> GridTrace:
        """Return what a traced step of the layers keeps."""
        return GridTrace(self, number, note)


class GridTrace:
    """The layers of one modality.

    Args:
        costs: of the layers.
        number: of a tensor's storage.
        note: called with the kind, the input and the result of each norm that is computed on the full width (``norm``)
            and of the first matrix of each low-rank adapter (``adapter``).
    """

    def __init__(
        self, costs: GridCosts, number: Callable[[Tensor], int], note: Callable[[str, Tensor, Tensor], None]
    ) -> None:
        self.shape, self._plan, self._number, self._note = costs.plan.shape, costs.plan, number, note
        self._copies, self._checks = costs.copies, GridChecks(costs.plan.modality, costs.plan.shape)
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

    def of_rows(self, size: int) -> int:
        """Return how much a rank has of `size` bytes of a full tensor with all columns of its rows."""
        return self.share(size) * self.shape.side

    def moment(self, one: Any) -> int:
        """Return the bytes that a product needs for a moment, beside what it takes and makes."""
        given, made = self.share(one.given), self.share(one.made)
        weight = self._copies * one.weight // self.shape.size
        if self.shape.mode == "3d":  # a gradient is laid out anew
            return self.shape.side * max(given + weight + made, made + 2 * given + 3 * weight)
        # panels that are used, that come, and that the product before has not let go of; parts of sums under way
        return (min(self.shape.side - 1, 3) + 2) * (given + weight)

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
