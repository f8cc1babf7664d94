"""A module of the meta device initialises itself, to what an ordinary construction gives where that is possible."""

from __future__ import annotations

import pytest
import torch

from lightning_mm5d.weights import initialize_meta
from zoo import CASES

from .construction import assert_equal_modules, materialized, seed_all

NO_INITIALISER = {"handwritten_dual"}  # a scale in a module without reset_parameters


@pytest.mark.parametrize("name", sorted(CASES.keys() - NO_INITIALISER))
def test_families_of_the_zoo_initialise_themselves_as_ever(name: str) -> None:
    seed_all()
    expected = CASES[name].make_module()
    state = torch.get_rng_state()
    with torch.device("meta"):
        module = CASES[name].make_module()
    seed_all()
    materialized(module, initialize_meta(module))
    assert torch.equal(torch.get_rng_state(), state)
    assert_equal_modules(module, expected)
