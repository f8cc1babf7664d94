"""Sharded checkpoints in the memory of hosts, from which a run goes on after torchrun has started its ranks again.

Every few steps each rank writes its own pieces to a folder in the shared memory of its node, which outlives its
process, in a thread, while training goes on. Where there are several nodes, it sends its files to the rank of the same
place on the next node, so that a lost node takes nothing with it. A checkpoint counts once all ranks have written and
the first rank of each node has added the manifest; until then the one before it stays. So a step that did not end on
all ranks counts on none.

When ranks start again, each node says which files it has, and rank 0 names the newest checkpoint of which all files are
somewhere. Of files that its node lacks, each rank reads what it needs from a node that has them. All else is as with a
sharded checkpoint on a disk: another number of replicas may go on with it.

The folder of a node belongs to one agent of torchrun, so that nothing outlives its job: a job that was started anew
does not find it, and removes what the agents of ended jobs have left. When a fit has ended well its last checkpoint
stays, so that a script that starts again after it does not train again; it goes with the last process of the node.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import secrets
import shutil
import socket
import socketserver
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mm5d.checkpoint.rank_reports import RankReports
from lightning_mm5d.config.errors import CheckpointCorruptError, ConfigError, RankLostError
from lightning_mm5d.engine.run_groups import Groups
from lightning_mm5d.features.sharded_checkpoints.directory import (
    MANIFEST,
    UNCHECKED,
    DirectoryWriter,
    Manifest,
    Reader,
    decode_manifest,
    encode_manifest,
    is_file_name,
    write_whole,
)
from lightning_mm5d.features.sharded_checkpoints.sharded_save import Save
from lightning_mm5d.sharded.collectives import message_device
from lightning_mm5d.storage.files import WrittenFile, write_at
from lightning_mm5d.storage.tensor_file import TensorFileWriter

SHARED_MEMORY = Path("/dev/shm")
_RUN, _RESTARTS = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"  # variables that an agent sets
KEPT_CHECKPOINTS = 2  # the newest one may not have come to all nodes
_CHUNK_BYTES = 64 * 2**20  # sent at once
_LINE_BYTES = 2**12  # of what a rank asks for
_LAST_S = 10.0  # how long the last process of a node waits for the ends of the others
_TOLD_S = 0.5  # until torchrun, which looks every 0.1 s, has told of one that was killed
_FITS = itertools.count(1)  # of this process; a script that starts again comes to the same ones in the same order


@dataclass(frozen=True)
class Nodes:
    """Which ranks share a host.

    Args:
        rank: global rank of this process.
        world_size: number of ranks.
        per_node: ranks on each node; those of a node follow each other.
    """

    rank: int
    world_size: int
    per_node: int

    @property
    def count(self) -> int:
        """How many nodes there are."""
        return self.world_size // self.per_node

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of its node."""
        return self.rank % self.per_node == 0

    @property
    def firsts(self) -> range:
        """The first rank of each node."""
        return range(0, self.world_size, self.per_node)


def agent_folder() -> Path | None:
    """Return the folder of the agent of torchrun that has started this process; None without one.

    The agent is the first process above this one that was not told a rank; a shell may be between.
    """
    if _RUN not in os.environ:
        return None
    agent = os.getppid()
    while above := _parent_of_rank(agent):
        agent = above
    return SHARED_MEMORY / f"mm5d-{os.getuid()}-{agent}-{_started(agent)}"


def _parent_of_rank(process: int) -> int | None:
    """Return the parent of a process that torchrun's agent has told a rank; None of any other."""
    with suppress(OSError):
        variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        if any(variable.startswith(f"{_RUN}=".encode()) for variable in variables):
            return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def remove_ended() -> None:
    """Remove what agents of this user have left that have ended."""
    for folder in SHARED_MEMORY.glob(f"mm5d-{os.getuid()}-*-*"):
        _, _, agent, started = folder.name.split("-", 3)
        if agent.isdecimal() and _started(int(agent)) != started:
            shutil.rmtree(folder, ignore_errors=True)


