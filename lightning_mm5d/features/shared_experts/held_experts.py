"""The experts of one layer on one rank: what it computes with its own, and which rows travel to and from it.

Low-rank adapters of PEFT may be on them (`target_parameters` of its `LoraConfig`). PEFT wraps the experts and adds the
product of two factors to a tensor of all experts while their forward runs. In a step a rank has its own experts alone,
so the product is made of their parts of the factors. The factors themselves are small and whole on every rank: their
gradients are those of a rank's experts, and are summed over ranks as others are.

It refuses adapters where each expert is divided as well, and where parameters are gathered layer by layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError, imported
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.expert_parallel import LISTS, ExpertLayer, Products
from lightning_mm5d.features.shared_experts.token_exchange import Lengths, Round, TokenGroup
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.sharded.removable import put
from lightning_mm5d.sharded.shards import Range

_BASE = "base_layer"


def adapters_around(root: nn.Module, path: str) -> dict[str, nn.Module]:
    """Return the wrappers of the experts at `path` by their paths, the inner one first.

    Experts at ``experts.base_layer.base_layer`` with two wrapped tensors have the wrappers ``experts.base_layer`` and
    ``experts``.
    """
    kind, wrappers = imported("peft.tuners.lora.layer", "ParamWrapper"), dict[str, nn.Module]()
    while kind is not None and path.endswith(f".{_BASE}"):
        path = path.removesuffix(f".{_BASE}")
        wrapper = root.get_submodule(path)
        if not isinstance(wrapper, kind):
            break
        wrappers[path] = wrapper
    return wrappers


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
        if modality.tensor.expert_tp_size > 1:
            rule = f"An adapter of PEFT is on the tensors of {path}, and their parts have none"
            raise ConfigError(f"modalities.{name}.tensor.expert_tp_size", modality.tensor.expert_tp_size, rule, "Use 1")
        if modality.sharding.reshard_after_forward:
            rule = f"The factors of the adapter on {path} are used where the layer does not run, for tokens of others"
            fix = "Use False, or no adapter there"
            raise ConfigError(f"modalities.{name}.sharding.reshard_after_forward", True, rule, fix)


class Adapters:
    """The adapters of the experts of one layer.

    Args:
        wrappers: of the experts, the inner one first.
        number: of experts.
        local: those of this rank.
        is_own: whether the experts have the rows of this rank alone at the moment.
    """

    def __init__(self, wrappers: Sequence[nn.Module], number: int, local: Range, is_own: Callable[[], bool]) -> None:
        self._wrappers: Sequence[Any] = wrappers
        self._number, self._local, self._is_own = number, local, is_own

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
        tensors = dict[str, Tensor]()
        for wrapper in self._wrappers:
            if wrapper.disable_adapters or wrapper.merged:
                continue
            for adapter in wrapper.active_adapters:
                if adapter in wrapper.lora_A:
                    name = wrapper.parameter_name
                    before = tensors.get(name, getattr(experts, name))
                    tensors[name] = before + self._delta(wrapper, adapter)
        return tensors

    def _delta(self, wrapper: Any, adapter: str) -> Tensor:
        """What an adapter adds to the tensor of this rank's experts."""
        start, stop = self._local
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
        self.lora_A, self.lora_B = ({adapter: SimpleNamespace(weight=factor)} for factor in (down, up))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapper, name)


class ExpertGroups(NamedTuple):
    """The groups of one rank that share the experts of a layer.

    Attributes:
        tokens: between which rows travel.
        places: of these ranks among those of `host`.
        host: the ranks that run the layer's stage together, with messages in host memory.
        copies: the tensor parallel ranks that hold the same experts; None where they hold other parts of them.
    """

    tokens: TokenGroup
    places: tuple[int, ...]
    host: dist.ProcessGroup
    copies: TensorGroup | None


