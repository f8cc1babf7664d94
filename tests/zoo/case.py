"""What one tiny model of the zoo is: how to build it, how to feed it, and where its parts are.

Parity tests compare a distributed run with a one-process run of the same module, so everything here is a
pure function of a seed, floats follow `torch.get_default_dtype()`, and every sample of a batch has the same
number of label tokens: the loss of a batch is then the mean of the losses of its equal splits. Parameters
are perturbed after the model's own initialisation, because families that start a projector at zero would
hide every encoder gradient. Only tests use this; it knows nothing of any strategy.

Shapes: B samples, S tokens, I images (or audio clips) of the whole batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]

LABELS = 6  # label tokens of every sample
FIRST_TEXT_ID = 16  # smaller ids are placeholders, padding and the like
VOCABULARY = 64


class TinyModule(L.LightningModule):
    """The ordinary Lightning module around a model whose forward takes the batch and returns a loss.

    `fixed` are arguments of every call of the model, such as `use_cache=False`.
    """

    def __init__(self, model: nn.Module, *, lr: float = 0.05, **fixed: Any) -> None:
        super().__init__()
        self.model = model
        self.lr = lr
        self.fixed = fixed

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.model(**batch, **self.fixed).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch, **self.fixed).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@dataclass(frozen=True, kw_only=True)
class Items:
    """One kind of non-text input that placeholder tokens refer to, such as the images of a batch."""

    placeholder: int
    """Token id that stands for a feature of the item."""
    length: int
    """Placeholder tokens of one item."""
    rows: Mapping[str, int]
    """Batch key -> how many rows of it belong to one item."""

    def counts(self, tokens: Tensor) -> list[int]:
        """How many items each sample of `tokens` [B, S] has."""
        return [n // self.length for n in (tokens == self.placeholder).sum(dim=1).tolist()]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One tiny model. All paths are dotted and start at the LightningModule."""

    name: str
    make_module: Callable[[], L.LightningModule]
    make_batch: Callable[[list[int]], Batch]
    """Takes the number of images (or clips) of every sample; the random state is already seeded."""
    modalities: tuple[str, ...]
    """Modalities that should be found; the last one computes the loss."""
    layers: Mapping[str, tuple[str, ...]]
    """Modality -> its layer lists, in the order in which they run."""
    boundaries: Mapping[str, str] = field(default_factory=dict)
    """Modality -> the callable that the forward calls and whose result is all that leaves the modality."""
    modality_paths: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Modality -> its `module` and `boundary`, for models whose parts cannot be found by themselves."""
    frozen: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"none": ()})
    """Variant -> prefixes of the parameters to freeze."""
    unused: tuple[str, ...] = ()
    """Prefixes of the trainable parameters that the loss does not depend on: they never get a gradient."""
    items: tuple[Items, ...] = ()
    """What placeholder tokens refer to; batch keys not named there have one row per sample."""
    image_counts: tuple[int, ...] = (1,)
    """How many images (or clips) one sample may have."""
    tokens_key: str = "input_ids"
    mean_of_samples: bool = True
    """Whether the loss of a batch is the mean over its samples; not so for contrastive losses."""

    def build(self, seed: int = 0) -> L.LightningModule:
        """The module in train mode; equal seeds and default dtypes give equal parameters."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            module = self.make_module()
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return module

    def batch(
        self,
        batch_size: int,
        seed: int = 0,
        *,
        some_without: bool = False,
        images: Sequence[int] | None = None,
    ) -> Batch | None:
        """A batch of `batch_size` samples; None where the family cannot have the number of images asked for.

        Args:
            some_without: the first half of the samples has no image.
            images: number of images of each sample; excludes `some_without`.
        """
        counts = list(images) if images is not None else [1] * batch_size
        if some_without:
            counts[: (batch_size + 1) // 2] = [0] * ((batch_size + 1) // 2)
        assert len(counts) == batch_size, (counts, batch_size)
        if not set(counts) <= set(self.image_counts):
            return None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make_batch(counts)

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        """Reference splitter: `parts` batches of consecutive samples; a key without rows is left out."""
        tokens = batch[self.tokens_key]
        if len(tokens) % parts:
            raise ValueError(f"batch of {len(tokens)} samples does not divide into {parts} parts")
        size = len(tokens) // parts
        rows = {key: [1] * len(tokens) for key in batch}
        for items in self.items:
            counts = items.counts(tokens)
            rows.update({key: [n * count for count in counts] for key, n in items.rows.items()})
        split: list[Batch] = []
        for part in range(parts):
            piece = {}
            for key, value in batch.items():
                start = sum(rows[key][: part * size])
                stop = start + sum(rows[key][part * size : (part + 1) * size])
                if stop > start:
                    piece[key] = value[start:stop]
            split.append(piece)
        return split


def apply_freeze(module: nn.Module, case: Case, variant: str) -> None:
    """Turns off gradients of what `case.frozen[variant]` names; a prefix without parameters is an error."""
    for prefix in case.frozen[variant]:
        named = [p for name, p in module.named_parameters() if name == prefix or name.startswith(prefix + ".")]
        if not named:
            raise ValueError(f"{case.name}: frozen[{variant!r}] names {prefix!r}, which has no parameters")
        for parameter in named:
            parameter.requires_grad_(False)


def text_batch(
    counts: list[int],
    *,
    length: int,
    items: Items | None = None,
    begin: int | None = None,
    end: int | None = None,
) -> Batch:
    """`input_ids`, `attention_mask` and `labels`, each [B, length], with the items near the start.

    Each item is `begin`, its placeholders, `end` (text tokens where these are None), so that the items of
    one sample stay apart. Only the last `LABELS` tokens have labels.
    """
    tokens = torch.randint(FIRST_TEXT_ID, VOCABULARY, (len(counts), length))
    for sample, count in enumerate(counts):
        at = 1
        for _ in range(count):
            assert items is not None
            if begin is not None:
                tokens[sample, at] = begin
            tokens[sample, at + 1 : at + 1 + items.length] = items.placeholder
            at += 1 + items.length
            if end is not None:
                tokens[sample, at] = end
            at += 1
        assert at <= length - LABELS, (count, length)
    labels = tokens.clone()
    labels[:, :-LABELS] = -100
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def pad_right(batch: Batch, pad_id: int) -> Batch:
    """Appends two tokens of which sample i pads `i % 3`; padding and the appended tokens have no labels."""
    extra = torch.randint(FIRST_TEXT_ID, VOCABULARY, (len(batch["input_ids"]), 2))
    mask = torch.ones_like(extra)
    for sample in range(len(extra)):
        mask[sample, 2 - sample % 3 :] = 0
    extra[mask == 0] = pad_id
    return {
        "input_ids": torch.cat([batch["input_ids"], extra], dim=1),
        "attention_mask": torch.cat([batch["attention_mask"], mask], dim=1),
        "labels": torch.cat([batch["labels"], torch.full_like(extra, -100)], dim=1),
    }
