"""Shards a module over the ranks of tensor parallel groups, in place: the same objects under the same names.

Parameters keep their identity and hold this rank's shard; linear layers, embeddings and experts get an instance
attribute in front of their `forward`; attributes that count heads hold this rank's number. Everything computes on local
tensors, with the collectives of `region` between. `remove` takes the patches away; parameters stay local. `resolve` has
checked the `Division` before.

``nn.MultiheadAttention`` on some of its heads.

torch's forward hands all weights to one function, which takes them for those of all heads. So a rank computes the same
in steps: its heads' queries, keys and values, its heads' attention, and its part of the output, which ranks add up.
Masks and results are those of torch; nested tensors, which torch's fused kernel alone takes, are refused.

Tells what is behind an error of torch about sizes in a module whose linear layers tensor parallel ranks share.

Its code computes on a rank's part of their outputs. Where it writes the full width or number of heads into a view
(``x.reshape(batch, length, width)``), torch says that the numbers do not fit, and not why.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy as copy_of
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.layout.layout import even_lengths
from lightning_mm5d.partition.parts import at, hidden_place, with_state
from lightning_mm5d.sharded.class_operations import Columns
from lightning_mm5d.sharded.collectives import TensorGroup, exchange, reduce
from lightning_mm5d.sharded.removable import Removable
from lightning_mm5d.sharded.sequence import is_tokens
from lightning_mm5d.sharded.tensor import Sharded, from_local
from lightning_mm5d.sharded.torch_internals import is_held_once
from lightning_mm5d.tensor_parallel.entrance import Entrance, PutsOff, fits
from lightning_mm5d.tensor_parallel.region import Linear, Region, drops, linear
from lightning_mm5d.tensor_parallel.resolve import Division, Heads, Kind

# B samples, L queries, S keys, h heads of this rank, H heads of all, D width of a head


def attention(region: Region, lengths: tuple[int, ...]) -> Callable[..., Any]:
    """Return the forward of a sharded ``nn.MultiheadAttention``, with the arguments and results of torch's.

    Args:
        region: of its ranks.
        lengths: heads on each rank.
    """

    def forward(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_nested or key.is_nested or value.is_nested:
            raise TypeError("nn.MultiheadAttention that tensor parallel ranks share takes no nested tensors; pad them")
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint, as without tensor parallelism.")
        group = region.group
        with region.closing():
            is_batched = query.dim() == 3
            is_tokens_first = is_batched and not module.batch_first
            q, k, v = (_rows(x, is_batched, is_tokens_first) for x in _projected(region, module, query, key, value))
            is_causal = is_causal and key_padding_mask is None and not need_weights
            mask = None if is_causal else _mask(attn_mask, key_padding_mask, q, lengths, region)
            k, v, mask = _extended(module, k, v, mask)
            q, k, v = (x.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for x in (q, k, v))  # [B, h, L or S, D]
            if module.add_zero_attn:
                k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
                mask = None if mask is None else F.pad(mask, (0, 1))
            rate, weights = module.dropout if module.training else 0.0, None
            if need_weights:
                scores = q * math.sqrt(1.0 / module.head_dim) @ k.transpose(-2, -1)
                weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), rate)  # [B, h, L, S]
                y = weights @ v
            else:
                y = F.scaled_dot_product_attention(q, k, v, mask, rate, is_causal)
            y = y.transpose(1, 2).flatten(2)
            y = module.out_proj(y.transpose(0, 1) if is_tokens_first else y if is_batched else y.squeeze(0))
        if weights is None:
            return y, None
        weights = weights if is_batched else weights.squeeze(0)
        if average_attn_weights:
            return y, reduce(weights.sum(-3) / sum(lengths), group)
        return y, from_local(weights, -3, lengths, group)

    return forward


def _projected(region: Region, module: Any, *inputs: Tensor) -> list[Tensor]:
    """Queries, keys and values of this rank's heads, ``[..., h * D]``; of one input by one product."""
    entered = [region.enter(x, module.training).entered for x in inputs]
    bias, width = module.in_proj_bias, module.num_heads * module.head_dim
    if module.in_proj_weight is not None and entered[0] is entered[1] is entered[2]:
        return [*F.linear(entered[0], module.in_proj_weight, bias).split(width, -1)]
    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.split(width)
    biases = (None,) * 3 if bias is None else bias.split(width)
    return [F.linear(*operands) for operands in zip(entered, weights, biases, strict=True)]


