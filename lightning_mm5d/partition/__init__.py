"""What is cut where: finds modalities, boundaries and layers in a module, and splits the layers into stages."""

from lightning_mm5d.partition.balance import balance
from lightning_mm5d.partition.costs import Unit, stage_costs, step_costs
from lightning_mm5d.partition.found import Encoder
from lightning_mm5d.partition.parts import Parts
from lightning_mm5d.partition.split import Partition, StageCut, partition

__all__ = [
    "Encoder",
    "Partition",
    "Parts",
    "StageCut",
    "Unit",
    "balance",
    "partition",
    "stage_costs",
    "step_costs",
]
