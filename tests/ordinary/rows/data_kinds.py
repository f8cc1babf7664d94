"""Kinds of datasets and dataloaders."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)

from features.toys import PIXELS, WIDTH, Samples
from ordinary.uses import Ordinary, Run, data, fitted, observed, row

SECTION = "Data"
ORDER = {"replicas": "Lightning's distributed sampler takes the place of the order of one process, as under DDP"}
SAME = {"replicas": "replicas read the same samples, as under DDP: the dataset does not share them out"}


@data(SECTION, "a map dataset in order")
def mapped(run: Run) -> dict[str, Any]:
    return {"train_dataloaders": run.training(), "val_dataloaders": run.loader(16)}


@data(SECTION, "`shuffle=True`")
def shuffled(run: Run) -> dict[str, Any]:
    return {"train_dataloaders": run.training(shuffle=True)}


@data(SECTION, "`drop_last=True`")
def dropped(run: Run) -> dict[str, Any]:
    return {"train_dataloaders": run.training(36, drop_last=True)}


@data(SECTION, "a smaller last batch")
def smaller(run: Run) -> dict[str, Any]:
    return {"train_dataloaders": run.training(36), "val_dataloaders": run.loader(20)}


@data(SECTION, "a last batch of one sample", differs={"replicas": "the sampler adds a sample to make even shares"})
def single(run: Run) -> dict[str, Any]:
    return {"train_dataloaders": run.training(33)}


@data(SECTION, "`batch_size=1`", differs={"replicas": "`batch_size` is that of a replica"})
def ones(run: Run) -> dict[str, Any]:
    return {"train_dataloaders": DataLoader(Samples(4), batch_size=1)}


@data(SECTION, "`num_workers=1`")
def workers(run: Run) -> dict[str, Any]:
    return {"train_dataloaders": run.training(num_workers=1)}


@data(SECTION, "`num_workers=2, persistent_workers=True`")
def persistent(run: Run) -> dict[str, Any]:
    return {"train_dataloaders": run.training(num_workers=2, persistent_workers=True)}


@data(SECTION, "`pin_memory=True`")
def pinned(run: Run) -> dict[str, Any]:
    return {"train_dataloaders": run.training(pin_memory=True)}


@data(SECTION, "`worker_init_fn` and `generator`")
def initialised(run: Run) -> dict[str, Any]:
    return {"train_dataloaders": run.training(num_workers=1, worker_init_fn=_seeded, generator=torch.Generator())}


def _seeded(index: int) -> None:
    torch.manual_seed(index)


@data(SECTION, "`Subset`")
def subset(run: Run) -> dict[str, Any]:
    return {"train_dataloaders": run.training(Subset(Samples(40), list(range(0, 32))))}


@data(SECTION, "`random_split` with a seeded generator")
def split(run: Run) -> dict[str, Any]:
    parts = random_split(Samples(48), [32, 16], generator=torch.Generator().manual_seed(3))
    return {"train_dataloaders": run.training(parts[0]), "val_dataloaders": run.loader(parts[1])}


@data(SECTION, "`ConcatDataset`")
def concatenated(run: Run) -> dict[str, Any]:
    return {"train_dataloaders": run.training(ConcatDataset([Samples(16), Samples(16, seed=1)]))}


class Tuples(Ordinary):
    """Takes batches as tuples (images, tokens, label, ...)."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(dict(zip(("images", "tokens", "label"), batch, strict=False)), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(dict(zip(("images", "tokens", "label"), batch, strict=False)), batch_idx)


@row(SECTION, "`TensorDataset`, whose batches are lists of tensors")
def tensors(run: Run) -> dict[str, Any]:
    samples = Samples(32)
    dataset = TensorDataset(samples.images, samples.tokens, samples.labels)
    return fitted(run, Tuples(), data={"train_dataloaders": run.training(dataset), "val_dataloaders": None})


