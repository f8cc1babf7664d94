"""Registers this library's attention and masks with transformers, whose two interfaces call them by name.

The configs of sharded layers name them; no model is patched. The model's own code makes each mask, which comes out as
a `ContextMask`.

Several modalities (an encoder and a decoder) and modules outside of sharded layers (a pooling head) may read one
config. An `Interface` finds the attention of a module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    add_offsets_to_mask_function,
    and_masks,
    causal_mask_function,
    padding_mask_function,
    prepare_padding_mask,
)

from lightning_mm5d.context_parallel.hooks.context_mask import ContextMask
from lightning_mm5d.context_parallel.hooks.layer_attention import Attention
from lightning_mm5d.context_parallel.hooks.private_names import attention_name, name_attention
from lightning_mm5d.context_parallel.masks.caches import Caches
from lightning_mm5d.context_parallel.masks.mask import Mask, MaskFunction

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
        self._adds: set[int] = set()  # configs whose own attention adds its masks
        self._named: dict[int, tuple[Any, str | None]] = {}  # configs by their id, and the attention of their own
        own = weakref.ref(self)
        for name in (_NAME, _PACKED):
            AttentionInterface.register(name, partial(_attend, own))
            AttentionMaskInterface.register(name, partial(_make_mask, own))

    def add(self, attention: Attention, configs: Iterable[Any], packed: bool) -> None:
        """Let layers compute with an attention.

        Args:
            attention: knows its modules.
            configs: those that its modules and their masks read.
            packed: whether its layers take the boundaries of packed sequences.
        """
        found = list(configs)
        self._attention.append((attention, {id(config) for config in found}))
        for config in found:
            own = attention_name(config)
            if own == "eager":
                self._adds.add(id(config))
            self._named.setdefault(id(config), (config, own))
            _name(config, _PACKED if packed else _NAME)

    def remove(self) -> None:
        """Let the configs name what they named before."""
        for config, name in self._named.values():
            _name(config, name)
        self._named.clear()
        self._attention.clear()
        self._adds.clear()
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
        configs = next(ids for one, ids in self._attention if one is attention)
        changed = [
            (config, own, attention_name(config)) for key, (config, own) in self._named.items() if key in configs
        ]
        for config, own, _ in changed:
            _name(config, own)
        try:
            with attention.off():
                yield
        finally:
            for config, _, name in changed:
                _name(config, name)

    def attend(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Attend as the modality of `module` does; the arguments are those of `Attention.attend`."""
        known = [attention for attention, _ in self._attention]
        of = next((one for one in known if one.knows(module)), None)
        of = of or next((one for one in known if one.claims(module)), known[0])
        return of.attend(module, *args, **kwargs)

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
        if padding is not None:
            mask_function = and_masks(mask_function, padding_mask_function(padding))
        if not (isinstance(q_offset, int) and isinstance(kv_offset, int) and q_offset == kv_offset == 0):
            mask_function = add_offsets_to_mask_function(mask_function, q_offset, kv_offset)
        shape = {"batch": batch_size, "q_length": q_length, "k_length": kv_length}
        mask = Mask(mask_function, **shape, device=device, caches=self.caches)
        for attention, configs in self._attention:
            if id(config) in configs:
                attention.masks.note(mask)
        return ContextMask.of(mask, dtype if id(config) in self._adds else torch.bool)


def _attend(own: Callable[[], Interface | None], *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    interface = own()
    assert interface is not None, "the session of this attention is closed"
    return interface.attend(*args, **kwargs)


def _make_mask(own: Callable[[], Interface | None], *args: Any, **kwargs: Any) -> ContextMask:
    interface = own()
    assert interface is not None, "the session of this mask is closed"
    return interface.make_mask(*args, **kwargs)


def _name(config: Any, name: str | None) -> None:
    """Choose an attention for `config` alone; transformers sets its parts as well."""
    parts = [(part, attention_name(part)) for part in _parts(config)]
    name_attention(config, name)
    for part, own in parts:
        name_attention(part, own)


def _parts(config: Any) -> list[Any]:
    """The configs that a config sets together with itself."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return [one for part in parts if part is not None for one in (part, *_parts(part))]
