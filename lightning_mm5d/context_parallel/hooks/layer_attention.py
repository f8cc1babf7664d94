"""The attention of sharded layers, of this rank's tokens to the tokens of all ranks, and how transformers calls it.

Modules of these layers call it through transformers' interface (`Interface`), or in place of torch's
``scaled_dot_product_attention`` (`TorchAttention`). Modules elsewhere that read the same config compute with the same
kernel on what they are given.

It refuses (`ConfigError`), at the first step at the latest, a bias of scores, dropout of attention weights, and keys
of earlier calls (a cache).

**Interface.** The configs of sharded layers name them; no model is patched. The model's own code makes each mask, which
comes out as a `ContextMask`.

Several modalities (an encoder and a decoder) and modules outside of sharded layers (a pooling head) may read one
config. An `Interface` finds the attention of a module.

**Private names** of torch and transformers have one function each, which raises `ImportError` where the name has moved:
neither library has a public way to read them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    add_offsets_to_mask_function,
    and_masks,
    causal_mask_function,
    padding_mask_function,
    prepare_padding_mask,
)
from transformers.utils import output_capturing

from lightning_mm5d.config.errors import ConfigError, private
from lightning_mm5d.context_parallel.exchange.attention import ContextGroups, Mode, context_attention, local_attention
from lightning_mm5d.context_parallel.hooks.context_mask import ContextMask, StepMasks
from lightning_mm5d.context_parallel.masks.mask import Cache, Caches, Mask, MaskFunction
from lightning_mm5d.sharded.kept_results import unseen
from lightning_mm5d.sharded.removable import meanwhile
from lightning_mm5d.sharded.sequence import TokenSplit
from lightning_mm5d.sharded.tensor import Sharded
from lightning_mm5d.sharded.torch_internals import in_checkpoint, saved_tensor_hooks

_SETTING = "_attn_implementation"


def collector() -> ContextVar[dict[str, Any] | None]:
    """Return the variable with the records that a transformers model collects now, such as router logits."""
    return cast("ContextVar[dict[str, Any] | None]", private(output_capturing, "_active_collector"))


def attention_name(config: Any) -> str | None:
    """Return the name of the attention that a transformers config chooses."""
    return cast("str | None", private(config, _SETTING))


def name_attention(config: Any, name: str | None) -> None:
    """Choose an attention, for a config and all that it sets together with itself."""
    private(config, _SETTING)
    setattr(config, _SETTING, name)


class TorchAttention(TorchFunctionMode):
    """Calls `attend` in place of ``scaled_dot_product_attention``.

    A function mode does not reach what autograd computes again in a backward. A layer that is computed again as a whole
    enters its mode again. A checkpoint that begins inside of a layer would compute torch's own attention of local
    tokens, without an error: it is refused (`ConfigError`) in the forward.

    Args:
        name: the modality, for errors.
        attend: takes what transformers gives an attention: module, query, key, value, mask and options.
        is_differentiated: whether a backward passes through the layer.
        is_off: whether the attention that runs now is torch's.
    """

    def __init__(
        self, name: str, attend: Callable[..., tuple[Tensor, None]], is_differentiated: bool, is_off: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._name, self._attend, self._is_off = name, attend, is_off
        self._records = is_differentiated and torch.is_grad_enabled()
        self._hooks = saved_tensor_hooks() if self._records else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention or self._is_off():
            return func(*args, **(kwargs or {}))
        if self._is_checkpointed():
            rule = "A layer that calls torch's attention by itself can be computed again as a whole only"
            fix = "Put the checkpoint around the layer, leave it out, or use cp_size=1"
            raise ConfigError(
                f"modalities.{self._name}.cp_size", "activation checkpointing inside of a layer", rule, fix
            )
        return self._product(*args, **(kwargs or {}))

    def _is_checkpointed(self) -> bool:
        """Whether a checkpoint began after the layer did: reentrant ones record no graph, others hook what is saved."""
        if not self._records:
            return False
        return not torch.is_grad_enabled() or (in_checkpoint() and saved_tensor_hooks() != self._hooks)

    @torch.compiler.disable
    def _product(
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
        """``[..., H, S, D]`` -> ``[..., H, S, Dv]``; the arguments are torch's."""
        lead = query.shape[:-3]
        q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
        mask = attn_mask
        if mask is not None and not isinstance(mask, ContextMask):
            mask = mask.reshape(-1, *mask.shape[-3:]) if mask.dim() > 2 else mask.unsqueeze(0)
            mask = mask.unsqueeze(1) if mask.dim() == 3 else mask
        out, _ = self._attend(None, q, k, v, mask, scaling=scale, dropout=dropout_p, is_causal=is_causal)
        return out.transpose(1, 2).reshape(*lead, *out.shape[2:3], *out.shape[1:2], out.shape[3])


