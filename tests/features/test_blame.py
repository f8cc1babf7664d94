"""When a rank fails, stops, spins or goes another way, all ranks end, and the launching process says why in one line.

Each case is a tree of processes of its own, forked by Lightning's launcher. All trees run at once: they mostly wait.
The default run holds each kind of fault and each layout; `exhaustive` holds more of their pairs.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from features.toys import PIPE, Layout, Samples, Toy
from lightning_mm5d import Modality, MultimodalStrategy, TensorParallelPlan, register_tensor_parallel_plan
from sweeps import swept

pytestmark = pytest.mark.processes
LIMIT_S = 90
GROUP_TIMEOUT = timedelta(minutes=10)
AT = 2
"""index of the batch in which faults fire"""
TRIPLE = Layout({"model": Modality()}, 3)
"""three replicas of everything: ranks 0-2"""
BESIDE = Layout({"model": Modality(tp_size=2, pipeline={"interleaved_microbatches": 2})}, 2)
"""two microbatches side by side on ranks 0-1; faults fire in a thread that is not the main one"""
NOT_OURS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "NODE_RANK", "MASTER_", "TORCHELASTIC", "PL_")


def kill(trainer: L.Trainer, module: Toy) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(trainer: L.Trainer, module: Toy) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def terminate(trainer: L.Trainer, module: Toy) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt(trainer: L.Trainer, module: Toy) -> None:
    os.killpg(os.getpgrp(), signal.SIGINT)  # as Ctrl-C in a terminal


def spin(trainer: L.Trainer, module: Toy) -> None:
    while True:
        pass


def sleep(trainer: L.Trainer, module: Toy) -> None:
    time.sleep(1000)


def fail(trainer: L.Trainer, module: Toy) -> None:
    raise ValueError("boom")


def save(trainer: L.Trainer, module: Toy) -> None:
    trainer.save_checkpoint("never-written.ckpt")


def gather(trainer: L.Trainer, module: Toy) -> None:
    module.all_gather(torch.ones(2))


def log_synced(trainer: L.Trainer, module: Toy) -> None:
    module.log("seen", 1.0, sync_dist=True)


def nothing(trainer: L.Trainer, module: Toy) -> None:
    pass


@dataclass(frozen=True)
class Case:
    """A fault of one rank, and what the last line must say."""

    fault: Callable[[L.Trainer, Toy], None]
    rank: int
    says: str
    layout: Layout = PIPE
    place: str = "batch end"
    watchdog_s: float = 300
    code: int = 1


SPLIT = r"rank(s 1-2| 1 is|s 1, 2).* at the start of training batch 3 of epoch 0"
CASES = {
    "a killed rank": Case(kill, 2, r"RankLostError: rank 2 \(.*\) failed first: its process (is gone|was killed)"),
    "rank 0 killed": Case(kill, 0, r"RankLostError: rank 0 .*failed first: its process (is gone|was killed)"),
    "a killed replica": Case(kill, 1, r"RankLostError: rank 1 .*failed first: its process (is gone|was k)", TRIPLE),
    "a stopped rank": Case(stop, 1, r"RankLostError: rank 1 \(.*\) failed first: its process is stopped \(SIGSTOP\)"),
    "rank 0 stopped": Case(stop, 0, r"RankLostError: rank 0 \(.*\) failed first: its process is stopped", TRIPLE),
    "an error in a callback": Case(
        fail,
        1,
        r"rank 1 \(language.0: on_train_batch_end at test_blame.py:\d+, training batch 2\) failed first: ValueError: b",
    ),
    "a checkpoint that cannot be written": Case(
        nothing,
        0,
        r"RankLostError: rank 0 \(vision.0: save_checkpoint in on_train_batch_end.*\) failed first: FileNotFoundError",
        place="full disk",
    ),
    "an error in a step": Case(
        fail, 2, r"rank 2 \(language.1, forward of microbatch 0\) failed first: ValueError: boom", place="step"
    ),
    "an error in a loader": Case(
        fail, 1, r"rank 1 \(model.0: the dataloader at .*\) failed first: ValueError: boom", TRIPLE, place="loader"
    ),
    "a loader that ends early": Case(
        nothing,
        1,
        r"RankMismatchError: ranks begin different batches: .*rank 1 .*equal numbers.*trainer.should_stop on all",
        place="length",
    ),
    "a batch that one rank leaves out": Case(
        nothing,
        0,
        r"RankMismatchError: ranks begin different batches: .*ranks? 1.* at the step of train batch 2 .*return -1",
        place="left out",
    ),
    "a checkpoint of rank 0 only": Case(
        save,
        0,
        r"RankMismatchError: ranks are at unequal places of a hook: rank 0 at .*state_dict.*; rank 1, 2 at the end of ",
    ),
    "a gather of rank 0 only": Case(gather, 0, rf"RankMismatchError: .*rank 0 is in all_gather.*{SPLIT}", TRIPLE),
    "a log of rank 0 only": Case(log_synced, 0, rf"RankMismatchError: .*rank 0 is in log in on_train.*{SPLIT}", TRIPLE),
    "a rank that spins": Case(
        spin,
        1,
        r"WatchdogTimeoutError: .*rank 1 is in language.0: on_train_batch_end at test_blame.py:\d+",
        watchdog_s=6,
    ),
    "a rank that hangs beside another microbatch": Case(
        sleep,
        1,
        r"WatchdogTimeoutError: .*rank 1 is in model.0, forward of .* 1; rank 0",
        BESIDE,
        "layer",
        watchdog_s=6,
    ),
    "a rank stopped beside another microbatch": Case(
        stop, 1, r"RankLostError: rank 1 \(.*\) failed first: its process is st", BESIDE, "layer"
    ),
    "a rank killed beside another microbatch": Case(
        kill, 1, r"RankLostError: rank 1 \(.*\) failed first: its process (is gone|was k)", BESIDE, "layer"
    ),
    "an interrupt of all processes": Case(interrupt, 2, r"^(the fault fired|Detected KeyboardInterrupt.*)$"),
    "a rank that is told to terminate": Case(
        terminate, 2, r"SIGTERMException: rank 2 was told to terminate by SIGTERM.*before batch 3", code=0
    ),
    "a replica that is told to terminate": Case(
        terminate, 0, r"SIGTERMException: rank 0 was told to terminate", TRIPLE, place="step", code=0
    ),
}


def job(case: Case) -> None:
    """Train with the fault of `case`; the calling process launches the ranks."""

    def fires(trainer: L.Trainer, module: Toy, place: str, batch: int) -> None:
        if case.place == place and trainer.global_rank == case.rank and batch == AT:
            print("the fault fired", flush=True)
            case.fault(trainer, module)

    class AtBatchEnd(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            fires(trainer, module, "batch end", batch_idx)

    class Faulty(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            fires(self.trainer, self, "step", batch_idx)
            return loss

    class LeavesOut(Faulty):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            fires(self.trainer, self, case.place, batch_idx)
            return -1 if self.trainer.global_rank == case.rank and batch_idx == AT else None

    def enters(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            fires(trainer, module, "layer", trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1)

    class Data(Samples):
        def __len__(self) -> int:
            shorter = case.place == "length" and trainer.global_rank == case.rank
            if shorter:
                print("the fault fired", flush=True)
            return 2 * AT if shorter else 20

        def __getitem__(self, index: int) -> Any:
            if index == 2 * AT:
                fires(trainer, module, "loader", AT)
            return super().__getitem__(index)

    saves = list[Callback]()
    if case.place == "full disk":
        print("the fault fired", flush=True)
        saves.append(ModelCheckpoint(dirpath="/proc/never-made", every_n_train_steps=AT))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=case.layout.world,
        strategy=MultimodalStrategy(
            modalities=case.layout.modalities,
            batching={"num_microbatches": 2 if case.layout is BESIDE else 1},
            launch={"start_method": "fork", "timeout": GROUP_TIMEOUT, "watchdog": timedelta(seconds=case.watchdog_s)},
        ),
        max_epochs=1,
        logger=False,
        enable_checkpointing=bool(saves),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[AtBatchEnd(), *saves],
    )
    module = LeavesOut() if case.place == "left out" else Faulty()
    if case.layout is BESIDE:
        plan = TensorParallelPlan(column={"up": ("width",)}, row={"down": ("width",)})
        register_tensor_parallel_plan("Layer", plan)
        module.decoder.layers[0].register_forward_pre_hook(enters)
    trainer.fit(module, DataLoader(Data(20), batch_size=2))


def launching(case: Case, printed: Path) -> None:
    """Body of a launching process, which ends as a script would."""
    os.setsid()
    output = os.open(printed, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # not those of pytest
    for name in [name for name in os.environ if name.startswith(NOT_OURS)]:
        del os.environ[name]
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float32)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background are started without it
    code = 0
    try:
        job(case)
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@dataclass
class Ended:
    """How a tree of processes ended; `code` is None where it did not within the limit."""

    code: int | None
    printed: str
    left: int


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """All cases that tests ask for, run at the same time."""
    folder = tmp_path_factory.mktemp("blame")
    files = {name: folder / name.replace(" ", "-") for name in CASES}
    context = get_context("fork")
    trees: dict[str, BaseProcess] = {}
    asked = {item.name for item in request.session.items if item.path == request.path}
    for name, case in CASES.items():
        if not any(f"[{name}]" in test for test in asked):
            continue
        trees[name] = context.Process(target=launching, args=(case, files[name]))
        trees[name].start()
    end = time.monotonic() + LIMIT_S
    found = {}
    for tree in trees.values():
        tree.join(max(0.0, end - time.monotonic()))
    time.sleep(1.0)  # for ranks that end after the process that launched them
    for name, tree in trees.items():
        assert tree.pid is not None
        found[name] = Ended(tree.exitcode, files[name].read_text(), processes_of(tree.pid))
        with suppress(ProcessLookupError):
            os.killpg(tree.pid, signal.SIGKILL)
        tree.join()
    return found


def processes_of(session: int) -> int:
    """Return how many processes of a session are alive."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, found = path.read_text().rpartition(")")[2].split()[:4]
            count += int(found) == session and state not in "ZX"
    return count


MORE = (
    *("a killed replica", "rank 0 stopped", "a log of rank 0 only", "a replica that is told to terminate"),
    "a rank killed beside another microbatch",
)


@pytest.mark.parametrize("name", swept(CASES, *MORE))
def test_all_ranks_end_and_the_last_line_says_why(name: str, ended: dict[str, Ended]) -> None:
    """vision: rank 0; language: ranks 1-2 as stages; or three replicas of everything: ranks 0-2."""
    case, tree = CASES[name], ended[name]
    assert "the fault fired" in tree.printed, tree.printed
    assert tree.code == case.code, tree.printed
    assert tree.left == 0
    last = tree.printed.strip().rpartition("\n")[2]
    assert re.search(case.says, last), f"{last}\n\n{tree.printed}"


@pytest.mark.parametrize("name", ["an error in a step", "an error in a callback"])
def test_one_error_is_printed_once(name: str, ended: dict[str, Ended]) -> None:
    """vision: rank 0; language: ranks 1-2 as stages."""
    assert ended[name].printed.count("ValueError: boom\n") <= 3, ended[name].printed
    assert ended[name].printed.count("Traceback") == 2, ended[name].printed  # of the rank, and where fit was called
