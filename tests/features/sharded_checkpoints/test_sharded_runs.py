"""Sharded checkpoints through Lightning's own ways: callbacks, hooks, links, threads and failures."""

from __future__ import annotations

import errno
import os
import threading
import warnings
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from features.test_checkpoints import Adaptive
from features.toys import PAIR, PIPE, SHARED, Run, Toy, alone, assert_same, together, weights
from lightning_mm5d.features.sharded_checkpoints.sharded_load import ShardedCheckpoint
from lightning_mm5d.features.sharded_checkpoints.sharded_save import Save
from lightning_mm5d.sharded.remote_value import is_remote
from lightning_mm5d.storage.tensor_file import TensorFileWriter
from sweeps import swept


class Hooked(Adaptive):
    """Drops a key, renames one, and adds tensors of its own."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        state = checkpoint["state_dict"]
        del state["decoder.norm.bias"]
        state["renamed"] = state.pop("encoder.patch.weight")
        state["own"] = torch.arange(3.0)
        checkpoint["pair"] = (1, torch.ones(2))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        state = checkpoint["state_dict"]
        state["encoder.patch.weight"] = state.pop("renamed")
        del state["own"]
        self.strict_loading = False
        self.pair = checkpoint["pair"]


class Greedy(Toy):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value * 2 for name, value in state.items()}


class Grown(Adaptive):
    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        del found["optimizer"].param_groups[1]["params"][-1]
        return found


class FailsOnOne(Toy):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 1:
            raise OSError("rank 1 has its own trouble")


def train(run: Run, module: Toy, epochs: int, **options: Any) -> Any:
    kept = options.pop("save_top_k", 1)
    saver = ModelCheckpoint(run.folder, save_last="link", filename="{step}", save_top_k=kept, every_n_train_steps=2)
    callbacks = [saver, *options.pop("callbacks", [])]
    ckpt_path = options.pop("ckpt_path", None)
    trainer = run.trainer(max_epochs=epochs, enable_checkpointing=True, callbacks=callbacks, **options)
    trainer.fit(module, run.training(), ckpt_path=ckpt_path)
    return trainer


def hooks(run: Run) -> dict[str, Any]:
    train(run, Hooked(), 2)
    module = Hooked()
    train(run, module, 3, ckpt_path="last")
    return {"mine": module.loaded, "pair": module.pair, "there": sorted(os.listdir(run.folder))}


def failed_save(run: Run, module: Toy) -> str:
    try:
        train(run, module, 1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def loads_of_others(run: Run) -> dict[str, str]:
    """What another optimizer, another shape and another name say; nothing is changed by them."""
    train(run, Adaptive(), 1)
    found = {}

    class Wider(Adaptive):
        def __init__(self) -> None:
            super().__init__()
            self.decoder.head = torch.nn.Linear(8, 5).double()

    class Renamed(Adaptive):
        def __init__(self) -> None:
            super().__init__()
            self.more = torch.nn.Linear(2, 2).double()

    for name, module in {"groups": Grown(), "shape": Wider(), "name": Renamed()}.items():
        before = weights(module)
        try:
            train(run, module, 2, ckpt_path=run.folder / "last.ckpt")
            found[name] = "no error"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        if name != "groups":
            assert_same(weights(module), before)
    return found


def test_hooks_that_change_the_state_dict_are_honoured(tmp_path: Path) -> None:
    """vision: rank 0; language: ranks 1-2 as stages."""
    for found in together(PIPE, hooks, tmp_path, checkpoint="sharded"):
        assert found["mine"] == 3  # the hook that counts comes after that which saves
        assert found["pair"][0] == 1
        assert torch.equal(found["pair"][1], torch.ones(2))
        assert found["there"] == ["last.ckpt", "step=6.ckpt"]
    assert (tmp_path / "last.ckpt").is_symlink()
    names = ShardedCheckpoint(tmp_path / "last.ckpt").names()
    assert "decoder.norm.bias" not in names
    assert {"renamed", "own"} <= set(names)


def doubled(run: Run) -> dict[str, torch.Tensor]:
    trainer = train(run, Greedy(), 1)
    return {name: 2 * value for name, value in trainer.strategy.full_state_dict().items()}


def test_values_that_a_hook_computes_are_saved_in_full(tmp_path: Path) -> None:
    """vision: rank 0; language: ranks 1-2 as stages. Each rank computes them all, from what others have too."""
    expected = together(PIPE, doubled, tmp_path, checkpoint="sharded")[0]
    saved = ShardedCheckpoint(tmp_path / "last.ckpt")
    parameters = {name for name, _ in Greedy().named_parameters()}
    assert_same({name: saved.read(name) for name in parameters}, {name: expected[name] for name in parameters})


def test_a_rank_that_fails_in_a_hook_ends_all_with_its_error(tmp_path: Path, capfd: Any) -> None:
    with suppress(AssertionError):  # ranks that wait for it are ended
        for error in together(PIPE, partial(failed_save, module=FailsOnOne()), tmp_path, checkpoint="sharded"):
            assert "its own trouble" in error
    assert "its own trouble" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_other_groups_shapes_and_names_are_refused_before_anything_changes(tmp_path: Path) -> None:
    for found in together(PIPE, loads_of_others, tmp_path, checkpoint="sharded"):
        assert "encoder.projector.bias" in found["groups"]
        assert "size mismatch for decoder.head" in found["shape"]
        assert "missing keys ['more." in found["name"]


class FullDisk(Toy):
    """The second save finds no space on rank 2."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 2 and self.global_step == 2:
            self.fired = True

            def full(self: Any, name: str, tensor: torch.Tensor) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(self.path))

            TensorFileWriter.write = full  # type: ignore[method-assign]


