"""What is cut where: finds modalities, boundaries and layers in a module, and splits the layers into stages."""

from lightning_mm5d.partition.costs import Unit, balance, stage_costs, step_costs
from lightning_mm5d.partition.parts import Parts
from lightning_mm5d.partition.split import Partition, StageCut, partition
from lightning_mm5d.partition.step_uses import Encoder
