"""A step on tensors without memory finds what autograd saves in a real one, and what optimizers keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_mm5d import Modality
from lightning_mm5d.features.refusals.feature import remade
from lightning_mm5d.partition import partition
from lightning_mm5d.tensor_parallel.plan_lookup import divide
from lightning_mm5d.tools.planner.activation_trace import trace
from lightning_mm5d.tools.planner.hollow_tensors import OptimizerStates
from lightning_mm5d.trainer.construction import made_construction
from zoo import CASES


def saved(module: L.LightningModule, batch: Any) -> int:
    """Bytes that a real step saves beside parameters."""
    found: dict[int, int] = {}
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept.append(storage)
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module.training_step(batch, 0)
    for parameter in module.parameters():
        found.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(found.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama_tied", "t5", "whisper", "llava", "qwen2_vl"])
def test_saved_bytes_are_those_of_a_real_step(name: str) -> None:
    case = CASES[name]
    module, batch = case.build(), case.batch(4)
    modalities = {modality: Modality() for modality in case.modalities}
    cut = partition(module, modalities)
    found = trace(module, batch, cut, modalities, divide(module, cut, modalities))
    units = [unit for row in found.units.values() for unit in row]
    storages = {number: size for unit in units for number, size in unit.saved.items()}
    assert sum(storages.values()) == saved(module, batch)


class Measured(L.LightningModule):
    """Attributes that are no buffers: states of metrics, in a module and in a list, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.accuracy, self.mean = MulticlassAccuracy(3), MeanMetric()
        self.masks = [torch.ones(8)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        scores = self.head(self.vision(images) * self.masks[0])
        loss = nn.functional.cross_entropy(scores, labels)
        self.mean(loss)
        self.log("accuracy", self.accuracy(scores, labels))
        return loss


@pytest.mark.filterwarnings("ignore")
def test_attributes_of_a_module_that_was_built_without_memory_have_a_device_as_its_parameters_have() -> None:
    batch = torch.ones(64, 4), torch.arange(64) % 3
    modalities = {"vision": Modality(), "language": Modality()}

    def traced(module: L.LightningModule) -> list[int]:
        cut = partition(module, modalities)
        units = trace(module, batch, cut, modalities, divide(module, cut, modalities)).units
        assert not module.accuracy.update_called  # the copy has been
        return [sum(unit.saved.values()) for row in units.values() for unit in row]

    with made_construction().without_memory():
        hollow = Measured()
    assert hollow.accuracy.tp.is_meta
    assert traced(hollow) == traced(Measured())


class Linear(L.LightningModule):
    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(100, 200), make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


WEIGHT, STEP = 4 * 100 * 200, 4
OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1), 0),
    "SGD with momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), WEIGHT),
    "Adam": (torch.optim.Adam, 2 * WEIGHT + STEP),
    "AMSGrad": (lambda p: torch.optim.AdamW(p, amsgrad=True), 3 * WEIGHT + STEP),
    "Adagrad": (torch.optim.Adagrad, WEIGHT + STEP),
    "Adafactor": (torch.optim.Adafactor, 4 * (100 + 200) + STEP),
    "with schedulers": (lambda p: ([torch.optim.RMSprop(p)], []), WEIGHT + STEP),
    "in a dict": (lambda p: {"optimizer": torch.optim.Adam(p)}, 2 * WEIGHT + STEP),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_those_that_the_optimizer_keeps(name: str) -> None:
    make, size = OPTIMIZERS[name]
    found = OptimizerStates(Linear(make), remade).of("layer.weight", (200, 100), torch.float32)
    assert found is not None
    assert found.persistent == size


@pytest.mark.parametrize(("name", "moved"), [("SGD", 3), ("SGD with momentum", 2 + 3 + 3)])
def test_an_update_moves_what_its_operations_read_and_write(name: str, moved: int) -> None:
    found = OptimizerStates(Linear(OPTIMIZERS[name][0]), remade).of("layer.weight", (200, 100), torch.float32)
    assert found is not None
    assert found.moved == moved * WEIGHT
