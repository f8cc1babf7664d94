"""Resolves plans: which parameter of a module is sharded how, and what each sharded module does.

The result is plain data about names, shapes and ranks, the same on all ranks and made before any process exists. The
vocabulary is sharded too: tables that a Hugging Face model calls its input and output embeddings, or that say so
(`lightning_mm5d.nn`), tied or not.

What cannot be sharded stays full, every rank computes it, and `Division.whole` lists it. It refuses plans
that do not fit their modules, projections that are not plain linear layers, and adapters that it does not know.

**Units** are what the parts of a plan count: who gets which of them, and which indices of a tensor these are. It
refuses parts that the plan does not count, and sizes that are not made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, Protocol

import torch.distributed as dist
from torch import nn
from transformers.pytorch_utils import Conv1D  # the projections of GPT-2 and its kin

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.layout.layout import even_blocks, even_ranges
from lightning_mm5d.nn import Embedding, Linear
from lightning_mm5d.partition.parts import tensors_of
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.sharded.shards import HeadRanges, Range, Shard, heads_of, joined, scaled
from lightning_mm5d.source.reads import weights_read
from lightning_mm5d.tensor_parallel.family_plans import TensorParallelPlan
from lightning_mm5d.tensor_parallel.plan_rules import linear_of
from lightning_mm5d.tensor_parallel.region import Region


class OwnHeads(int):
    """This rank's number of heads, for a module that divides the full width of its input by the number of all heads."""

    whole: int

    @classmethod
    def of(cls, count: int, whole: int) -> OwnHeads:
        """`count` of `whole` heads."""
        heads = cls(count)
        heads.whole = whole
        return heads

    def __rfloordiv__(self, width: int) -> int:
        return width // self.whole


