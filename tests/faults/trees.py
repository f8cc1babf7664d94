"""Runs `faulty_job` as a tree of four processes, and records what it ended with.

The launching process is Lightning's ``popen`` launcher. In most cases the processes that it starts are forked from it
instead of started anew, which leaves out the imports and nothing else: they are its children, run the script from its
top with the environment and the pipes that the launcher gave them, and end as an interpreter ends. Cases with
``start="script"`` start as a user's script does.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

JOB = Path(__file__).with_name("faulty_job.py")
LIMIT_S = 75.0
SET_BY_OTHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "NODE_RANK", "MASTER_", "TORCHELASTIC", "SLURM_", "PL_")


@dataclass(frozen=True, kw_only=True)
class TreeCase:
    """One fault, and what its run should end with.

    Attributes:
        name: of the case, within its class.
        spec: what `faulty_job` is told.
        blamed: ranks of which the last line may name any; empty where the run should succeed.
        words: regular expression that the last line contains too.
        codes: exit codes, instead of any but 0, of a run that ends without blame and without a traceback.
        equal: whether a run that succeeds must have the losses of one process.
        either: whether success with the losses of one process is as good as the error.
        fires: whether the fault leaves a marker; False where there is nothing to fire.
        start: ``fork`` or ``script``.
        within: seconds from the fault to the end of the last rank.
    """

    name: str
    spec: dict[str, Any]
    blamed: tuple[int, ...] = ()
    words: str = ""
    codes: tuple[int, ...] = ()
    equal: bool = False
    either: bool = False
    fires: bool = True
    start: str = "fork"
    within: float = 30.0


@dataclass
class Record:
    """What one run ended with."""

    fired: bool
    ended: bool
    code: int
    seconds: float
    lines: int
    last: str
    printed: str
    done: dict[int, list[float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.problems


def run(case: TreeCase, *, limit: float = LIMIT_S) -> Record:
    """Run a case once and judge it."""
    folder = Path(tempfile.mkdtemp(prefix="mm5d-fault-"))
    try:
        record = _run(case, folder, limit if case.start == "fork" else 2 * limit)
        _judge(case, record)
        return record
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(case: TreeCase, folder: Path, limit: float) -> Record:
    arguments = [str(folder), json.dumps(case.spec)]
    start = time.time()
    with (folder / "printed").open("w") as output:
        launching = _started(case.start, arguments, output)
        waited, code = 0, None
        alive: set[int] = {launching}
        end = time.monotonic() + limit
        while (alive or code is None) and time.monotonic() < end:  # it may not lead a session yet
            time.sleep(0.02)
            waited, status = os.waitpid(launching, os.WNOHANG) if code is None else (0, 0)
            code = os.waitstatus_to_exitcode(status) if waited else code
            alive = _alive(launching)
        ended_at, ended = time.time(), not alive
        for pid in _alive(launching):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if code is None:
            code = os.waitstatus_to_exitcode(os.waitpid(launching, 0)[1])
    fired = [float(path.read_text()) for path in folder.glob("fired-?")]
    printed = (folder / "printed").read_text(errors="replace")
    lines = [line for line in re.split(r"[\r\n]+", printed) if line.strip()]
    done = {int(path.name[-1]): json.loads(path.read_text()) for path in folder.glob("done-?")}
    return Record(
        fired=bool(fired),
        ended=ended,
        code=code,
        seconds=ended_at - max(fired, default=start),
        lines=len(lines),
        last=lines[-1] if lines else "",
        printed=printed,
        done=done,
    )


def _judge(case: TreeCase, record: Record) -> None:
    problems = record.problems
    if case.fires and not record.fired:
        problems.append("its fault did not fire")
    if not record.ended:
        problems.append("processes were left at the limit")
    elif record.seconds > case.within:
        problems.append(f"the last rank ended after {record.seconds:.1f} s")
    succeeded = record.code == 0 and sorted(record.done) == [0, 1, 2, 3]
    if case.either and succeeded:
        problems += _compared(case, record)
        return
    if case.codes:
        if record.code not in case.codes:
            problems.append(f"exit code {record.code}")
        if "Traceback" in record.printed:
            problems.append("there is a traceback")
        if not re.search(case.words, record.printed):
            problems.append(f"no line has {case.words!r}")
    elif case.blamed:
        if record.code == 0:
            problems.append("exit code 0")
        # "[rank0]: " before the line of a traceback blames nobody, unless all ranks raise the same
        line = record.last if len(case.blamed) == 4 else re.sub(r"^\[rank\d\]: ", "", record.last)
        if not any(re.search(rf"\brank ?{rank}\b", line) for rank in case.blamed):
            problems.append(f"the last line names none of the ranks {case.blamed}")
        if not re.search(case.words, record.last):
            problems.append(f"the last line has no {case.words!r}")
    elif not succeeded:
        problems.append(f"exit code {record.code}, ranks {sorted(record.done)} succeeded")
    elif case.equal:
        problems += _compared(case, record)


def _compared(case: TreeCase, record: Record) -> list[str]:
    """What is wrong with the losses, beside those of one process."""
    alone = _run(
        TreeCase(name=case.name, spec={**case.spec, "one process": True, "rank": 0}),
        Path(tempfile.mkdtemp(prefix="mm5d-fault-")),
        LIMIT_S,
    )
    if alone.code:
        return [f"one process fails: {alone.last}"]
    expected = alone.done[0]
    for rank, losses in record.done.items():
        same = len(losses) == len(expected) and all(
            a == b or (a != a and b != b) or abs(a - b) < 1e-9 for a, b in zip(losses, expected, strict=True)
        )
        if not same:
            return [f"rank {rank} has the losses {losses}, one process {expected}"]
    return []


def _alive(session: int) -> set[int]:
    """Processes of a session, without those that have ended and not been waited for."""
    found = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.add(int(entry))
    return found


def _environment() -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(SET_BY_OTHERS)}
    paths = [str(JOB.parents[2]), os.environ.get("PYTHONPATH", "")]
    return clean | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def _started(start: str, arguments: Sequence[str], output: Any) -> int:
    """Start the launching process in a session of its own; return its process id."""
    if start == "script":
        command = [sys.executable, str(JOB), *arguments]
        process = subprocess.Popen(
            command, env=_environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        process.returncode = 0  # it is waited for by its id
        return process.pid
    _import_all()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for number in (1, 2):
            os.dup2(output.fileno(), number)
        _as_script([str(JOB), *arguments], _environment())
    return pid


def _import_all() -> None:
    """Import what the script imports, for the processes that are forked."""
    import torch

    torch.set_num_threads(1)
    if "faulty_job_imported" not in _DONE:
        runpy.run_path(str(JOB), run_name="imported")
        _DONE.add("faulty_job_imported")


_DONE: set[str] = set()


class _Forked(subprocess.Popen):
    """`Popen` of this script that forks instead of starting an interpreter."""

    def _execute_child(self, args: Any, *rest: Any) -> None:  # type: ignore[override]
        named = dict(zip(_EXECUTE_CHILD, rest, strict=False))
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            for number, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
                if named[name] != -1:
                    os.dup2(named[name], number)
            for name in ("p2cwrite", "c2pread", "errread"):
                if named[name] != -1:
                    os.close(named[name])
            if named["start_new_session"]:
                os.setsid()
            _as_script(list(args)[1:], named["env"] or dict(os.environ))
        for name in ("p2cread", "c2pwrite", "errwrite"):
            if named[name] not in (-1, getattr(self, "_devnull", None)):
                os.close(named[name])
        self._child_created = True


_EXECUTE_CHILD = (
    *("executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo", "creationflags", "shell"),
    *("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite", "restore_signals"),
    *("gid", "gids", "uid", "umask", "start_new_session", "process_group"),
)


def _as_script(argv: list[str], environment: dict[str, str]) -> None:
    """Run the script in this process, which was just forked, and end as an interpreter does."""
    code = 1
    try:
        for number in range(1, signal.NSIG):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        os.environ.clear()
        os.environ.update(environment)
        atexit._clear()
        sys.argv = argv
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        subprocess.Popen = _Forked  # type: ignore[misc]
        import warnings

        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        code = _result(argv)
        __import__("threading")._shutdown()
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _result(argv: list[str]) -> int:
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0
