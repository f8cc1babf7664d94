"""The mask of a multimodal sequence in one int64 per token, after Cornstarch (Jang et al. 2025, arXiv 2503.11367).

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

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.context_parallel.masks.trace import MaskFunction

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
