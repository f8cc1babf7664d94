"""Checkpoints in the memory of hosts: whose folders they are, which one counts, and which files go where."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_mm5d import ConfigError, MultimodalStrategy
from lightning_mm5d.checkpoint.rank_reports import RankReports
from lightning_mm5d.features.sharded_checkpoints import in_memory
from lightning_mm5d.features.sharded_checkpoints.directory import Manifest, encode_manifest
from lightning_mm5d.features.sharded_checkpoints.in_memory import (
    HostMemory,
    Nodes,
    agent_folder,
    moves,
    newest,
    remove_ended,
)
from lightning_mm5d.storage.files import WrittenFile
from ranks import run_ranks


def manifest(*names: str) -> str:
    return encode_manifest(Manifest({name: WrittenFile(5, 0) for name in names}, {})).decode()


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "all"])
def test_what_is_no_number_of_steps_is_refused(steps: object) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.in_memory_every_n_steps: got .* number of steps from 1 on"):
        MultimodalStrategy(checkpoint={"in_memory_every_n_steps": steps})


def test_the_newest_checkpoint_counts_of_which_all_files_are_on_some_node() -> None:
    text = manifest("rank-00000.safetensors", "rank-00001.safetensors")
    first, second = {"rank-00000.safetensors": 5}, {"rank-00001.safetensors": 5}
    whole = ({"3": first, "4": first}, {"3": text, "4": text})
    assert newest([whole, ({"3": second, "4": second}, {"3": text})]) == ("4", text)  # one manifest is enough
    assert newest([whole, ({"3": second, "4": {"rank-00001.safetensors": 4}}, {"3": text, "4": text})]) == ("3", text)
    assert newest([whole, ({}, {})]) is None  # the other node is a new one
    assert newest([({"3": first | second}, {"3": text, "4": text[:-9]})]) == ("3", text)  # the writer was killed


def test_each_node_gets_the_files_that_it_lacks_from_those_that_have_them() -> None:
    assert moves({0: ["a", "b"], 4: ["a"], 8: []}, ["a", "b"]) == [("a", 0, 8), ("b", 0, 4), ("b", 0, 8)]
    assert moves({0: ["a"], 4: ["a"], 8: [], 12: []}, ["a"]) == [("a", 0, 8), ("a", 4, 12)]
    assert moves({0: ["a"]}, ["a"]) == []


def test_first_ranks_of_nodes() -> None:
    assert list(Nodes(5, 8, 4).firsts) == [0, 4]
    assert [Nodes(rank, 8, 4).is_first for rank in (0, 3, 4)] == [True, False, True]


def test_folders_of_agents_that_have_ended_are_removed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_memory, "SHARED_MEMORY", tmp_path)
    assert agent_folder() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    own = agent_folder()
    assert own is not None
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    user, parent = os.getuid(), os.getppid()
    for name in (own.name, f"mm5d-{user}-{ended.pid}-77", f"mm5d-{user}-{parent}-1", "mm5d-another"):
        (tmp_path / name).mkdir()
    remove_ended()
    assert {folder.name for folder in tmp_path.iterdir()} == {own.name, "mm5d-another"}


def test_ranks_that_nobody_starts_again_write_nothing_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def reports(topic: str) -> RankReports:
        raise AssertionError(topic)

    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.warns(UserWarning, match="in_memory_every_n_steps does nothing here: torchrun has not started"):
        assert HostMemory(1).found(Nodes(0, 1, 1), reports) is None


def exchanged(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    in_memory._CHUNK_BYTES = 1000  # several chunks
    own = folder / str(rank)
    own.mkdir()
    sizes = {0: [0, 2500], 1: [], 2: [7]}
    for number, size in enumerate(sizes[rank]):
        (own / f"rank-{rank}-{number}").write_bytes(bytes(range(256)) * 10 + b"." * size)
    names = [file.name for file in own.iterdir()]
    in_memory.exchange_files(own, names, (rank + 1) % 3, (rank - 1) % 3, dist.group.WORLD)
    dist.barrier()
    before = folder / str((rank - 1) % 3)
    for file in before.glob(f"rank-{(rank - 1) % 3}-*"):
        assert (own / file.name).read_bytes() == file.read_bytes()
    assert len(list(own.iterdir())) == len(sizes[rank]) + len(sizes[(rank - 1) % 3])
    dist.destroy_process_group()


def test_each_rank_has_a_copy_of_the_files_of_the_one_before(tmp_path: Path) -> None:
    run_ranks(3, exchanged, tmp_path)