class Fields(torch.utils.data.Dataset):
    """The samples with other fields, or as another type."""

    def __init__(self, change: Any, count: int = 32) -> None:
        self.samples, self.change = Samples(count), change

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.change(index, self.samples[index])


def fields(title: str, change: Any, module: type[Ordinary] = Ordinary, collate: Any = None, **options: Any) -> None:
    """A row whose samples are what `change` makes of them."""

    def scenario(run: Run) -> dict[str, Any]:
        loaders = {
            "train_dataloaders": run.training(Fields(change), collate_fn=collate),
            "val_dataloaders": run.loader(Fields(change, 16), collate_fn=collate),
        }
        return fitted(run, module(), data=loaders)

    row(SECTION, title, **options)(scenario)


fields("samples that are tuples", lambda _, s: (s["images"], s["tokens"], s["label"]), Tuples)
fields("samples with a string", lambda i, s: {**s, "name": f"sample {i}"})
fields("samples with a number of Python", lambda i, s: {**s, "index": i})
fields("samples with a nested dict", lambda _, s: {**s, "more": {"images": s["images"], "tokens": s["tokens"]}})
fields("samples with a list of tensors", lambda _, s: {**s, "views": [s["images"], s["images"] * 2]})
fields(
    "batches with a `None` field",
    lambda _, s: s,
    collate=lambda samples: {**default_collate(samples), "mask": None},
)
fields(
    "batches with a list of strings and a string for all",
    lambda i, s: s,
    collate=lambda samples: {**default_collate(samples), "names": [str(i) for i in range(len(samples))], "split": "a"},
)
fields(
    "batches with a list of tensors of unequal lengths",
    lambda i, s: s,
    collate=lambda samples: {**default_collate(samples), "boxes": [torch.ones(i + 1, 4) for i in range(len(samples))]},
)


ROWS = {"replicas": "Lightning weighs what a batch logs by the rows of its first tensor"}


class Counted(Ordinary):
    """Several images to a sample."""

    def forward(self, batch: Any) -> Tensor:
        features, counts = self.encoder(batch["images"]), batch["counts"]
        owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
        mean = features.new_zeros(len(counts), features.shape[1]).index_add(0, owner, features) / counts.unsqueeze(1)
        return self.decoder(batch["tokens"], mean)


class Paired(Counted):
    def loss(self, batch: Any) -> Tensor:
        (images, counts), tokens, label = batch
        return super().loss({"images": images, "counts": counts, "tokens": tokens, "label": label})


def several_images(samples: list[Any]) -> dict[str, Tensor]:
    images = [sample["images"].repeat(1 + int(sample["label"]), 1) for sample in samples]
    return {**default_collate(samples), "images": torch.cat(images), "counts": torch.tensor([len(i) for i in images])}


def paired(samples: list[Any]) -> Any:
    batch = several_images(samples)
    return (batch["images"], batch["counts"]), batch["tokens"], batch["label"]


fields(
    "images of several to a sample in one tensor, and their counts",
    lambda _, s: s,
    Counted,
    several_images,
    differs=ROWS,
)


class Attention(nn.Module):
    """Attends to pixels as encoders of transformers do: images [N, PIXELS] -> features [N, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(1, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, images: Tensor) -> Tensor:
        states = self.embedding(images.unsqueeze(-1))
        shape = (*states.shape[:-1], -1, WIDTH // 2)
        heads = [linear(states).view(shape).transpose(1, 2) for linear in (self.query, self.key, self.value)]
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(states.shape).mean(1)


class MostlyTexts(Ordinary):
    """Samples with and without images."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder = Attention().double()

    def forward(self, batch: Any) -> Tensor:
        features, owner = self.images(batch)
        summed = features.new_zeros(len(batch["tokens"]), WIDTH).index_add(0, owner, features)
        return self.decoder(batch["tokens"], summed)

    def images(self, batch: Any) -> tuple[Tensor, Tensor]:
        counts = batch["num_images"]
        return self.encoder(batch["images"]), torch.repeat_interleave(torch.arange(len(counts)), counts)