def fails_on_full_disk(run: Run) -> dict[str, Any]:
    module = FullDisk()
    before = TensorFileWriter.write
    try:
        train(run, module, 3)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    TensorFileWriter.write = before  # type: ignore[method-assign]
    there = sorted(os.listdir(run.folder))
    again = Toy()
    trainer = train(run, again, 4, ckpt_path="last")
    return {"error": found, "there": there, "steps": trainer.global_step, "fired": hasattr(module, "fired")}


@pytest.mark.parametrize("async_checkpoint", swept([False, True], False))
def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_leaves_the_last(
    tmp_path: Path, async_checkpoint: bool
) -> None:
    options = {"checkpoint": "sharded", "async_checkpoint": async_checkpoint}
    found = together(PIPE, fails_on_full_disk, tmp_path, **options)
    assert found[2]["fired"]
    for one in found:
        assert "No space left" in one["error"]
        assert one["there"] == ["last.ckpt", "step=2.ckpt"]
        assert one["steps"] == 8


def saves_over_a_folder(run: Run) -> dict[str, str]:
    class Saves(Toy):
        def on_train_end(self) -> None:
            self.trainer.save_checkpoint(run.folder)

    found = {}
    for form in ("full", "sharded"):
        try:
            replace(run, options={"checkpoint": form}).trainer().fit(Saves(), run.training())
        except Exception as error:
            found[form] = f"{type(error).__name__}: {error}"
    return found


