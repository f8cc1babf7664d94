"""Batches of the families that tensor parallelism knows, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

VOCABULARY = 67

Batch = dict[str, Any]


def tokens(length: int = 9, samples: int = 2) -> Batch:
    ids = torch.randint(3, VOCABULARY, (samples, length))
    mask = torch.ones_like(ids)
    ids[-1, -2:] = 0
    mask[-1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def unpadded() -> Batch:
    ids = torch.randint(3, VOCABULARY, (2, 9))
    return {"input_ids": ids, "labels": ids}


def source_and_target() -> Batch:
    return tokens() | {"labels": torch.randint(3, VOCABULARY, (2, 6))}


def pixels(size: int = 12) -> Batch:
    return {"pixel_values": torch.randn(2, 3, size, size)}


def labelled_pixels(size: int = 12) -> Batch:
    return pixels(size) | {"labels": torch.tensor([0, 1])}


def points() -> Batch:
    return pixels(16) | {"input_points": torch.rand(2, 1, 3, 2) * 16, "input_labels": torch.ones(2, 1, 3).long()}


def pair() -> Batch:
    ids = torch.randint(3, VOCABULARY, (2, 9))
    return pixels() | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def waves() -> Batch:
    return {"input_values": torch.randn(2, 400), "labels": torch.randint(1, 32, (2, 5))}


def image_and_text(features: int, size: int, image_id: int = 66) -> Callable[[], Batch]:
    def batch() -> Batch:
        ids = torch.randint(3, 60, (2, features + 8))
        ids[:, 1 : 1 + features] = image_id
        return pixels(size) | {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    return batch


def sized_image_and_text() -> Batch:
    return image_and_text(4, 16)() | {"image_sizes": torch.tensor([[16, 16]] * 2)}


def typed_image_and_text() -> Batch:
    batch = image_and_text(9, 12)()
    return batch | {"token_type_ids": (batch["input_ids"] != 66).long()}


def speech_and_text() -> Batch:
    ids = torch.randint(3, 60, (2, 12))
    ids[:, 1:3] = 66
    return {"input_ids": ids, "labels": ids, "input_features": torch.randn(2, 8, 16)}
