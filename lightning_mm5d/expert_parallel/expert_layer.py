"""Finds the experts of a module that ranks share, and says which rank holds which of them.

It refuses a modality with `ep_size` that has no experts it knows or some that it does not know, experts whose tensors
are not theirs alone, buffers in experts, one module for several experts, and fewer experts than ranks.

Low-rank adapters of PEFT on experts that ranks share (`target_parameters` of its `LoraConfig`).

PEFT wraps the experts and adds the product of two factors to a tensor of all experts while their forward runs. In a
step a rank has its own experts alone, so the product is made of their parts of the factors. The factors themselves are
small and whole on every rank: their gradients are those of a rank's experts, and are summed over ranks as others are.

It refuses adapters where each expert is divided as well, and where parameters are gathered layer by layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MethodType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError, nearest, one_of
from lightning_mm5d.config.imported import imported
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.expert_parallel.expert_lookup import LISTS, ExpertParallelPlan, Found, find_plans
from lightning_mm5d.layout.even_split import even_ranges
from lightning_mm5d.partition import Partition
from lightning_mm5d.sharded.removable import put
from lightning_mm5d.sharded.shards import Range

_BASE = "base_layer"


def adapters_around(root: nn.Module, path: str) -> dict[str, nn.Module]:
    """Return the wrappers of the experts at `path` by their paths, the inner one first.

    Experts at ``experts.base_layer.base_layer`` with two wrapped tensors have the wrappers ``experts.base_layer`` and
    ``experts``.
    """
    kind, found = imported("peft.tuners.lora.layer", "ParamWrapper"), dict[str, nn.Module]()
    while kind is not None and path.endswith(f".{_BASE}"):
        path = path.removesuffix(f".{_BASE}")
        wrapper = root.get_submodule(path)
        if not isinstance(wrapper, kind):
            break
        found[path] = wrapper
    return found


def factors_of(adapters: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the names of the parameters of some wrappers, without those of what they wrap."""
    for path, wrapper in adapters.items():
        for name, _ in wrapper.named_parameters():
            if not name.startswith(f"{_BASE}."):
                yield f"{path}.{name}"


def check_adapters(adapters: Mapping[str, nn.Module], name: str, modality: Modality) -> None:
    """Refuse adapters of experts in layouts that would compute something else.

    Raises:
        ConfigError: each expert is divided over tensor parallel ranks, or parameters are gathered layer by layer.
    """
    for path in adapters:
        if modality.expert_tp_size > 1:
            rule = f"An adapter of PEFT is on the tensors of {path}, and their parts have none"
            raise ConfigError(f"modalities.{name}.expert_tp_size", modality.expert_tp_size, rule, "Use 1")
        if modality.reshard_after_forward:
            rule = f"The factors of the adapter on {path} are used where the layer does not run, for tokens of others"
            raise ConfigError(f"modalities.{name}.reshard_after_forward", True, rule, "Use False, or no adapter there")


class Adapters:
    """The adapters of the experts of one layer.

    Args:
        wrappers: of the experts, the inner one first.
        number: of experts.
        own: those of this rank.
        is_own: whether the experts have the rows of this rank alone at the moment.
    """

    def __init__(self, wrappers: Sequence[nn.Module], number: int, own: Range, is_own: Callable[[], bool]) -> None:
        self._wrappers: Sequence[Any] = wrappers
        self._number, self._own, self._is_own = number, own, is_own

    def patch(self) -> Iterator[Callable[[], object]]:
        """Let wrappers leave the experts as they are where these have own rows; yield what undoes it."""
        for wrapper in self._wrappers:

            def forward(module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
                if not self._is_own() or (module.disable_adapters and module.merged) or kwargs.get("adapter_names"):
                    return type(module).forward(module, x, *args, **kwargs)
                return module.base_layer(x, *args, **kwargs)

            yield put(wrapper, "forward", MethodType(forward, wrapper))

    def adapted(self, experts: nn.Module) -> dict[str, Tensor]:
        """Return the tensors of this rank's experts that have adapters, with these added, by their names."""
        found = dict[str, Tensor]()
        for wrapper in self._wrappers:
            if wrapper.disable_adapters or wrapper.merged:
                continue
            for adapter in wrapper.active_adapters:
                if adapter in wrapper.lora_A:
                    name = wrapper.parameter_name
                    before = found.get(name, getattr(experts, name))
                    found[name] = before + self._delta(wrapper, adapter)
        return found

    def _delta(self, wrapper: Any, adapter: str) -> Tensor:
        """What an adapter adds to the tensor of this rank's experts."""
        start, stop = self._own
        first = min(start, self._number - 2)  # PEFT takes a tensor of one expert for that of a linear layer
        last = max(stop, first + 2)
        delta: Tensor = type(wrapper).get_delta_weight(_Cut(wrapper, adapter, self._number, first, last), adapter)
        return delta[start - first : stop - first]


class _Cut:
    """A wrapper with the factors of some of its experts."""

    def __init__(self, wrapper: Any, adapter: str, number: int, first: int, last: int) -> None:
        self._wrapper, self.num_experts = wrapper, last - first
        down, up = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
        # PEFT has the experts first among the rows of one factor, and last among the columns of the other
        down = down.unflatten(0, (number, -1))[first:last].flatten(0, 1)
        up = up.unflatten(1, (-1, number))[..., first:last].flatten(1)
        self.lora_A, self.lora_B = ({adapter: SimpleNamespace(weight=one)} for one in (down, up))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapper, name)


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


