"""The hooks of Lightning that start processes, connect them and give each its own weights, whatever these then compute.

The module is built in contexts of `trainer.construction`, without memory where a feature can make its weights later. In
`setup`, on all ranks: (1) tensors with memory get the values of rank 0; (2) those without are made, cut to this rank's
shards; (3) weights in files and state dicts take their place. A module that kept its shards after a run has phase 3
alone.
"""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from subprocess import Popen
from typing import Any, Literal, Self, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.io import wrapper
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from typing_extensions import override
from wrapt import register_post_import_hook

from lightning_mm5d.checkpoint.full_file import FullFileIO
from lightning_mm5d.checkpoint.module_state import equalize, is_partial, load_local
from lightning_mm5d.config.errors import ConfigError, other_package, private
from lightning_mm5d.config.features import converted
from lightning_mm5d.data.random_state import CPU, kept_random_state, unpack_states
from lightning_mm5d.data.replica_view import is_shown, seen_replica
from lightning_mm5d.data_parallel.main_parameters import convert, give_main
from lightning_mm5d.engine.agreement import Agreement
from lightning_mm5d.engine.codec import broadcast_tree
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.collectives import message_device
from lightning_mm5d.sharded.removable import meanwhile
from lightning_mm5d.storage.files import TensorSource
from lightning_mm5d.trainer.construction import has_memory, is_configured, made_construction
from lightning_mm5d.trainer.guard import Guard
from lightning_mm5d.trainer.kept_shards import has_kept_shards, release_shards
from lightning_mm5d.trainer.launch import ProcessLauncher, ScriptLauncher, cpu_threads, make_launcher
from lightning_mm5d.trainer.process_group import (
    agreed_seed,
    check_environment,
    connect,
    decided,
    random_states_agree,
    round_store,
)
from lightning_mm5d.trainer.session import Session
from lightning_mm5d.trainer.statements import configuration
from lightning_mm5d.trainer.validation import is_of_other_package, lost_weights, main_dtype


def _known_to_other_package(strategies: Any) -> None:
    strategies.Strategy.register(ProcessStrategy)


T = TypeVar("T")


def required(value: T | None, method: str, rule: str, fix: str) -> T:
    """Return `value`, which a method of the strategy needs.

    Raises:
        ConfigError: it is None, because the method is called at another time than it is for.
    """
    if value is None:
        raise ConfigError(f"strategy.{method}", None, rule, fix)
    return value


