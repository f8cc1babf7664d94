"""Settings of optimizers and schedulers that a step changes, which do so once a batch.

Layout of the runs on ranks: vision and the first two layers of language: rank 0; the last two: rank 1.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from features.toys import LANGUAGE, VISION, Layout, Run, Toy, assert_same, figures, outcomes, weights
from lightning_mm5d import Modality
from lightning_mm5d.trainer.user_step import OptimizerSettings

TWO_STAGES = Layout(
    {"vision": Modality(colocate_with="language", **VISION), "language": Modality(pp_size=2, **LANGUAGE)}, 2
)


def settings_of(*, is_automatic: bool = True) -> tuple[Any, OptimizerSettings]:
    """A module with an optimizer and schedulers, and its settings before a batch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.4, momentum=0.5)
    inner = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for _ in range(2)]
    chained = torch.optim.lr_scheduler.ChainedScheduler(inner)
    trainer = SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=[SimpleNamespace(scheduler=chained)])
    module: Any = SimpleNamespace(trainer=trainer, automatic_optimization=is_automatic, chained=chained)
    return module, OptimizerSettings(module, "training_step")


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_step_changes_settings_once_a_batch_however_often_it_runs() -> None:
    module, settings = settings_of()
    (group,), (inner, _) = module.trainer.optimizers[0].param_groups, module.chained._schedulers
    for ends in (False, True, False, True):  # as two stages run for two microbatches
        with settings.run():
            group["lr"] *= 0.5
            module.chained.step()
        if ends:
            settings.end()
        assert (group["lr"], inner.last_epoch) == (0.4, 0)
    settings.apply(settings.of_batch)
    assert (group["lr"], group["momentum"], inner.last_epoch) == (0.05, 0.5, 1)
    _, others = settings_of()
    assert others.of_batch == {}


def test_settings_that_only_a_run_that_ends_changes_are_those_of_the_batch() -> None:
    module, settings = settings_of()
    (group,) = module.trainer.optimizers[0].param_groups
    with settings.run():
        group["momentum"] = 0.9
    settings.end()
    with settings.run():
        pass  # an early stage is cut off before
    remote_module, remote = settings_of()
    remote.apply(settings.of_batch)
    assert remote_module.trainer.optimizers[0].param_groups[0]["momentum"] == 0.9


def test_settings_of_microbatches_that_run_side_by_side_are_kept_apart() -> None:
    module, settings = settings_of()
    (group,) = module.trainer.optimizers[0].param_groups
    first, second = settings.run(), settings.run()
    first.__enter__()
    group["lr"] = 0.1
    of_first = settings.take()
    settings.put([{} for _ in of_first])  # the second one's turn
    second.__enter__()
    assert group["lr"] == 0.4
    group["lr"] = 0.1
    of_second = settings.take()
    settings.put(of_first)
    first.__exit__(None, None, None)
    settings.put(of_second)
    second.__exit__(None, None, None)
    settings.end()
    assert group["lr"] == 0.4
    settings.apply(settings.of_batch)
    assert group["lr"] == 0.1


def test_a_learning_rate_in_a_tensor_changes_once_a_batch_in_place() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=torch.tensor(0.5))
    trainer = SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=[])
    module: Any = SimpleNamespace(trainer=trainer, automatic_optimization=True)
    (group,), (remote,) = optimizer.param_groups, copy.deepcopy(optimizer).param_groups
    rate, settings = group["lr"], OptimizerSettings(module, "training_step")
    for change in (lambda: None, lambda: group.update(lr=torch.tensor(0.1)), lambda: group["lr"].mul_(0.5)):
        with settings.run():
            change()
            side_by_side = settings.take()
            settings.put([{}])
            assert group["lr"] == 0.5
            settings.put(side_by_side)
        settings.end()
        assert group["lr"] is rate
        assert rate == 0.5
    assert settings.of_batch == {0: {"lr": torch.tensor(0.25)}}
    for owner in (group, remote):
        trainer.optimizers = [SimpleNamespace(param_groups=[owner])]
        OptimizerSettings(module, "training_step").apply(settings.of_batch)
        assert owner["lr"] == 0.25
    assert rate == 0.25


