"""Makes batches of conversations for a DataLoader: padded rows, or rows packed with several conversations.

It is a plain object that travels to worker processes. What it does depends on its samples alone, so that all ranks that
load a batch get the same one.

Shapes: B rows, S tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_mm5d.config.errors import ConfigError, did_you_mean
from lightning_mm5d.data.loader import VaryingCollator
from lightning_mm5d.models.packing import check_packs, first_fit
from lightning_mm5d.models.processing import IGNORED, MultimodalProcessor, Sample

_TOO_LONG = ("refuse", "drop", "cut")


class MultimodalCollator(VaryingCollator):
    """Called with a list of rows that have ``messages`` or ``conversations``, returns a batch with labels.

    Args:
        processor: encodes the rows.
        max_length: tokens of a sample, at most; with packing also of a row. None sets no limit.
        packing: whether a row holds as many samples as fit, each in the first row with room for it. Samples never see
            each other, positions restart with each, and the first token of each is not learned.
        too_long: what happens to a sample above `max_length`. ``"refuse"`` raises its name; ``"drop"`` leaves it out
            with a warning; ``"cut"`` cuts text off its end, and raises where that would cut into the features of
            an item or leave nothing to learn.
        pad_to_max_length: whether rows have `max_length` tokens, and not those of the longest one.
        prompts: whether batches are for ``model.generate(**batch)``: without a last turn of the assistant and labels,
            padded on the left.
        lazy: whether files are decoded where something reads them, as for `MultimodalProcessor.encode`.

    Raises:
        ConfigError: arguments do not fit together, or packed samples would see each other in the language model.
    """

    def __init__(
        self,
        processor: MultimodalProcessor,
        max_length: int | None = None,
        *,
        packing: bool = False,
        too_long: str = "refuse",
        pad_to_max_length: bool = False,
        prompts: bool = False,
        lazy: bool = False,
    ) -> None:
        if too_long not in _TOO_LONG:
            raise ConfigError("too_long", too_long, "It says what to do", did_you_mean(too_long, _TOO_LONG))
        if max_length is not None and max_length < 1:
            raise ConfigError("max_length", max_length, "It counts tokens", "Use 1 or more")
        if max_length is None and (packing or pad_to_max_length):
            field = "packing" if packing else "pad_to_max_length"
            raise ConfigError(field, True, "Rows are filled up to max_length", "Set max_length")
        if prompts and packing:
            rule = "Rows that a model continues hold one sample each"
            raise ConfigError("packing", True, rule, "Use packing=False with prompts=True")
        if packing:
            check_packs(processor.config.text_config)
        self.processor, self.max_length, self.packing = processor, max_length, packing
        self.too_long, self.pad_to_max_length, self.prompts = too_long, pad_to_max_length, prompts
        self.lazy = lazy

    @property
    @override
    def varies(self) -> bool:
        return self.packing or self.too_long == "drop"

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The batch of `rows`.

        Returns:
            What `MultimodalProcessor.batch` returns. Packed rows have ``position_ids`` [B, S] instead of an
            attention mask, and as ``<name>_items`` the sums over their samples.
        """
        encoded = (self.processor.encode(row, prompt=self.prompts, lazy=self.lazy) for row in rows)
        samples = [fitting for sample in encoded if (fitting := self._fitting(sample)) is not None]
        if not samples:
            names = ", ".join(str(row.get("source", "sample")) for row in rows)
            rule = f"A batch has at least one sample, and all of it have more than max_length={self.max_length} tokens"
            raise ConfigError("batch", names, rule, "Raise max_length or batch_size, or remove them from the data")
        length = self.max_length if self.pad_to_max_length else None
        if self.prompts:
            batch = self.processor.batch(samples, length=length, padding_side="left")
            return {key: value for key, value in batch.items() if key != "labels"}
        for sample in samples:
            if all(label == IGNORED for label in sample.labels):
                rule = "A sample has a turn of the assistant, from which the model learns"
                raise ConfigError(sample.source, "no labels", rule, "Add one, or remove the sample")
        return self._packed(samples, length) if self.packing else self.processor.batch(samples, length=length)

    def _fitting(self, sample: Sample) -> Sample | None:
        limit = self.max_length
        if limit is None or len(sample) <= limit:
            return sample
        message = f"It has {len(sample)} tokens, more than max_length={limit}"
        if self.too_long == "drop":
            warnings.warn(f"{sample.source} is left out. {message}.", stacklevel=2)
            return None
        fix = "Raise max_length, remove the sample, or use too_long='drop'"
        if self.too_long == "refuse":
            raise ConfigError(sample.source, len(sample), message, fix)
        if set(self.processor.token_ids.values()) & set(sample.ids[limit:]):
            rule = f"{message}, and features of its items would be cut off"
            raise ConfigError(sample.source, len(sample), rule, fix)
        if self.prompts or all(label == IGNORED for label in sample.labels[:limit]):
            rule = f"{message}, and nothing to learn, or no question, would be left"
            raise ConfigError(sample.source, len(sample), rule, fix)
        return replace(sample, ids=sample.ids[:limit], labels=sample.labels[:limit])

    def _packed(self, samples: Sequence[Sample], length: int | None) -> dict[str, Tensor]:
        assert self.max_length is not None
        members = first_fit([len(sample) for sample in samples], self.max_length)
        rows = [[samples[index] for index in row] for row in members]
        batch = self.processor.batch([_row(row) for row in rows], length=length)
        size = batch.pop("attention_mask").shape[1]
        positions = []
        for row in rows:  # padding is a document of its own
            lengths = [len(sample) for sample in row]
            positions.append(torch.cat([torch.arange(n) for n in (*lengths, size - sum(lengths))]))
        return {**batch, "position_ids": torch.stack(positions)}


def _row(samples: Sequence[Sample]) -> Sample:
    """Several samples one after the other; nothing predicts the first token of each."""
    return Sample(
        ids=[token for sample in samples for token in sample.ids],
        labels=[label for sample in samples for label in (IGNORED, *sample.labels[1:])],
        values={name: [v for sample in samples for v in sample.values[name]] for name in samples[0].values},
        items={name: sum(sample.items[name] for sample in samples) for name in samples[0].items},
        source=", ".join(sample.source for sample in samples),
    )
