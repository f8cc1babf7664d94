"""Batches of as many samples as a budget of tokens and pixels holds, about equally full; every sample once an epoch.

Samples of a map-style data set are packed for a whole epoch: longest first into the batch that is the least full (R. L.
Graham, Bounds on Multiprocessing Timing Anomalies, 1969), where those of about one size come in an order that is drawn
anew. So batches are equally full, and there are as many in each epoch. The order is a function of (seed, epoch): a run
goes on in the midst of an epoch as with any sampler. Of a stream the samples of a window are packed.

All of k replicas pack the same batches, of which each takes every k-th.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import BatchSampler, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_mm5d.config.errors import ConfigError

Shares = npt.NDArray[np.float64]
"""[N, K]: what each sample takes of the budget of each kind."""
_TRIED = 256  # batches that a sample is tried in, the least full first
_SLACK = 1.01  # how many more batches are tried where samples do not fit
_CLASSES = 8  # sizes that are told apart within a factor of 2
_ORDERS = 4  # that an epoch draws until one fits
_FULL = 0.9  # of a budget, from which on a batch of a stream is not held back


class BudgetBatchSampler(BatchSampler):
    """Batches of samples with at most so many tokens and pixels, for ``DataLoader(batch_sampler=...)``.

    Args:
        tokens: of each sample of the data set.
        token_budget: the most tokens of a batch.
        pixels: of each sample, or patches, frames, seconds: what its encoder has to do.
        pixel_budget: the most of these in a batch.
        max_samples: the most samples in a batch.
        shuffle: whether each epoch packs anew, and in another order.
        seed: of these orders.
        sampler: put in by Lightning, which says by it which replica this is.

    Raises:
        ConfigError: a sample alone is over a budget, or numbers do not fit each other.
    """

    deals_to_replicas = True
    """its batches are of samples of the whole data set"""

    def __init__(
        self,
        tokens: Sequence[int],
        token_budget: int,
        *,
        pixels: Sequence[int] | None = None,
        pixel_budget: int | None = None,
        max_samples: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        sampler: Any = None,
    ) -> None:
        # what Lightning notes of samplers that are made in its hooks, to make them anew; here also of others
        options = {name: value for name, value in locals().items() if name != "self"}
        saved = {"args": (), "kwargs": options, "default_kwargs": {}, "arg_names": ()}
        self._shares = _shares(tokens, token_budget, pixels, pixel_budget, max_samples)
        vars(self).update((f"__pl_saved_{name}", value) for name, value in saved.items())
        self._shuffle, self._seed = shuffle, seed
        # it holds the epoch and the replica, and draws nothing
        self.sampler: DistributedSampler[Any] = DistributedSampler(range(len(self._shares)), 1, 0, shuffle=False)  # type: ignore[arg-type]
        if isinstance(sampler, DistributedSampler):
            self.sampler.num_replicas, self.sampler.rank = sampler.num_replicas, sampler.rank
        self._first: dict[int, list[list[int]]] = {}

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches()[self.sampler.rank :: self.sampler.num_replicas])

    def __len__(self) -> int:
        return len(self._fitting()) // self.sampler.num_replicas

    def _batches(self) -> list[list[int]]:
        """All batches of this epoch, of all replicas."""
        epoch = self.sampler.epoch if self._shuffle else 0
        fitting = self._fitting()
        if not self._shuffle:
            return fitting
        drawn = random.Random(f"{self._seed} {epoch}")
        for _ in range(_ORDERS if epoch else 0):
            packed = _packed(self._shares, len(fitting), drawn)
            if packed is not None:
                fitting = packed
                break
        return drawn.sample(fitting, len(fitting))

    def _fitting(self) -> list[list[int]]:
        """The batches of the first epoch: as few as there can be, and equally many for each replica."""
        replicas = self.sampler.num_replicas
        if replicas not in self._first:
            count, packed = max(1, int(np.ceil(self._shares.sum(axis=0).max() - 1e-9))), None
            while packed is None:
                count = -(-count // replicas) * replicas
                if count > max(len(self._shares), 1):
                    rule = f"Each of {replicas} replicas has a batch in each step, and there are fewer samples"
                    raise ConfigError("BudgetBatchSampler", f"{len(self._shares)} samples", rule, "Use fewer replicas")
                drawn = random.Random(f"{self._seed} 0") if self._shuffle else None
                packed = _packed(self._shares, count, drawn)
                count = max(count + 1, int(count * _SLACK))
            self._first[replicas] = packed
        return self._first[replicas]


class BudgetStream(IterableDataset[Any]):
    """Lists of samples of an iterable data set with at most so many tokens and pixels: ``DataLoader(batch_size=None)``.

    Args:
        dataset: yields samples; sharded by itself where it is.
        sizes: returns the tokens of a sample, and its pixels where there is a `pixel_budget`: a pair.
        token_budget: the most tokens of a list.
        pixel_budget: the most pixels.
        max_samples: the most samples.
        window: samples that are packed together.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        sizes: Callable[[Any], Any],
        token_budget: int,
        *,
        pixel_budget: int | None = None,
        max_samples: int | None = None,
        window: int = 256,
    ) -> None:
        if window < 1:
            raise ConfigError("BudgetStream.window", window, "It counts samples", "Use 256")
        self.dataset, self._sizes, self._window = dataset, sizes, window
        self._budgets = token_budget, pixel_budget, max_samples

    def set_epoch(self, epoch: int) -> None:
        """Hand it on to the data set, where that takes it."""
        if callable(forward := getattr(self.dataset, "set_epoch", None)):
            forward(epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        held: list[Any] = []
        for sample in self.dataset:
            held.append(sample)
            if len(held) >= self._window:
                *full, held = self._packed(held)
                yield from full
        if held:
            *full, rest = self._packed(held, is_last=True)
            yield from full
            if rest:
                yield rest

    def _packed(self, samples: list[Any], *, is_last: bool = False) -> list[list[Any]]:
        """Batches in the order in which their first samples came, and at the end the samples that are held back."""
        sizes = [self._sizes(sample) for sample in samples]
        tokens, pixels, most = self._budgets
        columns = [sizes] if pixels is None else [*zip(*sizes, strict=True)]
        shares = _shares(columns[0], tokens, columns[1] if pixels is not None else None, pixels, most)
        batches: list[list[int]] = []
        sums: list[Shares] = []
        for sample in np.argsort(-shares.max(axis=1), kind="stable"):
            fits = (i for i, taken in enumerate(sums) if (taken + shares[sample]).max() <= 1 + 1e-9)
            place = next(fits, len(batches))
            if place == len(batches):
                batches.append([])
                sums.append(np.zeros(shares.shape[1]))
            batches[place].append(int(sample))
            sums[place] = sums[place] + shares[sample]
        goes = [is_last or taken.max() >= _FULL for taken in sums]
        if not any(goes):  # a window that holds less than a batch
            goes = [True for _ in sums]
        full = sorted(sorted(batch) for batch, is_full in zip(batches, goes, strict=True) if is_full)
        rest = sorted(index for batch, is_full in zip(batches, goes, strict=True) if not is_full for index in batch)
        return [[samples[index] for index in batch] for batch in (*full, rest)]


def _shares(tokens: Any, token_budget: int, pixels: Any, pixel_budget: int | None, max_samples: int | None) -> Shares:
    if (pixels is None) != (pixel_budget is None):
        got = "pixels without pixel_budget" if pixel_budget is None else "pixel_budget without pixels"
        raise ConfigError("pixel_budget", got, "A budget and what each sample takes of it go together", "Give both")
    columns = []
    for name, sizes, budget in (
        ("token_budget", tokens, token_budget),
        ("pixel_budget", pixels, pixel_budget),
        ("max_samples", np.ones(len(tokens)), max_samples),
    ):
        if budget is None or sizes is None:
            continue
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
            raise ConfigError(name, budget, "It is a whole number of at least 1", "Use 8192, for instance")
        column = np.asarray(sizes, dtype=np.float64)
        if column.shape != (len(tokens),) or not (column >= 0).all():
            got = f"{column.shape} for {len(tokens)} samples"
            raise ConfigError(name, got, "There is one size of at least 0 for each sample", "Give a list of lengths")
        if (over := np.flatnonzero(column > budget)).size:
            rule = f"Sample {over[0]} alone has {column[over[0]]:g}, and {over.size} of {len(column)} are over it"
            raise ConfigError(name, budget, rule, f"Use {column.max():g} or more, or leave these samples out")
        columns.append(column / budget)
    return np.stack(columns, axis=1)


def _packed(shares: Shares, count: int, drawn: random.Random | None) -> list[list[int]] | None:
    """Pack all samples into so many batches; None where some do not fit.

    Args:
        shares: of the budgets.
        count: of batches.
        drawn: draws the order of samples of about one size; None for that of the data set.
    """
    largest = shares.max(axis=1)
    order = np.array(drawn.sample(range(len(shares)), len(shares)) if drawn is not None else range(len(shares)))
    sizes = np.round(np.log2(np.maximum(largest, 2.0**-30)) * _CLASSES)
    order = order[np.argsort(-sizes[order], kind="stable")]
    batches: list[list[int]] = [[] for _ in range(count)]
    sums = np.zeros((count, shares.shape[1]))
    heap = [(0.0, batch) for batch in range(count)]
    for sample in order.tolist():
        refused: list[tuple[float, int]] = []
        while heap and len(refused) < _TRIED:
            load, batch = heapq.heappop(heap)
            after = sums[batch] + shares[sample]
            if after.max() <= 1 + 1e-9:
                sums[batch] = after
                batches[batch].append(sample)
                heapq.heappush(heap, (float(after.max()), batch))
                break
            refused.append((load, batch))
        else:
            return None
        for pair in refused:
            heapq.heappush(heap, pair)
    return batches if all(batches) else None
