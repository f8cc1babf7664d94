"""What a hook writes on some ranks alone is refused by name, or taken over from rank 0 as under DDP."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from features.toys import PAIR, SHARED, Layout, Run, Toy, alone, assert_same, figures, together, weights
from lightning_mm5d.config.errors import ConfigError, RankLostError

Hook = Callable[[Any], Any]


class Scaled(Toy):
    """Scales logits by a buffer, and by an attribute."""

    hook: Hook

    def __init__(self, hook: Hook = lambda _: None) -> None:
        super().__init__()
        self.factor = 1.0
        self.register_buffer("scale", torch.tensor(1.0, dtype=torch.float64))
        vars(self)["hook"] = hook

    def forward(self, batch: Any) -> Any:
        return super().forward(batch) * self.scale * self.factor


class AtBatchEnd(Scaled):
    def on_train_batch_end(self, *args: Any) -> None:
        self.hook(self)


class AtBatchStart(Scaled):
    @rank_zero_only
    def on_train_batch_start(self, *args: Any) -> None:
        self.hook(self)


class ByACallback(L.Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.hook(pl_module)


def scale(module: Any) -> None:
    if module.trainer.is_global_zero:
        module.scale.mul_(0.5)


def scale_through_data(module: Any) -> None:
    if module.global_rank == 0:
        module.scale.data.mul_(0.5)


def register(module: Any) -> None:
    if module.global_rank:
        return
    del module.scale
    module.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))


def fill(module: Any) -> None:
    if module.trainer.is_global_zero:
        nn.init.constant_(module.decoder.head.bias, 0.3)


def other_data(module: Any) -> None:
    if module.trainer.is_global_zero:
        module.decoder.head.bias.data = module.decoder.head.bias.data + 0.3


def slow_down(module: Any) -> None:
    if module.trainer.is_global_zero:
        module.trainer.optimizers[0].param_groups[0]["lr"] *= 0.1


def slow_down_in_a_tensor(module: Any) -> None:
    (group,) = module.trainer.optimizers[0].param_groups
    group["lr"] = torch.as_tensor(group["lr"])
    if module.trainer.is_global_zero:
        group["lr"].mul_(0.1)


def freeze(module: Any) -> None:
    if module.trainer.is_global_zero:
        module.decoder.embedding.weight.requires_grad_(False)


def wrap(module: Any) -> None:
    if module.trainer.is_global_zero and module.current_epoch == 0:
        module.decoder.norm = nn.Sequential(module.decoder.norm, nn.Identity())


def change_factor(module: Any) -> None:
    if module.trainer.is_global_zero:
        module.factor *= 0.5


def write_on_all(module: Any) -> None:
    scale(module) if module.global_rank == 0 else module.scale.mul_(0.5)
    with torch.no_grad():
        module.decoder.head.bias.clamp_(-0.01, 0.01)
    module.trainer.optimizers[0].param_groups[0]["lr"] *= 0.9
    module.factor *= 0.9
    if module.trainer.is_global_zero:
        module.files = getattr(module, "files", 0) + 1


BUFFERS = [scale, scale_through_data, register]
OTHERS = {fill: "the parameter decoder.head.bias", other_data: "the parameter decoder.head.bias"}
OTHERS |= {slow_down: "lr of group 0 of optimizer 0", freeze: "requires_grad of decoder.embedding.weight"}
OTHERS |= {slow_down_in_a_tensor: "lr of group 0 of optimizer 0"}
OTHERS |= {wrap: "the module decoder.norm"}


def trained(run: Run, kind: type[Scaled], hook: Hook, *callbacks: L.Callback) -> Any:
    module = kind(hook)
    trainer = run.trainer(max_epochs=2, callbacks=[*callbacks])
    trainer.fit(module, run.training(), run.loader())
    return figures(trainer), weights(module)


def refusals(run: Run, hooks: list[Hook], kind: type[Scaled], *callbacks: type[L.Callback]) -> list[str]:
    found = []
    for hook in hooks:
        with pytest.raises((ConfigError, RankLostError)) as caught:
            trained(run, kind, hook, *(one() for one in callbacks))
        found.append(str(caught.value))
        torch.distributed.destroy_process_group()
    return found


@pytest.mark.parametrize("layout", [PAIR, SHARED])
@pytest.mark.parametrize(("kind", "callbacks"), [(AtBatchEnd, ()), (AtBatchStart, ()), (Scaled, (ByACallback,))])
def test_what_rank_0_alone_writes_and_others_need_is_refused_by_name(
    layout: Layout, kind: type[Scaled], callbacks: tuple[type[L.Callback], ...]
) -> None:
    """Vision: rank 0; language: rank 1, or two replicas: ranks 0-1."""
    hooks = {**OTHERS, **(dict.fromkeys(BUFFERS, "the buffer scale") if layout is PAIR else {})}
    chosen = [*hooks] if kind is AtBatchEnd else [*hooks][::3]  # of each kind
    for texts in together(layout, lambda run: refusals(run, chosen, kind, *callbacks)):
        for text, hook in zip(texts, chosen, strict=True):
            assert f"a change of {hooks[hook]} on rank 0 and not on rank 1" in text
            assert "on_train_" in text


@pytest.mark.parametrize("hook", BUFFERS)
@pytest.mark.parametrize("kind", [AtBatchEnd, AtBatchStart])
def test_replicas_take_the_buffers_of_rank_0(kind: type[Scaled], hook: Hook) -> None:
    """Two replicas: ranks 0-1."""
    expected = alone(lambda run: trained(run, kind, hook))
    _, (figured, on_rank_0), (_, on_rank_1) = "", *together(SHARED, lambda run: trained(run, kind, hook))
    assert_same((figured, on_rank_0), expected)
    assert_same(on_rank_1["scale"], expected[1]["scale"])


@pytest.mark.parametrize("layout", [PAIR, SHARED])
def test_writes_of_all_ranks_and_numbers_that_no_step_reads_are_left_alone(layout: Layout) -> None:
    """Vision: rank 0; language: rank 1, or two replicas: ranks 0-1."""
    expected = alone(lambda run: trained(run, AtBatchEnd, write_on_all))
    assert_same(together(layout, lambda run: trained(run, AtBatchEnd, write_on_all))[0], expected)


@pytest.mark.parametrize("layout", [PAIR, SHARED])
def test_an_attribute_that_steps_read_is_warned_of(layout: Layout) -> None:
    """Vision: rank 0; language: rank 1, or two replicas: ranks 0-1."""

    def told(run: Run) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained(run, AtBatchEnd, change_factor)
        return [str(one.message) for one in caught if "factor" in str(one.message)]

    texts, _ = together(layout, told)
    assert len(texts) == 1
    assert texts[0].startswith(
        "AtBatchEnd.on_train_batch_end makes a change of self.factor on rank 0 and not on rank 1"
    )
