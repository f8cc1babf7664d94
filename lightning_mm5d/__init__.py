"""Lightning strategy that trains unmodified multimodal models, each modality in a layout of its own.

Importing the package imports neither torch nor Lightning: a public name is imported when it is first used, and
``strategy="mm5d"`` is registered when Lightning is imported, before or after this package. From then on
`lightning.pytorch` and `pytorch_lightning` are one package.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wrapt import register_post_import_hook

from lightning_mm5d.config.features import Configuration, register_converter
from lightning_mm5d.config.one_lightning import OtherName

if TYPE_CHECKING:
    from lightning_mm5d.config import ConfigError, Modality, PipelineTemplate
    from lightning_mm5d.config.errors import (
        CheckpointCorruptError,
        CheckpointUntrustedError,
        NonFiniteError,
        RankLostError,
        RankMismatchError,
        RemoteParameterError,
        WatchdogTimeoutError,
    )
    from lightning_mm5d.config.groups import (
        BatchingOptions,
        CheckpointOptions,
        CommunicationOptions,
        ComputeOptions,
        ContextOptions,
        LaunchOptions,
        MemoryOptions,
        NumericsOptions,
        PipelineOptions,
        ShardingOptions,
        TensorOptions,
    )
    from lightning_mm5d.context_parallel.hooks.context_mask import multimodal_mask
    from lightning_mm5d.data.lazy import LazyTensor
    from lightning_mm5d.expert_parallel import ExpertParallelPlan, register_expert_parallel_plan
    from lightning_mm5d.features.deferred_init.pretrained import from_pretrained
    from lightning_mm5d.features.throughput.feature import ModalityThroughput
    from lightning_mm5d.models.budgets import BudgetBatchSampler, BudgetStream
    from lightning_mm5d.models.collating import MultimodalCollator
    from lightning_mm5d.models.modality_encoder import ModalityEncoder, ProjectorConfig
    from lightning_mm5d.models.multimodal_config import MultimodalConfig
    from lightning_mm5d.models.multimodal_model import MultimodalModel
    from lightning_mm5d.models.processing import MultimodalProcessor
    from lightning_mm5d.recipes.data import MultimodalDataModule
    from lightning_mm5d.recipes.module import MultimodalModule
    from lightning_mm5d.sharded.class_operations import VocabularyShard, vocabulary_shard
    from lightning_mm5d.strategy import MultimodalStrategy
    from lightning_mm5d.tensor_parallel.family_plans import TensorParallelPlan
    from lightning_mm5d.tensor_parallel.plan_lookup import register_tensor_parallel_plan
    from lightning_mm5d.tools.cli.elastic_layouts import ElasticStrategy

__all__ = [
    "BatchingOptions",
    "BudgetBatchSampler",
    "BudgetStream",
    "CheckpointCorruptError",
    "CheckpointOptions",
    "CheckpointUntrustedError",
    "CommunicationOptions",
    "ComputeOptions",
    "ConfigError",
    "ContextOptions",
    "ElasticStrategy",
    "ExpertParallelPlan",
    "LaunchOptions",
    "LazyTensor",
    "MemoryOptions",
    "Modality",
    "ModalityEncoder",
    "ModalityThroughput",
    "MultimodalCollator",
    "MultimodalConfig",
    "MultimodalDataModule",
    "MultimodalModel",
    "MultimodalModule",
    "MultimodalProcessor",
    "MultimodalStrategy",
    "NonFiniteError",
    "NumericsOptions",
    "PipelineOptions",
    "PipelineTemplate",
    "ProjectorConfig",
    "RankLostError",
    "RankMismatchError",
    "RemoteParameterError",
    "ShardingOptions",
    "TensorOptions",
    "TensorParallelPlan",
    "VocabularyShard",
    "WatchdogTimeoutError",
    "from_pretrained",
    "multimodal_mask",
    "register_expert_parallel_plan",
    "register_tensor_parallel_plan",
    "vocabulary_shard",
]

_NAMES = {
    "config": "ConfigError Modality PipelineTemplate",
    "config.errors": (
        "CheckpointCorruptError CheckpointUntrustedError NonFiniteError RankLostError RankMismatchError "
        "RemoteParameterError WatchdogTimeoutError"
    ),
    "config.groups": (
        "BatchingOptions CheckpointOptions CommunicationOptions ComputeOptions ContextOptions LaunchOptions "
        "MemoryOptions NumericsOptions PipelineOptions ShardingOptions TensorOptions"
    ),
    "context_parallel.hooks.context_mask": "multimodal_mask",
    "data.lazy": "LazyTensor",
    "expert_parallel": "ExpertParallelPlan register_expert_parallel_plan",
    "features.deferred_init.pretrained": "from_pretrained",
    "features.throughput.feature": "ModalityThroughput",
    "models.budgets": "BudgetBatchSampler BudgetStream",
    "models.collating": "MultimodalCollator",
    "models.modality_encoder": "ModalityEncoder ProjectorConfig",
    "models.multimodal_config": "MultimodalConfig",
    "models.multimodal_model": "MultimodalModel",
    "models.processing": "MultimodalProcessor",
    "recipes.data": "MultimodalDataModule",
    "recipes.module": "MultimodalModule",
    "sharded.class_operations": "VocabularyShard vocabulary_shard",
    "strategy": "MultimodalStrategy",
    "tensor_parallel.family_plans": "TensorParallelPlan",
    "tensor_parallel.plan_lookup": "register_tensor_parallel_plan",
    "tools.cli.elastic_layouts": "ElasticStrategy",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register(strategies: Any) -> None:
    def make(**options: Any) -> Any:
        from lightning_mm5d.strategy import MultimodalStrategy

        return MultimodalStrategy(**options)

    about = "Data, tensor, pipeline, context and modality parallelism, set per modality"
    strategies.StrategyRegistry.register("mm5d", make, description=about, override=True)
    strategies.StrategyRegistry.register(
        "mm5d_notebook", make, description=f"{about}; for notebooks", override=True, launch={"start_method": "fork"}
    )


def _convert(config: Configuration, given: Mapping[str, Any]) -> dict[str, Any]:
    from lightning_mm5d.tools.convert.conversion import arguments_of

    return arguments_of(config, given)


register_converter(_convert)
register_post_import_hook(_register, "lightning.pytorch.strategies")
register_post_import_hook(_register, "pytorch_lightning.strategies")
if not any(isinstance(finder, OtherName) for finder in sys.meta_path):
    sys.meta_path.insert(0, OtherName())
