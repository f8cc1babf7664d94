"""A frozen copy of a multimodal model beside the one that trains, as preferences (DPO) have it, equals one process."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compare import assert_equal_to_one_process
from lightning_mm5d import Modality
from parity.harness import Recorder, fit, strategy
from ranks import call_ranks
from zoo import CASES

ON_ALL = {"feeds": "all"}
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "vision | language": ({"vision": {}, "language": {}}, 2),
    "vision | pp 2": ({"vision": ON_ALL, "language": {"pp_size": 2}}, 3),
    "pp 2 with vision beside": ({"vision": {**ON_ALL, "colocate_with": "language"}, "language": {"pp_size": 2}}, 2),
}


class Preferring(L.LightningModule):
    """Prefers the answer of a batch to the same answer backwards; the loss is a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = CASES["llava"].build().model
        self.reference = copy.deepcopy(self.model).requires_grad_(False)
        with torch.no_grad():
            for parameter in self.reference.parameters():
                parameter.mul_(0.9)

    def log_probability(self, model: Any, inputs: Any, answer: Tensor) -> Tensor:
        logits = model(**inputs, use_cache=False).logits[:, -answer.shape[1] :]
        return logits.log_softmax(-1).gather(-1, answer.unsqueeze(-1)).squeeze(-1).sum(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        chosen = batch["labels"][:, -4:].clamp(min=0)
        rejected = chosen.flip(1)
        gain = self.log_probability(self.model, inputs, chosen) - self.log_probability(self.model, inputs, rejected)
        with torch.no_grad():
            known = self.log_probability(self.reference, inputs, chosen)
            known = known - self.log_probability(self.reference, inputs, rejected)
        loss = -F.logsigmoid(0.1 * (gain - known)).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.05)


def batches() -> list[Any]:
    return [CASES["llava"].batch(4, seed, images=[1, 0, 2, 1]) for seed in range(2)]


def trained(rank: int, modalities: dict[str, Any], world: int) -> Any:
    module = Preferring()
    given = {name: Modality(**fields) for name, fields in modalities.items()}
    found = fit(module, batches(), strategy(given, batching={"num_microbatches": 2}), world)
    return found.losses, found.gradients, dict(module.state_dict())


@pytest.fixture(scope="module")
def expected() -> tuple[Recorder, Any]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    module = Preferring()
    found = fit(module, batches()), dict(module.state_dict())
    torch.set_default_dtype(before)
    return found


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_frozen_reference_sees_the_images_in_every_layout(name: str, expected: tuple[Recorder, Any]) -> None:
    modalities, world = LAYOUTS[name]
    ranks = call_ranks(world, trained, modalities, world)
    assert_equal_to_one_process(ranks, *expected, rtol=1e-9, atol=1e-12, where=name)


@pytest.mark.usefixtures("float64")
def test_a_second_model_that_lacks_its_images_is_refused_with_the_field() -> None:
    """vision: rank 0; language: ranks 1-2, of which the second has the layers of the reference."""
    with pytest.raises(AssertionError, match="feeds='all' of the encoder"):
        call_ranks(3, trained, {"vision": {}, "language": {"pp_size": 2}}, 3)
