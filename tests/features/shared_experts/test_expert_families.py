"""The families of experts keep their promises on one process: experts are where they say, and tokens reach them."""

from __future__ import annotations

import warnings

import lightning as L
import pytest
import torch
from torch import Tensor

from .every_model import OTHERS, other
from .expert_case import BATCHED, ExpertCase
from .families import FAMILIES

# each kind of experts, router and batch once; the others differ by names
QUICK = (
    *("gpt_oss", "deepseek_v3", "dbrx", "phimoe", "ernie4_5_vl_moe", "llama4"),
    *(name for name in FAMILIES if name.startswith("handwritten")),
)
ROUTER_LOSSES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe", "granitemoe", "ernie4_5_moe", "dbrx", "phimoe", "jamba"),
    *("qwen3_vl_moe", "qwen3_omni_moe_thinker", "ernie4_5_vl_moe", "glm4v_moe"),
)


pytestmark = pytest.mark.usefixtures("float64")


def loss_of(case: ExpertCase, samples: int = 4) -> tuple[L.LightningModule, Tensor]:
    module = case.build()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*self.trainer.*")  # `self.log` outside a trainer
        loss = module.training_step(case.batch(samples), 0)
    assert isinstance(loss, Tensor)
    return module, loss


def assert_trains(case: ExpertCase) -> None:
    module, loss = loss_of(case)
    loss.backward()
    assert torch.isfinite(loss)
    for path in case.experts:
        parameters = dict(module.get_submodule(path).named_parameters())
        assert parameters, path
        for name, parameter in parameters.items():
            assert parameter.dtype == torch.float64, (path, name)
            assert parameter.grad is not None, (path, name)
            assert torch.isfinite(parameter.grad).all(), (path, name)
    assert any(p.grad.abs().max() > 0 for path in case.experts for p in module.get_submodule(path).parameters())


@pytest.mark.parametrize("name", QUICK)
def test_trains_its_experts(name: str) -> None:
    assert_trains(FAMILIES[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in QUICK])
def test_every_family_trains_its_experts(name: str) -> None:
    assert_trains(FAMILIES[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OTHERS)
def test_every_other_model_trains_its_experts(name: str) -> None:
    case = other(name)
    assert case.experts
    assert_trains(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name, case in FAMILIES.items() if case.interface])
def test_batched_products_give_the_same_loss(name: str) -> None:
    _, eager = loss_of(FAMILIES[name])
    _, batched = loss_of(FAMILIES[name].implemented(BATCHED))
    torch.testing.assert_close(batched, eager, rtol=1e-6, atol=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ROUTER_LOSSES)
def test_a_loss_of_routers_counts(name: str) -> None:
    _, without = loss_of(FAMILIES[name])
    _, with_routers = loss_of(FAMILIES[name].router_loss())
    assert with_routers > without + 0.1
