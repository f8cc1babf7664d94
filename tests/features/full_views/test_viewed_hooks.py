"""Which hooks see full tensors, and what `configure_optimizers` sees of shards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch import nn

from lightning_mm5d.features.full_views.viewed_hooks import LateHooks, of_all, of_some, of_steps, tell_full_shapes


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 3), nn.Linear(3, 2)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def configure_optimizers(self) -> Any:
        self.seen = [(tuple(p.shape), p.size(0), p.numel(), len(p)) for p in self.parameters()]
        self.total = self.up.weight.detach().sum().item()
        return torch.optim.Adagrad([{"params": [p], "lr": 1 / p.shape[-1]} for p in self.parameters()])


class Averages(WeightAveraging):
    def on_train_start(self, *args: Any) -> None:
        super().on_train_start(*args)


class Keeps(L.Callback):
    def state_dict(self) -> dict[str, Any]:
        return {}


class Loads(L.LightningDataModule):
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch


def test_hooks_that_users_wrote_are_found_and_those_of_lightning_are_not() -> None:
    module = Module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    callbacks = [ModelCheckpoint(), Averages(), Keeps()]
    trainer: Any = SimpleNamespace(callbacks=callbacks, optimizers=[optimizer], loggers=[], datamodule=Loads())
    hooks = of_all(trainer, module)
    assert [(type(hook.owner).__name__, hook.name) for hook in hooks] == [
        ("Module", "lr_scheduler_step"),
        ("Keeps", "state_dict"),
        ("SGD", "step_post_hook"),
    ]
    assert [hook.holder[hook.key] for hook in hooks[2:]] == [hooks[2].call]
    assert [hook.name for hook in of_some(trainer, module)] == ["on_after_batch_transfer", "transfer_batch_to_device"]


def test_hooks_around_steps_that_are_registered_late_are_watched_once() -> None:
    optimizer = torch.optim.SGD(Module().parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    watched: list[list[str]] = []
    late = LateHooks(of_steps([optimizer]), lambda hooks: watched.append([hook.name for hook in hooks]))
    optimizer.register_step_post_hook(lambda *_: None)
    late.begin([optimizer])
    late.begin([optimizer])
    assert watched == [["step_post_hook"]]


def test_shards_tell_their_full_shape_while_optimizers_are_made_and_keep_their_values() -> None:
    module = Module()
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()} | {"up.weight": (6, 4), "up.bias": (6,)}
    plan: Any = SimpleNamespace(layout=SimpleNamespace(size=2), shapes=shapes)
    undo = tell_full_shapes(module, plan)
    assert undo is not None
    optimizer = module.configure_optimizers()
    assert module.seen == [((6, 4), 6, 24, 6), ((6,), 6, 6, 6), ((2, 3), 2, 6, 2), ((2,), 2, 2, 2)]
    assert [group["lr"] for group in optimizer.param_groups] == [1 / 4, 1 / 6, 1 / 3, 1 / 2]
    assert module.total == module.up.weight.detach().sum().item()
    assert type(module.up.weight) is nn.Parameter
    assert module.up.weight.shape == (3, 4) == optimizer.state[module.up.weight]["sum"].shape
    undo()
    assert "configure_optimizers" not in vars(module)
    one: Any = SimpleNamespace(layout=SimpleNamespace(size=1), shapes=shapes)
    assert tell_full_shapes(module, one) is None
