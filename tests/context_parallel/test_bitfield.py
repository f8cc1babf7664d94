"""One number per token says what a multimodal sequence's tokens see, to these masks and to transformers alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig
from transformers import masking_utils as hf

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.context_parallel.hooks.context_mask import mask_function, multimodal_mask, pack
from lightning_mm5d.context_parallel.masks.mask import EMPTY, FULL, PARTIAL, TILE, Mask


def sequence(batch: int, size: int, longest: int = 60) -> tuple[Tensor, Tensor, Tensor]:
    """Random stretches of text and of three encoders: modality, group and document of each token, [B, S]."""
    fields = []
    for _ in range(batch):
        lengths = torch.randint(1, longest, (size,))
        modality = torch.randint(0, 4, (size,)).repeat_interleave(lengths)[:size]
        group = torch.arange(size).repeat_interleave(lengths)[:size]
        document = torch.arange(size).repeat_interleave(4 * lengths)[:size]
        fields.append(torch.stack([modality, group, document]))
    modality, group, document = torch.stack(fields, 1)
    return modality, group, document


def whole(bits: Tensor) -> Tensor:
    """The mask of all pairs, by transformers: bool [B, 1, S, S]."""
    batch, size = bits.shape
    mask = hf.sdpa_mask(batch, size, size, mask_function=mask_function(bits), allow_is_causal_skip=False)
    assert mask is not None
    return mask


def by_the_rule(modality: Tensor, group: Tensor, document: Tensor, sees: set[int]) -> Tensor:
    """The same mask, pair by pair: bool [B, 1, S, S]."""
    batch, size = modality.shape
    mask = torch.zeros((batch, 1, size, size), dtype=torch.bool)
    for row in range(batch):
        m, g, d = modality[row].tolist(), group[row].tolist(), document[row].tolist()
        for q in range(size):
            for k in range(size):
                if d[q] != d[k]:
                    continue
                seen = k <= q and (m[k] == 0 or m[k] in sees) if m[q] == 0 else (m[q], g[q]) == (m[k], g[k])
                mask[row, 0, q, k] = seen
    return mask


@pytest.mark.parametrize("sees", [None, {1, 2, 3}, {1, 3}, set()])
def test_pairs_follow_the_rule(sees: set[int] | None) -> None:
    torch.manual_seed(0)
    modality, group, document = sequence(2, 150, 20)
    bits = pack(modality, group=group, document=document, sees=sees)
    want = by_the_rule(modality, group, document, {1, 2, 3} if sees is None else sees)
    assert torch.equal(whole(bits), want)
    assert (bits.dtype, bits.shape) == (torch.int64, (2, 150))


def test_without_groups_and_documents_a_modality_is_one_group() -> None:
    torch.manual_seed(0)
    modality, _, _ = sequence(1, 120, 20)
    none = torch.zeros_like(modality)
    assert torch.equal(whole(pack(modality)), by_the_rule(modality, none, none, {1, 2, 3}))


def test_each_token_of_text_may_say_what_it_sees() -> None:
    modality = torch.tensor([[1, 2, 0, 0, 0]])
    sees = torch.tensor([[0, 0, 0b010, 0b100, 0b111]])
    seen = whole(pack(modality, sees=sees))[0, 0]
    assert seen[2:].int().tolist() == [[1, 0, 1, 0, 0], [0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_fields_are_where_the_table_says() -> None:
    bits = pack(
        torch.tensor([[0, 2, 15]]), group=torch.tensor([[-1, 5, 2**23 - 1]]), document=torch.tensor([[1, 2, 2**23 - 1]])
    )
    assert bits.tolist() == [
        [0xFFFF | 1 << 39, 1 << 2 | 5 << 16 | 2 << 39, 1 << 15 | (2**23 - 1) << 16 | (2**23 - 1) << 39]
    ]
    assert pack(torch.tensor([[0, 0]]), sees=[1, 4]).tolist() == [[0b10011] * 2]


def test_it_is_the_mask_that_transformers_makes_of_image_blocks_and_packed_sequences() -> None:
    torch.manual_seed(0)
    modality, group, document = sequence(2, 200)
    text_sees_all = hf.and_masks(
        hf.or_masks(
            hf.and_masks(hf.causal_mask_function, lambda b, h, q, k: modality[b, q] == 0),
            hf.blockwise_overlay(torch.where(modality > 0, group, -1)),
        ),
        hf.packed_sequence_mask_function(document),
    )
    want = hf.sdpa_mask(2, 200, 200, mask_function=text_sees_all, allow_is_causal_skip=False)
    assert torch.equal(whole(pack(modality, group=group, document=document)), want)


@pytest.mark.parametrize("name", ["causal", "bidirectional"])
def test_transformers_makes_it_of_its_own_masks(name: str) -> None:
    torch.manual_seed(0)
    modality, group, document = sequence(2, 90, 20)
    bits = pack(modality, group=group, document=document)
    function = mask_function(bits)
    config = LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, attn_implementation="sdpa")
    arguments = {"config": config, "inputs_embeds": torch.zeros(2, 90, 8), "attention_mask": None}
    if name == "causal":
        made = hf.create_causal_mask(
            **arguments, past_key_values=None, or_mask_function=function, and_mask_function=function
        )
    else:
        made = hf.create_bidirectional_mask(**arguments, and_mask_function=function)
    assert torch.equal(made, whole(bits))


@pytest.mark.parametrize(("batch", "size", "longest"), [(1, 1300, 60), (2, 700, 9), (1, 1300, 500)])
def test_blocks_are_judged_right(batch: int, size: int, longest: int) -> None:
    torch.manual_seed(size)
    modality, group, document = sequence(batch, size, longest)
    bits = pack(modality, group=group, document=document, sees={1, 2})
    mask, want = Mask(mask_function(bits), batch=batch, q_length=size, k_length=size, device="cpu"), whole(bits)
    assert mask.key is not None
    tiles = mask.tiles(torch.arange(size), torch.arange(size))
    for row in range(tiles.rows):
        for i, band in enumerate(want[row, 0].split(TILE)):
            for j, tile in enumerate(band.split(TILE, 1)):
                assert tiles.kinds[row, i, j] == (FULL if tile.all() else PARTIAL if tile.any() else EMPTY)
                at = slice(i * TILE, i * TILE + len(band)), slice(j * TILE, (j + 1) * TILE)
                assert torch.equal(tiles.allowed(row, *at), tile)
    assert mask.work().tolist() == [int(part.sum()) for part in want.sum((0, 1, 3)).split(TILE)]


class Made(TorchDispatchMode):
    """Adds up the elements of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numel += sum(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result


def test_text_and_small_images_mixed_in_all_blocks_are_counted_without_looking_at_all_pairs() -> None:
    size = 65536
    torch.manual_seed(0)
    modality, group, _ = sequence(1, size, 9)
    bits = pack(modality, group=group)
    with Made() as made:
        mask = Mask(mask_function(bits), batch=1, q_length=size, k_length=size, device="cpu")
        work = mask.work()
        tiles = mask.tiles(torch.arange(size), torch.arange(size))
    mixed = int((tiles.kinds == PARTIAL).sum())
    assert mixed > (size // TILE) ** 2 // 3
    assert size < made.numel < mixed * TILE**2 // 2
    row = torch.arange(20 * TILE, 21 * TILE)
    assert int(mask.allowed(0, row, torch.arange(size)).sum()) == work[20]


def test_masks_are_joined_as_dense_ones() -> None:
    mask = multimodal_mask(torch.tensor([[0, 0, 1, 1]]))
    assert torch.equal(torch.cat([mask, mask], 1), torch.cat([mask.dense()] * 2, 1))


BAD: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "too many modalities": (lambda m: pack(m + 16), "modality: got 16", "0 to 15"),
    "a negative modality": (lambda m: pack(m - 1), "modality: got -1", "0 to 15"),
    "too many groups": (lambda m: pack(m + 1, group=m + 2**23), f"group: got {2**23}", "of each sequence from 0"),
    "a token without a group": (lambda m: pack(m + 1, group=m - 1), "group: got -1", "0 to"),
    "too many documents": (lambda m: pack(m, document=m + 2**23), f"document: got {2**23}", f"0 to {2**23 - 1}"),
    "another shape": (lambda m: pack(m, document=m[:, 1:]), "document: got (2, 2)", "Pass (2, 3)"),
    "a group of another shape": (lambda m: pack(m, group=m[:1]), "group: got (1, 3)", "Pass (2, 3)"),
    "one dim": (lambda m: pack(m[0]), "modality: got (3,)", "token of each row"),
    "floats": (lambda m: pack(m.float()), "modality: got torch.float32", "modality.long()"),
    "an unknown modality seen": (lambda m: pack(m, sees=[1, 16]), "sees: got 16", "0 to 15"),
    "bits that do not fit": (lambda m: pack(m, sees=m + 2**16), f"sees: got {2**16}", "bits 0 to 15"),
}


@pytest.mark.parametrize("name", BAD)
def test_numbers_that_do_not_fit_are_refused(name: str) -> None:
    make, got, fix = BAD[name]
    with pytest.raises(ConfigError) as error:
        make(torch.zeros((2, 3), dtype=torch.int64))
    assert str(error.value).startswith(got)
    assert fix in str(error.value)