def _started(process: int) -> str:
    """Return when a process has started, in the kernel's ticks; empty where there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def found_in(folder: Path) -> dict[str, dict[str, int]]:
    """Return the files of each checkpoint with their sizes, by the names of checkpoints and files."""
    paths = sorted(folder.glob("*"))
    return {path.name: {file.name: file.stat().st_size for file in path.iterdir()} for path in paths}


def manifests_in(folder: Path) -> dict[str, str]:
    """Return the texts of the manifests of checkpoints, by their names."""
    return {path.parent.name: path.read_text() for path in folder.glob(f"*/{MANIFEST}")}


class ReusedFile(TensorFileWriter):
    """Writes over the file of an older checkpoint where there is one, whose memory the system need not find again."""

    @override
    def __enter__(self) -> ReusedFile:
        _reuse(self.path)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        write_at(self._descriptor, bytes(8), 0, self.path)  # no header
        last = max((entry.stop for entry in self._entries.values()), default=0)
        os.ftruncate(self._descriptor, self._origin + last)
        return self


class MemoryWriter(DirectoryWriter):
    """Writes one checkpoint on one node; it has a new name, and counts once it has a manifest.

    Args:
        folder: of the checkpoint.
        reports: of the save, by which other nodes hear of the manifest.
    """

    make_file = staticmethod(partial(ReusedFile, flush=False, checksums=False))

    def __init__(self, folder: Path, reports: RankReports) -> None:
        self.path = self.folder = folder
        self._reports = reports

    @override
    def begin(self) -> None:
        """Nothing: each rank makes the folder of its node."""

    @override
    def commit(self, files: Mapping[str, WrittenFile], fields: Mapping[str, Any]) -> None:
        write_whole(self.folder / MANIFEST, text := encode_manifest(Manifest(files, {**fields, UNCHECKED: True})))
        self._reports.tell("manifest", text.decode())

    @override
    def abort(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class MemorySave(Save):
    """A save into the memory of hosts.

    Args:
        folder: of the checkpoint on this node.
        nodes: which ranks share a host.
        group: of all ranks, for this thread alone; None where there is one node.
    """

    folder: Path
    nodes: Nodes
    group: ProcessGroup | None

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)

    @override
    def _made_writer(self, path: str, save_id: str) -> DirectoryWriter:
        return MemoryWriter(self.folder, self.reports)

    @override
    def _spread(self, files: Mapping[str, WrittenFile]) -> None:
        """Send this rank's files to the next node, and take those of the one before."""
        if self.group is None:
            return
        nodes = self.nodes
        after, before = nodes.rank + nodes.per_node, nodes.rank - nodes.per_node
        exchange_files(self.folder, list(files), after % nodes.world_size, before % nodes.world_size, self.group)

    @override
    def _conclude(self) -> None:
        """Add the manifest on the other nodes, and have the next checkpoint reuse what is too old on each."""
        if not self.nodes.is_first:
            return
        if self.nodes.rank:
            write_whole(self.folder / MANIFEST, self.reports.hear("manifest").encode())
        _keep_newest(self.folder.parent, KEPT_CHECKPOINTS)


def exchange_files(folder: Path, names: Sequence[str], after: int, before: int, group: ProcessGroup) -> None:
    """Send files of `folder` to the rank `after`, and take those of the rank `before` into the same folder."""
    sizes = json.dumps([[name, (folder / name).stat().st_size] for name in names]).encode()
    message = torch.frombuffer(bytearray(sizes), dtype=torch.uint8)
    length = torch.tensor([len(message)])
    _swap(length, after, their_length := torch.empty_like(length), before, group)
    _swap(message, after, heard := torch.empty(int(their_length), dtype=message.dtype), before, group)
    outgoing = itertools.chain.from_iterable(_read(folder / name) for name in names)
    incoming = itertools.chain.from_iterable(_written(folder, *spec) for spec in json.loads(heard.numpy().tobytes()))
    for sent, received in itertools.zip_longest(outgoing, incoming):
        _swap(sent, after, received, before, group)


def _swap(sent: Tensor | None, after: int, received: Tensor | None, before: int, group: ProcessGroup) -> None:
    """Send one tensor and fill another one; either may be missing."""
    work = None if sent is None else dist.isend(sent, after, group=group)
    if received is not None:
        dist.recv(received, before, group=group)
    if work is not None:
        work.wait()


def _read(path: Path) -> Iterator[Tensor]:
    """Yield the bytes of a file in parts, without a copy."""
    if size := path.stat().st_size:
        yield from torch.from_file(os.fspath(path), size=size, dtype=torch.uint8).split(_CHUNK_BYTES)


def _written(folder: Path, name: str, size: int) -> Iterator[Tensor]:
    """Yield memory for the bytes of a file in parts, and write each once it is filled."""
    if not is_file_name(name):
        raise CheckpointCorruptError(f"{name!r} is no file of a checkpoint")
    _reuse(folder / name)
    (folder / name).touch()
    with (folder / name).open("r+b") as file:
        for start in range(0, size, _CHUNK_BYTES):
            chunk = torch.empty(min(_CHUNK_BYTES, size - start), dtype=torch.uint8)
            yield chunk
            file.write(chunk.numpy().data)
        file.truncate()


