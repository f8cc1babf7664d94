"""How a batch becomes microbatches, and what each of them weighs, as the user has said it.

The strategy's arguments say it first, then the module's methods ``split_batch`` and ``loss_weight``, then the code of
the model's loss (`source.passed`), and the names and lengths in the batch. Refuses label tokens that it would have
to guess: the labels are what the step passes as ``labels=``, or the one tensor of that name in the batch.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, Literal, Protocol

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.loader import LoaderBatches, VaryingCollator
from lightning_mm5d.data.microbatch import (
    Dealer,
    Ends,
    Microbatch,
    batch_samples,
    counted,
    joined_parts,
    part_samples,
    split,
    split_each,
    with_tensors,
)
from lightning_mm5d.data.packed_images import describe
from lightning_mm5d.layout import Layout
from lightning_mm5d.partition.compiled import is_compiled, is_compiled_in_place
from lightning_mm5d.source.passed import (
    OF_ROWS,
    TARGET,
    Counting,
    Path,
    averages_samples,
    counting,
    hands_on,
    leaves_loss,
    passed,
    takes_labels,
)
from lightning_mm5d.source.trees import reached, tree_of

Splitting = Literal["split", "loader"] | Callable[[Any, int], Any]
"""``microbatching`` of the strategy."""
Weighing = Literal["auto", "samples", "tokens"] | Callable[[Any], Any]
"""``loss_weight`` of the strategy."""
_WEIGH = (
    "Leave loss_weight out where the loss is a mean over samples. Otherwise give a function of a microbatch that "
    "returns its number of tokens: loss_weight=function, in YAML its import path, or a method "
    "`loss_weight(self, batch)` of the LightningModule"
)
_COUNT = (
    "Give a function of a microbatch that returns its number of samples: loss_weight=function, in YAML its import "
    "path; define a method `loss_weight(self, batch)` of the LightningModule; or name the tensor with a row for each "
    "sample input_ids, labels or pixel_values"
)


class BatchOptions(Protocol):
    """What the strategy's arguments say of batches."""

    @property
    def microbatch_size(self) -> int | None: ...

    @property
    def num_microbatches(self) -> int | None: ...

    @property
    def microbatching(self) -> Splitting: ...

    @property
    def loss_weight(self) -> Weighing: ...


