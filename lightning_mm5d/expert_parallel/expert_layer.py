"""The experts of a layer that ranks share, and what the core asks of those that a rank shares with others.

A feature finds such layers, and brings tokens to the ranks that hold their experts: its module ``experts`` has
`find_experts`, the groups of a rank and what makes its `Experts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from torch import nn

from lightning_mm5d.expert_parallel.expert_lookup import ExpertParallelPlan
from lightning_mm5d.layout.even_split import even_ranges
from lightning_mm5d.sharded.shards import Range

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
    plan: ExpertParallelPlan | None = ExpertParallelPlan()  # noqa: RUF009 - frozen
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