def _rows(x: Tensor, is_batched: bool, is_tokens_first: bool) -> Tensor:
    """Samples first: ``[B, L, width]``."""
    return x.transpose(0, 1) if is_tokens_first else x if is_batched else x.unsqueeze(0)


def _mask(
    attention: Tensor | None, padding: Tensor | None, q: Tensor, lengths: tuple[int, ...], region: Region
) -> Tensor | None:
    """What is added to scores, ``[B or 1, h or 1, L or 1, S]``; None where nothing is."""
    group, mask = region.group, None
    if attention is not None:
        if attention.dim() == 3:  # of all samples' heads
            every = group.scattered(attention.unflatten(0, (-1, sum(lengths))), 1, lengths)
            mask = _added(every, q.dtype)
        else:
            mask = _added(group.copied(attention) if attention.requires_grad else attention, q.dtype)[None, None]
    if padding is not None:
        padding = padding if padding.dim() == 2 else padding.unsqueeze(0)
        of_keys = _added(group.copied(padding) if padding.requires_grad else padding, q.dtype)[:, None, None]
        mask = of_keys if mask is None else mask + of_keys
    return mask


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers that are added to scores: minus infinity where a mask of booleans is true."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def _extended(module: Any, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values with the module's own ones after them."""
    if module.bias_k is None:
        return k, v, mask
    more = (bias.expand(k.shape[0], -1, -1) for bias in (module.bias_k, module.bias_v))
    k, v = (torch.cat(pair, 1) for pair in zip((k, v), more, strict=True))
    return k, v, None if mask is None else F.pad(mask, (0, 1))


