"""A lazy tensor is the tensor that it loads, and is not loaded by what only moves, joins, cuts or describes it."""

from __future__ import annotations

import copy
import functools
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_mm5d import LazyTensor
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.lazy import StaysLazy, keep_in_worker
from lightning_mm5d.data.microbatch import split
from lightning_mm5d.features.sample_proof import digests

LOADED: list[int] = []


def load(number: int, rows: int = 2) -> Tensor:
    LOADED.append(number)
    return torch.arange(rows * 3.0).view(rows, 3) + 100 * number


def lazy(number: int, rows: int = 2) -> LazyTensor:
    return LazyTensor(functools.partial(load, number, rows), (rows, 3))


@pytest.fixture(autouse=True)
def nothing_loaded() -> None:
    LOADED.clear()


HANDLING: dict[str, Callable[[Any], Any]] = {
    "form": lambda x: (x.shape, x.dtype, x.device, len(x), x.numel(), x.requires_grad),
    "a place": lambda x: x.to("cpu").device,
    "pinning": lambda x: LazyTensor.pin_memory(x).shape if isinstance(x, LazyTensor) else x.shape,
    "a dtype": lambda x: (x.to(torch.float64).dtype, x.half().dtype, x.to("cpu", torch.bfloat16).dtype),
    "a type": lambda x: (x.type(torch.float64).dtype, torch.is_floating_point(x), torch.numel(x)),
    "one like it": lambda x: x.to(torch.zeros(1, dtype=torch.float64)).dtype,
    "a batch": lambda x: default_collate([{"x": x}, {"x": x}])["x"].shape,
    "rows": lambda x: torch.cat([x, x, x]).shape,
    "microbatches": lambda x: [part.batch["x"].shape for part in split({"x": x, "labels": torch.ones(2)}, 2)],
    "a slice": lambda x: x[1:].shape,
}
READING: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda x: x + 1,
    "functions": lambda x: F.linear(x, torch.ones(2, 3)),
    "a cast": lambda x: x.double() * 2,
    "numpy": lambda x: np.asarray(x),
    "a copy": copy.deepcopy,
    "a pickle": lambda x: pickle.loads(pickle.dumps(x)) * 1,
    "joined with others": lambda x: torch.cat([x, torch.ones(1, 3)]),
    "joined along another dim": lambda x: torch.cat([x, x], 1),
    "joined along another axis": lambda x: torch.cat([x, x], axis=1),
    "stacked by name": lambda x: torch.stack(tensors=[x, x]) * 1,
    "stacked along another dim": lambda x: torch.stack([x, x], dim=-1),
    "a batch": lambda x: default_collate([x, x]) * 1,
    "rows of rows": lambda x: torch.stack([torch.cat([x, x])[1:3], x]) * 1,
    "a list": lambda x: x.tolist(),
}


@pytest.mark.parametrize("how", HANDLING)
def test_handling_it_loads_nothing(how: str) -> None:
    got = HANDLING[how](lazy(1))
    assert not LOADED
    assert got == HANDLING[how](load(1))


@pytest.mark.parametrize("how", READING)
def test_reading_it_gives_what_the_tensor_gives(how: str) -> None:
    expected = READING[how](load(1))
    got = READING[how](lazy(1))
    assert type(got) is type(expected)
    assert str(got) == str(expected)


def test_a_microbatch_loads_its_own_items_once() -> None:
    batch = {
        "pixel_values": torch.cat([lazy(0, 3), lazy(1, 1), lazy(2, 2), lazy(3, 2)]),
        "image_items": torch.tensor([3, 1, 2, 2]),
        "input_ids": torch.ones(4, 2),
    }
    first, second = split(batch, 2)
    assert torch.equal(first.batch["pixel_values"] * 1, torch.cat([load(0, 3), load(1, 1)]))
    LOADED.clear()
    first.batch["pixel_values"].sum()
    assert torch.equal(second.batch["pixel_values"].moved(), torch.cat([load(2, 2), load(3, 2)]))
    assert LOADED == [2, 3, 2, 3]
    LOADED.clear()
    dealt = split(batch, 2, dealer=lambda rows, sizes: [[0, 3], [1, 2]])
    assert torch.equal(dealt[0].batch["pixel_values"] * 1, torch.cat([load(0, 3), load(3, 2)]))
    assert LOADED == [0, 3], "items that were loaded for another microbatch are there"


def test_writes_to_a_slice_are_seen_in_the_whole() -> None:
    tensor = lazy(0)
    tensor[1:].zero_()
    assert float(tensor.sum()) == 3


def test_casts_round_one_after_the_other() -> None:
    number = 1001
    assert not torch.equal(load(number).bfloat16().float(), load(number))
    for tensor in (lazy(number).bfloat16().float(), torch.stack([lazy(number).bfloat16().float()])[0]):
        assert torch.equal(tensor * 1, load(number).bfloat16().float())


def test_writes_to_a_batch_are_seen_in_its_microbatches_and_pickles() -> None:
    """as of a hook that normalizes in place"""
    batch = {"x": torch.stack([lazy(0), lazy(1), lazy(2), lazy(3)])}
    batch["x"].mul_(2).sub_(1)
    expected = torch.stack([load(number) for number in range(4)]) * 2 - 1
    for parts in (split(batch, 2), split(batch, 2, dealer=lambda rows, sizes: [[0, 3], [1, 2]])):
        for part, places in zip(parts, (part.places for part in parts), strict=True):
            own = [*places] if places else [0, 1] if part is parts[0] else [2, 3]
            assert torch.equal(part.batch["x"] * 1, expected[own])
    assert torch.equal(pickle.loads(pickle.dumps(batch["x"])) * 1, expected)


