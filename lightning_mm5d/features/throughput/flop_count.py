"""Counts the flops that one rank computes, by modality, and those that it computes again.

`FlopCount` sees the operations of a step, forwards and backwards, as torch's ``FlopCounterMode`` does, and takes that
one's formulas. So frozen parts, adapters, active experts, images of any size and shards of layers count as computed.
It differs in three ways:

- Attention counts the pairs that its mask allows. A backward of fused attention is twice its forward, and what the
  kernel computes of the scores again is recomputation.
- What a backward computes with gradients switched on, or within a module, is a forward that runs again: recomputation.
- What several ranks compute on equal inputs, such as a layer that tensor parallel ranks do not share, is computed once
  by all of them together; the rest is recomputation.

A rank that runs for other ranks' parameters computes placeholders, which do not count.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.flop_counter import flop_registry

from lightning_mm5d.config.errors import private
from lightning_mm5d.sharded.remote_value import is_remote
from lightning_mm5d.sharded.tensor import Sharded
from lightning_mm5d.sharded.torch_internals import Watching, in_backward, number_when_made
from lightning_mm5d.stage.payload import tensors_in


class Copies(NamedTuple):
    """How often the ranks of a group compute a module.

    Attributes:
        number: how many of them compute it on equal inputs; of a module in shards, each of its rows on the mean.
        in_shards: whether its weight is in shards, so that its inputs are equal also where they come as shards.
    """

    number: float
    in_shards: bool = False


_Place = tuple[str, float]
"""a modality, and how many ranks compute the same"""
_KNOWN = frozenset(("aten", "prim", "prims", "c10d", "_c10d_functional", "profiler", "inductor"))
_aten = torch.ops.aten
_FORMULAS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
    _aten.addmm_: flop_registry[_aten.addmm],  # of sums in place, as grids and fused heads make them
    _aten.baddbmm_: flop_registry[_aten.baddbmm],
}


class FlopCount(Watching):
    """Is entered around a step.

    Args:
        root: the LightningModule.
        owners: modality of each module that belongs to one, by its path; of those inside of each other the outermost.
        copies: of modules that several ranks compute, by their paths.

    Attributes:
        base: modality of what is computed outside of these modules.
        flops: without recomputation, by modality.
        again: recomputation, by modality.
    """

    supports_higher_order_operators = True

    def __init__(self, root: nn.Module, owners: Mapping[str, str], copies: Mapping[str, Copies], base: str) -> None:
        super().__init__()
        self.base, self.flops, self.again = base, defaultdict[str, float](float), defaultdict[str, float](float)
        self._running = 0  # modules that a backward runs now
        self._inside: list[_Place] = []
        self._from: list[int] = [0]  # numbers of nodes from which on those of a forward belong to another place
        self._places: list[_Place | None] = [None]
        self._root, self._owners, self._copies = root, owners, copies
        self._stack, self._told = ExitStack(), set[str]()

    def begin(self) -> None:
        """Count from now on, on this thread."""
        self._stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code hides its operations
        for path in dict.fromkeys((*self._owners, *self._copies)):
            module, copies = self._root.get_submodule(path), self._copies.get(path, Copies(1))
            push = partial(self._push, self._owners.get(path), copies)
            before = module.register_forward_pre_hook(push, with_kwargs=True)
            after = module.register_forward_hook(lambda *_: self._pop(), always_call=True)
            self._stack.callback(before.remove)
            self._stack.callback(after.remove)
        self._stack.callback(register_module_forward_pre_hook(lambda *_: self._called(1)).remove)
        self._stack.callback(register_module_forward_hook(lambda *_: self._called(-1), always_call=True).remove)
        self._stack.enter_context(self)

    def end(self) -> None:
        """Count no more."""
        self._stack.close()

    def at(self, base: str) -> None:
        """Note that from now on what belongs to no module belongs to the modality `base`."""
        self.base = base
        self._inside.clear()  # a stage may have ended within modules
        self._mark()

    def _push(self, name: str | None, copies: Copies, _: Any, args: Any, kwargs: Any) -> None:
        outer = self._now()
        is_equal = copies.in_shards or not any(isinstance(value, Sharded) for _, value in tensors_in((args, kwargs)))
        self._inside.append((name or outer[0], max(copies.number, outer[1]) if is_equal else outer[1]))
        self._mark()

    def _pop(self) -> None:
        del self._inside[-1:]
        self._mark()

    def _called(self, change: int) -> None:
        """Note that a backward runs a module, or has run it."""
        self._running += change if in_backward() else 0

    def _now(self) -> _Place:
        return self._inside[-1] if self._inside else (self.base, 1)

    def _mark(self) -> None:
        if not in_backward():
            self._from.append(private(torch._C._autograd, "_get_sequence_nr")())
            self._places.append(self._now())

    def _place(self) -> _Place:
        node = private(torch._C, "_current_autograd_node")() if in_backward() else None
        if node is not None and not self._inside:
            place = bisect_right(self._from, number_when_made(node))
            return self._places[place - 1] or (self.base, 1)
        return self._now()

    def _flops(self, func: Any, packet: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, int]:
        """Flops of an operation, and those of what it computes again."""
        name = str(packet)
        if "scaled_dot_product" in name or "flash_attention" in name:
            return _attention(func, packet, args, kwargs, out)
        if "grouped_mm" in name:
            return _grouped(name, args), 0
        if (formula := flop_registry.get(packet) or _FORMULAS.get(packet)) is not None:
            return int(formula(*args, **kwargs, out_val=out)), 0
        if isinstance(func, torch._ops.OpOverload) and func.namespace not in _KNOWN and name not in self._told:
            self._told.add(name)
            rank_zero_warn(f"ModalityThroughput: the flops of {name} are not known, and do not count")
        return 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and add its flops."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket if isinstance(func, torch._ops.OpOverload) else func
        flops, again = self._flops(func, packet, args, kwargs, out)
        if flops and not any(is_remote(tensor) or tensor.is_meta for _, tensor in tensors_in((args, out))):
            modality, copies = self._place()
            # gradients are off within functions of their own, also where their forward runs again
            is_again = in_backward() and (torch.is_grad_enabled() or self._running > 0)
            counted = 0 if is_again else flops / copies
            self.flops[modality] += counted
            self.again[modality] += flops + again - counted
        return out


def _given(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def allowed(mask: torch.Tensor) -> float:
    """Return the share of pairs that a mask of an attention allows, of booleans or of numbers added to scores."""
    return float((mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2).double().mean())


def _attention(func: Any, packet: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, int]:
    """Flops of a fused attention by the pairs that its mask allows, and those of scores that it computes again."""
    full = _FORMULAS.get(packet, flop_registry.get(packet))
    if full is None:
        return 0, 0
    given = _given(func, args, kwargs)
    query, key, value = given["query"], given["key"], given["value"]
    is_packed = given.get("cum_seq_q") is not None and query.ndim == 3
    queries, keys = (given["max_q"], given["max_k"]) if is_packed else (query.shape[-2], key.shape[-2])
    mask = given.get("attn_mask", given.get("attn_bias"))
    share = 1.0
    if mask is not None and mask.numel():
        share = allowed(mask)
    elif given.get("is_causal"):
        seen = min(queries, keys)  # query i sees keys 0 to i
        share = (seen * (seen + 1) / 2 + (queries - seen) * keys) / (queries * keys)
    flops = full(*args, **kwargs, out_val=out) * share
    width, value_width = query.shape[-1], value.shape[-1]
    again = flops * width / (3 * width + 2 * value_width) if "backward" in str(packet) else 0.0
    return round(flops - again), round(again)


def _grouped(name: str, args: Any) -> int:
    """Flops of products of rows [T, K], in groups, with a matrix each [E, K, N]; without padding of these rows."""
    rows, matrices = args[0], args[1]
    flops = 2 * rows.shape[-2] * rows.shape[-1] * matrices.shape[-1]
    if rows.ndim == matrices.ndim == 3:
        flops *= len(rows)
    return flops * (2 if "backward" in name else 1)
