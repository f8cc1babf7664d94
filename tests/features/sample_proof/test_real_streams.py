"""Data sets of Hugging Face's `datasets` and of WebDataset feed every rank of a replica the same samples."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from features.toys import LANGUAGE, PIXELS, TOKENS, VISION, Layout, Run, Toy, assert_same, figures, outcomes
from lightning_mm5d import LazyTensor, Modality
from lightning_mm5d.config.errors import RankMismatchError

datasets = pytest.importorskip("datasets")
distributed = pytest.importorskip("datasets.distributed")
wds = pytest.importorskip("webdataset")
COUNT, BATCH, SHARDS = 48, 8, 4
BOTH = Layout({"vision": Modality(dp_size=2, **VISION), "language": Modality(dp_size=2, pp_size=2, **LANGUAGE)}, 6, 2)
"""vision: ranks 0-1; language: ranks 2-3 and 4-5 as stages, of two replicas"""
ONE_EYE = Layout({"vision": Modality(**VISION), "language": Modality(dp_size=2, pp_size=2, **LANGUAGE)}, 5, 2)
"""vision: rank 0, for both replicas; language: ranks 1-2 and 3-4 as stages"""
DECODED: list[int] = []


def rows() -> dict[str, Any]:
    generator = np.random.default_rng(0)
    return {
        "images": generator.standard_normal((COUNT, PIXELS)).tolist(),
        "tokens": generator.integers(16, size=(COUNT, TOKENS)).tolist(),
        "label": generator.integers(3, size=COUNT).tolist(),
    }


def as_tensors(row: dict[str, Any]) -> dict[str, Tensor]:
    """Without what WebDataset adds, such as a sample's key."""
    dtypes = {"images": torch.float64, "tokens": torch.int64, "label": torch.int64}
    return {name: torch.as_tensor(row[name], dtype=dtype) for name, dtype in dtypes.items() if name in row}