class Masked(MostlyTexts):
    def images(self, batch: Any) -> tuple[Tensor, Tensor]:
        return self.encoder(batch["images"][batch["is_image"]]), batch["is_image"].nonzero()[:, 0]


def without_images(index: int, sample: Any) -> Any:
    """Samples of the second half of each batch have none."""
    return {**sample, "images": sample["images"].repeat(3 if index % 8 < 4 else 0, 1)}


def with_counts(samples: list[Any]) -> Any:
    images = [sample.pop("images") for sample in samples]
    counts = torch.tensor([len(own) for own in images])
    return {**default_collate(samples), "images": torch.cat(images), "num_images": counts}


def with_mask(samples: list[Any]) -> Any:
    batch = with_counts(samples)
    images, counts = batch.pop("images"), batch.pop("num_images")
    is_image = torch.arange(3) < counts.unsqueeze(1)
    padded = images.new_zeros(*is_image.shape, images.shape[1])
    padded[is_image] = images
    return {**batch, "images": padded, "is_image": is_image}


fields("texts, some with images: their number is in the batch", without_images, MostlyTexts, with_counts, differs=ROWS)
fields("texts, some with images: padded, with a mask", without_images, Masked, with_mask)
fields("batches `((images, counts), tokens, label)`", lambda _, s: s, Paired, paired, differs=ROWS)
fields(
    "batches with a number for the whole batch",
    lambda i, s: s,
    collate=lambda samples: {**default_collate(samples), "temperature": 0.5},
)
fields(
    "batches with a tensor without dimensions",
    lambda i, s: s,
    collate=lambda samples: {**default_collate(samples), "temperature": torch.tensor(0.5)},
)

Pair = namedtuple("Pair", ["images", "tokens", "label"])
fields("samples that are named tuples", lambda _, s: Pair(s["images"], s["tokens"], s["label"]), Tuples)


class Padded(Ordinary):
    """Texts of unequal lengths, padded in the batch."""

    def forward(self, batch: Any) -> Tensor:
        return self.decoder(batch["tokens"].clamp_min(0), self.encoder(batch["images"]))


def padding(samples: list[Any]) -> dict[str, Tensor]:
    tokens = torch.nn.utils.rnn.pad_sequence([s["tokens"] for s in samples], batch_first=True, padding_value=-1)
    return {**default_collate([{k: s[k] for k in ("images", "label")} for s in samples]), "tokens": tokens}


fields(
    "texts of unequal lengths padded by `collate_fn`",
    lambda i, s: {**s, "tokens": s["tokens"][: 2 + i % 3]},
    Padded,
    padding,
    differs={"replicas": "each replica pads to the longest of its own texts, and this model counts padding"},
)


class Stream(IterableDataset):
    def __init__(self, count: int = 32, rank: int = 0, world: int = 1) -> None:
        self.samples, self.rank, self.world = Samples(count), rank, world

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.rank, len(self.samples), self.world):
            yield self.samples[index]


class Sized(Stream):
    def __len__(self) -> int:
        return len(self.samples)


@data(SECTION, "an `IterableDataset`", differs=SAME)
def stream(run: Run) -> dict[str, Any]:
    return {"train_dataloaders": run.loader(Stream()), "val_dataloaders": run.loader(Stream(16))}


@data(SECTION, "an `IterableDataset` with `__len__`", differs=SAME)
def sized_stream(run: Run) -> dict[str, Any]:
    return {"train_dataloaders": run.loader(Sized())}


class Sharded(Stream):
    """Shares its samples out by rank and world size of torch.distributed, as WebDataset does."""

    def __iter__(self) -> Iterator[Any]:
        rank, world = 0, 1
        if torch.distributed.is_initialized():
            rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        for index in range(rank, len(self.samples), world):
            yield self.samples[index]


