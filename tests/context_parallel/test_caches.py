"""Caches are bounded, belong to one session each, and are empty after it."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import torch

from lightning_mm5d.context_parallel.hooks.context_mask import ContextMask
from lightning_mm5d.context_parallel.hooks.layer_attention import Interface
from lightning_mm5d.context_parallel.masks.mask import Cache, Mask


@dataclass
class Sized:
    nbytes: int


def test_the_least_recently_used_results_are_dropped_first() -> None:
    def made(cache: Cache) -> list[int]:
        found: list[int] = []
        for key in (0, 1, 2, 0, 3, 0, 2, 1):
            cache.get(key, lambda key=key: (found.append(key), Sized(10))[1])  # type: ignore[misc]
        return found

    assert made(Cache(entries=3)) == made(Cache(nbytes=30)) == [0, 1, 2, 3, 1]


def test_results_that_grow_count_with_what_they_hold_now_and_the_newest_stays() -> None:
    cache = Cache(nbytes=30)
    first = cache.get("first", lambda: Sized(1))
    cache.get("second", lambda: Sized(1))
    first.nbytes = 29
    cache.get("third", lambda: Sized(1))
    assert len(cache) == 2
    cache.get("large", lambda: Sized(100))
    assert len(cache) == 1
    assert cache.get("large", lambda: Sized(0)).nbytes == 100


def test_a_tensor_that_was_written_to_is_another_one() -> None:
    cache, x = Cache(), torch.zeros(3)
    assert cache.get("sum", lambda: float(x.sum()), (x,)) == 0
    x += 1
    assert cache.get("sum", lambda: float(x.sum()), (x,)) == 3
    with torch.inference_mode():
        other = cache.get("twice", lambda: x * 2, (x,))
    assert cache.get("twice", lambda: x * 2, (x,)) is not other


def test_two_sessions_share_nothing_and_the_end_of_one_frees_what_it_kept() -> None:
    at = torch.arange(200)

    def made(interface: Interface) -> ContextMask:
        return interface.make_mask(1, 200, 200)

    one, two = Interface(), Interface()
    tiles = made(one).mask.tiles(at, at)
    assert made(one).mask.tiles(at.clone(), at) is tiles
    assert made(two).mask.tiles(at, at) is not tiles
    kept = weakref.ref(tiles)
    del tiles
    one.remove()
    gc.collect()
    assert kept() is None
    assert not len(one.caches.masks)
    assert len(two.caches.masks) == 1


def test_equal_masks_without_a_session_share_nothing() -> None:
    at = torch.arange(200)
    first, second = (Mask(None, batch=1, q_length=200, k_length=200, device="cpu") for _ in range(2))
    assert first.key == second.key
    assert first.tiles(at, at) is not second.tiles(at, at)
    assert first.caches is not second.caches