class BatchParts:
    """Splits the batches of a module, and weighs their parts.

    Args:
        module: may have `split_batch` and `loss_weight`.
        options: arguments of the strategy.
        layout: decides how many microbatches the replica of `rank` has, where replicas have unlike speeds.
        rank: global rank.

    Attributes:
        count: microbatches of a training step of this rank's replica; None where `microbatch_size` decides.
        deals: whether replicas may train with unlike numbers of samples.
        is_auto: whether batches tell if label tokens count, or samples; see `has_labels`.
        counts_samples: whether every microbatch weighs as many samples as it holds, or may.
        counts_equally: whether all replicas then weigh the same, in evaluations too.
        is_compiled: whether any part of the module is.
        splits: whether batches are split here, and not by a function of the user's.
        dealer: says which samples of a batch each microbatch has; None for those that follow each other.
    """

    def __init__(
        self, module: LightningModule, options: BatchOptions, layout: Layout | None = None, rank: int = 0
    ) -> None:
        self._module, self._packed, self._size = module, describe(module), options.microbatch_size
        self.count = None if self._size else options.num_microbatches
        self.deals = layout is not None and layout.deals
        if layout is not None and self.count is not None:
            self.count = layout.microbatches(self.count)[layout.replicas_of_rank(rank)[0]]
        hooks = {name: getattr(module, name, None) for name in ("split_batch", "loss_weight")}
        mode = options.microbatching
        self._splitter = mode if callable(mode) else hooks["split_batch"] if callable(hooks["split_batch"]) else None
        weigh = options.loss_weight
        self._weigh = weigh if callable(weigh) else hooks["loss_weight"] if callable(hooks["loss_weight"]) else None
        self._loss_weight, self._of_steps = weigh, dict[str, BatchParts]()
        self._read_code("training_step")
        self.counts_samples = self._weigh is None and weigh != "tokens"
        self.is_compiled = any(is_compiled(part) or is_compiled_in_place(part) for part in module.modules())
        self.splits = mode == "split" and self._splitter is None
        self.dealer: Dealer | None = None
        self._ends: Ends = {}
        self.counts_equally = False
        names = ("training_step", "validation_step", "test_step")
        # steps of replicas that optimize by hand are not steps of the engine
        is_mean = module.automatic_optimization and any(self.of_step(name)._reads_labels for name in names)
        self.counts_equally = self.counts_samples and not self.deals and not is_mean

    @property
    def _reads_labels(self) -> bool:
        """Whether code alone tells that the step's loss is a mean over labels, and of which part of a batch."""
        return self.is_auto and None not in self._passed and bool(self._passed)

    def of_step(self, name: str) -> BatchParts:
        """Return what weighs the microbatches of a step by the code of the step itself."""
        if name == "training_step" or self._weigh is not None or self._loss_weight != "auto":
            return self
        if name not in self._of_steps:
            read = copy.copy(self)
            read._read_code(name)
            self._of_steps[name] = read if read._passed or hands_on(read._steps()) else self  # one that takes no loss
        return self._of_steps[name]

    def _read_code(self, step: str) -> None:
        self._step, self.is_auto = step, self._weigh is None and self._loss_weight == "auto"
        self._passed: frozenset[Path | None] = frozenset()
        has_labels = self._weigh is None and self._loss_weight != "samples"
        self._counting = self._labels_that_count() if has_labels else None
        self.is_auto &= self._counting is not None

    def split(self, batch: Any, *, is_first: bool = False) -> list[Microbatch]:
        """Return the microbatches of one replica's batch.

        Args:
            batch: of the dataloader, or several of them.
            is_first: whether it is the first of a training run, which must give all microbatches.

        Raises:
            ConfigError: it cannot be split, or not into so many.
        """
        if isinstance(batch, LoaderBatches):
            parts = [counted(part, batch_samples(part)) for part in batch]
        elif self._splitter is not None:
            cut = self._split_by(self._splitter, batch)
            parts = [counted(part, size) for part, size in zip(cut, part_samples(cut, batch), strict=True)]
        elif sizes := self._sizes_of_loaders(batch):
            parts = split_each(batch, self.count or 1, sizes, image_tokens=self._packed)
        else:
            parts = split(
                batch, self.count, size=self._size or 1, image_tokens=self._packed, dealer=self.dealer, known=self._ends
            )
        if is_first and self.count is not None and 0 < len(parts) < self.count and not self._varies():
            samples = sum(part.samples for part in parts)
            rule = f"A batch gives at most {len(parts)} (samples: {samples})"
            fix = f"Use {len(parts)}, larger batches, or microbatch_size, where the number follows from each batch"
            raise ConfigError("batching.num_microbatches", self.count, rule, fix)
        return parts

    def joined(self, batch: Any, parts: Sequence[Microbatch]) -> Microbatch | None:
        """Return the first two microbatches of one replica's batch as one; None where that is not known to be one.

        Args:
            batch: of the dataloader, or several of them.
            parts: what `split` made of it.
        """
        if len(parts) < 2 or isinstance(batch, LoaderBatches):
            return None
        if self._splitter is not None or self._sizes_of_loaders(batch):
            return Microbatch(batch, sum(part.samples for part in parts)) if len(parts) == 2 else None
        return joined_parts(batch, parts[:2], self._packed)

    @property
    def is_whole(self) -> bool:
        """Whether each replica's batch is known to be one microbatch."""
        return self.count == 1 and self.is_equal_everywhere()

    def is_equal_everywhere(self) -> bool:
        """Whether the first batches of all replicas are known to have equal numbers of microbatches."""
        return self.count is not None and not self.deals and not self._varies()

    def _sizes_of_loaders(self, batch: Any) -> list[int]:
        """The samples in the batch of each dataloader, of several with unlike numbers; else nothing."""
        try:
            trainer = self._module.trainer
        except RuntimeError:  # a batch is split for a measurement, without a trainer
            return []
        loaders = trainer.train_dataloader if trainer.training else None
        if (self.count or 1) == 1 or not isinstance(loaders, (dict, list, tuple)) or type(loaders) is not type(batch):
            return []
        if len(loaders) != len(batch) or (isinstance(loaders, dict) and [*loaders] != [*batch]):
            return []
        batches = batch.values() if isinstance(batch, dict) else batch
        sizes = [batch_samples(loader_batch) for loader_batch in batches if loader_batch is not None]
        if batch_samples(batch) is not None or len(sizes) < 2:
            return []
        return [] if None in sizes else [size for size in sizes if size is not None]

    def _varies(self) -> bool:
        """Whether a collator packs or drops samples, so that batches have fewer rows than the `batch_size`."""
        loaders = CombinedLoader(self._module.trainer.train_dataloader).flattened
        collators = [getattr(loader, "collate_fn", None) for loader in loaders]
        return any(isinstance(collator, VaryingCollator) and collator.varies for collator in collators)

    def has_labels(self, parts: Sequence[Microbatch]) -> bool:
        """Return whether it is certain which tensors hold the label tokens that the loss is a mean over.

        Where the step makes what it passes on as labels (``torch.cat``), it is the only tensor of integers with -100,
        and the code of the step names its key.
        """
        marked = set[Path | None]()

        def note(path: Path, tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point() and bool(tensor.eq(-100).any()):
                marked.add(path)
            return tensor

        try:
            all_labels = [self._labels(part.batch) for part in parts]
        except ConfigError:
            for part in parts:
                with_tensors(part.batch, note)
            keys = [step for path in marked if path is not None for step in path if isinstance(step, str)]
            if len(marked) != 1 or not self._named_by_steps().issuperset(keys[-1:]):
                return False
            self._passed = frozenset(marked)
            all_labels = [self._labels(part.batch) for part in parts]
        return bool(all_labels) and not any(labels.is_floating_point() for labels in all_labels)

    def check(self, parts: Sequence[Microbatch], *, tokens: bool, deals: bool = False) -> None:
        """Refuse microbatches whose samples or label tokens are not known, on every rank that loads them.

        Args:
            parts: of one replica's batch.
            tokens: whether label tokens count where nothing else is said.
            deals: whether replicas weigh by their samples too, so that a single part needs their number.

        Raises:
            ConfigError: there are no labels, or several tensors may be them; or parts of unknown numbers of samples.
        """
        if self._weigh is not None:
            return
        if not tokens and (len(parts) > 1 or deals) and not all(part.is_counted for part in parts):
            rule = (
                "The loss of each microbatch weighs as many samples as it holds, and tensors of the batch do not agree "
                "on their number"
            )
            raise ConfigError(
                "batching.microbatching", f"{len(parts)} parts of unknown numbers of samples", rule, _COUNT
            )
        if tokens:
            for part in parts:
                self._labels(part.batch)

    def weights(self, parts: Sequence[Microbatch], *, tokens: bool) -> tuple[float, ...]:
        """Return what each microbatch weighs: its label tokens or its samples, where nothing else is said."""
        if self._weigh is not None:
            return tuple(float(self._weigh(part.batch)) for part in parts)
        if not tokens or not parts:
            return tuple(float(part.samples) for part in parts)
        counts = []
        for part in parts:
            labels = self._labels(part.batch)
            is_cut = self._counting == "shifted" and labels.dim() > 1
            counts.append((labels[..., 1:] if is_cut else labels).ne(-100).sum())
        return tuple(map(float, torch.stack(counts).tolist()))  # one read of the device

    def _labels_that_count(self) -> Counting | None:
        """Which labels the loss is a mean over; None where it is none."""
        self._passed = passed(self._module, self._step, "labels")
        steps = self._steps()
        counted_labels = counting(self._module, steps)
        is_own = self.is_auto and leaves_loss(steps)
        if counted_labels is not None and (is_own or not self._passed):
            targets = passed(self._module, self._step, TARGET)
            if self.is_auto and targets == {(OF_ROWS,)} and (is_own or not takes_labels(self._module)):
                return None
            targets = frozenset({None}) if targets == {(OF_ROWS,)} else targets
            is_token_mean = targets or hands_on(steps)
            if is_own and (not is_token_mean or averages_samples(self._module, steps)):
                return None
            self._passed = targets or self._passed
        if counted_labels is not None or self.is_auto:
            return counted_labels
        configs = (getattr(module, "config", None) for module in self._module.modules())
        return "all" if any(getattr(config, "is_encoder_decoder", False) for config in configs) else "shifted"

    def _steps(self) -> frozenset[FunctionType]:
        return frozenset(func for name in (self._step, "forward") for func in reached(type(self._module), name))

    def _named_by_steps(self) -> set[object]:
        """The constants and attributes in the code of the step, among them keys of the batch that it reads."""
        trees = (tree for step in self._steps() if (tree := tree_of(step)) is not None)
        nodes = [node for tree in trees for node in ast.walk(tree)]
        constants = {node.value for node in nodes if isinstance(node, ast.Constant)}
        return constants | {node.attr for node in nodes if isinstance(node, ast.Attribute)}

    def _split_by(self, splitter: Callable[[Any, int], Any], batch: Any) -> Sequence[Any]:
        count = self.count or self._count_by_size(batch)
        parts = splitter(batch, count)
        if not isinstance(parts, (list, tuple)) or not 0 < len(parts) <= count:
            got = f"{len(parts)} parts" if isinstance(parts, (list, tuple)) else type(parts).__name__
            rule = f"The function that splits a batch into {count} microbatches returns a list of at most as many"
            fix = "Return a list of batches, each of one or more samples"
            raise ConfigError("batching.microbatching", got, rule, fix)
        return parts

    def _count_by_size(self, batch: Any) -> int:
        """How many microbatches of the given size hold the samples of a batch."""
        assert self._size is not None
        samples = batch_samples(batch)
        if samples is None:
            rule = "Tensors of this batch do not agree on its number of samples, and so on that of microbatches"
            raise ConfigError("batching.microbatch_size", self._size, rule, "Set num_microbatches instead")
        return -(-samples // self._size)

    def _labels(self, batch: Any) -> Tensor:
        """The labels of a microbatch."""
        passed_values = {path: _at(batch, path) for path in self._passed if path is not None}
        tensors = {path: value for path, value in passed_values.items() if isinstance(value, Tensor)}
        if not tensors and None not in self._passed:

            def note(path: Path, tensor: Tensor) -> Tensor:
                if path[-1:] == ("labels",):
                    tensors[path] = tensor
                return tensor

            with_tensors(batch, note)
        if len({id(tensor) for tensor in tensors.values()}) == 1 and None not in self._passed:
            return next(iter(tensors.values()))
        names = ["batch" + "".join(f"[{step!r}]" for step in path) for path in tensors]
        if None in self._passed:
            rule = (
                f"{self._step} makes the labels that it passes to the model, so the batch does not show how many count"
            )
        elif names:
            rule = (
                f"Label tokens would have to be counted in {' or in '.join(names)}, and only one of them can be right"
            )
        else:
            rule = f"This batch has no tensor named labels, and {self._step} does not say which part of it they are"
        raise ConfigError("batching.loss_weight", "tokens", rule, _WEIGH)


def _at(batch: Any, path: Path) -> Any:
    """The part of a batch at a path; None where there is none."""
    for step in path:
        if isinstance(batch, Mapping):
            batch = batch.get(step)
        elif isinstance(step, int) and isinstance(batch, (list, tuple)) and -len(batch) <= step < len(batch):
            batch = batch[step]
        else:
            batch = getattr(batch, step, None) if isinstance(step, str) else None
    return batch