@data(SECTION, "an `IterableDataset` that shares out by `torch.distributed.get_rank()`")
def sharded_stream(run: Run) -> dict[str, Any]:
    return {"train_dataloaders": run.loader(Sharded()), "val_dataloaders": run.loader(Sharded(16))}


class ByWorker(Stream):
    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, count = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, len(self.samples), count):
            yield self.samples[index]


@data(SECTION, "an `IterableDataset` that shares out by worker", differs=SAME)
def stream_workers(run: Run) -> dict[str, Any]:
    return {"train_dataloaders": run.loader(ByWorker(), num_workers=2)}


class Batched(IterableDataset):
    def __init__(self, run: Run) -> None:
        self.samples, self.size = Samples(32), 8 if run.plain else 8 // run.replicas

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, 32, self.size):
            yield default_collate([self.samples[index] for index in range(start, start + self.size)])


@data(SECTION, "`DataLoader(dataset, batch_size=None)`: the dataset makes batches", differs=SAME)
def no_batch_size(run: Run) -> dict[str, Any]:
    return {"train_dataloaders": DataLoader(Batched(run), batch_size=None)}


class Loader:
    """An iterable of batches that is no DataLoader."""

    def __init__(self, run: Run) -> None:
        self.batches = list(Batched(run))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@data(SECTION, "an iterable of batches of one's own class as `train_dataloaders`", differs=SAME)
def iterable_of_batches(run: Run) -> dict[str, Any]:
    return {"train_dataloaders": Loader(run)}


@row(SECTION, "`train_dataloader` returns a generator", differs=SAME)
def generator(run: Run) -> dict[str, Any]:
    class Generating(Ordinary):
        def train_dataloader(self) -> Any:
            return (batch for batch in Batched(run))

    module, trainer = Generating(), run.trainer()
    trainer.fit(module)
    return observed(trainer, module)


@data(SECTION, "a `SequentialSampler`", differs=ORDER)
def sequential(run: Run) -> dict[str, Any]:
    return {"train_dataloaders": run.loader(Samples(32), sampler=SequentialSampler(Samples(32)))}


@data(SECTION, "a `RandomSampler` with a seeded generator", differs=ORDER)
def random_sampler(run: Run) -> dict[str, Any]:
    sampler = RandomSampler(Samples(32), generator=torch.Generator().manual_seed(5))
    return {"train_dataloaders": run.loader(Samples(32), sampler=sampler)}


@data(SECTION, "a `WeightedRandomSampler` with a seeded generator", differs=ORDER)
def weighted(run: Run) -> dict[str, Any]:
    sampler = WeightedRandomSampler([1.0, 3.0] * 16, 32, generator=torch.Generator().manual_seed(5))
    return {"train_dataloaders": run.loader(Samples(32), sampler=sampler)}


@data(SECTION, "a `SubsetRandomSampler` with a seeded generator", differs=ORDER)
def subset_sampler(run: Run) -> dict[str, Any]:
    sampler = SubsetRandomSampler(range(24), generator=torch.Generator().manual_seed(5))
    return {"train_dataloaders": run.loader(Samples(32), sampler=sampler)}


@data(SECTION, "a `WeightedRandomSampler` without a generator", differs=ORDER)
def weighted_unseeded(run: Run) -> dict[str, Any]:
    return {"train_dataloaders": run.loader(Samples(32), sampler=WeightedRandomSampler([1.0, 3.0] * 16, 32))}


@row(SECTION, "a `BatchSampler`, with `use_distributed_sampler=False`", differs=SAME)
def batch_sampler(run: Run) -> dict[str, Any]:
    size = 8 if run.plain else 8 // run.replicas
    sampler = BatchSampler(SequentialSampler(Samples(32)), size, drop_last=False)
    loader = DataLoader(Samples(32), batch_sampler=sampler)
    return fitted(run, Ordinary(), data={"train_dataloaders": loader}, use_distributed_sampler=False)