class ProcessStrategy(ParallelStrategy, ABC):
    """A strategy of one process for each device, over torch.distributed, which builds modules and shares out weights.

    Args:
        accelerator: set by the trainer.
        parallel_devices: set by the trainer.
        cluster_environment: set by the trainer.
        checkpoint_io: set by the trainer.
        precision_plugin: set by the trainer.
        start_method: how Lightning starts processes on one machine.
        backend: of torch.distributed; chosen by device where None.
        timeout: of every operation between ranks.
        watchdog: how long one call may wait for other ranks before all give up.
    """

    @classmethod
    def from_config(cls, config: str | os.PathLike[str] | Mapping[str, Any], **arguments: Any) -> Self:
        """Return the strategy that a configuration of ColossalAI, Cornstarch or MindFormers asks for.

        Warns of knobs that have no equal and change time or memory alone, and of what the Trainer or the model says.

        Args:
            config: a file (``.py``, which is read and not run; YAML or JSON), or what it holds.
            arguments: of the strategy, in place of converted ones.

        Raises:
            ConfigError: a knob does not exist, cannot work, or has no equal and results depend on it.
        """
        return cls(**converted(config, arguments))

    def __init__(
        self,
        accelerator: pl.accelerators.Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
        *,
        start_method: Literal["popen", "spawn", "fork"],
        backend: str | None,
        timeout: timedelta,
        watchdog: timedelta,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self.num_nodes = 1
        self._file_io = checkpoint_io
        self._start_method, self._process_group_backend, self._timeout = start_method, backend, timeout
        self._watchdog = watchdog
        self._guard: Guard | None = None
        self._refused: ConfigError | None = None
        self._own_ranks: tuple[int, int] | None = None
        self._session: Session | None = None
        self._seed = 0
        self._stages: tuple[str, ...] = ()  # that this rank runs
        self._agreement: Agreement | None = None
        self._construction = made_construction()
        self._is_building = False
        self._builds = False  # between `setup_environment` and `setup`
        self._loads: list[tuple[TensorSource, bool]] = []
        self.main_params: str | None = None

    @abstractmethod
    def validate_before_launch(
        self, module: pl.LightningModule, *data: Any, callbacks: Sequence[pl.Callback] = ()
    ) -> Any:
        """Raise `ConfigError` when the module cannot run under this configuration."""

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning puts in samplers and syncs logs; it searches batch sizes only where this is false.

        One process is searched, which Lightning asks before a session. Within one it gets a sampler like any number of
        replicas: the order of an epoch is the same for all of them, so that each can go on with what another has left.
        """
        return self.world_size > 1 or self._session is not None

    @property
    def num_processes(self) -> int:
        """Ranks on one node."""
        return len(self.parallel_devices) if self.parallel_devices else 1

    @property
    def own_rank(self) -> int:
        """The rank of this process, whatever data is read for."""
        return self._own_ranks[0] if self._own_ranks is not None and is_shown() else super().global_rank

    @property
    def own_world_size(self) -> int:
        """How many processes there are, whatever data is read for."""
        return self._own_ranks[1] if self._own_ranks is not None and is_shown() else super().world_size

    @property
    @override
    def global_rank(self) -> int:
        """`own_rank`; while dataloaders are made and read, the replica that this is for."""
        seen = seen_replica()
        return self.own_rank if seen is None else seen[0]

    @property
    @override
    def world_size(self) -> int:
        """`own_world_size`; while dataloaders are made and read, how many replicas there are."""
        seen = seen_replica()
        return self.own_world_size if seen is None else seen[1]

    @property
    @override
    def is_global_zero(self) -> bool:
        """Whether this is rank 0; in a step, whether that of the first replica ends here."""
        writes = None if self._session is None else self._session.writes()
        return self.own_rank == 0 if writes is None else writes

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """What writes and reads full checkpoints: verified files, unless the trainer was given a plugin."""
        if self._file_io is None:
            self._file_io = FullFileIO()
        elif isinstance(self._file_io, private(wrapper, "_WrappingCheckpointIO")):
            self._file_io.checkpoint_io = FullFileIO()  # where the innermost wrapper has none, as its setter knows
        return self._file_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._file_io = io

    @override
    def _configure_launcher(self) -> None:
        self.raise_refused()
        if is_of_other_package(self.accelerator):  # in the constructor of the trainer, which made the accelerator
            raise other_package("trainer", f"the one that has made {type(self.accelerator).__module__}")
        if private(self, "_layer_sync") is not None:
            rule = "Batch norms are not converted: their statistics are those of a microbatch of one replica"
            fix = "Leave it unset; where every rank is a replica, nn.SyncBatchNorm.convert_sync_batchnorm converts them"
            raise ConfigError("Trainer(sync_batchnorm=...)", True, rule, fix)
        self._launcher = make_launcher(self, start_method=self._start_method)

    def refuse(self, error: ConfigError) -> None:
        """Raise what the constructor has found, or keep it for the trainer's where jsonargparse builds the strategy.

        A parser tells an error in the midst of all types that it has tried, and the values of all fields.
        """
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_globals.get("__name__", "").partition(".")[0] == "jsonargparse":
                self._refused = error
                return
            frame = frame.f_back
        raise error

    def raise_refused(self) -> None:
        """Raise the error that `refuse` has kept, if any."""
        if self._refused is not None:
            raise self._refused

    def run_guarded(
        self,
        function: Callable[..., Any],
        trainer: pl.Trainer | None,
        reports: Connection | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return ``function(*args, **kwargs)``; an error that came of another rank's names that one.

        Args:
            function: of the trainer.
            trainer: that runs.
            reports: where the first cause goes, for a process that only waits for the ranks.
            args: of `function`.
            kwargs: of `function`.
        """
        self.set_world_ranks()  # a launcher may have made this process after the strategy
        if trainer is None or self.world_size == 1:
            return function(*args, **kwargs)
        self._guard = Guard(
            trainer,
            self.global_rank,
            self.world_size,
            self._watchdog.total_seconds(),
            traffic=self._traffic,
            wake=self._stop_waiting,
            interrupt=self._interrupt,
            children=self._children,
            reports=reports,
        )
        with self._guard:
            return function(*args, **kwargs)

    def _traffic(self) -> dict[str, Any]:
        traffic = self._session.traffic() if self._session is not None else {"action": "", "unsent": 0, "due": 0}
        return {**traffic, "stages": self._stages}

    def _stop_waiting(self, why: str) -> None:
        if self._session is not None:
            self._session.abort(why)

    def _interrupt(self) -> None:
        if self._session is not None:
            self._session.turns.interrupt()

    def _children(self) -> Mapping[int, Popen[Any]]:
        """Processes of the ranks that this one started."""
        started = self._launcher.procs if isinstance(self._launcher, ScriptLauncher) else []
        return dict(enumerate(started, self.node_rank * self.num_processes + 1))

    def set_world_ranks(self) -> None:
        """Tell the cluster environment ranks and sizes; one that starts the processes itself keeps its own.

        Lightning calls it before it makes a launcher, so that a layout can be checked before any process starts.
        """
        assert self.cluster_environment is not None
        if type(self.cluster_environment) is LightningEnvironment:
            check_environment(os.environ, num_processes=self.num_processes, num_nodes=self.num_nodes)
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]
        self._own_ranks = self.global_rank, self.world_size

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.cluster_environment is not None
        self.set_world_ranks()
        if self.root_device.type == "cpu":
            # threads of OpenMP do not live on in a fork, which would wait for them forever
            is_forked = isinstance(self._launcher, ProcessLauncher) and self._launcher.is_interactive_compatible
            torch.set_num_threads(1 if is_forked else cpu_threads(self.num_processes))
        environment, timeout = self.cluster_environment, self._timeout
        store = self.new_store()
        if self._guard is not None:
            self._guard.monitor.connect(dist.PrefixStore("monitor", self.new_store()))
        self._agreement = Agreement(store, rank=self.global_rank, world_size=self.world_size, timeout=timeout)
        self._agreement.check("configuration", self._configuration())
        connect(environment, store, self._process_group_backend, timeout, self.root_device)
        if not random_states_agree(self.root_device):  # else a second run goes on, as on one process
            reset_seed()
        self._seed = agreed_seed(self.root_device)
        self._builds = True

    def take_random_state(self, state: Tensor) -> None:
        """Give all ranks the random state that rank 0 gives; collective.

        Args:
            state: as `packed_state` returns it.
        """
        state = state.to(message_device(self.root_device))
        dist.broadcast(state, 0)
        unpack_states(state, CPU)

    def new_store(self) -> dist.Store:
        """Return a connection of its own to the store that the ranks of this job meet at, as `round_store` says."""
        assert self.cluster_environment is not None
        return round_store(self.cluster_environment, self._timeout)

    def _configuration(self) -> dict[str, Any]:
        """Return what must be equal on all ranks before they connect."""
        module = self.lightning_module
        assert module is not None, "Lightning connects the module before it sets up the environment"
        sizes = {"number of ranks": self.world_size, "ranks per node": self.num_processes}
        return {**sizes, "device": self.root_device.type, **configuration(self, module.trainer, module)}

    @override
    def on_train_end(self) -> None:
        assert self._session is not None
        self._session.turns.begin_batch()  # for a SIGTERM in the last batch

    # --- how a rank comes to its own weights ---

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Say how a module is built, in `configure_model` and with `empty_init`; elsewhere build it as usual."""
        if not (empty_init or self._builds) or self._is_building:
            with super().tensor_init_context(empty_init=False if self._is_building else empty_init):
                yield
            return
        building = self._construction.building()
        with meanwhile(self, _is_building=True), building, super().tensor_init_context(empty_init=False):
            yield

    def load_in_setup(self, source: TensorSource, *, strict: bool) -> None:
        """Load a source of full tensors once each rank knows what it holds."""
        self._loads.append((source, strict))

    def must_load_in_setup(self, module: pl.LightningModule) -> bool:
        """Whether tensors of `module` have no memory yet, or are shards, so that nothing can be loaded into them."""
        return not has_memory(module) or is_partial(module) or has_kept_shards(module)

    def build_in_full(self, module: pl.LightningModule) -> None:
        """Build what `configure_model` and such contexts describe, with memory for all; values will be replaced.

        A process that only waits for ranks calls it, before it gets their weights. It computes on the CPU, because a
        process that has initialised CUDA cannot fork ranks again.
        """
        with kept_random_state():
            if not is_configured(module):
                with self.precision_plugin.module_init_context():
                    module.configure_model()
            self._construction.make_in_full(module)

    def _converted(self, module: pl.LightningModule) -> pl.LightningModule:
        """Convert `module` to the trainer's precision, and what is trained beside it to that of main parameters."""
        convert(module, partial(self.precision_plugin.convert_module, module), main_dtype(self.main_params))
        return module

    def _end_construction(self) -> None:
        """The module is built; called before anything converts it."""
        assert self.lightning_module is not None
        self._construction.end(self.lightning_module)
        self._builds = False

    def _take_weights(self, module: pl.LightningModule, plan: Plan) -> None:
        """Give `module` the weights that this rank holds; collective."""
        wire = message_device(self.root_device)
        if not release_shards(module):
            if self.reduce_boolean_decision(self.is_global_zero and is_partial(module), all=False):
                raise lost_weights()
            equalize(module, wire)
            self._construction.make(module, plan, self.global_rank, device=self.root_device, wire=wire)
            if (dtype := main_dtype(self.main_params)) is not None:
                give_main(module, dtype)
        for source, strict in self._loads:
            loaded = load_local(module, source, plan, self.global_rank)
            if strict:
                loaded.check(module)
        self._forget()

    def _forget(self) -> None:
        self._construction.forget()
        self._loads, self._builds = [], False

    @override
    def teardown(self) -> None:
        module = self._lightning_module
        if module is not None and not has_memory(module):
            self._lightning_module = None  # a run that failed before `setup`: nothing can be moved off the device
        try:
            super().teardown()
            if self._guard is not None:
                self._guard.close()
                self._guard = None
        finally:
            self._lightning_module = module
            self._forget()

    def __getstate__(self) -> dict[str, Any]:
        if self.lightning_module is not None:  # spawned ranks get what this process keeps alive meanwhile
            self._end_construction()
        return {**super().__getstate__(), "_agreement": None, "_guard": None, "_session": None}

    # --- communication ---

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decided(decision, all, self.root_device) if dist.is_initialized() else decision

    @override
    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src` on every rank; collective. It travels as JSON and tensors, never pickled.

        Raises:
            ConfigError: on all ranks, when it holds something other than tensors, numbers, strings, bytes, paths, None,
                dicts, lists, tuples, sets and dataclasses of these.
        """
        if not dist.is_initialized():
            return obj
        try:
            return broadcast_tree(obj, src, message_device(self.root_device))
        except ValueError as error:
            fix = "Send what the object is made of, such as its `state_dict()` or `str()`"
            raise ConfigError("broadcast", type(obj).__name__, str(error), fix) from None

    # --- what a call needs ---

    def _module(self, method: str) -> pl.LightningModule:
        rule = "The strategy has no module before a trainer is given one"
        return required(self.lightning_module, method, rule, "Call trainer.fit, validate, test or predict first")

    def _run(self, method: str) -> Session:
        rule = "It is called while the trainer fits, validates, tests or predicts, and nothing runs now"
        return required(self._session, method, rule, "Call the trainer, or the method of the module itself on rank 0")


# where it is another package, its trainer asks the strategy, which says what to change
register_post_import_hook(_known_to_other_package, "pytorch_lightning.strategies")
