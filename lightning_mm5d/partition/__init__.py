"""What is cut where: finds modalities, boundaries and layers in a module, and splits the layers into stages."""

from lightning_mm5d.partition.balance import balance
from lightning_mm5d.partition.costs import Unit, stage_costs, step_costs, units
from lightning_mm5d.partition.find import discover
from lightning_mm5d.partition.found import Boundary, Encoder
from lightning_mm5d.partition.parts import Parts
from lightning_mm5d.partition.split import Partition, StageCut, partition

__all__ = [
    "Boundary",
    "Encoder",
    "Partition",
    "Parts",
    "StageCut",
    "Unit",
    "balance",
    "discover",
    "partition",
    "stage_costs",
    "step_costs",
    "units",
]