class Buckets(BatchSampler):
    """Batches of one's own, of unequal sizes."""

    def __iter__(self) -> Iterator[list[int]]:
        left = list(self.sampler)
        for share in (2, 1, 3, 2):
            size = share * self.batch_size // 2
            yield left[:size]
            left = left[size:]

    def __len__(self) -> int:
        return 4


@data(SECTION, "a batch sampler of one's own class, with batches of unequal sizes", differs=ORDER)
def buckets(run: Run) -> dict[str, Any]:
    size = 8 if run.plain else 8 // run.replicas
    sampler = Buckets(SequentialSampler(Samples(32)), size, drop_last=False)
    return {"train_dataloaders": DataLoader(Samples(32), batch_sampler=sampler)}


class Several(Ordinary):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


@row(SECTION, "several validation dataloaders")
def several(run: Run) -> dict[str, Any]:
    return fitted(run, Several(), data={"val_dataloaders": [run.loader(16), run.loader(Samples(8, seed=1))]})


@row(SECTION, "validation dataloaders in a dict")
def dict_of_loaders(run: Run) -> dict[str, Any]:
    loaders = CombinedLoader({"a": run.loader(16), "b": run.loader(Samples(8, seed=1))}, "sequential")
    return fitted(run, Several(), data={"val_dataloaders": loaders})


class Combined(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = batch.values() if isinstance(batch, dict) else batch
        loss = sum(self.loss(part) for part in parts if part is not None)
        self.log("train_loss", loss, sync_dist=True)
        return loss


def combined(title: str, mode: str | None, sizes: tuple[int, int], counts: tuple[int, int]) -> None:
    def scenario(run: Run) -> dict[str, Any]:
        first = run.training(counts[0], sizes[0])
        second = run.training(Samples(counts[1], seed=1), sizes[1])
        parts = {"a": first, "b": second}
        loaders: Any = parts if mode is None else CombinedLoader(parts, mode)
        return fitted(run, Combined(), data={"train_dataloaders": loaders, "val_dataloaders": None})

    row(SECTION, title)(scenario)


combined("a dict of training dataloaders", None, (8, 8), (32, 32))
combined('`CombinedLoader(..., "min_size")`', "min_size", (8, 8), (32, 16))
combined('`CombinedLoader(..., "max_size_cycle")`', "max_size_cycle", (8, 8), (32, 16))
combined("`CombinedLoader` with two batch sizes", "min_size", (8, 4), (32, 16))


DRAWN = {
    "replicas": "each replica draws for its own samples, as under DDP",
    **dict.fromkeys(("one", "split", "pp", "tp"), "draws other numbers than one process, the same on all ranks"),
}


class Augmented(torch.utils.data.Dataset):
    """Random augmentation in the dataset, by the random state of the process."""

    def __init__(self) -> None:
        self.samples = Samples(32)

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        sample = self.samples[index]
        return {**sample, "images": sample["images"] + 0.1 * torch.randn(PIXELS, dtype=torch.float64)}


@data(
    SECTION,
    "random augmentation in `__getitem__`",
    slots=["random"],
    differs=DRAWN,
)
def augmented(run: Run) -> dict[str, Any]:
    return {"train_dataloaders": run.training(Augmented())}


@data(
    SECTION,
    "random augmentation in `__getitem__` with workers",
    slots=["random"],
    differs=DRAWN,
)
def augmented_workers(run: Run) -> dict[str, Any]:
    return {"train_dataloaders": run.training(Augmented(), num_workers=1)}


@row(SECTION, "batches that are single tensors")
def single_tensors(run: Run) -> dict[str, Any]:
    class Images(Ordinary):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            features = self.encoder(batch)
            tokens = torch.zeros(len(batch), 2, dtype=torch.long)
            return F.mse_loss(self.decoder(tokens, features), torch.ones(len(batch), 3, dtype=torch.float64))

    return fitted(run, Images(), data={"train_dataloaders": run.training(Samples(32).images), "val_dataloaders": None})
