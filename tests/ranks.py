"""Calls a function on ranks, which are processes forked from this one, and returns what each rank returned.

`run_ranks` forks processes for one call: the function may be a closure and see all that the test has changed.
`call_ranks` sends the call to processes that stay alive, which is faster where many cases train: function, arguments
and results are pickled, and each call starts from the state that the processes were forked with. Both fail with the
traceback of every rank that raised, and with the numbers of the ranks that did not end within the limit, so that a
deadlock fails its own case only. Ranks that did not end print the stacks of their threads.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pkgutil import walk_packages
from typing import Any, cast

import torch
from torch.utils._pytree import tree_map

import lightning_mm5d
from lightning_mm5d.sharded.remote_value import is_remote
from lightning_mm5d.trainer.process_group import free_port
from lightning_mm5d.trainer.statements import package_digest

LIMIT_S = 360  # CI may be three times as slow as a machine that does nothing else
SATELLITES = ("tools", "models", "recipes", "export")
FEW = 60
"""modules that ranks import by themselves: a family of models has three to six"""
GRACE_S = 10
"""how long ranks may take to fail after another has failed, for their tracebacks, and to end after their last call"""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call on `world` ranks, with the state of the calling process that the ranks take over."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    world: int
    port: int
    dtype: torch.dtype
    environment: dict[str, str]
    path: list[str]
    filters: list[Any]
    """of warnings"""

    def __call__(self, rank: int) -> bytes:
        """Return what `torch.save` writes of the function's result, with NaN for values that only other ranks have."""
        os.environ.clear()
        os.environ.update(self.environment | _launched(rank, self.world, self.port))
        sys.path[:] = self.path
        torch.set_default_dtype(self.dtype)
        torch.set_grad_enabled(True)
        with warnings.catch_warnings():
            warnings.filters[:] = self.filters  # type: ignore[index]
            result = self.function(rank, *self.args)
            if torch.distributed.is_initialized():
                torch.distributed.barrier()
                torch.distributed.destroy_process_group()
        data = io.BytesIO()
        torch.save(tree_map(_plain, result), data)
        return data.getvalue()


def _plain(leaf: Any) -> Any:
    if is_remote(leaf):
        leaf = torch.full_like(leaf, float("nan") if leaf.is_floating_point() else 0)
    # the calling process forks ranks, and may not touch a GPU
    return leaf.cpu() if isinstance(leaf, torch.Tensor) and leaf.is_cuda else leaf


def run_ranks(
    world: int, function: Callable[..., Any], *args: Any, limit: float = LIMIT_S, killed: Collection[int] = ()
) -> list[Any]:
    """Call ``function(rank, *args)`` in `world` new processes; return what each returned.

    Ranks in `killed` must end by SIGKILL within the call; they return None.
    """
    ranks = _forked(range(world), _call(world, function, args))
    try:
        return _results(ranks, limit, killed)
    finally:
        _end(ranks)


class Pool:
    """Ranks that stay alive over calls; new ones after a failure, and after many imports that they would repeat.

    New ranks fill the caches of the library and of transformers again, which takes as long as two or three small runs.
    """

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._modules = 0

    def call(self, world: int, function: Callable[..., Any], *args: Any, limit: float = LIMIT_S) -> list[Any]:
        """Call ``function(rank, *args)`` on the first `world` ranks; return what each returned."""
        if len(sys.modules) > self._modules + FEW or not all(rank.process.is_alive() for rank in self._ranks):
            self.close()
        is_new = not self._ranks
        self._ranks += _forked(range(len(self._ranks), world))
        self._modules = len(sys.modules) if is_new else self._modules
        call = _call(world, function, args)
        try:
            for rank in self._ranks[:world]:
                rank.pipe.send(call)
            return _results(self._ranks[:world], limit)
        except BaseException:
            _end(self._ranks, kill=True)
            self._ranks = []
            raise

    def close(self) -> None:
        for rank in self._ranks:
            with suppress(BrokenPipeError):  # a rank that something else has ended
                rank.pipe.send(None)
        _end(self._ranks)
        self._ranks = []

    def forget(self) -> None:
        """Leave the ranks to the process that forked them; a rank forked beside them can neither use nor end them."""
        self._ranks = []


POOL = Pool()
call_ranks = POOL.call


