"""Which launcher is taken, what it checks first, and what `fit` leaves in the process that called it.

This file is also the script that the process tests run: a run of its own keeps threads and forks out of pytest.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_mm5d import MultimodalStrategy
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.trainer import launch


class External(LightningEnvironment):
    """Processes made by somebody else, who also fixes their number: Ray's environment, MPI's and SLURM's alike."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return 2

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return 1

    def set_global_rank(self, rank: int) -> None:
        pass


class TwoStages(ParallelStrategy):
    """stage 0: rank 0; stage 1: rank 1. Each rank holds NaN in place of the other's weight."""

    is_distributed = True

    def __init__(self, start_method: Any, environment: ClusterEnvironment | None = None) -> None:
        super().__init__(parallel_devices=[torch.device("cpu")] * 2, cluster_environment=environment)
        self.start_method = start_method
        self.num_nodes = 1
        self.failed = False

    @property
    def num_processes(self) -> int:
        return 2

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")

    def validate_before_launch(self, module: pl.LightningModule, *data: Any, callbacks: Sequence[Any] = ()) -> None:
        if not isinstance(module, Stages):
            raise ConfigError("modalities", type(module).__name__, "There must be two stages", "Use Stages")

    def run_guarded(self, function: Any, trainer: Any, reports: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def build_in_full(self, module: Any) -> None:
        """The module is built with memory already."""

    def _configure_launcher(self) -> None:
        self._launcher = launch.make_launcher(self, start_method=self.start_method)

    def set_world_ranks(self) -> None:
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.local_rank)
        self.cluster_environment.set_world_size(2)

    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        _init_dist_connection(self.cluster_environment, "gloo", timeout=timedelta(seconds=20))
        torch.manual_seed(self.global_rank)  # random state that differs must not change the order of samples

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        assert isinstance(self.lightning_module, Stages)
        self.lightning_module.weights[1 - self.global_rank].data.fill_(float("nan"))

    def teardown(self) -> None:
        module = self.lightning_module
        if isinstance(module, Stages) and not self.failed and module.trainer.state.fn == TrainerFn.FITTING:
            for rank, weight in enumerate(module.weights):
                torch.distributed.broadcast(weight.data, rank)
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        self.failed = True

    def model_to_device(self) -> None:
        pass

    def barrier(self, name: str | None = None) -> None:
        torch.distributed.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        objects = [obj]
        torch.distributed.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if isinstance(tensor, torch.Tensor):
            torch.distributed.all_reduce(tensor)
        return tensor


class Stages(pl.LightningModule):
    """At step t rank r adds (r + 1) * (t + 1) * sample to its own weight, so the order of samples shows."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.zeros(1), torch.zeros(1)])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        rank = self.trainer.global_rank
        return -(rank + 1) * (batch_idx + 1) * (batch * self.weights[rank]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fit(start_method: str, module: pl.LightningModule) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=TwoStages(start_method),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(range(6), shuffle=True))


def main(folder: Path) -> None:
    """The script: notes that it was started, then fits; a second start would be a child of the first."""
    torch.set_num_threads(1)
    folder.joinpath(f"start-{os.getpid()}").touch()
    errors = []
    for start_method in ("popen", "spawn", "fork"):
        try:
            fit(start_method, pl.LightningModule())
        except ConfigError as error:
            errors.append(str(error))
    module = Stages()
    fit("fork", module)
    report = {"errors": errors, "weights": [weight.item() for weight in module.weights]}
    folder.joinpath("report").write_text(json.dumps(report))


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], int]:
    """What the process that called `fit` reports, and how many processes ran the script."""
    folder = tmp_path_factory.mktemp("script")
    root = Path(__file__).parents[2]
    set_by_others = ("LOCAL_RANK", "WORLD_SIZE", "PL_GLOBAL_SEED")
    clean = {key: value for key, value in os.environ.items() if key not in set_by_others}
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            env=clean | {"PYTHONPATH": str(root)},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            process.wait(timeout=60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
    assert process.returncode == 0, log.read_text()
    return json.loads((folder / "report").read_text()), len(list(folder.glob("start-*")))


def test_a_wrong_configuration_is_one_error_and_starts_no_process(script: tuple[dict[str, Any], int]) -> None:
    report, starts = script
    assert starts == 1
    error = "modalities: got 'LightningModule'. There must be two stages. Use Stages."
    assert report["errors"] == [error] * 3


def test_after_fit_the_launching_process_holds_the_weights_of_all_stages(
    script: tuple[dict[str, Any], int],
) -> None:
    """stage 0: rank 0; stage 1: rank 1. One replica: both saw the samples in one shuffled order."""
    order: DistributedSampler[Any] = DistributedSampler(range(6), 1, 0, shuffle=True, seed=0)
    expected = float(sum((step + 1) * sample for step, sample in enumerate(order)))
    assert script[0]["weights"] == [expected, 2 * expected]


def test_spawned_processes_can_be_sent_the_launcher_and_the_strategy() -> None:
    strategy = TwoStages("spawn", LightningEnvironment())
    strategy._configure_launcher()
    copied = pickle.loads(pickle.dumps(strategy))
    assert isinstance(copied.launcher, launch.ProcessLauncher)
    assert copied.launcher._strategy is copied


@pytest.mark.parametrize("start_method", ["popen", "spawn", "fork"])
def test_where_processes_exist_the_launcher_checks_and_starts_none(start_method: Any) -> None:
    strategy = TwoStages(start_method, External())
    launcher = launch.make_launcher(strategy, start_method=start_method)
    strategy._lightning_module = Stages()
    assert launcher.launch(os.getpid) == os.getpid()
    assert launcher.procs == []
    strategy._lightning_module = pl.LightningModule()
    with pytest.raises(ConfigError, match="must be two stages"):
        launcher.launch(os.getpid)


@pytest.mark.parametrize("name", ["-c", "-", ""])
def test_a_python_that_reads_a_text_or_a_pipe_starts_no_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them would fail to find the script, in words that name no way out."""
    monkeypatch.setattr(sys, "argv", [name, "an argument"])
    strategy = TwoStages("popen", LightningEnvironment())
    strategy._lightning_module = Stages()
    launcher = launch.make_launcher(strategy, start_method="popen")
    with pytest.raises(ConfigError, match=r"^launch\.start_method: got 'popen'\. .* reads a text .* or use 'fork'"):
        launcher.launch(os.getpid)
    assert launcher.procs == []