class TensorParallel(Removable):
    """The sharded modules of one rank.

    Args:
        root: the LightningModule, with parameters that are equal on all ranks, in full or cut to this rank's shards.
        division: what is sharded, and how.
        groups: this rank's tensor parallel groups by name; modules of other groups stay as they are.
        lines: by the name of a group whose layers are in blocks, the groups within it that this rank is in.
        rings: names of those whose shards of sequences travel around a ring beside products.
        holds: whether this rank holds the parameter of a name; modules whose parameters it does not hold stay too.
        device: where this rank computes.

    Attributes:
        groups: as they were given.
        lines: groups within the others.
        linear: computes ``(module, x, bias)``, a linear layer on plain tensors; may be replaced.
        puts_off: of a linear layer and its input, what takes its weight gradient if that is put off; may be replaced.
        fused: given ``(module, hidden, columns)``, returns the logits of a sharded head where these are not computed at
            once, else None; may be replaced.
    """

    def __init__(
        self,
        root: nn.Module,
        division: Division,
        groups: Mapping[str, TensorGroup],
        *,
        lines: Mapping[str, Mapping[str, TensorGroup]] | None = None,
        rings: Collection[str] = (),
        holds: Callable[[str], bool] = lambda name: True,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        self.linear: Linear = linear
        self.puts_off: PutsOff = lambda module, x: None
        self.computes_logits: Callable[[nn.Module, Tensor, Columns], Tensor | None] | None = None
        self._root, self._division, self.groups = root, division, groups
        may_drop = drops(root)
        self._regions = {
            name: Region(group, drops=may_drop, device=device, rings=name in rings) for name, group in groups.items()
        }
        in_blocks = {name: layers for name, layers in division.in_blocks.items() if name in groups}
        modules = {*division.roles, *division.heads}
        modules -= {path for path in modules for layers in in_blocks.values() if layers.holds(path)}
        self._here = {path: self._is_here(path, holds) for path in modules}
        self._cut(holds)
        for (path, name), values in division.local.items():
            if self._is_here(path, holds):
                self._set_local(path, name, values)
        for path, kind in division.roles.items():
            if self._here.get(path) and division.groups[path] in groups:
                self._patch(root.get_submodule(path), path, kind)
        for path, heads in division.heads.items():
            if self._here.get(path) and division.groups[path] in groups:
                self._hook(root.get_submodule(path), heads, groups[division.groups[path]])
        self.lines = [line for modality_lines in (lines or {}).values() for line in modality_lines.values()]
        for name, layers in in_blocks.items():
            assert lines is not None
            is_here = partial(self._is_here, holds=holds)
            self.changes.callback(layers.attach(root, division, is_here, self._regions[name], lines[name]))

    @property
    def scopes(self) -> list[Region]:
        """What is of one microbatch at a time."""
        return [*self._regions.values()]

    def divide_sequences(self, layers: nn.Module, group: str) -> None:
        """Let the hidden state between tensor parallel regions be a shard of the sequence (Korthikanti et al. 2022,
        arXiv:2205.05198).

        A full hidden state is sharded along its last but one dim where it enters one of `layers`. Between them it is a
        `Sharded`, which computes on its local tensor where that is right and becomes full where it is not.

        Args:
            layers: list of layers whose hidden state is the first tensor among their arguments.
            group: name of the tensor parallel group.
        """
        ranks = self.groups[group]

        def enter(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            place = hidden_place(args, kwargs)
            if place is None:
                return args, kwargs
            return with_state(place, _sequence_shard(at(place, args, kwargs), ranks), args, kwargs)

        for layer in layers.children():
            self.changes.callback(layer.register_forward_pre_hook(enter, with_kwargs=True).remove)

    # --- parameters and attributes ---

    def _is_here(self, path: str, holds: Callable[[str], bool]) -> bool:
        module: Any = None
        while module is None:
            try:
                module = self._root.get_submodule(path)
            except AttributeError:  # a config of it
                path = path.rpartition(".")[0]
        names = [name for name, _ in module.named_parameters(prefix=path, remove_duplicate=False)]
        return not names or any(map(holds, names))

    def _cut(self, holds: Callable[[str], bool]) -> None:
        done: set[int] = set()
        for name, shard in self._division.shards.items():
            owner, _, attribute = name.rpartition(".")
            tensor = getattr(self._root.get_submodule(owner), attribute)
            group = self.groups.get(self._division.groups[name])
            if group is None or not holds(name) or id(tensor) in done:
                continue
            done.add(id(tensor))
            if shard.is_full(tensor):  # the object stays: users and ties hold on to it
                tensor.data = shard.cut(tensor.data, group.index)

    def _set_local(self, path: str, name: str, values: tuple[int, ...]) -> None:
        group = self.groups.get(self._division.groups[path])
        if group is None:
            return
        value: Any = values[group.index]
        if name == "padding_idx":
            value = value if value >= 0 else None
        owner: Any = self._root
        for part in path.split("."):
            holder, owner = owner, getattr(owner, part)
            if isinstance(holder, nn.Module) and not isinstance(owner, nn.Module):
                # a config, which others read too: this module gets a copy
                self.changes.callback(partial(setattr, holder, part, owner))
                owner = copy_of(owner)
                setattr(holder, part, owner)
        self.changes.callback(partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    # --- forwards ---

    def _patch(self, module: nn.Module, path: str, kind: Kind) -> None:
        region = self._regions[self._division.groups[path]]
        if kind == "column":
            self.put_forward(module, self._column(region))
        elif kind == "row":
            self.put_forward(module, self._row(region))
        elif kind == "experts":
            self.put_forward(module, _experts(region))
        elif kind == "attention":
            self.put_forward(module, attention(region, self._division.heads[path].lengths))
        elif kind in ("dropout", "own_dropout"):
            self.put_forward(module, _dropout(region.outside if kind == "dropout" else region.inside))
        else:
            shard = self._division.shards[f"{path}.weight"]
            if kind == "embedding":
                self.put_forward(module, _embedding(shard.ranges[region.group.index][0], shard.size, region.group))
            else:
                self.put_forward(module, self._head(shard.lengths, region, self._division.multiples.get(path, 1)))

    def _column(self, region: Region) -> Callable[..., Tensor]:
        def forward(module: Any, input: Tensor) -> Tensor:
            return self._product(module, region.enter(input, module.training, module if fits(module) else None))

        return forward

    def _product(self, module: Any, entrance: Entrance, multiple: int = 1) -> Tensor:
        if not fits(module):
            return self.linear(module, entrance.entered, module.bias)
        due = self.puts_off(module, entrance.entered)
        return entrance.product(module, module.bias, not isinstance(module, nn.Linear), due, multiple)

    def _row(self, region: Region) -> Callable[..., Tensor]:
        def forward(module: Any, input: Tensor) -> Tensor:
            with region.closing():
                y = region.leave_in_ring(module, input, self.puts_off)
                if y is None:
                    y = region.leave(self.linear(module, input, None))
                region.forget()
            if module.bias is None:
                return y
            return y + module.bias.to(y.dtype)  # after the sum, in the dtype that autocast chose

        return forward

    def _head(self, lengths: tuple[int, ...], region: Region, multiple: int) -> Callable[..., Tensor]:
        columns = Columns(lengths, region.group, multiple)

        def forward(module: Any, input: Tensor) -> Tensor:
            local, tokens = input, None
            if isinstance(input, Sharded) and is_tokens(input.group):
                tokens = input.group
                local = tokens.own_tokens(input)
            # what travels in a ring is multiplied without padding, which all ranks or none do
            beside = self.computes_logits is None and multiple == 1 and fits(module)
            entered = region.enter(local, training=False, first=module if beside else None)
            region.forget()
            if self.computes_logits is not None:
                hidden = entered.entered
                if isinstance(input, Sharded) and tokens is not None:
                    hidden = tokens.coarser.wrapped(hidden, input.sharded_dim)
                if (logits := self.computes_logits(module, hidden, columns)) is not None:
                    return logits
            part = self._product(module, entered, multiple)
            if isinstance(input, Sharded) and tokens is not None:
                # of a context parallel rank's tokens, each tensor parallel rank gets some, with all classes
                tokens = tokens.finer
                part = exchange(part, -1, lengths, input.sharded_dim, tokens.own_lengths, region.group)
                return tokens.wrapped(part, input.sharded_dim)
            return from_local(part, -1, lengths, region.group)

        return forward

    def _hook(self, module: nn.Module, heads: Heads, group: TensorGroup) -> None:
        names = list(inspect.signature(type(module).forward).parameters)[1:]

        def enter(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            values = list(args)
            kwargs = dict(kwargs)
            for name, dim in heads.arguments.items():
                place = names.index(name) if name in names else len(values)
                if name in kwargs:
                    kwargs[name] = _own_heads(kwargs[name], dim, heads.lengths, group)
                elif place < len(values):
                    values[place] = _own_heads(values[place], dim, heads.lengths, group)
            return tuple(values), kwargs

        def leave(_: nn.Module, args: Any, result: Any) -> Any:
            if not isinstance(result, tuple):
                return result
            values = list(result)
            for position, dim in heads.results.items():
                value = values[position] if position < len(values) else None
                if not isinstance(value, Tensor) or isinstance(value, Sharded) or value.dim() <= dim:
                    continue
                if value.shape[dim] == heads.lengths[group.index]:
                    values[position] = from_local(value, dim - value.dim(), heads.lengths, group)
            return tuple(values)

        if heads.arguments:
            self.changes.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        if heads.results:
            self.changes.callback(module.register_forward_hook(leave, prepend=True).remove)


def _sequence_shard(x: Tensor, group: TensorGroup) -> Tensor:
    if isinstance(x, Sharded) or x.dim() < 2:
        return x
    length = x.shape[-2]
    lengths = even_lengths(length, group.size)
    return from_local(group.scattered(x, -2, lengths), -2, lengths, group)


def _own_heads(value: Any, dim: int, lengths: tuple[int, ...], group: TensorGroup) -> Any:
    """This rank's heads of an argument; a `dim` below 0 has the heads running fastest in dim ``-dim - 1``."""
    if isinstance(value, Sharded):
        return value.local
    if not isinstance(value, Tensor):
        return value
    total = sum(lengths)
    if dim < 0:
        apart = value.unflatten(-dim - 1, (-1, total))
        return group.scattered(apart, -dim, lengths).flatten(-dim - 1, -dim)
    return group.scattered(value, dim, lengths) if value.shape[dim] == total else value


def _experts(region: Region) -> Callable[..., Any]:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        def entered(value: Any) -> Any:
            if isinstance(value, Sharded):
                value = value.full()
            wants = isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
            return region.group.copied(value) if wants else value

        args, kwargs = tuple(map(entered, args)), {name: entered(value) for name, value in kwargs.items()}
        with region.inside() if module.training else nullcontext():
            result = type(module).forward(module, *args, **kwargs)
        return reduce(result, region.group, is_fresh=isinstance(result, Tensor) and is_held_once(result))

    return forward


def _dropout(stream: Callable[[], AbstractContextManager[None]]) -> Callable[..., Tensor]:
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        with stream() if module.training else nullcontext():
            return type(module).forward(module, x)

    return forward


def _embedding(held: tuple[int, int], size: int, group: TensorGroup) -> Callable[..., Tensor]:
    start, stop = held

    def forward(module: nn.Module, input: Tensor) -> Tensor:
        ids = input
        elsewhere = (ids < start) | (ids >= stop)
        unknown = (ids < 0) | (ids >= size)
        if ids.device.type == "cpu" and bool(unknown.any()):
            raise IndexError(f"index out of range: the embedding has {size} rows")
        embedded = type(module).forward(module, (ids - start).masked_fill(elsewhere, 0))
        embedded = embedded.masked_fill(elsewhere.unsqueeze(-1), 0)
        if ids.device.type != "cpu":  # without waiting for the device: NaN, which the first step reports
            embedded = embedded.masked_fill(unknown.unsqueeze(-1), float("nan"))
        return reduce(embedded, group, is_fresh=True)

    return forward


_ABOUT_SIZES = re.compile(
    "invalid for input of size|must match the size|cannot be multiplied|same number of dimensions|don't multiply|"
    "must match the existing size|Sizes of tensors must match|Given normalized_shape|cannot be broadcast"
)


def explained(error: RuntimeError, root: nn.Module, division: Division, *, shares: bool) -> ConfigError | None:
    """Return the error for a module whose code takes full sizes, or differentiates twice; None for other errors.

    Args:
        error: that a step has raised.
        root: the LightningModule.
        division: what ranks share of it.
        shares: whether ranks share layers or sequences.
    """
    if shares and type(error) is RuntimeError and "@once_differentiable" in str(error):
        rule = "It goes back through layers that ranks share, whose backward has no gradient of its own"
        fix = "Set tp_size and cp_size to 1, or leave out create_graph"
        return ConfigError("training_step", "a gradient of a gradient (create_graph=True)", rule, fix)
    if type(error) is not RuntimeError or not _ABOUT_SIZES.search(str(error)):
        return None
    shared: dict[int, tuple[str, list[str]]] = {}
    for path, kind in division.roles.items():
        if kind == "column":
            owner, _, name = path.rpartition(".")
            shared.setdefault(id(root.get_submodule(owner)), (owner, []))[1].append(name)
    innermost, traceback = None, error.__traceback__
    while traceback is not None:  # the innermost one comes last
        frame = traceback.tb_frame
        first_arg = next(map(frame.f_locals.get, frame.f_code.co_varnames[: frame.f_code.co_argcount]), None)
        innermost = shared.get(id(first_arg), innermost)
        traceback = traceback.tb_next
    if innermost is None:
        return None
    owner, names = innermost
    modality = division.groups[f"{owner}.{names[0]}" if owner else names[0]]
    return ConfigError(
        owner or "self",
        str(error),
        f"Tensor parallel ranks share the outputs of {', '.join(names)}, so that sizes in its code are those of a rank",
        "Take sizes from tensors, as view(batch, length, -1) does, name the attributes with numbers of heads or widths "
        f"as `heads` or `local` of its TensorParallelPlan, or set modalities.{modality}.tp_size to 1",
    )
