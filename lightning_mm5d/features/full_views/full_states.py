"""States of optimizers in full while hooks of users run, on every rank, beside the parameters of `full_views`.

An optimizer here has the states of what its rank holds: a momentum of rows with ``zero_stage``, none for parameters of
other stages. Around a hook `Optimizer.state` is a dict whose first use gathers the states of all parameters. What the
hook changes is cut back at its end, and states that it drops are dropped.

What a state is follows from its shape: a tensor shaped as the parameter is a part of one, and anything else, such as a
count of steps, is equal on all ranks of the parameter.

Puts full tensors together from the parts of all ranks, on every rank, and cuts them to parts again.

A part is a shard of tensor parallelism, the rows that a rank owns with ``zero_stage``, or the full tensor of a stage.
Each rank that keeps a part broadcasts it, many parameters in one message.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.engine.codec import broadcast
from lightning_mm5d.plan.holdings import DataShards, Holding, Holdings, Part, narrowed
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.remote_value import TELLING, plain
from lightning_mm5d.stage import StageError
from lightning_mm5d.stage.payload import NotSent
from lightning_mm5d.trainer.kept_values import memory_kept

_BUCKET_BYTES = 64 * 2**20
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)


class Moving(NamedTuple):
    """A tensor whose parts all ranks get.

    Attributes:
        name: of its parameter.
        dtype: the same on all ranks.
        present: what this rank has of it, in any form; None where it has nothing.
        full: gets the parts; None where this rank only sends.
    """

    name: str
    dtype: torch.dtype
    present: Tensor | None
    full: Tensor | None


class PartExchange:
    """Brings parts to all ranks.

    Args:
        module: the LightningModule, which says which names are tied.
        plan: all stages.
        rank: global rank.
        wire: where messages of the default group live.

    Attributes:
        holding: returns what a rank that holds a parameter, by its name, holds of it.
    """

    def __init__(self, module: nn.Module, plan: Plan, rank: int, wire: torch.device) -> None:
        holdings = Holdings(plan, module)
        self._rank, self._wire = rank, wire
        self._keepers, self._holders = cache(holdings.keepers), cache(plan.ownership.ranks_holding)
        self.holding = cache(lambda name, rank: holdings.of(name, rank, plan.shapes[name]))

    def own_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of what this rank owns of a parameter that it holds."""
        return self.holding(name, self._rank).owned

    def forms(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a parameter, full, local and own, of any rank that keeps a part of it."""
        held = self.holding(name, self._rank if self.is_held(name) else self._keepers(name)[0])
        return held.full, held.local, held.owned

    def is_held(self, name: str) -> bool:
        """Return whether this rank holds a part of a parameter."""
        return self._rank in self._holders(name)

    def cut(self, name: str, full: Tensor, local: Tensor) -> None:
        """Write to `local`, which has any form, this rank's part of a full tensor."""
        self.holding(name, self._rank).cut(full, local)

    def bring(self, tensors: Sequence[Moving]) -> None:
        """Send parts to all ranks; collective.

        Args:
            tensors: with equal names and dtypes on all ranks.
        """
        sent: dict[tuple[int, torch.dtype], list[Moving]] = {}
        for tensor in tensors:
            for keeper in self._keepers(tensor.name):
                sent.setdefault((keeper, tensor.dtype), []).append(tensor)
        for (keeper, dtype), moving in sent.items():
            bucket: list[Moving] = []
            size = 0
            for tensor in moving:
                bucket.append(tensor)
                size += dtype.itemsize * math.prod(self.holding(tensor.name, keeper).owned)
                if size >= _BUCKET_BYTES:
                    self._broadcast(keeper, dtype, bucket)
                    bucket, size = [], 0
            if bucket:
                self._broadcast(keeper, dtype, bucket)

    def _broadcast(self, keeper: int, dtype: torch.dtype, bucket: Sequence[Moving]) -> None:
        holdings = [self.holding(tensor.name, keeper) for tensor in bucket]
        parts = [
            (tensor, holding, part)
            for tensor, holding in zip(bucket, holdings, strict=True)
            for part in holding.parts(holding.owned)
        ]
        sizes = [math.prod(stop - start for start, stop in part.full) for _, _, part in parts]
        flat = torch.zeros(sum(sizes), dtype=dtype, device=self._wire)
        pieces = flat.split(sizes)
        if keeper == self._rank:
            for (tensor, holding, part), piece in zip(parts, pieces, strict=True):
                if tensor.present is not None:
                    piece.copy_(_region(tensor.present, holding, part).reshape(-1))
        broadcast(flat, keeper)
        for (tensor, _, part), piece in zip(parts, pieces, strict=True):
            if tensor.full is not None:
                region = narrowed(tensor.full, part.full)
                region.copy_(piece.view(region.shape))


def partial_names(plan: Plan) -> frozenset[str]:
    """Return the names of the parameters of which some rank does not hold the full tensor between steps."""
    shards, world = DataShards(plan), plan.layout.size
    names = set[str]()
    for name in plan.shapes:
        if name not in plan.partition.owners:
            continue
        ranks = plan.ownership.ranks_holding(name)
        is_cut = name in plan.division.shards or any(shards.of(name, rank) is not None for rank in ranks)
        if is_cut or len(ranks) < world:
            names.add(name)
    return frozenset(names)


def _region(tensor: Tensor, holding: Holding, part: Part) -> Tensor:
    """Return a part of a rank's own rows as a view of a tensor in any form."""
    if tuple(tensor.shape) == holding.full:
        return narrowed(tensor, part.full)
    return narrowed(holding.own_part(tensor), part.held)


Kind = Literal["values", "gradients", "states"]
_DATA: Any = Tensor.data
get_data, set_data = _DATA.__get__, _DATA.__set__
"""of a parameter, past what notices writes of users"""
_GRAD: Any = Tensor.grad
_GET_GRAD, _SET_GRAD = _GRAD.__get__, _GRAD.__set__
_TELLING = TELLING - {_GET_GRAD}


class Form:
    """A parameter, and what this rank shows of it outside of hooks.

    Attributes:
        data: its local tensor.
        grad: its gradient there, or a stand-in for one.
        kind: its class.
        shown: the address of its full values in a hook.
    """

    def __init__(self, name: str, parameter: nn.Parameter, shape: tuple[int, ...]) -> None:
        self.name, self.parameter, self.shape = name, parameter, shape
        self.data: Tensor = parameter.data
        self.grad: Tensor | None = None
        self.kind: type[nn.Parameter] = type(parameter)
        self.shown = 0
        self._nan: Tensor | None = None

    def nan(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor of the full shape without memory."""
        if self._nan is None or self._nan.dtype != dtype:
            filler = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
            self._nan = torch.full((), filler, dtype=dtype, device=device).expand(self.shape)
        return self._nan


def check_kept(owner: Any, forms: Iterable[Form]) -> None:
    """Refuse a tensor that a hook leaves in an attribute and that shares the memory of a parameter's full values.

    Args:
        owner: of the hook.
        forms: of the parameters whose full values it was shown; those that show others by now do not count.

    Raises:
        ConfigError: names attribute and parameter.
    """
    with plain():
        shown = {form.shown: form.name for form in forms if form.shown and form.parameter.data_ptr() == form.shown}
    for key, tensor in memory_kept(owner) if shown else ():
        if (
            type(tensor) is Tensor
            and tensor.layout == torch.strided
            and (name := shown.get(tensor.untyped_storage().data_ptr()))
        ):
            rule = "It follows the parameter on one process; here it would stay as the hook has seen it"
            fix = "Keep the parameter itself, or a copy: .detach().clone()"
            raise ConfigError(f"{type(owner).__name__}.{key}", f"the memory of {name!r}", rule, fix)


def refuse_gradient(path: str, gradient: Tensor) -> None:
    """Refuse a gradient of a hook's that goes back through the module at `path`, which ranks share."""
    raise StageError(
        f"a hook takes a gradient that goes back through {path or 'the module'}, whose parameters ranks share: they "
        "are shown in full there, and its backward needs this rank's part. Take the gradient in a step, such as "
        "validation_step under torch.enable_grad, or set tp_size and ep_size to 1"
    )


class Awaited(nn.Parameter):
    """A parameter that shows its full shape, and whose first use gathers it.

    Attributes:
        opens: gathers values or gradients.
    """

    opens: Callable[[Kind], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        lacking = next((leaf for leaf in leaves if isinstance(leaf, NotSent)), None)
        if lacking is not None:
            return lacking.__torch_function__(func, types, args, kwargs)
        if func not in _TELLING:
            awaited = next((leaf for leaf in leaves if isinstance(leaf, Awaited)), None)
            if awaited is not None:
                awaited.opens("gradients" if func in (_GET_GRAD, _SET_GRAD) else "values")
        with plain():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            self.opens("values")
            with plain():
                memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.deepcopy(self).__reduce_ex__(protocol)


States = dict[Any, dict[str, Any]]


class AwaitedStates(defaultdict):
    """The states of an optimizer by parameter, gathered by the first use.

    Args:
        opens: gathers them, and fills this dict.

    Attributes:
        is_full: whether it holds them.
    """

    def __init__(self, opens: Callable[[], None]) -> None:
        super().__init__(dict)
        self._opens = opens
        self.is_full = False

    def fill(self, states: States) -> None:
        """Hold `states`, without gathering."""
        self._opens, self.is_full = lambda: None, True
        super().update(states)

    def __reduce__(self) -> Any:
        self._opens()
        return defaultdict, (dict, dict(super().items()))


def _opening(name: str) -> Any:
    plain = getattr(defaultdict, name)

    def opened(self: AwaitedStates, *args: Any, **kwargs: Any) -> Any:
        self._opens()
        return plain(self, *args, **kwargs)

    return opened


for _name in (
    *("__getitem__", "__setitem__", "__delitem__", "__iter__", "__len__", "__contains__"),
    *("__eq__", "__ne__", "__repr__"),
    *("get", "items", "keys", "values", "pop", "popitem", "setdefault", "update", "clear", "copy", "__reversed__"),
    *("__or__", "__ior__", "__missing__", "__copy__"),
):
    setattr(AwaitedStates, _name, _opening(_name))


class FullStates:
    """The states that hooks see.

    Args:
        exchange: of the module's parameters.
        group: all ranks, in host memory.
        device: where this rank computes.
    """

    def __init__(self, exchange: PartExchange, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._exchange, self._group, self._device = exchange, group, device
        self._shown: list[tuple[Optimizer, AwaitedStates, Any]] = []
        self._names: dict[int, tuple[str, tuple[int, ...]]] = {}

    def show(
        self, optimizers: Sequence[Any], names: dict[int, tuple[str, tuple[int, ...]]], opens: Callable[[], None]
    ) -> None:
        """Put dicts that await their states in the place of those of `optimizers`.

        Args:
            optimizers: of the trainer.
            names: name and full shape of the parameters that some rank lacks a part of, by id.
            opens: gathers.
        """
        self._names = names
        for optimizer in optimizers:
            if isinstance(optimizer, Optimizer) and optimizer.param_groups:
                awaited = AwaitedStates(opens)
                self._shown.append((optimizer, awaited, optimizer.state))
                optimizer.state = awaited

    def gather(self, *, is_open: bool, keeps: bool) -> None:
        """Send what this rank has, and show the full states where `keeps`; collective.

        Args:
            is_open: whether this rank shows them already.
            keeps: whether it wants them.
        """
        shown = [optimizer.state if is_open else local for optimizer, _, local in self._shown]
        local_told = [
            {self._names[id(p)][0]: self._told(p, state) for p, state in states.items() if id(p) in self._names}
            for states in shown
        ]
        told: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(told, local_told, group=self._group)
        moving: list[Moving] = []
        full_states: list[dict[str, dict[str, Any]]] = []
        for index, states in enumerate(shown):
            by_name = {self._names[id(p)][0]: state for p, state in states.items() if id(p) in self._names}
            full: dict[str, dict[str, Any]] = {}
            ranks = [rank[index] for rank in told if index < len(rank)]
            for name in sorted({name for rank in ranks for name in rank}):
                keys: dict[str, Any] = {}
                for rank in ranks:
                    keys = rank.get(name, {}) | keys
                full[name] = {}
                for key, value in keys.items():
                    if not isinstance(value, _Whole):
                        full[name][key] = tree_map_only(_OnDevice, lambda leaf: leaf.value.to(self._device), value)
                        continue
                    present = by_name.get(name, {}).get(key)
                    whole = torch.zeros(value.shape, dtype=value.dtype, device=self._device) if keeps else None
                    moving.append(Moving(name, value.dtype, present, whole))
                    full[name][key] = whole
            full_states.append(full)
        self._exchange.bring(moving)
        if keeps and not is_open:
            for (optimizer, awaited, local), full in zip(self._shown, full_states, strict=True):
                awaited.fill(dict(self._in_order(optimizer, local, full)))

    def _told(self, parameter: Any, state: dict[str, Any]) -> dict[str, Any]:
        """What a rank says of one state: what is a part, by dtype and full shape, and the rest itself."""
        shape = self._names[id(parameter)][1]
        return {
            key: _Whole(shape, value.dtype) if self._is_part(parameter, value) else tree_map_only(Tensor, _told, value)
            for key, value in state.items()
        }

    def _is_part(self, parameter: Any, value: Any) -> bool:
        name, shape = self._names[id(parameter)]
        return isinstance(value, Tensor) and tuple(value.shape) in {shape, *self._exchange.forms(name)}

    def _in_order(self, optimizer: Optimizer, local: Any, full: dict[str, dict[str, Any]]) -> Iterator[tuple[Any, Any]]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self._names.get(id(parameter), ("",))[0]
                if name in full:
                    yield parameter, full[name]
                elif parameter in local:
                    yield parameter, local[parameter]

    def take_back(self) -> None:
        """Cut what the hook has read, or put in place of it, to what this rank holds."""
        for optimizer, awaited, local in self._shown:
            if optimizer.state is awaited and not awaited.is_full:
                continue
            states: dict[Any, Any] = dict(optimizer.state)
            for parameter in [parameter for parameter in local if parameter not in states]:
                del local[parameter]
            for parameter, state in states.items():
                if id(parameter) not in self._names:
                    local[parameter] = state
                elif self._exchange.is_held(self._names[id(parameter)][0]):
                    local[parameter] = self._local_state(parameter, state, local.get(parameter, {}))

    def _local_state(self, parameter: Any, state: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
        name, shape = self._names[id(parameter)]
        local_state: dict[str, Any] = {}
        for key, value in state.items():
            if isinstance(value, Tensor) and tuple(value.shape) == shape and shape:
                old = before.get(key)
                is_kept = isinstance(old, Tensor) and old.dtype == value.dtype
                local_state[key] = old if is_kept else value.new_empty(self._exchange.own_shape(name))
                self._exchange.cut(name, value, local_state[key])
            else:
                local_state[key] = value
        before.clear()
        before.update(local_state)
        return before

    def restore(self) -> None:
        """Show what this rank has."""
        for optimizer, _, local in self._shown:
            optimizer.state = local
        self._shown.clear()


def _told(value: Tensor) -> Any:
    return value if value.device.type == "cpu" else _OnDevice(value.cpu())


@dataclass(frozen=True)
class _OnDevice:
    """A tensor of a device, in host memory: each rank puts it on its own device, not on the sender's."""

    value: Tensor


class _Whole(NamedTuple):
    """A full tensor that is gathered."""

    shape: tuple[int, ...]
    dtype: torch.dtype