def find_experts(root: nn.Module, partition: Partition, modalities: Mapping[str, Modality]) -> dict[str, ExpertLayer]:
    """Return the experts that ranks share, by path, in the order of the module.

    Args:
        root: the LightningModule; the meta device will do.
        partition: which stage uses which parameter.
        modalities: the configuration.

    Raises:
        ConfigError: a modality has nothing that its ranks could share, experts that nothing knows, too few, or adapters
            on these that its layout refuses.
    """
    degrees = {name: modality.ep_size for name, modality in modalities.items() if modality.ep_size > 1}
    if not degrees:
        return {}
    lists = [path for path in partition.layers.values() if path]
    plans, unknown = find_plans(root, lambda path: any(path.startswith(f"{one}.") for one in lists))
    found: dict[str, ExpertLayer] = {}
    order = {path: place for place, (path, _) in enumerate(root.named_modules())}
    for one in plans:
        names = [name for name, _ in _inside(root, one.path).named_parameters(one.path)]
        for modality in _users(partition, names) & degrees.keys():
            _check_users(partition, names, one, modality, degrees[modality])
            if one.path not in order:
                rule = f"The experts of {one.called} are those of another layer too, and a plan is for one layer's own"
                fix = "Register the plan for the module of experts, or use ep_size=1"
                raise ConfigError(f"modalities.{modality}.ep_size", degrees[modality], rule, fix)
            found[one.path] = _layer(root, one, modality, modalities[modality])
    for path in unknown:
        names = [name for name, _ in root.get_submodule(path).named_parameters(path)]
        for modality in _users(partition, names) & degrees.keys():
            cls = type(root.get_submodule(path)).__name__
            rule = f"{path} ({cls}) seems to hold experts, and nothing says how tokens come to them"
            fix = (
                f"Say it by register_expert_parallel_plan({cls!r}, ExpertParallelPlan(...)); None as the plan leaves "
                "it whole; or use ep_size=1"
            )
            raise ConfigError(f"modalities.{modality}.ep_size", degrees[modality], rule, fix)
    for name, degree in degrees.items():
        if not any(layer.modality == name for layer in found.values()):
            rule = f"{name!r} has no experts that are known, which ranks could share"
            raise ConfigError(f"modalities.{name}.ep_size", degree, rule, "Leave it unset")
    return dict(sorted(found.items(), key=lambda item: order[item[0]]))