class FileServer(socketserver.ThreadingTCPServer):
    """Serves the files of a checkpoint to ranks of other nodes, which each ask for the bytes that they need.

    Args:
        folder: of the checkpoint.
        key: that a rank must know.
        timeout: until the meeting point of ranks answers.

    Attributes:
        address: by which other nodes reach it.
    """

    daemon_threads, block_on_close = True, False

    def __init__(self, folder: Path, key: str, timeout: timedelta) -> None:
        self.folder, self.key = folder, key
        meeting_point = os.environ["MASTER_ADDR"]
        store = meeting_point, int(os.environ["MASTER_PORT"])
        with socket.create_connection(store, timeout.total_seconds()) as connection:
            host, peer = connection.getsockname()[0], connection.getpeername()[0]
            self.address_family = connection.family
        is_there = host == peer or ip_address(host).is_loopback
        super().__init__(("" if is_there else host, 0), _Served)
        self.address = meeting_point if is_there else host, self.server_address[1]
        threading.Thread(target=self.serve_forever, name="checkpoint files", daemon=True).start()

    @override
    def handle_error(self, *_: Any) -> None:
        """Nothing: the rank that asked has an error of its own."""

    def close(self) -> None:
        """Serve nobody any more."""
        self.shutdown()
        self.server_close()


class _Served(socketserver.StreamRequestHandler):
    """Answers one rank, whose lines say the key, a file, and its first and last byte."""

    server: FileServer
    timeout = 30.0  # seconds, of one that says nothing, as before it has said the key

    @override
    def handle(self) -> None:
        while line := self.rfile.readline(_LINE_BYTES):
            key, name, start, stop = json.loads(line)
            if not secrets.compare_digest(str(key), self.server.key) or not is_file_name(name):
                return
            with (self.server.folder / name).open("rb") as file:
                if self.connection.sendfile(file, start, stop - start) != stop - start:
                    return  # the file has ended before
            self.connection.settimeout(None)


