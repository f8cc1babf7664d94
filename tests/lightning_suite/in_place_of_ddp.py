"""A pytest plugin for Lightning's own tests: MultimodalStrategy in place of ddp_spawn, and of one device on the CPU.

``scripts/lightning_tests.sh`` fetches the tests and runs them with it. Lightning's packages hold no tests, so they come
from its repository. What cannot pass, where one process stands in place of one device:

They ask for Lightning's classes:

- `trainer/connectors/test_accelerator_connector.py`, `trainer/test_trainer.py::test_trainer_config_strategy` and
  `::test_spawn_predict_return_predictions`: the type of the strategy is DDPStrategy or SingleDeviceStrategy. In a
  notebook `ddp_spawn` must be refused, and here it forks, or the plugin's strategy stands for one device.
- `profilers/test_profiler.py::test_pytorch_profiler_trainer_fit`: names of actions hold SingleDeviceStrategy.
- `callbacks/test_stochastic_weight_avg.py` (ten tests), and four of
  `trainer/optimization/test_manual_optimization.py`: they count the calls of `Strategy.backward` in a mock on that
  class, which this strategy overrides.
- `models/test_amp.py::test_precision_16_clip_gradients`: a mock of torch's clipping. Norms here are those over all
  ranks.
- `checkpointing/test_trainer_checkpoint.py::test_trainer_save_checkpoint_storage_options` mocks TorchCheckpointIO,
  and `plugins/test_checkpoint_io_plugin.py::test_multi_wrapped_checkpoint_io_initialization` asks for its type: files
  are written by FullFileIO.
- `trainer/connectors/test_checkpoint_connector.py::test_stateful_trainer_ckpt_path_support`: its callback is a mock
  whose state key is no text, and its checkpoint has no state of the optimizer, which is refused here.
- `trainer/connectors/test_checkpoint_connector.py::test_local_cross_device_checkpoint`: a mock of `os.rename` that
  fails. A new file here lies beside the old one, on one device.
- `trainer/test_trainer.py::test_trainer_predict_cpu` asks for the class of the sampler, and
  `::test_trainer_predict_ddp_spawn` for ProcessRaisedException: a failed rank is a RankLostError, with the same text.
- `utilities/test_compile.py`: Lightning keeps `torch.compile(LightningModule)` for its own strategies by their types.

They ask for a message or warning whose reason is gone:

- `models/test_restore.py::test_restarting_mid_epoch_raises_warning` warns that dataloaders lose their position. They
  keep it.
- `models/test_restore.py::test_try_resume_from_non_existing_checkpoint` and
  `trainer/connectors/test_checkpoint_connector.py::test_hpc_restore_attempt`: FileNotFoundError with other words.
- `trainer/connectors/test_data_connector.py::test_dataloader_persistent_workers_performance_warning` warns of spawned
  processes. This plugin forks.
- `utilities/test_model_helpers.py::test_mixed_imports_unified`: two Lightnings in a process are one
  (`lightning_mm5d.config.one_lightning`).

They see what this strategy does otherwise:

- `tuner/test_scale_batch_size.py::test_trainer_reset_correctly[fit]`: it compares the saved state of the fit loop, in
  which this strategy keeps positions of dataloaders in an entry of its own.
- `loops/test_loops.py::test_loop_state_on_exception`: counters of batches in a checkpoint are those that a resumed run
  goes on with, before a batch that has begun and before an open accumulation window.
- `loops/test_evaluation_loop.py::test_evaluation_loop_sampler_set_epoch_called[False]` counts calls of `set_epoch`: a
  loader here tells its sampler the epoch once more.
- `models/test_hooks.py`: the hook systems see `on_before_batch_transfer`, which this strategy puts in front of a
  module's own while it runs.
- `trainer/flags/test_inference_mode.py::test_eval_inference_mode`: with gloo Lightning itself takes `no_grad`.
- `trainer/test_dataloaders.py::test_train_dataloader_passed_to_fit` and `::test_mixing_of_dataloader_options`: the
  trainer shows the user's own loader object. Here, as under DDP, it is a copy, which keeps its position.
- `trainer/connectors/test_checkpoint_connector.py::test_preloaded_checkpoint_lifecycle` loads into a strategy that
  has no module, and `models/test_cpu.py::test_multi_cpu_model_ddp` states of optimizers in a process that only waited
  for ranks. Both are refused; Lightning loads nothing there, in silence.
- `models/test_restore.py::test_callbacks_state_fit_ckpt_path` copies a trainer within a run, which reads its loader
  by a generator and holds locks. After a run it can be copied.
- `plugins/test_cluster_integration.py::test_ranks_available_automatic_strategy_selection`: WORLD_SIZE=8 beside four
  devices is refused, since a rank would wait for others that never come.
- `plugins/precision/test_transformer_engine.py::test_configure_model`: this strategy builds `configure_model` without
  memory, and the plugin replaces layers by some that have it. To mend on a GPU with that package.

They fail in the same way without this plugin, for want of packages, files or a network: legacy checkpoints
(`checkpointing/test_legacy_checkpoints.py`), `utilities/migration` (`pytorch_lightning` is installed too),
`helpers/test_datasets.py` and `test_models.py` (MNIST), `serve` (fastapi), `models/test_hparams.py` (hydra),
`models/test_onnx.py` (onnxruntime, not even collected), `test_cli.py::test_lightning_cli_jsonnet`,
`plugins/precision/test_bitsandbytes.py` and `utilities/test_compile.py::test_trainer_compiled_model_that_logs`.
Tests of `strategies` are those of other strategies.

Tests of SLURM (`trainer/connectors/test_signal_connector.py`, `test_hpc_restore_attempt`, `test_cpu_slurm_save_load`,
`test_lightning_cli_args_cluster_environments`) set variables for one device alone, and end in a KeyError as under DDP.
With SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1 they pass, but for the words of the second one.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_mm5d import MultimodalStrategy

for _name in (
    "ddp_spawn",
    "ddp_fork",
    "ddp_spawn_find_unused_parameters_true",
    "ddp_spawn_find_unused_parameters_false",
):
    StrategyRegistry.register(_name, MultimodalStrategy, override=True, start_method="fork")

_choose = _AcceleratorConnector._choose_strategy


def _chosen(connector: _AcceleratorConnector) -> Any:
    strategy = _choose(connector)
    is_one_cpu = type(strategy) is SingleDeviceStrategy and strategy.root_device.type == "cpu"
    return MultimodalStrategy() if is_one_cpu else strategy


_AcceleratorConnector._choose_strategy = _chosen  # type: ignore[method-assign]