class HeldExperts:
    """The experts of one layer on one rank.

    Args:
        root: the LightningModule, before its forwards are patched.
        layer: the experts.
        place: of the layer among those of its stage.
        groups: that share it.
        adapters: on the experts.

    Attributes:
        recomputed: whether the layer is computed again in its backward, which is known after the first one.
        overlaps: whether results may still be under way when the experts return.
        tokens: rows of each expert since the last report.
        own_module: that holds this rank's experts.
        called: modules whose forwards bring tokens to experts: of a list without a plan its members, else one.
    """

    def __init__(
        self, root: nn.Module, layer: ExpertLayer, place: int, groups: ExpertGroups, adapters: Adapters
    ) -> None:
        self.path, self.place, self.groups, self.plan = layer.path, place, groups, layer.plan
        self.number, self.ranges = layer.number, layer.ranges
        self.recomputed = self.overlaps = False
        self.tokens = [0] * layer.number
        self._module = root.get_submodule(layer.path)
        self._members = [*self._module.children()] if isinstance(self._module, LISTS) else []
        start, stop = self.ranges[groups.tokens.index]
        self.own_module = nn.ModuleList(self._members[start:stop]) if self._members else self._module
        self._adapters = adapters
        self.called = self._members if layer.plan is None else [root.get_submodule(layer.called or layer.path)]
        self._inner: dict[nn.Module, Callable[..., Any]] = {module: module.forward for module in self.called}
        # a parameter of each, with the length that it has where experts are whole
        lengths = {name: root.get_parameter(name) for name in layer.parameters}
        self._lengths = {id(parameter): layer.lengths.get(name, layer.number) for name, parameter in lengths.items()}

    def whole(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the own forward of one of the modules in `called`, with all experts."""
        held = next((parameter for parameter in module.parameters() if id(parameter) in self._lengths), None)
        if held is not None and len(held) != self._lengths[id(held)]:
            rule = "Ranks that share experts compute with them in the steps of the trainer"
            fix = "Call the layer in a step, or use ep_size=1"
            raise ConfigError(
                self.path, f"{len(held)} of {self._lengths[id(held)]} rows of {self.number} experts", rule, fix
            )
        return self._inner[module](*args, **kwargs)

    def arguments(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, the numbers of their experts and weights, under the names that the experts give them."""
        if kwargs:
            args = inspect.signature(self._inner[module]).bind(*args, **kwargs).args
        hidden, index, weights = args
        return hidden, index, weights

    def compute_local(self, products: Products, rows: Tensor, lengths: Lengths) -> Tensor | None:
        """Compute the rows that came with own experts, inside of `products`; None where none is called."""
        with products():
            if self.plan is None:
                results = self._of_calls(rows, lengths)
            else:
                results = self._of_rows(rows, lengths) if len(rows) else None
        return results if results is None else self._shaped(results, rows)

    def all(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums of what experts compute of tokens ``[T, H]``, with all of them on this rank."""
        assert self.plan is not None
        if self.plan.forward is None:
            sums: Tensor = self.whole(self.called[0], hidden, index, weights)
            return sums.view(hidden.shape)
        tokens = torch.arange(len(index), device=index.device).repeat_interleave(index.shape[1])
        rows, experts = hidden[tokens], index.reshape(-1)
        results = self._shaped(self._computed(self._module, rows, experts), rows) if len(rows) else rows
        weighted = results * weights.reshape(-1, 1)
        return torch.zeros_like(hidden).index_add(0, tokens, weighted.to(hidden.dtype))

    def _of_rows(self, rows: Tensor, lengths: Lengths) -> Tensor:
        """Compute rows of one expert each with the experts that this rank holds."""
        assert self.plan is not None
        index = lengths.experts(rows.device)
        if self._members:
            return self._computed(self.own_module, rows, index, [*map(sum, zip(*lengths.counts, strict=True))])
        holder: Any = self._module
        start, stop = self.ranges[self.groups.tokens.index]
        adapted, before = self._adapters.adapted(holder), getattr(holder, self.plan.number)
        setattr(holder, self.plan.number, stop - start)
        vars(holder).update(adapted)
        try:
            return self._computed(holder, rows, index)
        finally:
            setattr(holder, self.plan.number, before)
            for name in adapted:
                del vars(holder)[name]

    def _computed(self, holder: nn.Module, rows: Tensor, index: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        assert self.plan is not None
        if self.plan.compute is not None:
            return self.plan.compute(holder, rows, index)
        if self._members:
            return each_expert([*holder.children()], rows, index, counts)
        return self._inner.get(holder, holder.forward)(rows, index.unsqueeze(1), rows.new_ones(len(rows), 1))

    def _of_calls(self, rows: Tensor, lengths: Lengths) -> Tensor | None:
        """Call experts as each rank called one of them: with its rows alone, in their shape."""
        start, stop = self.ranges[self.groups.tokens.index]
        results, called = list[Tensor](), False
        for part, (number, batch) in zip(rows.split(lengths.received), lengths.calls, strict=True):
            if start < number <= stop:
                shaped = part.view(batch, len(part) // batch, part.shape[1]) if batch else part
                result = self._inner[self._members[number - 1]](shaped)
                results.append(self._shaped(result, part))
                called = True
            else:
                results.append(part)
        return torch.cat(results) if called else None

    def _shaped(self, results: Tensor, rows: Tensor) -> Tensor:
        if results.numel() != rows.numel():
            rule = f"Experts return rows as wide as theirs, {rows.shape[1]}"
            got = f"results of shape {list(results.shape)} of rows {list(rows.shape)}"
            raise ConfigError(self.path, got, rule, "Use ep_size=1")
        return results.reshape(rows.shape)

    def lengths(self, this_round: Round) -> Lengths:
        """Return what travels in a round of the ranks of the stage."""
        ranks, index = [this_round.counts[place] for place in self.groups.places], self.groups.tokens.index
        start, stop = self.ranges[index]
        return Lengths(
            [sum(ranks[index][first:last]) for first, last in self.ranges],
            [sum(row[start:stop]) for row in ranks],
            [[*row[start:stop]] for row in ranks],
            [this_round.calls[place] for place in self.groups.places],
        )

    def note(self, this_round: Round) -> None:
        """Count rows by expert."""
        ranks = [this_round.counts[place] for place in self.groups.places]
        self.tokens = [sum(rows) for rows in zip(self.tokens, *ranks, strict=False)]


def each_expert(
    members: Sequence[nn.Module], rows: Tensor, index: Tensor, counts: Sequence[int] | None = None
) -> Tensor:
    """Return what modules make of rows ``[P, H]``, each of its own ones, called where it has any.

    Args:
        members: the modules.
        rows: of one module each.
        index: the number of each row's module ``[P]``; a row of the number after the last is of none, and gets zeros.
        counts: rows of each module, where the host knows them; asking would wait for the device, once.
    """
    if counts is None:
        counts = index.new_zeros(len(members) + 1).scatter_add_(0, index, torch.ones_like(index)).tolist()[:-1]
    result, order = torch.zeros_like(rows), torch.argsort(index, stable=True)[: sum(counts)]
    for member, chosen in zip(members, order.split([*counts]), strict=True):
        if len(chosen):
            result = result.index_copy(0, chosen, member(rows[chosen]).to(rows.dtype))
    return result
