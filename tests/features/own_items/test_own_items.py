"""Each rank loads the images that it encodes, and numbers are those of tensors that are there."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from features.toys import LANGUAGE, PAIR, PIXELS, TWINS, VISION, Layout, Run, Samples, Toy, alone, together, weights
from lightning_mm5d import LazyTensor, Modality
from lightning_mm5d.data.loader import Resumable

IMAGES = Samples(32)
LOADED: list[int] = []
AHEAD: list[int] = []


def load(index: int) -> Tensor:
    LOADED.append(index)
    if threading.current_thread() is not threading.main_thread():
        AHEAD.append(index)
    return IMAGES.images[index]


class LazySamples(Dataset):
    """The same samples, with images that are loaded where they are read."""

    def __len__(self) -> int:
        return len(IMAGES)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = LazyTensor(functools.partial(load, index), (PIXELS,), torch.float64)
        return {**IMAGES[index], "images": image}


class Telling(Toy):
    """Notes what its loaders were told of lazy tensors."""

    def on_train_end(self) -> None:
        loader = self.trainer.train_dataloader
        kept = getattr(loader, "stays_lazy", None)
        self.told = isinstance(loader, Resumable), None if kept is None else bool(kept)


def train(run: Run, lazy: bool = True, **options: Any) -> Any:
    module = Telling()
    LOADED.clear()
    AHEAD.clear()
    samples: Dataset = LazySamples() if lazy else IMAGES
    trainer = run.trainer(max_epochs=2)
    trainer.fit(module, run.training(samples, **options))
    trained, ahead, told = sorted(LOADED), sorted(AHEAD), getattr(module, "told", None)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    found = trainer.predict(module, run.loader(samples, 8))
    return weights(module), metrics, found, trained, ahead, told


def both(run: Run) -> Any:
    return [train(run), train(run, lazy=False), train(run, num_workers=2)]


EYES = Layout({"vision": Modality(dp_size=2, **VISION), "language": Modality(**LANGUAGE)}, 3)
"""two encoder replicas, which take turns with microbatches: ranks 0-1; language: rank 2"""


CALLS = Layout({"vision": Modality(microbatches_per_call=2, **VISION), "language": Modality(**LANGUAGE)}, 2)
"""vision, whose calls are joined: rank 0; language: rank 1"""


def of_images(run: Run) -> Any:
    return train(run)[3]


def test_joined_calls_load_no_item_twice() -> None:
    """vision: rank 0; language: rank 1"""
    own, others = together(CALLS, of_images)
    epochs = 2 * len(IMAGES)
    assert epochs <= len(own) <= epochs + 8, "but for the first batch, which is compared"
    assert not others


def assert_equal(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=0, equal_nan=True)
    assert got[1] == expected[1]
    torch.testing.assert_close(got[2], expected[2], rtol=0, atol=0)


@pytest.mark.parametrize(
    "layout", [PAIR, EYES, pytest.param(TWINS, marks=pytest.mark.exhaustive)], ids=["pair", "encoder replicas", "twins"]
)
def test_numbers_are_those_of_plain_tensors_and_each_rank_loads_its_own(layout: Layout) -> None:
    """ranks as the layout says"""
    found = together(layout, both)
    for lazily, plainly, in_workers in found:
        assert_equal(lazily, plainly)
        assert_equal(in_workers, plainly)
    epochs = 2 * len(IMAGES)
    counts = [lazily[3] for lazily, _, _ in found]
    reads = {"pair": [epochs, 0], "eyes": [epochs // 2, epochs // 2, 0], "twins": [epochs, 0, 0]}
    named = reads["pair" if layout is PAIR else "eyes" if layout is EYES else "twins"]
    for loaded, usual in zip(counts, named, strict=True):
        assert usual <= len(loaded) <= usual + (usual and 8), "but for the first batch, which is compared"
    for lazily, _, in_workers in found:
        loaded, ahead = lazily[3], lazily[4]
        assert len(ahead) >= len(loaded) - 16, "all but the first batches are loaded ahead"
        assert lazily[5] == (True, None)
        reads_all = len(loaded) >= epochs
        assert in_workers[5] == (True, not reads_all), "workers load what a rank reads whole"


class Stream(IterableDataset):
    """Goes on where it was in each epoch."""

    def __init__(self, lazy: bool) -> None:
        self.samples, self.given = LazySamples() if lazy else IMAGES, 0

    def __len__(self) -> int:
        return len(IMAGES)

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.given += 1
            yield self.samples[(self.given - 1) % len(IMAGES)]


class Normalizing(Telling):
    """Writes to what is to be loaded."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch["images"].sub_(0.5).mul_(2)
        return batch


