"""The attention of a modality whose sequences are shared: of this rank's tokens to those of all ranks.

It is called by the modules of shared layers through transformers' interface (`interface`), or in place of torch's
``scaled_dot_product_attention``. Modules that read the same config elsewhere compute with the same kernel on what they
are given.

It refuses, at the first step at the latest, a bias of scores, dropout of attention weights, and keys that are not those
of the step (a cache from earlier calls).
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.masking_utils import causal_mask_function, packed_sequence_mask_function

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.context_parallel.exchange.attention import ContextGroups, Mode, context_attention, local_attention
from lightning_mm5d.context_parallel.hooks.interface import ContextMask
from lightning_mm5d.context_parallel.masks.caches import Cache, Caches
from lightning_mm5d.context_parallel.masks.mask import Mask, MaskFunction
from lightning_mm5d.sharded.tensor import Sharded
from lightning_mm5d.sharded.token_split import TokenSplit

_PRODUCT = F.scaled_dot_product_attention
_LOW = -1e3  # what a mask adds to scores that do not count is less


@dataclass(eq=False)
class Call:
    """One pass through a shared layer.

    Attributes:
        split: the tokens of each context parallel rank; None where ranks have whole items, or everything.
        crosses: for each attention of the layer in turn, whether its keys are those of another sequence, all of which
            are here; of those beyond its end, lengths tell.
        probes: whether the layer only runs to see what it mixes; then attention works on each token by itself.
        seen: queries and keys of each attention that has run.
    """

    split: TokenSplit | None
    crosses: tuple[bool, ...] = ()
    probes: bool = False
    seen: list[tuple[int, int]] = field(default_factory=list)

    def enters(self, queries: int, keys: int) -> bool:
        """Note the next attention; return whether its keys are those of another sequence."""
        self.seen.append((queries, keys))
        place = len(self.seen) - 1
        return self.crosses[place] if place < len(self.crosses) else queries != keys


class Attention:
    """The attention of one modality's shared layers.

    Args:
        name: of the modality, for errors.
        mode: how ranks reach each other's tokens.
        groups: its context parallel ranks.
        members: the modules in its layers.
        active: gives the run of a stage on a microbatch that is under way, forward or backward, if any.
        caches: of the session.

    Attributes:
        call: the pass through a layer that is under way.
        made: masks made since the layers last ran.
        takes_products: whether layers call ``scaled_dot_product_attention`` by themselves.
        used: how many layers have asked for the mask that is made first, second and so on in a step.
    """

    def __init__(
        self,
        name: str,
        mode: Mode,
        groups: ContextGroups,
        members: Iterable[nn.Module],
        active: Callable[[], Any],
        caches: Caches,
    ) -> None:
        self._name, self._mode, self._groups = name, mode, groups
        self.takes_products = False
        self._members = {id(module): module for module in members}  # kept, so that no other takes an id
        self._replays = False
        self.call: Call | None = None
        self.made: list[Mask] = []
        self.used: dict[int, int] = {}
        self._ran = False
        self._active = active
        self._noted: weakref.WeakKeyDictionary[Any, dict[Any, dict[Any, tuple[Call, bool]]]] = (
            weakref.WeakKeyDictionary()
        )
        self._caches, self._recent = caches, Cache(4)  # masks may be dense

    def forget(self) -> None:
        """Drop the masks."""
        self.made.clear()
        self._recent.clear()

    def knows(self, module: nn.Module) -> bool:
        """Whether a module is in the shared layers."""
        return id(module) in self._members

    @property
    def is_silent(self) -> bool:
        """Whether nothing may be communicated now."""
        return self._groups.is_silent

    def claims(self, module: nn.Module) -> bool:
        """Whether a module that is in no shared layers attends in one all the same; copies of layers do."""
        return self.call is not None or (self._replays and any(key[0] == id(module) for key in self._noted_now()))

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Around a backward, in which layers may be computed again."""
        self._replays = True
        before = [(space, name, space[name]) for space, name in self._products()] if self.takes_products else []
        for space, name, product in before:
            space[name] = partial(self._again, product)
        try:
            yield
        finally:
            self._replays = False
            for space, name, product in reversed(before):
                space[name] = product

    def _products(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Where shared layers find torch's attention: a function mode does not last through a backward."""
        spaces = {id(vars(F)): vars(F)}
        for module in self._members.values():
            space = getattr(inspect.unwrap(type(module).forward), "__globals__", {})
            spaces[id(space)] = space
        for space in spaces.values():
            for name, value in space.items():
                if value is _PRODUCT or (isinstance(value, partial) and value.func.__name__ == "_again"):
                    yield space, name

    def _again(self, before: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Torch's attention, called within a backward."""
        if self.call is not None:
            return self.product(*args, **kwargs)
        if before is not _PRODUCT:  # that of another modality
            return before(*args, **kwargs)
        raise ConfigError(
            f"modalities.{self._name}.cp_size",
            "activation checkpointing inside of a layer",
            "A layer that calls torch's attention by itself can be computed again as a whole only",
            "Put the checkpoint around the layer, leave it out, or use cp_size=1",
        )

    @contextmanager
    def during(self, call: Call) -> Iterator[Call]:
        """Work on a pass through a layer meanwhile."""
        before, self.call = self.call, call
        try:
            with _Products(self) if self.takes_products else nullcontext():
                yield call
        finally:
            self.call = before

    # --- masks ---

    def note(self, mask: Mask) -> None:
        """A mask was made for this modality."""
        if self._ran:
            self.made, self._ran = [], False
        self.made.append(mask)

    def work(self, size: int, block: int) -> Tensor:
        """What queries of each block of a sequence cost all layers, by the masks made for them: ``[ceil(S / block)]``.

        Units are pairs of a query and a key. Masks count by how many layers took them in earlier steps.
        """
        fitting = [index for index, mask in enumerate(self.made) if mask.q_length == mask.k_length == size]
        if not fitting:
            return torch.ones(-(-size // block), dtype=torch.int64)
        counts = [max(1, self.used.get(index, 0)) for index in fitting]
        unit = math.gcd(*counts)  # so that the same masks weigh the same in every step
        return torch.stack(
            [self.made[index].work(block).cpu() * (count // unit) for index, count in zip(fitting, counts, strict=True)]
        ).sum(0)

    def _mask_of(
        self,
        given: Any,
        module: Any,
        q: Tensor,
        k: Tensor,
        options: Mapping[str, Any],
        *,
        call: Call | None,
        crosses: bool,
    ) -> Mask:
        self._ran = True
        if isinstance(given, ContextMask):
            for index, mask in enumerate(self.made):
                if mask is given.mask:
                    self.used[index] = self.used.get(index, 0) + 1
            given.mask.caches = self._caches  # a user's own mask was made without a session
            return given.mask
        bounds = options.get("cu_seq_lens_q")
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        whole = call.split.size if call is not None and call.split is not None else q.shape[2]
        keys = k.shape[2] if call is None or crosses or call.split is None else whole
        shape = {"batch": q.shape[0], "q_length": whole, "k_length": keys, "device": q.device, "caches": self._caches}
        source = bounds if given is None else given
        is_causal = bool(causal) and not crosses
        key = (is_causal, *shape.values())
        return self._recent.get(key, lambda: self._new_mask(given, bounds, is_causal, shape), (source,))

    def _new_mask(self, given: Tensor | None, bounds: Tensor | None, causal: bool, shape: Mapping[str, Any]) -> Mask:
        if given is not None:
            if given.dim() != 4 or given.shape[1] != 1:
                raise self._refusal("attention_mask", list(given.shape), "A mask has the shape [B, 1, Sq, Sk]")
            lengths = {
                name: given.shape[dim] for name, dim in (("q_length", 2), ("k_length", 3)) if given.shape[dim] > 1
            }
            return Mask(self._dense(given), **{**shape, **lengths})
        if bounds is not None:
            return Mask(packed_sequence_mask_function(_segments(bounds)), **shape)
        function: Any = causal_mask_function if causal else None
        return Mask(function, **shape)

    def _dense(self, given: Tensor) -> MaskFunction:
        """The mask function of a dense mask, bool or added to scores."""
        if given.dtype != torch.bool:
            allowed = given == 0
            if given.requires_grad or bool(((given > _LOW) & ~allowed).any()):
                raise self._refusal("attention_mask", list(given.shape), "It adds a bias to scores")
            given = allowed
        rows, _, queries, keys = (int(size > 1) for size in given.shape)  # what has one entry has it for all
        return lambda b, h, q, k: given[b * rows, 0, q * queries, k * keys]

    # --- attention ---

    @torch.compiler.disable
    def product(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """What code asks ``torch.nn.functional.scaled_dot_product_attention`` for, in a shared layer."""
        lead = query.shape[:-3]
        q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
        mask = attn_mask
        if mask is not None and not isinstance(mask, ContextMask):
            mask = mask.reshape(-1, *mask.shape[-3:]) if mask.dim() > 2 else mask.unsqueeze(0)
            mask = mask.unsqueeze(1) if mask.dim() == 3 else mask
        out, _ = self.attend(None, q, k, v, mask, scaling=scale, dropout=dropout_p, is_causal=is_causal)
        return out.transpose(1, 2).reshape(*lead, *out.shape[2:3], *out.shape[1:2], out.shape[3])

    @torch.compiler.disable
    def attend(
        self,
        module: nn.Module | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """What transformers asks an attention interface for.

        Args:
            module: that attends; None for one of the shared layers.
            query: ``[B, H, S, D]``.
            key: ``[B, G, S, D]``, G of them for H queries.
            value: ``[B, G, S, Dv]``.
            attention_mask: a `ContextMask`, a dense mask of the whole sequence, or None.
            scaling: of scores; 1 / sqrt(D) where unset.
            dropout: of attention weights.
            softcap: of scores, as in Gemma 2.
            s_aux: sinks ``[H]``, as in GPT-OSS.
            position_bias: of scores.
            kwargs: what else models say: ``is_causal``, ``cu_seq_lens_q``.

        Returns:
            ``[B, S, H, Dv]`` and None.
        """
        if position_bias is not None:
            raise self._refusal("position_bias", list(position_bias.shape), "Its scores have a bias by position")
        if isinstance(query, Sharded) or isinstance(key, Sharded):  # of modules that are not in the shared layers
            query, key, value = (x.full() if isinstance(x, Sharded) else x for x in (query, key, value))
        call, crosses = self._turn(module, query.shape[2], key.shape[2])
        if call is not None and call.probes:
            return _by_token(query, key, value), None
        if dropout:
            raise self._refusal("dropout", dropout, "Attention weights lie on several ranks and are not dropped out")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        mask = self._mask_of(attention_mask, module, query, key, kwargs, call=call, crosses=crosses)
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": s_aux}
        if call is None or call.split is None:
            out = local_attention(query, key, value, mask, None, None, **options)
            return out.transpose(1, 2).contiguous(), None
        own = call.split.indices(self._groups.whole.index, mask.device)
        if query.shape[2] != len(own):
            raise self._refusal("queries", query.shape[2], f"The hidden state has {len(own)} tokens on this rank")
        if crosses:
            self._expect(mask, call.split.size, key.shape[2])
            out = local_attention(query, key, value, mask, own, None, **options)
        else:
            if key.shape[2] != query.shape[2]:
                raise self._refusal(
                    "past_key_values", key.shape[2], f"Keys of {query.shape[2]} tokens are here, and no cache of others"
                )
            self._expect(mask, call.split.size, call.split.size)
            if self._stays(call.split, kwargs.get("cu_seq_lens_q")):
                out = local_attention(query, key, value, mask, own, own, **options)
            else:
                out = context_attention(query, key, value, mask, call.split, self._groups, mode=self._mode, **options)
        return out.transpose(1, 2).contiguous(), None

    def _turn(self, module: nn.Module | None, queries: int, keys: int) -> tuple[Call | None, bool]:
        """The pass that an attention belongs to, and whether its keys are those of another sequence.

        What is computed again for its backward may begin in the midst of a layer. Then it is what it was when the
        layer ran.
        """
        run = self._active()
        if self.call is not None:
            crosses = self.call.enters(queries, keys)
            if run is not None and not self.call.probes:
                noted = self._noted.setdefault(run, {}).setdefault((id(module), queries, keys), {})
                noted[self.call.split, crosses] = (self.call, crosses)
            return self.call, crosses
        found = self._noted_now().get((id(module), queries, keys), {}) if self._replays else {}
        if len(found) > 1:
            raise ConfigError(
                f"modalities.{self._name}.cp_distribution",
                "makespan_min",
                "A step passes several times through layers that are computed again for their backward, each time with "
                "another split, and which one it was cannot be told",
                "Use 'zigzag', or no activation checkpointing",
            )
        return next(iter(found.values()), (None, False))

    def _noted_now(self) -> dict[Any, dict[Any, tuple[Call, bool]]]:
        """The passes of the run that is under way, by module and lengths."""
        run = self._active()
        return self._noted.get(run, {}) if run is not None else {}

    def _stays(self, split: TokenSplit, bounds: Tensor | None) -> bool:
        """Whether no token attends to those of another rank: each rank has whole segments of a packed sequence."""
        if bounds is None:
            return False
        known: bool = self._recent.get(split, lambda: _whole_segments(split, bounds), (bounds,))
        return known

    def _expect(self, mask: Mask, queries: int, keys: int) -> None:
        if (mask.q_length, mask.k_length) != (queries, keys):
            got = [mask.q_length, mask.k_length]
            raise self._refusal("attention_mask", got, f"The layers work on {queries} queries and {keys} keys")

    def _refusal(self, field: str, got: Any, rule: str) -> ConfigError:
        return ConfigError(
            f"modalities.{self._name}.cp_size", f"{field}={got}", rule, "Use cp_size=1, or leave it out of the model"
        )


def _whole_segments(split: TokenSplit, bounds: Tensor) -> bool:
    """Whether no rank has a part of a segment whose other parts are elsewhere."""
    cuts = {edge for part in split.ranges for piece in part for edge in piece}
    return cuts <= {*bounds.tolist()}


def _segments(bounds: Tensor) -> Tensor:
    """The number of its segment for each token, ``[1, S]``, of boundaries ``[n + 1]``."""
    lengths = bounds.diff()
    return torch.repeat_interleave(torch.arange(len(lengths), device=bounds.device), lengths).unsqueeze(0)


class _Products(TorchFunctionMode):
    """Hands calls of torch's attention to that of a modality."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self._attention = attention

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _PRODUCT:
            return self._attention.product(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _by_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Something of each token alone in which query, key and value all matter, ``[B, S, H, Dv]``."""
    groups = q.shape[1] // k.shape[1]
    if k.shape[2] != q.shape[2]:  # of another sequence
        return (q.sum(-1, keepdim=True) + v.mean((1, 2), keepdim=True)).transpose(1, 2).contiguous()
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    width = min(q.shape[-1], k.shape[-1])
    score = (q[..., :width] * k[..., :width]).sum(-1, keepdim=True)
    return (v * score.tanh()).transpose(1, 2).contiguous()
