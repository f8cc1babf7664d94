"""Starting the processes of a job: Lightning's own launchers, with the configuration checked first.

A wrong configuration must be one error in one process, not one per rank and not a hang; so both launchers
call ``strategy.validate_before_launch(module)`` before any process exists. In each rank's process the trainer's
function runs as ``strategy.run_guarded``, which watches the other ranks and the processes that were started. It takes
the place of Lightning's observer of child processes, which kills the process that launched them before it can say why.
Everything else is Lightning's: torchrun, SLURM, MPI and Ray create the processes themselves, and then nothing is
started here.

Lightning's launchers are private classes. They are used in this file only, and `check_lightning` refuses a
Lightning whose launchers no longer look as they did when this was written.

After a `fit` in spawned or forked processes, each node's local rank 0 sends ``lightning_module.state_dict()`` to the
process that called `fit`, once `Strategy.teardown` is over. So `teardown` gathers the weights of all stages into the
module, on the local rank 0 of every node. (`on_train_end` is not called when `fit` has nothing to do.) Where ranks keep
their shards instead, no weights are sent, and the module of the process that called `fit` says so when it is used.

Lightning's tuners: how a run ends that a `Tuner` began, and what its ranks send back of what they have found.

A `Tuner` ends its run by an exception, and Lightning handles that in the process that called `fit`. Where ranks are
processes of their own, each ends its run itself, and what was found goes back to the callback and the module of the
process that waits for them. A learning rate is searched on any layout. Batch sizes are searched by one process alone,
as with Lightning's own distributed strategies.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from difflib import get_close_matches
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal, Protocol, cast

import lightning
import lightning.fabric.utilities.distributed as fabric_distributed
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.tuner import lr_finder
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException
from lightning.pytorch.utilities.parsing import lightning_hasattr, lightning_setattr
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from typing_extensions import override

from lightning_mm5d.checkpoint.full_file import FullFileIO
from lightning_mm5d.config.errors import ConfigError, RankLostError, did_you_mean, private
from lightning_mm5d.monitor.board import ended_how, state_of
from lightning_mm5d.monitor.monitor import ERRORS
from lightning_mm5d.monitor.verdict import LAUNCHED_BY
from lightning_mm5d.sharded.removable import put
from lightning_mm5d.storage.replacement import resolve
from lightning_mm5d.trainer.kept_shards import has_kept_shards, left_elsewhere
from lightning_mm5d.trainer.process_group import free_port
from lightning_mm5d.trainer.validation import check_package


def check_tuners(callbacks: Sequence[Callback], world_size: int) -> None:
    """Refuse to search a batch size on several ranks, of which one alone may run out of memory.

    Raises:
        ConfigError: there is a `BatchSizeFinder`.
    """
    if world_size > 1 and any(isinstance(callback, BatchSizeFinder) for callback in callbacks):
        rule = f"Batch sizes are searched on one process, and there are {world_size} ranks"
        fix = "Leave it out, and ask `mm5d plan` how much memory a batch takes on each rank"
        raise ConfigError("callbacks", BatchSizeFinder.__name__, rule, fix)


def end_tuning(trainer: Trainer) -> None:
    """End a run that a tuner has left, as Lightning does in the process that called `fit`; collective."""
    private(call, "_call_teardown_hook")(trainer)
    private(trainer, "_teardown")()
    trainer.state.status, trainer.state.stage = TrainerStatus.FINISHED, None


def found_by_tuner(trainer: Trainer) -> Any:
    """Return what the callback of a `Tuner` has found, None without one."""
    callback = _callback_of_tuner(trainer)
    if callback is None:
        return None
    return callback.optimal_lr if isinstance(callback, LearningRateFinder) else callback.optimal_batch_size


def take_found(trainer: Trainer, tuner_result: Any) -> None:
    """Give the callback of a `Tuner`, and the module of this process, what was found in another one."""
    module, callback = trainer.lightning_module, _callback_of_tuner(trainer)
    if isinstance(callback, LearningRateFinder):
        callback.optimal_lr = tuner_result
        rate = tuner_result.suggestion() if private(callback, "_update_attr") else None
        if rate is not None:
            chosen = private(callback, "_attr_name")
            lightning_setattr(module, private(lr_finder, "_determine_lr_attr_name")(module, chosen), rate)
    elif callback is not None:
        callback.optimal_batch_size = tuner_result
        if lightning_hasattr(module, private(callback, "_batch_arg_name")):
            lightning_setattr(module, private(callback, "_batch_arg_name"), tuner_result)


def _callback_of_tuner(trainer: Trainer) -> LearningRateFinder | BatchSizeFinder | None:
    for callback in vars(trainer)["callbacks"]:
        if isinstance(callback, LearningRateFinder | BatchSizeFinder) and private(callback, "_early_exit"):
            return callback
    return None


def _moved(what: str) -> ImportError:
    return ImportError(
        f"lightning {lightning.__version__} has no {what} any more. lightning_mm5d builds on it; "
        "install a version within lightning>=2.6,<2.7"
    )


try:
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
except ImportError as error:
    raise _moved("_MultiProcessingLauncher and _SubprocessScriptLauncher") from error

INTERRUPTED_S = 20.0
"""how long ranks may take to end by an interrupt"""
_KEPT_SHARDS, _TUNER_RESULT = "mm5d_kept_shards", "mm5d_found_by_tuner"
_RELIED_ON: tuple[tuple[type, str, tuple[str, ...]], ...] = (
    (_SubprocessScriptLauncher, "__init__", ("self", "cluster_environment", "num_processes", "num_nodes")),
    (_SubprocessScriptLauncher, "launch", ("self", "function", "args", "trainer", "kwargs")),
    (_SubprocessScriptLauncher, "_call_children_scripts", ("self",)),
    (_MultiProcessingLauncher, "__init__", ("self", "strategy", "start_method")),
    (_MultiProcessingLauncher, "launch", ("self", "function", "args", "trainer", "kwargs")),
    (_MultiProcessingLauncher, "_collect_rank_zero_results", ("self", "trainer", "results")),
    (_MultiProcessingLauncher, "get_extra_results", ("self", "trainer")),
    (_MultiProcessingLauncher, "update_main_process_results", ("self", "trainer", "extra")),
    (_MultiProcessingLauncher, "_recover_results_in_main_process", ("self", "worker_output", "trainer")),
)


class LaunchedStrategy(Protocol):
    """The members of a strategy that a launcher uses, beside those of Lightning's `ParallelStrategy`."""

    cluster_environment: ClusterEnvironment | None
    num_nodes: int

    @property
    def node_rank(self) -> int: ...

    @property
    def num_processes(self) -> int: ...

    @property
    def lightning_module(self) -> LightningModule | None: ...

    def validate_before_launch(self, module: LightningModule, *data: Any, callbacks: Sequence[Any] = ()) -> Any:
        """Raises `ConfigError` when the module cannot run under this configuration."""
        ...

    def build_in_full(self, module: LightningModule) -> None:
        """Give `module` the tensors that ranks have built, in full, for weights that come back from them."""
        ...

    def run_guarded(
        self,
        function: Callable[..., Any],
        trainer: Trainer | None,
        reports: Connection | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return ``function(*args, **kwargs)``; an error that came of another rank's names that one."""
        ...


Launcher = _SubprocessScriptLauncher | _MultiProcessingLauncher


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the same script once more for each further rank, or nothing where processes exist already."""

    def __init__(self, strategy: LaunchedStrategy) -> None:
        assert strategy.cluster_environment is not None
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        """Whether no script must be started again: there is one rank."""
        return self.num_processes * self.num_nodes == 1

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        # before each rank looks for its device among those of the trainer
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        _validate(self._strategy, trainer, args[1:])
        if not self.cluster_environment.creates_processes_externally:  # else ranks meet first, and compare
            check_checkpoint(self._strategy, trainer, function, *args, **kwargs)
            if self.num_processes > 1 and sys.argv[:1] in ([""], ["-"], ["-c"]):
                raise _without_script("this Python reads a text or a pipe")
        _choose_port(self.cluster_environment)
        # a rank alone gets no variables either, by which a later trainer would take itself for one of several
        if not self.is_interactive_compatible and not self.cluster_environment.creates_processes_externally:
            rank = self._strategy.node_rank * self.num_processes
            os.environ[LAUNCHED_BY] = f"{os.getpid()} {rank}"  # for the children alone
            try:
                self._call_children_scripts()
            finally:
                del os.environ[LAUNCHED_BY]
        private(fabric_distributed, "_set_num_threads_if_needed")(num_processes=self.num_processes)
        return self._strategy.run_guarded(function, trainer, None, *args, **kwargs)


class ProcessLauncher(_MultiProcessingLauncher):
    """Spawns or forks all ranks; the calling process only waits, and gets the weights back, or the first cause."""

    def __init__(self, strategy: LaunchedStrategy, start_method: Literal["spawn", "fork"]) -> None:
        super().__init__(cast(ParallelStrategy, strategy), start_method=start_method)

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        strategy = cast(LaunchedStrategy, self._strategy)
        _validate(strategy, trainer, args[1:])
        check_checkpoint(strategy, trainer, function, *args, **kwargs)
        assert strategy.cluster_environment is not None
        _end_run_of_one_rank(strategy.num_nodes)
        _choose_port(strategy.cluster_environment)
        with Reports(self) as reports:
            guarded = partial(_run, strategy, function, trainer, reports.writer)
            try:
                return super().launch(guarded, *args, trainer=trainer, **kwargs)
            except KeyboardInterrupt:
                reports.end_ranks()
                raise
            except ProcessExitedException as error:
                first = strategy.node_rank * strategy.num_processes
                how = f"rank {first + error.error_index} failed first: {ended_how(error.exit_code)}"
                raise reports.cause() or RankLostError(how) from None
            except ProcessRaisedException:
                cause = reports.cause()
                if cause is None:
                    raise
                raise cause from None

    @override
    def _recover_results_in_main_process(self, worker_output: Any, trainer: Trainer) -> None:
        if worker_output.weights_path is not None:
            cast(LaunchedStrategy, self._strategy).build_in_full(trainer.lightning_module)
        super()._recover_results_in_main_process(worker_output, trainer)

    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        with ExitStack() as stack:
            if has_kept_shards(trainer.lightning_module):  # nothing of the weights goes back
                stack.callback(put(trainer.lightning_module, "state_dict", dict))
            return super()._collect_rank_zero_results(trainer, results)

    @override
    def get_extra_results(self, trainer: Trainer) -> dict[str, Any]:
        extra = {_KEPT_SHARDS: has_kept_shards(trainer.lightning_module), _TUNER_RESULT: found_by_tuner(trainer)}
        return {**super().get_extra_results(trainer), **extra}

    @override
    def update_main_process_results(self, trainer: Trainer, extra: dict[str, Any]) -> None:
        if extra.pop(_KEPT_SHARDS):
            left_elsewhere(trainer.lightning_module)
        if (tuner_result := extra.pop(_TUNER_RESULT)) is not None:
            take_found(trainer, tuner_result)
            self._already_fit &= False  # a tuner leaves everything as it was
        super().update_main_process_results(trainer, extra)


class Reports:
    """What spawned or forked ranks report of a failure to the process that waits for them.

    A thread ends ranks whose processes are stopped, for which torch would wait for half a minute.

    Args:
        launcher: that started the ranks.

    Attributes:
        writer: the end of a pipe that the ranks write to.
    """

    def __init__(self, launcher: ProcessLauncher) -> None:
        context = multiprocessing.get_context(private(launcher, "_start_method"))
        self._launcher = launcher
        self._reader, self.writer = context.Pipe(duplex=False)
        self._first: tuple[str, str] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="mm5d-reports", daemon=True)

    def __enter__(self) -> Reports:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        self._reader.close()
        self.writer.close()

    def end_ranks(self) -> None:
        """Wait for ranks that end by an interrupt as this process does; kill those that it has not come to."""
        end = time.monotonic() + INTERRUPTED_S
        for process in self._launcher.procs:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
            process.join()

    def cause(self) -> BaseException | None:
        """Return the first cause that a rank has reported, as an error; print it where the error has no text."""
        self._read()
        if self._first is None:
            return None
        kind, line = self._first
        if kind in ERRORS:
            return ERRORS[kind](line)
        print(f"{SIGTERMException.__name__}: {line}", file=sys.stderr)
        return SIGTERMException()

    def _listen(self) -> None:
        while not self._closing.wait(0.5):
            self._read()
            if self._first is not None:
                for process in self._launcher.procs:
                    if process.pid is not None and state_of(process.pid) == "stopped":
                        process.kill()

    def _read(self) -> None:
        if self._first is None and self._reader.poll():
            kind, line = json.loads(self._reader.recv_bytes())
            self._first = kind, line


def make_launcher(strategy: LaunchedStrategy, *, start_method: Literal["popen", "spawn", "fork"]) -> Launcher:
    """Return the launcher for a strategy whose cluster environment is known.

    Where the cluster creates the processes, `start_method` does not apply: the launcher only validates, in every
    process.

    Raises:
        ConfigError: unknown start method, or no script to be run once more for each rank.
        ImportError: Lightning's launchers are not the ones this was written for.
    """
    check_lightning()
    if start_method not in ("popen", "spawn", "fork"):
        rule = "Processes are started by 'popen', 'spawn' or 'fork'"
        raise ConfigError("launch.start_method", start_method, rule, "Use 'popen' in a script, 'fork' in a notebook")
    assert strategy.cluster_environment is not None
    if start_method == "popen" or strategy.cluster_environment.creates_processes_externally:
        launcher = ScriptLauncher(strategy)
        is_interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
        is_started = strategy.cluster_environment.creates_processes_externally  # which Lightning refuses by itself
        if is_interactive and not is_started and not launcher.is_interactive_compatible:
            raise _without_script("this Python is interactive")
        return launcher
    return ProcessLauncher(strategy, start_method)


def _without_script(why: str) -> ConfigError:
    """The error where there is no script to be run once more."""
    fix = "Write a script, or use 'fork' (strategy='mm5d_notebook' for replicas)"
    return ConfigError("launch.start_method", "popen", f"It runs a script once more for each rank, and {why}", fix)


def cpu_threads(local_world_size: int) -> int:
    """Return the threads that one rank computes with, when `local_world_size` ranks share this machine.

    ``OMP_NUM_THREADS`` wins where it is set (its first entry, if it is a list for nested regions); else the
    cores that this process may run on are divided, at least one each.
    """
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if first.isdecimal() and int(first) > 0:
        return int(first)
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, available // local_world_size)


def check_lightning() -> None:
    """Raise ImportError, with the installed version, where a name or signature that this file relies on has changed."""
    for cls, method, parameters in _RELIED_ON:
        function = getattr(cls, method, None)
        if function is None or tuple(inspect.signature(function).parameters) != parameters:
            raise _moved(f"{cls.__name__}.{method}({', '.join(parameters[1:])})")


def _run(
    strategy: LaunchedStrategy,
    function: Callable[..., Any],
    trainer: Trainer | None,
    reports: Connection,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """What a spawned or forked rank runs."""
    try:
        return strategy.run_guarded(function, trainer, reports, *args, **kwargs)
    except _TunerExitException:
        assert trainer is not None
        end_tuning(trainer)


def _validate(strategy: LaunchedStrategy, trainer: Trainer | None, data: tuple[Any, ...]) -> None:
    module = strategy.lightning_module
    assert module is not None, "Lightning connects the module before it launches"
    if trainer is not None:
        check_package("callbacks", vars(trainer)["callbacks"])
        check_tuners(vars(trainer)["callbacks"], trainer.world_size)
    try:
        strategy.validate_before_launch(module, *data, callbacks=() if trainer is None else vars(trainer)["callbacks"])
    except ConfigError as error:
        if "TORCHELASTIC_RUN_ID" in os.environ and error.field.startswith("Trainer("):
            error.add_note("ElasticStrategy in place of MultimodalStrategy finds a layout for other numbers of ranks")
        raise


def check_checkpoint(
    strategy: Any, trainer: Trainer | None, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    """Refuse a checkpoint that is not there, where this process alone can know that.

    Words of Lightning and addresses are looked up later. So are checkpoints that a plugin reads, that `prepare_data`
    may fetch, or that another node may have.

    Args:
        strategy: of the trainer.
        trainer: whose method is called.
        function: that method.
        *args: its arguments.
        **kwargs: the same.

    Raises:
        ConfigError: `ckpt_path` names nothing.
    """
    path = inspect.signature(function).bind(*args, **kwargs).arguments.get("ckpt_path")
    words = "best" if path is None else os.fspath(path)
    if words.partition(":")[0] in ("best", "last", "hpc", "registry") or "://" in words or strategy.num_nodes > 1:
        return
    hooks = [type(owner).prepare_data for owner in (strategy.lightning_module, trainer and trainer.datamodule) if owner]  # type: ignore[attr-defined]
    is_own = all(hook.__module__.partition(".")[0] in ("lightning", "pytorch_lightning") for hook in hooks)
    if type(strategy.checkpoint_io) is not FullFileIO or not is_own:
        return
    place = resolve(os.path.expanduser(words))
    if not os.path.lexists(place):
        beside = list[str]()
        with suppress(OSError):
            beside = os.listdir(place.parent)
        near = get_close_matches(place.name, beside, cutoff=0.0)
        fix = did_you_mean(place.name, near) if near else f"Name one that exists; {str(place.parent)!r} has none"
        raise ConfigError("ckpt_path", words, "There is no such checkpoint", fix)


def _end_run_of_one_rank(num_nodes: int) -> None:
    """End the group of an earlier run in this process: forked ranks would take it, and its store, for their own."""
    if dist.is_initialized() and dist.get_world_size() == 1:
        dist.destroy_process_group()
        if num_nodes == 1:
            os.environ.pop("MASTER_PORT", None)  # of that store


def _choose_port(environment: ClusterEnvironment) -> None:
    """Choose the port at which the ranks of this machine meet, unless the user or who started this process has."""
    if not environment.creates_processes_externally and "STANDALONE_PORT" not in os.environ:
        os.environ.setdefault("MASTER_PORT", str(free_port()))
