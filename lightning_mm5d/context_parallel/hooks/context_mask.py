"""A mask that knows its rule: a tensor without memory that tells, for any queries and keys, which of them meet.

Sharded layers compute from the rule. Any other code that reads the tensor gets the dense mask.

The masks of one modality in a step: which mask an attention follows, and what the masks cost each token.

It refuses (`ConfigError`) masks that add a bias to scores and masks of another shape than ``[B, 1, Sq, Sk]``.

The mask of a multimodal sequence in one int64 per token, after Cornstarch (Jang et al. 2025, arXiv 2503.11367).

Text is causal; images, sounds and the like attend within themselves in both directions; documents packed into one
sequence do not see each other. All of it follows from one number per token:

====== ======== ====================================================================================================
bits   field    content
====== ======== ====================================================================================================
0-15   modality bit m: modality m, bit 0: text. A token of an encoder has the bit of its own modality; a token of text
                has bit 0 and the bits of all modalities that it sees
16-38  group    number of the image (sound, ...) within its modality and document; 0 for text
39-61  document number of the document
====== ======== ====================================================================================================

A query sees a key of its own document. Text sees tokens up to its own place that have a modality bit in common with it;
any other token sees those of the same modality and group. So `pack` is Cornstarch's bitfield with fields for images and
documents added, and `mask_function` is a mask function as transformers' are.

It refuses numbers that do not fit their fields (`ConfigError`).

Shapes: B batch, S tokens.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.masking_utils import causal_mask_function, packed_sequence_mask_function

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.context_parallel.masks.mask import Cache, Caches, Mask
from lightning_mm5d.context_parallel.masks.trace import MaskFunction
from lightning_mm5d.data.lazy import on_device

MODALITIES = 16
GROUP_AT, DOCUMENT_AT = 16, 39
FIELD = 1 << 23  # groups of a modality and document, and documents of a sequence


def pack(
    modality: Tensor,
    *,
    group: Tensor | None = None,
    document: Tensor | None = None,
    sees: Iterable[int] | Tensor | None = None,
) -> Tensor:
    """Return the bitfield of each token.

    Args:
        modality: 0 for text, 1 to 15 for encoders, integers [B, S].
        group: number of the image (or sound, ...) of each token, 0 to 2 ** 23 - 1, integers [B, S]; ignored
            for text. Tokens of a modality and document are one group where this is None.
        document: number of the document of each token, 0 to 2 ** 23 - 1, integers [B, S]; one document where None.
            Padding may be a document of its own.
        sees: modalities that text sees beside text: numbers, or for each token the bits of the modalities, integers
            [B, S]. All of them where None.

    Returns:
        Int64 [B, S] on the device of `modality`.

    Raises:
        ConfigError: where a number does not fit its field, a tensor does not hold integers or has another shape.
    """
    _check("modality", modality, modality, MODALITIES)
    is_text = modality == 0
    bits = torch.ones_like(modality, dtype=torch.int64) << modality.to(torch.int64)
    text = _seen(sees, modality)
    packed = torch.where(is_text, text | 1, bits)
    for name, field, at in (("group", group, GROUP_AT), ("document", document, DOCUMENT_AT)):
        if field is not None:
            field = field.masked_fill(is_text, 0) if name == "group" and field.shape == modality.shape else field
            _check(name, field, modality, FIELD)
            packed = packed | (field.to(modality.device, torch.int64) << at)
    return packed


def mask_function(bits: Tensor) -> MaskFunction:
    """Return the mask function of bitfields.

    It serves as a mask function of transformers: alone, as ``and_mask_function`` of a bidirectional mask, or as both
    ``or_mask_function`` and ``and_mask_function`` of a causal one, which leaves nothing of the causal one.

    Args:
        bits: what `pack` returns, int64 [B, S].
    """

    def mask(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        of_q, of_k = bits[batch, q], bits[batch, k]
        modalities = (1 << MODALITIES) - 1
        is_text = (of_q & 1) == 1
        is_shared = ((of_q & modalities) & (of_k & modalities)) != 0
        in_document = (of_q >> DOCUMENT_AT) == (of_k >> DOCUMENT_AT)
        return (is_text & (k <= q) & in_document & is_shared) | (~is_text & (of_q == of_k))

    return mask


def _seen(sees: Iterable[int] | Tensor | None, modality: Tensor) -> Tensor:
    """Bits of the modalities that text sees, int64, [] or [B, S]."""
    if isinstance(sees, Tensor):
        _check("sees", sees, modality, 1 << MODALITIES)
        return sees.to(modality.device, torch.int64)
    numbers = range(MODALITIES) if sees is None else list(sees)
    for number in numbers:
        if not 0 <= number < MODALITIES:
            raise ConfigError("sees", number, f"Modalities are 0 to {MODALITIES - 1}", "Leave it out")
    return torch.tensor(sum({1 << number for number in numbers}), device=modality.device)


def _check(name: str, field: Tensor, modality: Tensor, limit: int) -> None:
    """Raise unless `field` has the shape of `modality` and holds integers from 0 to below `limit`."""
    if field.dtype.is_floating_point or field.dtype.is_complex or field.dtype == torch.bool:
        raise ConfigError(name, field.dtype, "Fields are integers", f"Pass {name}.long()")
    if field.dim() != 2 or field.shape != modality.shape:
        fix = f"Pass {tuple(modality.shape)}" if modality.dim() == 2 else "Pass one number per token of each row"
        raise ConfigError(name, tuple(field.shape), "All fields have the shape (batch, tokens) of modality", fix)
    low, high = (int(field.min()), int(field.max())) if field.numel() else (0, 0)
    if low < 0 or high >= limit:
        many = {"modality": "Merge modalities", "sees": "Use bits 0 to 15 only"}.get(
            name, f"Number the {name}s of each sequence from 0"
        )
        raise ConfigError(name, low if low < 0 else high, f"Its numbers are 0 to {limit - 1}", many)


class ContextMask(Tensor):
    """A mask as a zero-stride tensor ``[B, 1, Sq, Sk]``; operations on it get the dense mask.

    Its dtype is bool, or the dtype of the scores that the dense mask is added to.

    Attributes:
        mask: which keys each query may see.
        is_left_out: whether one process makes no mask and leaves it to the ``is_causal`` of the attention.
    """

    mask: Mask
    is_left_out: Callable[[], bool]

    @staticmethod
    def of(mask: Mask, dtype: torch.dtype = torch.bool) -> ContextMask:
        """Return `mask` as a tensor."""
        shape = (mask.batch, 1, mask.q_length, mask.k_length)
        result = torch.ones((), dtype=dtype, device=mask.device).expand(shape).as_subclass(ContextMask)
        result.mask, result.is_left_out = mask, bool
        return result

    def dense(self) -> Tensor:
        """Return the mask with all its elements: True, or 0 in a mask to be added, where a query sees a key."""
        allowed = self.mask.dense()
        if self.dtype == torch.bool:
            return allowed
        lowest = torch.finfo(self.dtype).min
        return torch.zeros((), dtype=self.dtype, device=allowed.device).masked_fill(~allowed, lowest)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_SHAPE:
            return super().__torch_function__(func, types, args, kwargs)
        if func is Tensor.to and not kwargs and args[1:] in ((args[0].device,), (args[0].dtype,)):
            return args[0]
        args, kwargs = tree_map_only(ContextMask, ContextMask.dense, (args, kwargs))
        return func(*args, **kwargs)


def multimodal_mask(
    modality: Tensor,
    *,
    group: Tensor | None = None,
    document: Tensor | None = None,
    sees: Iterable[int] | Tensor | None = None,
) -> ContextMask:
    """Return a mask for text among images, sounds and the like, of one integer per token.

    Text sees the text before it and, of the tokens before it, those of the modalities in `sees`. A token of an encoder
    sees the tokens of its own modality and group, in both directions. Documents do not see each other. This is the
    bitfield of Cornstarch (Jang et al. 2025, arXiv 2503.11367). Pass it as ``attention_mask`` to a Hugging Face model,
    or as ``attn_mask`` to ``scaled_dot_product_attention``.

    Args:
        modality: 0 for text, 1 to 15 for encoders, integers ``[B, S]``.
        group: number of the image or sound of each token ``[B, S]``; all of a modality are one group where None.
        document: number of the document of each token ``[B, S]``; one document where None. Padding may be one, too.
        sees: modalities that text sees: numbers, or bits for each token ``[B, S]``; all where None.

    Returns:
        A bool tensor ``[B, 1, S, S]`` without memory, True where a query sees a key.

    Raises:
        ConfigError: a number does not fit its field.
    """
    bits = pack(modality, group=group, document=document, sees=sees)
    rows, size = bits.shape
    return ContextMask.of(Mask(mask_function(bits), batch=rows, q_length=size, k_length=size, device=bits.device))


_OF_SHAPE = {
    getattr(attribute, "__get__", attribute)
    for attribute in (
        *(Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.requires_grad, Tensor.is_leaf, Tensor.layout),
        *(Tensor.grad_fn, Tensor.is_cuda, Tensor.is_meta),
    )
} | {Tensor.size, Tensor.dim, Tensor.is_floating_point, Tensor.numel, Tensor.stride, Tensor.is_contiguous}


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
        self._masks: list[Mask] = []
        self._layers: dict[int, int] = {}  # how many layers of all steps took the first mask of a step, the second ...
        self._ran = False
        self._recent = Cache(4)  # masks may be dense

    def clear(self) -> None:
        """Drop the masks."""
        self._masks = []
        self._recent.clear()

    def take(self) -> Any:
        """Return what belongs to the microbatch that is computed."""
        return self._made_in, self._masks, self._ran

    def put(self, state: Any) -> None:
        """Go on with the microbatch that `take` returned `state` of."""
        self._made_in, self._masks, self._ran = state

    def note(self, mask: Mask) -> None:
        """Remember a mask that the model made; the first one of a run, and after layers ran, begins a new step.

        A run may make masks of one microbatch and run no layers, where it computes an encoder alone.
        """
        now = self._active()
        if self._ran or now is not self._made_in():
            self._masks, self._ran = [], False
            self._made_in = (lambda: None) if now is None else weakref.ref(now)
        self._masks = [*self._masks, mask]

    def work(self, size: int, block: int) -> Tensor:
        """What the queries of each block of a sequence cost all layers: int64 ``[ceil(S / block)]``.

        Units are pairs of a query and a key. Masks count by how many layers took them in earlier steps.

        Args:
            size: tokens of the sequence, S.
            block: tokens of a block.
        """
        fitting = [index for index, mask in enumerate(self._masks) if mask.q_length == mask.k_length == size]
        if not fitting:
            return torch.ones(-(-size // block), dtype=torch.int64)
        counts = [max(1, self._layers.get(index, 0)) for index in fitting]
        unit = math.gcd(*counts)  # so that the same masks weigh the same in every step
        works = [self._masks[index].work(block).cpu() for index in fitting]
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
            for index, mask in enumerate(self._masks):
                if mask is given.mask:
                    self._layers[index] = self._layers.get(index, 0) + 1
            given.mask.caches = self._caches  # a user's own mask was made without a session
            return given.mask
        shape: dict[str, Any] = {"batch": batch, "q_length": q_length, "k_length": k_length, "device": device}
        source = bounds if given is None else given

        def make() -> Mask:
            if given is not None:
                return self._dense(given, shape)
            if bounds is not None:
                return Mask(packed_sequence_mask_function(self._segments(bounds)), **shape, caches=self._caches)
            function: Any = causal_mask_function if is_causal else None
            return Mask(function, **shape, caches=self._caches)

        return self._recent.get((is_causal, *shape.values()), make, (source,))

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
        return Mask(function, **{**shape, **lengths}, caches=self._caches)