def test_a_data_set_that_holds_its_lazy_tensors_holds_no_values() -> None:
    held = [lazy(0), lazy(1)]
    for _ in range(2):
        for joined in (torch.cat(held), torch.stack(held)):
            LOADED.clear()
            joined.sum()
            assert LOADED == [0, 1]


@pytest.mark.parametrize(
    "draw", [lambda: torch.rand(()), np.random.rand, random.random], ids=["torch", "numpy", "python"]
)
def test_a_load_that_draws_from_global_generators_is_refused(draw: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=r"LazyTensor.load: got .* Draw in __getitem__"):
        LazyTensor(lambda: torch.ones(2) * float(draw()), (2,)).sum()


def test_writes_to_one_are_not_seen_in_copies_that_load_for_themselves() -> None:
    tensor = lazy(0)
    other, cast = tensor.clone(), tensor.double()
    assert not tensor.is_read
    other.zero_()
    assert tensor.is_read
    assert torch.equal(tensor * 1, load(0))
    assert torch.equal(cast * 1, load(0).double())


def test_what_load_gives_must_be_what_was_said() -> None:
    for said in ({"shape": (3, 3)}, {"shape": (2, 3), "dtype": torch.uint8}):
        with pytest.raises(ConfigError, match=r"LazyTensor.load: got 'float32\[2, 3\] from"):
            LazyTensor(functools.partial(load, 0), **said).sum()
    with pytest.raises(ConfigError, match="shape has a dim"):
        LazyTensor(functools.partial(load, 0), ())
    with pytest.raises(ConfigError, match="load is a function"):
        LazyTensor(load(0), (2, 3))  # type: ignore[arg-type]


def test_a_step_changes_neither_dtypes_nor_rounding_of_what_it_loads() -> None:
    def product() -> Tensor:
        return F.linear(torch.full((2, 3), 1.001), torch.full((4, 3), 1.001))

    image = LazyTensor(product, (2, 4))
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.autocast("cpu", torch.bfloat16):
            found = image.clone() * 1
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found, product())


class Named:
    """Tells what it loads, and cannot be pickled."""

    def __init__(self, number: int) -> None:
        self.number, self.other = number, lambda: None

    def __call__(self) -> Tensor:
        return load(self.number)

    def identity(self) -> bytes:
        return str(self.number).encode()


def test_a_load_may_tell_what_it_loads() -> None:
    one, same, other = (LazyTensor(Named(number), (2, 3)) for number in (1, 1, 2))
    assert one.key() == same.key() != other.key()


def test_equal_sources_have_equal_digests_and_are_not_loaded_for_them() -> None:
    assert digests({"x": lazy(1)}) == digests({"x": lazy(1)}) != digests({"x": lazy(2)})
    copied = pickle.loads(pickle.dumps(lazy(1)))
    assert digests({"x": copied}) == digests({"x": lazy(1)})
    assert not LOADED


class Items(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": lazy(index), "y": index}


class Held(Items):
    """Holds lazy tensors that no worker can send, or load."""

    def __init__(self, load: Callable[[int], Any]) -> None:
        self.items = [LazyTensor(lambda index=index: load(index), (2, 3)) for index in range(4)]

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Asking:
    """Tells a worker what it keeps."""

    def __init__(self, kept: StaysLazy) -> None:
        self.kept = kept

    def __call__(self, worker: int) -> None:
        keep_in_worker(self.kept)


@pytest.mark.parametrize("said", [None, True, False])
def test_workers_load_it_unless_they_are_told_to_keep_it(said: bool | None) -> None:
    kept = StaysLazy()
    if said is not None:
        kept.set(said)
    loader = DataLoader(
        Items(), batch_size=2, num_workers=1, worker_init_fn=None if said is None else Asking(kept), shuffle=False
    )
    for index, batch in enumerate(loader):
        assert isinstance(batch["x"], LazyTensor)
        assert torch.equal(batch["x"] * 1, torch.stack([load(2 * index), load(2 * index + 1)]))
        assert digests(batch) == digests(default_collate([Items()[2 * index], Items()[2 * index + 1]]))
        assert len(LOADED) == (4 if said else 2)
        LOADED.clear()


def test_workers_load_what_they_cannot_send() -> None:
    kept = StaysLazy()
    loader = DataLoader(Held(load), batch_size=2, num_workers=1, worker_init_fn=Asking(kept))
    for index, batch in enumerate(loader):
        assert torch.equal(batch * 1, torch.stack([load(2 * index), load(2 * index + 1)]))


def broken(index: int) -> Tensor:
    raise OSError(f"item {index} is broken")


class Broken(Items):
    def __getitem__(self, index: int) -> Any:
        return LazyTensor(functools.partial(broken, index), (2, 3))


def test_what_a_worker_cannot_load_is_raised_and_nothing_waits() -> None:
    with pytest.raises(OSError, match="item 0 is broken"):
        next(iter(DataLoader(Broken(), num_workers=1, timeout=60)))
    batch = next(iter(DataLoader(Held(broken), num_workers=1, timeout=60)))
    with pytest.raises(OSError, match="item 0 is broken"):
        batch.sum()


def test_what_holds_tensors_is_known_by_their_values() -> None:
    values = torch.arange(6.0).view(2, 3)
    same, other = (LazyTensor(functools.partial(torch.add, x, 1), (2, 3)) for x in (values.clone(), values + 1))
    assert LazyTensor(functools.partial(torch.add, values, 1), (2, 3)).key() == same.key() != other.key()
