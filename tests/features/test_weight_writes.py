"""A training step that runs for each microbatch and stage writes to weights as one process does, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from features.toys import PAIR, WIDTH, Layout, Run, Toy, alone, assert_same, weights
from lightning_mm5d import ConfigError, Modality
from lightning_mm5d.features.weight_writes import Looks, _Buffer, _differ, _norm, _Step, written
from lightning_mm5d.sharded.data_accesses import accesses
from lightning_mm5d.sharded.remote_value import Guard, Origin, make_placeholder
from ranks import run_ranks


def _shows_other_data(weight: nn.Parameter) -> None:
    before, weight.data = weight.data, weight.data * 2
    weight.data = before


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda weight: weight.mul_(0.5),
    "of a part": lambda weight: weight.detach()[1:].mul_(0.5),
    "of several": lambda weight: torch._foreach_mul_([weight], 0.5),
    "through data": lambda weight: weight.data.clamp_(-1, 1),
    "through a part of data": lambda weight: weight.data[0].fill_(0.5),
    "other data": lambda weight: setattr(weight, "data", weight.data.clamp(-1, 1)),
}
READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "a sum": lambda weight: weight.sum(),
    "a sum of data": lambda weight: weight.data.sum(),
    "a copy": lambda weight: weight.data.clone().mul_(2),
    "other data for a time": _shows_other_data,
}


@pytest.mark.parametrize("is_here", [True, False])
@pytest.mark.parametrize("name", [*WRITES, *READS])
def test_a_write_shows_wherever_the_weight_is(name: str, is_here: bool) -> None:
    weight, other = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))
    if not is_here:
        make_placeholder(weight, weight.shape, Origin("weight", Guard(lambda _: "rank 1")))
    weights = {"weight": weight, "other": other}
    with torch.no_grad(), written(weights, {id(one): name for name, one in weights.items()}) as found:
        (WRITES | READS)[name](weight)
    assert list(found()) == (["weight"] if name in WRITES else [])


def test_microbatches_side_by_side_may_clamp_a_weight_before_their_layers() -> None:
    weight = nn.Parameter(torch.randn(8))
    weights = {"weight": weight}
    looks = Looks(weights)
    watched: Any = SimpleNamespace(weights=weights, names={id(weight): "weight"}, buffers={}, looks=looks)
    step = SimpleNamespace(weights_written={}, trains=True, fails=False, name="training_step", hooks="on_train_batch")
    around, run = _Step(watched, step), cast("Any", None)
    try:
        with torch.no_grad(), ExitStack() as first, ExitStack() as second:
            first.enter_context(around.forward(run, run))
            weight.clamp_(-0.1, 0.1)
            second.enter_context(around.forward(run, run))
            weight.clamp_(-0.1, 0.1)
            first.close()
    finally:
        looks.remove()
    assert step.weights_written == {"weight": 1}


def test_a_buffer_that_is_no_number_is_written_by_nobody() -> None:
    buffer = torch.tensor([float("nan"), 1.0])
    before, other = _Buffer(buffer), _Buffer(buffer)
    assert before == other
    buffer.data[1] = 2.0
    assert before != _Buffer(buffer)
    before, buffer.data = _Buffer(buffer), torch.cat([buffer, buffer])  # which no version tells
    assert before != _Buffer(buffer)


def test_of_several_that_notice_accesses_each_does_and_they_end_in_any_order() -> None:
    weight, seen = nn.Parameter(torch.ones(3)), list[str]()
    first, second = accesses(lambda *_: seen.append("first")), accesses(lambda *_: seen.append("second"))
    first.__enter__()
    second.__enter__()
    weight.data = weight.data * 2
    first.__exit__(None, None, None)
    weight.data.sum()
    second.__exit__(None, None, None)
    assert seen == ["first", "second", "first", "second", "second"]
    assert "data" not in vars(nn.Parameter)


class Writing(Toy):
    """Writes in every second step, before it computes or after that."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.when, self.write = STEPS[name]
        nn.init.constant_(self.decoder.layers[0].up.weight, 0.01)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for when in ("before", "after"):
            loss = self.loss(batch) if when == "after" else None
            if when == self.when and batch_idx % 2:
                self.write(self)
        return loss


def _for_a_time(module: Toy) -> None:
    weight = module.encoder.patch.weight
    before = weight.detach().clone()
    weight.data.mul_(2)
    weight.data.copy_(before)


def _in_place(factor: float, weight: Any) -> None:
    with torch.no_grad():
        weight.mul_(factor)


STEPS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a clamp before": ("before", lambda m: m.decoder.layers[0].up.weight.data.clamp_(-0.005, 0.005)),
    "a norm before": ("before", lambda m: m.decoder.head.weight.data.copy_(m.decoder.head.weight.detach().sign())),
    "other values for a time": ("after", _for_a_time),
    "a clamp after": ("after", lambda m: m.decoder.layers[0].up.weight.data.clamp_(-0.005, 0.005)),
    "a clamp of the last layer after": ("after", lambda m: m.decoder.head.weight.data.clamp_(-0.005, 0.005)),
    "a decay before": ("before", lambda m: m.decoder.layers[0].up.weight.data.mul_(0.99)),
    "a decay in place before": ("before", lambda m: _in_place(0.99, m.encoder.patch.weight)),
    "a decay after": ("after", lambda m: _in_place(0.99, m.encoder.patch.weight)),
}
EVALUATIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "an evaluation that decays a weight": ("after", STEPS["a decay before"][1]),
    "an evaluation with other values for a time": ("after", _for_a_time),
}
PAST_TORCH: dict[str, Callable[[Any], Any]] = {
    "an array of a weight": lambda m: m.decoder.head.weight.detach().numpy().__imul__(0.9),
    "an array of data": lambda m: m.encoder.patch.weight.data.numpy().__imul__(0.9),
}