class RemoteFiles:
    """What a rank reads of the files of another node.

    Args:
        rank: that serves them.
        address: where it does.
        key: that it asks for.
        timeout: of each answer.
    """

    def __init__(self, rank: int, address: Sequence[Any], key: str, timeout: timedelta) -> None:
        self._rank, self._address, self._key, self._timeout = rank, address, key, timeout
        self._connection: socket.socket | None = None

    def read(self, name: str, memory: memoryview, offset: int) -> None:
        """Fill `memory` with the bytes of a file from `offset` on.

        Raises:
            RankLostError: the other rank does not send them.
        """
        try:
            if self._connection is None:
                self._connection = socket.create_connection(tuple(self._address), self._timeout.total_seconds())
            asked = [self._key, name, offset, offset + len(memory)]
            self._connection.sendall(f"{json.dumps(asked)}\n".encode())
            while memory:
                count = self._connection.recv_into(memory)
                if not count:
                    raise ConnectionError("it has closed the connection")
                memory = memory[count:]
        except OSError as error:
            self.close()
            raise RankLostError(f"rank {self._rank} does not send {name} of a checkpoint in memory: {error}") from error

    def close(self) -> None:
        """Read nothing any more."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class HostMemory:
    """Checkpoints of one strategy in the memory of hosts, on one rank.

    Args:
        every: steps between two of them.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._folder: Path | None = None
        self._nodes: Nodes | None = None
        self._group: ProcessGroup | None = None
        self._callback: SaveInMemory | None = None
        self._trainer: pl.Trainer | None = None
        self._number, self._manifest, self._timeout = 0, "", timedelta(0)
        self._served: FileServer | None = None
        self._remote: dict[int, RemoteFiles] = {}

    # --- going on ---

    def newest_checkpoint(self, nodes: Nodes, open_reports: Callable[[str], RankReports]) -> Path | None:
        """Return the checkpoint that this fit goes on from, None where there is none; collective.

        Args:
            nodes: which ranks share a host.
            open_reports: opens an occasion of a topic between ranks.
        """
        agent, number = agent_folder(), next(_FITS)
        self._folder = None
        if agent is None:
            rank_zero_warn(
                "checkpoint.in_memory_every_n_steps does nothing here: torchrun has not started these ranks, so nobody "
                "starts them again when one is lost"
            )
            return None
        self._nodes, self._folder = nodes, agent / f"fit-{number}"
        if nodes.is_first:
            remove_ended()
            _make_private(agent)
            self._folder.mkdir(exist_ok=True)
            for what in ("ended", "spare"):  # of ranks that may be others now
                shutil.rmtree(_beside(self._folder, what), ignore_errors=True)
        reports = open_reports("found")
        self._timeout = reports.timeout
        reports.tell("there", [found_in(self._folder), manifests_in(self._folder)] if nodes.is_first else None)
        if nodes.rank == 0:
            contents = [reports.hear("there", rank) for rank in nodes.firsts]
            reports.tell("chosen", newest(contents))
            is_again = any(files for files, _ in contents) or os.environ.get(_RESTARTS, "0") != "0"
            if is_again and reports.hear("chosen") is None:
                rank_zero_warn(
                    "No checkpoint in memory has all its files on the hosts: none was written yet, or neighbours were "
                    "lost together. The fit begins from ckpt_path"
                )
        name, self._manifest = reports.hear("chosen") or (None, "")
        reports.part("chosen")
        self._number = 0 if name is None else int(name)
        if nodes.is_first:
            for checkpoint in found_in(self._folder):
                if checkpoint != name:  # of steps that did not end on all ranks
                    shutil.rmtree(self._folder / checkpoint, ignore_errors=True)
        if name is None:
            return None
        (self._folder / name).mkdir(exist_ok=True)  # on a new node, which gets the manifest later
        rank_zero_info(
            "The fit goes on from a checkpoint in the memory of the hosts. Means and metrics over its epoch count the "
            "batches from there on"
        )
        return self._folder / name

    def elsewhere(self, path: Path, open_reports: Callable[[str], RankReports]) -> dict[str, Reader]:
        """Return what reads files of a checkpoint that this node lacks, from nodes that have them; collective.

        Args:
            path: of the checkpoint on this node.
            open_reports: opens an occasion of a topic between ranks.
        """
        nodes = self._nodes
        if nodes is None or self._folder is None or path.parent != self._folder or nodes.count == 1:
            return {}
        files = decode_manifest(self._manifest.encode(), path / MANIFEST).files
        reports = open_reports("elsewhere")
        if nodes.rank == 0:
            reports.tell("key", secrets.token_hex())
        key = reports.hear("key")
        if nodes.is_first:
            (path / MANIFEST).write_text(self._manifest)  # in place of one whose writer was killed
            self._served = FileServer(path, key, self._timeout)
            sizes = found_in(self._folder)[path.name]
            names = [name for name, file in files.items() if sizes.get(name) == file.size]
            reports.tell("serves", [self._served.address, names])
        served = {rank: reports.hear("serves", rank) for rank in nodes.firsts}
        reports.exchange("heard", None)  # rank 0, which may serve the store, goes on after all others
        first = nodes.rank - nodes.rank % nodes.per_node
        readers: dict[str, Reader] = {}
        for name in sorted(set(files) - set(served[first][1])):
            source = min(
                (rank for rank in served if name in served[rank][1]), key=lambda rank: (rank - first) % len(served)
            )
            if source not in self._remote:
                self._remote[source] = RemoteFiles(source, served[source][0], key, self._timeout)
            readers[name] = partial(self._remote[source].read, name)
        return readers

    # --- saving ---

    def attach(self, trainer: pl.Trainer, save: Callable[[pl.Trainer], None], await_copies: Callable[[], None]) -> None:
        """Save while `trainer` trains; collective."""
        if self._folder is None or self._nodes is None or self._callback is not None:
            return
        if self._nodes.count > 1:
            everybody = range(self._nodes.world_size)
            groups = Groups(self._timeout, device=message_device(trainer.strategy.root_device))
            self._group = groups.get(everybody, "checkpoints in memory", backend="gloo")
        self._end_serving()  # all ranks have loaded what they need before they make a group
        self._trainer, self._callback = trainer, SaveInMemory(self._every, save, await_copies)
        vars(trainer)["callbacks"].insert(0, self._callback)

    def next_save(self, reports: RankReports, optimizers: Sequence[Optimizer], fields: Mapping[str, Any]) -> MemorySave:
        """Return the next save."""
        assert self._folder is not None
        assert self._nodes is not None
        self._number += 1
        return MemorySave(reports, optimizers, fields, self._folder / f"{self._number:09}", self._nodes, self._group)

    def close(self, *, failed: bool) -> None:
        """The fit is over; what is in memory stays, of a fit that has not failed for as long as this process lives."""
        if self._callback is not None and self._trainer is not None:
            vars(self._trainer)["callbacks"].remove(self._callback)
        if not failed and self._folder is not None and self._nodes is not None:
            if self._nodes.is_first:
                _keep_newest(self._folder, 1)
                shutil.rmtree(_beside(self._folder, "spare"), ignore_errors=True)
            atexit.register(_end, self._folder, self._nodes)
            if self._group is not None:
                dist.destroy_process_group(self._group)
        self._end_serving()
        self._callback = self._trainer = self._folder = self._group = None

    def _end_serving(self) -> None:
        for remote in self._remote.values():
            remote.close()
        self._remote.clear()
        if self._served is not None:
            self._served.close()
            self._served = None