def test_an_interactive_python_is_told_of_fork_and_not_of_lightnings_strategies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    several: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}
    for strategy in ("mm5d", MultimodalStrategy(modalities={"vision": 1, "language": 1})):
        with pytest.raises(ConfigError, match=r"'popen'\. .* is interactive\. .* use 'fork' .*mm5d_notebook"):
            pl.Trainer(strategy=strategy, **several)
    pl.Trainer(strategy="mm5d", **several | {"devices": 1})
    pl.Trainer(strategy=MultimodalStrategy(launch={"start_method": "fork"}), **several)


def test_an_unknown_start_method_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"start_method: got 'forkserver'\."):
        launch.make_launcher(TwoStages("popen", External()), start_method="forkserver")  # type: ignore[arg-type]


def test_lightnings_launchers_are_the_ones_this_was_written_for() -> None:
    launch.check_lightning()


def test_a_lightning_whose_launchers_changed_is_refused_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch_differently(self: Any, function: Any) -> None: ...

    monkeypatch.setattr(launch._SubprocessScriptLauncher, "launch", launch_differently)
    with pytest.raises(ImportError, match=re.escape(f"lightning {pl.__version__} has no _SubprocessScript")):
        launch.make_launcher(TwoStages("popen", External()), start_method="popen")


@pytest.mark.parametrize(("setting", "threads"), [("3", 3), ("5,2", 5), ("all", 4), ("", 4), (None, 4)])
def test_threads_are_the_users_or_a_share_of_the_cores(
    setting: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if setting is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", setting)
    assert launch.cpu_threads(2) == threads


def test_more_ranks_than_cores_get_one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch.cpu_threads(10_000) == 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))


def test_a_process_that_waits_for_ranks_leaves_their_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has used CUDA can fork no ranks, as those of the next run in a notebook."""

    def refuse(*_: Any) -> None:
        raise AssertionError("CUDA is initialised")

    for name in ("get_rng_state", "set_rng_state", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    strategy = MultimodalStrategy()
    strategy.parallel_devices, strategy.cluster_environment = [torch.device("cuda", 0)], LightningEnvironment()
    strategy.build_in_full(pl.LightningModule())


def test_ranks_that_the_trainer_has_no_devices_for_end_in_lightnings_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of torchrun, also those whose device the trainer lacks."""
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "GROUP_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    started = {"TORCHELASTIC_RUN_ID": "7", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in (ranks | started).items():
        monkeypatch.setenv(name, value)
    module = Stages()
    module.vision, module.language = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    strategy = MultimodalStrategy(modalities={"vision": 1, "language": 1})
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match=r"devices=1.*does not match the world size \(2\)"):
        trainer.fit(module)