class Evaluating(Toy):
    """Writes after each validation step."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.write = EVALUATIONS[name][1]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.write(self)


class PastTorch(Toy):
    """Writes to an array of numpy, in every second step."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.write = PAST_TORCH[name]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 2:
            self.write(self)
        return self.loss(batch) + 0 * torch.from_numpy(np.ones(1)).sum()


class Quantised(Toy):
    """Has a weight of integers, and speaks of numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False)

    def on_train_epoch_end(self) -> None:
        np.mean([1.0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_values_are_others_where_signs_or_places_change(dtype: torch.dtype) -> None:
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    for other in (-weight, weight.flip(0), weight * 2):
        assert _differ(_norm(weight), _norm(other))
    assert not _differ(_norm(weight), _norm(weight.clone()))


def test_tensors_show_arrays_as_before_but_for_the_time_of_a_watch() -> None:
    before, weight = torch.Tensor.numpy, nn.Parameter(torch.ones(3))
    looks = Looks({"weight": weight})
    during = torch.Tensor.numpy
    with looks.noted() as outer, looks.noted() as inner:
        assert torch.Tensor.numpy is during  # a class that changes in each run is slow to look up
        weight.detach().numpy()[0] = 2
        torch.ones(3).numpy()
    weight.detach().numpy()[1] = 2
    for found in (outer, inner):
        (memory, was), *others = found.values()
        assert not others
        assert memory.data_ptr() == weight.data_ptr()
        assert was.tolist() == [1, 1, 1]
    looks.remove()
    assert torch.Tensor.numpy is before


def test_weights_that_have_no_norm_are_left_alone() -> None:
    """the whole model: rank 0"""
    run_ranks(1, lambda rank: Run(ALONE).trainer(max_steps=1).fit(Quantised(), Run(ALONE).training(), Run().loader(8)))


ALONE = Layout({"model": Modality()}, 1)
REPEATABLE = {"a clamp before", "a norm before", "other values for a time"}
REPEATABLE |= {"an evaluation with other values for a time"}


def trained(run: Run, name: str) -> Any:
    kind = Evaluating if name in EVALUATIONS else PastTorch if name in PAST_TORCH else Writing
    module = kind(name)
    run.trainer(limit_val_batches=int(kind is Evaluating), num_sanity_val_steps=0).fit(
        module, run.training(), run.loader(8)
    )
    return weights(module)


def test_a_write_in_several_microbatches_is_that_of_one_process_or_refused() -> None:
    """the whole model: rank 0"""

    def on_rank(rank: int) -> dict[str, Any]:
        for name in [*STEPS, *EVALUATIONS, *PAST_TORCH]:
            if name in REPEATABLE:
                continue
            with pytest.raises(ConfigError, match="a write to"):
                trained(Run(ALONE), name)
        return {name: trained(Run(ALONE), name) for name in REPEATABLE}

    found = run_ranks(1, on_rank)[0]
    for name, got in found.items():
        assert_same(got, alone(lambda run, name=name: trained(run, name)))


def test_a_write_in_one_microbatch_is_that_of_one_process() -> None:
    """vision: rank 0, language: rank 1"""
    late = {"a decay after", "other values for a time"}  # of the encoder, whose rank has ended its step
    names = [name for name in STEPS if name not in late] + ["an evaluation that decays a weight"]

    def on_rank(rank: int) -> dict[str, Any]:
        return {name: trained(Run(PAIR, {"num_microbatches": 1}), name) for name in names}

    found = run_ranks(2, on_rank)[0]
    for name in names:
        assert_same(found[name], alone(lambda run, name=name: trained(run, name)))


class Counted(nn.Module):
    """Counts its calls in buffers beside no parameter, one set anew, and those of a batch norm."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)

    def forward(self, *args: Any) -> Any:
        features = self.encoder(*args)
        self.calls.add_(1)
        self.mean = 0.9 * self.mean + 0.1 * features.detach().mean()
        return self.norm(features) + self.mean


class CountsSteps(Toy):
    """The step writes to another buffer of the encoder, before its call or after it."""

    is_late = False

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        if not self.is_late:
            self.encoder.steps.add_(1)
        output = super().training_step(batch, batch_idx)
        if self.is_late:
            self.encoder.steps.add_(1)
        return output


def test_an_encoder_writes_to_its_buffers_where_it_shares_ranks_with_stages_of_the_language_model() -> None:
    """language: ranks 0-1, sharing its layers, or as stages; vision: rank 0 for the microbatch, rank 1 for none"""
    vision = Modality(module="encoder", boundary="encoder", colocate_with="language")
    sizes = [{"tp_size": 2}, {"pp_size": 2}]
    layouts = [Layout({"vision": vision, "language": Modality(module="decoder", **size)}, 2) for size in sizes]
    cases = [(layout, is_late) for layout in layouts for is_late in (False, True)]

    def on_rank(rank: int) -> list[dict[str, Any]]:
        return [counted(Run(layout, {"num_microbatches": 1}), is_late) for layout, is_late in cases]

    for got, (_, is_late) in zip(run_ranks(2, on_rank)[0], cases, strict=True):
        assert_same(got, alone(lambda run, is_late=is_late: counted(run, is_late)))


def counted(run: Run, is_late: bool) -> dict[str, Any]:
    module = CountsSteps()
    module.is_late, module.encoder = is_late, Counted(module.encoder)
    run.trainer(num_sanity_val_steps=0).fit(module, run.training(), run.loader(8))
    return weights(module) | dict(module.encoder.named_buffers())