@dataclass(eq=False)
class Call:
    """One call of a sharded layer.

    Attributes:
        split: the tokens of each context parallel rank; None where ranks have whole items, or everything.
        crosses: for each attention of the layer in turn, whether its keys are the tokens of another sequence, all of
            which are on this rank. Attentions beyond its end cross where they have more or fewer keys than queries.
        is_probe: whether the layer only runs to find out what it mixes; attention then works on each token by itself.
        is_differentiated: whether a backward passes through the layer.
        seen: numbers of queries and keys of each attention that has run.
    """

    split: TokenSplit | None
    crosses: tuple[bool, ...] = ()
    is_probe: bool = False
    is_differentiated: bool = False
    seen: list[tuple[int, int]] = field(default_factory=list)

    def enters(self, queries: int, keys: int) -> bool:
        """Note the next attention; return whether its keys are the tokens of another sequence."""
        self.seen.append((queries, keys))
        place = len(self.seen) - 1
        return self.crosses[place] if place < len(self.crosses) else queries != keys


_Turn = tuple[TokenSplit | None, bool]  # how queries are split, and whether keys are of another sequence
_Place = tuple[int, int, int]  # id of the module, queries, keys


class Attention:
    """The attention of one modality's sharded layers.

    Args:
        name: the modality, for errors.
        mode: how ranks reach each other's tokens.
        groups: its context parallel ranks.
        members: the modules in its layers.
        active: gives the run of a stage on a microbatch that is under way, forward or backward, if any.
        caches: of the session.

    Attributes:
        masks: the masks of the step.
        takes_products: whether layers call ``scaled_dot_product_attention`` by themselves.
        is_replaying: whether a backward is under way, in which attention may be computed again.
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
        self.masks, self._host = StepMasks(self._refusal, caches, active), caches.host
        self._members = {id(module): module for module in members}  # kept, so that no other takes an id
        self.is_replaying, self._is_off = False, False
        self._call: Call | None = None
        self._active = active
        self._noted: weakref.WeakKeyDictionary[Any, dict[_Place, set[_Turn]]] = weakref.WeakKeyDictionary()
        self._recent = Cache(4)

    def forget(self) -> None:
        """Drop the masks and what is known of them."""
        self.masks.clear()
        self._recent.clear()

    def knows(self, module: nn.Module) -> bool:
        """Whether a module is in the sharded layers."""
        return id(module) in self._members

    def claims(self, module: nn.Module) -> bool:
        """Whether an unknown module attends inside of a sharded layer, as the copy of a layer does."""
        return self._call is not None or (self.is_replaying and any(key[0] == id(module) for key in self._noted_now()))

    def take(self) -> Any:
        """Return what belongs to the microbatch that is computed."""
        return self.is_replaying, self._is_off, self._call

    def put(self, state: Any) -> None:
        """Go on with the microbatch that `take` returned `state` of."""
        self.is_replaying, self._is_off, self._call = state

    def replaying(self) -> AbstractContextManager[None]:
        """Around a backward, in which attention may be computed again."""
        return meanwhile(self, is_replaying=True)

    @contextmanager
    def during(self, call: Call) -> Iterator[Call]:
        """Attend as `call` says meanwhile."""
        options = (call.is_differentiated, lambda: self._is_off)
        takes = TorchAttention(self._name, self.attend, *options) if self.takes_products else nullcontext()
        with meanwhile(self, _call=call), takes:
            yield call

    def off(self) -> AbstractContextManager[None]:
        """Leave attention alone meanwhile: what attends has all tokens."""
        return meanwhile(self, _call=None, _is_off=True)

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
        """Compute what transformers asks an attention interface for.

        Args:
            module: that attends; None for one of the sharded layers.
            query: ``[B, H, S, D]``.
            key: ``[B, G, S, D]``, G of them for H queries.
            value: ``[B, G, S, Dv]``.
            attention_mask: a `ContextMask`, a dense mask of the full sequence, or None.
            scaling: of scores; 1 / sqrt(D) where unset.
            dropout: of attention weights.
            softcap: of scores, as in Gemma 2.
            s_aux: sinks ``[H]``, as in GPT-OSS.
            position_bias: of scores.
            kwargs: what else models say: ``is_causal``, ``cu_seq_lens_q``.

        Returns:
            ``[B, S, H, Dv]`` and None.

        Raises:
            ConfigError: a bias, dropout, or lengths that do not fit the tokens of this rank.
        """
        if position_bias is not None:
            raise self._refusal("position_bias", list(position_bias.shape), "Its scores have a bias by position")
        if isinstance(query, Sharded) or isinstance(key, Sharded):  # of modules that are not in the sharded layers
            query, key, value = (x.full() if isinstance(x, Sharded) else x for x in (query, key, value))
        if self._call is not None and self._call.is_probe:
            self.masks.check(attention_mask)
            self._call.enters(query.shape[2], key.shape[2])
            return _by_token(query, key, value), None
        split, crosses = self._turn(module, query.shape[2], key.shape[2])
        if dropout:
            raise self._refusal("dropout", dropout, "Attention weights lie on several ranks and are not dropped out")
        bounds, causal = kwargs.get("cu_seq_lens_q"), kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if not causal and isinstance(attention_mask, ContextMask) and attention_mask.is_left_out():
            attention_mask = None  # so one process sees all keys, although the model has asked for a causal mask
        with unseen():  # the first layer of a step makes it
            mask = self.masks.of(
                attention_mask,
                bounds,
                is_causal=bool(causal) and not crosses,
                batch=query.shape[0],
                q_length=query.shape[2] if split is None else split.size,
                k_length=key.shape[2] if crosses or split is None else split.size,
                device=query.device,
            )
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": s_aux}
        if split is None:
            out = local_attention(query, key, value, mask, None, None, **options)
        else:
            self._check_lengths(query, key, mask, split, crosses)
            tokens = split.indices(self._groups.whole.index, mask.device)
            if crosses or self._stays(split, bounds):
                out = local_attention(query, key, value, mask, tokens, None if crosses else tokens, **options)
            else:
                out = context_attention(query, key, value, mask, split, self._groups, mode=self._mode, **options)
        return out.transpose(1, 2).contiguous(), None

    def _turn(self, module: nn.Module | None, queries: int, keys: int) -> _Turn:
        """How an attention is split: as the call of its layer says, or as it was when it is computed again.

        What a backward computes again may begin in the midst of a layer, without a call.
        """
        place, run = (id(module), queries, keys), self._active()
        if self._call is not None:
            turn = self._call.split, self._call.enters(queries, keys)
            if run is not None:
                self._noted.setdefault(run, {}).setdefault(place, set()).add(turn)
            return turn
        turns = self._noted_now().get(place, set()) if self.is_replaying else set()
        if len(turns) > 1:
            rule = (
                "A step calls layers several times that are computed again for their backward, each time with another "
                "split, and their backward cannot tell which split it was"
            )
            fix = "Use 'zigzag', or no activation checkpointing"
            raise ConfigError(f"modalities.{self._name}.context.cp_distribution", "makespan_min", rule, fix)
        return next(iter(turns), (None, False))

    def _noted_now(self) -> dict[_Place, set[_Turn]]:
        """The attentions of the run that is under way."""
        run = self._active()
        return self._noted.get(run, {}) if run is not None else {}

    def _stays(self, split: TokenSplit, bounds: Tensor | None) -> bool:
        """Whether each rank has whole segments of a packed sequence, so that no token attends to another rank's."""
        if bounds is None:
            return False
        # whether no rank has tokens of a segment whose other tokens are elsewhere
        cuts = {edge for part in split.ranges for piece in part for edge in piece}
        return self._recent.get(split, lambda: cuts <= {*self._host.of(bounds).tolist()}, (bounds,))

    def _check_lengths(self, query: Tensor, key: Tensor, mask: Mask, split: TokenSplit, crosses: bool) -> None:
        queries, keys, length = query.shape[2], key.shape[2], split.lengths[self._groups.whole.index]
        if queries != length:
            raise self._refusal("queries", queries, f"The hidden state has {length} tokens on this rank")
        if not crosses and keys != queries:
            rule = f"Keys of {queries} tokens are here, and no cache of others"
            raise self._refusal("past_key_values", keys, rule)
        all_keys = keys if crosses else split.size
        if (mask.q_length, mask.k_length) != (split.size, all_keys):
            got = [mask.q_length, mask.k_length]
            raise self._refusal("attention_mask", got, f"The layers work on {split.size} queries and {all_keys} keys")

    def _refusal(self, field: str, got: Any, rule: str) -> ConfigError:
        fix = "Use cp_size=1, or leave it out of the model"
        return ConfigError(f"modalities.{self._name}.cp_size", f"{field}={got}", rule, fix)


