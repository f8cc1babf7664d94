"""Full checkpoints are written as a whole, verified before they are unpickled, and run nothing of their own."""

from __future__ import annotations

import argparse
import os
import pathlib
import pickle
import random
import resource
import signal
import types
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import AttributeDict as FabricAttributeDict
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.parsing import AttributeDict
from torchmetrics.utilities.enums import AverageMethod

from lightning_mm5d.checkpoint.full_file import FullFileIO, load_full, save_full
from lightning_mm5d.config.errors import CheckpointCorruptError, CheckpointUntrustedError


def _checkpoint() -> dict[str, Any]:
    torch.manual_seed(0)
    weight = torch.randn(70, 30)
    return {
        "state_dict": OrderedDict(weight=weight, tied=weight, bias=torch.randn(30, dtype=torch.float64)),
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(70, 30)}}}],
        "epoch": 3,
        "hyper_parameters": {"path": pathlib.Path("a/b"), "lr": 1e-3},
    }


PLAIN = {
    "paths": [pathlib.Path("a"), pathlib.PurePosixPath("/b"), pathlib.PureWindowsPath("c:/d")],
    "namespaces": [argparse.Namespace(a=1, b=[np.float32(2)]), types.SimpleNamespace(c=(1,))],
    "dicts": [defaultdict(list, a=[1]), defaultdict(None, b=2), AttributeDict(a=1), FabricAttributeDict(b={"c": 1})],
    "more": [Counter("aab"), OrderedDict(z=1), frozenset({1}), {2, 3}, slice(1, 2), complex(1, 2)],
    "times": [timedelta(1, 2, 3), datetime(2026, 1, 2), datetime(2026, 1, 2, tzinfo=UTC)],
    "enums": [RunningStage.TRAINING, TrainerFn.FITTING, AverageMethod.MACRO],
    "numbers": [np.float64(0.1), np.int64(-3), np.bool_(True), np.datetime64("2026-01-02"), np.str_("ab")],
    "arrays": [
        np.arange(6, dtype=">u2").reshape(2, 3),
        np.asfortranarray(np.ones((2, 3))),
        np.zeros((0, 2)),
        np.array("ab"),
    ],
    "random state": [np.random.RandomState(1).get_state(), random.Random(1).getstate()],
}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict | argparse.Namespace | types.SimpleNamespace):
        items = [list((value if isinstance(value, dict) else vars(value)).items()) for value in (a, b)]
        factories = [getattr(value, "default_factory", 0) for value in (a, b)]
        return type(a) is type(b) and factories[0] is factories[1] and _same(*items)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("case", PLAIN)
def test_plain_values_of_ordinary_checkpoints_come_back_with_their_types(tmp_path: Path, case: str) -> None:
    save_full({"a": PLAIN[case]}, tmp_path / "a.ckpt")
    assert _same(load_full(tmp_path / "a.ckpt"), {"a": PLAIN[case]})


def test_a_container_that_holds_itself_or_stands_twice_comes_back_so(tmp_path: Path) -> None:
    twice, circle = defaultdict(int, a=1), [1]
    circle.append(circle)  # type: ignore[arg-type]
    save_full([twice, twice, circle], tmp_path / "a")
    first, second, around = load_full(tmp_path / "a")
    assert first is second
    assert around[1] is around
    assert first["none"] == 0


CALLBACKS: dict[str, Callable[[], list]] = {
    "best and last": lambda: [ModelCheckpoint(monitor="loss", save_last=True, save_top_k=2), EarlyStopping("loss")],
    "averages": lambda: [EMAWeightAveraging(), Timer("00:01:00:00")],
    "swa": lambda: [StochasticWeightAveraging(1e-2, swa_epoch_start=1), LearningRateMonitor()],
}


