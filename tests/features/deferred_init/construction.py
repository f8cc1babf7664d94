"""Builds a module twice from one seed, as ever and deferred, and compares every tensor that it holds."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mm5d.features.deferred_init.deferred_init import DeferredInit
from lightning_mm5d.features.deferred_init.deferred_weights import DeferredWeights, filling, tensors_of

Build = Callable[[], nn.Module]


def seed_all(seed: int = 3) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def deferred(build: Build) -> tuple[nn.Module, DeferredWeights]:
    """The module without memory, and what makes its weights."""
    with DeferredInit() as recorder:
        module = build()
    return module, recorder.weights(module)


def materialized(module: nn.Module, weights: DeferredWeights) -> nn.Module:
    """The module with all of its weights in place."""
    weights.materialize(module, filling(module))
    return module


def contents(module: nn.Module) -> dict[str, tuple[tuple[str, ...], str, Tensor]]:
    """All tensors of a module by name, with the names that they are tied to and their kind."""
    return {name: (names, kind, tensor) for names, kind, tensor in tensors_of(module) for name in names}


def assert_equal_modules(module: nn.Module, expected: nn.Module, *, besides: Collection[str] = ()) -> None:
    """Assert that both hold the same tensors, bit by bit, but for those of some names."""
    mine, theirs = contents(module), contents(expected)
    assert mine.keys() == theirs.keys(), mine.keys() ^ theirs.keys()
    for name, (names, kind, wanted) in theirs.items():
        got_names, got_kind, got = mine[name]
        assert (got_names, got_kind) == (names, kind), name
        assert type(got) is type(wanted), name
        assert got.requires_grad == wanted.requires_grad, name
        assert (got.device, got.dtype, got.shape, got.stride()) == (
            wanted.device,
            wanted.dtype,
            wanted.shape,
            wanted.stride(),
        ), name
        assert bits(got) == bits(wanted) or not {*names}.isdisjoint(besides), name


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_as_ever(build: Build, *, some_real: bool = False) -> DeferredWeights:
    """Assert that a deferred construction ends as an ordinary one: tensors, ties, random states."""
    seed_all()
    expected = build()
    state = torch.get_rng_state()
    seed_all()
    before = torch.get_rng_state()
    module, weights = deferred(build)
    assert torch.equal(torch.get_rng_state(), before), "recording must not draw"
    real = [name for name, parameter in module.named_parameters() if not parameter.is_meta]
    assert some_real or real == []
    assert weights.unknown == (), weights.unknown
    materialized(module, weights)
    assert torch.equal(torch.get_rng_state(), state), "the random state must be that of an ordinary construction"
    assert_equal_modules(module, expected, besides=weights.unwritten)
    return weights


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all real storages that operators have made within the context and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, list | tuple) else [made]:
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size
