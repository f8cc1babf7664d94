"""Says how tokens come to experts, and what the core asks of experts that ranks share.

Shapes: T tokens, H width, K chosen experts, P rows of one expert each.

**Experts that ranks share.** A feature finds such layers, and brings tokens to the ranks that hold their experts: its
module ``experts`` has `find_experts`, the groups of a rank and what makes its `Experts`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.layout.layout import even_ranges
from lightning_mm5d.sharded.shards import Range

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
        count: Any = len(experts) if isinstance(experts, LISTS) else getattr(experts, self.number, None)
        return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None


LISTS = (nn.ModuleList, nn.ModuleDict)


REGISTERED: dict[type[nn.Module] | str, ExpertParallelPlan | None] = {}
"""What the user said, by classes or their names."""
_INTERFACES = (
    ["hidden_states", "top_k_index", "top_k_weights"],
    ["hidden_states", "router_indices", "routing_weights"],
)
INTERFACE = ExpertParallelPlan()
"""How tokens come to experts of transformers."""


def register_expert_parallel_plan(cls: type[nn.Module] | str, plan: ExpertParallelPlan | None) -> None:
    """Say how tokens come to the experts of the instances of a class, where ranks share them (`ep_size`).

    It holds for everything in an instance: no other plan is looked for in it, but those of registered classes. A second
    call for the same class replaces the first.

    Args:
        cls: the class of the layer or of its module of experts, or its name; it counts for classes that derive from it,
            too.
        plan: relative to an instance; None leaves what an instance holds whole on every rank.

    Raises:
        ConfigError: `cls` is no class of modules, or `plan` is none.
    """
    fix = "Pass the class and an ExpertParallelPlan"
    if not (isinstance(cls, str) and cls) and not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ConfigError("register_expert_parallel_plan", cls, "A plan is for a class of modules or its name", fix)
    if plan is not None and not isinstance(plan, ExpertParallelPlan):
        raise ConfigError("register_expert_parallel_plan", plan, "A plan is an ExpertParallelPlan", fix)
    REGISTERED[cls] = plan


def holds_experts(module: nn.Module) -> bool:
    """Whether a module holds experts as transformers' models do: as tensors ``[experts, ...]``.

    It is called with tokens ``[T, H]``, the numbers of their experts ``[T, K]`` and the weights of these ``[T, K]``.
    """
    number = INTERFACE.count(module)
    arguments = list(inspect.signature(type(module).forward).parameters)[1:4]
    shapes = [parameter.shape for parameter in module.parameters()]
    return number is not None and arguments in _INTERFACES and bool(shapes) and all(s[:1] == (number,) for s in shapes)


Context = Callable[[], AbstractContextManager[Any]]
Products = Callable[[], AbstractContextManager[Any]]
Showing = Callable[[nn.Module], AbstractContextManager[Any]]


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer.

    Attributes:
        path: of the module that holds them.
        modality: that it belongs to.
        number: of experts.
        degree: ranks that share them.
        parameters: names of their parameters, each with the entries of every expert in turn along its first dim, or
            wholly of one expert.
        factors: names of the parameters of adapters on them, which are whole on every rank.
        called: path of the module whose forward brings tokens to them; empty where it holds them.
        plan: how tokens come to them; None where each module of a list is called with its own rows.
        lengths: of the first dim of each parameter; `number` where nothing is said.
        of_expert: the expert that a parameter is of, where it is of one.
    """

    path: str
    modality: str
    number: int
    degree: int
    parameters: tuple[str, ...]
    factors: tuple[str, ...] = ()
    called: str = ""
    plan: ExpertParallelPlan | None = ExpertParallelPlan()
    lengths: Mapping[str, int] = field(default_factory=dict)
    of_expert: Mapping[str, int] = field(default_factory=dict)

    @property
    def ranges(self) -> tuple[Range, ...]:
        """Which experts each rank holds: ``((0, 3), (3, 5))`` of five on two ranks."""
        return tuple(even_ranges(self.number, self.degree))

    def rows(self, name: str, length: int) -> tuple[Range, ...]:
        """Return which rows of a parameter each rank holds.

        Args:
            name: of the parameter.
            length: of its first dim.
        """
        expert = self.of_expert.get(name)
        if expert is not None:
            bounds = [0, *(length if expert < stop else 0 for _, stop in self.ranges)]
            return tuple(pairwise(bounds))
        each = length // self.number
        return tuple((start * each, stop * each) for start, stop in self.ranges)


def parameters_of(layers: Mapping[str, ExpertLayer]) -> Iterator[tuple[str, ExpertLayer]]:
    """Yield the name of each parameter of some experts, with these."""
    for layer in layers.values():
        for name in layer.parameters:
            yield name, layer


class Load(NamedTuple):
    """Rows that the experts of one layer have had; a token is a row for each of its experts.

    Attributes:
        by_expert: of each expert.
        by_rank: of all experts of each rank that shares them.
    """

    by_expert: tuple[int, ...]
    by_rank: tuple[int, ...]

    @classmethod
    def of(cls, by_expert: Sequence[int], ranges: Sequence[Range]) -> Load:
        """The load of a layer whose experts are on ranks as `ranges` says."""
        return cls(tuple(by_expert), tuple(sum(by_expert[start:stop]) for start, stop in ranges))


class Experts(Protocol):
    """The experts that one rank shares with others, of all its stages; `take` and `put` are those of a scope."""

    @property
    def are_apart(self) -> bool:
        """Whether a step runs in which each rank computes with its own experts."""

    def begin(self, context: Context, showing: Showing) -> None:
        """Begin a step in whose actions ranks meet.

        Args:
            context: the precision of a forward.
            showing: entered around the forward of experts with this rank's rows.
        """

    def during(self, stage: Any, flight: Any, *, forward: bool, products: Products) -> AbstractContextManager[None]:
        """Enter around a forward, or a backward that computes input gradients, of a stage.

        Args:
            stage: that runs.
            flight: equal for a forward and its backward.
            forward: whether it is a forward.
            products: of a forward, entered around the products of experts there and in its backward.
        """

    def end(self) -> None:
        """End a step."""

    def token_groups(self, stage: Any) -> Sequence[Any]:
        """Return the groups between whose ranks tokens of a stage travel."""

    def agree(self, stage: Any, wish: bool) -> bool:
        """Whether all ranks that share experts of a stage wish something; collective over them."""

    def take(self) -> Any:
        """Return what is of the action that runs, one microbatch at a time."""

    def put(self, state: Any) -> None:
        """Go on with the action that `take` returned `state` of."""

    def loads(self) -> Mapping[str, Load]:
        """Return how many rows experts and ranks have had in forwards since the last call, by path of the layer."""

    def remove(self) -> None:
        """Take the patches away again."""
