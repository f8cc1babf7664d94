"""Finds modules of experts and how tokens come to them, and says what the core asks of those that ranks share.

For each module, the first of these that knows it: what the user registered, the interface of transformers' experts, the
table of families, lists of modules that are called with their own rows.

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

import torch
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.layout.even_split import even_ranges
from lightning_mm5d.partition.parts import is_in, joined
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
        found: Any = len(experts) if isinstance(experts, LISTS) else getattr(experts, self.number, None)
        return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None


LISTS = (nn.ModuleList, nn.ModuleDict)


_REGISTERED: dict[type[nn.Module] | str, ExpertParallelPlan | None] = {}
_INTERFACES = (
    ["hidden_states", "top_k_index", "top_k_weights"],
    ["hidden_states", "router_indices", "routing_weights"],
)
_OTHERS = ("shared", "gate", "rout", "norm", "bias", "scale", "statics")  # names of what is beside experts
_INTERFACE = ExpertParallelPlan()
_OVER_SAMPLES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Found(NamedTuple):
    """Experts in a module.

    Attributes:
        called: path of the module whose forward brings tokens to them.
        path: of the module that holds them.
        plan: how tokens come to them; None where each module of a list is called with its own rows.
    """

    called: str
    path: str
    plan: ExpertParallelPlan | None


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
    _REGISTERED[cls] = plan


def find_plans(root: nn.Module, in_layers: Callable[[str], bool]) -> tuple[list[Found], list[str]]:
    """Return the experts of a module, and the paths of modules that are likely experts that nothing knows.

    Args:
        root: the LightningModule; the meta device will do.
        in_layers: whether the module at a path is in one of the layers of a modality.
    """
    found, closed = list[Found](), list[str]()
    for path, module in root.named_modules():
        key = _registered(type(module))
        if key is not None:
            closed.append(path)
            if (plan := _REGISTERED[key]) is not None:
                found.append(Found(path, joined(path, plan.experts), plan))
    paths = {name: module for name, module in root.named_modules()}
    for path, module in paths.items():
        if any(is_in(path, one) for one in closed):
            continue
        plan = _INTERFACE if holds_experts(module) else family_plan(module)
        if plan is not None or (is_list(module) and _is_named(path, module, paths, in_layers)):
            closed.append(path)
            found.append(Found(path, joined(path, plan.experts if plan else ""), plan))
    parents = {one.path for one in found}
    unknown = [
        path
        for path, module in paths.items()
        if not any(is_in(path, one) for one in closed)
        and not any(is_in(one, path) for one in parents)
        and _is_likely(path, module, paths)
    ]
    return found, unknown


def holds_experts(module: nn.Module) -> bool:
    """Whether a module holds experts as transformers' models do: as tensors ``[experts, ...]``.

    It is called with tokens ``[T, H]``, the numbers of their experts ``[T, K]`` and the weights of these ``[T, K]``.
    """
    number = _INTERFACE.count(module)
    arguments = list(inspect.signature(type(module).forward).parameters)[1:4]
    shapes = [parameter.shape for parameter in module.parameters()]
    return number is not None and arguments in _INTERFACES and bool(shapes) and all(s[:1] == (number,) for s in shapes)


def is_list(module: nn.Module) -> bool:
    """Whether a module is a list of modules that each map one tensor to another, each of them by itself.

    Which rows such a module is called with is the business of the layer around it. A module that normalizes over
    samples, or whose results are not as wide as its rows, is none.
    """
    return isinstance(module, LISTS) and len(module) > 1 and all(_maps_rows(one) for one in module.children())


def _maps_rows(module: nn.Module) -> bool:
    arguments = list(inspect.signature(type(module).forward).parameters.values())[1:]
    needed = [one for one in arguments if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    linears = [one for one in module.modules() if isinstance(one, nn.Linear)]
    is_plain = isinstance(module, (nn.Linear, nn.Sequential)) and bool(linears)
    return (
        len(needed) == 1
        and needed[0].kind is not needed[0].VAR_POSITIONAL
        and not any(isinstance(one, _OVER_SAMPLES) for one in module.modules())
        and not (is_plain and linears[0].in_features != linears[-1].out_features)
    )


def _is_named(path: str, module: nn.Module, paths: dict[str, nn.Module], in_layers: Callable[[str], bool]) -> bool:
    """Whether a list is named as experts are, or is of one class, in a layer, beside a router to as many."""
    if not any(True for _ in module.parameters()) or "shared" in _names(path, module):
        return False
    parent = paths[path.rpartition(".")[0]]
    children = list(module.children())
    return "expert" in _names(path, module) or (
        in_layers(path) and len({type(one) for one in children}) == 1 and _routes(parent, len(children))
    )


def _routes(module: nn.Module, number: int) -> bool:
    own = [parameter.shape for parameter in module.parameters(recurse=False)]
    beside = [child for child in module.children() if not isinstance(child, LISTS)]
    inside = [parameter.shape for child in beside for parameter in child.parameters()]
    return any(len(one) == 2 and number in one for one in own) or any(
        len(one) == 2 and one[0] == number for one in inside
    )


def _is_likely(path: str, module: nn.Module, paths: dict[str, nn.Module]) -> bool:
    """Whether a module may hold experts, by its name or by its tensors."""
    name, cls = path.rpartition(".")[2].lower(), type(module).__name__.lower()
    if "shared" in path.lower() or any(word in name for word in _OTHERS):
        return False
    held = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    if held and ("expert" in name or cls.endswith(("expert", "experts", "expertglu", "expertmlp"))):
        return True
    if type(module).__module__.startswith("torch.nn."):
        return False
    parent = paths[path.rpartition(".")[0]]
    stacked = {one.shape[0] for one in module.parameters(recurse=False) if one.dim() > 2 and one.shape[0] > 1}
    return any(_routes(module, number) or _routes(parent, number) or _counts(module, number) for number in stacked)


def _counts(module: nn.Module, number: int) -> bool:
    return any("expert" in name and value == number for name, value in vars(module).items() if isinstance(value, int))


def _registered(cls: type) -> type[nn.Module] | str | None:
    keys: Iterator[type | str] = (key for owner in cls.__mro__ for key in (owner, owner.__name__))
    return next((key for key in keys if key in _REGISTERED), None)


def _names(path: str, module: nn.Module) -> str:
    return f"{path.rpartition('.')[2]} {type(module).__name__}".lower()


def family_plan(module: nn.Module) -> ExpertParallelPlan | None:
    """Return the plan for a class of modules that is known by its name."""
    return _FAMILIES.get(type(module).__name__)


def _llama4(layer: Any, exchange: Exchange, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Scores multiply what experts get, so each chosen expert has a row of its own, of weight one.

    The model passes all tokens through all experts: those that are not chosen get zeros, and compute zeros of them.
    """
    rows = hidden.reshape(-1, layer.hidden_dim)  # [T, H]
    scores, logits = layer.router(rows)  # [T, experts]
    index = torch.topk(logits, layer.top_k, dim=1).indices  # [T, K], as the router chooses
    scaled = rows.unsqueeze(1) * scores.gather(1, index).unsqueeze(2)  # [T, K, H]
    index = index.reshape(-1, 1)
    routed = exchange(scaled.flatten(0, 1), index, torch.ones_like(index, dtype=rows.dtype))
    return layer.shared_expert(rows) + routed.view_as(scaled).sum(1), logits


def _llama4_compute(experts: Any, rows: Tensor, index: Tensor) -> Tensor:
    order = torch.argsort(index, stable=True)
    parts = rows[order].split(torch.bincount(index, minlength=len(experts.gate_up_proj)).tolist())
    found = []
    for part, gate_up, down in zip(parts, experts.gate_up_proj, experts.down_proj, strict=True):
        gate, up = (part @ gate_up).chunk(2, dim=-1)
        found.append((up * experts.act_fn(gate)) @ down)
    return torch.cat(found)[torch.argsort(order)]


_FAMILIES = {
    "DbrxExperts": ExpertParallelPlan(),  # tensors [experts * inner, H]
    "Llama4TextMoe": ExpertParallelPlan(experts="experts", forward=_llama4, compute=_llama4_compute),
}


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
