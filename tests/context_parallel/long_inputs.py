"""Batches with sequences that are long enough for several ranks, of the families in `families`, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tensor_parallel.family_inputs import (
    VOCABULARY,
    Batch,
    pixels,
    source_and_target,
    speech_and_text,
    tokens,
    unpadded,
)
from zoo import qwen

LENGTH = 29  # no degree divides it
IMAGE = 66


def text(length: int = LENGTH) -> Batch:
    """Token ids, some of them padding, and none that stands for something else."""
    batch = tokens(length)
    ids = batch["input_ids"].clamp(max=60)
    return batch | {"input_ids": ids, "labels": ids.masked_fill(batch["attention_mask"] == 0, -100)}


def to_be_filled(count: int, placeholder: int = IMAGE, length: int = LENGTH) -> Batch:
    """`text` whose second to ``1 + count``th tokens are placeholders."""
    batch = text(length)
    batch["input_ids"][:, 1 : 1 + count] = placeholder
    return batch


def whole_rows() -> Batch:
    ids = torch.randint(3, VOCABULARY, (2, LENGTH))
    return {"input_ids": ids, "labels": ids}


def long_source_and_target() -> Batch:
    return tokens(LENGTH) | {"labels": torch.randint(3, VOCABULARY, (2, 21))}


def documents() -> Batch:
    """One row of three documents, which do not see each other."""
    ids = torch.randint(3, VOCABULARY, (1, LENGTH))
    return {"input_ids": ids, "labels": ids, "position_ids": torch.cat([torch.arange(n) for n in (11, 12, 6)])[None]}


def image_and_text(features: int, size: int, **others: Any) -> Callable[[], Batch]:
    return lambda: to_be_filled(features) | pixels(size) | others


def nested_image_and_text() -> Batch:
    batch = image_and_text(4, 8)()
    return batch | {"pixel_values": batch["pixel_values"].unsqueeze(1)}


def sized_image_and_text() -> Batch:
    return image_and_text(4, 16)() | {"image_sizes": torch.tensor([[16, 16]] * 2)}


def typed_image_and_text() -> Batch:
    """The image and the text before it are a prefix, which sees itself both ways."""
    batch = image_and_text(9, 12)()
    types = torch.ones_like(batch["input_ids"])
    types[:, :10] = 0
    return batch | {"token_type_ids": types}


def tiled_image_and_text() -> Batch:
    """Two tiles in one sample and one in the other, which some tokens do not see."""
    seen = torch.ones(2, LENGTH, 1, 2, dtype=torch.long)
    seen[0, :3] = 0
    return text() | {
        "pixel_values": torch.randn(2, 1, 2, 3, 8, 8),
        "aspect_ratio_ids": torch.tensor([[2], [1]]),
        "aspect_ratio_mask": torch.tensor([[[1, 1]], [[1, 0]]]),
        "cross_attention_mask": seen,
    }


def patches_and_text() -> Batch:
    batch = to_be_filled(4)
    places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).view(1, 16, 2)
    return batch | {
        "pixel_values": torch.randn(2, 16, 12),
        "image_position_ids": places.repeat(2, 1, 1),
        "mm_token_type_ids": (batch["input_ids"] == IMAGE).long(),
    }


def marked_image_and_text() -> Batch:
    marks = torch.zeros(2, LENGTH, dtype=torch.long)
    marks[:, 2:6] = 1
    return text() | pixels() | {"image_embeds_position_mask": marks}


def packed_images_and_text() -> Batch:
    batch = text()
    ids = batch["input_ids"].clamp(min=16)
    ids[:, 1:7] = torch.tensor([qwen.VISION_START_ID, *[qwen.IMAGE_ID] * 4, qwen.VISION_END_ID])
    return batch | {"input_ids": ids, "mm_token_type_ids": (ids == qwen.IMAGE_ID).int()} | qwen.packed_images(2)


def long_speech_and_text() -> Batch:
    return to_be_filled(2) | {"input_features": torch.randn(2, 8, 16)}


def frames_and_text() -> Batch:
    return to_be_filled(6) | {
        "input_features": torch.randn(2, 12, 8),
        "input_features_mask": torch.ones(2, 6, dtype=torch.bool),
    }


LONGER: dict[Any, Callable[[], Batch]] = {
    tokens: lambda: tokens(LENGTH),
    unpadded: whole_rows,
    source_and_target: long_source_and_target,
    speech_and_text: long_speech_and_text,
}
LONGER_BY_NAME: dict[str, Callable[[], Batch]] = {
    "internvl": image_and_text(4, 8),
    "internvl_qk_norm": image_and_text(4, 8),
    "mistral3": sized_image_and_text,
    "paligemma": typed_image_and_text,
}