class Units:
    """What the parts of one plan count, and who gets which of them.

    Args:
        path: of the module.
        module: what the plan is relative to.
        plan: says what is made of which parts.
        degree: number of ranks.

    Attributes:
        why_whole: why the module cannot be sharded; empty where it can.
    """

    def __init__(self, path: str, module: nn.Module, plan: TensorParallelPlan, degree: int) -> None:
        self._path, self._module, self._plan, self._degree = path, module, plan, degree
        self.why_whole = ""
        self._held: tuple[HeadRanges, ...] = ()
        self._query = self._key_value = 0
        if plan.heads is None:
            return
        self._query = _number(module, plan.heads)
        self._key_value = self._query if plan.key_value_heads is None else _number(module, plan.key_value_heads)
        held = heads_of(self._query, self._key_value, degree)
        if held is None:
            kinds = f"{self._query} query and {self._key_value} key and value" * (self._query != self._key_value)
            self.why_whole = f"its {kinds or self._query} heads cannot be shared by {degree} ranks"
        else:
            self._held = held

    def _ranges(self, part: str) -> tuple[Range, ...]:
        if part not in ("heads", "key_value_heads", "groups"):
            raise ConfigError(self._path, part, "A part is heads, key_value_heads, groups or width", "Use one of these")
        if not self._held:
            raise ConfigError(self._path, part, "A plan that counts heads names the attribute `heads`", "Add it")
        return tuple(held.query if part == "heads" else held.key_value for held in self._held)

    def lengths(self, part: str) -> tuple[int, ...]:
        """Units on each rank."""
        return tuple(stop - start for start, stop in self._ranges(part))

    def attributes(self) -> dict[str, tuple[int, ...]]:
        """Values of attributes on each rank."""
        values: dict[str, tuple[int, ...]] = {}
        plan = self._plan
        counted = {plan.key_value_heads: "key_value_heads", plan.heads: "heads"}
        paths = {path: part for path, part in counted.items() if isinstance(path, str)}
        for attribute, part in (paths | dict(plan.local)).items():
            value = _number(self._module, attribute)
            if part == "width":
                values[attribute] = tuple(stop - start for start, stop in even_ranges(value, self._degree))
            elif part == "group_size":
                lengths = zip(self.lengths("heads"), self.lengths("key_value_heads"), strict=True)
                values[attribute] = tuple(query // key_value for query, key_value in lengths)
            else:
                units = self._query if part == "heads" else self._key_value
                values[attribute] = tuple(value * length // units for length in self.lengths(part))
            if plan.whole_width and attribute == plan.heads:
                values[attribute] = tuple(OwnHeads.of(count, value) for count in values[attribute])
        return values

    def shard(self, path: str, dim: int, size: int, parts: Sequence[str]) -> Shard:
        """The shard of a dim that is made of `parts`, one after the other."""
        if parts == ("groups",):
            return self._groups(path, dim, size)
        units = [self._query if part == "heads" else self._key_value if part != "width" else 1 for part in parts]
        width, rest = divmod(size, max(sum(units), 1))
        if rest or not parts:
            rule = (
                f"Its size along dim {dim} is not made of {' + '.join(parts) or 'parts'}, {sum(units)} units of one "
                "width"
            )
            raise ConfigError(path, size, rule, "Correct the tensor parallel plan of its module")
        offset, ranges = 0, []
        for part, count in zip(parts, units, strict=True):
            if part == "width":
                ranges.append([scaled(held, 1, offset) for held in even_ranges(width, self._degree)])
            else:
                ranges.append([scaled(held, width, offset) for held in self._ranges(part)])
            offset += count * width
        return joined(ranges, dim, size)

    def _groups(self, path: str, dim: int, size: int) -> Shard:
        """Rows that have, for each key and value head, its query heads and then its key and its value."""
        each = self._query // max(self._key_value, 1)
        width, rest = divmod(size, max(self._key_value * (each + 2), 1))
        if rest or not self._held:
            raise ConfigError(path, size, f"Its size is not that of {self._key_value} groups of heads", "Correct it")
        ranges: list[tuple[Range, ...]] = []
        for (first, last), (low, high) in self._held:
            held: list[Range] = []
            for head in range(low, high):
                start = head * (each + 2)
                a, b = max(first - head * each, 0), min(last - head * each, each)
                held += [scaled((start + a, start + b), width), scaled((start + each, start + each + 2), width)]
            ranges.append(tuple(held))
        return Shard(dim, size, tuple(ranges))


def _number(module: nn.Module, path: str | int) -> int:
    return int(attrgetter(path)(module) if isinstance(path, str) else path)


Kind = Literal["column", "row", "experts", "attention", "embedding", "head", "dropout", "own_dropout"]
_GETTERS = ("get_input_embeddings", "get_output_embeddings")
_ADAPTER_PARTS = ("base_layer", "lora_A", "lora_B")


@dataclass(frozen=True)
class Heads:
    """Arguments and results of an attention module that have an entry for each of its heads.

    Attributes:
        lengths: heads on each rank.
        arguments: dims of the heads by name of the argument, as in a plan.
        results: dims of the heads by position in the result.
    """

    lengths: tuple[int, ...]
    arguments: Mapping[str, int]
    results: Mapping[int, int]


class LayersInBlocks(Protocol):
    """Layers of one tensor parallel group whose tensors a feature shares out, in another way than along one dim."""

    def holds(self, path: str) -> bool:
        """Whether `path` is in one of the layers."""

    def lines(
        self, ranks: Sequence[int], get: Callable[[Sequence[int], str], dist.ProcessGroup | None]
    ) -> Mapping[str, TensorGroup]:
        """Make all groups among the `ranks` that share the layers; return those that this rank is in.

        Args:
            ranks: global ranks.
            get: makes the group of some of them, with a name; None where this rank is in another one.
        """

    def attach(
        self,
        root: nn.Module,
        division: Division,
        is_here: Callable[[str], bool],
        region: Region,
        lines: Mapping[str, TensorGroup],
    ) -> Callable[[], None]:
        """Let the layers of `root` that are here compute on this rank's blocks; return what undoes it."""

    @property
    def costs(self) -> Any:
        """What the layers send and keep, as `tools.planner` asks (`copies`, `sent`, `gathered`, `trace`)."""


@dataclass(frozen=True)
class Division:
    """What tensor parallelism makes of a module.

    Attributes:
        degrees: ranks of each tensor parallel group by name.
        shards: of every sharded parameter and buffer, tied ones under each of their names.
        shared: names of parameters that are full on every rank and whose gradients are summed over ranks.
        roles: what modules do, by path: ``column`` and ``row`` linear layers, ``experts``, an ``attention`` that torch
            has written, the vocabulary's ``embedding`` and ``head``, and the dropouts of adapters: ``dropout`` of full
            values at a column layer, ``own_dropout`` of each rank's part at a row layer.
        heads: of attention modules whose arguments or results count heads, by path.
        local: values of attributes on each rank, by path of the module and name.
        groups: name of the tensor parallel group of every path and name in the other fields.
        whole: modules that a plan would shard and that stay full, by path, with the reason.
        in_blocks: groups whose layers are shared out in another way, by name of the group.
        multiples: of which the number of rows in the products of a head is one, by its path; 1 where it is not said.
    """

    degrees: Mapping[str, int] = field(default_factory=dict)
    shards: Mapping[str, Shard] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()
    roles: Mapping[str, Kind] = field(default_factory=dict)
    heads: Mapping[str, Heads] = field(default_factory=dict)
    local: Mapping[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    in_blocks: Mapping[str, LayersInBlocks] = field(default_factory=dict)
    multiples: Mapping[str, int] = field(default_factory=dict)


def resolve(
    root: nn.Module,
    plans: Mapping[str, Sequence[TensorParallelPlan]],
    place: Callable[[str], tuple[str, int] | None],
    full_embeddings: Collection[str] = (),
    parts: Callable[[str, int], int] = lambda path, degree: degree,
    multiples: Mapping[str, int] | None = None,
) -> Division:
    """Return how `root` is sharded.

    Args:
        root: the LightningModule; the meta device will do.
        plans: by path of the module that they are relative to.
        place: gives, for a parameter's name, the tensor parallel group that holds it and the number of its ranks; None
            where several groups of different sizes do.
        full_embeddings: the groups whose ranks each hold input embeddings in full.
        parts: into how many parts the module at a path is divided, given the number of its ranks.
        multiples: of which the rows of vocabulary that a rank holds are one, but the last rank's, by name of the group.

    Raises:
        ConfigError: a plan does not fit its module, adapters are in the way, an embedding that should be full is
            tied to a head, or a vocabulary has too few such multiples.
    """
    resolver = _Resolver(root, place, full_embeddings, parts, multiples or {})
    for path, several in plans.items():
        for plan in several:
            resolver.add(path, plan)
    resolver.add_vocabulary()
    return resolver.result()


class _Resolver:
    def __init__(
        self,
        root: nn.Module,
        place: Callable[[str], tuple[str, int] | None],
        full_embeddings: Collection[str],
        parts: Callable[[str, int], int],
        multiples: Mapping[str, int],
    ) -> None:
        self._root, self._place, self._full_embeddings, self._parts = root, place, full_embeddings, parts
        self._multiples, self._aligned = multiples, dict[str, int]()
        self._degrees: dict[str, int] = {}
        self._shards: dict[str, Shard] = {}
        self._shared: set[str] = set()
        self._roles: dict[str, Kind] = {}
        self._heads: dict[str, Heads] = {}
        self._local: dict[tuple[str, str], tuple[int, ...]] = {}
        self._groups: dict[str, str] = {}
        self._whole: dict[str, str] = {}
        self._weights_read: frozenset[str] = frozenset()
        self._names: dict[int, list[str]] = {}
        for name, tensor in tensors_of(root):
            self._names.setdefault(id(tensor), []).append(name)

    def result(self) -> Division:
        return Division(
            self._degrees,
            self._shards,
            frozenset(self._shared),
            self._roles,
            self._heads,
            self._local,
            self._groups,
            self._whole,
            multiples=self._aligned,
        )

    # --- plans ---

    def add(self, path: str, plan: TensorParallelPlan) -> None:
        module = self._root.get_submodule(path)
        group = self._group(path, module)
        if group is None:
            return
        name, degree = group
        units = Units(path, module, plan, self._parts(path, degree))
        if units.why_whole:
            self._whole[path] = units.why_whole
            return
        self._degrees[name] = degree
        for key, parts in plan.column.items():
            self._linear(_join(path, key), "column", units, parts, name)
        for key, parts in plan.row.items():
            self._linear(_join(path, key), "row", units, parts, name)
        for key in plan.experts:
            self._set_role(_join(path, key), "experts", name)
        for key, (dim, *counted) in plan.parameters.items():
            full = _join(path, key)
            owner, _, attribute = full.rpartition(".")
            tensor = getattr(self._root.get_submodule(owner), attribute)
            self._divide(full, units.shard(full, int(dim), tensor.shape[int(dim)], tuple(map(str, counted))), name)
        for key in plan.shared:
            self._share(_join(path, key))
        for attribute, values in units.attributes().items():
            owner, _, last = attribute.rpartition(".")
            self._local[_join(path, owner), last] = values
            self._groups[_join(path, owner)] = name
        if plan.heads is not None:
            is_torch = isinstance(module, nn.MultiheadAttention)
            if is_torch:
                self._set_role(path, "attention", name)
            # Hugging Face's attentions return the weights of their heads after the attended values
            results = {} if is_torch else plan.results or {1: 1}
            self._heads[path] = Heads(units.lengths("heads"), plan.arguments, results)
            self._groups[path] = name
            for inner in {key.rpartition(".")[0] for key in plan.column} - {""}:
                full = _join(path, inner)  # and so does the part of it that has the projections
                self._heads.setdefault(full, Heads(units.lengths("heads"), {}, results))
                self._groups[full] = name

    def _linear(self, path: str, kind: Kind, units: Units, parts: Sequence[str], group: str) -> None:
        module = self._root.get_submodule(path)
        base_path = path
        if hasattr(module, "base_layer"):
            base_path = f"{path}.base_layer"
            self._adapters(path, module, kind, units, parts, group)
        self._one_linear(base_path, kind, units, parts, group)

    def _one_linear(self, path: str, kind: Kind, units: Units, parts: Sequence[str], group: str) -> None:
        module = self._root.get_submodule(path)
        if linear_of(module) is not module:
            rule = "A projection that is sharded over tensor parallel ranks is a linear layer"
            raise ConfigError(path, type(module).__name__, rule, "Use nn.Linear there, or tp_size=1")
        weight = module.weight
        is_conv = isinstance(module, Conv1D)
        dim = int(is_conv) if kind == "column" else int(not is_conv)
        shard = units.shard(path, dim, weight.shape[dim], parts)
        self._divide(f"{path}.weight", shard, group)
        if kind == "column" and module.bias is not None:
            self._divide(f"{path}.bias", Shard(0, shard.size, shard.ranges), group)
        self._set_role(path, kind, group)

    def _adapters(
        self, path: str, module: nn.Module, kind: Kind, units: Units, parts: Sequence[str], group: str
    ) -> None:
        """Shard the low-rank adapters (LoRA, as PEFT wraps them) of a linear layer as the layer is."""
        strange = {
            name
            for name, _ in module.named_parameters()
            if name.split(".")[0] not in _ADAPTER_PARTS or name.endswith("_embedding_A")
        } | {type(variant).__name__ for variant in getattr(module, "lora_variant", {}).values()}
        if hasattr(module, "parameter_name"):  # adds to the weight itself (target_parameters)
            strange.add(f"{type(module).__name__} of {module.parameter_name}")
        if strange:
            rule = f"Of adapters on sharded layers LoRA's two matrices are known, and this one has {sorted(strange)}"
            fix = "Use plain LoRA (no DoRA), leave these layers out of target_modules, or use tp_size=1"
            raise ConfigError(path, type(module).__name__, rule, fix)
        sharded = "lora_B" if kind == "column" else "lora_A"
        for key in getattr(module, sharded, {}):
            self._one_linear(f"{path}.{sharded}.{key}", kind, units, parts, group)
        for key, dropout in getattr(module, "lora_dropout", {}).items():
            if isinstance(dropout, nn.Dropout):
                self._set_role(f"{path}.lora_dropout.{key}", "dropout" if kind == "column" else "own_dropout", group)

    # --- the vocabulary ---

    def add_vocabulary(self) -> None:
        """Shard the tables that models name as input and output embeddings, or that say so, and use in no other way."""
        classes = {type(module) for module in self._root.modules()}
        self._weights_read = frozenset[str]().union(*(weights_read(cls) for cls in classes))
        for model in list(self._root.modules()):
            if isinstance(model, (Embedding, Linear)) and model.sharding == "vocabulary" and _is_table(model):
                self._add_table(model)
            for method in _GETTERS:
                table = self._table(model, method)
                if table is not None:
                    self._add_table(table)

    def _table(self, model: nn.Module, method: str) -> nn.Embedding | nn.Linear | None:
        if model is self._root or not callable(getattr(model, method, None)):
            return None
        try:
            table = getattr(model, method)()
        except (NotImplementedError, AttributeError):
            return None
        return table if _is_table(table) else None

    def _add_table(self, table: nn.Embedding | nn.Linear) -> None:
        weight = table.weight
        names = self._names.get(id(weight))
        if not names or names[0] in self._shards:
            return
        users: dict[str, Any] = {name: self._root.get_submodule(name.rpartition(".")[0]) for name in names}
        groups = {self._place(name) for name in names}
        group = groups.pop() if len(groups) == 1 else None
        if group is None or group[1] == 1 or weight.shape[0] < group[1] or not all(map(_is_table, users.values())):
            return
        name, degree = group
        read = self._weights_read.intersection((*_GETTERS, *(full.split(".")[-2] for full in names)))
        if read:
            self._whole[names[0]] = f"code takes it as the weight of {' and '.join(sorted(read))}"
            return
        lookups = [full for full, user in users.items() if isinstance(user, nn.Embedding)]
        if name in self._full_embeddings and lookups:
            if len(lookups) < len(users):
                head = next(full for full in users if full not in lookups)
                rule = f"{lookups[0]} is tied to {head}, a head whose classes the ranks share"
                fix = "Leave it out, or untie them (tie_word_embeddings: false in the model's config)"
                raise ConfigError(f"modalities.{name}.tensor.shard_embedding", False, rule, fix)
            return
        self._degrees[name] = degree
        shard = joined([self._rows(name, names[0], weight.shape[0], degree)], 0, weight.shape[0])
        for full, user in users.items():
            path = full.rpartition(".")[0]
            is_lookup = isinstance(user, nn.Embedding)
            self._set_role(path, "embedding" if is_lookup else "head", name)
            self._shards[full] = shard
            self._groups[full] = name
            if is_lookup and user.padding_idx is not None:  # -1 stands for none
                held = [rank_ranges[0] for rank_ranges in shard.ranges]
                places = (user.padding_idx - a if a <= user.padding_idx < b else -1 for a, b in held)
                self._local[path, "padding_idx"] = tuple(places)
            if not is_lookup:
                self._aligned[path] = self._multiples.get(name, 1)
                if user.bias is not None:
                    self._divide(f"{path}.bias", shard, name)

    def _rows(self, group: str, table: str, rows: int, degree: int) -> list[Range]:
        """The rows of each rank: as even as they go, in multiples where that is said."""
        multiple = self._multiples.get(group)
        if multiple is None:
            return even_ranges(rows, degree)
        if rows <= multiple * (degree - 1):
            field, most = f"modalities.{group}.tensor.make_vocab_size_divisible_by", (rows - 1) // (degree - 1)
            rule = f"{table!r} has {rows} rows, fewer than give each of {degree} ranks some in multiples of {multiple}"
            raise ConfigError(field, multiple, rule, f"Use {most} or less, or leave it unset")
        return even_blocks(rows, degree, multiple)

    # --- parameters ---

    def _set_role(self, path: str, kind: Kind, group: str) -> None:
        self._roles[path], self._groups[path] = kind, group

    def _divide(self, name: str, shard: Shard, group: str) -> None:
        owner, _, attribute = name.rpartition(".")
        tensor = getattr(self._root.get_submodule(owner), attribute)
        if id(tensor) not in self._names:
            rule = "Tensor parallel ranks share parameters, and this is computed from others (a weight norm, say)"
            raise ConfigError(name, "a tensor that is no parameter", rule, "Leave that out there, or use tp_size=1")
        for alias in self._names[id(tensor)]:
            self._groups[alias] = group
            if self._shards.setdefault(alias, shard) != shard:
                rule = "A parameter with two uses is sharded in one way, and their plans differ"
                raise ConfigError(alias, name, rule, "Untie it, or use tp_size=1")

    def _share(self, path: str) -> None:
        owner, _, attribute = path.rpartition(".")
        holder = self._root.get_submodule(owner)
        if attribute in holder._parameters:
            if holder._parameters[attribute] is not None:
                self._shared.update(self._names[id(holder._parameters[attribute])])
            return
        for parameter in self._root.get_submodule(path).parameters():
            self._shared.update(self._names[id(parameter)])

    def _group(self, path: str, module: nn.Module) -> tuple[str, int] | None:
        """The group that holds a module; None where there is nothing to shard."""
        first = next((name for name, _ in module.named_parameters(prefix=path, remove_duplicate=False)), None)
        group = None if first is None else self._place(first)
        return None if group is None or group[1] == 1 else group


def _is_table(module: object) -> bool:
    """Whether a module looks up rows of its weight, or multiplies by them, and nothing else."""
    if isinstance(module, nn.Embedding):
        has_more = any(parameter is not module.weight for parameter in module.parameters())
        return module.max_norm is None and not module.sparse and not has_more
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
