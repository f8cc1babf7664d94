"""Parameters in one memory, as of weights tied by `.data`, are refused where ranks would have them apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn

from features.toys import PIPE, SHARED, Layout, Run, Toy
from lightning_mm5d import Modality
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.features.refusals.feature import Refusals

REFUSALS = Refusals({"microbatch_size": None, "num_microbatches": 1})
ROWS = Layout({"model": Modality(sharding={"zero_stage": 3})}, 2, 2)
LAYOUTS = {"stages": PIPE, "rows": ROWS, "replicas": SHARED}


@lru_cache
def plan_of(layout: str) -> Any:
    return Run(LAYOUTS[layout]).trainer().strategy.plan(Toy())


def check(layout: str, ties: Callable[[Toy], Any]) -> None:
    toy = Toy()
    ties(toy)
    REFUSALS.check(toy, plan_of(layout), torch.device("cpu"))


def ties_data(toy: Toy) -> None:
    toy.decoder.layers[3].up.weight.data = toy.decoder.layers[0].up.weight.data


def ties_transposed(toy: Toy) -> None:
    toy.decoder.layers[3].down.weight = nn.Parameter(toy.decoder.layers[0].up.weight.t())


def ties_within_a_stage(toy: Toy) -> None:
    toy.decoder.layers[1].up.weight.data = toy.decoder.layers[0].up.weight.data


def keeps_a_live_buffer(toy: Toy) -> None:
    toy.register_buffer("probe", toy.decoder.layers[0].up.weight.detach()[2:4])


def keeps_data_in_an_attribute(toy: Toy) -> None:
    toy.before = {"up": [toy.decoder.layers[0].up.weight.data]}


def keeps_itself_and_a_copy_in_attributes(toy: Toy) -> None:
    weight = toy.decoder.layers[0].up.weight
    toy.weights, toy.before = [weight], weight.detach().clone()


def ties_frozen(toy: Toy) -> None:
    ties_data(toy)
    toy.decoder.requires_grad_(False)


def ties_as_one(toy: Toy) -> None:
    toy.decoder.layers[3].up.weight = toy.decoder.layers[0].up.weight


def takes_columns_of_one_tensor(toy: Toy) -> None:
    both = torch.randn(16, 16, dtype=torch.float64)
    toy.decoder.layers[0].up.weight.data, toy.decoder.layers[3].up.weight.data = both.split(8, dim=1)


@pytest.mark.parametrize("layout", ["stages", "rows"])
@pytest.mark.parametrize("ties", [ties_data, ties_transposed, keeps_a_live_buffer, keeps_data_in_an_attribute])
def test_a_parameter_in_the_memory_of_another_tensor_is_refused(layout: str, ties: Callable[[Toy], Any]) -> None:
    with pytest.raises(ConfigError, match=r"the memory of decoder\.layers\.0\.up\.weight.*nn\.Parameter"):
        check(layout, ties)


def test_two_parameters_of_one_stage_may_share_memory_and_two_of_rows_may_not() -> None:
    check("stages", ties_within_a_stage)
    with pytest.raises(ConfigError, match="the memory of"):
        check("rows", ties_within_a_stage)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "ties", [ties_frozen, ties_as_one, takes_columns_of_one_tensor, keeps_itself_and_a_copy_in_attributes]
)
def test_values_that_no_update_shares_run(layout: str, ties: Callable[[Toy], Any]) -> None:
    check(layout, ties)
