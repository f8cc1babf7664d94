"""Dealt samples with lazy images change no number: by budgets, without an image, resumed and evaluated."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from features.balanced_microbatches.albums import COUNTS, Album, Albums, packed
from features.toys import LANGUAGE, PIXELS, VISION, Layout, Run, assert_same, figures, together, weights
from lightning_mm5d import BudgetBatchSampler, LazyTensor, Modality

EYES = Layout({"vision": Modality(dp_size=2, **VISION), "language": Modality(**LANGUAGE)}, 3)
"""two encoder replicas, which take turns with microbatches: ranks 0-1; language: rank 2"""
WITHOUT = [number for number, count in enumerate(COUNTS) if not count]
ORDER = [*WITHOUT, *(number for number, count in enumerate(COUNTS) if count)]
"""the first batch has no image"""
LOADED: list[int] = []


def load(images: Tensor) -> Tensor:
    LOADED.append(len(images))
    return images


class LazyAlbums(Albums):
    """The same samples, whose images are loaded where they are read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        images = sample["images"]
        return {**sample, "images": LazyTensor(partial(load, images), (len(images), PIXELS), torch.float64)}


class Judged(Album):
    """Keeps the loss of each step, and logs that of an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("val_loss", torch.nn.functional.cross_entropy(self(batch), batch["label"]), sync_dist=True)


def loaders(albums: Albums) -> list[DataLoader]:
    budgets = BudgetBatchSampler([5] * len(albums), 40, pixels=COUNTS, pixel_budget=9)
    ordered = DataLoader(albums, batch_size=8, sampler=ORDER, collate_fn=packed)
    return [ordered, DataLoader(albums, batch_sampler=budgets, collate_fn=packed)]


def scenario(run: Run) -> list[Any]:
    """What a run gives without and with `balance`, whose last steps a resumed run takes, too."""
    found = []
    for balance in (False, True):
        dealt = replace(run, options={"num_microbatches": 4, "batching": {"balance": balance}})
        for number in range(2):
            module, folder = Judged(), run.folder / f"{balance}{number}"
            saver = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
            trainer = dealt.trainer(max_epochs=2, enable_checkpointing=True, callbacks=[saver])
            LOADED.clear()
            trainer.fit(module, loaders(LazyAlbums())[number], loaders(Albums())[0])
            loaded, kept = sum(LOADED), figures(trainer)
            predicted = trainer.predict(module, DataLoader(LazyAlbums(), batch_size=8, collate_fn=packed))
            again = Judged()
            last = dealt.trainer(max_epochs=2, default_root_dir=folder)
            last.fit(again, loaders(LazyAlbums())[number], loaders(Albums())[0], ckpt_path=folder / "step=1.ckpt")
            assert_same(again.losses, module.losses[1:], 1e-12)
            found.append((loaded, [weights(module), module.losses, kept, [part["logits"] for part in predicted]]))
    return found


def test_losses_are_those_of_samples_as_they_come(tmp_path: Path) -> None:
    """ranks as the layout says"""
    ranks = together(EYES, scenario, tmp_path)
    for rank, found in enumerate(ranks):
        for plain, dealt in zip(found[:2], found[2:], strict=True):
            for value in dealt[1][0].values():  # those that other ranks hold are NaN
                value.nan_to_num_()
            for value in plain[1][0].values():
                value.nan_to_num_()
            assert_same(dealt[1], plain[1], 1e-12)
            assert rank < 2 or not dealt[0], "the language model's rank loads no image"