def stream(run: Run) -> Any:
    found = []
    for cls in (Telling, Normalizing):
        module, samples = cls(), Stream(run.layout is not None)
        run.trainer(max_epochs=3, limit_train_batches=2).fit(module, run.loader(samples, 8))
        found.append((weights(module), samples.given))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mm5d-own-items")]
    return found


def test_no_batch_is_read_that_no_step_takes_and_writes_of_hooks_count() -> None:
    """vision: rank 0; language: rank 1"""
    expected = alone(stream)
    for rank in together(PAIR, stream):
        for (got, given), (weight, plainly_given) in zip(rank, expected, strict=True):
            assert given == plainly_given
            for name, value in got.items():  # those that the other rank holds are NaN
                assert value.isnan().any() or torch.allclose(value, weight[name], rtol=1e-9, atol=1e-9), name


class OneThird(LazySamples):
    """Its numbers depend on the default dtype where they are made."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**IMAGES[index], "images": LazyTensor(functools.partial(third, index), (PIXELS,))}


def third(index: int) -> Tensor:
    load(index)
    return torch.full((PIXELS,), index + 1.0) / 3


def in_double(run: Run) -> Any:
    module = Telling()
    AHEAD.clear()
    run.trainer(precision="64-true").fit(module, run.training(OneThird()))
    return weights(module), len(AHEAD)


def test_items_are_loaded_as_their_samples_were_where_the_precision_changes_the_default_dtype() -> None:
    """vision: rank 0; language: rank 1"""
    expected, _ = alone(in_double)
    for got, ahead in together(PAIR, in_double):
        assert not ahead, "threads would see the default dtype of the step"
        for name, value in got.items():  # those that the other rank holds are NaN
            assert value.isnan().any() or torch.allclose(value, expected[name], rtol=1e-9, atol=1e-9), name


class Torn(LazySamples):
    """Cannot give its 17th sample."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 16:
            raise OSError("sample 16 is torn")
        return super().__getitem__(index)


def tear(run: Run) -> Any:
    stops, fails = Ordered(), Ordered()
    run.trainer(max_steps=4).fit(stops, run.loader(Torn(), 4, sampler=range(32)))
    with pytest.raises(OSError, match="sample 16 is torn"):
        run.trainer().fit(fails, run.loader(Torn(), 4, sampler=range(32)))
    return len(stops.labels), len(fails.labels)


def test_what_cannot_be_read_ahead_raises_when_its_step_begins() -> None:
    """vision: rank 0; language: rank 1"""
    assert together(PAIR, tear) == [(4, 4), (4, 4)]


class Stateful(DataLoader):
    """Knows its length, and saves how many batches it has given."""

    given = begins = 0

    def __iter__(self) -> Iterator[Any]:
        self.given, self.begins = self.begins, 0
        for batch in itertools.islice(super().__iter__(), self.given, None):
            self.given += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins = state["given"]


class Ordered(Telling):
    def __init__(self) -> None:
        super().__init__()
        self.labels: list[Any] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.labels.append(batch["tokens"].tolist())


def stop_and_go_on(run: Run) -> Any:
    def order(path: Any = None, **options: Any) -> list[Any]:
        module = Ordered()
        loader = Stateful(LazySamples(), batch_size=4)
        trainer = run.trainer(enable_checkpointing=True, default_root_dir=run.folder, **options)
        trainer.fit(module, loader, ckpt_path=path)
        return module.labels

    saving = ModelCheckpoint(run.folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole = order(callbacks=[saving])
    return [(order(run.folder / f"step={step}.ckpt", callbacks=[]), whole[step:]) for step in (1, 3, 7)]


def test_a_loader_with_a_state_of_its_own_goes_on_with_the_batch_after_the_last_step(tmp_path: Path) -> None:
    """vision: rank 0; language: rank 1"""
    for rank in together(PAIR, stop_and_go_on, tmp_path):
        for got, expected in rank:
            assert got == expected


def test_one_process_reads_it_as_any_tensor() -> None:
    scenario: Callable[..., Any] = train
    assert_equal(alone(scenario), alone(functools.partial(train, lazy=False)))
