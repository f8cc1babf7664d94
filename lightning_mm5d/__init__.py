"""Lightning strategy that trains unmodified multimodal models, each modality in a layout of its own.

Importing it registers ``strategy="mm5d"``. The configuration classes need no torch; the strategy is imported when it
is first asked for, or by Lightning through the registry.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_mm5d.config import Modality, PipelineTemplate
from lightning_mm5d.context_parallel.interface import multimodal_mask
from lightning_mm5d.errors import ConfigError
from lightning_mm5d.strategy import MultimodalStrategy
from lightning_mm5d.tensor_parallel.find import register_tensor_parallel_plan
from lightning_mm5d.tensor_parallel.plans import TensorParallelPlan

__all__ = [
    "ConfigError",
    "Modality",
    "MultimodalStrategy",
    "PipelineTemplate",
    "TensorParallelPlan",
    "multimodal_mask",
    "register_tensor_parallel_plan",
]

StrategyRegistry.register(
    "mm5d",
    MultimodalStrategy,
    description="Data, tensor, pipeline and modality parallelism, set per modality",
    override=True,
)