def _call(world: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Call:
    return Call(
        function=function,
        args=args,
        world=world,
        port=free_port(),
        dtype=torch.get_default_dtype(),
        environment=dict(os.environ),
        path=list(sys.path),
        filters=list(warnings.filters),
    )


@dataclass(frozen=True)
class _Rank:
    index: int
    process: BaseProcess
    pipe: Connection


def _forked(indices: Iterable[int], call: Call | None = None) -> list[_Rank]:
    """Fork a process per rank; each runs `call` and ends, or without one waits for calls on its pipe."""
    context = get_context("fork")
    package_digest()  # which each rank would read
    _package()  # which each rank would import
    gc.collect()
    gc.freeze()  # the processes do not collect these objects, which would copy the memory of them all
    ranks = []
    for index in indices:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(index, theirs, ours, call))
        process.start()
        theirs.close()
        ranks.append(_Rank(index, process, ours))
    return ranks


@cache
def _package() -> None:
    """Import what a run may need of the package: each rank would do so by itself, and again after each fork."""
    for module in walk_packages(lightning_mm5d.__path__, "lightning_mm5d."):
        room = module.name.split(".")[1]
        if room not in SATELLITES and sys.modules.get(f"lightning_mm5d.{room}", sys) is not None:
            import_module(module.name)


def _end(ranks: list[_Rank], *, kill: bool = False) -> None:
    """Wait for processes that have been told to end, and kill those that do not."""
    end = time.monotonic() + (0 if kill else GRACE_S)
    for rank in ranks:
        rank.process.join(max(0.0, end - time.monotonic()))
    for rank in ranks:
        rank.process.kill()
        rank.process.join()
        rank.pipe.close()


def _results(ranks: list[_Rank], limit: float, killed: Collection[int] = ()) -> list[Any]:
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    waiting = {rank.pipe: rank for rank in ranks}
    end = time.monotonic() + limit
    while waiting and (left := end - time.monotonic()) > 0:
        for pipe in cast("list[Connection]", wait(list(waiting), left)):
            rank = waiting.pop(pipe)
            try:
                error, data = pipe.recv()
            except (EOFError, ConnectionError):
                rank.process.join()
                error, data = f"ended with exit code {rank.process.exitcode}", b""
            else:
                error = "was not killed" if rank.index in killed else error
            if rank.index in killed and rank.process.exitcode == -signal.SIGKILL:
                results[rank.index] = None
            elif error:
                errors[rank.index] = f"rank {rank.index}:\n{error}"
                end = min(end, time.monotonic() + GRACE_S)
            else:
                results[rank.index] = torch.load(io.BytesIO(data), weights_only=False)
    for rank in waiting.values():
        os.kill(cast("int", rank.process.pid), signal.SIGUSR1)
        time.sleep(0.5)  # for its stacks, which it prints by itself
    if errors:
        raise AssertionError("\n".join(errors[index] for index in sorted(errors)))
    assert not waiting, f"ranks {sorted(rank.index for rank in waiting.values())} did not end within {limit} s"
    return [results[rank.index] for rank in ranks]


def _serve(index: int, pipe: Connection, other_end: Connection, call: Call | None) -> None:
    """A rank's process: run one call, or those that come through the pipe until None does."""
    other_end.close()
    faulthandler.register(signal.SIGUSR1, file=2)
    faulthandler.enable(file=2)  # where a test's output is, which pytest's own handler does not write to
    POOL.forget()
    torch.set_num_threads(1)
    numbers, torch_numbers = random.getstate(), torch.get_rng_state()
    try:
        if call is not None:
            pipe.send(("", call(index)))
        else:
            while call := _received(pipe):
                random.setstate(numbers)
                torch.set_rng_state(torch_numbers)
                pipe.send(("", call(index)))
                gc.collect()
    except BaseException:
        pipe.send((traceback.format_exc(), b""))
        os._exit(1)  # the other ranks notice it, and no handler of this process waits for them
    os._exit(0)


def _received(pipe: Connection) -> Call | None:
    try:
        return pipe.recv()
    except EOFError:
        return None


def _launched(index: int, world: int, port: int) -> dict[str, str]:
    """The environment that a launcher gives to a rank."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(index),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(index),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "tests",
        "OMP_NUM_THREADS": "1",
    }
