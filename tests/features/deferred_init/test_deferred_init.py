"""A module that is built deferred and made later equals one that was built as ever."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.features.deferred_init.deferred_init import DeferredInit
from lightning_mm5d.features.deferred_init.deferred_weights import filling
from zoo import CASES

from .construction import LiveBytes, assert_as_ever, assert_equal_modules, deferred, materialized, seed_all
from .odd_modules import ODD


@pytest.mark.parametrize("name", list(CASES))
def test_families_of_the_zoo_come_out_as_ever(name: str) -> None:
    assert_as_ever(CASES[name].make_module)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # old weight norm; peft asks for a deprecated property
@pytest.mark.parametrize("name", list(ODD))
def test_odd_constructors_come_out_as_ever(name: str) -> None:
    assert_as_ever(ODD[name])


class Averaged(nn.Module):
    """A stack of layers, a copy of it, and an initialisation of everything once more."""

    def __init__(self, layers: int = 6, width: int = 64) -> None:
        super().__init__()
        self.online = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.target = copy.deepcopy(self.online)
        for layer in self.online:
            nn.init.orthogonal_(layer.weight)
        for layer in self.target:
            nn.init.kaiming_normal_(layer.weight)
            layer.weight.data.mul_(0.1)


def test_recording_takes_no_memory_and_replay_that_of_a_few_tensors() -> None:
    with LiveBytes() as live:
        module, weights = deferred(Averaged)
        assert live.peak < 64 * 64 * 4, "recording must not make a weight"
        largest, made = 64 * 64 * 4, []
        live.peak = 0
        weights.materialize(module, lambda names, _: made.append(names))
    assert len(made) == 12
    assert live.peak <= 8 * largest  # orthogonal_ has several temporaries; all weights are twelve


def test_a_value_is_handed_over_before_the_next_is_made() -> None:
    module, weights = deferred(lambda: nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(20))))
    with LiveBytes() as live:
        weights.materialize(module, lambda names, value: None)
    assert live.peak <= 3 * 16 * 16 * 4


def test_draws_from_the_random_state_of_another_process() -> None:
    torch.manual_seed(5)
    expected = nn.Linear(3, 3)
    torch.manual_seed(5)
    _, weights_of_rank_0 = deferred(lambda: nn.Linear(3, 3))
    torch.manual_seed(6)
    module, weights = deferred(lambda: nn.Linear(3, 3))
    weights.materialize(module, filling(module), random_state=weights_of_rank_0.random_state)
    assert_equal_modules(module, expected)


def test_what_was_read_of_random_values_binds_the_random_state() -> None:
    def build() -> nn.Module:
        return nn.Linear(3, 2 if torch.rand(()) > 2 else 3)

    torch.manual_seed(5)
    _, other = deferred(build)
    torch.manual_seed(6)
    module, weights = deferred(build)
    with pytest.raises(ConfigError, match="of a random value, with another random state"):
        weights.materialize(module, filling(module), random_state=other.random_state)
    weights.materialize(module, filling(module), random_state=weights.random_state)


def test_random_values_are_read_as_they_will_be_drawn() -> None:
    read: list[list[float]] = []

    def build() -> nn.Module:
        module = nn.Linear(4, 4)
        torch.rand(3)
        module.register_buffer("drawn", torch.randn(3))
        read.append([*module.drawn.tolist(), module.weight.sum().item()])
        module.more = nn.Parameter(torch.randn(2))
        while module.more.data[0] < 1:  # rejection
            module.more.data.normal_()
        return module

    assert_as_ever(build)
    assert read[0] == read[1]


def test_a_draw_that_depends_on_drawn_values_cannot_be_read() -> None:
    with pytest.raises(ConfigError, match="poisson"), DeferredInit():
        torch.poisson(torch.rand(3)).tolist()


def test_draws_that_depend_on_values_come_out_as_ever() -> None:
    def build() -> nn.Module:
        module = nn.Module()
        module.register_buffer("counts", torch.poisson(torch.rand(50) * 5))
        torch.multinomial(torch.rand(9), 3)
        module.register_parameter("weight", nn.Parameter(torch.randn(4)))
        return module

    assert_as_ever(build)


@pytest.mark.parametrize("name", ["copied", "seeded", "direct"])
def test_a_module_and_its_record_can_be_pickled_and_copied(name: str) -> None:
    seed_all()
    expected = ODD[name]()
    seed_all()
    module, weights = deferred(ODD[name])
    for other in (pickle.loads(pickle.dumps((module, weights))), copy.deepcopy((module, weights))):
        assert_equal_modules(materialized(*other), expected)


def test_a_record_keeps_no_module_alive() -> None:
    module, weights = deferred(lambda: nn.Linear(3, 3))
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
    assert weights.names == {"weight", "bias"}


def test_a_context_may_be_entered_again() -> None:
    def first() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3))

    def second(module: nn.Module) -> nn.Module:
        module.append(nn.Linear(3, 2))
        module[0].weight.data.add_(module[1].weight.data.t())
        return module

    seed_all()
    expected = second(first())
    seed_all()
    recorder = DeferredInit()
    with recorder:
        module = first()
    with recorder:
        second(module)
    assert_equal_modules(materialized(module, recorder.weights(module)), expected)


def test_layers_of_before_may_be_written_within() -> None:
    expected, module = nn.Linear(3, 3), nn.Linear(3, 3)
    module.load_state_dict(expected.state_dict())
    seed_all()
    nn.init.normal_(expected.weight)
    expected.weight.data[0] = expected.bias.data
    seed_all()
    with DeferredInit() as recorder:
        nn.init.normal_(module.weight)
        module.weight.data[0] = module.bias.data
    weights = recorder.weights(module)
    assert weights.names == {"weight"}
    assert_equal_modules(materialized(module, weights), expected)


def test_names_what_an_ordinary_construction_leaves_as_it_was() -> None:
    def build() -> nn.Module:
        module = nn.Linear(3, 3)
        module.register_parameter("garbage", nn.Parameter(torch.empty(3)))
        module.register_parameter("partly", nn.Parameter(torch.empty(3)))
        module.partly.data[:2] = 1
        module.register_parameter("together", nn.Parameter(torch.empty(3)))
        module.together.data[:2] = 1
        module.together.data[2:] = 2
        return module

    module, weights = deferred(build)
    assert weights.unwritten == ("garbage", "partly")
    materialized(module, weights)
    assert module.partly.tolist() == [1, 1, 0]


def test_tensors_of_the_meta_device_stay_what_they_are() -> None:
    def build() -> nn.Module:
        with torch.device("meta"):
            module = nn.Sequential(nn.Linear(2, 2))
        return module.append(nn.Linear(2, 2))

    state = torch.get_rng_state()
    _, weights = deferred(build)
    assert weights.unknown == ("0.weight", "0.bias")
    assert weights.names == {"1.weight", "1.bias"}
    assert torch.equal(torch.get_rng_state(), state)


def test_refuses_a_weight_that_is_computed_from_the_meta_device() -> None:
    with DeferredInit() as recorder:
        module = nn.Linear(2, 2)
        module.weight.data.copy_(torch.empty(2, 2, device="meta"))
    with pytest.raises(ConfigError, match="weight: got 'a value computed from a tensor of the meta device'"):
        recorder.weights(module)


def test_leaves_torch_as_it_was_after_an_error() -> None:
    before = nn.init._no_grad_trunc_normal_
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), DeferredInit():
        nn.Linear(2, 1 // 0)
    assert nn.init._no_grad_trunc_normal_ is before
    assert not nn.Linear(2, 2).weight.is_meta
    torch.set_rng_state(state)
