"""Parameters that ranks share are whole where layers use them, whatever each rank's batches do.

Two ranks are replicas of everything, and share all parameters (`zero_stage` 3).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from data_parallel.test_sharing import Trained, shared
from features.toys import Run, assert_same, figures, outcomes, together, weights
from lightning_mm5d.data_parallel.shared_parameters import SharedParameter
from lightning_mm5d.plan.holdings import DataShard
from lightning_mm5d.plan.plan import Traffic

SAMPLES = 4


class Odd(Trained):
    """What it computes depends on the sample: no image, layers left out, layers in another order."""

    def one(self, sample: dict[str, Tensor]) -> Tensor:
        kind = int(sample["tokens"][0, 0]) % 4
        hidden = self.decoder.embedding(sample["tokens"])
        if kind != 1:
            hidden = hidden + self.encoder(sample["images"]).unsqueeze(1)
        layers = list(self.decoder.layers)
        chosen = {2: layers[:1] + layers[2:], 3: layers[::-1]}.get(kind, layers)
        for layer in chosen:
            hidden = layer(hidden)
        logits = self.decoder.head(self.decoder.norm(hidden).mean(dim=1))
        return F.cross_entropy(logits, sample["label"])

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        samples = [
            {key: value[index : index + 1] for key, value in batch.items()} for index in range(len(batch["label"]))
        ]
        return torch.stack([self.one(sample) for sample in samples]).mean()


class Recomputed(Trained):
    """Layers are computed again in the backward: one by one, in both of torch's ways, and two at once."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.decoder.embedding(batch["tokens"]) + self.encoder(batch["images"]).unsqueeze(1)
        first, second, *others = self.decoder.layers
        hidden = checkpoint(first, hidden, use_reentrant=True)
        hidden = checkpoint(second, hidden, use_reentrant=False)
        hidden = checkpoint(nn.Sequential(*others), hidden, use_reentrant=False)
        return self.decoder.head(self.decoder.norm(hidden).mean(dim=1))


class Partly(Trained):
    """Trains a part of itself, and another from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.requires_grad_(False)
        self.decoder.layers[1].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.decoder.layers[1].requires_grad_(self.current_epoch > 0)


def _fit(run: Run, module: Any, **options: Any) -> Any:
    trainer = run.trainer(**{"max_epochs": 2, **options})
    trainer.fit(module, run.training(), run.loader(8))
    return {"weights": weights(module), "figures": figures(trainer)}


def odd(run: Run) -> Any:
    return _fit(run, Odd())


def recomputed(run: Run) -> Any:
    return _fit(run, Recomputed())


def partly(run: Run) -> Any:
    return _fit(run, Partly())


class Penalised(Trained):
    """Reads its weights where no layer runs."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        return self.loss(batch) + 0.01 * penalty


def penalised(run: Run) -> Any:
    return _fit(run, Penalised())


class Twice(Trained):
    """Runs its layers twice in a step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch) + self.loss(batch)


def twice(run: Run) -> Any:
    return _fit(run, Twice())


def predicted(run: Run) -> Any:
    """The outputs of 5 samples, of which one replica has 3 and the other 2; before and after training."""
    module = Trained()
    loader = run.loader(5, 2)
    before = run.trainer().predict(module, loader)
    trainer = run.trainer(num_sanity_val_steps=1, val_check_interval=1, limit_val_batches=1)
    trainer.fit(module, run.training(), run.loader(8))
    return torch.cat([*before, *trainer.predict(module, loader)])


def test_replicas_with_unequal_numbers_of_batches_predict() -> None:
    outcome = outcomes(shared(3), predicted, num_microbatches=1)["predicted"]
    first, second = outcome.ranks
    every = outcome.one.unflatten(0, (2, 5))
    assert_same(first, every[:, 0::2].flatten(0, 1))
    assert_same(second, every[:, 1::2].flatten(0, 1))


def test_parameters_that_are_gathered_once_are_whole_wherever_they_are_read() -> None:
    found = outcomes(shared(3), odd, recomputed, partly, penalised, twice, num_microbatches=SAMPLES)
    for scenario, outcome in found.items():
        assert_same(outcome.ranks[0], outcome.one, where=scenario)


def test_layers_that_are_gathered_one_by_one_may_run_in_any_order_or_not_at_all() -> None:
    found = outcomes(shared(3, reshards=True), odd, recomputed, partly, penalised, num_microbatches=SAMPLES)
    for scenario, outcome in found.items():
        assert_same(outcome.ranks[0], outcome.one, where=scenario)


def test_a_layer_that_is_gathered_for_one_forward_refuses_a_second_one() -> None:
    with pytest.raises(BaseException, match="reshard_after_forward"):
        together(shared(3, reshards=True), twice, num_microbatches=SAMPLES)


def test_memory_that_an_array_has_shown_goes_with_the_array_and_weights_come_in_new_memory() -> None:
    parameter = nn.Parameter(torch.arange(4.0))
    shared = SharedParameter(parameter, DataShard(3, 0, ((0, 2), (2, 4)), (0, 1), (0,), 0), (4,), Traffic())

    def gathered() -> None:
        shared.give_memory()
        assert shared.whole is not None
        shared.whole.copy_(torch.arange(4.0))
        shared.reopen()

    shared.show_closed(gathered)
    gathered()
    product = parameter * 2  # autograd keeps nothing of the weight
    array = parameter.detach().numpy()
    memory = StorageWeakRef(parameter.untyped_storage())
    shared.show_closed(gathered)
    assert array.tolist() == [0, 1, 2, 3]
    assert not memory.expired()
    del array
    assert memory.expired()
    assert torch.equal(parameter + product, torch.arange(4.0) * 3)  # which gathers again
