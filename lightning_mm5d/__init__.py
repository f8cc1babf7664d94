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

from lightning_mm5d.config.converters import Configuration, register_converter
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

_HOMES = {
    "BatchingOptions": "config.groups",
    "BudgetBatchSampler": "models.budgets",
    "BudgetStream": "models.budgets",
    "CheckpointCorruptError": "config.errors",
    "CheckpointOptions": "config.groups",
    "CheckpointUntrustedError": "config.errors",
    "CommunicationOptions": "config.groups",
    "ComputeOptions": "config.groups",
    "ConfigError": "config",
    "ContextOptions": "config.groups",
    "ElasticStrategy": "tools.cli.elastic_layouts",
    "ExpertParallelPlan": "expert_parallel",
    "LaunchOptions": "config.groups",
    "LazyTensor": "data.lazy",
    "MemoryOptions": "config.groups",
    "Modality": "config",
    "ModalityEncoder": "models.modality_encoder",
    "ModalityThroughput": "features.throughput.feature",
    "MultimodalCollator": "models.collating",
    "MultimodalConfig": "models.multimodal_config",
    "MultimodalDataModule": "recipes.data",
    "MultimodalModel": "models.multimodal_model",
    "MultimodalModule": "recipes.module",
    "MultimodalProcessor": "models.processing",
    "MultimodalStrategy": "strategy",
    "NonFiniteError": "config.errors",
    "NumericsOptions": "config.groups",
    "PipelineOptions": "config.groups",
    "PipelineTemplate": "config",
    "ProjectorConfig": "models.projectors",
    "RankLostError": "config.errors",
    "RankMismatchError": "config.errors",
    "RemoteParameterError": "config.errors",
    "ShardingOptions": "config.groups",
    "TensorOptions": "config.groups",
    "TensorParallelPlan": "tensor_parallel.family_plans",
    "VocabularyShard": "sharded.class_operations",
    "WatchdogTimeoutError": "config.errors",
    "from_pretrained": "features.deferred_init.pretrained",
    "multimodal_mask": "context_parallel.hooks.context_mask",
    "register_expert_parallel_plan": "expert_parallel",
    "register_tensor_parallel_plan": "tensor_parallel.plan_lookup",
    "vocabulary_shard": "sharded.class_operations",
}


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