def _both_in_place(first: Any, second: Any) -> None:
    first["lr"].mul_(0.5)


def _other(first: Any, second: Any) -> None:
    first["lr"] = first["lr"] * 0.5


def _other_and_in_place(first: Any, second: Any) -> None:
    first["lr"] = first["lr"] * 0.5
    second["lr"].mul_(0.1)


def _unseen(first: Any, second: Any) -> None:
    first["lr"].data.mul_(0.5)


@pytest.mark.parametrize("change", [_both_in_place, _other, _other_and_in_place, _unseen])
def test_a_tensor_that_groups_share_changes_as_on_one_process(change: Any) -> None:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(2)]
    optimizer = torch.optim.SGD(groups, lr=torch.tensor(0.5))
    expected = copy.deepcopy(optimizer)  # one tensor there, too
    trainer = SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=[])
    module: Any = SimpleNamespace(trainer=trainer, automatic_optimization=True)
    for _ in range(2):
        change(*expected.param_groups)
        settings = OptimizerSettings(module, "training_step")
        before = [group["lr"].clone() for group in optimizer.param_groups]
        for _ in range(2):
            with settings.run():
                change(*optimizer.param_groups)
                side_by_side = settings.take()
                settings.put([{}, {}])
                assert [group["lr"] for group in optimizer.param_groups] == before
                settings.put(side_by_side)
            settings.end()
            assert [group["lr"] for group in optimizer.param_groups] == before
        settings.apply(settings.of_batch)
        first, second = [[group["lr"] for group in each.param_groups] for each in (optimizer, expected)]
        assert first == second
        assert (first[0] is first[1]) == (second[0] is second[1])


def test_rows_that_a_step_changes_in_place_change_once_a_batch() -> None:
    module, settings = settings_of()
    for _ in range(3):
        with settings.run():
            module.chained._schedulers[0].base_lrs[0] *= 0.5
    settings.end()
    settings.apply(settings.of_batch)
    assert module.chained._schedulers[0].base_lrs == [0.2]


def test_changes_of_a_step_that_optimizes_by_itself_stay_as_they_are_made() -> None:
    module, settings = settings_of(is_automatic=False)
    with settings.run():
        module.trainer.optimizers[0].param_groups[0]["lr"] = 0.1
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == 0.1


class Slower(Toy):
    """Sets the learning rate in the step, and steps a scheduler there."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.optimizers().param_groups[0]["momentum"] *= 0.5  # type: ignore[union-attr]
        loss = super().training_step(batch, batch_idx)
        self.lr_schedulers().step()  # type: ignore[union-attr,call-arg]
        return loss


class SlowerByTensor(Slower):
    """Has the learning rate in a tensor, and changes it in place."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=torch.tensor(0.1, dtype=torch.float64), momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.optimizers().param_groups[0]["lr"].mul_(0.9)  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx)


def slower_by_tensor(run: Run) -> Any:
    return slower(run, SlowerByTensor())


def slower(run: Run, module: Slower | None = None) -> Any:
    module, trainer = module or Slower(), run.trainer(max_epochs=2)
    trainer.fit(module, run.loader(16))
    (group,) = trainer.optimizers[0].param_groups
    settings = {"lr": float(group["lr"]), "momentum": group["momentum"]}
    return figures(trainer) | settings, weights(module) if trainer.global_rank == 0 else None


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_step_that_sets_the_learning_rate_trains_as_on_one_process() -> None:
    for outcome in outcomes(TWO_STAGES, slower, slower_by_tensor).values():
        assert_same(outcome.ranks[0], outcome.one)
        assert_same(outcome.ranks[1][0], outcome.one[0])