def _layer(root: nn.Module, one: Found, modality: str, fields: Modality) -> ExpertLayer:
    experts, degree = _inside(root, one.path), fields.ep_size
    names, of_expert = tuple(name for name, _ in experts.named_parameters(one.path)), dict[str, int]()
    number = (one.plan or ExpertParallelPlan()).count(experts)
    if isinstance(experts, LISTS):
        for place, (key, child) in enumerate(experts.named_children()):
            of_expert |= {name: place for name, _ in child.named_parameters(f"{one.path}.{key}")}
    shapes = {name: parameter.shape for name, parameter in experts.named_parameters(one.path)}
    wrong = [
        name for name, shape in shapes.items() if not shape or (name not in of_expert and shape[0] % (number or 1))
    ]
    if number is None or wrong or not names:
        what = f"{wrong[0]} of shape {list(shapes[wrong[0]])}" if wrong else type(experts).__name__
        rule = (
            f"{one.path} has {number or 'no number of'} experts, with equal parts of the first dim of every tensor; "
            f"got {what}"
        )
        fix = "Name the attribute with their number in its ExpertParallelPlan, or use ep_size=1"
        raise ConfigError(f"modalities.{modality}.ep_size", degree, rule, fix)
    if one.plan is None and fields.cp_size > 1:
        rule = (
            f"{one.path} calls each expert where its tokens need it, and ranks of one sequence must call the same ones"
        )
        cls = type(root.get_submodule(one.path.rpartition(".")[0])).__name__
        fix = f"Use ep_size=1 or cp_size=1, or register_expert_parallel_plan({cls!r}, ExpertParallelPlan(...))"
        raise ConfigError(f"modalities.{modality}.ep_size", degree, rule, fix)
    _check_alone(root, one.path, modality, degree)
    _check_contents(experts, one.path, modality, degree)
    adapters = adapters_around(root, one.path)
    check_adapters(adapters, modality, fields)
    layer = ExpertLayer(
        one.path,
        modality,
        number,
        degree,
        names,
        factors=tuple(factors_of(adapters)),
        called=one.called,
        plan=one.plan,
        lengths={name: shape[0] for name, shape in shapes.items()},
        of_expert=of_expert,
    )
    _check_number(layer)
    return layer


def _inside(root: nn.Module, path: str) -> nn.Module:
    try:
        return root.get_submodule(path)
    except AttributeError:
        rule = "The experts of an ExpertParallelPlan are a module, by its path from an instance of the class"
        raise ConfigError("register_expert_parallel_plan", path, rule, "Name the module in `experts`") from None


def _users(partition: Partition, names: Sequence[str]) -> set[str]:
    return {stage.modality for name in names for stage in partition.owners.get(name, ())}


def _check_users(partition: Partition, names: Sequence[str], one: Found, modality: str, degree: int) -> None:
    users = sorted(_users(partition, names))
    if len(users) > 1:
        rule = f"{one.path} is used by {one_of(users).replace(' or ', ' and ')}, and experts are of one modality"
        raise ConfigError(f"modalities.{modality}.ep_size", degree, rule, "Use ep_size=1")


def _check_alone(root: nn.Module, path: str, modality: str, degree: int) -> None:
    """Refuse a tensor of experts that another module uses too, or two of them."""
    held = {id(parameter): name for name, parameter in root.get_submodule(path).named_parameters(path)}
    uses = Counter(id(p) for module in root.modules() for p in module.parameters(recurse=False) if id(p) in held)
    for key, count in uses.items():
        if count > 1:
            rule = f"{held[key]} is the tensor of {count} modules, and what ranks share of experts is of one"
            raise ConfigError(f"modalities.{modality}.ep_size", degree, rule, "Untie it, or use ep_size=1")


def _check_contents(experts: nn.Module, path: str, modality: str, degree: int) -> None:
    """Refuse buffers in experts, and a module that is several experts of a list."""
    field = f"modalities.{modality}.ep_size"
    buffer = next((name for name, _ in experts.named_buffers(path)), None)
    if buffer is not None:  # its entries are not those of own experts, and what own tokens write is on this rank alone
        rule = f"{buffer} is a buffer in experts, and ranks share the parameters of these alone"
        raise ConfigError(field, degree, rule, "Keep it in the module around them, or use ep_size=1")
    if isinstance(experts, LISTS) and len({*experts.children()}) < len(experts):
        rule = f"{path} has one module for several of its {len(experts)} experts, and ranks share modules"
        raise ConfigError(field, degree, rule, "Use a module for each expert, or ep_size=1")


def has_shared_expert(root: nn.Module, path: str) -> bool:
    """Whether the block around some experts has an expert that all tokens go to."""
    block = root.get_submodule(path.rpartition(".")[0])
    return any(getattr(block, name, None) is not None for name in ("shared_expert", "shared_experts"))


def parameters_of(layers: Mapping[str, ExpertLayer]) -> Iterator[tuple[str, ExpertLayer]]:
    """Yield the name of each parameter of some experts, with these."""
    for layer in layers.values():
        for name in layer.parameters:
            yield name, layer


def _check_number(layer: ExpertLayer) -> None:
    if layer.number < layer.degree:
        fits = nearest(layer.degree, lambda n: n <= layer.number)
        rule = f"{layer.path} has {layer.number} experts, and each rank holds one or more"
        raise ConfigError(f"modalities.{layer.modality}.ep_size", layer.degree, rule, f"Use {one_of(fits)}")
