"""Checkpoints in the memory of hosts: whose folders they are, which one counts, and what other nodes read."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from lightning_mm5d import CheckpointCorruptError, ConfigError, MultimodalStrategy, RankLostError
from lightning_mm5d.checkpoint.rank_reports import RankReports
from lightning_mm5d.features.sharded_checkpoints import in_memory
from lightning_mm5d.features.sharded_checkpoints.checkpoints import ShardedCheckpoints
from lightning_mm5d.features.sharded_checkpoints.directory import (
    CheckpointDirectory,
    Manifest,
    encode_manifest,
    write_whole,
)
from lightning_mm5d.features.sharded_checkpoints.in_memory import (
    FileServer,
    HostMemory,
    MemoryWriter,
    Nodes,
    RemoteFiles,
    agent_folder,
    newest,
    remove_ended,
)
from lightning_mm5d.storage.files import WrittenFile
from lightning_mm5d.storage.tensor_file import TensorFile, TensorFileWriter
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


def test_a_rank_reads_of_another_nodes_files_what_it_asks_for_and_nothing_without_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, written = ("first", "second"), dict[str, WrittenFile]()
    with TensorFileWriter(
        tmp_path / "rank-00001.safetensors", dict.fromkeys(names, (torch.float64, (400, 50)))
    ) as file:
        for number, name in enumerate(names):
            file.write(name, torch.full((400, 50), number + 1.0, dtype=torch.float64))
    written["rank-00001.safetensors"] = file.written
    written["state.json"] = write_whole(tmp_path / "state.json", b"{}")
    (tmp_path / "manifest.json").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as meeting_point:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(meeting_point.getsockname()[1]))
        server = FileServer(tmp_path, "key", timedelta(seconds=10))
    remote, other = (RemoteFiles(0, server.address, key, timedelta(seconds=10)) for key in ("key", "another"))
    elsewhere = {name: partial(remote.read, name) for name in written}
    here = tmp_path / "here"
    here.mkdir()
    (here / "manifest.json").write_bytes(encode_manifest(Manifest(written, {})))
    directory = CheckpointDirectory(here, elsewhere)
    assert directory.read_bytes("state.json") == b"{}"
    tensors = directory.tensor_file("rank-00001.safetensors")
    assert torch.equal(tensors.read("second", [(10, 20), (0, 50)]), torch.full((10, 50), 2.0, dtype=torch.float64))
    assert tensors.bytes_read < file.written.size / 2
    with pytest.raises(RankLostError, match=r"rank 0 does not send state\.json of a checkpoint in memory"):
        other.read("state.json", memoryview(bytearray(2)), 0)
    with pytest.raises(RankLostError):
        remote.read("manifest.json", memoryview(bytearray(6)), 0)
    for one in (remote, other, server):
        one.close()


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


def test_a_shell_between_the_agent_and_its_ranks_is_not_taken_for_the_agent() -> None:
    code = f"from {in_memory.__name__} import agent_folder; print(agent_folder().name.split('-')[2])"
    variables = {**os.environ, "TORCHELASTIC_RUN_ID": "7"}
    shell = ["sh", "-c", f'{sys.executable} -c "{code}"; true']
    found = subprocess.run(shell, env=variables, capture_output=True, text=True, check=True)
    assert int(found.stdout) == os.getpid()


def reports_of_one(topic: str) -> RankReports:
    return RankReports(None, topic, rank=0, world_size=1, timeout=timedelta(seconds=10))


@pytest.mark.parametrize("restarts", [0, 1])
def test_ranks_that_were_started_again_say_that_nothing_is_in_memory(
    restarts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(in_memory, "SHARED_MEMORY", tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    warnings.simplefilter("always")
    assert HostMemory(1).newest_checkpoint(Nodes(0, 1, 1), reports_of_one) is None
    told = [str(one.message) for one in recwarn if "No checkpoint in memory has all its files" in str(one.message)]
    assert len(told) == restarts


def test_ranks_that_nobody_starts_again_write_nothing_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def reports(topic: str) -> RankReports:
        raise AssertionError(topic)

    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.warns(UserWarning, match="in_memory_every_n_steps does nothing here: torchrun has not started"):
        assert HostMemory(1).newest_checkpoint(Nodes(0, 1, 1), reports) is None


def test_a_failed_last_save_leaves_the_checkpoint_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_memory, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(in_memory, "_FITS", itertools.count(1))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    fields = {"checkpoint_format": "full", "async_checkpoint": False, "on_corrupt_checkpoint": "raise"}
    checkpoints = ShardedCheckpoints(lambda topic, **_: reports_of_one(topic), {**fields, "in_memory_every_n_steps": 1})
    checkpoints.newest_in_memory(0, 1, 1)
    agent = agent_folder()
    assert agent is not None
    for name in ("000000001", "000000002"):  # on a node other than rank 0's, files of a failed save stay
        (agent / "fit-1" / name).mkdir(parents=True)
    (agent / "fit-1" / "000000001" / "manifest.json").write_text(manifest())
    checkpoints._memory_saves.run(Mock(write=Mock(side_effect=OSError("No space left"))), in_thread=True)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.close(failed=False)
    assert (agent / "fit-1" / "000000001" / "manifest.json").exists()


@pytest.mark.parametrize("older_bytes", [0, 7, 5000], ids=["none", "a shorter one", "a longer one"])
def test_files_are_written_over_older_ones(older_bytes: int, tmp_path: Path) -> None:
    name, spare, folder = "rank-00000.safetensors", tmp_path / "fit-1-spare", tmp_path / "fit-1" / "000000004"
    folder.mkdir(parents=True)
    spare.mkdir()
    older = spare / name
    if older_bytes:
        older.write_bytes(b"x" * older_bytes)
    number = older.stat().st_ino if older_bytes else None
    numbers = torch.arange(300.0)
    with MemoryWriter(folder, Mock()).tensor_file(name, {"numbers": (torch.float32, (300,))}) as file:
        with pytest.raises(CheckpointCorruptError):  # it does not pass for the older one
            TensorFile(folder / name)
        file.write("numbers", numbers)
    assert number in (None, (folder / name).stat().st_ino)
    assert not older.exists()
    assert file.written.size == (folder / name).stat().st_size
    assert torch.equal(TensorFile(folder / name).read("numbers"), numbers)


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


def begun_again(rank: int, folder: Path) -> tuple[str, list[str], bytes]:
    """A rank on each of two nodes, of which the second has lost its memory."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    os.environ["TORCHELASTIC_RUN_ID"] = "7"
    in_memory.SHARED_MEMORY = folder / str(rank)
    in_memory._FITS = itertools.count(1)
    agent = agent_folder()
    assert agent is not None
    names = ["rank-00000.safetensors", "rank-00001.safetensors"]
    saved = agent / "fit-1" / "000000003"
    saved.parent.mkdir(parents=True)
    if rank == 0:
        saved.mkdir()
        for name in names:
            (saved / name).write_text(name[5:10])
        (saved / "manifest.json").write_text(manifest(*names))
    store = dist.FileStore(str(folder / "store"), 2)

    def reports(topic: str) -> RankReports:
        return RankReports(store, topic, rank=rank, world_size=2, timeout=timedelta(seconds=30))

    memory = HostMemory(1)
    found = memory.newest_checkpoint(Nodes(rank, 2, 1), reports)
    assert found is not None
    readers, read = memory.elsewhere(found, reports), bytearray(3)
    for reader in list(readers.values())[1:]:
        reader(memoryview(read), 2)
    there = sorted(file.name for file in found.iterdir())
    dist.barrier()
    memory.close(failed=True)
    dist.destroy_process_group()
    return found.name, there, bytes(read)


def test_a_node_without_memory_reads_from_the_other_one_and_takes_no_files(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    first, second = run_ranks(2, begun_again, tmp_path)
    assert first == ("000000003", ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"], bytes(3))
    assert second == ("000000003", ["manifest.json"], b"001")
