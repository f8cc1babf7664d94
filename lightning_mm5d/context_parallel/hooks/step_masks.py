"""The masks of one modality in a step: which mask an attention follows, and what the masks cost each token.

It refuses (`ConfigError`) masks that add a bias to scores and masks of another shape than ``[B, 1, Sq, Sk]``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, packed_sequence_mask_function

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.context_parallel.hooks.context_mask import ContextMask
from lightning_mm5d.context_parallel.masks.caches import Cache, Caches
from lightning_mm5d.context_parallel.masks.mask import Mask, MaskFunction
from lightning_mm5d.sharded.host_copies import on_device

_LOW = -1e3  # added to the score of a key that a query does not see, masks hold less
Refusal = Callable[[str, Any, str], ConfigError]


class StepMasks:
    """The masks that a model made since its sharded layers last ran, and those that attention asks for.

    Args:
        refusal: makes the error of a field, what it got and the rule.
        caches: of the session.
        active: returns what runs now, or None; another one makes masks of its own.
    """

    def __init__(self, refusal: Refusal, caches: Caches, active: Callable[[], Any] = lambda: None) -> None:
        self._refusal, self._caches, self._active = refusal, caches, active
        self._made_in: Callable[[], Any] = lambda: None
        self._made: list[Mask] = []
        self._layers: dict[int, int] = {}  # how many layers of all steps took the first mask of a step, the second ...
        self._ran = False
        self._recent = Cache(4)  # masks may be dense

    def clear(self) -> None:
        """Drop the masks."""
        self._made = []
        self._recent.clear()

    def take(self) -> Any:
        """Return what belongs to the microbatch that is computed."""
        return self._made_in, self._made, self._ran

    def put(self, state: Any) -> None:
        """Go on with the microbatch that `take` returned `state` of."""
        self._made_in, self._made, self._ran = state

    def note(self, mask: Mask) -> None:
        """Remember a mask that the model made; the first one of a run, and after layers ran, begins a new step.

        A run may make masks of one microbatch and run no layers, where it computes an encoder alone.
        """
        now = self._active()
        if self._ran or now is not self._made_in():
            self._made, self._ran = [], False
            self._made_in = (lambda: None) if now is None else weakref.ref(now)
        self._made = [*self._made, mask]

    def work(self, size: int, block: int) -> Tensor:
        """What the queries of each block of a sequence cost all layers: int64 ``[ceil(S / block)]``.

        Units are pairs of a query and a key. Masks count by how many layers took them in earlier steps.

        Args:
            size: tokens of the sequence, S.
            block: tokens of a block.
        """
        fitting = [index for index, mask in enumerate(self._made) if mask.q_length == mask.k_length == size]
        if not fitting:
            return torch.ones(-(-size // block), dtype=torch.int64)
        counts = [max(1, self._layers.get(index, 0)) for index in fitting]
        unit = math.gcd(*counts)  # so that the same masks weigh the same in every step
        works = [self._made[index].work(block).cpu() for index in fitting]
        return torch.stack([work * (count // unit) for work, count in zip(works, counts, strict=True)]).sum(0)

    def of(
        self,
        given: Tensor | None,
        bounds: Tensor | None,
        *,
        is_causal: bool,
        batch: int,
        q_length: int,
        k_length: int,
        device: torch.device,
    ) -> Mask:
        """Return the mask that an attention follows.

        Args:
            given: a `ContextMask`, a dense mask ``[B, 1, Sq, Sk]``, or None.
            bounds: boundaries of the segments of a packed sequence ``[n + 1]``; used where no mask is given.
            is_causal: whether a query sees only the keys before it, where neither is given.
            batch: rows, B.
            q_length: queries of all ranks.
            k_length: keys of all ranks.
            device: of the queries.
        """
        self._ran = True
        if isinstance(given, ContextMask):
            for index, mask in enumerate(self._made):
                if mask is given.mask:
                    self._layers[index] = self._layers.get(index, 0) + 1
            given.mask.caches = self._caches  # a user's own mask was made without a session
            return given.mask
        shape: dict[str, Any] = {
            "batch": batch,
            "q_length": q_length,
            "k_length": k_length,
            "device": device,
            "caches": self._caches,
        }
        source = bounds if given is None else given

        def make() -> Mask:
            if given is not None:
                return self._dense(given, shape)
            if bounds is not None:
                return Mask(packed_sequence_mask_function(self._segments(bounds)), **shape)
            function: Any = causal_mask_function if is_causal else None
            return Mask(function, **shape)

        found: Mask = self._recent.get((is_causal, *shape.values()), make, (source,))
        return found

    def _segments(self, bounds: Tensor) -> Tensor:
        """The number of its segment for each token, ``[1, S]``, of boundaries ``[n + 1]``."""
        host = self._caches.host
        lengths = host.of(bounds).diff()
        known = torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), lengths).unsqueeze(0)
        segments = on_device(known, bounds.device)
        host.note(segments, known)
        return segments

    def check(self, given: Tensor | None) -> None:
        """Refuse a tensor that adds a bias to scores, or has another shape than ``[B, 1, Sq, Sk]``."""
        if given is None or isinstance(given, ContextMask):
            return
        if given.dim() != 4 or given.shape[1] != 1:
            raise self._refusal("attention_mask", list(given.shape), "A mask has the shape [B, 1, Sq, Sk]")
        if given.dtype != torch.bool:
            known = self._caches.host.of(given)
            if given.requires_grad or bool(((known > _LOW) & (known != 0)).any()):
                raise self._refusal("attention_mask", list(given.shape), "It adds a bias to scores")

    def _dense(self, given: Tensor, shape: Mapping[str, Any]) -> Mask:
        """The mask of a dense one, bool or added to scores."""
        self.check(given)
        allowed = given
        if given.dtype != torch.bool:
            allowed = given == 0
            self._caches.host.note(allowed, self._caches.host.of(given) == 0)
        lengths = {name: given.shape[dim] for name, dim in (("q_length", 2), ("k_length", 3)) if given.shape[dim] > 1}
        rows, _, queries, keys = (int(size > 1) for size in given.shape)  # a dim of size 1 has one entry for all
        function: MaskFunction = lambda b, h, q, k: allowed[b * rows, 0, q * queries, k * keys]  # noqa: E731
        return Mask(function, **{**shape, **lengths})
