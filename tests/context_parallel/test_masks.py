"""Masks judged block by block say what the whole mask says, of any shards, and no tensor has S x S elements."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import masking_utils as hf

from context_parallel.mask_cases import brute, check, padding, runs
from lightning_mm5d.context_parallel.masks.mask import EMPTY, FULL, PARTIAL, TILE, Cache, Caches, Mask, MaskFunction

Build = Callable[[int, int], MaskFunction]


def images(batch: int, size: int, longest: int = 150) -> Tensor:
    """Numbers of images, -1 for text: [B, S]."""
    ids = runs(batch, size, longest)
    return torch.where(ids % 2 == 0, -1, ids)


def positions(ids: Tensor) -> Tensor:
    """Positions that start at 0 with each stretch: [B, S]."""
    at = torch.arange(ids.shape[1]).expand_as(ids)
    starts = torch.cat([torch.ones_like(ids[:, :1], dtype=torch.bool), ids[:, 1:] != ids[:, :-1]], 1)
    return at - torch.where(starts, at, 0).cummax(1)[0]


def packed(batch: int, size: int, inner: MaskFunction = hf.causal_mask_function, longest: int = 250) -> MaskFunction:
    ids = runs(batch, size, longest)
    return hf.packed_sequence_compatibility_function(inner, positions(ids), ids)


def streaming(left: int, right: int) -> MaskFunction:
    """Chunks that see some chunks before them, as NemotronAsrStreaming's."""

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        chunks = torch.div(q, right + 1, rounding_mode="trunc") - torch.div(k, right + 1, rounding_mode="trunc")
        return (chunks >= 0) & (chunks <= left // (right + 1))

    return mask


def two_sided(left: int, right: int) -> MaskFunction:
    """A window of two widths, as Gemma 4's encoders have."""

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = q - k
        return ((distance >= 0) & (distance < left)) | ((distance < 0) & (-distance < right))

    return mask


def kinds_of_tokens(b: int, s: int) -> MaskFunction:
    kind, table = torch.randint(0, 5, (b, s)), torch.rand(5, 5) > 0.4
    return lambda b, h, q, k: table[kind[b, q], kind[b, k]] & (k <= q)


def shared_bits(b: int, s: int) -> MaskFunction:
    bits = torch.randint(0, 8, (b, s))
    return lambda b, h, q, k: (bits[b, q] & bits[b, k]) != 0


def scores(b: int, s: int) -> MaskFunction:
    of_q, of_k = torch.randn(b, s), torch.randn(b, s).double()
    return lambda b, h, q, k: (of_q[b, q] > of_k[b, k]) ^ (q // 7 == k // 7)


def image_blocks(b: int, s: int) -> MaskFunction:
    return hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(images(b, s)))


MASKS: dict[str, Build] = {
    "causal": lambda b, s: hf.causal_mask_function,
    "bidirectional": lambda b, s: hf.bidirectional_mask_function,
    "sliding": lambda b, s: hf.sliding_window_causal_mask_function(70),
    "sliding bidirectional": lambda b, s: hf.sliding_window_bidirectional_mask_function(200),
    "two-sided": lambda b, s: two_sided(150, 40),
    "chunked": lambda b, s: hf.chunked_causal_mask_function(100, torch.arange(b) * 7),
    "streaming": lambda b, s: streaming(70, 13),
    "padding": lambda b, s: hf.and_masks(hf.causal_mask_function, hf.padding_mask_function(padding(b, s))),
    "packed": packed,
    "packed in order": lambda b, s: hf.packed_sequence_mask_function(runs(b, s, 90).sort(1)[0]),
    "packed short": lambda b, s: packed(b, s, longest=6),
    "packed sliding": lambda b, s: packed(b, s, hf.sliding_window_causal_mask_function(50)),
    "image blocks": image_blocks,
    "small image blocks": lambda b, s: hf.or_masks(
        hf.causal_mask_function, hf.blockwise_overlay(images(b, s, longest=9))
    ),
    "sliding image blocks": lambda b, s: hf.and_masks(image_blocks(b, s), hf.sliding_window_overlay(64)),
    "packed image blocks with padding": lambda b, s: hf.and_masks(
        hf.or_masks(packed(b, s), hf.blockwise_overlay(images(b, s))), hf.padding_mask_function(padding(b, s))
    ),
    "offsets": lambda b, s: hf.add_offsets_to_mask_function(hf.sliding_window_causal_mask_function(70), 3, -1),
    "kinds of tokens": kinds_of_tokens,
    "shared bits": shared_bits,
    "scores": scores,
    "numbers that overflow": lambda b, s: lambda b, h, q, k: (q - k) + 2**62 > (k - 2**62),
    "strided": lambda b, s: lambda b, h, q, k: ((q - k) % 3 == 0) & (k <= q),
}


@pytest.mark.parametrize(("batch", "size"), [(1, 1100), (3, 300)])
@pytest.mark.parametrize("name", MASKS)
def test_tiles_and_work_are_those_of_the_whole_mask(name: str, batch: int, size: int) -> None:
    torch.manual_seed(len(name) + size)
    function = MASKS[name](batch, size)
    mask = Mask(function, batch=batch, q_length=size, k_length=size, device="cpu")
    assert mask.key is not None
    check(mask, brute(function, batch, size, size))


def test_queries_and_keys_may_differ_in_number() -> None:
    seen = padding(2, 520)
    function = hf.and_masks(hf.bidirectional_mask_function, hf.padding_mask_function(seen))
    check(Mask(function, batch=2, q_length=140, k_length=520, device="cpu"), brute(function, 2, 140, 520))


def test_no_function_allows_all_pairs() -> None:
    mask = Mask(None, batch=2, q_length=300, k_length=200, device="cpu")
    assert mask.rows == 1
    check(mask, torch.ones(2, 300, 200, dtype=torch.bool))


@pytest.mark.parametrize("offset", [-129, -128, -127, -1, 0, 1, 127, 128, 129])
@pytest.mark.parametrize("name", ["le", "lt", "ge", "gt", "eq", "ne"])
def test_borders_at_the_edges_of_blocks_are_exact(name: str, offset: int) -> None:
    compare, q, k = getattr(operator, name), torch.arange(384), torch.arange(384)
    for function in (
        lambda b, h, q, k: compare(q + offset, k),
        lambda b, h, q, k: compare(k, q - offset),
        lambda b, h, q, k: compare(abs(q - k), offset),
    ):
        mask, want = Mask(function, batch=1, q_length=384, k_length=384, device="cpu"), brute(function, 1, 384, 384)
        kinds = mask.tiles(q, k).kinds[0].tolist()
        tiles = [band.split(TILE, 1) for band in want[0].split(TILE)]
        assert kinds == [[FULL if t.all() else PARTIAL if t.any() else EMPTY for t in band] for band in tiles]
        assert mask.work().tolist() == [int(band.sum()) for band in want[0].split(TILE)]


def test_tiles_of_a_few_tokens_are_exact() -> None:
    ids = torch.arange(300)[None]
    mask = Mask(hf.packed_sequence_mask_function(ids), batch=1, q_length=300, k_length=300, device="cpu")
    for queries, keys in ((129, 130), (130, 129), (129, 129)):
        kinds = mask.tiles(torch.arange(queries), torch.arange(keys)).kinds[0]
        assert kinds.tolist() == [[PARTIAL, EMPTY], [EMPTY, FULL if queries == keys else PARTIAL]]


def test_masks_that_are_not_kept_are_evaluated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_mm5d.context_parallel.masks.mask.MASK_BYTES", 0)
    function = image_blocks(2, 300)
    check(Mask(function, batch=2, q_length=300, k_length=300, device="cpu"), brute(function, 2, 300, 300))


def test_rows_that_are_alike_are_judged_once() -> None:
    ids = images(1, 300).repeat(3, 1)
    assert Mask(hf.blockwise_overlay(ids), batch=3, q_length=300, k_length=300, device="cpu").rows == 1
    ids[1, 7] += 2
    assert Mask(hf.blockwise_overlay(ids), batch=3, q_length=300, k_length=300, device="cpu").rows == 3


def key(function: MaskFunction, batch: int = 1, size: int = 200) -> bytes | None:
    return Mask(function, batch=batch, q_length=size, k_length=size, device="cpu").key


def test_equal_contents_have_equal_keys_and_others_do_not() -> None:
    torch.manual_seed(0)
    ids = images(1, 200)
    changed = ids.clone()
    changed[0, 100] = 7 - 9 * (ids[0, 100] > 0)
    for make in (hf.blockwise_overlay, hf.packed_sequence_mask_function, lambda ids: hf.padding_mask_function(ids > 0)):
        assert key(make(ids)) == key(make(ids.clone())) == key(make(ids.to(torch.int32)))
        assert key(make(ids)) != key(make(changed))
    causal = hf.causal_mask_function
    assert key(causal) == key(lambda b, h, q, k: q >= k) == key(lambda b, h, q, k: ~(k > q))
    different = [
        causal,
        lambda b, h, q, k: k < q,
        lambda b, h, q, k: k >= q,
        *(hf.sliding_window_causal_mask_function(n) for n in (3, 4)),
        *(hf.sliding_window_bidirectional_overlay(n) for n in (3, 4)),
        *(lambda b, h, q, k, n=n: (q - k) % n == 0 for n in (3, 4)),
    ]
    assert len({key(function) for function in different} | {key(causal, 2), key(causal, 1, 201)}) == len(different) + 2


def test_what_is_known_of_a_mask_is_found_again_in_the_next_step() -> None:
    torch.manual_seed(0)
    ids, at, caches = images(1, 400), torch.arange(400), Caches()
    caches.masks = Cache(16)

    def again(ids: Tensor, caches: Caches = caches) -> Mask:
        return Mask(hf.blockwise_overlay(ids.clone()), batch=1, q_length=400, k_length=400, device="cpu", caches=caches)

    first = again(ids)
    tiles = first.tiles(at, at)
    assert first.tiles(at, at) is tiles
    assert again(ids).tiles(at.clone(), at.clone()) is tiles
    assert again(ids).tiles(at[:-1], at) is not tiles
    assert again(ids).work() is first.work()
    assert again(ids, Caches()).tiles(at, at) is not tiles
    for other in range(40):  # a bounded number of masks is remembered
        again(ids + 1000 * (other + 1) * (at == other)).tiles(at, at)
    assert again(ids).tiles(at, at) is not tiles


class Largest(TorchDispatchMode):
    """Notes the largest number of elements of any result."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, *(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)), 0)
        return result


@pytest.mark.parametrize("name", ["causal", "packed image blocks with padding", "small image blocks", "packed short"])
def test_no_tensor_grows_with_the_square_of_the_sequence(name: str) -> None:
    size = 65536
    torch.manual_seed(0)
    function = MASKS[name](1, size)
    with Largest() as largest:
        mask = Mask(function, batch=1, q_length=size, k_length=size, device="cpu")
        work = mask.work()
        tiles = mask.tiles(torch.arange(size), torch.arange(size))
    assert int(work.sum()) > 0
    assert (tiles.kinds == PARTIAL).any()
    assert size <= largest.numel <= 64 * size
    for i in (0, 100, 511):  # a band of queries, counted one by one
        seen = mask.allowed(0, torch.arange(i * TILE, (i + 1) * TILE), torch.arange(size))
        assert int(seen.sum()) == work[i]
        some = torch.stack([tile.any() for tile in seen.split(TILE, 1)])
        every = torch.stack([tile.all() for tile in seen.split(TILE, 1)])
        assert torch.equal(
            tiles.kinds[0, i], torch.where(every, FULL, torch.where(some, PARTIAL, EMPTY)).to(torch.int8)
        )