class _Model(BoringModel):
    def __init__(self, path: Path = Path("x"), options: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("loss", loss, on_epoch=True)
        return loss


@pytest.mark.parametrize("case", CALLBACKS)
@pytest.mark.filterwarnings("ignore")
def test_checkpoints_of_plain_lightning_load_and_ours_load_in_it(tmp_path: Path, case: str) -> None:
    def trainer(epochs: int, **options: Any) -> pl.Trainer:
        return pl.Trainer(
            max_epochs=epochs,
            limit_train_batches=2,
            limit_val_batches=1,
            callbacks=CALLBACKS[case](),
            default_root_dir=tmp_path,
            logger=pl.loggers.CSVLogger(tmp_path),
            accelerator="cpu",
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )

    first = trainer(2)
    first.fit(_Model(options=argparse.Namespace(a=1)))
    first.save_checkpoint(tmp_path / "plain.ckpt")
    loaded = load_full(tmp_path / "plain.ckpt")
    assert _same(loaded, torch.load(tmp_path / "plain.ckpt", weights_only=False))
    save_full(loaded, tmp_path / "ours.ckpt")
    again = trainer(3, plugins=[FullFileIO()])
    again.fit(_Model(), ckpt_path=tmp_path / "ours.ckpt")
    again.save_checkpoint(tmp_path / "again.ckpt")
    assert again.global_step == 6
    assert load_full(tmp_path / "again.ckpt")["global_step"] == 6


def _mutations(data: bytes, other: bytes, choose: random.Random) -> dict[str, bytes]:
    """One damaged copy of each kind; half of them at the ends, where lengths and lists are."""

    def place(length: int = 1) -> int:
        last = len(data) - length
        return choose.choice(
            [choose.randint(0, last), choose.randint(0, min(900, last)), last - choose.randint(0, min(900, last))]
        )

    flip, zero, a, b = place(), place(8), place(8), place(8)
    flipped = bytearray(data)
    flipped[flip] ^= 1 << choose.randrange(8)
    swapped = bytearray(data)
    swapped[a : a + 8], swapped[b : b + 8] = data[b : b + 8], data[a : a + 8]
    start, stop = sorted((place(), place()))
    return {
        "flip": bytes(flipped),
        "zero": data[:zero] + bytes(8) + data[zero + 8 :],
        "truncate": data[: place()],
        "swap": bytes(swapped),
        "append": data + choose.choice([b"\0", data, other, data[-22:]]),
        "prepend": choose.choice([b"\0", other]) + data,
        "cut": data[:start] + data[stop:],
        "splice": data[:start] + other[start:stop] + data[stop:],
        "empty": b"",
    }


def mutated_full_files(folder: Path, seeds: range) -> Counter:
    """Load damaged copies of a checkpoint; count how each ended."""
    torch.save(_checkpoint(), folder / "good")
    torch.save(_checkpoint() | {"epoch": 4}, folder / "other")
    data, other = (folder / "good").read_bytes(), (folder / "other").read_bytes()
    ended, path = Counter[str](), folder / "damaged"
    for seed in seeds:
        for kind, damaged in _mutations(data, other, random.Random(seed)).items():
            path.write_bytes(damaged)
            try:
                assert _same(load_full(path), _checkpoint()), (seed, kind)
                ended["equal"] += 1
            except CheckpointCorruptError:
                ended["refused"] += 1
    return ended


def test_a_damaged_file_is_refused_or_loads_bitwise_equal(tmp_path: Path) -> None:
    ended = mutated_full_files(tmp_path, range(12))
    assert ended["refused"] >= 80
    assert ended.total() == 12 * 9


@pytest.mark.exhaustive
def test_many_damaged_files_are_refused_or_load_bitwise_equal(tmp_path: Path) -> None:
    assert mutated_full_files(tmp_path, range(12, 3000))["refused"] >= 20_000


class _Payload:
    """Unpickled, it makes the folder `proof`."""

    def __init__(self, proof: Path, function: Callable = os.mkdir) -> None:
        self._proof, self._function = proof, function

    def __reduce__(self) -> tuple:
        return self._function, (os.fspath(self._proof),)


def _zip_with(path: Path, pickled: bytes) -> None:
    torch.save({}, path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, pickled if name.endswith("data.pkl") else data)


PAYLOADS: dict[str, Callable[[Path, Path], Any]] = {
    "among values": lambda path, proof: torch.save({"state_dict": {}, "x": _Payload(proof)}, path),
    "eval": lambda path, proof: torch.save(_Payload(Path(f"__import__('os').mkdir({str(proof)!r})"), eval), path),
    "protocol 4": lambda path, proof: _zip_with(path, pickle.dumps(_Payload(proof), 4)),
    "protocol 0": lambda path, proof: _zip_with(path, b"(S'%s'\nios\nmkdir\n." % os.fspath(proof).encode()),
    "a bare pickle": lambda path, proof: path.write_bytes(pickle.dumps(_Payload(proof))),
    "an old file": lambda path, proof: torch.save(_Payload(proof), path, _use_new_zipfile_serialization=False),
    "attributes": lambda path, proof: torch.save({"a": argparse.Namespace(x=_Payload(proof))}, path),
    "a factory": lambda path, proof: torch.save(defaultdict(os.getcwd, a=_Payload(proof)), path),
    "a function of torch": lambda path, proof: torch.save(_Payload(proof, torch.hub.load), path),
}


@pytest.mark.parametrize("case", PAYLOADS)
def test_code_in_a_file_is_named_and_not_run(tmp_path: Path, case: str) -> None:
    path, proof = tmp_path / "a.ckpt", tmp_path / "proof"
    PAYLOADS[case](path, proof)
    with pytest.raises(CheckpointUntrustedError, match=r"(mkdir|eval|getcwd|load).*weights_only=False") as error:
        load_full(path)
    assert str(path) in str(error.value)
    assert not proof.exists()
    if case not in ("a function of torch", "a factory"):
        with suppress(RuntimeError):  # it runs, and gives no checkpoint
            load_full(path, weights_only=False)
        assert proof.exists()  # the payload works


@pytest.mark.parametrize(
    "value",
    [np.array([len], dtype=object), np.zeros(2, dtype=[("a", "O"), ("b", "i4")]), np.zeros(2, dtype="i4,f4")],
    ids=["objects", "fields with objects", "fields"],
)
def test_arrays_that_could_hold_references_are_refused(tmp_path: Path, value: Any) -> None:
    torch.save({"a": value}, tmp_path / "a")
    with pytest.raises((CheckpointUntrustedError, CheckpointCorruptError)):
        load_full(tmp_path / "a")


def test_files_of_other_ways_to_save_load(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(_checkpoint(), tmp_path / "without checksums")
        save_full(_checkpoint(), tmp_path / "with checksums")
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(before)
    torch.save(_checkpoint(), tmp_path / "old", _use_new_zipfile_serialization=False)
    for name in ("without checksums", "with checksums", "old"):
        assert _same(load_full(tmp_path / name), _checkpoint())
    with zipfile.ZipFile(tmp_path / "with checksums") as archive:
        assert all(record.CRC for record in archive.infolist())
    assert _same(load_full(f"file://{tmp_path}/old"), _checkpoint())
    save_full(_checkpoint(), "memory://a.ckpt")
    assert _same(load_full("memory://a.ckpt"), _checkpoint())
    FullFileIO().remove_checkpoint("memory://a.ckpt")
    with pytest.raises(FileNotFoundError):
        load_full("memory://a.ckpt")
    with pytest.raises(FileNotFoundError):
        load_full(tmp_path / "absent")


def test_a_full_disk_leaves_the_older_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "last.ckpt"
    save_full({"a": 1}, path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large.*last\.ckpt"):
            save_full(_checkpoint(), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    with pytest.raises(AttributeError, match="local object"):
        save_full(lambda: 0, path)
    assert load_full(path) == {"a": 1}
    assert [entry.name for entry in path.parent.iterdir()] == ["last.ckpt"]
    FullFileIO().remove_checkpoint(path)
    assert list(path.parent.iterdir()) == []
