"""Replicas that exchange samples by their costs train as one process does, also from the midst of an epoch on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, DistributedSampler

from features.balanced_microbatches.albums import COUNTS, Album, Albums, packed
from features.resuming import Case, Drawn, assert_exact, samples, stopped_and_resumed
from features.toys import LANGUAGE, TWINS, VISION, Layout, Run, alone, assert_same, together, weights
from lightning_mm5d import Modality

SQUARE = Layout({"vision": Modality(dp_size=2, **VISION), "language": Modality(dp_size=2, **LANGUAGE)}, 4, 2)
"""two replicas of both: vision: ranks 0, 1; language: ranks 2, 3"""
BATCH, EPOCHS = 8, 2


class Costly(Albums):
    """Says how many images each sample has."""

    sample_costs = COUNTS


class Told(Album):
    """Keeps the loss of each step and how many images its batch has."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        first = batch if isinstance(batch, dict) else batch[0]
        self.kept = [*getattr(self, "kept", []), (float(self.trainer.callback_metrics["loss"]), first["image_items"])]


def train(run: Run) -> list[Any]:
    """Weights and losses of a run that steps after each batch, and of one that steps after two."""
    found = []
    for window in (1, 2):
        module = Told()
        trainer = run.trainer(max_epochs=EPOCHS, accumulate_grad_batches=window)
        trainer.fit(module, run.training(Costly(), BATCH, collate_fn=packed))
        losses, items = zip(*module.kept, strict=True)
        found.append((weights(module), [*losses], [int(counts.sum()) for counts in items]))
    return found


def given() -> list[list[int]]:
    """How many images each replica's batches would have."""
    whole, steps = DistributedSampler(range(len(COUNTS)), 1, 0), []
    for epoch in range(EPOCHS):
        whole.set_epoch(epoch)
        order = [COUNTS[sample] for sample in whole]
        batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
        steps += [[sum(batch[replica::2]) for replica in range(2)] for batch in batches]
    return steps


@pytest.mark.parametrize("layout", [SQUARE, TWINS], ids=["two encoders", "one encoder"])
def test_losses_and_weights_are_those_of_one_process(layout: Layout) -> None:
    """ranks as the layout says"""
    expected = alone(train)
    ranks = together(layout, train, batching={"balance": True})
    for window, (weight, losses, images) in enumerate(expected):
        for found in ranks:
            assert_same(found[window][1], losses)
        for name, one in weight.items():  # those that other ranks hold are NaN
            held = [found[window][0][name] for found in ranks if not found[window][0][name].isnan().any()]
            assert held
            assert_same(held, [one] * len(held))
        steps = [*zip(*(found[window][2] for found in ranks[-2:]), strict=True)]
        assert [sum(step) for step in steps] == images == [sum(step) for step in given()]
        assert max(max(step) - min(step) for step in steps) <= 2, steps
    assert max(max(step) - min(step) for step in given()) == 9, "without an exchange"


class CostlyDrawn(Drawn):
    """Augmented samples, of which the fourth part costs much."""

    sample_costs = tuple(10 * (index % 4 == 0) + index % 3 for index in range(24))


def test_an_epoch_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    """vision: rank 0, for both replicas of language: ranks 1-2"""
    case = Case(lambda run: DataLoader(CostlyDrawn(24), 4, shuffle=True, num_workers=1))

    def resumed(run: Run) -> dict[str, Any]:
        return stopped_and_resumed(run, case, 2, "middle")

    ranks = together(TWINS, resumed, tmp_path, batching={"balance": True})
    for number, found in enumerate(ranks):
        if number > 0:  # they hold parts of the module
            found["whole"]["weights"] = {}
        assert_exact(found)
    read = [[*samples(found["whole"]["steps"], 0)] for found in ranks[1:]]
    assert sorted(one for own in read for one in own) == [*range(24)]
    assert read != [[*DistributedSampler(range(24), 2, replica)] for replica in range(2)]
    work = [[sum(CostlyDrawn.sample_costs[one] for one in own[at : at + 4]) for at in range(0, 12, 4)] for own in read]
    assert all(abs(first - second) <= 10 for first, second in zip(*work, strict=True)), work
