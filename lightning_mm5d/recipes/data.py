"""Conversations with images, sounds and videos from JSONL files, as a LightningDataModule.

Loaders have ordinary datasets and samplers, so Lightning and the strategy place their own samplers, and a run goes on
in the midst of an epoch as with any other data. Files are decoded by the ranks that read them, as far as their headers
tell what they give.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from torch.utils.data import DataLoader

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.models.chat import MessagesFile
from lightning_mm5d.models.collating import MultimodalCollator
from lightning_mm5d.models.processing import MultimodalProcessor


class MultimodalDataModule(L.LightningDataModule):
    """Loads conversations in the messages format of Hugging Face or the format of LLaVA.

    Args:
        train: a JSONL file (or one JSON array) for ``fit``. Paths in it start at its folder.
        val: the same for validation.
        test: the same for ``test``.
        predict: the same for ``predict``, as prompts to generate from; a last turn of the assistant is left out.
        processor: a `MultimodalProcessor`, or the folder that one was saved in. Unset: the one of the LightningModule
            that is trained, such as a `MultimodalModule`.
        batch_size: conversations of a batch; with `packing` they share fewer rows.
        max_length: as for `MultimodalCollator`.
        packing: as for `MultimodalCollator`, in training alone.
        too_long: as for `MultimodalCollator`.
        root: the folder in which paths start, instead of that of each file.
        num_workers: processes that load.
        shuffle: whether training data is shuffled anew in each epoch.
        lazy: as for `MultimodalCollator`.

    Raises:
        ConfigError: a file is missing or empty, or an argument does not fit.
    """

    def __init__(
        self,
        train: str | Path | None = None,
        val: str | Path | None = None,
        test: str | Path | None = None,
        predict: str | Path | None = None,
        *,
        processor: MultimodalProcessor | str | Path | None = None,
        batch_size: int = 1,
        max_length: int | None = None,
        packing: bool = False,
        too_long: str = "refuse",
        root: str | Path | None = None,
        num_workers: int = 0,
        shuffle: bool = True,
        lazy: bool = True,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ConfigError("batch_size", batch_size, "It counts conversations", "Use 1 or more")
        files = {"train": train, "val": val, "test": test, "predict": predict}
        self._files = {name: MessagesFile(path, root) for name, path in files.items() if path is not None}
        self._processor, self.batch_size = processor, batch_size
        self._num_workers, self._shuffle = num_workers, shuffle
        self._limits: dict[str, Any] = {"max_length": max_length, "too_long": too_long, "lazy": lazy}
        self._options: dict[str, dict[str, Any]] = {"train": {"packing": packing}, "predict": {"prompts": True}}
        if processor is not None:
            self._collator("train")  # refuses what does not fit before anything runs

    @property
    def processor(self) -> MultimodalProcessor:
        """The one that was given, read from its folder when it is first asked for, or that of the LightningModule."""
        if isinstance(self._processor, str | Path):
            self._processor = MultimodalProcessor.from_pretrained(self._processor)
        if self._processor is None:
            self._processor = getattr(getattr(self.trainer, "lightning_module", None), "processor", None)
        if not isinstance(self._processor, MultimodalProcessor):
            rule = "Conversations are encoded by a MultimodalProcessor, and the LightningModule has none"
            raise ConfigError("data.processor", type(self._processor).__name__, rule, "Name the folder of one")
        return self._processor

    def _collator(self, name: str) -> MultimodalCollator:
        return MultimodalCollator(self.processor, **self._limits, **self._options.get(name, {}))

    def train_dataloader(self) -> DataLoader[Any]:
        """The conversations of `train`."""
        return self._loader("train", shuffle=self._shuffle)

    def val_dataloader(self) -> Any:
        """The conversations of `val`; none where there is no such file."""
        return self._loader("val") if "val" in self._files else []

    def test_dataloader(self) -> DataLoader[Any]:
        """The conversations of `test`."""
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """The conversations of `predict`."""
        return self._loader("predict")

    def _loader(self, name: str, shuffle: bool = False) -> DataLoader[Any]:
        if name not in self._files:
            rule = f"There is no file of conversations for {name}"
            raise ConfigError(f"MultimodalDataModule.{name}", None, rule, f"Write {name}='conversations.jsonl'")
        self._files[name].names = tuple(self.processor.processors)
        return DataLoader(
            self._files[name],  # type: ignore[arg-type]  # a sequence is a dataset
            batch_size=self.batch_size,
            shuffle=shuffle,
            collate_fn=self._collator(name),
            num_workers=self._num_workers,
            persistent_workers=self._num_workers > 0,
        )
