"""Which microbatch owns which rows, where a batch has images in padded rows, in lists, or beside as many positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.microbatch import split
from packed_batches import IMAGE, TOKENS, VIDEO, ids, numbered, owned


def test_rows_of_merged_patches_follow_the_grids() -> None:
    """VideoLLaMA 3 marks merged patches, of which 2 x 2 are one; so are features that are given as such."""
    batch = {
        "input_ids": ids([VIDEO] * 8, [], [VIDEO, VIDEO, 9, VIDEO, VIDEO]),
        "pixel_values_videos": numbered(32 + 8 + 8, 6),
        "video_grid_thw": torch.tensor([[1, 4, 8], [1, 2, 4], [1, 2, 4]]),
        "video_merge_sizes": torch.tensor([2, 2, 2]),
        "video_compression_mask": numbered(12, 1),
    }
    assert owned(batch, 3, "video_compression_mask") == [[*range(8)], [], [*range(8, 12)]]


def test_sizes_in_a_list_go_with_their_images() -> None:
    sizes = [(4, 4), (8, 4), (4, 4)]
    batch = {
        "input_ids": ids([IMAGE] * 2, [], [IMAGE] * 4 + [9] + [IMAGE] * 2, []),
        "pixel_values": numbered(3, 5, 3, 4, 4),
        "image_sizes": sizes,
    }
    assert owned(batch, 4) == [[0], [], [1, 2], []]
    parts = [part.batch["image_sizes"] for part in split(batch, 4, image_tokens=TOKENS)]
    assert parts == [sizes[:1], None, sizes[1:], None]


def test_positions_of_text_are_not_rows_of_as_many_images() -> None:
    """Qwen's [3, B, S] beside three images."""
    positions = torch.arange(3 * 2 * 3).view(3, 2, 3)
    batch = {
        "input_ids": ids([IMAGE, 9, IMAGE], [IMAGE]),
        "pixel_values": numbered(3, 2),
        "position_ids": positions,
    }
    assert owned(batch, 2) == [[0, 1], [2]]
    second = split(batch, 2, image_tokens=TOKENS)[1].batch
    assert torch.equal(second["position_ids"], positions[:, 1:])


@pytest.mark.parametrize("dealer", [None, lambda sizes, lengths: [[0, 1], [2, 3]], lambda sizes, lengths: None])
def test_a_part_with_nothing_but_padding_has_no_images(dealer: Any) -> None:
    """Idefics: a model that gets padding alone has no image, or features without a token."""
    batch = {
        "input_ids": ids([], [], [IMAGE, 9, IMAGE], []),
        "pixel_values": numbered(4, 2, 3, 4, 4),
        "pixel_attention_mask": torch.ones(4, 2, 4, 4),
    }
    first, second = (part.batch for part in split(batch, 2, image_tokens=TOKENS, dealer=dealer))
    assert (first["pixel_values"], first["pixel_attention_mask"]) == (None, None)
    assert torch.equal(second["pixel_values"], batch["pixel_values"][2:])


def test_tiles_of_nothing_but_padding_stay() -> None:
    """Mllama: [B, images, tiles, C, H, W]; its cross attentions change samples without an image, too."""
    batch = {"input_ids": ids([], [IMAGE]), "pixel_values": numbered(2, 1, 2, 3, 4, 4)}
    assert owned(batch, 2) == [[0], [1]]


def test_rows_beside_grids_without_any_patch_are_refused() -> None:
    batch = {
        "input_ids": ids([VIDEO], []),
        "pixel_values_videos": numbered(3, 6),
        "video_grid_thw": torch.zeros(1, 3, dtype=torch.long),
    }
    with pytest.raises(ConfigError, match="pixel_values_videos"):
        split(batch, 2, image_tokens=TOKENS)