def collated(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    return default_collate([as_tensors(row) for row in samples])


class Split(IterableDataset):
    """A stream that is split where it is iterated; one process reads what all replicas read, batch by batch."""

    def __init__(self, run: Run, stream: Callable[[int, int], Any], module: Any = None) -> None:
        self.run, self.stream, self.module = run, stream, module

    def __iter__(self) -> Iterator[Any]:
        if self.run.layout is not None:
            trainer = self.module.trainer
            yield from self.stream(trainer.global_rank, trainer.world_size)
            return
        readers = [iter(self.stream(replica, 2)) for replica in range(2)]
        while all(batches := [[*islice(reader, BATCH // 2)] for reader in readers]):
            for batch in batches:
                yield from batch


class Splitting(Toy):
    """Makes its loader as users do, in its dataloader hook."""

    def __init__(self, loader: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make, self.losses = loader, list[float]()

    def train_dataloader(self) -> Any:
        return self.make(self)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["train_loss"]))


def fit(run: Run, loader: Callable[[Any], Any], start: Any = None, **options: Any) -> Any:
    module = Splitting(loader)
    trainer = run.trainer(use_distributed_sampler=False, **{"max_epochs": 1, **options})
    trainer.fit(module, ckpt_path=start)
    return {"losses": module.losses, "metrics": figures(trainer)}


def streamed(shards: int) -> Any:
    return datasets.Dataset.from_dict(rows()).to_iterable_dataset(num_shards=shards)


def split(stream: Callable[[], Any], rank: int, world: int) -> Any:
    return distributed.split_dataset_by_node(stream(), rank=rank, world_size=world)


def of_stream(stream: Callable[[], Any], run: Run) -> Any:
    def loader(module: Any) -> Any:
        return DataLoader(Split(run, partial(split, stream), module), run.loader().batch_size, collate_fn=collated)

    return fit(run, loader, limit_train_batches=4)  # replicas of interleaved streams may end at unlike times


def by_shards(run: Run) -> Any:
    return of_stream(lambda: streamed(SHARDS), run)


def by_examples(run: Run) -> Any:
    return of_stream(lambda: streamed(3), run)


def shuffled(run: Run) -> Any:
    return of_stream(lambda: streamed(SHARDS).shuffle(seed=3, buffer_size=8), run)


def interleaved(run: Run) -> Any:
    def stream() -> Any:
        others = streamed(4).map(lambda row: {"label": 2 - row["label"]})
        return datasets.interleave_datasets([streamed(2), others], probabilities=[0.3, 0.7], seed=5)

    return of_stream(stream, run)


def split_in_the_hook(run: Run, whole: Any, module: Any) -> Any:
    if run.layout is None:
        return Split(run, lambda rank, world: split(lambda: whole, rank, world))
    return split(lambda: whole, module.trainer.global_rank, module.trainer.world_size)


def of_the_hook(run: Run) -> Any:
    """A map-style data set and a stream."""
    found = []
    for whole in (datasets.Dataset.from_dict(rows()), streamed(SHARDS).shuffle(seed=1, buffer_size=4)):

        def loader(module: Any, whole: Any = whole) -> Any:
            return DataLoader(split_in_the_hook(run, whole, module), run.loader().batch_size, collate_fn=collated)

        found.append(fit(run, loader))
    return found


def resumed(run: Run) -> Any:
    """Losses of a run over a stream that saves its place, and of one that goes on after its third step."""
    data = pytest.importorskip("torchdata.stateful_dataloader")
    if run.layout is None:
        return None

    def loader(module: Any) -> Any:
        stream = split_in_the_hook(run, streamed(SHARDS), module)
        return data.StatefulDataLoader(stream, run.loader().batch_size, collate_fn=collated)

    options = {"enable_checkpointing": True, "default_root_dir": run.folder}
    saver = ModelCheckpoint(run.folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole = fit(run, loader, callbacks=[saver], **options)["losses"]
    rest = fit(run, loader, start=run.folder / "step=3.ckpt", **options)["losses"]
    assert len(whole) == COUNT // BATCH
    assert_same(rest, whole[3:], 1e-12)
    return None


def decode(picture: bytes) -> Tensor:
    """[PIXELS]"""
    DECODED.append(1)
    with Image.open(io.BytesIO(picture)) as image:
        return torch.from_numpy(np.array(image, np.float64).reshape(-1) / 255)


def of_lazy_columns(run: Run) -> Any:
    """Pictures of a column that is not decoded."""
    generator = np.random.default_rng(0)
    pictures = [Image.fromarray(generator.integers(255, size=(1, PIXELS), dtype=np.uint8)) for _ in range(COUNT)]
    columns = {name: column for name, column in rows().items() if name != "images"}
    data = datasets.Dataset.from_dict({**columns, "image": pictures}).cast_column("image", datasets.Image(decode=False))
    DECODED.clear()

    def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        lazily = [
            {
                **as_tensors({name: row[name] for name in columns}),
                "images": LazyTensor(partial(decode, row["image"]["bytes"]), (PIXELS,), torch.float64),
            }
            for row in samples
        ]
        return default_collate(lazily)

    stream = Split(run, partial(split, lambda: data.to_iterable_dataset(num_shards=SHARDS)))

    def loader(module: Any) -> Any:
        stream.module = module
        return DataLoader(stream, run.loader().batch_size, collate_fn=collate)

    return {**fit(run, loader), "decoded": len(DECODED)}


DATASETS = [by_shards, by_examples, shuffled, interleaved, of_the_hook, of_lazy_columns]


def of_tars(run: Run, stages: Callable[[list[str], int], list[Any]], **options: Any) -> Any:
    """A pipeline of WebDataset over tar files; one process reads it as each replica, `stages(files, replica)`."""
    files = sorted(str(path) for path in SHARED.glob("*.tar"))

    def of(replica: int) -> Any:
        tail = [wds.tarfile_to_samples(), wds.decode(), wds.map(of_sample)]
        return wds.DataPipeline(*stages(files, replica), *tail)

    def loader(module: Any) -> Any:
        data = of(0) if run.layout is not None else Split(run, lambda rank, world: of(rank))
        return DataLoader(data, run.loader().batch_size, collate_fn=collated, **options)

    return fit(run, loader, limit_train_batches=6)


def of_sample(sample: dict[str, Any]) -> dict[str, Any]:
    return {"images": sample["images.npy"], "tokens": sample["tokens.npy"], "label": sample["label.cls"]}


def every_other(files: Iterator[Any], first: int) -> Iterator[Any]:
    return islice(files, first, None, 2)


def of_nodes(run: Run) -> Any:
    def stages(files: list[str], replica: int) -> list[Any]:
        node = wds.split_by_node if run.layout is not None else partial(every_other, first=replica)
        return [wds.SimpleShardList(files, seed=3), node, wds.split_by_worker]

    return of_tars(run, stages)


def resampled(run: Run) -> Any:
    """By a seed, the replica's number and that of the worker."""

    def stages(files: list[str], replica: int) -> list[Any]:
        seed = None if run.layout is not None else lambda: 1000 * replica
        return [wds.ResampledShards(files, deterministic=True, worker_seed=seed)]

    return of_tars(run, stages)


def resampled_by_time(run: Run) -> Any:
    if run.layout is None:
        return None
    with pytest.raises(RankMismatchError, match="have read different samples"):
        of_tars(run, lambda files, replica: [wds.ResampledShards(files)])
    return None


SHARED = Path()


@pytest.fixture(scope="module", autouse=True)
def tars(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Writes files of six samples."""
    global SHARED
    SHARED = tmp_path_factory.mktemp("tars")
    columns = rows()
    for shard in range(8):
        with wds.TarWriter(str(SHARED / f"{shard}.tar")) as file:
            for place in range(6 * shard, 6 * shard + 6):
                row = {name: np.array(columns[name][place]) for name in ("images", "tokens")}
                arrays = {f"{name}.npy": value for name, value in row.items()}
                file.write({"__key__": f"{place:03}", **arrays, "label.cls": columns["label"][place]})


@pytest.mark.parametrize(
    "layout", [BOTH, pytest.param(ONE_EYE, marks=pytest.mark.exhaustive)], ids=["two encoders", "one encoder"]
)
def test_losses_are_those_of_one_process(layout: Layout, tmp_path: Path) -> None:
    """ranks as the layout says"""
    scenarios = [*DATASETS, of_nodes, resampled, resampled_by_time, resumed]
    if layout is ONE_EYE:  # its encoder reads copies of what a dataloader hook has split for one replica
        scenarios = [scenario for scenario in scenarios if scenario not in (of_the_hook, resumed)]
    for name, outcome in outcomes(layout, *scenarios, folder=tmp_path).items():
        for rank, found in enumerate(outcome.ranks):
            decoded = found.pop("decoded") if name == "of_lazy_columns" else 0
            expected = {**outcome.one} if isinstance(outcome.one, dict) else outcome.one
            if name == "of_lazy_columns":
                del expected["decoded"]
                share = COUNT // layout.modalities["vision"].dp_size if rank < BOTH.replicas and layout is BOTH else 0
                assert layout is ONE_EYE or share <= decoded <= 1.05 * share, rank
            assert_same(found, expected, where=name)