def test_a_folder_with_other_files_is_not_replaced_and_all_ranks_hear_of_it(tmp_path: Path) -> None:
    """vision: rank 0; language: rank 1."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "notes").write_text("precious")
    for found in together(PAIR, saves_over_a_folder, tmp_path / "data"):
        assert "'notes', which is of no checkpoint" in found["full"]
        assert "'notes', which is of no checkpoint" in found["sharded"]
    assert [each.name for each in tmp_path.rglob("*")] == ["data", "notes"]


class Watched(Adaptive):
    """Holds up the writers of the first save until training has gone on, and keeps what was to be saved."""

    def on_train_start(self) -> None:
        self.held, self.saw = threading.Event(), []
        write = Save.write

        def held_up(save: Save) -> None:
            assert self.held.wait(30)
            write(save)

        Save.write = held_up  # type: ignore[method-assign]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.saw.append({name: p if is_remote(p) else p.detach().clone() for name, p in self.named_parameters()})
        if self.global_step == 3:
            self.there = os.path.exists(self.folder / "step=2.ckpt")
            self.held.set()


def saves_in_a_thread(run: Run) -> dict[str, Any]:
    module = Watched()
    module.folder = run.folder
    train(run, module, 2, save_top_k=-1)
    saved = ShardedCheckpoint(run.folder / "step=2.ckpt")
    own = {name: value for name, value in module.saw[2].items() if not is_remote(value)}
    moved = [name for name, value in module.saw[3].items() if name in own and not torch.equal(value, own[name])]
    same = all(torch.equal(saved.read(name), value) for name, value in own.items())
    return {"there": module.there, "same": same, "moved": moved, "own": len(own)}


def test_a_thread_writes_the_weights_of_the_step_that_asked(tmp_path: Path) -> None:
    """vision: rank 0; language: ranks 1-2 as stages."""
    for found in together(PIPE, saves_in_a_thread, tmp_path, checkpoint="sharded", async_checkpoint=True):
        assert not found["there"]
        assert found["moved"]
        assert found["own"]
        assert found["same"]
    assert (tmp_path / "last.ckpt").resolve().name == "step=4.ckpt"


def damaged(run: Run) -> dict[str, Any]:
    """The last checkpoint has one byte changed: refused, and with a setting the one before is loaded."""
    train(run, Adaptive(), 2, save_top_k=-1)
    torch.distributed.barrier()
    changed = run.folder / "step=4.ckpt" / "rank-00001.safetensors"
    if torch.distributed.get_rank() == 0:
        data = bytearray(changed.read_bytes())
        data[-5] ^= 1
        changed.write_bytes(data)
    torch.distributed.barrier()
    found: dict[str, Any] = {}
    module = Adaptive()
    try:
        train(run, module, 4, ckpt_path=run.folder / "step=4.ckpt")
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    own = [(name, one.detach()) for name, one in module.named_parameters() if not is_remote(one)]
    found["left"] = [name for name, one in own if not one.isnan().all()]
    falls_back = replace(run, options={**run.options, "on_corrupt_checkpoint": "previous"})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = train(falls_back, Adaptive(), 4, save_top_k=-1, ckpt_path=run.folder / "step=4.ckpt")
    found["told"] = " ".join(str(one.message) for one in told)
    found["steps"] = trainer.global_step
    return found


def test_a_damaged_checkpoint_is_refused_on_all_ranks_or_the_one_before_is_loaded(tmp_path: Path) -> None:
    """vision: rank 0; language: ranks 1-2 as stages."""
    for found in together(PIPE, damaged, tmp_path, checkpoint="sharded"):
        assert found["error"].startswith("CheckpointCorruptError")
        assert "rank-00001.safetensors" in found["error"]
        assert found["left"] == []  # nothing is half loaded
        assert "step=4.ckpt is damaged" in found["told"]
        assert "step=2.ckpt is loaded" in found["told"]
        assert found["steps"] == 8


def damaged_file(run: Run) -> dict[str, Any]:
    """A full file with other bytes in its midst, and one of a later step beside it."""
    train(run, Adaptive(), 3, save_top_k=-1)
    path = run.folder / "step=4.ckpt"
    if torch.distributed.get_rank() == 0:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        for other, time in ((2, 1_000), (4, 2_000), (6, 3_000)):
            if other == 4:
                path.write_bytes(data)
            os.utime(run.folder / f"step={other}.ckpt", (time, time))
    torch.distributed.barrier()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = train(run, Adaptive(), 4, save_top_k=-1, ckpt_path=path)
    return {"told": " ".join(str(one.message) for one in told), "steps": trainer.global_step}


def test_a_full_file_that_is_damaged_has_one_before_it_too(tmp_path: Path) -> None:
    """vision: rank 0; language: rank 1"""
    for found in together(PAIR, damaged_file, tmp_path, on_corrupt_checkpoint="previous"):
        assert "step=4.ckpt is damaged" in found["told"]
        assert "step=2.ckpt is loaded" in found["told"]
        assert found["steps"] == 8


def averaged(run: Run) -> dict[str, Any]:
    train(run, Toy(), 2, callbacks=[EMAWeightAveraging(decay=0.5)])
    module = Toy()
    train(run, module, 4, callbacks=[EMAWeightAveraging(decay=0.5)], ckpt_path="last")
    return weights(module)


def test_averages_of_weights_go_on(tmp_path: Path) -> None:
    """two replicas of everything: ranks 0-1"""
    expected = alone(averaged, tmp_path / "one")
    assert_same(together(SHARED, averaged, tmp_path / "ranks", checkpoint="sharded")[0], expected)
