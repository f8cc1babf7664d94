"""Finds the experts of a module that ranks share, and says which rank holds which of them.

For each module, the first of these that knows it: what the user registered, the interface of transformers' experts, the
table of families, lists of modules that are called with their own rows.

It refuses a modality with `ep_size` that has no experts it knows or some that it does not know, experts whose tensors
are not theirs alone, buffers in experts, one module for several experts, and fewer experts than ranks.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError, nearest, one_of
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.engine.run_groups import Groups, Wishes
from lightning_mm5d.expert_parallel import (
    INTERFACE,
    LISTS,
    REGISTERED,
    Exchange,
    ExpertLayer,
    ExpertParallelPlan,
    holds_experts,
)
from lightning_mm5d.features.shared_experts.held_experts import (
    ExpertGroups,
    adapters_around,
    check_adapters,
    factors_of,
)
from lightning_mm5d.features.shared_experts.shared_experts import SharedExperts
from lightning_mm5d.features.shared_experts.token_exchange import TokenGroup
from lightning_mm5d.partition import Partition
from lightning_mm5d.partition.parts import is_in, joined
from lightning_mm5d.plan.holdings import DataShards
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.collectives import TensorGroup


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
    plans, unknown = find_plans(root, lambda path: any(path.startswith(f"{prefix}.") for prefix in lists))
    layers: dict[str, ExpertLayer] = {}
    order = {path: place for place, (path, _) in enumerate(root.named_modules())}
    for match in plans:
        names = [name for name, _ in _inside(root, match.path).named_parameters(match.path)]
        users = sorted(partition.users(*names))
        for modality in degrees.keys() & users:
            if len(users) > 1:
                rule = f"{match.path} is used by {' and '.join(users)}, and experts are of one modality"
                raise ConfigError(f"modalities.{modality}.ep_size", degrees[modality], rule, "Use ep_size=1")
            if match.path not in order:
                rule = (
                    f"The experts of {match.called} are those of another layer too, and a plan is for one layer's own"
                )
                fix = "Register the plan for the module of experts, or use ep_size=1"
                raise ConfigError(f"modalities.{modality}.ep_size", degrees[modality], rule, fix)
            layers[match.path] = _layer(root, match, modality, modalities[modality])
    for path in unknown:
        names = [name for name, _ in root.get_submodule(path).named_parameters(path)]
        for modality in partition.users(*names) & degrees.keys():
            cls = type(root.get_submodule(path)).__name__
            rule = f"{path} ({cls}) seems to hold experts, and nothing says how tokens come to them"
            fix = (
                f"Say it by register_expert_parallel_plan({cls!r}, ExpertParallelPlan(...)); None as the plan leaves "
                "it whole; or use ep_size=1"
            )
            raise ConfigError(f"modalities.{modality}.ep_size", degrees[modality], rule, fix)
    for name, degree in degrees.items():
        if not any(layer.modality == name for layer in layers.values()):
            rule = f"{name!r} has no experts that are known, which ranks could share"
            raise ConfigError(f"modalities.{name}.ep_size", degree, rule, "Leave it unset")
    return dict(sorted(layers.items(), key=lambda item: order[item[0]]))


def _layer(root: nn.Module, match: LocatedExperts, modality: str, fields: Modality) -> ExpertLayer:
    experts, degree = _inside(root, match.path), fields.ep_size
    names, of_expert = tuple(name for name, _ in experts.named_parameters(match.path)), dict[str, int]()
    number = (match.plan or ExpertParallelPlan()).count(experts)
    if isinstance(experts, LISTS):
        for place, (key, child) in enumerate(experts.named_children()):
            of_expert |= {name: place for name, _ in child.named_parameters(f"{match.path}.{key}")}
    shapes = {name: parameter.shape for name, parameter in experts.named_parameters(match.path)}
    wrong = [
        name for name, shape in shapes.items() if not shape or (name not in of_expert and shape[0] % (number or 1))
    ]
    if number is None or wrong or not names:
        what = f"{wrong[0]} of shape {list(shapes[wrong[0]])}" if wrong else type(experts).__name__
        rule = (
            f"{match.path} has {number or 'no number of'} experts, with equal parts of the first dim of every tensor; "
            f"got {what}"
        )
        fix = "Name the attribute with their number in its ExpertParallelPlan, or use ep_size=1"
        raise ConfigError(f"modalities.{modality}.ep_size", degree, rule, fix)
    if match.plan is None and fields.cp_size > 1:
        rule = (
            f"{match.path} calls each expert where its tokens need it, and ranks of one sequence must call the same "
            "ones"
        )
        cls = type(root.get_submodule(match.path.rpartition(".")[0])).__name__
        fix = f"Use ep_size=1 or cp_size=1, or register_expert_parallel_plan({cls!r}, ExpertParallelPlan(...))"
        raise ConfigError(f"modalities.{modality}.ep_size", degree, rule, fix)
    _check_alone(root, match.path, modality, degree)
    _check_contents(experts, match.path, modality, degree)
    adapters = adapters_around(root, match.path)
    check_adapters(adapters, modality, fields)
    if number < degree:
        fits = nearest(degree, lambda n: n <= number)
        rule = f"{match.path} has {number} experts, and each rank holds one or more"
        raise ConfigError(f"modalities.{modality}.ep_size", degree, rule, f"Use {one_of(fits)}")
    return ExpertLayer(
        match.path,
        modality,
        number,
        degree,
        names,
        factors=tuple(factors_of(adapters)),
        called=match.called,
        plan=match.plan,
        lengths={name: shape[0] for name, shape in shapes.items()},
        of_expert=of_expert,
    )


def _inside(root: nn.Module, path: str) -> nn.Module:
    try:
        return root.get_submodule(path)
    except AttributeError:
        rule = "The experts of an ExpertParallelPlan are a module, by its path from an instance of the class"
        raise ConfigError("register_expert_parallel_plan", path, rule, "Name the module in `experts`") from None


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


def expert_groups(
    groups: Groups | Wishes, plan: Plan, shards: DataShards, tensor: Mapping[str, TensorGroup]
) -> dict[str, ExpertGroups]:
    """Return the groups of this rank for the experts of each of its stages, by their path.

    Args:
        groups: makes them.
        plan: all stages.
        shards: of the plan.
        tensor: the tensor parallel ranks of this one by modality.
    """
    layer_groups = dict[str, ExpertGroups]()
    for stage in plan.topology.members:
        held = shards.expert_layers(stage)
        beside = dict.fromkeys(shards.sharing_experts(stage, rank) for rank in plan.topology.ranks_of(stage))
        hosts = {ranks: groups.get(ranks, "rounds of experts", backend="gloo") for ranks in beside if ranks}
        for layer in held:
            blocks = dict.fromkeys(shards.expert_block(layer, rank) for rank in plan.topology.ranks_of(stage))
            token_groups = {ranks: groups.get(ranks, "tokens") for ranks in blocks}
            for ranks, group in token_groups.items():
                if group is None:
                    continue
                around, host = next((around, host) for around, host in hosts.items() if host is not None)
                places = tuple(around.index(rank) for rank in ranks)
                copies = tensor.get(layer.modality) if layer.parameters[0] in plan.division.shared else None
                layer_groups[layer.path] = ExpertGroups(TokenGroup(group), places, host, copies)
    return layer_groups


EXPERTS = SharedExperts


# --- which modules hold experts ---

_OTHERS = ("shared", "gate", "rout", "norm", "bias", "scale", "statics")  # names of what is beside experts
_OVER_SAMPLES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class LocatedExperts(NamedTuple):
    """Experts in a module.

    Attributes:
        called: path of the module whose forward brings tokens to them.
        path: of the module that holds them.
        plan: how tokens come to them; None where each module of a list is called with its own rows.
    """

    called: str
    path: str
    plan: ExpertParallelPlan | None


def find_plans(root: nn.Module, in_layers: Callable[[str], bool]) -> tuple[list[LocatedExperts], list[str]]:
    """Return the experts of a module, and the paths of modules that are likely experts that nothing knows.

    Args:
        root: the LightningModule; the meta device will do.
        in_layers: whether the module at a path is in one of the layers of a modality.
    """
    matches, closed = list[LocatedExperts](), list[str]()
    for path, module in root.named_modules():
        key = _registered(type(module))
        if key is not None:
            closed.append(path)
            if (plan := REGISTERED[key]) is not None:
                matches.append(LocatedExperts(path, joined(path, plan.experts), plan))
    paths = {name: module for name, module in root.named_modules()}
    for path, module in paths.items():
        if any(is_in(path, outer) for outer in closed):
            continue
        plan = INTERFACE if holds_experts(module) else _FAMILIES.get(type(module).__name__)
        if plan is not None or (_is_list(module) and _is_named(path, module, paths, in_layers)):
            closed.append(path)
            matches.append(LocatedExperts(path, joined(path, plan.experts if plan else ""), plan))
    parents = {match.path for match in matches}
    unknown = [
        path
        for path, module in paths.items()
        if not any(is_in(path, outer) for outer in closed)
        and not any(is_in(parent, path) for parent in parents)
        and _is_likely(path, module, paths)
    ]
    return matches, unknown


def _is_list(module: nn.Module) -> bool:
    """Whether a module is a list of modules that each map one tensor to another, each of them by itself.

    Which rows such a module is called with is the business of the layer around it. A module that normalizes over
    samples, or whose results are not as wide as its rows, is none.
    """
    return isinstance(module, LISTS) and len(module) > 1 and all(_maps_rows(child) for child in module.children())


def _maps_rows(module: nn.Module) -> bool:
    arguments = list(inspect.signature(type(module).forward).parameters.values())[1:]
    needed = [arg for arg in arguments if arg.default is arg.empty and arg.kind is not arg.VAR_KEYWORD]
    linears = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    is_plain = isinstance(module, (nn.Linear, nn.Sequential)) and bool(linears)
    return (
        len(needed) == 1
        and needed[0].kind is not needed[0].VAR_POSITIONAL
        and not any(isinstance(layer, _OVER_SAMPLES) for layer in module.modules())
        and not (is_plain and linears[0].in_features != linears[-1].out_features)
    )


def _is_named(path: str, module: nn.Module, paths: dict[str, nn.Module], in_layers: Callable[[str], bool]) -> bool:
    """Whether a list is named as experts are, or is of one class, in a layer, beside a router to as many."""
    if not any(True for _ in module.parameters()) or "shared" in _names(path, module):
        return False
    parent = paths[path.rpartition(".")[0]]
    children = list(module.children())
    return "expert" in _names(path, module) or (
        in_layers(path) and len({type(child) for child in children}) == 1 and _routes(parent, len(children))
    )


def _routes(module: nn.Module, number: int) -> bool:
    own_shapes = [parameter.shape for parameter in module.parameters(recurse=False)]
    beside = [child for child in module.children() if not isinstance(child, LISTS)]
    shapes_beside = [parameter.shape for child in beside for parameter in child.parameters()]
    return any(len(shape) == 2 and number in shape for shape in own_shapes) or any(
        len(shape) == 2 and shape[0] == number for shape in shapes_beside
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
    stacked = {param.shape[0] for param in module.parameters(recurse=False) if param.dim() > 2 and param.shape[0] > 1}
    return any(_routes(module, number) or _routes(parent, number) or _counts(module, number) for number in stacked)


def _counts(module: nn.Module, number: int) -> bool:
    return any("expert" in name and value == number for name, value in vars(module).items() if isinstance(value, int))


def _registered(cls: type) -> type[nn.Module] | str | None:
    keys: Iterator[type | str] = (key for owner in cls.__mro__ for key in (owner, owner.__name__))
    return next((key for key in keys if key in REGISTERED), None)


def _names(path: str, module: nn.Module) -> str:
    return f"{path.rpartition('.')[2]} {type(module).__name__}".lower()


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
    results = []
    for part, gate_up, down in zip(parts, experts.gate_up_proj, experts.down_proj, strict=True):
        gate, up = (part @ gate_up).chunk(2, dim=-1)
        results.append((up * experts.act_fn(gate)) @ down)
    return torch.cat(results)[torch.argsort(order)]


_FAMILIES = {
    "DbrxExperts": ExpertParallelPlan(),  # tensors [experts * inner, H]
    "Llama4TextMoe": ExpertParallelPlan(experts="experts", forward=_llama4, compute=_llama4_compute),
}
