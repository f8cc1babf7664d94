"""Training runs that are stopped and resumed, recording which samples each step saw and what came out of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import seed_everything
from lightning.pytorch.callbacks import Callback
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, default_collate

from features.toys import PIXELS, Run, Samples, Toy, weights


class Drawn(Samples):
    """Augments each image with draws of all three libraries, and tells the sample's number."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = torch.rand(PIXELS, dtype=torch.float64) + random.random() + float(np.random.rand())
        sample = super().__getitem__(int(index))
        return {**sample, "images": sample["images"] + 0.1 * noise, "index": torch.tensor(int(index))}


class Streamed(IterableDataset):
    """The same samples as a stream without a length."""

    def __init__(self, count: int) -> None:
        self.samples = Drawn(count)

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[index] for index in range(len(self.samples)))


class StatefulStream(IterableDataset):
    """The same samples as a stream that saves its own place."""

    def __init__(self, count: int) -> None:
        self.samples, self.place = Drawn(count), 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < len(self.samples):
            self.place += 1
            yield self.samples[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Batches:
    """Batches that no DataLoader makes."""

    def __init__(self, count: int, batch: int) -> None:
        self.samples, self.batch = Drawn(count), batch

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self.samples), self.batch):
            yield default_collate([self.samples[index] for index in range(start, start + self.batch)])


class StatefulBatches(Batches):
    """The same with a state of their own."""

    place = 0

    def __len__(self) -> int:
        return len(self.samples) // self.batch

    def __iter__(self) -> Iterator[Any]:
        for batch in list(super().__iter__())[self.place :]:
            self.place += 1
            yield batch
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Single(Dataset):
    """Each item is a batch of four samples."""

    def __init__(self, samples: Drawn) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples) // 4

    def __getitem__(self, index: int) -> Any:
        return default_collate([self.samples[4 * index + offset] for offset in range(4)])


class Shuffled(BatchSampler):
    """A batch sampler of one's own that shuffles its batches and their contents."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        random.shuffle(batches)
        for batch in batches:
            yield random.sample(batch, len(batch))


class Watched(Toy):
    """Drops hidden units, draws in its step, and records."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__(dropout=dropout)
        self.steps: list[tuple[int, int, tuple[Any, ...]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = batch if isinstance(batch, list | tuple) else [batch]
        loss = sum(self.loss(part) for part in parts if part is not None)
        loss = loss * (1 + 0.01 * torch.rand((), dtype=torch.float64) + 0.01 * random.random())
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.steps.append((self.current_epoch, batch_idx, _indices(batch)))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def _indices(batch: Any) -> tuple[Any, ...]:
    if isinstance(batch, dict) and "index" in batch:
        return tuple(batch["index"].tolist())
    return tuple(_indices(part) if part is not None else None for part in batch)


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))


class SaveAndStop(Callback):
    """Saves after a number of batches of the whole run, and ends it there."""

    def __init__(self, path: Path, after: int) -> None:
        self.path, self.after, self.seen = path, after, 0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seen += 1
        if self.seen == self.after:
            trainer.save_checkpoint(self.path)
            raise StoppedError


class StoppedError(Exception):
    pass


Loader = Callable[[Run], Any]


@dataclass
class Case:
    """One way to train.

    Attributes:
        loader: makes what `train_dataloaders` gets.
        epochs: of the run.
        trainer: options.
    """

    loader: Loader
    epochs: int = 2
    trainer: dict[str, Any] = field(default_factory=dict)


def train(
    run: Run, case: Case, *, path: Path | None = None, after: int = 0, ckpt_path: Any = None, seed: int | None = 5
) -> dict[str, Any]:
    """Train a new module; stop after `after` batches with a checkpoint at `path`, or run to the end."""
    if seed is not None:
        seed_everything(seed, verbose=False)
    module, losses = Watched(), Losses()
    callbacks: list[Callback] = [losses]
    if path is not None:
        callbacks.append(SaveAndStop(path, after))
    trainer = run.trainer(max_epochs=case.epochs, callbacks=callbacks, **case.trainer)
    try:
        trainer.fit(module, case.loader(run), ckpt_path=ckpt_path)
    except StoppedError:
        return {"steps": module.steps, "losses": losses.values}
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        "steps": module.steps,
        "losses": losses.values,
        "weights": weights(module),
        "metrics": metrics,
        "global_step": trainer.global_step,
        "after": (float(torch.rand(())), random.random(), float(np.random.rand())),
    }


def stopped_and_resumed(run: Run, case: Case, after: int, name: str) -> dict[str, Any]:
    """An uninterrupted run, one that stops after `after` batches, and one that goes on from there."""
    path = run.folder / f"{name}.ckpt"
    whole = train(run, case)
    first = train(run, case, path=path, after=after)
    second = train(run, case, ckpt_path=path, seed=99)  # a resumed run goes on with the saved seed
    return {"whole": whole, "first": first, "second": second, "after": after}


def assert_exact(found: dict[str, Any], again: int = 0, *, goes_on_drawing: bool = True) -> None:
    """The two parts are the uninterrupted run, to the last bit; the second takes the last `again` steps once more.

    One replica over several ranks leaves the generators of the process as it found them, with another seed in the
    second part, so that numbers drawn after the run need not be equal.
    """
    whole, first, second, after = found["whole"], found["first"], found["second"], found["after"]
    assert first["steps"] == whole["steps"][:after]
    assert second["steps"] == whole["steps"][after - again :]
    assert first["losses"] == whole["losses"][:after]
    assert second["losses"] == whole["losses"][after - again :]
    assert second["global_step"] == whole["global_step"]
    assert second["metrics"] == whole["metrics"]
    assert not goes_on_drawing or second["after"] == whole["after"]
    for name, value in whole["weights"].items():
        assert torch.equal(second["weights"][name], value), name


def samples(steps: list[Any], epoch: int) -> list[int]:
    """The samples of an epoch as a rank recorded them, of one replica."""

    def flat(value: Any) -> Iterator[int]:
        if isinstance(value, tuple):
            for one in value:
                yield from flat(one)
        elif value is not None:
            yield value

    return [index for number, _, indices in steps if number == epoch for index in flat(indices)]


def loader(count: int = 24, batch: int = 4, **options: Any) -> Loader:
    """`batch` counts the samples of one replica."""
    return lambda run: DataLoader(Drawn(count), batch_size=batch, **options)