class SaveInMemory(pl.Callback):
    """Saves when a batch begins, ahead of all other callbacks: what follows the step before it is over by then.

    After a step a validation may be due, and the end of an epoch, which a run that went on from there would leave out.

    Args:
        every: steps between two saves.
        save: of the run of a trainer.
        await_copies: has the device copy states of optimizers before what it computes from then on.
    """

    def __init__(self, every: int, save: Callable[[pl.Trainer], None], await_copies: Callable[[], None]) -> None:
        self._every, self._save, self._await_copies, self._saved = every, save, await_copies, -1

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        number = trainer.global_step // self._every
        if number != self._saved:
            self._saved = number
            self._save(trainer)
            if not trainer.lightning_module.automatic_optimization:  # torch's own optimizers may step without a hook
                self._await_copies()

    @override
    def on_before_optimizer_step(self, *_: Any) -> None:
        self._await_copies()


def newest(nodes: Sequence[tuple[Mapping[str, Mapping[str, int]], Mapping[str, str]]]) -> tuple[str, str] | None:
    """Return the newest checkpoint of which all files are on some node, and its manifest.

    Args:
        nodes: of each node: the sizes of files, and the texts of manifests, by the names of checkpoints.
    """
    names = sorted({name for _, manifests in nodes for name in manifests}, reverse=True)
    for name in names:
        text = next(manifests[name] for _, manifests in nodes if name in manifests)
        try:
            files = decode_manifest(text.encode(), Path(name)).files
        except CheckpointCorruptError:  # its writer was killed
            continue
        if all(any(sizes.get(name, {}).get(key) == file.size for sizes, _ in nodes) for key, file in files.items()):
            return name, text
    return None


def _keep_newest(folder: Path, count: int) -> None:
    """Set aside what is too old, which the next checkpoint is written over."""
    for old in sorted(folder.iterdir())[:-count]:
        shutil.rmtree(_beside(folder, "spare"), ignore_errors=True)
        with suppress(OSError):  # some of an older one has stayed there
            old.rename(_beside(folder, "spare"))
        shutil.rmtree(old, ignore_errors=True)


def _beside(folder: Path, what: str) -> Path:
    """Return the place of something of a fit on a node.

    Args:
        folder: of the fit.
        what: ``"spare"`` are files of the checkpoint before the kept ones, which the next one is written over;
            ``"ended"`` says which processes have ended after the fit.
    """
    return folder.with_name(f"{folder.name}-{what}")


def _reuse(path: Path) -> None:
    """Put an older file in the place of a new one, where there is one."""
    with suppress(FileNotFoundError):
        (_beside(path.parent.parent, "spare") / path.name).rename(path)


def _end(folder: Path, nodes: Nodes) -> None:
    """Remove what a fit has left when the last process of the node ends, unless one has failed: ranks start again.

    The last one waits for the ends of the others, and then for torchrun, which ends it by SIGTERM where one was killed.
    """
    if getattr(sys, "last_type", None) is not None:
        return
    with suppress(OSError):  # another process has removed it
        ended = _beside(folder, "ended")
        ended.mkdir(exist_ok=True)
        (ended / f"{os.getpid()}-{_started(os.getpid())}").touch()
        if len(list(ended.iterdir())) == nodes.per_node:
            others = [file.name.split("-") for file in ended.iterdir() if not file.name.startswith(f"{os.getpid()}-")]
            limit = time.monotonic() + _LAST_S
            while any(_started(int(process)) == started for process, started in others) and time.monotonic() < limit:
                time.sleep(0.05)
            time.sleep(_TOLD_S)
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(ended, ignore_errors=True)
            folder.parent.rmdir()  # unless there are further fits


def _make_private(folder: Path) -> None:
    """Make a folder that only this user can read and write.

    Raises:
        ConfigError: another user has put something in its place.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        rule = f"{folder} is another user's"
        raise ConfigError("checkpoint.in_memory_every_n_steps", os.fspath(folder), rule, "Remove it, or leave it unset")
