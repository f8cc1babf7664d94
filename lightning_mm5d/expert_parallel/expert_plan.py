"""How tokens come to the experts of one class of modules, as a user or a table says it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Exchange = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class ExpertParallelPlan:
    """Where the router, the experts and the combination of a layer are, so that one exchange brings its tokens.

    Shapes: T tokens, H width, K experts of a token, P rows of one expert each.

    Without `forward` the plan is for the module of experts. Its own forward gets tokens ``[T, H]`` or ``[B, S, H]``,
    the numbers of their experts ``[T, K]`` and the weights of these ``[T, K]`` in this order, under any names, and
    returns the weighted sums in the shape of the tokens. With `forward` the plan is for the layer around it.

    Args:
        experts: path of the module that holds the experts, from an instance of the class; ``""`` is the instance. It
            is an ``nn.ModuleList`` or ``nn.ModuleDict`` of modules that map rows to rows, or it has tensors with the
            entries of each expert in turn along dim 0: ``[experts, ...]``, or ``[experts * n, ...]``.
        number: name of the attribute of that module with the number of experts, which is the number of this rank's
            own ones while they compute; a list needs none.
        forward: ``forward(layer, exchange, *args, **kwargs)`` takes the place of the layer's own forward in a step. It
            routes, calls ``exchange(rows, index, weights)`` once, with ``[T, H]``, ``[T, K]`` and ``[T, K]``, which
            returns the weighted sums ``[T, H]``, and returns what the layer returns. A token that an expert has no
            room for has weight zero there, or is left out.
        compute: ``compute(experts, rows, index)`` with rows ``[P, H]`` and the number ``[P]`` of each one's expert
            among those that this rank holds; returns the results ``[P, H]``. Unset: each module of a list is called
            with its rows, where it has any; another module with rows, ``index[:, None]`` and weights of one.
    """

    experts: str = ""
    number: str = "num_experts"
    forward: Callable[..., Any] | None = None
    compute: Callable[[Any, Tensor, Tensor], Tensor] | None = None

    def count(self, experts: nn.Module) -> int | None:
        """Return the number of experts that a module holds, None where it does not say it."""
        found: Any = len(experts) if isinstance(experts, LISTS) else getattr(experts, self.number, None)
        return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None


LISTS = (nn.ModuleList, nn.ModuleDict)