def _by_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Something of each token alone in which query, key and value all matter, ``[B, S, H, Dv]``."""
    groups = q.shape[1] // k.shape[1]
    if k.shape[2] != q.shape[2]:  # of another sequence
        return (q.sum(-1, keepdim=True) + v.mean((1, 2), keepdim=True)).transpose(1, 2).contiguous()
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    width = min(q.shape[-1], k.shape[-1])
    score = (q[..., :width] * k[..., :width]).sum(-1, keepdim=True)
    return (v * score.tanh()).transpose(1, 2).contiguous()


_NAME = "mm5d_context"
_PACKED = "mm5d_context_flash"  # "flash" makes vision towers hand over packed images at once, with their boundaries


class Interface:
    """The attention of all modalities of one rank, as transformers calls it.

    The registries cannot forget, so they hold it by a weak reference.

    Attributes:
        caches: of this session's context parallelism; `remove` clears them.
    """

    def __init__(self) -> None:
        self.caches = Caches()
        self._attention: list[tuple[Attention, set[int]]] = []
        self._named: dict[int, tuple[Any, str | None]] = {}  # configs by their id, and the attention of their own
        reference = weakref.ref(self)
        for name in (_NAME, _PACKED):
            AttentionInterface.register(name, partial(_attend, reference))
            AttentionMaskInterface.register(name, partial(_make_mask, reference))

    def add(self, attention: Attention, configs: Iterable[Any], packed: bool) -> None:
        """Let layers compute with an attention.

        Args:
            attention: knows its modules.
            configs: those that its modules and their masks read.
            packed: whether its layers take the boundaries of packed sequences.
        """
        config_list = list(configs)
        self._attention.append((attention, {id(config) for config in config_list}))
        for config in config_list:
            self._named.setdefault(id(config), (config, attention_name(config)))
            _name(config, _PACKED if packed else _NAME)

    def remove(self) -> None:
        """Let the configs name what they named before."""
        for config, name in self._named.values():
            _name(config, name)
        self._named.clear()
        self._attention.clear()
        self.caches.clear()

    def take(self) -> Any:
        """Return what belongs to the microbatch that is computed: the attention that each config names."""
        return [(config, attention_name(config)) for config, _ in self._named.values()]

    def put(self, state: Any) -> None:
        """Go on with the microbatch that `take` returned `state` of."""
        for config, name in state:
            if attention_name(config) != name:
                _name(config, name)

    @contextmanager
    def left_alone(self, attention: Attention) -> Iterator[None]:
        """Let the modules of `attention` attend as without context parallelism meanwhile."""
        configs = next(ids for candidate, ids in self._attention if candidate is attention)
        before = self.take()
        for key in configs:
            _name(*self._named[key])
        try:
            with attention.off():
                yield
        finally:
            self.put(before)

    def attend(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Attend as the modality of `module` does; the arguments are those of `Attention.attend`."""
        attentions = [attention for attention, _ in self._attention]
        chosen = next((attention for attention in attentions if attention.knows(module)), None)
        chosen = chosen or next((attention for attention in attentions if attention.claims(module)), attentions[0])
        return chosen.attend(module, *args, **kwargs)

    @torch.compiler.disable
    def make_mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        kv_offset: int = 0,
        mask_function: MaskFunction = causal_mask_function,  # type: ignore[assignment]
        attention_mask: Tensor | None = None,
        device: torch.device | str = "cpu",
        config: Any = None,
        dtype: torch.dtype = torch.float32,
        **kwargs: Any,
    ) -> ContextMask:
        """Make a mask and note it for the modalities that read `config`; the arguments are those of ``sdpa_mask``."""
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        original = self._named.get(id(config), (None, None))[1]
        # as `sdpa_mask` and `flash_attention_mask` do where nothing is padded
        skips = kwargs.get("allow_is_causal_skip", True) and original not in ("eager", "flex_attention")
        skips = skips and mask_function is causal_mask_function and q_length == kv_length
        if padding is not None:
            mask_function = and_masks(mask_function, padding_mask_function(padding))
        if not (isinstance(q_offset, int) and isinstance(kv_offset, int) and q_offset == kv_offset == 0):
            mask_function = add_offsets_to_mask_function(mask_function, q_offset, kv_offset)
        shape = {"batch": batch_size, "q_length": q_length, "k_length": kv_length}
        mask = Mask(mask_function, **shape, device=device, caches=self.caches)
        for attention, configs in self._attention:
            if id(config) in configs:
                attention.masks.note(mask)
        context_mask = ContextMask.of(mask, dtype if original == "eager" else torch.bool)  # which adds its masks
        if skips:
            context_mask.is_left_out = cache(partial(_has_no_padding, padding))  # for a device the host waits once
        return context_mask


def _has_no_padding(padding: Tensor | None) -> bool:
    return padding is None or bool(padding.all())


def _attend(reference: Callable[[], Interface | None], *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    interface = reference()
    assert interface is not None, "the session of this attention is closed"
    return interface.attend(*args, **kwargs)


def _make_mask(reference: Callable[[], Interface | None], *args: Any, **kwargs: Any) -> ContextMask:
    interface = reference()
    assert interface is not None, "the session of this mask is closed"
    return interface.make_mask(*args, **kwargs)


def _name(config: Any, name: str | None) -> None:
    """Choose an attention for `config` alone; transformers sets its parts as well."""
    parts = [(part, attention_name(part)) for part in _parts(config)]
    name_attention(config, name)
    for part, original in parts:
        name_attention(part, original)


def _parts(config: Any) -> list[Any]:
    """The configs that a config sets together with itself."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return [nested for part in parts if part is not None for nested in (part, *_parts(part))]
