"""A pytest plugin for Lightning's own tests: MultimodalStrategy in place of ddp_spawn, and of one device on the CPU.

``scripts/lightning_tests.sh`` fetches the tests and runs them with it. Lightning's packages hold no tests, so they come
from its repository. What cannot pass, where one process stands in place of one device:

- `callbacks/test_stochastic_weight_avg.py`: ten tests count the calls of `Strategy.backward` in a mock on that class,
  which this strategy overrides.
- `tuner/test_scale_batch_size.py::test_trainer_reset_correctly[fit]`: it compares the saved state of the fit loop, in
  which this strategy keeps positions of dataloaders in an entry of its own.
- `models/test_hooks.py`: the hook systems see `on_before_batch_transfer`, which this strategy puts in front of a
  module's own while it runs.
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
